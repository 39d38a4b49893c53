/* timings_attention.c - see timings.h: exact partials over rows in device memory, of decode steps and of prefill tiles. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/backend/cuda-on-device/timings.h"

#define BLOCK 64u /* tokens of a piece */

struct attention {
    const char *what;
    uint32_t n_kv_heads, group, head_dim;
    uint32_t n_sequences, n_positions; /* positions of a prefill tile; 1: decode */
    uint32_t n_tokens;                 /* context, whole blocks */
};

static const struct attention cases[] = {
    {"SmolLM2-135M decode", 3, 3, 64, 1, 1, 1024},   {"SmolLM2-135M decode", 3, 3, 64, 1, 1, 8192},
    {"SmolLM2-135M prefill", 3, 3, 64, 1, 64, 4096}, {"Llama-3-8B decode", 8, 4, 128, 1, 1, 192},
    {"Llama-3-8B decode", 8, 4, 128, 1, 1, 4096},    {"Llama-3-8B decode", 8, 4, 128, 1, 1, 32768},
    {"Llama-3-8B decode", 8, 4, 128, 8, 1, 4096},    {"Llama-3-8B prefill", 8, 4, 128, 1, 64, 4096},
    {"Llama-3-8B prefill", 8, 4, 128, 1, 64, 32768},
};
static const struct attention tiny[] = {{"tiny", 2, 2, 32, 1, 2, 128}, {"tiny decode", 2, 2, 32, 1, 1, 512}};

/* What a case has in device memory. */
struct launched {
    const struct attention *attention;
    enum kernels_rows codec;
    uint32_t n_items, n_queries;
    float *q, *partials, *scratch; /* scratch: of decode, where it needs some */
    struct backend_piece *pieces;
    struct backend_attend *items;
};

static cudaError_t launch_attend(struct timings *timings, void *context, uint32_t i)
{
    (void)i; /* the list of pieces is made once: rows of the longer cases do not stay in the cache */
    const struct launched *l = context;
    const struct attention *a = l->attention;
    if (a->n_positions == 1)
        return cuda_attend_decode(&timings->queue, l->items, l->n_items, l->n_queries, a->n_tokens / BLOCK, a->head_dim,
                                  l->codec, 0.125f, l->scratch);
    return cuda_attend(&timings->queue, l->items, l->n_items, l->n_queries, a->head_dim, l->codec, 0.125f);
}

/* Items and pieces on the host, pointing into device memory, then there. */
static cudaError_t upload(const struct timings *timings, struct launched *l)
{
    const struct attention *a = l->attention;
    const uint32_t n_pieces = a->n_tokens / BLOCK;
    const size_t block_bytes = BLOCK * kernels_row_bytes(a->head_dim, l->codec);
    const size_t n_all = (size_t)l->n_items * n_pieces;
    struct backend_piece *pieces = calloc(n_all, sizeof *pieces);
    struct backend_attend *items = calloc(l->n_items, sizeof *items);
    cudaError_t error = pieces && items ? cudaSuccess : cudaErrorMemoryAllocation;
    for (size_t p = 0; p < n_all && !error; p++)
        pieces[p] = (struct backend_piece){timings_copy(timings, block_bytes, (uint32_t)p), ~UINT64_C(0)};
    for (uint32_t i = 0; i < l->n_items && !error; i++)
        items[i] = (struct backend_attend){.q = l->q + (size_t)i * l->n_queries * a->head_dim,
                                           .partials = l->partials +
                                                       (size_t)i * l->n_queries * KERNELS_PARTIAL_FLOATS(a->head_dim),
                                           .pieces = l->pieces + (size_t)i * n_pieces,
                                           .n_pieces = n_pieces,
                                           .n_queries = l->n_queries,
                                           .group = a->group,
                                           .causal_piece = a->n_positions > 1 ? n_pieces - 1 : n_pieces};
    if (!error)
        error = cudaMemcpy(l->pieces, pieces, n_all * sizeof *pieces, cudaMemcpyHostToDevice);
    if (!error)
        error = cudaMemcpy(l->items, items, l->n_items * sizeof *items, cudaMemcpyHostToDevice);
    free(pieces);
    free(items);
    return error;
}

static void attend(struct timings *timings, const struct attention *a, enum kernels_rows codec)
{
    struct launched l = {.attention = a,
                         .codec = codec,
                         .n_items = a->n_sequences * a->n_kv_heads,
                         .n_queries = a->n_positions * a->group};
    const size_t row_bytes = kernels_row_bytes(a->head_dim, codec);
    const size_t n_q = (size_t)l.n_items * l.n_queries * a->head_dim;
    const size_t n_partials = (size_t)l.n_items * l.n_queries * KERNELS_PARTIAL_FLOATS(a->head_dim);
    const double n_rows = (double)l.n_items * a->n_tokens;
    struct timing timing = {.kernel = a->n_positions == 1 ? "attend_decode" : "attend",
                            .type = codec == KERNELS_ROWS_Q8_0 ? "q8_0" : "f16",
                            .bytes = n_rows * (double)row_bytes,
                            .operations = 4.0 * a->head_dim * l.n_queries * n_rows};
    snprintf(timing.shape, sizeof timing.shape, "%s S%u T%u of %u", a->what, a->n_sequences, a->n_positions,
             a->n_tokens);
    l.q = timings_new(&timing, n_q * sizeof *l.q);
    l.partials = l.q ? timings_new(&timing, n_partials * sizeof *l.partials) : NULL;
    l.pieces = l.partials ? timings_new(&timing, (size_t)l.n_items * (a->n_tokens / BLOCK) * sizeof *l.pieces) : NULL;
    l.items = l.pieces ? timings_new(&timing, l.n_items * sizeof *l.items) : NULL;
    const size_t scratch_bytes =
        a->n_positions == 1 ? cuda_attend_decode_bytes(l.n_items, l.n_queries, a->n_tokens / BLOCK, a->head_dim) : 0;
    l.scratch = l.items && scratch_bytes ? timings_new(&timing, scratch_bytes) : NULL;
    const bool has_all = l.items && (l.scratch || !scratch_bytes);
    if (has_all && upload(timings, &l))
        timings_skip(&timing, "memory");
    else if (has_all)
        timings_case(timings, &timing, launch_attend, &l);
    (void)cudaFree(l.q);
    (void)cudaFree(l.partials);
    (void)cudaFree(l.pieces);
    (void)cudaFree(l.items);
    (void)cudaFree(l.scratch);
}

void timings_attention(struct timings *timings)
{
    static const enum kernels_rows codecs[] = {KERNELS_ROWS_F16, KERNELS_ROWS_Q8_0};
    for (uint32_t c = 0; c < 2; c++) {
        const struct attention *all = timings->tiny ? tiny : cases;
        const size_t n = timings->tiny ? sizeof tiny / sizeof *tiny : sizeof cases / sizeof *cases;
        for (size_t k = 0; k < n; k++)
            attend(timings, &all[k], codecs[c]);
    }
}
