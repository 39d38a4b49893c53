/* backend.c - the back ends of this build by name. */
#include "gpu-worker/backend/backend.h"

#include <math.h>
#include <string.h>

extern const struct backend_ops backend_cuda __attribute__((weak));

const struct backend_ops *backend_find(const char *name)
{
    const struct backend_ops *const all[] = {&backend_reference, &backend_cpu, &backend_cuda};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] != NULL && strcmp(all[i]->name, name) == 0)
            return all[i];
    return NULL;
}

void backend_copy_in_host(struct backend *backend, const struct backend_copy *copies, uint32_t n_copies)
{
    (void)backend;
    for (uint32_t i = 0; i < n_copies; i++)
        memcpy(copies[i].to, copies[i].from, copies[i].n_bytes);
}

void backend_make_empty(float *partials, size_t n, uint32_t head_dim)
{
    const size_t stride = KERNELS_PARTIAL_FLOATS(head_dim);
    memset(partials, 0, n * stride * sizeof(float));
    for (size_t i = 0; i < n; i++)
        partials[i * stride] = -INFINITY;
}
