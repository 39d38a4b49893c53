#include "gpu-worker/session.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/policy/exact_set.h"

enum { EXACT_ROWS = LAYOUT_N_SINKS + EXACT_SET_WINDOW_BLOCKS * LAYOUT_BLOCK_TOKENS };

size_t session_exact_bytes(const struct row_shape *shape)
{
    return (size_t)shape->n_layers * shape->n_kv_heads * EXACT_ROWS * layout_row_bytes(shape);
}

int session_new(uint64_t id, const struct row_shape *shape, const struct key_codec *codec,
                const struct backend_ops *ops, struct backend *backend, struct session **ret_session)
{
    struct session *session = calloc(1, sizeof(*session));
    if (session == NULL)
        return -ENOMEM;
    session->id = id;
    session->shape = *shape;
    session->ops = ops;
    session->backend = backend;
    session->exact = ops->alloc(backend, session_exact_bytes(shape));
    if (session->exact == NULL || session_reset(session, codec) < 0) {
        session_free(session);
        return -ENOMEM;
    }
    *ret_session = session;
    return 0;
}

struct session *session_free(struct session *session)
{
    if (session == NULL)
        return NULL;
    if (session->exact != NULL)
        session->ops->free(session->backend, session->exact);
    key_cache_free(session->keys);
    free(session);
    return NULL;
}

int session_reset(struct session *session, const struct key_codec *codec)
{
    session->n_rows = 0;
    session->keys = key_cache_free(session->keys);
    return key_cache_new(codec, &session->shape, &session->keys);
}

bool session_keeps(uint32_t position, uint32_t last)
{
    return position < LAYOUT_N_SINKS || position / LAYOUT_BLOCK_TOKENS >= exact_set_n_old_blocks(last);
}

static uint16_t *head_rows(const struct session *session, uint32_t layer, uint32_t kv_head)
{
    size_t row = 2 * (size_t)session->shape.head_dim;
    return session->exact + ((size_t)layer * session->shape.n_kv_heads + kv_head) * EXACT_ROWS * row;
}

static uint32_t window_row(uint32_t position)
{
    uint32_t slot = position / LAYOUT_BLOCK_TOKENS % EXACT_SET_WINDOW_BLOCKS;
    return LAYOUT_N_SINKS + slot * LAYOUT_BLOCK_TOKENS + position % LAYOUT_BLOCK_TOKENS;
}

void session_put_rows(struct session *session, uint32_t layer, uint32_t position, const uint16_t *rows)
{
    size_t row = 2 * (size_t)session->shape.head_dim;
    for (uint32_t head = 0; head < session->shape.n_kv_heads; head++) {
        uint16_t *to = head_rows(session, layer, head);
        memcpy(to + window_row(position) * row, rows + head * row, row * sizeof(*rows));
        if (position < LAYOUT_N_SINKS)
            memcpy(to + position * row, rows + head * row, row * sizeof(*rows));
    }
}

uint32_t session_pieces(const struct session *session, uint32_t layer, uint32_t kv_head, uint32_t position,
                        struct backend_piece pieces[SESSION_MAX_PIECES])
{
    size_t row = 2 * (size_t)session->shape.head_dim;
    const uint16_t *rows = head_rows(session, layer, kv_head);
    uint32_t block = position / LAYOUT_BLOCK_TOKENS, n = 0;
    if (exact_set_n_old_blocks(position) > 0)
        pieces[n++] = (struct backend_piece){.rows = rows, .mask = ((uint64_t)1 << LAYOUT_N_SINKS) - 1};
    if (block > 0)
        pieces[n++] = (struct backend_piece){.rows = rows + window_row((block - 1) * LAYOUT_BLOCK_TOKENS) * row,
                                             .mask = ~(uint64_t)0};
    pieces[n++] =
        (struct backend_piece){.rows = rows + window_row(block * LAYOUT_BLOCK_TOKENS) * row,
                               .mask = ~(uint64_t)0 >> (LAYOUT_BLOCK_TOKENS - 1 - position % LAYOUT_BLOCK_TOKENS)};
    return n;
}
