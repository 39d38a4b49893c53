/*
 * session.h - what a session has on the device: its exact rows and its quantized keys.
 *
 * Owner      the engine; one thread. Nothing here is the only copy: all of it can be rebuilt from the stores.
 * Memory     exact rows: [layer][kv_head][4 sinks + window blocks x 64] rows as the row codec has them; a block's place in the
 *            window is number mod window blocks. The window has two blocks, or as many as hold everything while the session
 *            has no more than its exact tokens.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "gpu-worker/backend/backend.h"
#include "gpu-worker/fastgen/fastgen.h"
#include "gpu-worker/policy/policy.h"
#include "gpu-worker/keys/key_cache.h"
#include "proto/layout.h"

/* Counted over the decode steps of a session; hcattn.SessionCounts. */
struct session_counts {
    uint64_t n_steps, n_old_tokens;
    uint64_t select_us, attention_us, store_wait_us, matmul_us, step_us;
    uint64_t *n_kept;                    /* [n_layers][n_kv_heads] */
    uint64_t bytes_read[LAYOUT_N_LANES]; /* by lane */
};

struct session {
    struct session *next;
    uint64_t id;
    uint32_t n_rows;    /* tokens that it holds: rows of all layers, as far as they are kept */
    uint32_t n_touched; /* rows of tokens up to there may have been put, by a step that did not come to its end */
    uint32_t exact_tokens;
    struct row_shape shape;
    uint64_t used; /* grows; the smallest was used longest ago */
    uint32_t n_window_blocks;
    uint8_t *exact; /* device memory */
    const struct key_quantizer *quantizer;
    struct key_cache *keys;
    struct fastgen_profile *profile; /* of policies with fastgen, once a decode step needed it */
    struct session_counts counts;
    uint8_t lane_store[LAYOUT_N_LANES];
    const struct backend_ops *ops;
    struct backend *backend;
};

/* A session that holds nothing and has no room yet. -ENOMEM. */
int session_new(uint64_t id, const struct row_shape *shape, const struct policy *policy, uint32_t exact_tokens,
                const struct backend_ops *ops, struct backend *backend, struct session **ret_session);
struct session *session_free(struct session *session); /* accepts NULL, returns NULL */
/* It holds nothing any more, no profile either; `policy` may be another than before. -ENOMEM. */
int session_reset(struct session *session, const struct policy *policy);
/* From now on heads that need no keys by this profile (taken over) have none; keys are to be added again. -ENOMEM: unchanged. */
int session_set_profile(struct session *session, struct fastgen_profile *profile);
/* It holds nothing any more, and has no device memory. */
void session_release(struct session *session);

/* Device bytes of a session with so many window blocks and old blocks, and what it has now. */
size_t session_bytes_for(const struct row_shape *shape, const struct key_quantizer *quantizer, uint32_t n_window_blocks,
                         uint32_t n_old_blocks);
size_t session_exact_bytes(const struct session *session);
size_t session_bytes(const struct session *session);

/*
 * Room for a window and for the keys of n_old_blocks, so that steps do not allocate; rows that the new window still has are
 * kept. -ENOMEM: unchanged.
 */
int session_reserve(struct session *session, uint32_t n_window_blocks, uint32_t n_old_blocks);

/* Is `position` in the exact set of a query at `last`, i.e. must its rows be kept when `last` has been computed? */
bool session_keeps(const struct session *session, uint32_t position, uint32_t last);

/*
 * Can a run go on at `position` with what is there? Also where rows from there on have been put before - its last step was
 * stopped, or what it computed was not wanted -, as long as none of them has taken the place of one that is still needed.
 */
bool session_goes_on(const struct session *session, uint32_t position);

/*
 * Takes rows (device memory) of positions [first, first + n) in one layer; positions come in order. That of (position, KV head) is
 * at rows + (position - first) * token_bytes + kv_head * head_bytes.
 */
void session_put_rows(struct session *session, uint32_t layer, uint32_t first, uint32_t n, const void *rows,
                      size_t token_bytes, size_t head_bytes);

/* Most pieces of an exact set. */
uint32_t session_max_pieces(const struct session *session);
/*
 * The exact set of a query at `position` (whose own row has been put) as pieces in the canonical order: sinks, the blocks
 * before, the own block up to the position. Returns how many (1 .. session_max_pieces()).
 */
uint32_t session_pieces(const struct session *session, uint32_t layer, uint32_t kv_head, uint32_t position,
                        struct backend_piece *pieces);
