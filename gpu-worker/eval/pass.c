/*
 * pass.c - the life of a pass: layer by layer, queries and rows of all positions first, then attention and the rest.
 *
 * Owner      pass.h. Threads: the engine thread.
 */
#include "gpu-worker/eval/pass.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "gpu-worker/eval/pass_private.h"

static_assert((int)KERNELS_ROWS_F16 == (int)ROW_CODEC_F16 && (int)KERNELS_ROWS_Q8_0 == (int)ROW_CODEC_Q8_0,
              "kernels know rows by the numbers that the layout gives them");

/* ---- life ---- */

struct pass *pass_free(struct pass *pass)
{
    if (pass == NULL)
        return NULL;
    const struct network *network = pass->tools.network;
    void *const device[] = {pass->x, pass->q, pass->rows, pass->sums};
    for (size_t i = 0; i < sizeof(device) / sizeof(device[0]); i++)
        if (device[i] != NULL)
            network->ops->free(network->backend, device[i]);
    pass_scratch_fini(pass);
    pass_logits_free(pass->logits);
    free(pass->ids);
    free(pass->positions);
    free(pass);
    return NULL;
}

static int allocate(struct pass *pass)
{
    const struct network *network = pass->tools.network;
    const struct model_shape *shape = &network->shape;
    size_t n = pass->n_tokens, d = shape->head_dim;
    size_t blocks = (pass->options.keep_rows ? shape->n_layers : 1) * (size_t)shape->n_kv_heads * pass->n_blocks;
    const struct {
        void *memory; /* of a pointer */
        size_t n_bytes;
    } parts[] = {
        {&pass->x, n * shape->n_embd * sizeof(float)},
        {&pass->q, n * shape->n_heads * d * sizeof(float)},
        {&pass->rows, blocks * LAYOUT_BLOCK_TOKENS * pass->row_bytes},
        {&pass->sums, blocks * 2 * d * sizeof(float)},
    };
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        void *memory = backend_shared_alloc(network->ops, network->backend, parts[i].n_bytes);
        if (memory == NULL)
            return -ENOMEM;
        memcpy(parts[i].memory, &memory, sizeof(memory));
    }
    pass->ids = malloc(n * sizeof(*pass->ids));
    pass->positions = malloc(n * sizeof(*pass->positions));
    if (pass->ids == NULL || pass->positions == NULL)
        return -ENOMEM;
    int r = pass_scratch_init(pass);
    if (r == 0 && !pass->options.skip_attention_of_last)
        r = pass_logits_new(network, &pass->logits);
    return r;
}

int pass_new(const struct job_tools *tools, const struct pass_options *options, const uint32_t *ids, uint32_t n_tokens,
             struct pass **ret_pass)
{
    assert(n_tokens > 0);
    const struct network *network = tools->network;
    struct pass *pass = calloc(1, sizeof(*pass));
    if (pass == NULL)
        return -ENOMEM;
    pass->tools = *tools;
    pass->options = *options;
    pass->shape = (struct row_shape){
        .n_layers = network->shape.n_layers,
        .n_kv_heads = network->shape.n_kv_heads,
        .head_dim = network->shape.head_dim,
        .codec = tools->row_codec,
    };
    pass->n_tokens = n_tokens;
    pass->n_blocks = (n_tokens + LAYOUT_BLOCK_TOKENS - 1) / LAYOUT_BLOCK_TOKENS;
    pass->row_bytes = layout_row_bytes(&pass->shape);
    pass->max_rows = PASS_MAX_ROWS;
    int r = allocate(pass);
    if (r < 0) {
        pass_free(pass);
        return r;
    }
    memcpy(pass->ids, ids, n_tokens * sizeof(*ids));
    for (uint32_t i = 0; i < n_tokens; i++)
        pass->positions[i] = i;
    *ret_pass = pass;
    return 0;
}

/* ---- slices ---- */

static uint8_t *layer_rows(const struct pass *pass, uint32_t layer)
{
    size_t index = pass->options.keep_rows ? layer : 0;
    return pass->rows + index * pass->shape.n_kv_heads * pass->n_blocks * LAYOUT_BLOCK_TOKENS * pass->row_bytes;
}

static float *layer_sums(const struct pass *pass, uint32_t layer)
{
    size_t index = pass->options.keep_rows ? layer : 0;
    return pass->sums + index * pass->shape.n_kv_heads * pass->n_blocks * 2 * pass->shape.head_dim;
}

/* All queries and rows of the layer are there. */
static int end_projecting(struct pass *pass)
{
    int r = 0;
    pass_sum_blocks(pass, layer_rows(pass, pass->layer), pass->n_blocks, pass->n_tokens / LAYOUT_BLOCK_TOKENS,
                    layer_sums(pass, pass->layer), pass->n_blocks);
    if (pass->options.visit != NULL) {
        struct pass_layer layer = {
            .pass = pass,
            .layer = pass->layer,
            .n_tokens = pass->n_tokens,
            .q = pass->q,
            .rows = layer_rows(pass, pass->layer),
        };
        r = pass->options.visit(pass->options.context, &layer);
    }
    pass->next = 0;
    pass->stage = PASS_ATTENDING;
    if (pass->options.skip_attention_of_last && pass->layer + 1 == pass->shape.n_layers)
        pass->stage = PASS_DONE;
    return r;
}

static int advance_rows(struct pass *pass)
{
    const struct network *network = pass->tools.network;
    const struct model_shape *shape = &network->shape;
    uint32_t first = pass->next, n = pass->n_tokens - first;
    n = n < pass->max_rows ? n : pass->max_rows;
    float *x = pass->x + (size_t)first * shape->n_embd;
    pass->next += n;
    if (pass->stage == PASS_PROJECTING) {
        if (pass->layer == 0)
            network->ops->embed(network->backend, network->token_embd, pass->ids + first, n, x);
        int r = pass_project(pass, pass->layer, x, pass->positions + first, n,
                             pass->q + (size_t)first * shape->n_heads * shape->head_dim, layer_rows(pass, pass->layer),
                             pass->n_blocks * LAYOUT_BLOCK_TOKENS, first);
        return r == 0 && pass->next == pass->n_tokens ? end_projecting(pass) : r;
    }
    int r = pass_attend(pass, first, n);
    if (r < 0)
        return r;
    pass_finish(pass, pass->layer, x, pass->scratch.attention, n);
    if (pass->next == pass->n_tokens) {
        pass->next = 0;
        pass->layer++;
        pass->stage = pass->layer == shape->n_layers ? PASS_DONE : PASS_PROJECTING;
    }
    return 0;
}

int pass_advance(struct pass *pass)
{
    uint64_t start = clock_now_us();
    while (pass->error == 0 && pass->stage != PASS_DONE) {
        uint64_t begin = clock_now_us();
        pass->error = advance_rows(pass);
        uint64_t now = clock_now_us();
        if (now - begin > pass->tools.slice_us && pass->max_rows > LAYOUT_BLOCK_TOKENS)
            pass->max_rows /= 2;
        if (now - start > pass->tools.slice_us / 2)
            break;
    }
    if (pass->error < 0)
        return pass->error;
    return pass->stage == PASS_DONE ? 0 : 1;
}

double pass_done(const struct pass *pass)
{
    /* a quarter for the projections, the rest for attention and feed-forward: nearly right, and never backwards */
    if (pass->stage == PASS_DONE)
        return 1;
    double part = (double)pass->next / pass->n_tokens;
    return (pass->layer + (pass->stage == PASS_PROJECTING ? part / 4 : 0.25 + part * 3 / 4)) / pass->shape.n_layers;
}

/* ---- what it has ---- */

uint32_t pass_n_tokens(const struct pass *pass)
{
    return pass->n_tokens;
}

const struct row_shape *pass_shape(const struct pass *pass)
{
    return &pass->shape;
}

uint32_t pass_n_heads(const struct pass *pass)
{
    return pass->tools.network->shape.n_heads;
}

float pass_scale(const struct pass *pass)
{
    return 1.0f / sqrtf((float)pass->shape.head_dim);
}

const uint32_t *pass_ids(const struct pass *pass)
{
    return pass->ids;
}

const struct job_tools *pass_tools(const struct pass *pass)
{
    return &pass->tools;
}

const uint8_t *pass_rows(const struct pass *pass, uint32_t layer, uint32_t kv_head)
{
    assert(pass->options.keep_rows || layer == pass->layer);
    return layer_rows(pass, layer) + (size_t)kv_head * pass->n_blocks * LAYOUT_BLOCK_TOKENS * pass->row_bytes;
}

const float *pass_sums(const struct pass *pass, uint32_t layer, uint32_t kv_head)
{
    assert(pass->options.keep_rows || layer == pass->layer);
    return layer_sums(pass, layer) + (size_t)kv_head * pass->n_blocks * 2 * pass->shape.head_dim;
}

int pass_logprobs(const struct pass *pass, const struct pass_tail *tail, uint32_t position, float *logprobs)
{
    struct pool *pool = pass->tools.pool;
    if (tail != NULL) {
        assert(tail->layer == pass->shape.n_layers && position >= tail->first && position < tail->first + tail->n);
        return pass_logits_read(tail->logits, pool, tail->x, tail->n, position - tail->first, logprobs);
    }
    assert(pass->stage == PASS_DONE && pass->logits != NULL && position < pass->n_tokens);
    return pass_logits_read(pass->logits, pool, pass->x, pass->n_tokens, position, logprobs);
}
