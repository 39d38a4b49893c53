/*
 * hcattn.h - the C client of HCAttn (libhcattn): sessions, prefill, generation and scores from a running service.
 *
 * Owner      the caller: open a client, make calls, close it. Structures given to a callback are valid during it only.
 * Threads    calls of one client are made one after the other (a second thread waits for its turn); for requests that
 *            overlap open several clients. hcattn_cancel() may be called from any thread and from a signal handler.
 * Errors     0 or negative errno; `ret_error` (may be NULL) then holds the code, one sentence and the numbers that belong
 *            to it. Outputs named ret_... are untouched on failure.
 * Lost peers a call survives the loss of worker, store and coordinator: it asks for the service's health about once a second
 *            and sends its request again when the coordinator has changed or does not know it. The caller sees one
 *            uninterrupted stream in which no token comes twice.
 * Limits     a request is at most 64 MiB. Text is UTF-8 without NUL characters.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct hcattn; /* a client */

/* Numbers are those of ErrorCode in proto/hcattn.proto; beside each what a call returns. */
enum hcattn_code {
    HCATTN_OK = 0,
    HCATTN_INVALID_ARGUMENT = 1, /* -EINVAL */
    HCATTN_NOT_FOUND = 2,        /* -ENOENT */
    HCATTN_CONTEXT_EXCEEDED = 3, /* -E2BIG: n_prompt_tokens, n_tokens, max_tokens, n_ctx */
    HCATTN_NO_MEMORY = 4,        /* -ENOMEM: bytes_asked, bytes_free */
    HCATTN_BUSY = 5,             /* -EBUSY; when the queue is full: n_queued, max_queued */
    HCATTN_UNAVAILABLE = 6,      /* -ENOTCONN; -ETIMEDOUT: the call's deadline passed */
    HCATTN_CANCELLED = 7,        /* -ECANCELED */
    HCATTN_NOT_SUPPORTED = 8,    /* -EOPNOTSUPP */
    HCATTN_CONFLICT = 9,         /* -ESTALE */
    HCATTN_INTERNAL = 10,        /* -EIO; -EPROTO: what came is no answer to what was asked */
};

#define HCATTN_SENTENCE_SIZE 512

struct hcattn_error {
    enum hcattn_code code;
    char sentence[HCATTN_SENTENCE_SIZE]; /* one line for people, without a full stop */
    uint64_t n_prompt_tokens;            /* 0 where a number does not belong to the error */
    uint64_t n_tokens;
    uint64_t max_tokens;
    uint64_t n_ctx;
    uint64_t bytes_asked;
    uint64_t bytes_free;
    uint32_t n_queued; /* requests that wait for room */
    uint32_t max_queued;
};

const char *hcattn_code_name(enum hcattn_code code); /* "NOT_FOUND" */

struct hcattn_config {
    const char *runtime_dir;     /* directory of client.sock; NULL: as HCATTN_RUNTIME_DIR and the defaults say */
    const char *endpoint;        /* instead of runtime_dir: "tcp://host:port" or "ipc:///path", or several, see below */
    uint32_t connect_timeout_ms; /* until the first answer of a coordinator; 0: 5000 */
    uint32_t lost_timeout_ms;    /* without any answer once there was one; 0: 90000 */
    const char *server_key;      /* file with the public key of TCP coordinators; NULL: they use none */
    const char *key;             /* file with our secret key; both or neither */
};

/* Several hosts, each with a service of its own: "tcp://a:7070,tcp://b:7070#b.public" (commas between; after # the server key
 * of that host, where it is not config->server_key). A session lives on one host: where most block memory is free when it is
 * opened, among those with the model and version of the first that is ready. Its calls go to that host; of a session that
 * another client opened all hosts are asked. When a host has not answered for lost_timeout_ms calls on its sessions end with
 * HCATTN_UNAVAILABLE, at once for a while; it is tried again after 1 s, then 2, ... at most 30 s. Sessions are opened elsewhere
 * meanwhile. Text, health, stats and jobs are any host's. What concerns a host as a whole (hcattn_drain(),
 * hcattn_set_transport(), hcattn_set_policy() without a session, hcattn_list_sessions()) needs a client of one host:
 * HCATTN_INVALID_ARGUMENT. */

/* Never waits: that the coordinator is there shows in the first call. config may be NULL. */
int hcattn_open(const struct hcattn_config *config, struct hcattn **ret_client, struct hcattn_error *ret_error);
struct hcattn *hcattn_close(struct hcattn *client); /* accepts NULL, returns NULL; no call may be running */

size_t hcattn_n_hosts(const struct hcattn *client);
const char *hcattn_host(const struct hcattn *client, size_t index); /* its endpoint; NULL: there is none */

/* Ends the call in progress, or the next one if none is: it returns -ECANCELED. Async-signal-safe. */
void hcattn_cancel(struct hcattn *client);

/* ---- sessions ---- */

/* While a session has at most `exact_tokens` tokens, all of them are kept exactly on the device; beyond, sinks and window are.
 * Fixed when it opens. HCATTN_EXACT_NONE: never more than sinks and window. */
#define HCATTN_EXACT_NONE  UINT32_MAX
#define HCATTN_POLICY_SIZE 64

struct hcattn_session_config {
    uint64_t session;        /* 0: a random one */
    const char *policy;      /* grammar: proto/policy.h; NULL: the server's default */
    uint32_t exact_tokens;   /* 0: the server's default; HCATTN_EXACT_NONE */
    bool ephemeral;          /* closed by itself when its running request cannot be delivered */
    uint32_t idle_timeout_s; /* 0: the server's default */
};

struct hcattn_session {
    uint64_t session;
    char policy[HCATTN_POLICY_SIZE];
    uint32_t n_ctx;
    uint32_t exact_tokens; /* as the server counts: 0 is none */
    size_t host;           /* for hcattn_host() */
};

/* config may be NULL. timeout_ms of every call: 0 means no deadline of its own. */
int hcattn_open_session(struct hcattn *client, const struct hcattn_session_config *config, uint32_t timeout_ms,
                        struct hcattn_session *ret_session, struct hcattn_error *ret_error);
/* ret_freed_bytes may be NULL. */
int hcattn_close_session(struct hcattn *client, uint64_t session, uint32_t timeout_ms, uint64_t *ret_freed_bytes,
                         struct hcattn_error *ret_error);

/* A new session that begins with the tokens of another: whole blocks of 64, which never change, so the source may be
 * running. Exact tokens are the source's. */
struct hcattn_fork {
    uint64_t session;     /* the source */
    uint64_t new_session; /* 0: a random one */
    uint64_t n_tokens;    /* rounded down to whole blocks; 0: all complete ones */
    bool ephemeral;       /* the new session: as in hcattn_session_config */
    uint32_t idle_timeout_s;
    const char *policy; /* of the new session; NULL: the source's */
};

struct hcattn_forked {
    uint64_t session;
    uint64_t n_tokens; /* it holds */
};

int hcattn_fork(struct hcattn *client, const struct hcattn_fork *fork, uint32_t timeout_ms,
                struct hcattn_forked *ret_forked, struct hcattn_error *ret_error);

/* Of a session that holds no tokens yet (HCATTN_CONFLICT otherwise), or, with session 0, of sessions that will name none.
 * ret_policy may be NULL: the policy as the server understood it. */
int hcattn_set_policy(struct hcattn *client, uint64_t session, const char *policy, uint32_t timeout_ms,
                      char ret_policy[HCATTN_POLICY_SIZE], struct hcattn_error *ret_error);

struct hcattn_store_share {
    uint32_t store;
    uint32_t n_blocks;
    uint64_t bytes;
};

struct hcattn_session_stats {
    uint64_t session;
    const char *state;
    const char *policy;
    uint64_t n_tokens;
    uint64_t reserved_tokens;
    uint64_t bytes; /* blocks in all stores */
    const uint8_t *lane_store;
    size_t n_lanes;
    uint32_t exact_tokens; /* 0: none */
    uint32_t worker;       /* that holds it, if `held` */
    bool held;
    const struct hcattn_store_share *stores; /* where its blocks live; those without are left out */
    size_t n_stores;
};

struct hcattn_sessions {
    size_t n_sessions;
    const struct hcattn_session_stats *sessions;
    void *owner;
};

int hcattn_list_sessions(struct hcattn *client, uint32_t timeout_ms, struct hcattn_sessions *ret_sessions,
                         struct hcattn_error *ret_error);
void hcattn_sessions_free(struct hcattn_sessions *sessions); /* accepts NULL and a zeroed one; leaves it zeroed */

struct hcattn_store_read {
    uint32_t store;
    uint64_t bytes;
};

/* What the worker that holds a session has counted since it holds it; decode steps only. */
struct hcattn_counts {
    uint64_t n_steps;      /* whose query had old tokens */
    uint64_t n_old_tokens; /* summed over these steps */
    const double
        *kept; /* [n_layers][n_kv_heads]: share of the old tokens that was read from the stores; NULL: no step yet */
    const struct hcattn_store_read *reads; /* rows that aggregates read */
    size_t n_reads;
    uint64_t exact_bytes; /* on the device now: rows of the exact set */
    uint64_t key_bytes;   /* and keys of old tokens */
    /* Time of the steps it was part of, shared with the others of the batch. */
    uint64_t select_us;    /* scoring and selection */
    uint64_t attention_us; /* exact set and merge */
    uint64_t store_wait_us;
    uint64_t matmul_us; /* all the rest of the network */
    uint64_t step_us;   /* all together */
};

/* FastGen: which fixed set of tokens is enough for a head. Numbers are those of HeadClass in proto/hcattn.proto. */
enum hcattn_head_class {
    HCATTN_HEAD_FULL = 0,        /* keeps quantized keys of all old tokens */
    HCATTN_HEAD_SPECIAL = 1,     /* special tokens */
    HCATTN_HEAD_PUNCTUATION = 2, /* and punctuation */
    HCATTN_HEAD_FREQUENT = 3,    /* and the tokens with the most attention */
    HCATTN_HEAD_LOCAL = 4,       /* and the last ones */
};
const char *hcattn_head_class_name(enum hcattn_head_class head_class); /* "full", "special", ... */

struct hcattn_profile {
    uint64_t n_tokens;      /* the session held when it was profiled */
    float recovery;         /* asked for */
    const uint8_t *classes; /* [n_layers][n_kv_heads], enum hcattn_head_class */
    const float *kept_mass; /* [n_layers][n_kv_heads]: share of the attention mass that the class keeps */
};

struct hcattn_description {
    struct hcattn_session_stats stats;
    uint32_t n_layers;
    uint32_t n_kv_heads;
    bool counted; /* a worker holds it: `counts` means something */
    struct hcattn_counts counts;
    bool profiled; /* FastGen residency, and it was profiled: `profile` means something */
    struct hcattn_profile profile;
    struct hcattn_session_stats *owned_stats; /* what `stats` is a copy of and points into */
    void *owner;
};

int hcattn_describe_session(struct hcattn *client, uint64_t session, uint32_t timeout_ms,
                            struct hcattn_description *ret_description, struct hcattn_error *ret_error);
void hcattn_description_free(
    struct hcattn_description *description); /* accepts NULL and a zeroed one; leaves it zeroed */

/* ---- input ---- */

struct hcattn_message {
    const char *role; /* "system", "user", "assistant" */
    const char *content;
};

/* One of text, ids, messages is set; none of them: no input. */
struct hcattn_input {
    const char *text;
    const uint32_t *ids;
    size_t n_ids;
    const struct hcattn_message *messages;
    size_t n_messages;
    bool continued;     /* the messages follow what the session holds already */
    bool parse_special; /* special tokens in `text` are tokens; otherwise they are text */
    bool no_bos;
};

/* ---- what a running request tells ---- */

struct hcattn_accepted {
    const uint32_t *prompt_ids;
    size_t n_prompt_ids;
    uint64_t at; /* tokens the session held before */
    uint64_t reserved_tokens;
};

struct hcattn_top {
    uint32_t id;
    float logprob;
};

struct hcattn_logprobs {
    float logprob;
    const struct hcattn_top *top;
    size_t n_top;
    const float *all; /* [n_all], NULL unless asked for */
    size_t n_all;
};

struct hcattn_generated {
    uint32_t first; /* index of ids[0] among the generated tokens */
    const uint32_t *ids;
    size_t n_ids;     /* 0: rest of the text only */
    const char *text; /* never ends inside a UTF-8 character; may lag behind the ids */
    size_t text_bytes;
    const struct hcattn_logprobs *logprobs; /* [n_ids], or NULL */
};

struct hcattn_scored {
    uint64_t first; /* position of scores[0] */
    const struct hcattn_logprobs *scores;
    size_t n_scores;
};

/* Any of them may be NULL. A result other than 0 ends the request: the call returns -ECANCELED. They run in the thread of
 * the call and must not make calls of the same client. */
struct hcattn_events {
    void *context;
    int (*accepted)(void *context, const struct hcattn_accepted *accepted);
    int (*progress)(void *context, uint64_t n_done, uint64_t n_total); /* of a prefill; may start again after a loss */
    int (*generated)(void *context, const struct hcattn_generated *generated);
    int (*scored)(void *context, const struct hcattn_scored *scored);
};

struct hcattn_timings {
    uint64_t queued_us;
    uint64_t prefill_us;
    uint64_t decode_us;
    uint64_t n_prefill;
    uint64_t n_decode;
    uint64_t store_wait_us;
};

/* Tokens the session must hold before the request: HCATTN_CONFLICT otherwise. With HCATTN_AT_ANY a coordinator that is lost
 * before it has accepted the request ends the call (-ENOTCONN): whether the input was taken cannot be known. */
#define HCATTN_AT_ANY UINT64_MAX

/* ---- work on a session ---- */

struct hcattn_appended {
    uint64_t n_input_tokens;
    uint64_t n_tokens; /* the session holds now */
    struct hcattn_timings timings;
};

/* events: accepted and progress. ret_appended may be NULL. */
int hcattn_append(struct hcattn *client, uint64_t session, const struct hcattn_input *input, uint64_t at,
                  const struct hcattn_events *events, uint32_t timeout_ms, struct hcattn_appended *ret_appended,
                  struct hcattn_error *ret_error);

struct hcattn_bias {
    uint32_t id;
    float bias; /* -INFINITY forbids the token */
};

struct hcattn_sampling {
    float temperature;    /* 0: greedy */
    uint32_t top_k;       /* 0: off */
    float top_p;          /* 0 or 1: off */
    float min_p;          /* 0: off */
    float repeat_penalty; /* 0 or 1: off */
    float presence_penalty;
    float frequency_penalty;
    uint32_t penalty_window; /* at most 4,096; 0: 64 */
    uint64_t seed;
    const struct hcattn_bias *bias;
    size_t n_bias;
};

struct hcattn_generate {
    uint64_t session;
    struct hcattn_input input;
    uint64_t at;         /* or HCATTN_AT_ANY */
    uint32_t max_tokens; /* 0: the server's default */
    struct hcattn_sampling sampling;
    bool logprobs;
    uint32_t top_logprobs; /* at most 20 */
    bool ignore_end;
    const char *const *stop; /* strings that end the generation */
    size_t n_stop;
};

enum hcattn_finish { HCATTN_FINISH_LENGTH = 1, HCATTN_FINISH_END = 2, HCATTN_FINISH_STOP = 3 };
const char *hcattn_finish_name(enum hcattn_finish finish); /* "length", "end", "stop" */

struct hcattn_finished {
    enum hcattn_finish reason;
    uint32_t n_generated;
    uint64_t n_tokens;             /* the session holds now */
    uint32_t end_id;               /* HCATTN_FINISH_END */
    struct hcattn_timings timings; /* of the last attempt */
};

int hcattn_generate(struct hcattn *client, const struct hcattn_generate *generate, const struct hcattn_events *events,
                    uint32_t timeout_ms, struct hcattn_finished *ret_finished, struct hcattn_error *ret_error);

struct hcattn_score {
    uint64_t session;
    struct hcattn_input input;
    uint64_t at;   /* or HCATTN_AT_ANY */
    uint64_t from; /* first position computed as a decode step; at least 1 */
    bool all_logprobs;
    uint32_t top_logprobs;
};

struct hcattn_score_done {
    uint64_t n_tokens;
    struct hcattn_timings timings;
};

/* events: accepted, progress and scored. */
int hcattn_score(struct hcattn *client, const struct hcattn_score *score, const struct hcattn_events *events,
                 uint32_t timeout_ms, struct hcattn_score_done *ret_done, struct hcattn_error *ret_error);

/* ---- text ---- */

struct hcattn_piece {
    const uint8_t *bytes; /* not always UTF-8 by itself */
    size_t n_bytes;
};

struct hcattn_tokens {
    size_t n_ids;
    const uint32_t *ids;
    size_t n_pieces; /* n_ids, or 0 */
    const struct hcattn_piece *pieces;
    void *owner;
};

int hcattn_tokenize(struct hcattn *client, const struct hcattn_input *input, uint32_t timeout_ms,
                    struct hcattn_tokens *ret_tokens, struct hcattn_error *ret_error);
void hcattn_tokens_free(struct hcattn_tokens *tokens); /* accepts NULL and a zeroed one; leaves it zeroed */

/* ret_text: malloc'd; bytes that are no UTF-8 appear as U+FFFD. */
int hcattn_detokenize(struct hcattn *client, const uint32_t *ids, size_t n_ids, bool special, uint32_t timeout_ms,
                      char **ret_text, struct hcattn_error *ret_error);

/* ---- the service ---- */

struct hcattn_health {
    bool live;
    bool ready;
    uint64_t coordinator; /* incarnation */
    char sentence[HCATTN_SENTENCE_SIZE];
};

int hcattn_health(struct hcattn *client, uint32_t timeout_ms, struct hcattn_health *ret_health,
                  struct hcattn_error *ret_error);

struct hcattn_process_stats {
    const char *program;
    uint32_t index;
    uint32_t pid;
    const char *state;
    int32_t node; /* -1: unbound */
    uint32_t n_starts;
    const char *achieved;
    const char *phase;
    uint64_t bytes_total;
    uint64_t bytes_used;
    uint64_t bytes_served;
    uint64_t n_requests;
    uint64_t n_tokens;
    uint64_t weight_bytes;
    uint64_t incarnation;
    uint64_t device_budget_bytes; /* workers; 0: no limit */
    uint64_t device_bytes;        /* workers: in use */
    uint32_t n_sessions;          /* workers: bound to it */
    uint32_t home_node;           /* stores: the node that it is meant for, bound or not */
    uint32_t node_cores;          /* stores: of that node, as far as it may use them */
    uint64_t bytes_resident;      /* stores: pages of its memory that are mapped, */
    uint64_t bytes_local;         /* and those of them on its node */
    uint64_t bytes_per_s;         /* stores: rows read over the last seconds */
};

struct hcattn_stats {
    const char *version;
    const char *model;
    const char *transport;
    const char *policy;
    uint32_t n_ctx;
    uint32_t default_max_tokens;
    uint64_t device_bytes_per_token;
    uint64_t store_bytes_per_token;
    uint64_t uptime_s;
    uint32_t exact_tokens; /* default of new sessions; 0: none */
    uint32_t n_running;    /* requests */
    uint32_t n_queued;
    uint32_t max_queued;
    bool draining;
    const char *row_codec; /* "f16", "q8_0" */
    size_t n_processes;
    const struct hcattn_process_stats *processes;
    size_t n_sessions;
    const struct hcattn_session_stats *sessions;
    void *owner;
};

int hcattn_stats(struct hcattn *client, uint32_t timeout_ms, struct hcattn_stats *ret_stats,
                 struct hcattn_error *ret_error);
void hcattn_stats_free(struct hcattn_stats *stats); /* accepts NULL and a zeroed one; leaves it zeroed */

/* ---- operating ---- */

struct hcattn_drained {
    uint32_t n_finished; /* requests that ended meanwhile */
    uint32_t n_sessions; /* still open */
};

/* The service refuses new sessions and requests (HCATTN_UNAVAILABLE) and finishes what runs; returns when nothing runs any
 * more. With `resume` it takes requests again, at once. A call that ends early (deadline, cancel, `progress`) leaves the
 * service draining.
 * progress (may be NULL) is told about once a second what is left; other than 0 ends the call: -ECANCELED. It must not
 * make calls of the same client. ret_drained may be NULL. */
int hcattn_drain(struct hcattn *client, bool resume,
                 int (*progress)(void *context, uint32_t n_running, uint32_t n_queued), void *context,
                 uint32_t timeout_ms, struct hcattn_drained *ret_drained, struct hcattn_error *ret_error);

struct hcattn_store_drain {
    uint32_t n_sessions_left;
    uint64_t bytes_left; /* blocks that sessions have in it */
    uint64_t bytes_moved;
    const char *waits; /* why nothing moves now, one sentence; empty: it does */
};

struct hcattn_store_drained {
    uint32_t n_sessions; /* that were moved */
    uint64_t bytes_moved;
};

/* Lets one store leave while sessions run: what it holds moves to the other stores between steps; returns when it is empty and
 * has left. A session that does not fit elsewhere waits for room. With `resume` the store takes sessions again, one that
 * has left is started again; returns when it serves. A call that ends early (deadline, cancel, `progress`) leaves the drain
 * going on. progress, ret_drained: as of hcattn_drain(). */
int hcattn_drain_store(struct hcattn *client, uint32_t store, bool resume,
                       int (*progress)(void *context, const struct hcattn_store_drain *drain), void *context,
                       uint32_t timeout_ms, struct hcattn_store_drained *ret_drained, struct hcattn_error *ret_error);

/* How requests travel to the stores from now on, running generations included: "ring" or "routed". */
int hcattn_set_transport(struct hcattn *client, const char *transport, uint32_t timeout_ms,
                         struct hcattn_error *ret_error);

#ifdef __cplusplus
}
#endif
