#include "gpu-worker/session.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/policy/exact_set.h"

static size_t exact_rows(uint32_t n_window_blocks)
{
    return LAYOUT_N_SINKS + (size_t)n_window_blocks * LAYOUT_BLOCK_TOKENS;
}

static size_t exact_bytes_for(const struct row_shape *shape, uint32_t n_window_blocks)
{
    if (n_window_blocks == 0)
        return 0;
    return (size_t)shape->n_layers * shape->n_kv_heads * exact_rows(n_window_blocks) * layout_row_bytes(shape);
}

size_t session_bytes_for(const struct row_shape *shape, const struct key_quantizer *quantizer, uint32_t n_window_blocks,
                         uint32_t n_old_blocks)
{
    return exact_bytes_for(shape, n_window_blocks) + key_cache_bytes_for(quantizer, n_old_blocks);
}

size_t session_exact_bytes(const struct session *session)
{
    return exact_bytes_for(&session->shape, session->n_window_blocks);
}

size_t session_bytes(const struct session *session)
{
    return session_exact_bytes(session) + key_cache_bytes(session->keys);
}

/* ---- life ---- */

static void *key_alloc(void *context, size_t n_bytes)
{
    const struct session *session = context;
    return session->ops->alloc(session->backend, n_bytes);
}

static void key_free(void *context, void *memory, size_t n_bytes)
{
    (void)n_bytes;
    const struct session *session = context;
    session->ops->free(session->backend, memory);
}

static void key_quantize(void *context, const struct key_quantizer *quantizer, const struct key_cache_tile *tiles,
                         uint32_t n_tiles)
{
    const struct session *session = context;
    session->ops->device->quantize(session->backend, quantizer, (enum kernels_rows)session->shape.codec, tiles,
                                   n_tiles);
}

int session_new(uint64_t id, const struct row_shape *shape, const struct policy *policy, uint32_t exact_tokens,
                const struct backend_ops *ops, struct backend *backend, struct session **ret_session)
{
    struct session *session = calloc(1, sizeof(*session));
    if (session == NULL)
        return -ENOMEM;
    session->id = id;
    session->shape = *shape;
    session->exact_tokens = exact_tokens;
    session->ops = ops;
    session->backend = backend;
    session->counts.n_kept = calloc((size_t)shape->n_layers * shape->n_kv_heads, sizeof(uint64_t));
    if (session->counts.n_kept == NULL || session_reset(session, policy) < 0) {
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
    fastgen_profile_free(session->profile);
    free(session->counts.n_kept);
    free(session);
    return NULL;
}

static int new_keys(struct session *session, const struct key_quantizer *quantizer, const bool *absent)
{
    const struct key_cache_memory memory = {.alloc = key_alloc,
                                            .free = key_free,
                                            .quantize = session->ops->device == NULL ? NULL : key_quantize,
                                            .context = session};
    struct key_cache *keys;
    int r = key_cache_new(quantizer, &session->shape, absent, &memory, &keys);
    if (r < 0)
        return r;
    key_cache_free(session->keys);
    session->keys = keys;
    session->quantizer = quantizer;
    return 0;
}

int session_reset(struct session *session, const struct policy *policy)
{
    session->n_rows = session->n_touched = 0;
    if (session->keys != NULL && session->quantizer == policy->quantizer && session->profile == NULL) {
        key_cache_clear(session->keys);
        return 0;
    }
    int r = new_keys(session, policy->quantizer, NULL);
    if (r == 0)
        session->profile = fastgen_profile_free(session->profile);
    return r;
}

int session_set_profile(struct session *session, struct fastgen_profile *profile)
{
    int r = new_keys(session, session->quantizer, fastgen_profile_absent(profile));
    if (r < 0) {
        fastgen_profile_free(profile);
        return r;
    }
    fastgen_profile_free(session->profile);
    session->profile = profile;
    return 0;
}

void session_release(struct session *session)
{
    session->n_rows = session->n_touched = 0;
    key_cache_release(session->keys);
    if (session->exact != NULL)
        session->ops->free(session->backend, session->exact);
    session->exact = NULL;
    session->n_window_blocks = 0;
}

/* ---- exact rows ---- */

static uint8_t *head_rows(const struct session *session, uint8_t *exact, uint32_t n_window_blocks, uint32_t head)
{
    return exact + head * exact_rows(n_window_blocks) * layout_row_bytes(&session->shape);
}

static size_t window_row(uint32_t position, uint32_t n_window_blocks)
{
    size_t slot = position / LAYOUT_BLOCK_TOKENS % n_window_blocks;
    return LAYOUT_N_SINKS + slot * LAYOUT_BLOCK_TOKENS + position % LAYOUT_BLOCK_TOKENS;
}

/* Copies that are asked for together. */
struct copies {
    const struct session *session;
    uint32_t n;
    struct backend_copy all[256];
};

static void copies_flush(struct copies *copies)
{
    if (copies->n > 0)
        copies->session->ops->copy(copies->session->backend, copies->all, copies->n);
    copies->n = 0;
}

static void copies_add(struct copies *copies, void *to, const void *from, size_t n_bytes)
{
    if (copies->n == sizeof(copies->all) / sizeof(copies->all[0]))
        copies_flush(copies);
    copies->all[copies->n++] = (struct backend_copy){to, from, n_bytes};
}

/* Copies the sinks and the last blocks that both windows have room for. */
static void move_rows(const struct session *session, uint8_t *to, uint32_t n_window_blocks)
{
    const struct row_shape *shape = &session->shape;
    size_t row = layout_row_bytes(shape), block_bytes = LAYOUT_BLOCK_TOKENS * row;
    uint32_t n_blocks = (session->n_rows + LAYOUT_BLOCK_TOKENS - 1) / LAYOUT_BLOCK_TOKENS;
    uint32_t n_kept = n_window_blocks < session->n_window_blocks ? n_window_blocks : session->n_window_blocks;
    uint32_t first = n_blocks > n_kept ? n_blocks - n_kept : 0;
    struct copies copies = {.session = session};
    for (uint32_t head = 0; head < shape->n_layers * shape->n_kv_heads; head++) {
        const uint8_t *old = head_rows(session, session->exact, session->n_window_blocks, head);
        uint8_t *new = head_rows(session, to, n_window_blocks, head);
        copies_add(&copies, new, old, LAYOUT_N_SINKS * row);
        for (uint32_t block = first; block < n_blocks; block++)
            copies_add(&copies, new + window_row(block * LAYOUT_BLOCK_TOKENS, n_window_blocks) * row,
                       old + window_row(block * LAYOUT_BLOCK_TOKENS, session->n_window_blocks) * row, block_bytes);
    }
    copies_flush(&copies);
}

int session_reserve(struct session *session, uint32_t n_window_blocks, uint32_t n_old_blocks)
{
    int r = key_cache_reserve(session->keys, n_old_blocks);
    if (r < 0 || n_window_blocks == session->n_window_blocks)
        return r;
    uint8_t *exact = session->ops->alloc(session->backend, exact_bytes_for(&session->shape, n_window_blocks));
    if (exact == NULL)
        return -ENOMEM;
    if (session->exact != NULL) {
        move_rows(session, exact, n_window_blocks);
        session->ops->free(session->backend, session->exact);
    }
    session->exact = exact;
    session->n_window_blocks = n_window_blocks;
    return 0;
}

bool session_keeps(const struct session *session, uint32_t position, uint32_t last)
{
    if (position < LAYOUT_N_SINKS)
        return true;
    uint32_t block = position / LAYOUT_BLOCK_TOKENS, last_block = last / LAYOUT_BLOCK_TOKENS;
    return block + session->n_window_blocks > last_block;
}

bool session_goes_on(const struct session *session, uint32_t position)
{
    if (position > session->n_rows || session->n_rows == UINT32_MAX)
        return false;
    uint32_t end = session->n_touched > session->n_rows ? session->n_touched : session->n_rows;
    if (position == end)
        return true;
    uint32_t first_block = exact_set_n_old_blocks(position, session->exact_tokens);
    return (end - 1) / LAYOUT_BLOCK_TOKENS - first_block < session->n_window_blocks;
}

void session_put_rows(struct session *session, uint32_t layer, uint32_t first, uint32_t n, const void *rows,
                      size_t token_bytes, size_t head_bytes)
{
    size_t row = layout_row_bytes(&session->shape);
    struct copies copies = {.session = session};
    for (uint32_t head = 0; head < session->shape.n_kv_heads; head++) {
        uint8_t *to =
            head_rows(session, session->exact, session->n_window_blocks, layer * session->shape.n_kv_heads + head);
        for (uint32_t i = 0; i < n; i++) {
            const uint8_t *from = (const uint8_t *)rows + i * token_bytes + head * head_bytes;
            copies_add(&copies, to + window_row(first + i, session->n_window_blocks) * row, from, row);
            if (first + i < LAYOUT_N_SINKS)
                copies_add(&copies, to + (first + i) * row, from, row);
        }
    }
    copies_flush(&copies);
}

uint32_t session_max_pieces(const struct session *session)
{
    return session->n_window_blocks + 1;
}

uint32_t session_pieces(const struct session *session, uint32_t layer, uint32_t kv_head, uint32_t position,
                        struct backend_piece *pieces)
{
    size_t row = layout_row_bytes(&session->shape);
    const uint8_t *rows =
        head_rows(session, session->exact, session->n_window_blocks, layer * session->shape.n_kv_heads + kv_head);
    uint32_t own = position / LAYOUT_BLOCK_TOKENS, n = 0;
    uint32_t n_old = exact_set_n_old_blocks(position, session->exact_tokens);
    assert(own - n_old < session->n_window_blocks);
    if (n_old > 0)
        pieces[n++] = (struct backend_piece){.rows = rows, .mask = ((uint64_t)1 << LAYOUT_N_SINKS) - 1};
    for (uint32_t block = n_old; block < own; block++)
        pieces[n++] = (struct backend_piece){
            .rows = rows + window_row(block * LAYOUT_BLOCK_TOKENS, session->n_window_blocks) * row,
            .mask = ~(uint64_t)0,
        };
    pieces[n++] = (struct backend_piece){
        .rows = rows + window_row(own * LAYOUT_BLOCK_TOKENS, session->n_window_blocks) * row,
        .mask = ~(uint64_t)0 >> (LAYOUT_BLOCK_TOKENS - 1 - position % LAYOUT_BLOCK_TOKENS),
    };
    return n;
}
