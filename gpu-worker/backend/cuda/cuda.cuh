/*
 * cuda.cuh - what every kernel file of this back end shares: launches, dynamic shared memory, sums over warps and blocks.
 *
 * The .cu files are written in the subset of CUDA that docs/cuda.md lists: nvcc compiles them for devices, and tests compile the
 * very same files as C++17 for the CPU, where other headers stand in for <cuda_runtime.h> and <cuda_fp16.h>.
 *
 * Numbers    no fused multiply-add but by fmaf() (--fmad=false), so that a result is the same wherever it is computed.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime.h>
#include <cuda_fp16.h>

#define CUDA_WARP      32u
#define CUDA_ALL_LANES 0xffffffffu

/*
 * CUDA_LAUNCH(kernel, grid, block, shared_bytes, stream)(arguments...); a kernel that is a template in brackets: (name<8>).
 * CUDA_DYNAMIC_SHARED(type, name): the launch's shared_bytes as `type *name`, aligned to 16; once a kernel.
 */
#ifdef __CUDACC__
#define CUDA_LAUNCH(kernel, grid, block, shared_bytes, stream) kernel<<<(grid), (block), (shared_bytes), (stream)>>>
#define CUDA_DYNAMIC_SHARED(type, name)                                                                                \
    extern __shared__ __align__(16) unsigned char cuda_shared_bytes[];                                                 \
    type *const name = reinterpret_cast<type *>(cuda_shared_bytes)
#else
#define CUDA_LAUNCH(kernel, grid, block, shared_bytes, stream)                                                         \
    emulation_launcher(kernel, #kernel, (grid), (block), (shared_bytes), (stream))
#define CUDA_DYNAMIC_SHARED(type, name) type *const name = reinterpret_cast<type *>(emulation_place.dynamic_shared)
#endif

/* Before a kernel's `static __global__`: the build fails where the compiler spills its registers to memory. */
#define CUDA_HOT

static inline unsigned int cuda_blocks(size_t n, unsigned int of)
{
    return (unsigned int)((n + of - 1) / of);
}

static __device__ __forceinline__ unsigned int cuda_lane()
{
    return threadIdx.x % CUDA_WARP;
}

/* Sum over a whole warp, the same bits in every lane. */
static __device__ __forceinline__ float cuda_warp_sum(float x)
{
    for (int bits = 16; bits; bits /= 2)
        x += __shfl_xor_sync(CUDA_ALL_LANES, x, bits);
    return x;
}

static __device__ __forceinline__ float cuda_warp_max(float x)
{
    for (int bits = 16; bits; bits /= 2)
        x = fmaxf(x, __shfl_xor_sync(CUDA_ALL_LANES, x, bits));
    return x;
}

/* Sum over a block of one dimension (whole warps, all threads take part); `scratch` [32] in shared memory. */
static __device__ __forceinline__ float cuda_block_sum(float x, float *scratch)
{
    const unsigned int n_warps = blockDim.x / CUDA_WARP;
    x = cuda_warp_sum(x);
    if (cuda_lane() == 0)
        scratch[threadIdx.x / CUDA_WARP] = x;
    __syncthreads();
    x = cuda_warp_sum(cuda_lane() < n_warps ? scratch[cuda_lane()] : 0.0f);
    __syncthreads(); /* scratch may be used again */
    return x;
}
