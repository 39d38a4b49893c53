/*
 * fakes.h - a real hc-coordinator and, in this process, fake stores, workers, supervisors and clients on its sockets.
 *
 * A fake store does to a hand-made segment what a store does to its own, without rows. A fake worker answers Prepare (an
 * id for every byte of a text) and collects Run and Stop for the test to answer. All fakes act in fakes_pump() only.
 *
 * Owner      the test. Threads: one.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "common/socket.h"
#include "proto/control.pb-c.h"
#include "proto/descriptor.h"
#include "proto/hcattn.pb-c.h"
#include "proto/work.pb-c.h"
#include "tests/unit/coordinator/segments.h"

enum { FAKE_STORES = 4, FAKE_WORKERS = 2, FAKE_QUEUE = 512 };

/* Orders that a fake store can be told not to answer. COMMIT: a SessionOpen with more moves than its record has. */
enum { FAKE_OPEN = 1, FAKE_RESERVE = 2, FAKE_IMPORT = 4, FAKE_COMMIT = 8, FAKE_RELEASE = 16 };

struct fake_store {
    uint32_t index;
    uint64_t incarnation, route;
    int fd; /* -1: not connected */
    struct socket *data;
    struct hand_segment segment;
    bool has_segment;
    uint32_t n_blocks;      /* of the segment it will make */
    bool silent;            /* takes orders and does not answer */
    int32_t reserve_status; /* answered to Reserve instead of doing it */
    int32_t adopt_status;
    int32_t open_status, copy_status, ring_status; /* as reserve_status */
    bool copy_half;                                /* a Copy is done for its first block only, and said to be done */
    bool ring_silent;                              /* takes RingGrant and RingRevoke and does not answer */
    uint64_t ring_sequence;                        /* of the last one of them */
    uint64_t granted[FAKE_WORKERS];                /* incarnations of workers whose ring it looks at; 0: none */
    uint32_t n_grants, n_revokes, n_copies, n_copied, max_copied;
    uint32_t ignored,
        unanswered; /* orders (bit each) that it takes and does not do; that it does and does not answer */
    uint64_t held;  /* sequence of the last order that it did not answer for that reason */
    bool stalls;    /* nor any other order from then on, as one whose connection is about to be lost */
    int32_t import_status, commit_status;               /* as reserve_status */
    uint32_t n_imports, n_imported, n_commits, n_stale; /* stale: an Import of what is not there (any more) */
    uint32_t release_lanes;                             /* of the last Release */
    uint32_t n_leaves;
    bool slow;             /* it is told to format and does not get to it */
    bool stays;            /* told to leave, it does not end */
    char policy[64];       /* of the last SessionOpen */
    uint32_t exact_tokens; /* of the last SessionOpen */
    uint32_t n_formats, n_adopts, n_opens, n_reserves, n_releases;
    uint64_t previous;    /* of the last Adopt */
    uint64_t worker_gone; /* of the last WorkerGone */
    bool hung_up;
    char refused[512];
    struct descriptor last; /* descriptor that came */
    uint32_t n_descriptors;
    uint64_t beat_us; /* of the last heartbeat; one is sent every 200 ms */
};

struct fake_worker {
    uint32_t index;
    uint64_t incarnation, data_route, work_route;
    uint64_t model;
    struct row_shape shape;
    uint32_t n_ctx;
    int fd;
    struct socket *data, *work;
    uint32_t n_exchange_ready, n_store_up, n_store_down;
    uint64_t store_route[FAKE_STORES], store_incarnation[FAKE_STORES];
    uint32_t without;      /* stores (bit each) that it makes no exchange with */
    uint32_t unmapped;     /* stores that have left, as it was told */
    bool segment_writable; /* the descriptor it was given could be mapped writable */
    bool hung_up;
    bool mute; /* does not answer Prepare */
    uint64_t device_budget_bytes, device_base_bytes, device_bytes;
    bool ring[FAKE_STORES]; /* posts there */
    bool ring_silent;       /* takes RingUse and does not answer */
    int32_t ring_status;
    uint64_t ring_sequence[FAKE_STORES]; /* of the last RingUse */
    uint32_t n_ring_uses;
    char refused[512];
    Hcattn__Work__WorkRequest
        *queue[FAKE_QUEUE]; /* Run, RunJob, Stop, Forget, Detokenize, Count; and Prepare when mute */
    uint32_t n_queue;
    struct descriptor last;
    uint32_t n_descriptors;
    uint64_t beat_us;
    uint64_t progress; /* what heartbeats say */
    bool busy;
    const char *phase;
};

struct fake_supervisor {
    uint64_t incarnation;
    int fd;
    uint64_t fenced;   /* of the last Fence */
    uint32_t n_starts; /* it was told to start its process */
    char reason[128];
};

struct fake_client {
    uint64_t route;
    struct socket *socket;
    Hcattn__Reply *queue[FAKE_QUEUE];
    uint32_t n_queue;
};

struct fakes {
    char dir[64];
    pid_t pid; /* of the coordinator; 0: none runs */
    uint32_t n_stores;
    struct socket_context *context;
    struct fake_store stores[FAKE_STORES];
    struct fake_worker workers[FAKE_WORKERS];
    struct fake_supervisor store_supervisor[FAKE_STORES], worker_supervisor[FAKE_WORKERS];
    struct fake_client client;
    uint64_t next_id;
};

/* ---- fakes.c ---- */
/* A directory and the fakes' defaults; arguments: closed by NULL, beside --runtime-dir and --stores. */
void fakes_start(struct fakes *fakes, uint32_t n_stores, const char *const *arguments);
void fakes_start_coordinator(struct fakes *fakes, const char *const *arguments);
void fakes_kill_coordinator(struct fakes *fakes); /* as a crash */
int fakes_stop_coordinator(struct fakes *fakes);  /* SIGTERM; its exit status */
void fakes_finish(struct fakes *fakes);           /* stops it, asserts exit status 0 */
void fakes_all_ready(struct fakes *fakes);        /* supervisors, stores and worker 0 register; waits until it serves */
void fakes_pump(struct fakes *fakes);             /* one round of at most 20 ms */
uint64_t fakes_deadline(void);
void fakes_fail_late(const char *condition, const char *file, int line, uint64_t deadline);
#define FAKES_WAIT(fakes, condition)                                                                                   \
    for (uint64_t deadline_ = fakes_deadline(); !(condition); fakes_pump(fakes))                                       \
    fakes_fail_late(#condition, __FILE__, __LINE__, deadline_)
#define FAKES_QUIET_ROUNDS 15 /* long enough to see that something does not come */
void fakes_quiet(struct fakes *fakes);
void fakes_drop(Hcattn__Work__WorkRequest *request); /* accepts NULL */

/* Short for the names that protobuf-c makes. */
#define ERROR_CODE(name) HCATTN__ERROR_CODE__##name
#define REPLY(name)      HCATTN__REPLY__REPLY_##name
#define WORK(name)       HCATTN__WORK__WORK_REQUEST__REQUEST_##name

int fakes_connect(const struct fakes *fakes);
void fakes_say(int fd, const Hcattn__Control__Control *message, int attached);
Hcattn__Control__Control *fakes_hear(int fd, int *ret_attached); /* NULL: nothing now; attached -2: hung up */

/* ---- fake_store.c, fake_worker.c, fake_peers.c ---- */
void fake_store_register(struct fakes *fakes, uint32_t index, bool holds_segment);
void fake_store_hang_up(struct fake_store *store); /* its segment stays */
void fake_store_rebirth(struct fake_store *store); /* a later life, without a segment */
void fake_store_pump(struct fakes *fakes, struct fake_store *store);
/* Writes n ids into the journal of the session, in order, over all stores, and seals full blocks: as a worker's appends would. */
void fake_store_journal(struct fakes *fakes, uint64_t session, uint64_t n_tokens);
/* Where the newest record of the session says that its lanes live. False: there is none. */
bool fake_store_lanes(struct fakes *fakes, uint64_t session, uint8_t ret_lane_store[LAYOUT_N_LANES]);
uint64_t fake_store_held(const struct fake_store *store, uint64_t session); /* blocks that are not free */

void fake_store_say_done(struct fake_store *store, uint64_t sequence, int32_t status);
void fake_store_go_on(struct fake_store *store); /* answers everything again, and the order that is held */
bool fake_store_granted(const struct fake_store *store, uint64_t worker);

void fake_worker_register(struct fakes *fakes, uint32_t index);
void fake_worker_hang_up(struct fake_worker *worker);
void fake_worker_rebirth(struct fake_worker *worker);
void fake_worker_pump(struct fakes *fakes, struct fake_worker *worker);
/* Waits for the next request of that kind, in order; others before it are dropped. The caller frees it. */
Hcattn__Work__WorkRequest *fake_worker_take(struct fakes *fakes, struct fake_worker *worker,
                                            Hcattn__Work__WorkRequest__RequestCase kind);
void fake_worker_generated(struct fake_worker *worker, uint64_t work, uint32_t first, uint32_t n);
void fake_worker_finished(struct fake_worker *worker, uint64_t work, uint32_t n_generated, uint64_t n_tokens);
void fake_worker_error(struct fake_worker *worker, uint64_t work, Hcattn__ErrorCode code);
void fake_worker_progress(struct fake_worker *worker, uint64_t work, uint64_t n_done);
void fake_worker_scored(struct fake_worker *worker, uint64_t work, uint64_t first, size_t n);
void fake_worker_counts(struct fake_worker *worker, uint64_t work, uint64_t n_steps, bool profile);
void fake_worker_job_progress(struct fake_worker *worker, uint64_t work, double done);
void fake_worker_job_row(struct fake_worker *worker, uint64_t work, uint32_t index);
void fake_worker_job_done(struct fake_worker *worker, uint64_t work);
void fake_worker_say_done(struct fake_worker *worker, uint64_t sequence, int32_t status);
void fake_worker_answer(struct fake_worker *worker, Hcattn__Work__WorkReply *reply);

void fake_supervisor_register(struct fakes *fakes, struct fake_supervisor *supervisor, Hcattn__Control__Role role,
                              uint32_t index);
void fake_supervisor_child_dead(struct fake_supervisor *supervisor, uint64_t incarnation);
void fake_supervisor_hang_up(struct fake_supervisor *supervisor);
void fake_supervisor_pump(struct fake_supervisor *supervisor);

/* ---- fake_checks.c: of what is in the stores; these wait until it is so ---- */
/* Journal and places are those of a whole session of n_tokens tokens (fake_store_journal), and no store has more of it. */
void fake_checks_session(struct fakes *fakes, uint64_t session, uint64_t n_tokens);
void fake_checks_gone(struct fakes *fakes, uint64_t session); /* nothing is left of it anywhere */
/* The coordinator takes exactly those blocks for used that are. */
void fake_checks_tidy(struct fakes *fakes);
/* Lanes (bit each) that live in the store, as the newest record says. */
uint32_t fake_checks_lanes_in(struct fakes *fakes, uint64_t session, uint32_t store);
void fake_checks_run(struct fakes *fakes,
                     const Hcattn__Work__WorkRequest *run);                     /* it names the blocks that are there */
bool fake_checks_state(struct fakes *fakes, uint32_t store, const char *state); /* as Stats says */

/* ---- fake_flow.c: with worker 0 and the client ---- */
void fake_flow_join(struct fakes *fakes,
                    uint32_t store); /* a store that is new, or again; until the worker reaches it */
void fake_flow_kill_store(struct fakes *fakes, uint32_t store); /* as its supervisor sees it; the next life is ready */
/* A generation on an open session is at the worker. Returns the request. */
uint64_t fake_flow_start(struct fakes *fakes, uint64_t session, uint32_t max_tokens, uint64_t *ret_work);
uint64_t fake_flow_take_run(struct fakes *fakes); /* the next Run, with the places that hold; returns its work */
void fake_flow_take_stop(struct fakes *fakes, uint64_t work);
void fake_flow_finish(struct fakes *fakes, uint64_t id, uint64_t work, uint64_t n_tokens);
void fake_flow_make(struct fakes *fakes, uint64_t session,
                    uint64_t n_tokens); /* opened, with n_tokens (0, or more than 4) */

/* Another coordinator, to which nobody has registered; the stores' segments stay, and they answer everything again. */
void fake_flow_restart(struct fakes *fakes, const char *const *arguments);
void fake_flow_register_again(struct fakes *fakes,
                              uint32_t store); /* and its supervisor; with the segment that it has */
void fake_flow_worker_again(struct fakes *fakes);
uint64_t fake_flow_drain(struct fakes *fakes, uint32_t store); /* asks for it; returns the request */
/* Session 5 with a generation that has `n_tokens` in the journal, which is returned; store 1 joins. */
uint64_t fake_flow_running(struct fakes *fakes, uint64_t n_tokens, uint64_t *ret_work);
void fake_flow_stop(struct fakes *fakes, uint64_t work);      /* the worker is told to, and says that it did */
void fake_flow_check(struct fakes *fakes, uint64_t n_tokens); /* session 5 has them, and there is nothing else */

/* ---- fake_client.c ---- */
void fake_client_open(struct fakes *fakes);
void fake_client_close(struct fake_client *client);
void fake_client_pump(struct fake_client *client);
/* Gives the request an id, sends it and returns the id. */
uint64_t fake_client_ask(struct fakes *fakes, Hcattn__Request *request);
void fake_client_send(struct fakes *fakes, Hcattn__Request *request);
/* Waits for the next reply of that request and checks its kind. The caller frees it. */
Hcattn__Reply *fake_client_take(struct fakes *fakes, uint64_t request, Hcattn__Reply__ReplyCase kind);
void fake_client_drop(struct fakes *fakes, uint64_t request, Hcattn__Reply__ReplyCase kind);
void fake_client_expect_error(struct fakes *fakes, uint64_t request, Hcattn__ErrorCode code);
bool fake_client_has(const struct fake_client *client, uint64_t request);

uint64_t fake_client_open_session(struct fakes *fakes, uint64_t session, bool ephemeral); /* waits; returns session */
uint64_t fake_client_ask_open(struct fakes *fakes, uint64_t session, const char *policy); /* the others return the id */
uint64_t fake_client_close_session(struct fakes *fakes, uint64_t session);
uint64_t fake_client_generate(struct fakes *fakes, uint64_t session, const char *text, uint32_t max_tokens);
uint64_t fake_client_resume(struct fakes *fakes, uint64_t id, uint64_t session, const char *text, uint32_t max_tokens,
                            int64_t at, uint32_t resume_from); /* at < 0: not given */
uint64_t fake_client_append(struct fakes *fakes, uint64_t session, const char *text);
uint64_t fake_client_score(struct fakes *fakes, uint64_t session, const char *text, uint64_t from);
uint64_t fake_client_ask_exact(struct fakes *fakes, uint64_t session, const char *policy,
                               int64_t exact); /* < 0: absent */
uint64_t fake_client_fork(struct fakes *fakes, uint64_t session, uint64_t new_session, uint64_t n_tokens);
uint64_t fake_client_fork_as(struct fakes *fakes, uint64_t session, uint64_t new_session, const char *policy);
uint64_t fake_client_evaluate(struct fakes *fakes,
                              const char *text); /* of a context of 128, a tail of 64, two presets */
uint64_t fake_client_set_policy(struct fakes *fakes, uint64_t session, const char *policy);
uint64_t fake_client_set_transport(struct fakes *fakes, const char *transport);
uint64_t fake_client_drain(struct fakes *fakes, bool resume);
uint64_t fake_client_drain_store(struct fakes *fakes, uint32_t store, bool resume);
/* Waits for StoreDrained, over the progress that comes before it. Returns how many sessions were moved. */
uint32_t fake_client_drained(struct fakes *fakes, uint64_t request);
/* It ends with an error instead. */
void fake_client_drain_error(struct fakes *fakes, uint64_t request, Hcattn__ErrorCode code, const char *words);
/* Waits until its progress says why it waits, with these words. */
void fake_client_drain_waits(struct fakes *fakes, uint64_t request, const char *words);
uint64_t fake_client_describe(struct fakes *fakes, uint64_t session);
Hcattn__Reply *fake_client_list(struct fakes *fakes);
uint64_t fake_client_cancel(struct fakes *fakes, uint64_t request);
Hcattn__Reply *fake_client_health(struct fakes *fakes);
Hcattn__Reply *fake_client_stats(struct fakes *fakes);
