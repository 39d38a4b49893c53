/* device.c - tests/backend/cuda-on-cpu/device.h on a real device: the orders are its own, the block sizes are the same. */
#include "tests/backend/cuda-on-cpu/device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

/* An error by its name: in these tests a call either works or the device is not usable. */
static void must(cudaError_t error, const char *call)
{
    if (error)
        fail_msg("%s: %s (%s)", call, cudaGetErrorName(error), cudaGetErrorString(error));
}

struct device_run device_run(int i)
{
    static const uint32_t n_threads[] = {0, 96, 32, 256};
    return (struct device_run){.queue.n_threads = n_threads[i]};
}

void *device_new(const void *host, size_t n_bytes)
{
    void *memory = NULL;
    must(cudaMalloc(&memory, n_bytes), "cudaMalloc");
    if (host)
        must(cudaMemcpy(memory, host, n_bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    else if (n_bytes)
        must(cudaMemset(memory, 0xff, n_bytes), "cudaMemset"); /* NaNs, as in the emulation */
    return memory;
}

void device_read(void *host, const void *device, size_t n_bytes)
{
    must(cudaMemcpy(host, device, n_bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
}

void device_free(void *device)
{
    must(cudaFree(device), "cudaFree");
}
