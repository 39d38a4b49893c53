/*
 * state.h - what the files of the coordinator's server share. Private to this folder.
 *
 * server.c   sockets, poll loop, timers          peers.c    connections, registration, death
 * control.c  messages to peers                   stores.c   segments: format, adopt, ready, up, down
 * orders.c   session records and blocks: orders  workers.c  work socket, replies of workers
 * rpc.c      client socket, replies to clients   flow*.c    the way of a request
 * stats.c    Health, Stats, sessions             data.c     descriptors
 * validate.c what a client may ask               queue.c    room for a request, and the line for it
 * fork.c     copies of sessions                  rings.c    pairs that do without the coordinator
 * operate.c  Drain, SetTransport, SetPolicy, DescribeSession         jobs.c     RunJob
 * membership.c  which stores there are           drain_store.c  a store that leaves
 * moves.c    lanes of one session go to other stores
 *
 * Invariant  everything here belongs to the server's thread. `dirty` is set by whatever may let a waiting request or a
 *            closing session go on; the loop then runs flow_advance() and orders_settle() until nothing moves.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/socket.h"
#include "coordinator/descriptors.h"
#include "coordinator/placement.h"
#include "coordinator/registry.h"
#include "coordinator/requests.h"
#include "coordinator/router.h"
#include "coordinator/server.h"
#include "coordinator/sessions.h"
#include "proto/control.pb-c.h"
#include "proto/hcattn.pb-c.h"
#include "proto/work.pb-c.h"

#define MAX_PEERS         256u
#define MAX_PACKETS       8192u  /* that wait for one peer; one that lets more pile up is cut off */
#define MAX_WORK_PACKETS  16384u /* that wait for all workers */
#define MAX_WORK_BYTES    ((uint64_t)512 << 20)
#define MAX_REQUEST_BYTES ((uint64_t)512 << 20) /* of the messages of all open requests */
#define HELLO_TIMEOUT_US  10000000u             /* a connection that says nothing is closed */
#define CLIENT_HIGH_WATER 512u  /* replies that wait for one client; one that lets more pile up loses its request */
#define RETRY_US          5000u /* between tries to send what could not be sent */
#define MAX_DEATHS        3u    /* dispatches of one request that may end by a worker's death without progress */
#define MAX_CLOSED        64u   /* sessions whose end is remembered */
#define RESERVE_MAX       1024u /* blocks in one Reserve */
#define COPY_MAX          256u  /* blocks in one Copy */

struct packet { /* to a peer, not sent yet */
    struct packet *next;
    int fd; /* owned; -1: none */
    size_t n_bytes;
    uint8_t bytes[];
};

struct peer { /* one connection of the peer socket */
    int fd;
    int32_t pid;             /* as the kernel says; 0: not visible */
    struct process *process; /* NULL: has not said Hello */
    uint64_t since_us;
    bool gone;  /* to be closed at the end of this round */
    bool drain; /* gone once its packets are sent */
    struct packet *first, *last;
    uint32_t n_packets;
};

enum store_order { ORDER_NONE, ORDER_FORMAT, ORDER_ADOPT };

struct store {                   /* by number; what outlives its process */
    enum store_order order;      /* that was given and not answered */
    uint64_t ordered;            /* to which incarnation */
    uint64_t route, incarnation; /* as told to the workers; 0: down */
    uint64_t told, left;         /* incarnation that they were told of last; that was told to leave */
    char trouble[256];           /* why it does not serve */
    uint32_t n_moved;            /* drained: sessions that have gone elsewhere */
    uint64_t bytes_moved;
    uint32_t n_failed;    /* drained: moves that were given up one after the other */
    uint64_t next_try_us; /* drained: when the next session is looked for */
    char waits[256];      /* drained: why none goes now */
};

enum order_kind { ORDER_OPEN, ORDER_RESERVE, ORDER_COPY, ORDER_IMPORT, ORDER_RELEASE };

struct order { /* of the session table to a store, until it says Done */
    struct order *next;
    uint64_t sequence;
    enum order_kind kind;
    uint8_t store;
    bool sent;
    uint64_t session;
    uint64_t move;        /* it belongs to that move; 0: to the session as it is */
    bool commits;         /* open: with the move's lanes */
    uint32_t from_number; /* release */
    uint32_t lanes;       /* release: of these only; 0: all */
    uint64_t from;        /* copy: session */
    uint32_t from_store;  /* import */
    uint32_t n;           /* of what follows */
    uint32_t *numbers;    /* reserve, copy, import */
    struct placed_block
        *blocks; /* copy, import: the source's; release: what is free afterwards; reserve of a move: which */
    struct placed_block *others; /* import: where to; reserve of a move: those before them */
};

enum move_step {
    MOVE_COPY,   /* what is sealed goes over while the session runs */
    MOVE_PARK,   /* its run is being stopped */
    MOVE_REST,   /* the rest goes over */
    MOVE_COMMIT, /* its records are being written */
};

struct staged_block {
    struct placed_block to; /* generation 0: it stays where it is */
    bool whole;             /* sealed when it was copied: nothing can be missing */
};

struct move { /* of a session's lanes out of one store */
    uint64_t id;
    uint32_t from;
    enum move_step step;
    uint32_t n_pending; /* orders that are not done */
    int status;         /* of the first that failed */
    char sentence[160];
    uint32_t lanes;                     /* that go: bit each */
    uint8_t lane_store[LAYOUT_N_LANES]; /* as it will be */
    struct staged_block *staged;        /* [n_staged], by number */
    uint32_t n_staged, capacity;
    uint64_t started_us, parked_us;
    uint64_t heard_us; /* last answer, or step that asks for one */
};

struct ring; /* of rings.c */

struct work_packet { /* to a worker that cannot be reached right now */
    struct work_packet *next;
    uint64_t route;
    size_t n_bytes;
    uint8_t bytes[];
};

struct closed_session { /* one that somebody may still ask for */
    uint64_t session;
    const char *why; /* static text */
};

struct rate { /* of warnings */
    uint64_t last_us;
    uint64_t n_quiet;
};

struct model { /* of the workers */
    bool known;
    struct row_shape shape;
    uint64_t hash[2];
    char name[REGISTRY_TEXT_BYTES];
    uint32_t n_ctx;
    uint64_t device_bytes_per_token;
};

struct server {
    struct server_options options;
    uint64_t started_us, now_us, tick_us, retry_us;
    uint64_t accept_us; /* no connection is accepted before */
    char peer_path[128], data_path[128], work_path[128], client_path[128];
    char extra_endpoint[256];
    struct socket_context *context;
    struct socket *client_socket, *work_socket, *data_socket;
    struct client_keys *client_keys; /* NULL: no client needs a key */
    int listener;

    struct registry *registry;
    struct descriptors *descriptors;
    struct placement *placement;
    struct sessions *sessions;
    struct requests *requests;
    struct router *router;

    struct peer *peers[MAX_PEERS];
    uint32_t n_peers;
    struct store stores[SERVER_MAX_STORES];
    struct model model;
    struct order *first_order, *last_order;
    struct ring *first_ring;
    enum server_transport transport;  /* now */
    char policy[LAYOUT_POLICY_BYTES]; /* of sessions that name none, now */
    uint64_t next_sequence, next_work, next_ticket, next_move;
    uint64_t members;    /* bit per store: sessions are served from it, and it is waited for */
    uint64_t leaving;    /* members that are being drained */
    uint64_t left;       /* drained: not let in again as the life that left */
    uint64_t seen;       /* have registered here */
    bool segments_found; /* one of them came with its segment: another coordinator was here */
    bool stores_given;   /* no store that has not been seen will bring sessions any more */
    uint64_t n_ended;    /* requests that a Drain waits for */
    bool draining;
    struct work_packet *first_work, *last_work;
    uint32_t n_work_packets;
    uint64_t n_work_bytes;

    struct closed_session closed[MAX_CLOSED]; /* the last ones, a ring */
    uint64_t n_closed;
    bool table_complete; /* all stores have been ready once: an unknown session does not exist */
    bool dirty, stopping;
    struct rate garbage, strangers, late, full;
    uint8_t *receive_buffer; /* PEER_MAX_MESSAGE */
};

/* ---- control.c: nothing here waits or fails; a peer that cannot be written to is cut off ---- */
void control_send(struct server *server, struct peer *peer, const Hcattn__Control__Control *message,
                  int fd); /* takes fd */
void control_flush(struct peer *peer);
void control_drop_packets(struct peer *peer);
void control_welcome(struct server *server, struct peer *peer);
void control_refused(struct server *server, struct peer *peer, const char *sentence); /* and closes after it */
void control_format(struct server *server, struct peer *peer, const struct row_shape *shape);
void control_adopt(struct server *server, struct peer *peer, uint64_t previous, int fd);
void control_store_up(struct server *server, struct peer *peer, uint32_t store, uint64_t incarnation, uint64_t route,
                      int fd);
void control_store_down(struct server *server, struct peer *peer, uint32_t store, uint64_t incarnation, bool for_good);
void control_exchange(struct server *server, struct peer *peer, const Hcattn__Control__Exchange *exchange, int fd);
void control_exchange_ready(struct server *server, struct peer *peer, uint32_t store, uint64_t worker_incarnation,
                            uint64_t store_incarnation, int32_t status);
void control_worker_gone(struct server *server, struct peer *peer, uint64_t incarnation);
void control_leave(struct server *server, struct peer *peer); /* a store that nothing is left in */
void control_start(struct server *server, struct peer *peer); /* a supervisor whose process left */
void control_fence(struct server *server, struct peer *peer, uint64_t incarnation, const char *reason);

/* ---- peers.c ---- */
void peers_accept(struct server *server);
void peers_read(struct server *server, struct peer *peer);
void peers_sweep(struct server *server); /* closes those that are gone */
void peers_check_pidfds(struct server *server, struct process *process);
void peers_tick(struct server *server);               /* hang judging, late Hellos */
struct peer *peers_of(const struct process *process); /* NULL: not connected */
void peers_close_all(struct server *server);

/* ---- stores.c ---- */
struct process *stores_ready(const struct server *server, uint32_t store); /* NULL: not ready */
uint64_t stores_ready_mask(const struct server *server);
/* A store said Hello; fd (or -1) is its segment and taken. -EPROTO: refuse it, sentence in error. */
int stores_registered(struct server *server, struct process *process, bool holds_segment, int fd,
                      char error[REGISTRY_ERROR_BYTES]);
void stores_check(struct server *server, struct process *process); /* may it be told to format or adopt now? */
void stores_check_all(struct server *server);
bool stores_all_ready(const struct server *server); /* those that sessions may be placed in */
void stores_segment_ready(struct server *server, struct process *process, const Hcattn__Control__SegmentReady *message,
                          int fd); /* takes fd */
void stores_hung_up(struct server *server, struct process *process);
void stores_died(struct server *server, struct process *process);
void stores_tell_worker(struct server *server, struct process *worker); /* StoreUp of all that serve */
void stores_reformat(struct server *server);              /* the model has another shape and no session is left */
void stores_leave(struct server *server, uint32_t store); /* nothing of a session is in it: its segment is given up */
void stores_check_table(struct server *server);           /* does it hold all sessions that there are? */
void stores_judge(struct server *server);                 /* sessions that were found and whose stores are there */
void stores_close_broken(struct server *server, struct session *session, const char *reason);

/* Is there a session (not closing) in a segment whose rows have another shape? */
bool stores_sessions_of_other_shape(const struct server *server, const struct row_shape *shape);

/* ---- orders.c ---- */
int orders_open(struct server *server, struct session *session);
int orders_reserve(struct server *server, struct session *session, uint32_t from_number);
/* Blocks [0, n_blocks) of `from`, which are sealed, into those of the session with the same numbers. Given right after the
 * session's record and reservation: what comes later - a release of `from` too - is done later by every store. */
int orders_copy(struct server *server, struct session *session, const struct session *from, uint32_t n_blocks);
int orders_release(struct server *server, struct session *session, uint32_t from_number);
/* A session without tokens gets its record anew, with the terms that it has now; its blocks are freed. */
int orders_open_again(struct server *server, struct session *session);
/* blocks were cut off the session already; they are free once their stores say so */
int orders_release_cut(struct server *server, struct session *session, uint32_t from_number,
                       const struct placed_block *cut, uint32_t n_cut);
/* A store did not do its part of a reservation: everything from the first block that is not confirmed is given back. */
void orders_roll_back(struct server *server, struct session *session);
void orders_done(struct server *server, uint32_t store, const Hcattn__Control__Done *message);
void orders_resend(struct server *server, uint32_t store);
void orders_unsent(struct server *server, uint32_t store);       /* its connection is gone */
void orders_forget_store(struct server *server, uint32_t store); /* its segment is gone: nothing is left to do there */
void orders_settle(struct server *server);                       /* lets sessions that may close do so */
void orders_free_all(struct server *server);

/* For the files beside it: an order, to be filled in; into the list, and to its store. */
int orders_new(struct server *server, enum order_kind kind, uint8_t store, const struct session *session,
               struct order **ret_order);
/* A release after which those of the blocks that lie in the store are free. */
int orders_new_release(struct server *server, uint8_t store, const struct session *session,
                       const struct placed_block *blocks, uint32_t n_blocks, struct order **ret_order);
void orders_enlist(struct server *server, struct order *order); /* takes it */
void orders_free(struct order *order);

/* ---- orders_move.c ---- */
/* Records with the session's terms, or the move's, in these stores (bit each). */
int orders_move_open(struct server *server, struct session *session, uint64_t stores, bool commits);
/* Staged blocks with numbers >= from_number are opened. */
int orders_move_reserve(struct server *server, struct session *session, uint32_t from_number);
/* What is not there whole is copied, only what is sealed unless `all`. */
int orders_move_import(struct server *server, struct session *session, bool all);
/* In one store, of the lanes (bit each) only; 0: all, and the record. The blocks are free afterwards. Nobody waits for it. */
int orders_move_release(struct server *server, const struct session *session, uint32_t store, uint32_t lanes,
                        const struct placed_block *blocks, uint32_t n_blocks);

/* ---- orders_send.c ---- */
void orders_send(struct server *server, struct order *order); /* if its store is there */

/* ---- membership.c ---- */
void membership_load(struct server *server); /* from the runtime directory, or as --stores says */
bool membership_has(const struct server *server, uint32_t store);
void membership_set(struct server *server, uint64_t members, uint64_t leaving, uint64_t left); /* and remembers it */
void membership_promote(struct server *server); /* stores that serve and that all workers reach */
void membership_seen(struct server *server, uint32_t store, bool holds_segment); /* it has registered */
/* What lives through the loss of a coordinator is back by now, supervisors too. */
bool membership_settled(const struct server *server);
void membership_tick(struct server *server); /* no longer waits for stores that had joined and do not come back */
uint64_t membership_targets(const struct server *server); /* that new blocks may be placed in */

/* ---- moves.c ---- */
/* Begins to move what the session has in that store to others. -EAGAIN: not in this state of it; -ENOMEM: no room. */
int moves_begin(struct server *server, struct session *session, uint32_t from);
/* Goes on. The session has no move any more when it is over; *ret_moved: it was done. */
void moves_advance(struct server *server, struct session *session, bool *ret_moved);
/* Before its commit: what was staged is given back, and the session stays where it is. */
void moves_give_up(struct server *server, struct session *session);
/* Does the session go there? The store's segment is gone, and what is staged there with it; or its process is: before the
 * commit moves are given up, and begin again elsewhere. */
bool moves_go_to(const struct session *session, uint32_t store);
void moves_forget_store(struct session *session, uint32_t store);
void moves_store_down(struct server *server, uint32_t store);
/* Is nothing that it has in the store needed any more? */
bool moves_have_left(const struct session *session, uint32_t store);
void moves_done(struct server *server, struct session *session, const struct order *order, int status,
                const char *sentence);
void moves_free(struct session *session);
void moves_free_all(struct server *server);
/* Must requests of the session wait until it has moved? */
static inline bool moves_hold(const struct session *session)
{
    return session && session->move && session->move->step != MOVE_COPY;
}

/* ---- drain_store.c ---- */
void drain_store_enter(struct server *server, struct request *request);
void drain_store_waiting(struct server *server, struct request *request);
void drain_store_advance(struct server *server); /* moves that can go on */
void drain_store_tick(struct server *server, struct request *request);

/* ---- workers.c ---- */
bool workers_accept_model(struct server *server, const struct process *given, char error[REGISTRY_ERROR_BYTES]);
void workers_registered(struct server *server, struct process *process);
void workers_exchange(struct server *server, struct process *worker, const Hcattn__Control__Exchange *message, int fd);
void workers_exchange_ready(struct server *server, struct process *store,
                            const Hcattn__Control__ExchangeReady *message);
void workers_judge(struct server *server); /* those that all members are paired with are ready */
void workers_hung_up(struct server *server, struct process *process);
void workers_died(struct server *server, struct process *process);
bool workers_serves(const struct process *process);        /* is it a worker that work can be sent to? */
struct process *workers_pick(const struct server *server); /* the least busy one; NULL: none is ready */
/* The worker that the session is bound to, unless that is dead or about to be (NULL). It may not be ready. */
struct process *workers_holding(const struct server *server, const struct session *session);
/* The same, or, where there is none, the ready worker with the fewest sessions, which holds it from now on. NULL: wait. */
struct process *workers_bind(struct server *server, struct session *session);
/* What a worker counted for a session. The reply comes with request->work. */
void workers_count(struct server *server, struct process *worker, struct request *request);
void workers_send(struct server *server, struct process *worker, const Hcattn__Work__WorkRequest *message);
void workers_forget(struct server *server, uint64_t session);
void workers_stop(struct server *server, struct request *request);
void workers_receive(struct server *server);
void workers_retry(struct server *server);
void workers_drop_packets(struct server *server, uint64_t route); /* 0: all */

/* ---- rings.c ---- */
void rings_pair(struct server *server, const struct process *worker, const struct process *store); /* exchange ready */
void rings_drop(struct server *server, uint64_t worker, uint32_t store);                           /* one is gone */
/* An answer of a store or a worker. False: not to anything here. */
bool rings_done(struct server *server, const struct process *process, const Hcattn__Control__Done *message);
void rings_follow(struct server *server); /* the transport was set: all pairs go there, also those that failed before */
/* Has every pair arrived? Otherwise names one that has not. */
bool rings_settled(const struct server *server, char *sentence, size_t sentence_size);
bool rings_failed(const struct server *server, char *sentence, size_t sentence_size); /* one that refused, in words */
void rings_free_all(struct server *server);

/* ---- rpc.c ---- */
struct numbers { /* of an Error */
    uint64_t n_prompt_tokens, n_tokens, max_tokens, n_ctx, bytes_asked, bytes_free;
    uint32_t n_queued, max_queued;
};
void rpc_receive(struct server *server);
/* Sends a reply of a request; one that cannot be delivered ends it. */
void rpc_reply(struct server *server, struct request *request, Hcattn__Reply *reply);
void rpc_error(struct server *server, struct request *request, Hcattn__ErrorCode code, const struct numbers *numbers,
               const char *format, ...) __attribute__((format(printf, 5, 6)));
int rpc_send(struct server *server, const struct client_route *client, const Hcattn__Reply *reply);
void rpc_answer_error(struct server *server, const struct client_route *client, uint64_t request_id,
                      Hcattn__ErrorCode code, const char *sentence);

/* ---- validate.c: 0, or the code with a sentence ---- */
Hcattn__ErrorCode validate_request(const struct server *server, const Hcattn__Request *request,
                                   char sentence[SERVER_ERROR_BYTES]);
bool validate_input_empty(const Hcattn__Input *input);

/* ---- flow.c, flow_open.c, flow_reply.c ---- */
void flow_advance(struct server *server); /* every request that can go on */
/* What a worker says about a request that is with it. */
void flow_work_reply(struct server *server, struct request *request, Hcattn__Work__WorkReply *reply);
void flow_prepared(struct server *server, struct request *request, const uint32_t *ids, size_t n_ids);
void flow_stopped(struct server *server, struct request *request); /* the worker's final reply to a Stop */
void flow_at_worker(struct server *server, struct request *request, const struct process *worker,
                    Hcattn__Work__WorkRequest *message); /* `message` gets an id, under which the worker answers */
void flow_run(struct server *server, struct request *request, struct process *worker);
void flow_prepare(struct server *server, struct request *request, struct process *worker);
const Hcattn__Input *flow_input(const struct request *request); /* or NULL */
void flow_fail(struct server *server, struct request *request, Hcattn__ErrorCode code, const struct numbers *numbers,
               const char *format, ...) __attribute__((format(printf, 5, 6)));
void flow_answer(struct server *server, struct request *request, Hcattn__Reply *reply); /* its last reply */
void flow_finish(struct server *server, struct request *request); /* its last reply is on its way */
void flow_cancel(struct server *server, struct request *request); /* by its client */
/* Its client is gone or does not read: `why`, static text, for whoever asks for a session that is closed by that. */
void flow_abandon(struct server *server, struct request *request, const char *why);
void flow_again(struct server *server, struct request *request, uint32_t resume_from); /* the client sent it again */
void flow_session_lost(struct server *server, struct request *request, const char *sentence);
void flow_redispatch(struct server *server, struct request *request, bool died);
void flow_worker_hung_up(struct server *server, uint64_t worker); /* what touches no blocks goes elsewhere at once */
void flow_worker_lost(struct server *server, uint64_t worker, bool died); /* its requests go to another one */
void flow_accepted(struct server *server, struct request *request);
/* There is no such session. True: it may be in a store that has not registered yet. Otherwise the request has failed. */
bool flow_waits_for_table(struct server *server, struct request *request, uint64_t session);
/* Another request works on the session: fails, unless that one is about to end. */
void flow_occupied(struct server *server, struct request *request, const struct session *session);
void flow_enter_open(struct server *server, struct request *request);
void flow_reserving_open(struct server *server, struct request *request);
void flow_enter_close(struct server *server, struct request *request);
void flow_closed(struct server *server, const struct session *session);
void flow_tick(struct server *server);
void flow_end_all(struct server *server);

/* ---- queue.c ---- */
/* Blocks for all that the request may need. True: they are there. Otherwise they were ordered from the stores, or the request
 * waits in line for them, or has failed. */
bool queue_reserve(struct server *server, struct request *request);
void queue_advance(struct server *server, struct request *request); /* that waits in line */
void queue_tick(struct server *server, struct request *request);
void queue_probe(struct server *server, struct request *request); /* abandons it if its client is gone */
uint32_t queue_n_waiting(const struct server *server);

/* ---- fork.c ---- */
void fork_enter(struct server *server, struct request *request);
void fork_reserving(struct server *server, struct request *request);

/* ---- operate.c ---- */
void operate_enter(struct server *server,
                   struct request *request); /* SetPolicy, DescribeSession, Drain, SetTransport */
void operate_reserving(struct server *server, struct request *request); /* SetPolicy, Drain, SetTransport */
void operate_counted(struct server *server, struct request *request,
                     const Hcattn__Work__Counted *counted);        /* or NULL */
void operate_late(struct server *server, struct request *request); /* it has waited for as long as it may */

/* ---- jobs.c ---- */
void jobs_enter(struct server *server, struct request *request);
void jobs_advance(struct server *server, struct request *request); /* that waits for a worker */
void jobs_reply(struct server *server, struct request *request,
                Hcattn__Work__WorkReply *reply);                /* what its worker says */
void jobs_lost(struct server *server, struct request *request); /* its worker is gone, or has forgotten it */
void jobs_tick(struct server *server, struct request *request);

/* ---- stats.c ---- */
bool stats_ready(const struct server *server, char *sentence, size_t sentence_size); /* and what is missing */
int stats_health(struct server *server, const struct client_route *client, uint64_t request_id); /* as rpc_send() */
void stats_stats(struct server *server, const struct client_route *client, uint64_t request_id);
void stats_list(struct server *server, const struct client_route *client, uint64_t request_id);
void stats_session(const struct server *server, const struct session *session, Hcattn__SessionStats *ret_stats);
void stats_free_session(Hcattn__SessionStats *stats); /* what stats_session() allocated */

/* ---- data.c ---- */
void data_receive(struct server *server);
void data_retry(struct server *server);

/* ---- server.c ---- */
bool server_rate(struct server *server, struct rate *rate, uint64_t *ret_n_quiet); /* may this warning be logged? */
