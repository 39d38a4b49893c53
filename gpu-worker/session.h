/*
 * session.h - what a device holds of one session: the exact set and the quantized keys of old blocks.
 *
 * Owner      the engine thread.
 * Invariant  positions [0, n_rows) are represented: the sinks and the last two blocks as exact rows, blocks older than
 *            those in the key cache. Everything here can be rebuilt from the stores.
 * Memory     exact rows: [layer][kv_head][4 sinks + 2 x 64 window][K|V] f16; a block's window slot is number mod 2.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "gpu-worker/backend/backend.h"
#include "gpu-worker/keys/key_cache.h"
#include "proto/layout.h"

enum { SESSION_MAX_PIECES = 3 };

struct session {
    struct session *next;
    uint64_t id;
    uint32_t n_rows;
    struct row_shape shape;
    uint16_t *exact; /* device memory */
    struct key_cache *keys;
    const struct backend_ops *ops;
    struct backend *backend;
};

int session_new(uint64_t id, const struct row_shape *shape, const struct key_codec *codec,
                const struct backend_ops *ops, struct backend *backend, struct session **ret_session); /* -ENOMEM */
struct session *session_free(struct session *session);                     /* accepts NULL, returns NULL */
int session_reset(struct session *session, const struct key_codec *codec); /* holds nothing; -ENOMEM */

/* Bytes on the device for the exact set of a session. */
size_t session_exact_bytes(const struct row_shape *shape);

/* Is `position` in the exact set of a query at `last`, i.e. must its rows be kept when `last` has been computed? */
bool session_keeps(uint32_t position, uint32_t last);

/* Takes the rows [kv_head][K|V] of one position and layer; positions come in order. */
void session_put_rows(struct session *session, uint32_t layer, uint32_t position, const uint16_t *rows);

/*
 * The exact set of a query at `position` (whose own row has been put) as pieces in the canonical order: sinks, the block
 * before, the own block up to the position. Returns how many (1 .. SESSION_MAX_PIECES).
 */
uint32_t session_pieces(const struct session *session, uint32_t layer, uint32_t kv_head, uint32_t position,
                        struct backend_piece pieces[SESSION_MAX_PIECES]);
