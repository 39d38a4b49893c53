/*
 * cuda_copy.cu - many small copies in one launch: new rows to where exact sets keep them.
 *
 * Grid       x: items, one a warp; y: chunks of 2 KiB of the largest. 128 threads.
 * Algorithm  as wide as both addresses and the size allow: 16, 8, 4, 2 or 1 bytes a lane, neighbours beside each other.
 *            Bytes: read and written once.
 */
#include "gpu-worker/backend/cuda/cuda_ops.h"

#include "gpu-worker/backend/cuda/cuda.cuh"

#define CHUNK_BYTES 2048u
#define MAX_CHUNKS  65535u

template <typename T>
static __device__ __forceinline__ void copy_as(void *to, const void *from, size_t first_byte, size_t end_byte)
{
#pragma unroll 4
    for (size_t i = first_byte / sizeof(T) + cuda_lane(); i < end_byte / sizeof(T); i += CUDA_WARP)
        static_cast<T *>(to)[i] = static_cast<const T *>(from)[i];
}

static __global__ void __launch_bounds__(1024) copy(const struct backend_copy *__restrict__ items, uint32_t n_items)
{
    const uint32_t index = blockIdx.x * (blockDim.x / CUDA_WARP) + threadIdx.x / CUDA_WARP;
    if (index >= n_items)
        return;
    const struct backend_copy item = items[index];
    const size_t places = reinterpret_cast<size_t>(item.to) | reinterpret_cast<size_t>(item.from) | item.n_bytes;
    for (size_t first = static_cast<size_t>(blockIdx.y) * CHUNK_BYTES; first < item.n_bytes;
         first += static_cast<size_t>(gridDim.y) * CHUNK_BYTES) {
        const size_t end = item.n_bytes - first < CHUNK_BYTES ? item.n_bytes : first + CHUNK_BYTES;
        if (!(places & 15))
            copy_as<uint4>(item.to, item.from, first, end);
        else if (!(places & 7))
            copy_as<uint2>(item.to, item.from, first, end);
        else if (!(places & 3))
            copy_as<uint32_t>(item.to, item.from, first, end);
        else if (!(places & 1))
            copy_as<uint16_t>(item.to, item.from, first, end);
        else
            copy_as<uint8_t>(item.to, item.from, first, end);
    }
}

cudaError_t cuda_copy(const struct cuda_queue *queue, const struct backend_copy *items, uint32_t n_items,
                      size_t most_bytes)
{
    if (!n_items || !most_bytes)
        return cudaSuccess;
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 128;
    const size_t n_chunks = (most_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
    const dim3 grid(cuda_blocks(n_items, n_threads / CUDA_WARP),
                    static_cast<unsigned int>(n_chunks < MAX_CHUNKS ? n_chunks : MAX_CHUNKS));
    CUDA_LAUNCH(copy, grid, n_threads, 0, queue->stream)(items, n_items);
    return cudaGetLastError();
}
