/*
 * peers.h - a coordinator and a worker, as far as a store can tell: real sockets, real shared memory, a real child process.
 *
 * Everything fails the test that calls it, with a line, when the store does not do what it should within 10 s.
 */
#pragma once

#include "common/segment.h"
#include "common/socket.h"
#include "proto/control.pb-c.h"
#include "proto/descriptor.h"
#include "proto/layout.h"

#include <sys/types.h>

#define PEERS_WORKER        0x3031323334353637u
#define PEERS_N_SLOTS       3u
#define PEERS_REQUEST_BYTES (256u << 10)
#define PEERS_REPLY_BYTES   (128u << 10)

struct peers {
    char directory[64];
    char peer_path[96];
    char data_path[96];
    int listen_fd;
    struct socket_context *context;
    struct socket *data;
    /* of the store that is connected now */
    pid_t pid;
    int fd;
    uint64_t route;
    uint64_t incarnation;
    /* the worker's end */
    int exchange_fd;
    struct segment_mapping exchange;
    uint64_t next_request;
};

void peers_open(struct peers *peers);
void peers_close(struct peers *peers);

/* Starts hc-value-store with more options (closed by NULL). */
void peers_spawn(struct peers *peers, const char *const *options);
int peers_wait(struct peers *peers); /* exit status of the child; -signal when it was killed */

void peers_accept(struct peers *peers);

/* The next message that is no heartbeat; freed by the caller. It must be of this kind. *ret_fd: its descriptor or -1; NULL:
 * there must be none. */
Hcattn__Control__Control *peers_receive(struct peers *peers, Hcattn__Control__Control__MessageCase kind, int *ret_fd);
void peers_send(struct peers *peers, const Hcattn__Control__Control *message, int fd);

/* Accepts, checks Hello, answers Welcome. *ret_fd: the segment it shows, or -1. */
void peers_register(struct peers *peers, int *ret_fd);

/* Status of the Done that answers; it must be of this sequence. */
int peers_done(struct peers *peers, uint64_t sequence);
/* The same for a new order. */
int peers_session(struct peers *peers, uint64_t session);
int peers_reserve(struct peers *peers, uint64_t session, uint32_t index, uint32_t generation, uint32_t number);
int peers_move(struct peers *peers, uint64_t session, uint32_t moves, uint8_t store); /* all lanes */
int peers_release(struct peers *peers, uint64_t session, uint32_t from_number);
int peers_release_lanes(struct peers *peers, uint64_t session, uint32_t from_number, uint32_t lanes);

int peers_ring(struct peers *peers, uint64_t worker, bool grant);
/* n blocks from index `from` on to those from `to` on; all of generation 1. */
int peers_copy(struct peers *peers, uint64_t from_session, uint64_t to_session, uint32_t from, uint32_t to, uint32_t n);

/* The same of one session, out of a segment that another store of this number is said to have. */
int peers_import(struct peers *peers, uint64_t session, uint32_t store, int segment_fd, uint32_t from, uint32_t to,
                 uint32_t n);

/* Only the order: its sequence. */
uint64_t peers_begin_import(struct peers *peers, uint64_t session, uint32_t store, int segment_fd, uint32_t from,
                            uint32_t to, uint32_t n);

void peers_leave(struct peers *peers); /* not answered */

/* Tells that PEERS_WORKER is dead; not answered. */
void peers_worker_gone(struct peers *peers);

/* Makes a new exchange and gives it to the store. Status of its answer. */
int peers_exchange(struct peers *peers, uint64_t store_incarnation);

/* Request and reply area of a slot. */
uint8_t *peers_request(const struct peers *peers, uint32_t slot);
struct reply_header *peers_reply(const struct peers *peers, uint32_t slot);

/* Sends a descriptor for a slot and waits for the reply, which is checked for addresses and id. */
struct descriptor peers_ask(struct peers *peers, uint64_t worker, uint32_t slot, uint32_t n_bytes);
/* The same by the ring: status of the reply header; -ETIMEDOUT: no reply within the time. */
int peers_post(struct peers *peers, uint32_t slot, uint32_t n_bytes, uint64_t timeout_us);
uint64_t peers_next_request(const struct peers *peers); /* id that peers_ask() and peers_post() will use */
