/* device.c - see device.h. */
#include "tests/backend/cuda-on-cpu/device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/backend/cuda-on-cpu/emulation_control.h"

struct device_run device_run(int i)
{
    static const uint32_t n_threads[] = {0, 96, 32, 256};
    const char *first = getenv("HCATTN_TEST_CUDA_SEED");
    struct device_run run = {.queue.n_threads = n_threads[i]};
    if (i)
        run.seed = (first ? (uint64_t)strtoull(first, NULL, 10) : 1u) * 1000003u + (unsigned)i;
    emulation_set_seed(run.seed);
    return run;
}

void *device_new(const void *host, size_t n_bytes)
{
    void *memory = NULL;
    assert_int_equal(cudaMalloc(&memory, n_bytes), cudaSuccess);
    if (host)
        assert_int_equal(cudaMemcpy(memory, host, n_bytes, cudaMemcpyHostToDevice), cudaSuccess);
    return memory;
}

void device_read(void *host, const void *device, size_t n_bytes)
{
    assert_int_equal(cudaMemcpy(host, device, n_bytes, cudaMemcpyDeviceToHost), cudaSuccess);
}

void device_free(void *device)
{
    assert_int_equal(cudaFree(device), cudaSuccess);
}
