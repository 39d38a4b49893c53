/*
 * device.h - for tests of kernels on the emulated device: host data there and back, the orders and block sizes to try.
 *
 * HCATTN_TEST_CUDA_SEED  a number: the first seed of random orders instead of 1, to find what one run does not.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "gpu-worker/backend/cuda/cuda_ops.h"

/* Orders in which each operation runs: 0 as written, others at random; each with a block size of its own (0: the kernel's). */
#ifdef HCATTN_SANITIZED
#define DEVICE_N_RUNS 2 /* memory is what these builds look at; all of it takes them a minute */
#else
#define DEVICE_N_RUNS 4
#endif
struct device_run {
    uint64_t seed;
    struct cuda_queue queue;
};

/* Run i of DEVICE_N_RUNS, begun: the seed is set. */
struct device_run device_run(int i);

/* Device memory with these bytes (host NULL: as cudaMalloc() gives it). The test fails where there is none. */
void *device_new(const void *host, size_t n_bytes);
void device_read(void *host, const void *device, size_t n_bytes);
void device_free(void *device);
