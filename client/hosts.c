/* hosts.c - see hosts.h: their endpoints, sockets and sessions; hosts_route.c chooses among them. */
#include "client/hosts.h"
#include "client/call.h"
#include "common/clock.h"
#include "common/key_file.h"
#include "common/options.h"
#include "common/random.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FIRST_BACKOFF_US 1000000u
#define MAX_BACKOFF_US   30000000u

/* ---- opening ---- */

static int set_runtime_dir(struct host *host, const char *runtime_dir, struct hcattn_error *error)
{
    char directory[OPTIONS_PATH_SIZE], reason[OPTIONS_ERROR_SIZE];
    if (runtime_dir) {
        int n = snprintf(directory, sizeof(directory), "%s", runtime_dir);
        if (n < 0 || (size_t)n >= sizeof(directory))
            return call_fail(error, HCATTN_INVALID_ARGUMENT, "the path of the runtime directory is too long");
    } else if (options_runtime_dir(NULL, directory, reason) < 0) {
        return call_fail(error, HCATTN_INVALID_ARGUMENT, "%s", reason);
    }
    snprintf(host->path, sizeof(host->path), "%s/client.sock", directory);
    snprintf(host->endpoint, sizeof(host->endpoint), "ipc://%s", host->path);
    host->from_runtime_dir = true;
    return 0;
}

static int read_server_key(struct host *host, const char *path, const struct hcattn_config *config,
                           struct hcattn_error *error)
{
    char reason[KEY_FILE_ERROR_SIZE];
    if (!path && config->key)
        return call_fail(error, HCATTN_INVALID_ARGUMENT, "no server key for %s, but a key of our own", host->endpoint);
    if (!path)
        return 0;
    if (!config->key)
        return call_fail(error, HCATTN_INVALID_ARGUMENT, "a server key for %s, but no key of our own", host->endpoint);
    if (key_file_public(path, host->server_key, reason) < 0)
        return call_fail(error, HCATTN_INVALID_ARGUMENT, "%s", reason);
    host->uses_keys = true;
    return 0;
}

/* "tcp://host:port", "tcp://host:port#FILE" or "ipc:///path", n characters of `text`. */
static int set_endpoint(struct host *host, const char *text, size_t n, const struct hcattn_config *config,
                        struct hcattn_error *error)
{
    char copy[HOSTS_ENDPOINT + 4096];
    if (n >= sizeof(copy))
        return call_fail(error, HCATTN_INVALID_ARGUMENT, "the endpoint is too long");
    memcpy(copy, text, n);
    copy[n] = '\0';
    bool tcp = strncmp(copy, "tcp://", 6) == 0;
    char *key = tcp ? strchr(copy, '#') : NULL;
    if (key)
        *key++ = '\0';
    if (strlen(copy) >= sizeof(host->endpoint))
        return call_fail(error, HCATTN_INVALID_ARGUMENT, "the endpoint is too long");
    snprintf(host->endpoint, sizeof(host->endpoint), "%.255s", copy);
    if (strncmp(copy, "ipc://", 6) == 0 && strlen(copy) - 6 < sizeof(host->path))
        snprintf(host->path, sizeof(host->path), "%.127s", copy + 6);
    return tcp ? read_server_key(host, key ? key : config->server_key, config, error) : 0;
}

static int set_endpoints(struct hosts *hosts, const struct hcattn_config *config, struct hcattn_error *error)
{
    static const char blanks[] = " \t";
    for (const char *at = config->endpoint;; at++) {
        at += strspn(at, blanks);
        size_t n = strcspn(at, ","), n_text = n;
        while (n_text > 0 && strchr(blanks, at[n_text - 1]))
            n_text--;
        if (n_text == 0 && (hosts->n > 0 || at[n] == ','))
            return call_fail(error, HCATTN_INVALID_ARGUMENT, "an endpoint of the list is empty");
        if (hosts->n == HOSTS_MAX)
            return call_fail(error, HCATTN_INVALID_ARGUMENT, "more than %u endpoints", HOSTS_MAX);
        struct host *host = &hosts->all[hosts->n];
        int result = set_endpoint(host, at, n_text, config, error);
        if (result < 0)
            return result;
        for (size_t i = 0; i < hosts->n; i++) {
            if (strcmp(hosts->all[i].endpoint, host->endpoint) == 0)
                return call_fail(error, HCATTN_INVALID_ARGUMENT, "%s is named twice", host->endpoint);
        }
        hosts->n++;
        at += n;
        if (*at == '\0')
            return 0;
    }
}

static int open_socket(struct hosts *hosts, struct host *host)
{
    struct socket *socket = NULL;
    int result = socket_new_dealer(hosts->sockets, random_u64(), 0, &socket);
    if (!result && host->uses_keys)
        result = socket_use_keys(socket, host->server_key, hosts->key);
    if (!result && !host->path[0])
        result = socket_watch(hosts->sockets, socket);
    if (!result)
        result = socket_connect(socket, host->endpoint);
    if (result) {
        socket_free(socket);
        return result;
    }
    host->socket = socket;
    return 0;
}

static int open_sockets(struct hosts *hosts, struct hcattn_error *error)
{
    int result = socket_context_new(&hosts->sockets);
    if (result)
        return call_fail(error, HCATTN_INTERNAL, "cannot make sockets (errno %d)", -result);
    for (size_t i = 0; i < hosts->n; i++) {
        struct host *host = &hosts->all[i];
        result = open_socket(hosts, host);
        if (result == -EINVAL || result == -ENAMETOOLONG)
            return call_fail(error, HCATTN_INVALID_ARGUMENT, "no endpoint to connect to: %s", host->endpoint);
        if (result)
            return call_fail(error, HCATTN_INTERNAL, "cannot make a socket for %s (errno %d)", host->endpoint, -result);
    }
    return 0;
}

int hosts_open(struct hosts *hosts, const struct hcattn_config *config, struct hcattn_error *error)
{
    char reason[KEY_FILE_ERROR_SIZE];
    hosts->all = calloc(HOSTS_MAX, sizeof(*hosts->all));
    if (!hosts->all)
        return call_fail(error, HCATTN_NO_MEMORY, "no memory for a client");
    if ((config->key || config->server_key) && !socket_has_keys())
        return call_fail(error, HCATTN_NOT_SUPPORTED, "this libzmq was built without CURVE: there can be no keys");
    if (config->key && key_file_secret(config->key, hosts->key, reason) < 0)
        return call_fail(error, HCATTN_INVALID_ARGUMENT, "%s", reason);
    int result;
    if (config->endpoint) {
        result = set_endpoints(hosts, config, error);
    } else {
        hosts->n = 1;
        result = set_runtime_dir(&hosts->all[0], config->runtime_dir, error);
    }
    return result ? result : open_sockets(hosts, error);
}

void hosts_close(struct hosts *hosts)
{
    for (size_t i = 0; hosts->all && i < HOSTS_MAX; i++)
        socket_free(hosts->all[i].socket);
    socket_context_free(hosts->sockets);
    free(hosts->all);
    explicit_bzero(hosts->key, sizeof(hosts->key));
    free(hosts->sessions);
    *hosts = (struct hosts){.n = 0};
}

/* ---- whether they are there ---- */

int hosts_no_answer(struct host *host, struct hcattn_error *error)
{
    const char *at = host->endpoint;
    if (host->from_runtime_dir)
        return call_fail(error, HCATTN_UNAVAILABLE, "no coordinator at %s: start one with 'hcattn up'", host->path);
    switch (socket_state(host->socket)) {
    case SOCKET_REFUSED:
        return call_fail(
            error, HCATTN_UNAVAILABLE,
            "the coordinator at %s refuses this client's key: the public one must be among its client keys", at);
    case SOCKET_MISMATCH:
        return host->uses_keys
                   ? call_fail(error, HCATTN_UNAVAILABLE, "the coordinator at %s uses no keys: connect without", at)
                   : call_fail(error, HCATTN_UNAVAILABLE,
                               "the coordinator at %s takes only clients with keys: a server key and a key are needed",
                               at);
    case SOCKET_HUNG_UP:
        return call_fail(error, HCATTN_UNAVAILABLE, "what listens at %s hangs up: %s", at,
                         host->uses_keys ? "it has another server key, or is no coordinator"
                                         : "it takes only clients with keys, or is no coordinator");
    case SOCKET_REACHED:
        return call_fail(error, HCATTN_UNAVAILABLE, "what listens at %s does not answer", at);
    case SOCKET_UNREACHED:
    case SOCKET_NOBODY:
    case SOCKET_GREETED:
        break;
    }
    return call_fail(error, HCATTN_UNAVAILABLE, "no coordinator answers at %s", at);
}

bool hosts_hopeless(struct host *host)
{
    enum socket_state state = socket_state(host->socket);
    return state == SOCKET_REFUSED || state == SOCKET_MISMATCH;
}

bool hosts_no_file(const struct host *host)
{
    return host->path[0] && access(host->path, F_OK) < 0 && errno == ENOENT;
}

bool hosts_absent(struct host *host)
{
    return hosts_no_file(host) || socket_state(host->socket) == SOCKET_NOBODY || hosts_hopeless(host);
}

void hosts_heard(struct host *host)
{
    host->lost = false;
    host->retry_us = 0;
    host->backoff_us = 0;
}

void hosts_miss(struct host *host)
{
    host->backoff_us = host->backoff_us ? 2 * host->backoff_us : FIRST_BACKOFF_US;
    if (host->backoff_us > MAX_BACKOFF_US)
        host->backoff_us = MAX_BACKOFF_US;
    host->retry_us = clock_deadline_us(host->backoff_us);
}

void hosts_lose(struct hosts *hosts, struct host *host)
{
    hosts_miss(host);
    host->lost = true;
    struct socket *before = host->socket;
    if (open_socket(hosts, host) == 0) /* without resources for another one the old one goes on */
        socket_free(before);
}

/* ---- sessions ---- */

int hosts_find(const struct hosts *hosts, uint64_t session, size_t *ret_host)
{
    for (size_t i = hosts->n_sessions; i-- > 0;) {
        if (hosts->sessions[i].session == session) {
            *ret_host = hosts->sessions[i].host;
            return 0;
        }
    }
    return -ENOENT;
}

void hosts_forget(struct hosts *hosts, uint64_t session)
{
    for (size_t i = hosts->n_sessions; i-- > 0;) {
        if (hosts->sessions[i].session != session)
            continue;
        hosts->n_sessions--;
        memmove(&hosts->sessions[i], &hosts->sessions[i + 1], (hosts->n_sessions - i) * sizeof(*hosts->sessions));
    }
}

void hosts_remember(struct hosts *hosts, uint64_t session, size_t host)
{
    hosts_forget(hosts, session);
    if (hosts->n_sessions == HOSTS_MAX_SESSIONS)
        hosts_forget(hosts, hosts->sessions[0].session);
    if (hosts->n_sessions == hosts->max_sessions) {
        size_t n = hosts->max_sessions ? 2 * hosts->max_sessions : 16;
        void *grown = realloc(hosts->sessions, n * sizeof(*hosts->sessions));
        if (!grown)
            return; /* it is asked for again */
        hosts->sessions = grown;
        hosts->max_sessions = n;
    }
    hosts->sessions[hosts->n_sessions++] = (struct hosts_session){.session = session, .host = host};
}
