/*
 * cuda_score_pair.cu - scores of old keys in the pair codecs (pair3 .. pair1, klt2 .. klt0), to the bit as codec_pair_plain.c.
 *
 * Grid       x: tiles of a run, a warp a tile at a time, 256 threads a block (32 .. 256); y: runs; z: query heads, up to 8
 *            (all heads of the usual groups) in one pass over the tiles.
 * Shared     per query head at once 16 bytes a group, 4 a dimension and 16: 11 KiB for 8 heads of pair2 at 128 dimensions, at most
 *            40.2 KiB.
 * Algorithm  the query heads' look-ups of one codeword lie beside each other, so that one access to shared memory serves 4 or 8 of
 *            them; the 16 codewords of a group lie in different banks. A lane has keys 2 lane and 2 lane + 1 and adds up four bytes at
 *            a time, two in each of two registers: sums fit 16 bits.
 *            Bytes: the tiles once. Operations for a group of a key: 2 for the address, an access, 4 or 8 for sums.
 */
#include "gpu-worker/backend/cuda/cuda_keys.h"

#include "gpu-worker/backend/cuda/cuda_keys.cuh"

#define MOST_BLOCKS 512u

/* The sums of four query heads: those of heads 0 and 2, of 1 and 3. */
struct four_sums {
    uint32_t even, odd;
};

static __device__ __forceinline__ void add(struct four_sums *sums, uint32_t four)
{
    sums->even += four & 0x00ff00ffu;
    sums->odd += four >> 8 & 0x00ff00ffu;
}

static __device__ __forceinline__ uint32_t sum_of(const struct four_sums *sums, uint32_t head)
{
    return ((head % 2 ? sums->odd : sums->even) >> 8 * (head & 2u)) & 0xffffu;
}

/* Adds the look-ups of one code to the sums of n_fours * 4 query heads. */
template <uint32_t n_fours>
static __device__ __forceinline__ void look_up(const uint32_t *table, uint32_t code, struct four_sums *sums)
{
    if constexpr (n_fours == 1) {
        add(&sums[0], table[code]);
    } else {
        const uint2 two = reinterpret_cast<const uint2 *>(table)[code];
        add(&sums[0], two.x);
        add(&sums[1], two.y);
    }
}

/* One query head's place in memory. */
static __device__ __forceinline__ const uint8_t *query_of(const struct cuda_key_run *run, uint32_t n_sixteenths,
                                                          uint32_t query)
{
    const size_t tables = (run->n_groups * PAIR_CODEWORDS + 63) / 64 * 64;
    return static_cast<const uint8_t *>(run->query) +
           query * (sizeof(struct pair_query) + n_sixteenths * 16 * sizeof(float) + tables);
}

template <bool is_klt, uint32_t n_fours>
CUDA_HOT static __global__ void __launch_bounds__(256, 2)
    score_pair(const struct cuda_key_run *__restrict__ runs, uint32_t head_dim, uint32_t n_queries, size_t stride)
{
    constexpr uint32_t n_at_once = 4 * n_fours;
    CUDA_DYNAMIC_SHARED(float4, numbers); /* [n_at_once]: factor, offset, scale, along */
    const struct cuda_key_run run = runs[blockIdx.y];
    const uint32_t n_sixteenths = (head_dim + 15) / 16, first_query = blockIdx.z * n_at_once;
    uint32_t *tables = reinterpret_cast<uint32_t *>(numbers + n_at_once); /* [n_groups][16][n_fours] */
    float *given = reinterpret_cast<float *>(tables + run.n_groups * PAIR_CODEWORDS * n_fours); /* [n_at_once][] */

    /* those past the last are the last again, and are not written */
    for (uint32_t i = threadIdx.x; i < run.n_groups * PAIR_CODEWORDS * n_fours; i += blockDim.x) {
        uint32_t four = 0;
        for (uint32_t k = 0; k < 4; k++) {
            const uint8_t *query = query_of(&run, n_sixteenths, min(first_query + i % n_fours * 4 + k, n_queries - 1));
            four |= static_cast<uint32_t>(
                        query[sizeof(struct pair_query) + n_sixteenths * 16 * sizeof(float) + i / n_fours])
                    << 8 * k;
        }
        tables[i] = four;
    }
    for (uint32_t n = 0; n < n_at_once; n++) {
        const uint8_t *query = query_of(&run, n_sixteenths, min(first_query + n, n_queries - 1));
        for (uint32_t i = threadIdx.x; i < 16 * n_sixteenths; i += blockDim.x)
            given[n * 16 * n_sixteenths + i] = reinterpret_cast<const float *>(query + sizeof(struct pair_query))[i];
        if (threadIdx.x == n)
            numbers[n] = *reinterpret_cast<const float4 *>(query);
    }
    __syncthreads();

    const uint32_t n_rows = run.n_groups / 2, n_warps = blockDim.x / CUDA_WARP;
    const uint32_t scales_offset = n_rows * KEYS_OF_TILE, along_offset = scales_offset + KEYS_OF_TILE;
    const uint32_t mean_offset = along_offset + (is_klt ? 0 : KEYS_OF_TILE);
    const uint32_t tile_bytes = mean_offset + (head_dim + 63) / 64 * 64;
    float most[n_at_once];
#pragma unroll
    for (uint32_t n = 0; n < n_at_once; n++)
        most[n] = -INFINITY;
    for (uint32_t t = blockIdx.x * n_warps + threadIdx.x / CUDA_WARP; t < run.n_tiles; t += gridDim.x * n_warps) {
        const uint8_t *tile = cuda_key_tile(run, t, tile_bytes);
        const uint16_t *two_keys = reinterpret_cast<const uint16_t *>(tile) + cuda_lane();
        float dots[n_at_once];
        cuda_dot16<n_at_once>(given, reinterpret_cast<const int8_t *>(tile + mean_offset), n_sixteenths, dots);
        struct four_sums sums[2][n_fours] = {};
        const uint32_t *table = tables;
#pragma unroll 4
        for (uint32_t row = 0; row < n_rows; row++, table += 2 * PAIR_CODEWORDS * n_fours) {
            const uint32_t codes = two_keys[row * 32];
            look_up<n_fours>(table, codes & 15u, sums[0]);
            look_up<n_fours>(table, codes >> 8 & 15u, sums[1]);
            look_up<n_fours>(table + PAIR_CODEWORDS * n_fours, codes >> 4 & 15u, sums[0]);
            look_up<n_fours>(table + PAIR_CODEWORDS * n_fours, codes >> 12, sums[1]);
        }
        const uint32_t scales = two_keys[n_rows * 32], along = is_klt ? 0 : two_keys[n_rows * 32 + 32];
        if constexpr (is_klt) { /* the last group's codes lie beside the scales */
            look_up<n_fours>(table, scales & 15u, sums[0]);
            look_up<n_fours>(table, scales >> 8 & 15u, sums[1]);
        }
        const uint32_t side = __float_as_uint(cuda_key_side(run, t));
        const float mean_step = __uint_as_float(side & ~255u), along_step = cuda_scale_value(side & 255u);
#pragma unroll
        for (uint32_t k = 0; k < 2; k++) {
            const uint32_t byte = scales >> 8 * k & 255u;
            const float a = cuda_scale_value(!is_klt ? byte : byte >> 4 ? 112u + 2u * (byte >> 4) : 0);
            const float steps = static_cast<float>(static_cast<int8_t>(along >> 8 * k & 255u));
#pragma unroll
            for (uint32_t n = 0; n < n_at_once; n++) {
                const float4 q = numbers[n];
                const float x = static_cast<float>(sum_of(&sums[k][n / 4], n % 4));
                const float base = (q.z * mean_step) * dots[n];
                const uint32_t key = 2 * cuda_lane() + k;
                const float score = fmaf(a, fmaf(x, q.x, q.y), fmaf(steps, q.w * along_step, base));
                if (first_query + n < n_queries)
                    run.scores[(first_query + n) * stride + static_cast<size_t>(t) * KEYS_OF_TILE + key] = score;
                if (score > most[n] && (t || key >= CUDA_KEY_SINKS))
                    most[n] = score;
            }
        }
    }
    cuda_key_largest(run, first_query, n_queries, most);
}

template <bool is_klt, uint32_t n_fours>
static cudaError_t launch(const struct cuda_queue *queue, uint32_t head_dim, uint32_t most_groups, uint32_t n_queries,
                          const struct cuda_key_run *runs, uint32_t n_runs, uint32_t most_tiles, size_t stride)
{
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    const dim3 grid(cuda_tile_blocks(most_tiles, n_threads, MOST_BLOCKS), n_runs, cuda_blocks(n_queries, 4 * n_fours));
    const size_t shared =
        4 * n_fours * (sizeof(float4) + most_groups * PAIR_CODEWORDS + pair_sixteenths(head_dim) * 16 * sizeof(float));
    CUDA_LAUNCH((score_pair<is_klt, n_fours>), grid, n_threads, shared, queue->stream)
    (runs, head_dim, n_queries, stride);
    return cudaGetLastError();
}

cudaError_t cuda_score_pair(const struct cuda_queue *queue, bool is_klt, uint32_t head_dim, uint32_t most_groups,
                            uint32_t n_queries, const struct cuda_key_run *runs, uint32_t n_runs, uint32_t most_tiles,
                            size_t stride)
{
    if (!n_queries || !n_runs || !most_tiles)
        return cudaSuccess;
    if (most_groups > PAIR_MAX_GROUPS || head_dim > KERNELS_MAX_HEAD_DIM)
        return cudaErrorInvalidValue;
    if (is_klt)
        return n_queries > 4
                   ? launch<true, 2>(queue, head_dim, most_groups, n_queries, runs, n_runs, most_tiles, stride)
                   : launch<true, 1>(queue, head_dim, most_groups, n_queries, runs, n_runs, most_tiles, stride);
    return n_queries > 4 ? launch<false, 2>(queue, head_dim, most_groups, n_queries, runs, n_runs, most_tiles, stride)
                         : launch<false, 1>(queue, head_dim, most_groups, n_queries, runs, n_runs, most_tiles, stride);
}
