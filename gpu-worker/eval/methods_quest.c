/*
 * methods_quest.c - Quest (2406.10774, section 3): pages of 16 tokens with the largest and smallest key of each channel on the
 * device; at each position those pages whose bound on q . k is largest are read from the stores, exactly, and nothing else.
 *
 * A page's bound is the mean over the query heads of a KV head (published for one query head a KV head). Extremes are kept in
 * f16. Pages are chosen in every layer; the paper leaves the first two alone.
 *
 * Owner      methods_private.h. Threads: any for choose().
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/eval/methods_private.h"

#define BLOCK LAYOUT_BLOCK_TOKENS
enum { PAGE = 16, BLOCK_PAGES = BLOCK / PAGE };

/* [max|min][head_dim][pages of the text] of a KV head. */
static float *extremes_of(const struct methods_baseline *baseline, uint32_t kv_head)
{
    return baseline->extremes + (size_t)kv_head * 2 * baseline->shape.head_dim * baseline->n_blocks * BLOCK_PAGES;
}

static int begin(struct methods_baseline *baseline)
{
    baseline->extremes = calloc((size_t)baseline->shape.n_kv_heads * 2 * baseline->shape.head_dim * baseline->n_blocks,
                                BLOCK_PAGES * sizeof(float));
    return baseline->extremes == NULL ? -ENOMEM : 0;
}

static void put_pages(struct methods_baseline *baseline, uint32_t kv_head, uint32_t block)
{
    const struct kernels *kernels = baseline->tools.kernels;
    const uint32_t d = baseline->shape.head_dim, n_pages = baseline->n_blocks * BLOCK_PAGES;
    const float *keys = baseline->tail.keys + ((size_t)kv_head * baseline->n_blocks + block) * BLOCK * d;
    float *largest = extremes_of(baseline, kv_head) + (size_t)block * BLOCK_PAGES, *smallest = largest + d * n_pages;
    for (uint32_t i = 0; i < d; i++, keys += BLOCK, largest += n_pages, smallest += n_pages) {
        uint16_t halves[2 * BLOCK_PAGES];
        float both[2 * BLOCK_PAGES];
        for (uint32_t page = 0; page < BLOCK_PAGES; page++) {
            const uint32_t first = block == 0 && page == 0 ? LAYOUT_N_SINKS : page * PAGE, end = (page + 1) * PAGE;
            both[page] = both[BLOCK_PAGES + page] = keys[first];
            for (uint32_t j = first + 1; j < end; j++) {
                both[page] = fmaxf(both[page], keys[j]);
                both[BLOCK_PAGES + page] = fminf(both[BLOCK_PAGES + page], keys[j]);
            }
        }
        kernels->f16_encode(both, 2 * BLOCK_PAGES, halves);
        kernels->f16_decode(halves, 2 * BLOCK_PAGES, both);
        memcpy(largest, both, BLOCK_PAGES * sizeof(float));
        memcpy(smallest, both + BLOCK_PAGES, BLOCK_PAGES * sizeof(float));
    }
}

static void turn(struct methods_baseline *baseline, const struct pass_tail_layer *layer, uint32_t own)
{
    const uint32_t n_old_blocks = exact_set_n_old_blocks(own * BLOCK, 0);
    uint32_t first = own * BLOCK == layer->first || n_old_blocks == 0 ? 0 : n_old_blocks - 1;
    for (uint32_t kv_head = 0; kv_head < baseline->shape.n_kv_heads; kv_head++)
        for (uint32_t block = first; block < n_old_blocks; block++)
            put_pages(baseline, kv_head, block);
}

/* bounds [n_pages]: sum over the query heads of the largest q . k that a page can have. */
static void bound(const struct methods_baseline *baseline, const struct methods_choice *choice, uint32_t n_pages,
                  float *restrict bounds)
{
    const uint32_t d = baseline->shape.head_dim, stride = baseline->n_blocks * BLOCK_PAGES;
    const float *largest = extremes_of(baseline, choice->kv_head), *smallest = largest + (size_t)d * stride;
    memset(bounds, 0, n_pages * sizeof *bounds);
    for (uint32_t k = 0; k < baseline->group; k++)
        for (uint32_t i = 0; i < d; i++) {
            const float q = choice->q[(size_t)k * d + i];
            const float *extreme = (q > 0 ? largest : smallest) + (size_t)i * stride;
            for (uint32_t page = 0; page < n_pages; page++)
                bounds[page] += q * extreme[page];
        }
}

static void choose(const struct methods_baseline *baseline, const struct methods_choice *choice)
{
    const uint32_t n_pages = choice->n_blocks * BLOCK_PAGES;
    const uint32_t n_wanted = (uint32_t)(baseline->number * n_pages + 1e-6), n = n_wanted > 0 ? n_wanted : 1;
    float *bounds = choice->scratch, *sorted = bounds + n_pages;
    bound(baseline, choice, n_pages, bounds);
    memcpy(sorted, bounds, n_pages * sizeof *bounds);
    const float limit = methods_looks_nth_largest(sorted, n_pages, n);
    uint32_t n_equal = n; /* pages at the limit that there is room for; the earlier come first */
    for (uint32_t page = 0; page < n_pages; page++)
        n_equal -= bounds[page] > limit;
    for (uint32_t block = 0; block < choice->n_blocks; block++) {
        uint64_t mask = 0;
        for (uint32_t i = 0; i < BLOCK_PAGES; i++) {
            const float of_page = bounds[block * BLOCK_PAGES + i];
            const bool is_at_limit = !(of_page > limit) && !(of_page < limit);
            if (of_page > limit || (is_at_limit && n_equal > 0))
                mask |= (uint64_t)0xffff << i * PAGE;
            n_equal -= is_at_limit && n_equal > 0;
        }
        choice->masks[block] = mask & exact_set_old_mask(block);
    }
}

static double device_bytes(const struct methods_baseline *baseline, const struct method *method)
{
    (void)method;
    return (double)baseline->shape.n_layers * baseline->shape.n_kv_heads * baseline->shape.head_dim * 2 * 2 / PAGE;
}

const struct methods_kind methods_quest = {
    .name = "quest",
    .example = "quest=0.2",
    .number = "the share of old tokens that are read",
    .meaning = {"Quest: at each position the", "of pages of 16 tokens that may matter most"},
    .reads_stores = true,
    .begin = begin,
    .turn = turn,
    .choose = choose,
    .device_bytes = device_bytes,
};
