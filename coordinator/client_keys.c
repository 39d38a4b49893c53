/* client_keys.c - see client_keys.h. */
#include "coordinator/client_keys.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/clock.h"
#include "common/key_file.h"
#include "common/log.h"

#define RATE_US 1000000u /* of lines about clients that are refused */

struct client_keys {
    const char *clients_path;
    char secret[SOCKET_KEY_SIZE];
    struct key_list clients; /* sorted */
    struct stat read;        /* of the file when it was read */
    struct socket *gate;
    uint64_t told_us;
    uint64_t n_quiet; /* refusals that no line told */
};

static int compare(const void *a, const void *b)
{
    return memcmp(a, b, SOCKET_KEY_SIZE);
}

static int read_clients(struct client_keys *client_keys, char error[CLIENT_KEYS_ERROR_BYTES])
{
    struct stat status;
    if (stat(client_keys->clients_path, &status) < 0)
        memset(&status, 0, sizeof(status)); /* reading it says why */
    struct key_list list;
    int result = key_file_list(client_keys->clients_path, &list, error);
    client_keys->read = status;
    if (result != 0)
        return result;
    qsort(list.keys, list.n_keys, sizeof(*list.keys), compare);
    free(client_keys->clients.keys);
    client_keys->clients = list;
    return 0;
}

int client_keys_new(struct socket_context *context, const char *secret_path, const char *clients_path,
                    char error[CLIENT_KEYS_ERROR_BYTES], struct client_keys **ret_client_keys)
{
    static_assert(CLIENT_KEYS_ERROR_BYTES >= KEY_FILE_ERROR_SIZE, "its sentences fit");
    if (!socket_has_keys()) {
        snprintf(error, CLIENT_KEYS_ERROR_BYTES,
                 "this libzmq was built without CURVE: it cannot serve clients with keys");
        return -EOPNOTSUPP;
    }
    struct client_keys *client_keys = calloc(1, sizeof(*client_keys));
    if (!client_keys) {
        snprintf(error, CLIENT_KEYS_ERROR_BYTES, "out of memory");
        return -ENOMEM;
    }
    client_keys->clients_path = clients_path;
    int result = key_file_secret(secret_path, client_keys->secret, error);
    if (result == 0)
        result = read_clients(client_keys, error);
    if (result == 0) {
        result = socket_new_gate(context, &client_keys->gate);
        if (result != 0)
            snprintf(error, CLIENT_KEYS_ERROR_BYTES, "cannot judge clients: %s", strerror(-result));
    }
    if (result != 0) {
        client_keys_free(client_keys);
        return result;
    }
    *ret_client_keys = client_keys;
    return 0;
}

struct client_keys *client_keys_free(struct client_keys *client_keys)
{
    if (!client_keys)
        return NULL;
    socket_free(client_keys->gate);
    free(client_keys->clients.keys);
    explicit_bzero(client_keys->secret, sizeof(client_keys->secret));
    free(client_keys);
    return NULL;
}

int client_keys_guard(const struct client_keys *client_keys, struct socket *socket)
{
    return socket_serve_keys(socket, client_keys->secret);
}

struct socket *client_keys_socket(const struct client_keys *client_keys)
{
    return client_keys ? client_keys->gate : NULL;
}

size_t client_keys_count(const struct client_keys *client_keys)
{
    return client_keys->clients.n_keys;
}

/* The file may have got a key, or lost one, since. */
static void look_again(struct client_keys *client_keys)
{
    struct stat status;
    char error[CLIENT_KEYS_ERROR_BYTES];
    const struct stat *read = &client_keys->read;
    if (stat(client_keys->clients_path, &status) < 0)
        memset(&status, 0, sizeof(status)); /* not there: said once, as everything else */
    if (status.st_ino == read->st_ino && status.st_dev == read->st_dev && status.st_size == read->st_size &&
        status.st_mtim.tv_sec == read->st_mtim.tv_sec && status.st_mtim.tv_nsec == read->st_mtim.tv_nsec)
        return;
    if (read_clients(client_keys, error) == 0)
        LOG_INFO("%zu clients may connect, says %s", client_keys->clients.n_keys, client_keys->clients_path);
    else
        LOG_ERROR("%s; the %zu keys read before go on", error, client_keys->clients.n_keys);
}

static bool admits(void *context, const char *key, const char *address)
{
    struct client_keys *client_keys = context;
    look_again(client_keys);
    if (bsearch(key, client_keys->clients.keys, client_keys->clients.n_keys, sizeof(*client_keys->clients.keys),
                compare))
        return true;
    uint64_t now_us = clock_now_us();
    if (now_us - client_keys->told_us < RATE_US) {
        client_keys->n_quiet++;
        return false;
    }
    LOG_WARNING("a client at %s is refused: its key %s is not in %s (%llu more)", address, key,
                client_keys->clients_path, (unsigned long long)client_keys->n_quiet);
    client_keys->told_us = now_us;
    client_keys->n_quiet = 0;
    return false;
}

void client_keys_decide(struct client_keys *client_keys)
{
    int result = client_keys ? socket_gate(client_keys->gate, admits, client_keys) : 0;
    if (result != 0)
        LOG_ERROR("cannot judge clients: %s", strerror(-result));
}
