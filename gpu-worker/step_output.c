/*
 * step_output.c - the end of a step: logits of the rows that want them, or, where the device can choose, tokens.
 *
 * Logits of a row travel to the host only if more is asked of them than a token.
 */
#include "gpu-worker/step.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

static const struct backend_device_ops *device_of(const struct step *step)
{
    return step->network->ops->device;
}

float *step_logits(const struct step *step, uint32_t row)
{
    assert(step->rows[row].wants_logits);
    return step->host_logits + (size_t)step->rows[row].logits_index * step->network->shape.n_vocab;
}

bool step_chose(const struct step *step, uint32_t row, uint32_t *ret_id)
{
    if (!step->rows[row].is_chosen)
        return false;
    *ret_id = step->chosen[step->rows[row].logits_index];
    return true;
}

/* Which rows the device chooses for, and room for what is done to their logits. */
static int plan_choices(struct step *step)
{
    size_t n = 0;
    for (uint32_t i = 0; i < step->n_rows; i++) {
        struct step_row *row = &step->rows[i];
        row->is_chosen = row->wants_logits && step->chosen != NULL && !run_wants_logits(row->run->request);
        if (row->is_chosen)
            n += sampler_max_changes(&row->run->request->sampling, row->position + 1);
    }
    if (n <= step->changes_size)
        return 0;
    struct sampler_change *grown = realloc(step->changes, n * sizeof(*grown));
    if (grown == NULL)
        return -ENOMEM;
    step->changes = grown;
    step->changes_size = n;
    return 0;
}

static void choose(struct step *step)
{
    const uint32_t n_vocab = step->network->shape.n_vocab;
    struct backend_sample items[step->n_logits];
    struct sampler_change *changes = step->changes;
    uint32_t n_items = 0;
    for (uint32_t i = 0; i < step->n_rows; i++) {
        const struct step_row *row = &step->rows[i];
        if (!row->is_chosen)
            continue;
        const struct sampling *sampling = &row->run->request->sampling;
        const uint32_t position = row->position + 1;
        struct backend_sample *item = &items[n_items++];
        *item = (struct backend_sample){
            .logits = step->logits + (size_t)row->logits_index * n_vocab,
            .changes = changes,
            .n_changes = sampler_changes(sampling, row->run->ids, position, n_vocab, changes),
            .top_k = sampling->top_k,
            .temperature = sampling->temperature,
            .top_p = sampling->top_p,
            .min_p = sampling->min_p,
            .uniform = sampler_uniform(sampling->seed, position),
            .id = step->chosen + row->logits_index,
        };
        changes += item->n_changes;
    }
    if (n_items > 0)
        device_of(step)->sample(step->network->backend, items, n_items, n_vocab);
}

static void bring_logits(struct step *step)
{
    const size_t n_vocab = step->network->shape.n_vocab;
    for (uint32_t i = 0; i < step->n_rows; i++) {
        const struct step_row *row = &step->rows[i];
        const size_t first = row->logits_index * n_vocab;
        if (row->wants_logits && !row->is_chosen)
            device_of(step)->to_host(step->network->backend, step->host_logits + first, step->logits + first,
                                     n_vocab * sizeof(float));
    }
}

int step_output(struct step *step)
{
    const struct network *network = step->network;
    const struct model_shape *shape = &network->shape;
    struct backend_copy copies[step->n_logits + 1];
    if (step->n_logits == 0)
        return backend_wait(network->ops, network->backend);
    int r = plan_choices(step);
    if (r < 0)
        return r;
    /* rows that want logits move to the front of h; T >= n_logits */
    for (uint32_t i = 0; i < step->n_rows; i++)
        if (step->rows[i].wants_logits)
            copies[step->rows[i].logits_index] =
                (struct backend_copy){step->h + (size_t)step->rows[i].logits_index * shape->n_embd,
                                      step->x + (size_t)i * shape->n_embd, shape->n_embd * sizeof(float)};
    network->ops->copy(network->backend, copies, step->n_logits);
    network->ops->rms_norm(network->backend, step->h, step->n_logits, shape->n_embd, network->output_norm,
                           shape->rms_eps, step->x);
    const struct weight *output = network->output;
    network->ops->matmul(network->backend, &output, 1, step->x, step->n_logits, &step->logits);
    if (device_of(step) != NULL) {
        choose(step);
        bring_logits(step);
    }
    return backend_wait(network->ops, network->backend);
}
