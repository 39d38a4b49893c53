/*
 * cuda_score_f16.cu - scores of old keys in half precision, to the bit as score_f16() of kernels/plain.c.
 *
 * Grid       x: tiles of a run, a warp a tile at a time, 256 threads a block (32 .. 256); y: runs; z: query heads, up to 8 in one
 *            pass over the tiles.
 * Shared     per warp 4352 bytes (32 dimensions of 64 keys), and 4 bytes for each dimension of the query heads at once: 42 KiB for 8
 *            warps and heads of 256.
 * Algorithm  lanes own keys `lane` and `lane + 32` and sum up dimension by dimension, as the plain loop does. So that memory is read in
 *            pieces of 64 bytes, a warp brings 32 dimensions of all keys to shared memory, where a key has 17 words: no two keys
 *            meet in a bank.
 *            Bytes: the tiles once. Operations for a dimension of a key: a conversion, two a query head.
 */
#include "gpu-worker/backend/cuda/cuda_keys.h"

#include "gpu-worker/backend/cuda/cuda_keys.cuh"

#define MOST_AT_ONCE 8u
#define MOST_BLOCKS  512u
#define DIMS         32u            /* at once */
#define KEY_WORDS    (DIMS / 2 + 1) /* of a key in shared memory */

/* Dimensions [first, first + n) of a tile's keys to shared memory; eights: rows are whole 16 bytes. */
static __device__ __forceinline__ void bring(const uint8_t *__restrict__ tile, uint32_t head_dim, uint32_t first,
                                             uint32_t n, bool eights, uint32_t *words)
{
    if (eights) {
        for (uint32_t i = cuda_lane(); i < KEYS_OF_TILE * (DIMS / 8); i += CUDA_WARP) {
            const uint32_t key = i / (DIMS / 8), at = i % (DIMS / 8);
            if (8 * at >= n)
                continue;
            const uint4 four = *reinterpret_cast<const uint4 *>(tile + 2 * (key * head_dim + first + 8 * at));
            uint32_t *to = words + key * KEY_WORDS + 4 * at;
            to[0] = four.x;
            to[1] = four.y;
            to[2] = four.z;
            to[3] = four.w;
        }
        return;
    }
    const uint16_t *halves = reinterpret_cast<const uint16_t *>(tile);
    for (uint32_t i = cuda_lane(); i < KEYS_OF_TILE * DIMS; i += CUDA_WARP)
        if (i % DIMS < n)
            reinterpret_cast<uint16_t *>(words)[i / DIMS * (2 * KEY_WORDS) + i % DIMS] =
                halves[i / DIMS * head_dim + first + i % DIMS];
}

static __device__ __forceinline__ float half_of(uint32_t two, uint32_t i)
{
    return __half2float(__ushort_as_half(static_cast<unsigned short>(two >> 16 * i & 0xffffu)));
}

template <uint32_t n_at_once>
CUDA_HOT static __global__ void __launch_bounds__(256, 2)
    score_f16(const struct cuda_key_run *__restrict__ runs, uint32_t head_dim, uint32_t n_queries, size_t stride)
{
    CUDA_DYNAMIC_SHARED(float, q); /* [head_dim][n_at_once], then [warps][64][KEY_WORDS] */
    const struct cuda_key_run run = runs[blockIdx.y];
    const uint32_t first_query = blockIdx.z * n_at_once, n_warps = blockDim.x / CUDA_WARP;
    const float *given = static_cast<const float *>(run.query), scale = given[0];
    for (uint32_t i = threadIdx.x; i < head_dim * n_at_once; i += blockDim.x) /* the last again where there is none */
        q[i] = given[CUDA_KEY_F16_HEADER + min(first_query + i % n_at_once, n_queries - 1) * head_dim + i / n_at_once];
    uint32_t *words =
        reinterpret_cast<uint32_t *>(q + head_dim * n_at_once) + threadIdx.x / CUDA_WARP * KEYS_OF_TILE * KEY_WORDS;
    __syncthreads();

    float most[n_at_once];
#pragma unroll
    for (uint32_t n = 0; n < n_at_once; n++)
        most[n] = -INFINITY;
    for (uint32_t t = blockIdx.x * n_warps + threadIdx.x / CUDA_WARP; t < run.n_tiles; t += gridDim.x * n_warps) {
        const uint8_t *tile = cuda_key_tile(run, t, KEYS_OF_TILE * head_dim * 2);
        float sums[2][n_at_once] = {};
        for (uint32_t first = 0; first < head_dim; first += DIMS) {
            const uint32_t n_dims = min(head_dim - first, DIMS);
            bring(tile, head_dim, first, n_dims, head_dim % 8 == 0, words);
            __syncwarp();
#pragma unroll 4
            for (uint32_t d = 0; d < n_dims; d++) {
                const uint32_t two[2] = {words[cuda_lane() * KEY_WORDS + d / 2],
                                         words[(cuda_lane() + 32) * KEY_WORDS + d / 2]};
#pragma unroll
                for (uint32_t k = 0; k < 2; k++) {
                    const float x = half_of(two[k], d % 2);
#pragma unroll
                    for (uint32_t n = 0; n < n_at_once; n++)
                        sums[k][n] += q[(first + d) * n_at_once + n] * x;
                }
            }
            __syncwarp();
        }
#pragma unroll
        for (uint32_t k = 0; k < 2; k++)
#pragma unroll
            for (uint32_t n = 0; n < n_at_once; n++) {
                const uint32_t key = cuda_lane() + 32 * k;
                const float score = scale * sums[k][n];
                if (first_query + n < n_queries)
                    run.scores[(first_query + n) * stride + static_cast<size_t>(t) * KEYS_OF_TILE + key] = score;
                if (score > most[n] && (t || key >= CUDA_KEY_SINKS))
                    most[n] = score;
            }
    }
    cuda_key_largest(run, first_query, n_queries, most);
}

template <uint32_t n_at_once>
static cudaError_t launch(const struct cuda_queue *queue, uint32_t head_dim, uint32_t n_queries,
                          const struct cuda_key_run *runs, uint32_t n_runs, uint32_t most_tiles, size_t stride)
{
    if constexpr (n_at_once < MOST_AT_ONCE)
        if (n_queries > n_at_once)
            return launch<2 * n_at_once>(queue, head_dim, n_queries, runs, n_runs, most_tiles, stride);
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    const dim3 grid(cuda_tile_blocks(most_tiles, n_threads, MOST_BLOCKS), n_runs, cuda_blocks(n_queries, n_at_once));
    const size_t shared = sizeof(float) * (head_dim * n_at_once + n_threads / CUDA_WARP * KEYS_OF_TILE * KEY_WORDS);
    CUDA_LAUNCH((score_f16<n_at_once>), grid, n_threads, shared, queue->stream)(runs, head_dim, n_queries, stride);
    return cudaGetLastError();
}

cudaError_t cuda_score_f16(const struct cuda_queue *queue, uint32_t head_dim, uint32_t n_queries,
                           const struct cuda_key_run *runs, uint32_t n_runs, uint32_t most_tiles, size_t stride)
{
    if (!n_queries || !n_runs || !most_tiles)
        return cudaSuccess;
    if (head_dim == 0 || head_dim > KERNELS_MAX_HEAD_DIM)
        return cudaErrorInvalidValue;
    return launch<1>(queue, head_dim, n_queries, runs, n_runs, most_tiles, stride);
}
