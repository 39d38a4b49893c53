/*
 * volley.h - what a test of bad input throws at a service's sockets, and how it sees that the service did not suffer.
 *
 * Owner      the test. Threads: one. Failures assert (cmocka).
 */
#pragma once

#include "proto/control.pb-c.h"
#include "proto/hcattn.pb-c.h"
#include "tests/system/service.h"

/* ---- is it well? ---- */

enum { VOLLEY_MAX_PROCESSES = 8 };

struct volley_process {
    char program[32];
    uint32_t index;
    uint64_t incarnation;
    pid_t pid;
    uint32_t n_fds;
    uint64_t rss_bytes;
};

struct volley {
    struct service *service;
    uint32_t n_stores;
    struct volley_process processes[VOLLEY_MAX_PROCESSES];
    uint32_t n_processes;
    struct answer truth; /* to a prompt of its own */
    uint64_t log_bytes;
};

/* A service of its own for the volley, tiny model and VOLLEY_STORES stores, begun; and its end in order. */
enum { VOLLEY_STORES = 2 };
void volley_start(struct volley *volley, struct service *service);
void volley_stop(struct volley *volley);
/* Notes how the service is: its processes, what they hold, what it answers. */
void volley_begin(struct volley *volley, struct service *service, uint32_t n_stores);
void volley_end(struct volley *volley);
/*
 * It answers as before, in the same processes, which hold no more descriptors and not much more memory; no block is in use;
 * the log has not grown much. Waits a while for what takes a moment.
 */
void volley_assert_well(struct volley *volley);
/* The same but for the processes, whose restart is expected; notes the new ones. */
void volley_assert_recovered(struct volley *volley, pid_t killed);
const struct volley_process *volley_process(const struct volley *volley, const char *program, uint32_t index);
uint64_t volley_cpu_us(pid_t pid); /* what it has used so far */
char *volley_path(const struct volley *volley, const char *socket, char path[96]);

/* ---- randomness, the same in every run ---- */

uint32_t volley_random(uint64_t *state, uint32_t bound);
void volley_random_bytes(uint64_t *state, void *bytes, size_t n_bytes);

/* ---- raw bytes ---- */

/* A stream or packet connection to a socket of the service. */
int volley_connect(const struct volley *volley, const char *socket, int type);
/* The same without waiting: -1 when the other side's queue is full. */
int volley_connect_soon(const struct volley *volley, const char *socket, int type);
/* Whatever the other side does: no signal, no failure. */
void volley_send(int fd, const void *bytes, size_t n_bytes);
void volley_send_fds(int fd, const void *bytes, size_t n_bytes, int sent_fd, uint32_t n_fds);

/* ---- ZeroMQ as a stranger speaks it ---- */

/* Greeting and READY of a DEALER with that routing id; takes those of the other side. */
void volley_greet(int fd, const void *id, uint8_t id_bytes);
/* One frame: flags 1 more, 2 long length, 4 command. `told` is the length that it claims. */
void volley_frame(int fd, uint8_t flags, uint64_t told, const void *bytes, size_t n_bytes);

/* ---- a client that says what it likes ---- */

struct volley_client;
struct volley_client *volley_client_new(const struct volley *volley, const char *socket);
struct volley_client *volley_client_free(struct volley_client *client);
void volley_client_send(struct volley_client *client, const void *bytes, size_t n_bytes);
void volley_client_ask(struct volley_client *client, const Hcattn__Request *request);
/* The next reply (freed by the caller); NULL: none within the time. */
Hcattn__Reply *volley_client_reply(struct volley_client *client, uint32_t timeout_ms);
void volley_client_drain(struct volley_client *client);

/* ---- a peer that says what it likes ---- */

void volley_say(int fd, Hcattn__Control__Control *message, int sent_fd);
/* The next message (freed by the caller); NULL: hung up; asserts that one of both comes in time. */
Hcattn__Control__Control *volley_hear(int fd);
void volley_assert_hung_up(int fd); /* and closes it */
