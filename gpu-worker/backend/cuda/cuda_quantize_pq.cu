/*
 * cuda_quantize_pq.cu - keys of sealed blocks -> product-quantized tiles, to the byte as codec_pq.c; and queries for them.
 *
 * Grid       x: sub-spaces, y: tiles; 256 threads (any whole warps).
 * Shared     256 centroids in f32, at most 8 KiB, and 2 KiB.
 * Algorithm  every centroid is looked at: leaves of a k-d tree, which the CPU passes over, would part a warp. Four threads share a
 *            key, each takes a quarter of every 256 centroids; of equal distances the lowest number wins, as in codec_pq.h.
 *            Operations: 3 head_dim 64 n_centroids. Bytes: the centroids once a tile.
 */
#include "gpu-worker/backend/cuda/cuda_keys.h"

#include "gpu-worker/backend/cuda/cuda_keys.cuh"

#define AT_ONCE 256u /* centroids: the least codebook */
#define N_PARTS 4u

struct pq_blocks_shape {
    uint32_t n_centroids, head_dim, n_high, tile_bytes;
};

struct pq_memory {
    float distances[N_PARTS][KEYS_OF_TILE];
    uint32_t numbers[N_PARTS][KEYS_OF_TILE];
};

/* Sum of squares by the tree of codec_pq.h. */
template <uint32_t n_dims>
static __device__ __forceinline__ float square_distance(const float *x, const float *centroid)
{
    float squares[n_dims];
#pragma unroll
    for (uint32_t i = 0; i < n_dims; i++) {
        const float difference = x[i] - centroid[i];
        squares[i] = difference * difference;
    }
#pragma unroll
    for (uint32_t n = n_dims; n > 1; n /= 2)
#pragma unroll
        for (uint32_t i = 0; i < n / 2; i++)
            squares[i] = squares[2 * i] + squares[2 * i + 1];
    return squares[0];
}

/* The numbers of 64 keys, in memory->numbers[0]. */
static __device__ __forceinline__ void join_parts(struct pq_memory *memory)
{
    for (uint32_t j = threadIdx.x; j < KEYS_OF_TILE; j += blockDim.x) {
        uint32_t best = 0;
        for (uint32_t part = 1; part < N_PARTS; part++) {
            const float distance = memory->distances[part][j], least = memory->distances[best][j];
            if (distance < least || (distance == least && memory->numbers[part][j] < memory->numbers[best][j]))
                best = part;
        }
        memory->numbers[0][j] = memory->numbers[best][j];
    }
}

template <uint32_t n_dims>
CUDA_HOT static __global__ void __launch_bounds__(1024)
    quantize_pq(const struct cuda_key_block *__restrict__ blocks, struct pq_blocks_shape shape)
{
    __shared__ struct pq_memory memory;
    __shared__ __align__(16) float centroids[AT_ONCE * n_dims];
    const struct cuda_key_block block = blocks[blockIdx.y];
    const uint32_t space = blockIdx.x;
    const uint16_t *from = block.centroids + static_cast<size_t>(space) * shape.n_centroids * n_dims;
    for (uint32_t at = threadIdx.x; at < N_PARTS * KEYS_OF_TILE; at += blockDim.x) {
        memory.distances[at / KEYS_OF_TILE][at % KEYS_OF_TILE] = INFINITY;
        memory.numbers[at / KEYS_OF_TILE][at % KEYS_OF_TILE] = 0xffffffffu;
    }
    for (uint32_t first = 0; first < shape.n_centroids; first += AT_ONCE) {
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < AT_ONCE * n_dims; i += blockDim.x)
            centroids[i] = __half2float(__ushort_as_half(from[static_cast<size_t>(first) * n_dims + i]));
        __syncthreads();
        for (uint32_t at = threadIdx.x; at < N_PARTS * KEYS_OF_TILE; at += blockDim.x) {
            const uint32_t j = at % KEYS_OF_TILE, part = at / KEYS_OF_TILE;
            float x[n_dims], least = memory.distances[part][j];
            uint32_t number = memory.numbers[part][j];
#pragma unroll
            for (uint32_t i = 0; i < n_dims; i++)
                x[i] =
                    cuda_cleaned(block.keys[static_cast<size_t>(j) * shape.head_dim + space * n_dims + i], KEY_LARGEST);
            for (uint32_t c = part * (AT_ONCE / N_PARTS); c < (part + 1) * (AT_ONCE / N_PARTS); c++) {
                const float distance = square_distance<n_dims>(x, centroids + c * n_dims);
                if (distance < least) { /* numbers rise */
                    least = distance;
                    number = first + c;
                }
            }
            memory.distances[part][j] = least;
            memory.numbers[part][j] = number;
        }
    }
    __syncthreads();
    join_parts(&memory);
    __syncthreads();
    const uint32_t n_bytes = KEYS_OF_TILE / 8 * (8 + shape.n_high);
    uint8_t *tile = static_cast<uint8_t *>(block.tile), *packed = tile + static_cast<size_t>(space) * n_bytes;
    for (uint32_t eight = threadIdx.x; eight < KEYS_OF_TILE / 8; eight += blockDim.x) {
        uint32_t high = 0;
        for (uint32_t k = 0; k < 8; k++)
            high |= (memory.numbers[0][8 * eight + k] >> 8) << (k * shape.n_high);
        for (uint32_t i = 0; i < shape.n_high; i++)
            packed[eight * shape.n_high + i] = static_cast<uint8_t>(high >> 8 * i);
    }
    for (uint32_t j = threadIdx.x; j < KEYS_OF_TILE; j += blockDim.x)
        packed[8 * shape.n_high + j] = static_cast<uint8_t>(memory.numbers[0][j]);
    if (space + 1 == gridDim.x)
        for (uint32_t i = gridDim.x * n_bytes + threadIdx.x; i < shape.tile_bytes; i += blockDim.x)
            tile[i] = 0;
    if (space == 0 && threadIdx.x == 0)
        *block.side = 0;
}

CUDA_HOT static __global__ void __launch_bounds__(1024)
    prepare_pq(const struct cuda_key_query *__restrict__ queries, uint32_t n, float scale)
{
    const struct cuda_key_query head = queries[blockIdx.y];
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        const float x = cuda_cleaned(head.q[i], QUERY_LARGEST);
        static_cast<float *>(head.query)[i] = (x != 0 ? x : 0.0f) * scale; /* what is small has no sign here */
    }
}

cudaError_t cuda_quantize_pq(const struct cuda_queue *queue, uint32_t n_dims, uint32_t n_centroids, uint32_t head_dim,
                             const struct cuda_key_block *blocks, uint32_t n_blocks)
{
    if (n_centroids < PQ_MIN_CENTROIDS || n_centroids > PQ_MAX_CENTROIDS || (n_dims != 2 && n_dims != 4 && n_dims != 8))
        return cudaErrorInvalidValue;
    if (!n_blocks || !head_dim)
        return cudaSuccess;
    struct pq_table table = {};
    table.n_centroids = n_centroids;
    table.n_spaces = head_dim / n_dims;
    const struct pq_blocks_shape shape = {n_centroids, head_dim, pq_bits(n_centroids) - 8,
                                          static_cast<uint32_t>(pq_tile_bytes(&table))};
    const dim3 grid(table.n_spaces, n_blocks);
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    if (n_dims == 2)
        CUDA_LAUNCH((quantize_pq<2>), grid, n_threads, 0, queue->stream)(blocks, shape);
    else if (n_dims == 4)
        CUDA_LAUNCH((quantize_pq<4>), grid, n_threads, 0, queue->stream)(blocks, shape);
    else
        CUDA_LAUNCH((quantize_pq<8>), grid, n_threads, 0, queue->stream)(blocks, shape);
    return cudaGetLastError();
}

cudaError_t cuda_prepare_pq(const struct cuda_queue *queue, uint32_t head_dim, uint32_t n_queries, float scale,
                            const struct cuda_key_query *queries, uint32_t n_heads)
{
    if (!n_queries || !n_heads || !head_dim)
        return cudaSuccess;
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    CUDA_LAUNCH(prepare_pq, dim3(cuda_blocks(n_queries * head_dim, n_threads), n_heads), n_threads, 0, queue->stream)
    (queries, n_queries * head_dim, scale);
    return cudaGetLastError();
}
