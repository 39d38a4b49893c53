/* timings_copies.c - see timings.h: copies between host and device, by how the host's memory is had, and on the device. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/backend/cuda-on-device/timings.h"

#define MAX_BYTES  ((size_t)256 << 20)
#define TINY_BYTES ((size_t)64 << 10)
#define PAGE       4096u

enum host_memory { PAGEABLE, PINNED, REGISTERED, N_HOST };
static const char *const host_names[] = {"pageable", "pinned", "registered"};

struct copy {
    void *host;
    size_t n_bytes;
    enum cudaMemcpyKind kind;
};

static cudaError_t launch_copy(struct timings *timings, void *context, uint32_t i)
{
    const struct copy *copy = context;
    void *device = timings_copy(timings, copy->n_bytes, copy->kind == cudaMemcpyDeviceToDevice ? 2 * i : i);
    void *other = copy->kind == cudaMemcpyDeviceToDevice ? timings_copy(timings, copy->n_bytes, 2 * i + 1) : copy->host;
    const bool to_device = copy->kind != cudaMemcpyDeviceToHost;
    return cudaMemcpyAsync(to_device ? device : other, to_device ? other : device, copy->n_bytes, copy->kind,
                           timings->queue.stream);
}

static void sizes(struct timings *timings, void *host, const char *type, const char *kernel, enum cudaMemcpyKind kind)
{
    for (size_t n_bytes = PAGE; n_bytes <= (timings->tiny ? TINY_BYTES : MAX_BYTES); n_bytes *= 16) {
        struct timing timing = {.kernel = kernel,
                                .type = type,
                                .bytes = (double)n_bytes * (kind == cudaMemcpyDeviceToDevice ? 2 : 1),
                                .on_host_clock = kind != cudaMemcpyDeviceToDevice};
        snprintf(timing.shape, sizeof timing.shape, "%zu", n_bytes);
        if (2 * n_bytes > timings->pool_bytes) {
            timings_skip(&timing, "memory");
            continue;
        }
        timings_case(timings, &timing, launch_copy, &(struct copy){host, n_bytes, kind});
    }
}

/* Memory of that kind; all of it touched. NULL: not to be had. */
static void *host_new(enum host_memory which, size_t n_bytes)
{
    void *memory = NULL;
    if (which == PINNED) {
        if (cudaMallocHost(&memory, n_bytes))
            return NULL;
    } else {
        memory = aligned_alloc(PAGE, n_bytes);
    }
    if (memory)
        memset(memory, 1, n_bytes);
    if (memory && which == REGISTERED && cudaHostRegister(memory, n_bytes, cudaHostRegisterDefault)) {
        free(memory);
        return NULL;
    }
    return memory;
}

static void host_free(enum host_memory which, void *memory)
{
    if (which == PINNED) {
        (void)cudaFreeHost(memory);
        return;
    }
    if (which == REGISTERED)
        (void)cudaHostUnregister(memory);
    free(memory);
}

void timings_copies(struct timings *timings)
{
    sizes(timings, NULL, "device", "copy_on_device", cudaMemcpyDeviceToDevice);
    for (int which = 0; which < N_HOST; which++) {
        void *host = host_new((enum host_memory)which, timings->tiny ? TINY_BYTES : MAX_BYTES);
        if (!host) {
            (void)cudaGetLastError();
            timings_skip(&(struct timing){.kernel = "copy", .type = host_names[which], .shape = "all"}, "refused");
            continue;
        }
        sizes(timings, host, host_names[which], "copy_to_device", cudaMemcpyHostToDevice);
        sizes(timings, host, host_names[which], "copy_to_host", cudaMemcpyDeviceToHost);
        host_free((enum host_memory)which, host);
    }
}
