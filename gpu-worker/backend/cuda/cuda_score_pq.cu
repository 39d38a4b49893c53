/*
 * cuda_score_pq.cu - scores of old keys that are product-quantized, to the bit as codec_pq_plain.c.
 *
 * Launches   one for as many sub-spaces, at most 8, as fit 96 KiB of shared memory with their centroids (8 of 2 dimensions and 2048
 *            centroids; 1 of 8 and 4096). All but the first go on with the sums that lie in the scores.
 * Grid       x: tiles of a run, a warp a tile at a time, 256 threads a block (32 .. 256), few blocks, as each loads the
 *            centroids; y: runs; z: query heads, up to 8.
 * Shared     the centroids and 4 bytes for each dimension of them and query head at once; at most 98 KiB.
 * Algorithm  lanes own keys `lane` and `lane + 32`: their numbers, then one centroid in halves for all query heads, dimension by
 *            dimension in order. Random access: about 3 cycles for 32 keys where 32 banks meet.
 *            Bytes: the tiles once; per launch but the first a score read and written.
 */
#include "gpu-worker/backend/cuda/cuda_keys.h"

#include "gpu-worker/backend/cuda/cuda_keys.cuh"

#define MOST_AT_ONCE  8u
#define MOST_BLOCKS   128u
#define MOST_SPACES   8u
#define CENTROID_ROOM (96u * 1024u)

struct spaces {
    uint32_t first, n; /* of this launch */
    uint32_t n_centroids, head_dim, n_high, tile_bytes;
    bool is_last; /* launch: its sums are the scores */
};

/* The number of a key in a sub-space's part of a tile. */
static __device__ __forceinline__ uint32_t number_of(const uint8_t *__restrict__ packed, uint32_t n_high, uint32_t key)
{
    const uint32_t bit = key * n_high; /* the byte after the last one's is of the low bytes: masked away */
    const uint32_t two = packed[bit / 8] | static_cast<uint32_t>(packed[bit / 8 + 1]) << 8;
    return packed[8 * n_high + key] | (two >> bit % 8 & ((1u << n_high) - 1)) << 8;
}

/* Two halves of a register. */
static __device__ __forceinline__ float half_of(uint32_t two, uint32_t i)
{
    return __half2float(__ushort_as_half(static_cast<unsigned short>(two >> 16 * i & 0xffffu)));
}

template <uint32_t n_dims> struct centroid {
    uint32_t halves[n_dims / 2];
};

template <uint32_t n_dims, uint32_t n_at_once>
CUDA_HOT static __global__ void __launch_bounds__(256)
    score_pq(const struct cuda_key_run *__restrict__ runs, struct spaces spaces, uint32_t n_queries, size_t stride)
{
    CUDA_DYNAMIC_SHARED(uint32_t, words); /* centroids [n][n_centroids][n_dims] in halves */
    const struct cuda_key_run run = runs[blockIdx.y];
    const uint32_t n_words = spaces.n * spaces.n_centroids * n_dims / 2, n_numbers = spaces.n * n_dims;
    const uint32_t first_query = blockIdx.z * n_at_once;
    float *q = reinterpret_cast<float *>(words + n_words); /* [n_numbers][n_at_once] */
    const uint32_t *from = reinterpret_cast<const uint32_t *>(run.centroids) +
                           static_cast<size_t>(spaces.first) * spaces.n_centroids * n_dims / 2;
    for (uint32_t i = threadIdx.x; i < n_words; i += blockDim.x)
        words[i] = from[i];
    for (uint32_t i = threadIdx.x; i < n_numbers * n_at_once; i += blockDim.x) /* the last again where there is none */
        q[i] = static_cast<const float *>(
            run.query)[static_cast<size_t>(min(first_query + i % n_at_once, n_queries - 1)) * spaces.head_dim +
                       spaces.first * n_dims + i / n_at_once];
    __syncthreads();

    const uint32_t n_warps = blockDim.x / CUDA_WARP, space_bytes = KEYS_OF_TILE / 8 * (8 + spaces.n_high);
    float most[n_at_once];
#pragma unroll
    for (uint32_t n = 0; n < n_at_once; n++)
        most[n] = -INFINITY;
    for (uint32_t t = blockIdx.x * n_warps + threadIdx.x / CUDA_WARP; t < run.n_tiles; t += gridDim.x * n_warps) {
        const uint8_t *packed =
            cuda_key_tile(run, t, spaces.tile_bytes) + static_cast<size_t>(spaces.first) * space_bytes;
        float *to = run.scores + first_query * stride + static_cast<size_t>(t) * KEYS_OF_TILE + cuda_lane();
        float sums[2][n_at_once];
#pragma unroll
        for (uint32_t k = 0; k < 2; k++)
#pragma unroll
            for (uint32_t n = 0; n < n_at_once; n++)
                sums[k][n] = spaces.first && first_query + n < n_queries ? to[n * stride + 32 * k] : 0;
        for (uint32_t s = 0; s < spaces.n; s++, packed += space_bytes) {
            const centroid<n_dims> *centroids =
                reinterpret_cast<const centroid<n_dims> *>(words) + s * spaces.n_centroids;
            centroid<n_dims> c[2];
#pragma unroll
            for (uint32_t k = 0; k < 2; k++)
                c[k] = centroids[number_of(packed, spaces.n_high, cuda_lane() + 32 * k)];
#pragma unroll
            for (uint32_t d = 0; d < n_dims; d++)
#pragma unroll
                for (uint32_t n = 0; n < n_at_once; n++)
#pragma unroll
                    for (uint32_t k = 0; k < 2; k++)
                        sums[k][n] =
                            fmaf(q[(s * n_dims + d) * n_at_once + n], half_of(c[k].halves[d / 2], d % 2), sums[k][n]);
        }
#pragma unroll
        for (uint32_t k = 0; k < 2; k++)
#pragma unroll
            for (uint32_t n = 0; n < n_at_once; n++) {
                if (first_query + n < n_queries)
                    to[n * stride + 32 * k] = sums[k][n];
                if (sums[k][n] > most[n] && (t || k || cuda_lane() >= CUDA_KEY_SINKS))
                    most[n] = sums[k][n];
            }
    }
    if (spaces.is_last)
        cuda_key_largest(run, first_query, n_queries, most);
}

template <uint32_t n_dims, uint32_t n_at_once>
static cudaError_t launch(const struct cuda_queue *queue, uint32_t n_centroids, uint32_t head_dim, uint32_t n_queries,
                          const struct cuda_key_run *runs, uint32_t n_runs, uint32_t most_tiles, size_t stride)
{
    if constexpr (n_at_once < MOST_AT_ONCE)
        if (n_queries > n_at_once)
            return launch<n_dims, 2 * n_at_once>(queue, n_centroids, head_dim, n_queries, runs, n_runs, most_tiles,
                                                 stride);
    struct pq_table table = {};
    table.n_centroids = n_centroids;
    table.n_spaces = head_dim / n_dims;
    const uint32_t space_room = n_centroids * n_dims * static_cast<uint32_t>(sizeof(uint16_t));
    const uint32_t fit = CENTROID_ROOM / space_room < MOST_SPACES ? CENTROID_ROOM / space_room : MOST_SPACES;
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    const dim3 grid(cuda_tile_blocks(most_tiles, n_threads, MOST_BLOCKS), n_runs, cuda_blocks(n_queries, n_at_once));
    const size_t most_shared = fit * (space_room + n_dims * n_at_once * sizeof(float));
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void *>(score_pq<n_dims, n_at_once>),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most_shared));
    if (error != cudaSuccess)
        return error;
    for (uint32_t first = 0; first < table.n_spaces; first += fit) {
        const uint32_t n = table.n_spaces - first < fit ? table.n_spaces - first : fit;
        const struct spaces spaces = {first,
                                      n,
                                      n_centroids,
                                      head_dim,
                                      pq_bits(n_centroids) - 8,
                                      static_cast<uint32_t>(pq_tile_bytes(&table)),
                                      first + n == table.n_spaces};
        CUDA_LAUNCH((score_pq<n_dims, n_at_once>), grid, n_threads,
                    n * (space_room + n_dims * n_at_once * sizeof(float)), queue->stream)
        (runs, spaces, n_queries, stride);
    }
    return cudaGetLastError();
}

cudaError_t cuda_score_pq(const struct cuda_queue *queue, uint32_t n_dims, uint32_t n_centroids, uint32_t head_dim,
                          uint32_t n_queries, const struct cuda_key_run *runs, uint32_t n_runs, uint32_t most_tiles,
                          size_t stride)
{
    if (!n_queries || !n_runs || !most_tiles)
        return cudaSuccess;
    if (n_centroids < PQ_MIN_CENTROIDS || n_centroids > PQ_MAX_CENTROIDS)
        return cudaErrorInvalidValue;
    switch (n_dims) {
    case 2:
        return launch<2, 1>(queue, n_centroids, head_dim, n_queries, runs, n_runs, most_tiles, stride);
    case 4:
        return launch<4, 1>(queue, n_centroids, head_dim, n_queries, runs, n_runs, most_tiles, stride);
    case 8:
        return launch<8, 1>(queue, n_centroids, head_dim, n_queries, runs, n_runs, most_tiles, stride);
    default:
        return cudaErrorInvalidValue;
    }
}
