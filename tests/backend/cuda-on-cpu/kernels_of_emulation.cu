/* kernels_of_emulation.cu - see kernels_of_emulation.h. */
#include "tests/backend/cuda-on-cpu/kernels_of_emulation.h"

#include "gpu-worker/backend/cuda/cuda.cuh"

static __global__ void block_sums(const float *in, float *out)
{
    __shared__ float scratch[32];
    const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    out[i] = cuda_block_sum(in[i], scratch);
}

void kernels_block_sums(const float *in, float *out, unsigned int n_blocks, unsigned int n_threads)
{
    CUDA_LAUNCH(block_sums, n_blocks, n_threads, 0, nullptr)(in, out);
}

static __global__ void warp_results(const int *in, int *out)
{
    const int lane = static_cast<int>(threadIdx.x), x = in[lane];
    int line = 0;
    auto give = [&](int result) { out[32 * line++ + lane] = result; };
    give(static_cast<int>(__ballot_sync(CUDA_ALL_LANES, x & 1)));
    give(__any_sync(CUDA_ALL_LANES, x == 1000));
    give(__all_sync(CUDA_ALL_LANES, x < 1000));
    give(__shfl_sync(CUDA_ALL_LANES, x, 31 - lane));
    give(__shfl_xor_sync(CUDA_ALL_LANES, x, 5, 8));
    give(__shfl_down_sync(CUDA_ALL_LANES, x, 3, 16));
    give(__shfl_up_sync(CUDA_ALL_LANES, x, 2));
    give(__reduce_add_sync(CUDA_ALL_LANES, x));
    give(__reduce_max_sync(CUDA_ALL_LANES, x));
    /* halves of a warp go ways of their own */
    give(lane < 16 ? __reduce_min_sync(0xffffu, x) : __reduce_add_sync(0xffff0000u, x));
    __syncwarp();
}

void kernels_warp_results(const int *in, int *out)
{
    CUDA_LAUNCH(warp_results, 1, 32, 0, nullptr)(in, out);
}

static __global__ void histogram(const unsigned int *in, unsigned int n, unsigned int *counts, unsigned int *max)
{
    __shared__ unsigned int mine[16];
    if (threadIdx.x < 16)
        mine[threadIdx.x] = 0;
    __syncthreads();
    for (unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        atomicAdd(&mine[in[i] % 16], 1u);
        atomicMax(max, in[i]);
    }
    __syncthreads();
    if (threadIdx.x < 16)
        atomicAdd(&counts[threadIdx.x], mine[threadIdx.x]);
}

void kernels_histogram(const unsigned int *in, unsigned int n, unsigned int *counts, unsigned int *max)
{
    CUDA_LAUNCH(histogram, 5, 96, 0, nullptr)(in, n, counts, max);
}

static __global__ void intrinsics(const unsigned int *in, unsigned int n, unsigned int *out)
{
    const unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const unsigned int x = in[i];
    const unsigned int half = __half_as_ushort(__float2half_rn(__uint_as_float(x)));
    const int dot = __dp4a(static_cast<int>(x), static_cast<int>(x >> 3), -7);
    out[4 * i] =
        half << 16 | __half_as_ushort(__float2half_rn(__half2float(__ushort_as_half(static_cast<unsigned short>(x)))));
    out[4 * i + 1] = static_cast<unsigned int>(dot);
    out[4 * i + 2] =
        static_cast<unsigned int>(__popc(x) + 64 * __clz(static_cast<int>(x)) + 4096 * __ffs(static_cast<int>(x)));
    out[4 * i + 3] = __byte_perm(x, ~x, 0x7362);
}

void kernels_intrinsics(const unsigned int *in, unsigned int n, unsigned int *out)
{
    CUDA_LAUNCH(intrinsics, cuda_blocks(n, 64), 64, 0, nullptr)(in, n, out);
}

static __global__ void reverse(const float *in, float *out, int with_barrier)
{
    CUDA_DYNAMIC_SHARED(float, numbers);
    numbers[threadIdx.x] = in[threadIdx.x];
    if (with_barrier)
        __syncthreads();
    out[threadIdx.x] = numbers[blockDim.x - 1 - threadIdx.x];
}

void kernels_reverse(const float *in, float *out, unsigned int n_threads, int with_barrier)
{
    CUDA_LAUNCH(reverse, 1, n_threads, n_threads * sizeof(float), nullptr)(in, out, with_barrier);
}

static __global__ void scale(float *x, unsigned int n, float factor)
{
    const unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        x[i] = x[i] * factor + 1;
}

cudaError_t kernels_scale(cudaStream_t stream, float *x, unsigned int n, float factor)
{
    CUDA_LAUNCH(scale, cuda_blocks(n, 64), 64, 0, stream)(x, n, factor);
    return cudaGetLastError();
}

static __global__ void mistake(int which, float *out, unsigned int n)
{
    CUDA_DYNAMIC_SHARED(float, shared);
    const unsigned int i = threadIdx.x;
    float x = static_cast<float>(i);
    switch (which) {
    case KERNELS_BARRIER_IN_BRANCH:
        if (i < 32)
            __syncthreads();
        break;
    case KERNELS_TWO_BARRIERS:
        if (i < 32)
            __syncthreads();
        else
            __syncthreads();
        break;
    case KERNELS_RETURN_BEFORE_BARRIER:
        if (i == 63)
            return;
        __syncthreads();
        break;
    case KERNELS_MASK_WITHOUT_ME:
        x = __shfl_sync(0xffffu, x, 0);
        break;
    case KERNELS_LANES_MISSING:
        if (i % 32 != 7)
            x = __shfl_sync(CUDA_ALL_LANES, x, 0);
        break;
    case KERNELS_SHUFFLE_FROM_OUTSIDE:
        if (i % 32 < 16)
            x = __shfl_sync(0xffffu, x, 20);
        break;
    case KERNELS_BEHIND_THE_END:
        if (i == 5)
            out[n] = x;
        break;
    case KERNELS_BEFORE_THE_BEGINNING:
        if (i == 5)
            out[-1] = x;
        break;
    case KERNELS_BEHIND_SHARED:
        shared[i + 1] = x;
        break;
    default:
        break;
    }
    out[i] = x;
}

void kernels_mistake(enum kernels_mistake which, float *out, unsigned int n)
{
    CUDA_LAUNCH(mistake, 1, 64, 64 * sizeof(float), nullptr)(static_cast<int>(which), out, n);
}

static __global__ void nothing()
{
}

cudaError_t kernels_launch_error(unsigned int n_threads, size_t shared_bytes, int allow_more)
{
    if (allow_more) {
        const cudaError_t error =
            cudaFuncSetAttribute(reinterpret_cast<const void *>(nothing), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes));
        if (error)
            return error;
    }
    CUDA_LAUNCH(nothing, 1, n_threads, shared_bytes, nullptr)();
    return cudaGetLastError();
}
