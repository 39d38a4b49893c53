/*
 * hosts.h - the coordinators of a client, and which of them a call goes to. Internal to libhcattn.
 *
 * One        every call goes there.
 * Several    each is a service of its own. A new session is opened where most room is; calls on a session go to its host, which is
 *            remembered, or asked for; calls that any can answer go to one that is there; those that change a host are refused.
 * Lost       a host that has not answered for too long is left alone for a while, longer each time. Its socket is made anew: what
 *            waited in it must not reach the host later.
 * Threads    under the client's mutex, but for hosts_open() and hosts_close().
 */
#pragma once

#include "client/hcattn.h"
#include "common/socket_keys.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HOSTS_MAX          64u
#define HOSTS_IDENTITY     256
#define HOSTS_ENDPOINT     256
#define HOSTS_PATH         128
#define HOSTS_MAX_SESSIONS 65536u /* remembered; of more the oldest are asked for again */

struct call;

/* What a host says of itself when it is asked. */
struct host_look {
    bool asked;
    uint64_t health_id, stats_id;
    bool health, stats; /* have come */
    bool ready, draining;
    bool has_session;    /* the one that was looked for */
    uint64_t free_bytes; /* of blocks, less what sessions that hold nothing yet are likely to take */
    uint32_t n_sessions;
};

struct host {
    struct socket *socket; /* DEALER; one routing id until the host is lost */
    char endpoint[HOSTS_ENDPOINT];
    char path[HOSTS_PATH]; /* of an ipc endpoint, else empty */
    bool from_runtime_dir;
    bool uses_keys;
    char server_key[SOCKET_KEY_SIZE];
    uint64_t coordinator; /* incarnation as last heard; 0: never heard of one */
    bool ready;           /* as last heard */

    /* of several */
    bool lost;         /* a call was given up: calls on its sessions are refused while it is left alone */
    uint64_t retry_us; /* it is left alone until then */
    uint64_t backoff_us;
    char identity[HOSTS_IDENTITY]; /* model and version as last heard; empty: not yet */
    struct host_look look;
};

struct hosts {
    struct socket_context *sockets;
    struct host *all;
    size_t n;
    char key[SOCKET_KEY_SIZE];     /* our secret one, or empty */
    char identity[HOSTS_IDENTITY]; /* model and version that new sessions are opened with; empty: none was yet */
    struct hosts_session {
        uint64_t session;
        size_t host;
    } * sessions; /* in the order in which they became known */
    size_t n_sessions, max_sessions;
};

/* Errors with a sentence. hosts_close() also of what hosts_open() left half open. */
int hosts_open(struct hosts *hosts, const struct hcattn_config *config, struct hcattn_error *error);
void hosts_close(struct hosts *hosts);

/* Why a host does not answer, as far as its socket knows: the whole sentence. */
int hosts_no_answer(struct host *host, struct hcattn_error *error);
bool hosts_hopeless(struct host *host); /* and it will not: keys do not fit */
bool hosts_no_file(const struct host *host);
bool hosts_absent(struct host *host); /* either, or nobody listens there now */

void hosts_heard(struct host *host);
void hosts_miss(struct host *host);                      /* it did not say how it is: left alone for a while */
void hosts_lose(struct hosts *hosts, struct host *host); /* and a call was given up */

bool hosts_left_alone(const struct host *host); /* now */

/*
 * Asks all hosts at once how they are and whether they have a session. Ends when one has it, when all have answered (or cannot),
 * at the latest after the time to connect; and, unless `every` host matters, as soon as one that is ready has answered and a
 * second has passed, less where nobody listens. Hosts that were silent are left out until their time has come, unless all were.
 * 0 even if nobody answers.
 */
int hosts_look(struct hcattn *client, uint64_t session, bool every, uint64_t deadline_us, struct hcattn_error *error);
bool hosts_told(const struct host *host); /* it has answered then */

int hosts_find(const struct hosts *hosts, uint64_t session, size_t *ret_host); /* -ENOENT */
void hosts_remember(struct hosts *hosts, uint64_t session, size_t host);       /* not when there is no memory */
void hosts_forget(struct hosts *hosts, uint64_t session);

/* call_run() with the mutex held: chooses the host, runs the call there and, where that does no harm, elsewhere when it is lost. */
int hosts_run(struct hcattn *client, struct call *call, struct hcattn_error *error);
