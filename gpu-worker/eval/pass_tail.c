/*
 * pass_tail.c - the last positions of a pass once more, from their embeddings, with an attention of somebody else's.
 *
 * Owner      pass.h. Threads: the engine thread. A tail reads its pass, which outlives it; of several tails of a pass one
 *            advances at a time (they share its scratch), and those that are done can all be read.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/eval/pass_private.h"

struct pass_tail *pass_tail_free(struct pass_tail *tail)
{
    if (tail == NULL)
        return NULL;
    const struct network *network = tail->pass->tools.network;
    void *const device[] = {tail->x, tail->q, tail->out, tail->rows, tail->sums};
    for (size_t i = 0; i < sizeof(device) / sizeof(device[0]); i++)
        if (device[i] != NULL)
            network->ops->free(network->backend, device[i]);
    pass_logits_free(tail->logits);
    free(tail);
    return NULL;
}

static int allocate(struct pass_tail *tail)
{
    const struct network *network = tail->pass->tools.network;
    const struct model_shape *shape = &network->shape;
    size_t n = tail->n, blocks = (size_t)shape->n_kv_heads * tail->n_blocks, d = shape->head_dim;
    const struct {
        void *memory; /* of a pointer */
        size_t n_bytes;
    } parts[] = {
        {&tail->x, n * shape->n_embd * sizeof(float)},
        {&tail->q, n * shape->n_heads * d * sizeof(float)},
        {&tail->out, n * shape->n_heads * d * sizeof(float)},
        {&tail->rows, blocks * LAYOUT_BLOCK_TOKENS * tail->pass->row_bytes},
        {&tail->sums, blocks * 2 * d * sizeof(float)},
    };
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        void *memory = backend_shared_alloc(network->ops, network->backend, parts[i].n_bytes);
        if (memory == NULL)
            return -ENOMEM;
        memcpy(parts[i].memory, &memory, sizeof(memory));
    }
    return pass_logits_new(network, &tail->logits);
}

int pass_tail_new(const struct pass *pass, uint32_t first,
                  int (*attend)(void *context, const struct pass_tail_layer *layer), void *context,
                  struct pass_tail **ret_tail)
{
    assert(first % LAYOUT_BLOCK_TOKENS == 0 && first < pass->n_tokens);
    assert(pass->options.keep_rows && pass->stage == PASS_DONE);
    struct pass_tail *tail = calloc(1, sizeof(*tail));
    if (tail == NULL)
        return -ENOMEM;
    tail->pass = pass;
    tail->attend = attend;
    tail->context = context;
    tail->first = first;
    tail->n = pass->n_tokens - first;
    tail->n_blocks = pass->n_blocks - first / LAYOUT_BLOCK_TOKENS;
    int r = allocate(tail);
    if (r < 0) {
        pass_tail_free(tail);
        return r;
    }
    const struct network *network = pass->tools.network;
    network->ops->embed(network->backend, network->token_embd, pass->ids + first, tail->n, tail->x);
    *ret_tail = tail;
    return 0;
}

int pass_tail_advance(struct pass_tail *tail)
{
    const struct pass *pass = tail->pass;
    const struct model_shape *shape = &pass->tools.network->shape;
    if (tail->error < 0)
        return tail->error;
    if (tail->layer == shape->n_layers)
        return 0;
    for (uint32_t i = 0, n; i < tail->n; i += n) {
        n = tail->n - i < PASS_MAX_ROWS ? tail->n - i : PASS_MAX_ROWS;
        tail->error =
            pass_project(pass, tail->layer, tail->x + (size_t)i * shape->n_embd, pass->positions + tail->first + i, n,
                         tail->q + (size_t)i * shape->n_heads * shape->head_dim, tail->rows,
                         tail->n_blocks * LAYOUT_BLOCK_TOKENS, i);
        if (tail->error < 0)
            return tail->error;
    }
    uint32_t n_whole = tail->n / LAYOUT_BLOCK_TOKENS;
    pass_sum_blocks(pass, tail->rows, tail->n_blocks, n_whole, tail->sums, n_whole);
    struct pass_tail_layer layer = {
        .pass = pass,
        .layer = tail->layer,
        .first = tail->first,
        .n = tail->n,
        .q = tail->q,
        .tail_rows = tail->rows,
        .tail_sums = tail->sums,
        .out = tail->out,
    };
    tail->error = tail->attend(tail->context, &layer);
    if (tail->error < 0)
        return tail->error;
    pass_finish(pass, tail->layer, tail->x, tail->out, tail->n);
    return ++tail->layer < shape->n_layers;
}

double pass_tail_done(const struct pass_tail *tail)
{
    return (double)tail->layer / tail->pass->shape.n_layers;
}

const uint8_t *pass_tail_block(const struct pass_tail_layer *layer, uint32_t kv_head, uint32_t block)
{
    const struct pass *pass = layer->pass;
    size_t first = layer->first / LAYOUT_BLOCK_TOKENS, block_bytes = LAYOUT_BLOCK_TOKENS * pass->row_bytes;
    if (block < first)
        return pass_rows(pass, layer->layer, kv_head) + block * block_bytes;
    size_t n_blocks = pass->n_blocks - first;
    return layer->tail_rows + (kv_head * n_blocks + block - first) * block_bytes;
}

const float *pass_tail_block_sums(const struct pass_tail_layer *layer, uint32_t kv_head, uint32_t block)
{
    const struct pass *pass = layer->pass;
    size_t first = layer->first / LAYOUT_BLOCK_TOKENS, floats = (size_t)2 * pass->shape.head_dim;
    if (block < first)
        return pass_sums(pass, layer->layer, kv_head) + block * floats;
    size_t n_whole = layer->n / LAYOUT_BLOCK_TOKENS;
    return layer->tail_sums + (kv_head * n_whole + block - first) * floats;
}
