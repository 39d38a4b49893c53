#include "tests/system/volley.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/socket.h"
#include "tests/system/rows.h"

#ifdef HCATTN_SANITIZED
enum { MAX_GROWTH_MIB = 512 }; /* freed memory stays in quarantine for a while */
#else
enum { MAX_GROWTH_MIB = 96 };
#endif
enum { CALL_MS = 60000 * PATIENCE, WELL_S = 20 * PATIENCE, MAX_LOG_GROWTH = 1 << 20, N_PROMPT = 70, N_TOKENS = 8 };

/* ---- is it well? ---- */

static uint32_t count_fds(pid_t pid)
{
    char path[64];
    uint32_t n = 0;
    snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    DIR *entries = opendir(path);
    if (entries == NULL)
        return 0; /* it is just dying */
    while (readdir(entries) != NULL)
        n++;
    closedir(entries);
    return n;
}

static uint64_t rss_of(pid_t pid)
{
    char path[64];
    unsigned long long total, resident, shared;
    snprintf(path, sizeof(path), "/proc/%d/statm", (int)pid);
    FILE *file = fopen(path, "r");
    if (file == NULL)
        return 0;
    assert_int_equal(fscanf(file, "%llu %llu %llu", &total, &resident, &shared), 3);
    fclose(file);
    return (resident - shared) * 4096; /* segments are shared memory, and full or empty as the stores please */
}

static uint64_t log_bytes_of(const struct volley *volley)
{
    char path[96];
    struct stat status;
    assert_int_equal(stat(volley_path(volley, "log", path), &status), 0);
    return (uint64_t)status.st_size;
}

static void generate(struct volley *volley, struct answer *answer)
{
    uint32_t ids[N_PROMPT];
    for (uint32_t i = 0; i < N_PROMPT; i++)
        ids[i] = (i * 31 + 7) % 256;
    service_generate_ids(volley->service->client, ids, N_PROMPT, N_TOKENS, answer);
}

static void note_processes(struct volley *volley)
{
    struct hcattn_stats stats;
    assert_int_equal(hcattn_stats(volley->service->client, CALL_MS, &stats, NULL), 0);
    assert_true(stats.n_processes <= VOLLEY_MAX_PROCESSES);
    volley->n_processes = (uint32_t)stats.n_processes;
    for (size_t i = 0; i < stats.n_processes; i++) {
        struct volley_process *process = &volley->processes[i];
        *process = (struct volley_process){.index = stats.processes[i].index,
                                           .incarnation = stats.processes[i].incarnation,
                                           .pid = (pid_t)stats.processes[i].pid};
        snprintf(process->program, sizeof(process->program), "%s", stats.processes[i].program);
        process->n_fds = count_fds(process->pid);
        process->rss_bytes = rss_of(process->pid);
    }
    hcattn_stats_free(&stats);
}

void volley_begin(struct volley *volley, struct service *service, uint32_t n_stores)
{
    *volley = (struct volley){.service = service, .n_stores = n_stores};
    generate(volley, &volley->truth);
    note_processes(volley);
    volley->log_bytes = log_bytes_of(volley);
}

void volley_start(struct volley *volley, struct service *service)
{
    service_start(service,
                  (const char *const[]){"--model", service_tiny_model(""), "--stores", "2", "--memory", "64MiB", NULL},
                  NULL);
    volley_begin(volley, service, VOLLEY_STORES);
}

void volley_stop(struct volley *volley)
{
    struct service *service = volley->service;
    volley_end(volley);
    service_stop(service);
}

void volley_end(struct volley *volley)
{
    service_answer_free(&volley->truth);
}

static void assert_answers(struct volley *volley)
{
    struct answer answer = {0};
    generate(volley, &answer);
    service_answer_assert_equal(&volley->truth, &answer);
    service_answer_free(&answer);
}

static void assert_no_blocks(struct volley *volley)
{
    uint64_t deadline = clock_deadline_us((uint64_t)WELL_S * 1000000);
    while (rows_n_used_blocks(volley->service, volley->n_stores) != 0 && clock_now_us() < deadline)
        clock_sleep_us(20000);
    assert_int_equal(rows_n_used_blocks(volley->service, volley->n_stores), 0);
}

static void assert_no_leak(const struct volley_process *process)
{
    uint64_t deadline = clock_deadline_us((uint64_t)WELL_S * 1000000);
    while (count_fds(process->pid) > process->n_fds && clock_now_us() < deadline)
        clock_sleep_us(20000);
    if (count_fds(process->pid) > process->n_fds)
        fail_msg("%s %u holds %u descriptors, %u before", process->program, process->index, count_fds(process->pid),
                 process->n_fds);
    uint64_t now = rss_of(process->pid);
    if (now > process->rss_bytes + ((uint64_t)MAX_GROWTH_MIB << 20))
        fail_msg("%s %u has %llu bytes, %llu before", process->program, process->index, (unsigned long long)now,
                 (unsigned long long)process->rss_bytes);
}

void volley_assert_well(struct volley *volley)
{
    struct hcattn_stats stats;
    assert_answers(volley);
    assert_int_equal(hcattn_stats(volley->service->client, CALL_MS, &stats, NULL), 0);
    assert_int_equal(stats.n_processes, volley->n_processes);
    for (size_t i = 0; i < stats.n_processes; i++) {
        const struct hcattn_process_stats *now = &stats.processes[i];
        const struct volley_process *before = volley_process(volley, now->program, now->index);
        if (now->pid != (uint32_t)before->pid || strcmp(now->state, "ready") != 0) {
            service_show_log(volley->service);
            fail_msg("%s %u is pid %u now, %s; it was pid %d", now->program, now->index, now->pid, now->state,
                     (int)before->pid);
        }
        assert_no_leak(before);
    }
    hcattn_stats_free(&stats);
    assert_no_blocks(volley);
    uint64_t log_bytes = log_bytes_of(volley);
    if (log_bytes > volley->log_bytes + MAX_LOG_GROWTH)
        fail_msg("the log has grown by %llu bytes", (unsigned long long)(log_bytes - volley->log_bytes));
    volley->log_bytes = log_bytes;
}

void volley_assert_recovered(struct volley *volley, pid_t killed)
{
    uint64_t deadline = clock_deadline_us((uint64_t)WELL_S * 1000000);
    bool there = true;
    while (there && clock_now_us() < deadline) {
        clock_sleep_us(50000);
        note_processes(volley);
        there = false;
        for (uint32_t i = 0; i < volley->n_processes; i++)
            there = there || volley->processes[i].pid == killed;
    }
    assert_false(there);
    service_wait_ready(volley->service);
    assert_answers(volley);
    note_processes(volley);
    assert_no_blocks(volley);
}

const struct volley_process *volley_process(const struct volley *volley, const char *program, uint32_t index)
{
    for (uint32_t i = 0; i < volley->n_processes; i++)
        if (strcmp(volley->processes[i].program, program) == 0 && volley->processes[i].index == index)
            return &volley->processes[i];
    fail_msg("no process %s %u", program, index);
    return NULL;
}

char *volley_path(const struct volley *volley, const char *socket, char path[96])
{
    snprintf(path, 96, "%s/%s", volley->service->directory, socket);
    return path;
}

uint64_t volley_cpu_us(pid_t pid)
{
    char path[64], line[1024], *after;
    unsigned long long user, kernel;
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    assert_non_null(fgets(line, sizeof(line), file));
    fclose(file);
    after = strrchr(line, ')'); /* the name of the program may hold anything */
    assert_non_null(after);
    assert_int_equal(sscanf(after + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu", &user, &kernel), 2);
    return (user + kernel) * (1000000 / (uint64_t)sysconf(_SC_CLK_TCK));
}

/* ---- randomness ---- */

uint32_t volley_random(uint64_t *state, uint32_t bound)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33) % bound;
}

void volley_random_bytes(uint64_t *state, void *bytes, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++)
        ((uint8_t *)bytes)[i] = (uint8_t)volley_random(state, 256);
}

/* ---- raw bytes ---- */

int volley_connect_soon(const struct volley *volley, const char *socket_name, int type)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    volley_path(volley, socket_name, address.sun_path);
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    assert_true(fd >= 0);
    if (connect(fd, (const struct sockaddr *)&address, sizeof(address)) == 0)
        return fd;
    close(fd);
    return -1;
}

int volley_connect(const struct volley *volley, const char *socket_name, int type)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    volley_path(volley, socket_name, address.sun_path);
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    if (connect(fd, (const struct sockaddr *)&address, sizeof(address)) < 0)
        fail_msg("%s: %s", address.sun_path, strerror(errno));
    struct timeval patience = {.tv_sec = 5};
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience)), 0);
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), 0);
    return fd;
}

void volley_send(int fd, const void *bytes, size_t n_bytes)
{
    const uint8_t *from = bytes;
    do {
        ssize_t n = send(fd, from, n_bytes, MSG_NOSIGNAL);
        if (n < 0)
            return;
        from += n;
        n_bytes -= (size_t)n;
    } while (n_bytes > 0);
}

void volley_send_fds(int fd, const void *bytes, size_t n_bytes, int sent_fd, uint32_t n_fds)
{
    enum { MAX_FDS = 253 }; /* the kernel's limit */
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(MAX_FDS * sizeof(int))];
    } control;
    struct iovec part = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = n_bytes};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = CMSG_SPACE(n_fds * sizeof(int))};
    assert_true(n_fds <= MAX_FDS);
    memset(&control, 0, sizeof(control));
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
    for (uint32_t i = 0; i < n_fds; i++)
        memcpy(CMSG_DATA(header) + i * sizeof(int), &sent_fd, sizeof(int));
    (void)!sendmsg(fd, &message, MSG_NOSIGNAL);
}

/* ---- ZeroMQ ---- */

void volley_frame(int fd, uint8_t flags, uint64_t told, const void *bytes, size_t n_bytes)
{
    uint8_t head[9] = {flags, (uint8_t)told};
    if (flags & 2)
        for (int i = 0; i < 8; i++)
            head[1 + i] = (uint8_t)(told >> (56 - 8 * i));
    volley_send(fd, head, flags & 2 ? 9 : 2);
    if (n_bytes > 0)
        volley_send(fd, bytes, n_bytes);
}

static void pass_by(int fd, size_t n_bytes)
{
    uint8_t bytes[256];
    while (n_bytes > 0) {
        ssize_t n = recv(fd, bytes, n_bytes < sizeof(bytes) ? n_bytes : sizeof(bytes), 0);
        if (n <= 0)
            return;
        n_bytes -= (size_t)n;
    }
}

void volley_greet(int fd, const void *id, uint8_t id_bytes)
{
    static const uint8_t signature[12] = {0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0};
    static const char start[] = "\x05READY\x0bSocket-Type\0\0\0\x06"
                                "DEALER\x08Identity\0\0";
    uint8_t greeting[64] = {0}, ready[512];
    memcpy(greeting, signature, sizeof(signature));
    memcpy(greeting + 12, "NULL", 4);
    volley_send(fd, greeting, sizeof(greeting));
    size_t n = sizeof(start) - 1;
    memcpy(ready, start, n);
    ready[n++] = 0;
    ready[n++] = id_bytes;
    if (id_bytes > 0)
        memcpy(ready + n, id, id_bytes);
    n += id_bytes;
    volley_frame(fd, n > 255 ? 6 : 4, n, ready, n);
    /* What comes before the other side is ready too is a protocol error. */
    enum { GREETING_BYTES = 64, READY_BYTES = 43 };
    pass_by(fd, GREETING_BYTES + READY_BYTES);
}

/* ---- a client ---- */

struct volley_client {
    struct socket_context *context;
    struct socket *socket;
};

struct volley_client *volley_client_new(const struct volley *volley, const char *socket)
{
    static uint64_t next_id = 0x1234567800000000;
    char path[96], endpoint[112];
    struct volley_client *client = calloc(1, sizeof(*client));
    assert_non_null(client);
    snprintf(endpoint, sizeof(endpoint), "ipc://%s", volley_path(volley, socket, path));
    assert_int_equal(socket_context_new(&client->context), 0);
    assert_int_equal(socket_new_dealer(client->context, ++next_id, 0, &client->socket), 0);
    assert_int_equal(socket_connect(client->socket, endpoint), 0);
    return client;
}

struct volley_client *volley_client_free(struct volley_client *client)
{
    if (client == NULL)
        return NULL;
    socket_free(client->socket);
    socket_context_free(client->context);
    free(client);
    return NULL;
}

void volley_client_send(struct volley_client *client, const void *bytes, size_t n_bytes)
{
    struct frame frame = {bytes, n_bytes};
    assert_int_equal(socket_send(client->socket, &frame, 1, true), 0);
}

void volley_client_ask(struct volley_client *client, const Hcattn__Request *request)
{
    size_t n_bytes = hcattn__request__get_packed_size(request);
    uint8_t *bytes = malloc(n_bytes + 1);
    assert_non_null(bytes);
    hcattn__request__pack(request, bytes);
    volley_client_send(client, bytes, n_bytes);
    free(bytes);
}

Hcattn__Reply *volley_client_reply(struct volley_client *client, uint32_t timeout_ms)
{
    struct socket_item item = {.socket = client->socket, .fd = -1, .events = SOCKET_READABLE};
    struct socket_message *message;
    if (socket_poll(&item, 1, (int)timeout_ms) <= 0 || socket_receive(client->socket, false, &message) != 0)
        return NULL;
    assert_int_equal(message->n_frames, 1);
    Hcattn__Reply *reply = hcattn__reply__unpack(NULL, message->frames[0].n_bytes, message->frames[0].data);
    assert_non_null(reply);
    socket_message_free(message);
    return reply;
}

void volley_client_drain(struct volley_client *client)
{
    Hcattn__Reply *reply;
    while ((reply = volley_client_reply(client, 50)) != NULL)
        hcattn__reply__free_unpacked(reply, NULL);
}

/* ---- a peer ---- */

void volley_say(int fd, Hcattn__Control__Control *message, int sent_fd)
{
    size_t n_bytes = hcattn__control__control__get_packed_size(message);
    uint8_t *bytes = malloc(n_bytes + 1);
    assert_non_null(bytes);
    hcattn__control__control__pack(message, bytes);
    if (sent_fd >= 0)
        volley_send_fds(fd, bytes, n_bytes, sent_fd, 1);
    else
        volley_send(fd, bytes, n_bytes);
    free(bytes);
}

Hcattn__Control__Control *volley_hear(int fd)
{
    static uint8_t bytes[256 << 10];
    struct pollfd item = {.fd = fd, .events = POLLIN};
    assert_int_equal(poll(&item, 1, WELL_S * 1000), 1);
    ssize_t n = recv(fd, bytes, sizeof(bytes), 0);
    if (n <= 0)
        return NULL;
    Hcattn__Control__Control *message = hcattn__control__control__unpack(NULL, (size_t)n, bytes);
    assert_non_null(message);
    return message;
}

void volley_assert_hung_up(int fd)
{
    Hcattn__Control__Control *message;
    while ((message = volley_hear(fd)) != NULL)
        hcattn__control__control__free_unpacked(message, NULL);
    close(fd);
}
