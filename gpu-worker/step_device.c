/*
 * step_device.c - exact attention of prefill rows where device memory is not the host's: K and V come from the stores.
 *
 * Rows of one session that follow each other see themselves (the device has their K and V), and every token before: those are
 * fetched from the stores, which copy them into their exchanges some blocks at a time; what has come is copied to the device while
 * the stores fetch the next blocks, and the device computes with the ones before. Rows before the step's have all been acknowledged.
 *
 * Order      what is given to the device follows from the session's blocks and stores alone: so do the bits, for the same rows of a step.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "gpu-worker/fetches.h"
#include "gpu-worker/step.h"

enum { MAX_COPIES = 2 /* under way to the device; their slots wait for them */ };

/* Prefill rows of one session that follow each other. */
struct rows {
    struct run *run;
    uint32_t first, n; /* rows of the step */
    uint32_t position; /* of the first */
};

/* ---- what is to be fetched ---- */

static int make_room(struct step *step, uint32_t n_blocks, uint32_t n_fetches)
{
    if (n_blocks > step->fetch_blocks_size) {
        uint32_t *grown = realloc(step->fetch_blocks, n_blocks * sizeof(*grown));
        if (grown == NULL)
            return -ENOMEM;
        step->fetch_blocks = grown;
        step->fetch_blocks_size = n_blocks;
    }
    if (n_fetches > step->fetches_size) {
        struct fetch *grown = realloc(step->fetches, n_fetches * sizeof(*grown));
        if (grown == NULL)
            return -ENOMEM;
        step->fetches = grown;
        step->fetches_size = n_fetches;
    }
    return 0;
}

/* The blocks of one store, in order. */
struct share {
    uint32_t store, n_blocks;
    uint32_t *blocks;
};

/* Puts the session's first n_blocks in order of store, then of number. Returns how many stores there are. */
static uint32_t share_out(const struct run *run, uint32_t n_blocks, uint32_t *blocks,
                          struct share shares[LAYOUT_N_LANES])
{
    uint32_t n_shares = 0;
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES && lane < n_blocks; lane++) {
        uint32_t i = 0;
        while (i < n_shares && shares[i].store != run_store(run, lane))
            i++;
        if (i == n_shares)
            shares[n_shares++] = (struct share){.store = run_store(run, lane)};
    }
    for (uint32_t i = 0; i < n_shares; i++) {
        shares[i].blocks = blocks;
        for (uint32_t block = 0; block < n_blocks; block++)
            if (run_store(run, block) == shares[i].store)
                shares[i].blocks[shares[i].n_blocks++] = block;
        blocks += shares[i].n_blocks;
    }
    return n_shares;
}

/* Lists the fetches of all tokens before the rows, of all stores in turn. Returns how many; -ENOMEM. */
static int64_t list_fetches(struct step *step, const struct rows *rows, uint32_t layer)
{
    const uint32_t n_blocks = (rows->position + LAYOUT_BLOCK_TOKENS - 1) / LAYOUT_BLOCK_TOKENS;
    const uint32_t most = fetches_most_blocks(step->stores, 1);
    struct share shares[LAYOUT_N_LANES];
    if (make_room(step, n_blocks, n_blocks / most + LAYOUT_N_LANES) < 0)
        return -ENOMEM;
    const uint32_t n_shares = share_out(rows->run, n_blocks, step->fetch_blocks, shares);
    uint32_t n = 0;
    for (uint32_t first = 0, n_before = UINT32_MAX; n != n_before; first += most) {
        n_before = n;
        for (uint32_t i = 0; i < n_shares; i++) {
            if (first >= shares[i].n_blocks)
                continue;
            const uint32_t left = shares[i].n_blocks - first, n_here = left < most ? left : most;
            const uint32_t *blocks = shares[i].blocks + first;
            uint32_t n_tokens = n_here * LAYOUT_BLOCK_TOKENS;
            if (blocks[n_here - 1] == n_blocks - 1) /* the last of all, perhaps not whole */
                n_tokens -= n_blocks * LAYOUT_BLOCK_TOKENS - rows->position;
            step->fetches[n++] = (struct fetch){.run = rows->run,
                                                .call.store = shares[i].store,
                                                .first_layer = layer,
                                                .n_layers = 1,
                                                .blocks = blocks,
                                                .n_blocks = n_here,
                                                .n_tokens = n_tokens};
        }
    }
    return n;
}

/* ---- what has been fetched ---- */

/* Copies under way, the oldest first. */
struct copies {
    const struct step *step;
    struct fetches *fetches;
    uint32_t n;
    struct {
        struct fetch *fetch;
        uint64_t mark;
    } all[MAX_COPIES + 1];
};

/* Waits for the oldest ones, until no more than n_left are under way. */
static int wait_for_copies(struct copies *copies, uint32_t n_left)
{
    const struct network *network = copies->step->network;
    int result = 0;
    while (copies->n > n_left) {
        int r = network->ops->device->wait(network->backend, copies->all[0].mark);
        result = result < 0 ? result : r;
        fetches_free(copies->fetches, copies->all[0].fetch);
        for (uint32_t i = 1; i < copies->n; i++)
            copies->all[i - 1] = copies->all[i];
        copies->n--;
    }
    return result;
}

static int give(struct copies *copies, struct fetch *fetch)
{
    const struct step *step = copies->step;
    const struct network *network = step->network;
    const struct backend_span span = {.rows = fetches_rows(copies->fetches, fetch),
                                      .n_tokens = fetch->n_tokens,
                                      .head_bytes = fetches_head_bytes(copies->fetches, fetch),
                                      .token_bytes = layout_row_bytes(&step->shape)};
    copies->all[copies->n].fetch = fetch;
    copies->all[copies->n++].mark = network->ops->device->prefill_rows(network->backend, &span, 1, true, false);
    return wait_for_copies(copies, MAX_COPIES);
}

/* Gives the device what is fetched, as it comes. What the store refuses fails the run alone. */
static int give_all(struct step *step, const struct rows *rows, struct copies *copies)
{
    struct fetches *fetches = copies->fetches;
    while (fetches->n_taken < fetches->n && rows->run->error == 0) {
        struct fetch *fetch;
        uint64_t start = clock_now_us();
        int r = fetches_next(fetches, &fetch);
        step->wait_us += clock_now_us() - start;
        if (r < 0)
            return r;
        if (step->between_layers != NULL)
            step->between_layers(step->engine);
        if (r == 0 || rows->run->error != 0)
            continue;
        if (step->progress != NULL)
            atomic_fetch_add_explicit(step->progress, 1, memory_order_relaxed);
        if (fetch->call.status < 0) {
            run_fail(rows->run, fetch->call.status, "store %u refused a fetch of the session: %s", fetch->call.store,
                     strerror(-fetch->call.status));
            continue;
        }
        r = give(copies, fetch);
        if (r < 0)
            return r;
    }
    return 0;
}

/* ---- attention ---- */

static void take_descriptor(void *context, const struct descriptor *descriptor)
{
    step_take_descriptor(context, descriptor);
}

static int attend_rows(struct step *step, const struct step_half *half, const struct rows *rows, uint32_t layer)
{
    const struct network *network = step->network;
    const struct backend_device_ops *device = network->ops->device;
    const uint32_t n_heads = network->shape.n_heads, d = step->shape.head_dim;
    int64_t n_fetches = list_fetches(step, rows, layer);
    if (n_fetches < 0)
        return (int)n_fetches;
    const struct backend_prefill prefill = {
        .q = step->q + (size_t)rows->first * n_heads * d,
        .out = step->attention + (size_t)rows->first * n_heads * d,
        .n = rows->n,
        .n_heads = n_heads,
        .n_kv_heads = step->shape.n_kv_heads,
        .head_dim = d,
        .codec = step_codec(step),
        .scale = step_scale(step),
    };
    const struct backend_span own = {.rows = step_row_bytes(step, half, layer, rows->first),
                                     .n_tokens = rows->n,
                                     .head_bytes = layout_row_bytes(&step->shape),
                                     .token_bytes = step_token_bytes(step)};
    struct fetches fetches;
    fetches_begin(&fetches, step->stores, step->link, step->fetches, (uint32_t)n_fetches);
    fetches.other = take_descriptor;
    fetches.context = step;
    struct copies copies = {.step = step, .fetches = &fetches};
    device->prefill_begin(network->backend, &prefill);
    device->prefill_rows(network->backend, &own, 1, false, true);
    int r = give_all(step, rows, &copies);
    device->prefill_end(network->backend);
    int last = wait_for_copies(&copies, 0);
    fetches_end(&fetches);
    return r < 0 ? r : last;
}

int step_device_prefill(struct step *step, const struct step_half *half, uint32_t layer)
{
    for (uint32_t i = half->first, end; i < half->end; i = end) {
        const struct step_row *row = &step->rows[i];
        end = i + 1;
        if (row->is_decode || row->run->error != 0)
            continue;
        while (end < half->end && step->rows[end].run == row->run && !step->rows[end].is_decode)
            end++;
        const struct rows rows = {.run = row->run, .first = i, .n = end - i, .position = row->position};
        int r = attend_rows(step, half, &rows, layer);
        if (r < 0)
            return r;
    }
    return 0;
}
