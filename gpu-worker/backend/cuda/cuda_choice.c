/* cuda_choice.c - tokens chosen on the device: rows and what is done to their logits, for cuda_sample(). */
#include <string.h>

#include "gpu-worker/backend/cuda/cuda_host.h"
#include "gpu-worker/backend/cuda/cuda_internal.h"
#include "gpu-worker/backend/cuda/cuda_sample.h"
#include "gpu-worker/sampler.h"

struct sample_arguments {
    const struct backend_sample *rows;
    void *scratch;
    uint32_t n_rows, n_vocab;
};

static cudaError_t launch_sample(struct backend *backend, const void *arguments)
{
    const struct sample_arguments *a = arguments;
    return cuda_sample(&backend->queue, a->rows, a->n_rows, a->n_vocab, a->scratch);
}

void cuda_choice_sample(struct backend *backend, const struct backend_sample *items, uint32_t n_items, uint32_t n_vocab)
{
    size_t n_changes = 0;
    for (uint32_t i = 0; i < n_items; i++)
        n_changes += items[i].n_changes;
    void *host_rows, *host_changes;
    struct sample_arguments a = {.n_rows = n_items, .n_vocab = n_vocab};
    a.rows = cuda_commands_stage(backend, n_items * sizeof *items, &host_rows);
    const struct sampler_change *changes =
        cuda_commands_stage(backend, (n_changes + 1) * sizeof *changes, &host_changes);
    a.scratch = cuda_commands_work(backend, CUDA_WORK_SAMPLE, cuda_sample_bytes(n_items));
    if (a.rows == NULL || changes == NULL || a.scratch == NULL)
        return;
    struct backend_sample *rows = host_rows;
    struct sampler_change *staged = host_changes;
    size_t first = 0;
    for (uint32_t i = 0; i < n_items; i++) {
        rows[i] = items[i];
        rows[i].changes = changes + first;
        rows[i].id = (uint32_t *)(uintptr_t)cuda_host_find(backend, items[i].id, sizeof *items[i].id);
        if (rows[i].id == NULL) {
            cuda_commands_failed(backend, "sample", cudaErrorInvalidValue); /* not of host_alloc() */
            return;
        }
        memcpy(staged + first, items[i].changes, items[i].n_changes * sizeof *staged);
        first += items[i].n_changes;
    }
    CUDA_COMMAND(backend, "sample", launch_sample, a);
}
