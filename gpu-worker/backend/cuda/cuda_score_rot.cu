/*
 * cuda_score_rot.cu - scores of old keys in rot4, rot3 and rot2, to the bit as codec_rot_plain.c.
 *
 * Grid       x: tiles of a run, a warp a tile at a time, 256 threads a block (32 .. 256); y: runs; z: query heads, up to 8
 *            (all heads of the usual groups) in one pass over the tiles.
 * Shared     per query head at once 80 bytes for 16 dimensions and 16: 5.2 KiB for 8 heads of 128, 10.3 KiB of 256.
 * Algorithm  lanes own keys `lane` and `lane + 32`, so that words of tiles are read 128 bytes at a time and nothing is summed across
 *            lanes. 16 codes of a key become levels in four registers (__byte_perm looks them up by nibbles), and each query
 *            head's integers, put in the order in which levels come out, multiply them: four __dp4a a head.
 *            Bytes: the tiles once. Operations for 16 dimensions of a key: 10 (rot2) .. 26 (rot4), and 4 __dp4a a head.
 */
#include "gpu-worker/backend/cuda/cuda_keys.h"

#include "gpu-worker/backend/cuda/cuda_keys.cuh"

#define MOST_AT_ONCE 8u
#define MOST_BLOCKS  512u

struct score_shape {
    uint32_t n_groups, tile_bytes, scales_offset, mean_offset, query_bytes;
};

/* Four levels in a register, from four entries of a table. */
#define FOUR(level, at)                                                                                                \
    (static_cast<uint32_t>(level(at)) | static_cast<uint32_t>(level((at) + 1)) << 8 |                                  \
     static_cast<uint32_t>(level((at) + 2)) << 16 | static_cast<uint32_t>(level((at) + 3)) << 24)

/* Which two words of the query (steps s of a group) share a register of nibbles: s = first, first + other. */
template <uint32_t bits> static constexpr uint32_t other = bits == 4 ? 1 : 2;

/* Levels of the 16 codes of group g of a key: register i belongs to integers as order_query() puts them. */
template <uint32_t bits>
static __device__ __forceinline__ void unpack(const uint32_t *__restrict__ tile, uint32_t n_groups, uint32_t g,
                                              uint32_t key, uint32_t *levels)
{
    uint32_t nibbles[2];
    if constexpr (bits == 4) {
        nibbles[0] = tile[(2 * g) * KEYS_OF_TILE + key];
        nibbles[1] = tile[(2 * g + 1) * KEYS_OF_TILE + key];
    } else {
        const uint32_t word = tile[g * KEYS_OF_TILE + key];
        nibbles[0] = word & 0x33333333u;
        nibbles[1] = word >> 2 & 0x33333333u;
    }
    if constexpr (bits == 3) { /* of s = 1, 3, 0, 2 from the lowest bit on */
        const uint32_t upper = tile[(n_groups + g / 2) * KEYS_OF_TILE + key] >> 4 * (g % 2);
        nibbles[0] |= (upper & 0x04040404u) | (upper & 0x08080808u) << 3;
        nibbles[1] |= (upper & 0x01010101u) << 2 | (upper & 0x02020202u) << 5;
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t codes = nibbles[i / 2] >> 16 * (i % 2);
        if constexpr (bits == 2) {
            levels[i] = __byte_perm(FOUR(ROT2_LEVEL, 0), 0, codes);
        } else if constexpr (bits == 3) {
            levels[i] = __byte_perm(FOUR(ROT3_LEVEL, 0), FOUR(ROT3_LEVEL, 4), codes);
        } else {
            const uint32_t low = __byte_perm(FOUR(ROT4_LEVEL, 0), FOUR(ROT4_LEVEL, 4), codes & 0x7777u);
            const uint32_t high = __byte_perm(FOUR(ROT4_LEVEL, 8), FOUR(ROT4_LEVEL, 12), codes & 0x7777u);
            const uint32_t which = __byte_perm(0x0000ff00u, 0, codes >> 3 & 0x1111u);
            levels[i] = (low & ~which) | (high & which);
        }
    }
}

/* Integers of a query for group g in the order of unpack(). `words` are 32 bytes apart (ROT_QUERY_LANES). */
template <uint32_t bits>
static __device__ __forceinline__ int4 order_query(const uint8_t *__restrict__ integers, uint32_t g)
{
    uint32_t s[4];
    for (uint32_t i = 0; i < 4; i++)
        s[i] = *reinterpret_cast<const uint32_t *>(integers + static_cast<size_t>(4 * g + i) * ROT_QUERY_LANES);
    const uint32_t second = bits == 4 ? 2 : 1;
    const int4 ordered = {static_cast<int>(__byte_perm(s[0], s[other<bits>], 0x5140)),
                          static_cast<int>(__byte_perm(s[0], s[other<bits>], 0x7362)),
                          static_cast<int>(__byte_perm(s[second], s[second + other<bits>], 0x5140)),
                          static_cast<int>(__byte_perm(s[second], s[second + other<bits>], 0x7362))};
    return ordered;
}

template <uint32_t bits, uint32_t n_at_once>
CUDA_HOT static __global__ void __launch_bounds__(256, 2)
    score_rot(const struct cuda_key_run *__restrict__ runs, struct score_shape shape, uint32_t n_queries, size_t stride)
{
    CUDA_DYNAMIC_SHARED(int4, integers); /* [n_groups][n_at_once] */
    const struct cuda_key_run run = runs[blockIdx.y];
    const uint32_t n_groups = shape.n_groups, first_query = blockIdx.z * n_at_once;
    float4 *numbers =
        reinterpret_cast<float4 *>(integers + n_groups * n_at_once); /* [n_at_once]: factor, offset, scale */
    float *given = reinterpret_cast<float *>(numbers + n_at_once);   /* [n_at_once][16 n_groups] */

    for (uint32_t n = 0; n < n_at_once; n++) { /* those past the last are the last again, and are not written */
        const uint8_t *query = static_cast<const uint8_t *>(run.query) +
                               static_cast<size_t>(min(first_query + n, n_queries - 1)) * shape.query_bytes;
        const float *floats = reinterpret_cast<const float *>(query + sizeof(struct rot_query));
        for (uint32_t i = threadIdx.x; i < 16 * n_groups; i += blockDim.x)
            given[n * 16 * n_groups + i] = floats[i];
        for (uint32_t g = threadIdx.x; g < n_groups; g += blockDim.x)
            integers[g * n_at_once + n] =
                order_query<bits>(reinterpret_cast<const uint8_t *>(floats + 16 * n_groups), g);
        if (threadIdx.x == n % CUDA_WARP)
            numbers[n] = *reinterpret_cast<const float4 *>(query);
    }
    __syncthreads();

    const uint32_t n_warps = blockDim.x / CUDA_WARP;
    float most[n_at_once];
#pragma unroll
    for (uint32_t n = 0; n < n_at_once; n++)
        most[n] = -INFINITY;
    for (uint32_t t = blockIdx.x * n_warps + threadIdx.x / CUDA_WARP; t < run.n_tiles; t += gridDim.x * n_warps) {
        const uint8_t *tile = cuda_key_tile(run, t, shape.tile_bytes);
        const float side = cuda_key_side(run, t);
        float dots[n_at_once];
        cuda_dot16<n_at_once>(given, reinterpret_cast<const int8_t *>(tile + shape.mean_offset), n_groups, dots);
        int sums[2][n_at_once] = {};
        for (uint32_t g = 0; g < n_groups; g++) {
            uint32_t levels[2][4];
            unpack<bits>(reinterpret_cast<const uint32_t *>(tile), n_groups, g, cuda_lane(), levels[0]);
            unpack<bits>(reinterpret_cast<const uint32_t *>(tile), n_groups, g, cuda_lane() + 32, levels[1]);
#pragma unroll
            for (uint32_t n = 0; n < n_at_once; n++) {
                const int4 q = integers[g * n_at_once + n];
#pragma unroll
                for (uint32_t k = 0; k < 2; k++) {
                    int sum = __dp4a(static_cast<int>(levels[k][0]), q.x, sums[k][n]);
                    sum = __dp4a(static_cast<int>(levels[k][1]), q.y, sum);
                    sum = __dp4a(static_cast<int>(levels[k][2]), q.z, sum);
                    sums[k][n] = __dp4a(static_cast<int>(levels[k][3]), q.w, sum);
                }
            }
        }
#pragma unroll
        for (uint32_t k = 0; k < 2; k++) {
            const uint32_t key = cuda_lane() + 32 * k;
            const float a = cuda_scale_value(tile[shape.scales_offset + key]);
#pragma unroll
            for (uint32_t n = 0; n < n_at_once; n++) {
                const float4 q = numbers[n];
                const float x = static_cast<float>(sums[k][n]) - q.y;
                const float score = fmaf(a * x, q.x, (q.z * side) * dots[n]);
                if (first_query + n < n_queries)
                    run.scores[(first_query + n) * stride + static_cast<size_t>(t) * KEYS_OF_TILE + key] = score;
                if (score > most[n] && (t || key >= CUDA_KEY_SINKS))
                    most[n] = score;
            }
        }
    }
    cuda_key_largest(run, first_query, n_queries, most);
}

template <uint32_t bits, uint32_t n_at_once>
static cudaError_t launch(const struct cuda_queue *queue, uint32_t head_dim, uint32_t n_queries,
                          const struct cuda_key_run *runs, uint32_t n_runs, uint32_t most_tiles, size_t stride)
{
    if constexpr (n_at_once < MOST_AT_ONCE)
        if (n_queries > n_at_once)
            return launch<bits, 2 * n_at_once>(queue, head_dim, n_queries, runs, n_runs, most_tiles, stride);
    const uint32_t n_groups = rot_groups(head_dim);
    const struct score_shape shape = {n_groups, static_cast<uint32_t>(rot_tile_bytes(bits, head_dim)),
                                      static_cast<uint32_t>(rot_scales_offset(bits, n_groups)),
                                      static_cast<uint32_t>(rot_mean_offset(bits, n_groups)),
                                      static_cast<uint32_t>(rot_query_bytes(n_groups))};
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    const dim3 grid(cuda_tile_blocks(most_tiles, n_threads, MOST_BLOCKS), n_runs, cuda_blocks(n_queries, n_at_once));
    const size_t shared = n_at_once * (n_groups * (sizeof(int4) + 16 * sizeof(float)) + sizeof(float4));
    CUDA_LAUNCH((score_rot<bits, n_at_once>), grid, n_threads, shared, queue->stream)(runs, shape, n_queries, stride);
    return cudaGetLastError();
}

cudaError_t cuda_score_rot(const struct cuda_queue *queue, uint32_t bits, uint32_t head_dim, uint32_t n_queries,
                           const struct cuda_key_run *runs, uint32_t n_runs, uint32_t most_tiles, size_t stride)
{
    if (!n_queries || !n_runs || !most_tiles)
        return cudaSuccess;
    switch (bits) {
    case 2:
        return launch<2, 1>(queue, head_dim, n_queries, runs, n_runs, most_tiles, stride);
    case 3:
        return launch<3, 1>(queue, head_dim, n_queries, runs, n_runs, most_tiles, stride);
    case 4:
        return launch<4, 1>(queue, head_dim, n_queries, runs, n_runs, most_tiles, stride);
    default:
        return cudaErrorInvalidValue;
    }
}
