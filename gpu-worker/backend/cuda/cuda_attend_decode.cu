/*
 * cuda_attend_decode.cu - exact softmax partials of few queries over lists of pieces of any length: decode.
 *
 * Grid       decode: x: parts of four pieces, tiles of four queries; y: items. 256 threads: a warp for each half piece of a part.
 *            combine: x: queries; y: items. 128 threads. Only where an item can have more than one part.
 * Shared     partials of the halves and the item's own: 36 (2 + head_dim) floats, 18 KiB for head_dim 128.
 * Algorithm  8, 16 or 32 lanes (by head_dim) share a row, eight dimensions each, read from memory as they lie; a lane then has
 *            the score of one token for each query, and its weight; the values are added up eight dimensions a lane likewise. A
 *            block adds up its halves in order, `combine` the parts in order, each scaled to the largest maximum (Flash-Decoding).
 *            How a list is cut depends on the list alone.
 *            Bytes: each row once for four queries (again out of the cache for more); partials of parts, 1.6% of them, twice.
 */
#include "gpu-worker/backend/cuda/cuda_attend.cuh"

#define PART       4u /* pieces */
#define HALVES     (2u * PART)
#define TILE       4u /* queries */
#define EACH       8u /* dimensions of a lane */
#define AT_ONCE    4u /* rows that a lane asks for before it needs the first */
#define HALF_ROWS  32u
#define N_COMBINES 128u

struct decode_shape {
    uint32_t head_dim, n_tiles, max_parts, max_queries;
    float scale;
};

static __host__ __device__ __forceinline__ uint32_t parts_of(uint32_t n_pieces)
{
    return n_pieces > PART ? (n_pieces + PART - 1) / PART : 1;
}

/* Eight numbers of a row as they lie: halves, or bytes and their scale. */
template <bool q8_0> struct eight {
    uint32_t words[q8_0 ? 2 : 4];
    uint16_t scale;
};

/* Numbers d .. d + 7 (a multiple of 8) of K (part 0) or V (part 1); those beyond head_dim are zeros. */
template <bool q8_0>
static __device__ __forceinline__ eight<q8_0> read_eight(const uint8_t *row, uint32_t head_dim, uint32_t part,
                                                         uint32_t d, bool is_aligned)
{
    eight<q8_0> read = {};
    const size_t first = static_cast<size_t>(part) * head_dim + d;
    if (d >= head_dim)
        return read;
    if constexpr (q8_0) {
        const uint32_t n_groups = (head_dim + CUDA_ROW_GROUP - 1) / CUDA_ROW_GROUP;
        read.scale = reinterpret_cast<const uint16_t *>(row)[head_dim + part * n_groups + d / CUDA_ROW_GROUP];
        if (is_aligned) {
            const uint2 words = *reinterpret_cast<const uint2 *>(row + first);
            read.words[0] = words.x;
            read.words[1] = words.y;
            return read;
        }
#pragma unroll
        for (uint32_t k = 0; k < EACH; k++)
            if (d + k < head_dim)
                read.words[k / 4] |= static_cast<uint32_t>(row[first + k]) << 8 * (k % 4);
    } else {
        const uint16_t *halves = reinterpret_cast<const uint16_t *>(row) + first;
        if (is_aligned) {
            const uint4 words = *reinterpret_cast<const uint4 *>(halves);
            read.words[0] = words.x;
            read.words[1] = words.y;
            read.words[2] = words.z;
            read.words[3] = words.w;
            return read;
        }
#pragma unroll
        for (uint32_t k = 0; k < EACH; k++)
            if (d + k < head_dim)
                read.words[k / 2] |= static_cast<uint32_t>(halves[k]) << 16 * (k % 2);
    }
    return read;
}

template <bool q8_0> static __device__ __forceinline__ void numbers_of(const eight<q8_0> &read, float *to)
{
    const float scale = __half2float(__ushort_as_half(read.scale));
#pragma unroll
    for (uint32_t k = 0; k < EACH; k++) {
        if constexpr (q8_0)
            to[k] = static_cast<float>(static_cast<int8_t>(read.words[k / 4] >> 8 * (k % 4))) * scale;
        else
            to[k] = __half2float(__ushort_as_half(static_cast<uint16_t>(read.words[k / 2] >> 16 * (k % 2))));
    }
}

/* What a warp works on: rows of half a piece, and which of them each query sees. */
struct half_piece {
    const uint8_t *rows;
    size_t row_bytes;
    bool is_aligned;
    uint32_t wanted, seen[TILE]; /* by any of the queries; by each */
};

/*
 * use(row, numbers) for each row of this lane's group that is wanted; rows come in the order of i: row group * width + i. All
 * lanes come to each, with zeros where their group's row is not wanted.
 */
template <bool q8_0, uint32_t width, typename Use>
static __device__ __forceinline__ void each_row(const half_piece &half, uint32_t head_dim, uint32_t part, Use use)
{
    constexpr uint32_t all_groups = width == 8 ? 0x01010101u : width == 16 ? 0x00010001u : 1u;
    const uint32_t lane = cuda_lane(), first = lane / width * width, d = lane % width * EACH;
#pragma unroll 1
    for (uint32_t i = 0; i < width; i += AT_ONCE) {
        if (!(half.wanted >> i & all_groups * ((1u << AT_ONCE) - 1)))
            continue; /* the whole warp */
        eight<q8_0> read[AT_ONCE];
#pragma unroll
        for (uint32_t k = 0; k < AT_ONCE; k++) {
            const uint32_t row = first + i + k;
            read[k] = {};
            if (half.wanted >> row & 1)
                read[k] = read_eight<q8_0>(half.rows + row * half.row_bytes, head_dim, part, d, half.is_aligned);
        }
#pragma unroll
        for (uint32_t k = 0; k < AT_ONCE; k++) {
            float numbers[EACH];
            numbers_of<q8_0>(read[k], numbers);
            use(i + k, numbers);
        }
    }
}

/* The partials of four queries over half a piece, to [TILE][2 + head_dim]. */
template <bool q8_0, uint32_t width>
static __device__ __forceinline__ void attend_half(const half_piece &half, const float (*q)[EACH],
                                                   const decode_shape &shape, float *to)
{
    const uint32_t lane = cuda_lane(), at = lane % width, head_dim = shape.head_dim;
    float weights[TILE];
#pragma unroll
    for (uint32_t j = 0; j < TILE; j++)
        weights[j] = -INFINITY;
    each_row<q8_0, width>(half, head_dim, 0, [&](uint32_t i, const float *k) {
#pragma unroll
        for (uint32_t j = 0; j < TILE; j++) {
            float score = 0;
#pragma unroll
            for (uint32_t e = 0; e < EACH; e++)
                score = fmaf(q[j][e], k[e], score);
#pragma unroll
            for (int bits = width / 2; bits; bits /= 2)
                score += __shfl_xor_sync(CUDA_ALL_LANES, score, bits);
            weights[j] = i == at ? score : weights[j]; /* of row `lane` */
        }
    });
#pragma unroll
    for (uint32_t j = 0; j < TILE; j++) {
        const bool is_seen = half.seen[j] >> lane & 1;
        const float score = is_seen ? cuda_finite_score(weights[j] * shape.scale) : -INFINITY;
        float max = cuda_warp_max(score);
        if (__any_sync(CUDA_ALL_LANES, isnan(score)))
            max = NAN;
        weights[j] = is_seen ? expf(score - max) : 0.0f;
        const float sum = cuda_warp_sum(weights[j]);
        if (lane < 2)
            to[j * (2 + head_dim) + lane] = lane ? sum : max;
    }
    float out[TILE][EACH] = {};
    each_row<q8_0, width>(half, head_dim, 1, [&](uint32_t i, const float *v) {
        const uint32_t row = lane / width * width + i;
#pragma unroll
        for (uint32_t j = 0; j < TILE; j++) {
            const float weight = __shfl_sync(CUDA_ALL_LANES, weights[j], static_cast<int>(i), width);
            /* a row that the query does not see adds nothing, whatever it holds */
#pragma unroll
            for (uint32_t e = 0; e < EACH; e++)
                out[j][e] = half.seen[j] >> row & 1 ? fmaf(weight, v[e], out[j][e]) : out[j][e];
        }
    });
#pragma unroll
    for (uint32_t j = 0; j < TILE; j++) {
#pragma unroll
        for (uint32_t e = 0; e < EACH; e++) {
#pragma unroll
            for (int bits = width; bits < static_cast<int>(CUDA_WARP); bits *= 2)
                out[j][e] += __shfl_xor_sync(CUDA_ALL_LANES, out[j][e], bits);
            if (lane < width && at * EACH + e < head_dim)
                to[j * (2 + head_dim) + 2 + at * EACH + e] = out[j][e];
        }
    }
}

/* The larger one, and NaN where either is. */
static __device__ __forceinline__ float larger(float a, float b)
{
    return isnan(a) || a >= b ? a : b;
}

/* head_dim <= 8 width */
template <bool q8_0, uint32_t width>
CUDA_HOT static __global__ void __launch_bounds__(CUDA_ATTEND_THREADS, 2)
    decode(const struct backend_attend *__restrict__ items, decode_shape shape, float *__restrict__ scratch)
{
    CUDA_DYNAMIC_SHARED(float,
                        partials); /* [HALVES + 1][TILE][2 + head_dim]: the last are those that are there before */
    const struct backend_attend *item = items + blockIdx.y;
    const uint32_t head_dim = shape.head_dim, columns = 2 + head_dim, lane = cuda_lane();
    const uint32_t part = blockIdx.x / shape.n_tiles, first = blockIdx.x % shape.n_tiles * TILE;
    const uint32_t n_queries = item->n_queries, n_pieces = item->n_pieces, n_parts = parts_of(n_pieces);
    if (first >= n_queries || part >= n_parts)
        return; /* the whole block */
    const uint32_t n = min(TILE, n_queries - first);

    float q[TILE][EACH];
#pragma unroll
    for (uint32_t j = 0; j < TILE; j++) {
        /* a tile that is not full computes its last query again, and does not write it */
        const float *from = item->q + static_cast<size_t>(min(first + j, n_queries - 1)) * head_dim;
#pragma unroll
        for (uint32_t e = 0; e < EACH; e++)
            q[j][e] = lane % width * EACH + e < head_dim ? from[lane % width * EACH + e] : 0.0f;
    }
    for (uint32_t h = threadIdx.x / CUDA_WARP; h < HALVES; h += blockDim.x / CUDA_WARP) {
        const uint32_t piece = part * PART + h / 2;
        float *to = partials + h * TILE * columns;
        half_piece half = {};
        if (piece < n_pieces) {
#pragma unroll
            for (uint32_t j = 0; j < TILE; j++) {
                half.seen[j] = static_cast<uint32_t>(cuda_attend_mask(item, piece, min(first + j, n_queries - 1)) >>
                                                     HALF_ROWS * (h % 2));
                half.wanted |= half.seen[j];
            }
        }
        if (!half.wanted) {
            if (lane < TILE)
                to[lane * columns] = -INFINITY;
            continue; /* the whole warp */
        }
        const uint32_t n_groups = (head_dim + CUDA_ROW_GROUP - 1) / CUDA_ROW_GROUP;
        half.row_bytes = q8_0 ? 2 * (static_cast<size_t>(head_dim) + 2 * n_groups) : static_cast<size_t>(head_dim) * 4;
        half.rows = static_cast<const uint8_t *>(item->pieces[piece].rows) + h % 2 * HALF_ROWS * half.row_bytes;
        half.is_aligned =
            !((reinterpret_cast<size_t>(half.rows) | half.row_bytes) % (q8_0 ? 8 : 16)) && !(head_dim % 8);
        attend_half<q8_0, width>(half, q, shape, to);
    }
    float *own = item->partials + static_cast<size_t>(first) * columns;
    float *before = partials + HALVES * TILE * columns;
    for (uint32_t i = threadIdx.x; i < n * columns; i += blockDim.x)
        before[i] = part || item->is_first ? (i % columns ? 0.0f : -INFINITY) : own[i];
    __syncthreads();

    float *to =
        n_parts == 1
            ? own
            : scratch +
                  ((static_cast<size_t>(blockIdx.y) * shape.max_parts + part) * shape.max_queries + first) * columns;
    for (uint32_t i = threadIdx.x; i < n * columns; i += blockDim.x) {
        const float *query = partials + i / columns * columns;
        float max = query[HALVES * TILE * columns], sum = 0;
        for (uint32_t h = 0; h < HALVES; h++)
            max = larger(max, query[h * TILE * columns]);
        for (uint32_t h = 0; h <= HALVES; h++) {
            const float *from = query + (h ? h - 1 : HALVES) * TILE * columns;
            if (from[0] != -INFINITY)
                sum = fmaf(expf(from[0] - max), from[i % columns], sum);
        }
        to[i] = i % columns ? sum : max;
    }
}

/* Partials of parts [max_parts][max_queries][2 + head_dim] of an item, where it has several; their maxima become factors. */
static __global__ void __launch_bounds__(CUDA_ATTEND_THREADS)
    combine(const struct backend_attend *__restrict__ items, decode_shape shape, float *scratch)
{
    __shared__ float maxima[CUDA_WARP];
    const struct backend_attend *item = items + blockIdx.y;
    const uint32_t columns = 2 + shape.head_dim, n_parts = parts_of(item->n_pieces);
    if (n_parts == 1 || blockIdx.x >= item->n_queries)
        return; /* the whole block */
    const size_t stride = static_cast<size_t>(shape.max_queries) * columns;
    float *parts = scratch + blockIdx.y * shape.max_parts * stride + static_cast<size_t>(blockIdx.x) * columns;
    float *to = item->partials + static_cast<size_t>(blockIdx.x) * columns;

    float max = -INFINITY;
    for (uint32_t part = threadIdx.x; part < n_parts; part += blockDim.x)
        max = larger(max, parts[part * stride]);
    const bool is_nan = __syncthreads_or(isnan(max)) != 0;
    max = cuda_warp_max(max);
    if (cuda_lane() == 0)
        maxima[threadIdx.x / CUDA_WARP] = max;
    __syncthreads();
    max = cuda_warp_max(cuda_lane() < blockDim.x / CUDA_WARP ? maxima[cuda_lane()] : -INFINITY);
    max = is_nan ? NAN : max;
    for (uint32_t part = threadIdx.x; part < n_parts; part += blockDim.x)
        parts[part * stride] = parts[part * stride] == -INFINITY ? 0.0f : expf(parts[part * stride] - max);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < columns; i += blockDim.x) {
        float sum = 0;
#pragma unroll 8
        for (uint32_t part = 0; part < n_parts; part++)
            sum = fmaf(parts[part * stride], parts[part * stride + i], sum);
        to[i] = i ? sum : max;
    }
}

template <bool q8_0, uint32_t width>
static void launch(const struct cuda_queue *queue, const struct backend_attend *items, uint32_t n_items,
                   const decode_shape &shape, float *scratch)
{
    const size_t shared_bytes = (HALVES + 1) * TILE * (2 + shape.head_dim) * sizeof(float);
    CUDA_LAUNCH((decode<q8_0, width>), dim3(shape.n_tiles * shape.max_parts, n_items),
                queue->n_threads ? queue->n_threads : CUDA_ATTEND_THREADS, shared_bytes, queue->stream)
    (items, shape, scratch);
}

size_t cuda_attend_decode_bytes(uint32_t n_items, uint32_t max_queries, uint32_t max_pieces, uint32_t head_dim)
{
    const uint32_t n_parts = parts_of(max_pieces);
    return n_parts == 1 ? 0 : static_cast<size_t>(n_items) * n_parts * max_queries * (2 + head_dim) * sizeof(float);
}

cudaError_t cuda_attend_decode(const struct cuda_queue *queue, const struct backend_attend *items, uint32_t n_items,
                               uint32_t max_queries, uint32_t max_pieces, uint32_t head_dim, enum kernels_rows codec,
                               float scale, float *scratch)
{
    if (!n_items || !max_queries)
        return cudaSuccess;
    const uint32_t n_tiles = cuda_blocks(max_queries, TILE);
    const decode_shape shape = {head_dim, n_tiles, parts_of(max_pieces), max_queries, scale};
    if (!head_dim || head_dim > KERNELS_MAX_HEAD_DIM || n_items > CUDA_ATTEND_ITEMS ||
        queue->n_threads > CUDA_ATTEND_THREADS || (shape.max_parts > 1 && !scratch))
        return cudaErrorInvalidValue;
    const bool q8_0 = codec == KERNELS_ROWS_Q8_0;
    if (head_dim <= 8 * EACH)
        q8_0 ? launch<true, 8>(queue, items, n_items, shape, scratch)
             : launch<false, 8>(queue, items, n_items, shape, scratch);
    else if (head_dim <= 16 * EACH)
        q8_0 ? launch<true, 16>(queue, items, n_items, shape, scratch)
             : launch<false, 16>(queue, items, n_items, shape, scratch);
    else
        q8_0 ? launch<true, 32>(queue, items, n_items, shape, scratch)
             : launch<false, 32>(queue, items, n_items, shape, scratch);
    if (shape.max_parts > 1)
        CUDA_LAUNCH(combine, dim3(max_queries, n_items), queue->n_threads ? queue->n_threads : N_COMBINES, 0,
                    queue->stream)
    (items, shape, scratch);
    return cudaGetLastError();
}
