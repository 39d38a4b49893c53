/*
 * layout.h - what lies in shared memory: the segment of a store and the exchange between a worker and a store.
 *
 * Owner      segment: its value-store, the only writer; coordinator and workers map it read-only.
 *            exchange: made by the worker; it writes requests, the store writes replies.
 * Threads    counts that others read (n_ids, n_rows, answered) are written last, with release order.
 * Invariant  every struct has a fixed size; raise LAYOUT_VERSION with any change below.
 *            Whatever is read from another process's memory is copied and checked before it is used.
 *
 * Words      block: 64 tokens x every layer x every KV head. Handle: index + generation of a block in one store.
 *            number: position of a block in its session (token t lies in block t / 64). Lane: number mod 12.
 *            id: a token id in the journal; row: K and V of one token, layer and KV head, [K | V] as the row codec has it.
 */
#pragma once

#include <assert.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "common/bell.h"

#define LAYOUT_VERSION      3u
#define LAYOUT_BLOCK_TOKENS 64u
#define LAYOUT_N_LANES      12u
#define LAYOUT_N_SINKS      4u
#define LAYOUT_MAX_LAYERS   512u
#define LAYOUT_MAX_STORES   12u /* that serve one session */
#define LAYOUT_PAGE_BYTES   4096u
#define LAYOUT_POLICY_BYTES 64u

#define SEGMENT_MAGIC  0x47534348u /* "HCSG" */
#define BLOCK_MAGIC    0x4b4c4248u /* "HBLK" */
#define EXCHANGE_MAGIC 0x43584348u /* "HCXC" */
#define REQUEST_MAGIC  0x51524348u /* "HCRQ" */
#define REPLY_MAGIC    0x50524348u /* "HCRP" */

/*
 * How a row keeps its numbers. Every consumer of a row sees it as its codec decodes it.
 *     f16    [K head_dim | V head_dim], half precision
 *     q8_0   [K int8 head_dim | V int8 head_dim | K scales | V scales]; one f16 scale a group of 32 numbers (the last may be
 *            shorter); number = int8 x scale; scale = largest magnitude / 127, rounded to f16
 */
enum row_codec { ROW_CODEC_F16 = 1, ROW_CODEC_Q8_0 = 2 };
#define LAYOUT_Q8_GROUP 32u

/* All that a store knows of a model. */
struct row_shape {
    uint32_t n_layers;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t codec; /* enum row_codec */
};
static_assert(sizeof(struct row_shape) == 16, "raise LAYOUT_VERSION");

/* Names a block for one life of it; a stale handle is refused, never served from the block's next life. */
struct block_handle {
    uint32_t index;      /* < n_blocks of the segment */
    uint32_t generation; /* > 0; grows by at least one with every reservation of the block */
};
static_assert(sizeof(struct block_handle) == 8, "raise LAYOUT_VERSION");

/* ---- segment: header page, session records, blocks ---- */

struct segment_header {
    uint32_t magic;
    uint32_t layout;
    uint64_t n_bytes;          /* whole segment */
    uint64_t incarnation;      /* of the store that owns it now; rewritten at adoption */
    uint64_t session_capacity; /* records */
    uint64_t sessions_offset;  /* multiple of 4096 */
    uint64_t blocks_offset;    /* multiple of 4096 */
    uint64_t block_bytes;      /* multiple of 4096 */
    uint32_t n_blocks;
    uint32_t store; /* number of the store on its host */
    struct row_shape shape;
    int32_t numa_node;      /* where pages are bound; -1: unbound */
    _Atomic uint32_t ready; /* 0, then 1 with release order */
    uint8_t padding[40];
};
static_assert(sizeof(struct segment_header) == 128, "raise LAYOUT_VERSION");

enum session_record_state { SESSION_RECORD_FREE = 0, SESSION_RECORD_LIVE = 1 };

/* A session as every store that serves it remembers it: enough for a new coordinator to go on. */
struct session_record {
    uint64_t session;  /* random, never 0 */
    uint64_t model[2]; /* content hash of the model its rows belong to */
    uint64_t opened_unix_s;
    uint32_t exact_tokens;
    uint32_t flags; /* SESSION_EPHEMERAL ... */
    uint32_t idle_timeout_s;
    _Atomic uint32_t state; /* enum session_record_state; written last */
    /* Which store each lane lives in: lane_store[moves % 2]. A move writes the other one, then `moves` with release order, so
     * that a store killed in between holds one whole answer. Of records that differ the one with the most moves is true. */
    uint8_t lane_store[2][LAYOUT_N_LANES];
    _Atomic uint32_t moves; /* how often lanes went to other stores */
    uint8_t padding0[4];
    char policy[LAYOUT_POLICY_BYTES]; /* zero-terminated */
    uint8_t padding[48];
};
static_assert(sizeof(struct session_record) == 192, "raise LAYOUT_VERSION");

#define SESSION_EPHEMERAL 1u /* closed by itself when its running request cannot be delivered */

enum block_state {
    BLOCK_FREE = 0,
    BLOCK_OPEN = 1,   /* reserved for a session; takes ids and rows */
    BLOCK_SEALED = 2, /* 64 ids and rows in every layer, checksum set; never changes again */
};

struct block_header {
    uint32_t magic;
    uint32_t layout;
    struct block_handle handle;   /* its own */
    struct block_handle previous; /* the session's block number - 1; generation 0: this is the first */
    uint32_t previous_store;
    uint32_t number; /* of this block in its session */
    uint64_t session;
    uint64_t writer;        /* incarnation of the store that wrote last */
    _Atomic uint32_t state; /* enum block_state */
    _Atomic uint32_t n_ids; /* ids[0 .. n_ids) are the journal */
    uint32_t checksum;      /* sealed: CRC-32C of ids, sums and rows */
    uint32_t padding0;
    /* Bit j < n_ids: token j is a decode step's, not a prefill's. Who goes on after the last token without new input computes
     * it the same way, and gets what an uninterrupted generation had; a fork and a new worker can tell. */
    _Atomic uint64_t decoded;
    uint32_t ids[LAYOUT_BLOCK_TOKENS];
    _Atomic uint8_t n_rows[LAYOUT_MAX_LAYERS]; /* per layer: rows [0, n_rows) are complete for all KV heads */
};
static_assert(sizeof(struct block_header) == 72 + 256 + 512, "raise LAYOUT_VERSION");
static_assert(sizeof(struct block_header) <= LAYOUT_PAGE_BYTES, "a block header fits one page");

/*
 * A block: header page; sums f32 [layer][kv_head][K|V][head_dim] (valid for a layer once its 64 rows are there);
 * rows [layer][kv_head][64][layout_row_bytes], so that the rows a KV head selects are contiguous runs.
 */
static inline uint64_t layout_row_bytes(const struct row_shape *shape)
{
    uint64_t groups = (shape->head_dim + LAYOUT_Q8_GROUP - 1) / LAYOUT_Q8_GROUP;
    return shape->codec == ROW_CODEC_Q8_0 ? 2 * ((uint64_t)shape->head_dim + 2 * groups)
                                          : (uint64_t)shape->head_dim * 2 * 2;
}
static inline uint64_t layout_head_rows_bytes(const struct row_shape *shape)
{
    return LAYOUT_BLOCK_TOKENS * layout_row_bytes(shape);
}
static inline uint64_t layout_sums_offset(void)
{
    return LAYOUT_PAGE_BYTES;
}
static inline uint64_t layout_sums_bytes(const struct row_shape *shape)
{
    return (uint64_t)shape->n_layers * shape->n_kv_heads * 2 * shape->head_dim * sizeof(float);
}
static inline uint64_t layout_rows_offset(const struct row_shape *shape)
{
    return (layout_sums_offset() + layout_sums_bytes(shape) + LAYOUT_PAGE_BYTES - 1) / LAYOUT_PAGE_BYTES *
           LAYOUT_PAGE_BYTES;
}
static inline uint64_t layout_block_bytes(const struct row_shape *shape)
{
    uint64_t bytes =
        layout_rows_offset(shape) + (uint64_t)shape->n_layers * shape->n_kv_heads * layout_head_rows_bytes(shape);
    return (bytes + LAYOUT_PAGE_BYTES - 1) / LAYOUT_PAGE_BYTES * LAYOUT_PAGE_BYTES;
}
/* Offset inside a block of row 0 of (layer, kv_head). */
static inline uint64_t layout_head_rows_offset(const struct row_shape *shape, uint32_t layer, uint32_t kv_head)
{
    return layout_rows_offset(shape) + ((uint64_t)layer * shape->n_kv_heads + kv_head) * layout_head_rows_bytes(shape);
}
/* Offset inside a block of the sums of (layer, kv_head). */
static inline uint64_t layout_head_sums_offset(const struct row_shape *shape, uint32_t layer, uint32_t kv_head)
{
    return layout_sums_offset() + ((uint64_t)layer * shape->n_kv_heads + kv_head) * 2 * shape->head_dim * sizeof(float);
}
/* A shape that a peer or a file gave: 0, or -EINVAL (checked by layout_check_shape in layout.c). */
int layout_check_shape(const struct row_shape *shape);
/*
 * A segment mapped from a peer: header complete, ready, sizes consistent with n_bytes of the mapping.
 * 0, -EPROTO (not a segment, other layout, sizes that do not add up), -EAGAIN (not ready).
 */
int layout_check_segment(const void *mapping, uint64_t n_bytes);

static inline struct block_header *layout_block(const void *segment, uint32_t index)
{
    const struct segment_header *header = (const struct segment_header *)segment;
    return (struct block_header *)((uintptr_t)segment + header->blocks_offset + index * header->block_bytes);
}

/* ---- exchange: header page, then n_slots x (request area, reply area) ---- */

struct exchange_header {
    uint32_t magic;
    uint32_t layout;
    uint64_t n_bytes;
    uint64_t worker; /* incarnations of the pair */
    uint64_t store;
    uint32_t n_slots;       /* 1 .. EXCHANGE_MAX_SLOTS */
    uint32_t request_bytes; /* of one slot's request area, multiple of 4096 */
    uint32_t reply_bytes;   /* of one slot's reply area, multiple of 4096 */
    _Atomic uint32_t ready;
    uint8_t padding[16];
};
static_assert(sizeof(struct exchange_header) == 64, "raise LAYOUT_VERSION");

#define EXCHANGE_MAX_SLOTS 16u

/*
 * The ring of an exchange, in its header page: descriptors that do not go through the coordinator, once it has granted that
 * (RingGrant). The worker writes what to serve into the slot's post, `request` last with release order, and rings `requests`.
 * The store serves posts whose request it has not served yet, oldest id first, exactly as if a descriptor had come; the reply's
 * `answered` says that it is done; then it rings `replies`. A slot's post is not written again before that (quarantine as ever).
 */
struct ring_post {
    _Atomic uint64_t request; /* id; 0: nothing was ever posted here */
    uint32_t n_bytes;
    uint32_t padding;
};
static_assert(sizeof(struct ring_post) == 16, "raise LAYOUT_VERSION");

struct exchange_ring {
    _Atomic uint32_t serving; /* by the store: 1 while it takes posts */
    uint8_t padding[60];
    struct bell requests; /* rung by the worker */
    struct bell replies;  /* rung by the store */
    struct ring_post posts[EXCHANGE_MAX_SLOTS];
};
static_assert(sizeof(struct exchange_ring) == 192 + EXCHANGE_MAX_SLOTS * 16, "raise LAYOUT_VERSION");
#define EXCHANGE_RING_OFFSET 1024u
static_assert(EXCHANGE_RING_OFFSET + sizeof(struct exchange_ring) <= LAYOUT_PAGE_BYTES,
              "the ring lies in the header page");

static inline struct exchange_ring *layout_ring(void *exchange)
{
    return (struct exchange_ring *)((uintptr_t)exchange + EXCHANGE_RING_OFFSET);
}

static inline uint64_t layout_request_offset(const struct exchange_header *exchange, uint32_t slot)
{
    return LAYOUT_PAGE_BYTES + (uint64_t)slot * ((uint64_t)exchange->request_bytes + exchange->reply_bytes);
}
static inline uint64_t layout_reply_offset(const struct exchange_header *exchange, uint32_t slot)
{
    return layout_request_offset(exchange, slot) + exchange->request_bytes;
}
/* As layout_check_segment, for an exchange that a worker sent. */
int layout_check_exchange(const void *mapping, uint64_t n_bytes);

/* Offsets in a request are from the start of its request area, 16-byte aligned; results' are from the start of the reply area. */
struct request_header {
    uint32_t magic;
    uint32_t n_bytes; /* of the request, this header included */
    uint64_t request; /* id; equal to the descriptor's */
    uint32_t layer;   /* of the items */
    uint32_t n_appends;
    uint32_t n_items;
    uint32_t n_blocks;
    uint32_t n_fetches;
    uint32_t appends_offset; /* struct append_entry [n_appends] */
    uint32_t items_offset;   /* struct aggregate_item [n_items] */
    uint32_t blocks_offset;  /* struct block_handle [n_blocks] */
    uint32_t fetches_offset; /* struct fetch_entry [n_fetches] */
    uint32_t padding[3];
};
static_assert(sizeof(struct request_header) == 64, "raise LAYOUT_VERSION");

#define APPEND_IDS     1u /* ids of the tokens come with it (the layer that comes first, or ids alone) */
#define APPEND_ROWS    2u /* rows of `layer` come with it */
#define APPEND_DECODED 4u /* with ids: they are of decode steps */

/*
 * New tokens of one block and layer. Appending is idempotent: ids and rows that are there already are skipped (ids must be
 * equal), since a repeated step computes the same bits. A gap is refused. A request may carry several layers.
 */
struct append_entry {
    uint64_t session;
    struct block_handle handle;
    uint32_t layer;
    uint32_t first_token; /* in the block */
    uint32_t n_tokens;
    uint32_t flags;
    uint32_t ids_offset;  /* uint32_t [n_tokens] */
    uint32_t rows_offset; /* [n_tokens][kv_head][layout_row_bytes] */
};
static_assert(sizeof(struct append_entry) == 40, "raise LAYOUT_VERSION");

enum aggregate_mode {
    AGGREGATE_RESCORE = 1, /* exact softmax over the selected, from q . K */
    AGGREGATE_WEIGHTS = 2, /* sum of the selected with the weights given (HCAttention as published) */
};

/*
 * Sum over selected rows of one session and KV head, for the query heads of that KV head; a partial per lane.
 * A lane's partial: the selected of its blocks in order (lane.h), then its tail - for each block the approximate mass of
 * what was not selected times the mean value of the block's 64 tokens - merged into it.
 * Masses and weights are exp(score - reference), one reference a query.
 */
struct aggregate_item {
    uint64_t session;
    uint32_t kv_head;
    uint32_t mode;
    uint32_t n_queries;
    uint32_t q_offset;       /* rescore: f32 [n_queries][head_dim] */
    uint32_t first_block;    /* into the request's blocks; items may share them */
    uint32_t n_blocks;       /* in order of lane, then of block number */
    uint32_t lanes;          /* bit per lane that the blocks touch */
    uint32_t masks_offset;   /* uint64_t [n_blocks]: bit j = token j of the block is selected; may be 0 */
    uint32_t masses_offset;  /* f32 [n_queries][n_blocks]; 0: no tail */
    uint32_t weights_offset; /* mode weights: f32 [n_queries][n_weights], the selected in order of blocks and tokens */
    uint32_t n_weights;      /* mode weights: bits of the masks; else 0 */
    uint32_t references_offset; /* f32 [n_queries]; 0: no tail and no weights */
    uint32_t result_offset;     /* f32 [lane of `lanes`, ascending][n_queries][2 + head_dim] */
    float scale;                /* multiplies q . K */
};
static_assert(sizeof(struct aggregate_item) == 64, "raise LAYOUT_VERSION");

/* Give rows back: result is [n_tokens][layout_row_bytes] of one layer and KV head. */
struct fetch_entry {
    uint64_t session;
    struct block_handle handle;
    uint32_t layer;
    uint32_t kv_head;
    uint32_t first_token;
    uint32_t n_tokens;
    uint32_t result_offset;
    uint32_t padding;
};
static_assert(sizeof(struct fetch_entry) == 40, "raise LAYOUT_VERSION");

/* First in the reply area. `status` covers the whole request: on an error nothing of the results is valid. */
struct reply_header {
    uint32_t magic;
    int32_t
        status; /* 0, or -errno: -ESTALE handle, -EEXIST another id is there, -ENODATA gap or row not there, -EINVAL ... */
    uint32_t entry;      /* on an error: which entry (REPLY_ENTRY_... kind in the top 2 bits, index below) */
    uint32_t n_bytes;    /* of the reply, this header included */
    uint32_t service_us; /* time the store spent on it */
    uint32_t n_rows_read;
    _Atomic uint64_t answered; /* id of the request this answers; written last, with release order */
    uint8_t padding[32];
};
static_assert(sizeof(struct reply_header) == 64, "raise LAYOUT_VERSION");

#define REPLY_ENTRY_NONE         0u
#define REPLY_ENTRY_APPEND       1u
#define REPLY_ENTRY_AGGREGATE    2u
#define REPLY_ENTRY_FETCH        3u
#define REPLY_ENTRY(kind, index) ((uint32_t)(kind) << 30 | ((index)&0x3fffffffu))
