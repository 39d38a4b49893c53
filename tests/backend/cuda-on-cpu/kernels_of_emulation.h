/* kernels_of_emulation.h - kernels that try what the emulation gives, and kernels with the mistakes it must find. */
#pragma once

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* out [n_blocks][n_threads] = sum over the block of the numbers of the launch's threads, by shared memory and shuffles */
void kernels_block_sums(const float *in, float *out, unsigned int n_blocks, unsigned int n_threads);

/* out [32] of a warp: ballot, shuffles, reductions of in [32]; one line an operation, see the test */
#define KERNELS_N_WARP_RESULTS 10
void kernels_warp_results(const int *in, int *out);

/* counts [16] += how often each value of in [n] occurs; max: the largest */
void kernels_histogram(const unsigned int *in, unsigned int n, unsigned int *counts, unsigned int *max);

/* out [n]: conversions to half and back, dp4a and bits of the words in [n] */
void kernels_intrinsics(const unsigned int *in, unsigned int n, unsigned int *out);

/* Reverses in [n_threads] by dynamic shared memory; with_barrier 0: the barrier is missing. */
void kernels_reverse(const float *in, float *out, unsigned int n_threads, int with_barrier);

/* x [n] <- x * factor + 1, on a stream */
cudaError_t kernels_scale(cudaStream_t stream, float *x, unsigned int n, float factor);

/* The mistakes; out [64] or NULL as the name says. Each ends the process, or is an error of the launch. */
enum kernels_mistake {
    KERNELS_BARRIER_IN_BRANCH,
    KERNELS_TWO_BARRIERS,
    KERNELS_RETURN_BEFORE_BARRIER,
    KERNELS_MASK_WITHOUT_ME,
    KERNELS_LANES_MISSING,
    KERNELS_SHUFFLE_FROM_OUTSIDE,
    KERNELS_BEHIND_THE_END,
    KERNELS_BEFORE_THE_BEGINNING,
    KERNELS_BEHIND_SHARED,
    KERNELS_N_MISTAKES,
};
void kernels_mistake(enum kernels_mistake mistake, float *out, unsigned int n);

/* A launch with so many threads a block and bytes of shared memory; its error. */
cudaError_t kernels_launch_error(unsigned int n_threads, size_t shared_bytes, int allow_more);

#ifdef __cplusplus
}
#endif
