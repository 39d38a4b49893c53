/*
 * cuda_attend.cu - exact softmax partials of queries over pieces of rows.
 *
 * Grid       x: tiles of queries, four a warp; y: items. 128 threads (32 .. 256, whole warps): 16 queries a block.
 * Shared     64 rows of K or of V and the tile's queries in f32: 64 (head_dim | 1) + 4 warps head_dim floats; 41 KiB for
 *            head_dim 128 and 128 threads, at most 97 KiB (256 and 256 threads).
 * Algorithm  piece by piece, in list order: the block brings the keys of the piece to shared memory, a lane scores two of its
 *            tokens for the four queries of its warp; the values take the keys' place, a lane adds up every 32nd dimension.
 *            Maximum, sum and sums of values stay in registers over all pieces and are scaled down as the maximum grows
 *            (online softmax: FlashAttention, section 3.1). What a query sees and in which order it is added does not depend
 *            on the other queries.
 *            Bytes: each row once for a tile of 16 queries. Made for many queries: one block goes through all pieces of an item,
 *            so that few of them leave a device idle (cuda_attend_decode.cu is for those).
 */
#include "gpu-worker/backend/cuda/cuda_attend.cuh"

#define TOKENS       64u
#define PER_WARP     4u /* queries of a warp */
#define DEFAULT_SIZE 128u

struct shape {
    uint32_t head_dim, stride; /* floats from row to row in shared memory: odd, so that 32 rows lie in 32 banks */
    float scale;
};

/* Number d of K (part 0) or V (part 1) of a row: row_format.h of kernels/. */
template <bool q8_0>
static __device__ __forceinline__ float number_of(const uint8_t *row, uint32_t head_dim, uint32_t part, uint32_t d)
{
    const uint16_t *halves = reinterpret_cast<const uint16_t *>(row);
    if constexpr (!q8_0)
        return __half2float(__ushort_as_half(halves[part * head_dim + d]));
    const uint32_t n_groups = (head_dim + CUDA_ROW_GROUP - 1) / CUDA_ROW_GROUP;
    const float scale = __half2float(__ushort_as_half(halves[head_dim + part * n_groups + d / CUDA_ROW_GROUP]));
    return static_cast<float>(static_cast<int8_t>(row[part * head_dim + d])) * scale;
}

/* K or V of the rows of `wanted` into tile [64][stride]: a row a warp. */
template <bool q8_0>
static __device__ __forceinline__ void stage(const void *rows, uint64_t wanted, uint32_t part, const shape &shape,
                                             float *tile)
{
    const uint32_t head_dim = shape.head_dim, n_groups = (head_dim + CUDA_ROW_GROUP - 1) / CUDA_ROW_GROUP;
    const size_t row_bytes =
        q8_0 ? 2 * (static_cast<size_t>(head_dim) + 2 * n_groups) : static_cast<size_t>(head_dim) * 4;
    for (uint32_t t = threadIdx.x / CUDA_WARP; t < TOKENS; t += blockDim.x / CUDA_WARP) {
        if (!(wanted >> t & 1))
            continue;
        const uint8_t *row = static_cast<const uint8_t *>(rows) + t * row_bytes;
        for (uint32_t d = cuda_lane(); d < head_dim; d += CUDA_WARP)
            tile[t * shape.stride + d] = number_of<q8_0>(row, head_dim, part, d);
    }
}

/* What a warp knows of one of its queries, [n_dims] of it in each lane. */
template <uint32_t n_dims> struct state {
    float max, sum, out[n_dims];
    float weights[2]; /* of tokens lane and 32 + lane of this piece: scores, then exp(score - max) */
    uint64_t mask;
};

/* scores of this piece's keys for all queries of the warp; tokens that a query does not see get -inf */
template <uint32_t n_dims>
static __device__ __forceinline__ void score(state<n_dims> *states, const float *queries, const float *tile,
                                             const shape &shape)
{
    const float *first = tile + cuda_lane() * shape.stride, *second = first + 32 * shape.stride;
    float sums[PER_WARP][2] = {};
    for (uint32_t d = 0; d < shape.head_dim; d++) {
        const float k0 = first[d], k1 = second[d];
#pragma unroll
        for (uint32_t j = 0; j < PER_WARP; j++) {
            const float q = queries[j * shape.head_dim + d];
            sums[j][0] = fmaf(q, k0, sums[j][0]);
            sums[j][1] = fmaf(q, k1, sums[j][1]);
        }
    }
#pragma unroll
    for (uint32_t j = 0; j < PER_WARP; j++) {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const bool seen = states[j].mask >> (32 * half + cuda_lane()) & 1;
            states[j].weights[half] = seen ? cuda_finite_score(sums[j][half] * shape.scale) : -INFINITY;
        }
    }
}

/* the new maximum; what was summed up is scaled to it, scores become weights */
template <uint32_t n_dims> static __device__ __forceinline__ void weigh(state<n_dims> *state)
{
    if (!state->mask)
        return; /* the whole warp */
    float largest = cuda_warp_max(fmaxf(state->weights[0], state->weights[1]));
    if (__any_sync(CUDA_ALL_LANES, isnan(state->weights[0]) || isnan(state->weights[1])))
        largest = NAN;
    const float max = state->max >= largest ? state->max : largest;
    const float before = expf(state->max - max);
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        const bool seen = state->mask >> (32 * half + cuda_lane()) & 1;
        state->weights[half] = seen ? expf(state->weights[half] - max) : 0.0f;
    }
    state->max = max;
    state->sum = fmaf(state->sum, before, cuda_warp_sum(state->weights[0] + state->weights[1]));
#pragma unroll
    for (uint32_t k = 0; k < n_dims; k++)
        state->out[k] *= before;
}

/* out += weight x V, token by token; a token that a query does not see is not touched, whatever it holds */
template <uint32_t n_dims>
static __device__ __forceinline__ void add_values(state<n_dims> *states, uint64_t wanted, const float *tile,
                                                  const shape &shape)
{
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        for (uint32_t left = static_cast<uint32_t>(wanted >> 32 * half); left; left &= left - 1) {
            const uint32_t lane = static_cast<uint32_t>(__ffs(static_cast<int>(left))) - 1, t = 32 * half + lane;
            float v[n_dims];
#pragma unroll
            for (uint32_t k = 0; k < n_dims; k++) {
                const uint32_t d = cuda_lane() + CUDA_WARP * k;
                v[k] = d < shape.head_dim ? tile[t * shape.stride + d] : 0.0f;
            }
#pragma unroll
            for (uint32_t j = 0; j < PER_WARP; j++) {
                const float weight = __shfl_sync(CUDA_ALL_LANES, states[j].weights[half], static_cast<int>(lane));
                if (!(states[j].mask >> t & 1))
                    continue;
#pragma unroll
                for (uint32_t k = 0; k < n_dims; k++)
                    states[j].out[k] = fmaf(weight, v[k], states[j].out[k]);
            }
        }
    }
}

/* head_dim <= 32 n_dims */
template <bool q8_0, uint32_t n_dims>
CUDA_HOT static __global__ void __launch_bounds__(256, 1)
    attend(const struct backend_attend *__restrict__ items, shape shape)
{
    CUDA_DYNAMIC_SHARED(float, tile);
    const struct backend_attend *item = items + blockIdx.y;
    const uint32_t head_dim = shape.head_dim, width = 2 + head_dim, lane = cuda_lane();
    const uint32_t n_tile = blockDim.x / CUDA_WARP * PER_WARP, first_of_tile = blockIdx.x * n_tile;
    const uint32_t n_queries = item->n_queries;
    if (first_of_tile >= n_queries)
        return; /* the whole block */
    const uint32_t last_of_tile = min(first_of_tile + n_tile, n_queries) - 1;
    float *queries = tile + TOKENS * shape.stride + threadIdx.x / CUDA_WARP * PER_WARP * head_dim;
    const uint32_t first = first_of_tile + threadIdx.x / CUDA_WARP * PER_WARP;

    state<n_dims> states[PER_WARP];
#pragma unroll
    for (uint32_t j = 0; j < PER_WARP; j++) {
        /* a tile that is not full computes its last query again, and does not write it */
        const uint32_t query = min(first + j, n_queries - 1);
        const float *partial = item->partials + static_cast<size_t>(query) * width;
        for (uint32_t d = lane; d < head_dim; d += CUDA_WARP)
            queries[j * head_dim + d] = item->q[static_cast<size_t>(query) * head_dim + d];
        const bool is_empty = item->is_first;
        states[j].max = is_empty ? -INFINITY : partial[0];
        states[j].sum = is_empty ? 0.0f : partial[1];
#pragma unroll
        for (uint32_t k = 0; k < n_dims; k++)
            states[j].out[k] = !is_empty && lane + CUDA_WARP * k < head_dim ? partial[2 + lane + CUDA_WARP * k] : 0.0f;
    }

    for (uint32_t piece = 0; piece < item->n_pieces; piece++) {
        const uint64_t wanted = cuda_attend_mask(item, piece, last_of_tile);
        const void *rows = item->pieces[piece].rows;
        if (!wanted)
            continue;    /* the whole block */
        __syncthreads(); /* queries are there; the values of the last piece are done with */
        stage<q8_0>(rows, wanted, 0, shape, tile);
        __syncthreads();
#pragma unroll
        for (uint32_t j = 0; j < PER_WARP; j++)
            states[j].mask = cuda_attend_mask(item, piece, min(first + j, n_queries - 1));
        score(states, queries, tile, shape);
        __syncthreads();
        stage<q8_0>(rows, wanted, 1, shape, tile);
#pragma unroll
        for (uint32_t j = 0; j < PER_WARP; j++)
            weigh(&states[j]);
        __syncthreads();
        add_values(states, wanted, tile, shape);
    }

    __syncthreads(); /* a query computed twice has been read by both before it is written */
#pragma unroll
    for (uint32_t j = 0; j < PER_WARP; j++) {
        if (first + j >= n_queries)
            continue;
        float *partial = item->partials + static_cast<size_t>(first + j) * width;
        if (lane < 2)
            partial[lane] = lane ? states[j].sum : states[j].max;
#pragma unroll
        for (uint32_t k = 0; k < n_dims; k++)
            if (lane + CUDA_WARP * k < head_dim)
                partial[2 + lane + CUDA_WARP * k] = states[j].out[k];
    }
}

template <bool q8_0, uint32_t n_dims>
static cudaError_t launch(const struct cuda_queue *queue, const struct backend_attend *items, uint32_t n_items,
                          uint32_t max_queries, const shape &shape)
{
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : DEFAULT_SIZE;
    const unsigned int n_tile = n_threads / CUDA_WARP * PER_WARP;
    const size_t shared_bytes = (TOKENS * shape.stride + n_tile * shape.head_dim) * sizeof(float);
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void *>(attend<q8_0, n_dims>),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error)
        return error;
    CUDA_LAUNCH((attend<q8_0, n_dims>), dim3(cuda_blocks(max_queries, n_tile), n_items), n_threads, shared_bytes,
                queue->stream)
    (items, shape);
    return cudaGetLastError();
}

cudaError_t cuda_attend(const struct cuda_queue *queue, const struct backend_attend *items, uint32_t n_items,
                        uint32_t max_queries, uint32_t head_dim, enum kernels_rows codec, float scale)
{
    if (!n_items || !max_queries)
        return cudaSuccess;
    if (!head_dim || head_dim > KERNELS_MAX_HEAD_DIM || n_items > CUDA_ATTEND_ITEMS ||
        queue->n_threads > CUDA_ATTEND_THREADS)
        return cudaErrorInvalidValue;
    const shape shape = {head_dim, head_dim | 1, scale};
    const bool q8_0 = codec == KERNELS_ROWS_Q8_0;
    if (head_dim <= 64)
        return q8_0 ? launch<true, 2>(queue, items, n_items, max_queries, shape)
                    : launch<false, 2>(queue, items, n_items, max_queries, shape);
    if (head_dim <= 128)
        return q8_0 ? launch<true, 4>(queue, items, n_items, max_queries, shape)
                    : launch<false, 4>(queue, items, n_items, max_queries, shape);
    return q8_0 ? launch<true, 8>(queue, items, n_items, max_queries, shape)
                : launch<false, 8>(queue, items, n_items, max_queries, shape);
}
