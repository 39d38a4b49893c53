/*
 * cuda_prefill_softmax.cu - scores to weights between the two products of prefill attention.
 *
 * Grid       x: queries of the tile, a block each; y: KV heads. 256 threads (any whole warps).
 * Shared     a number a warp.
 * Algorithm  a block reads its scores twice (8 KiB: the second time out of the cache): the largest one, then exponentials. What
 *            was added up before is scaled down where the maximum grew (online softmax: FlashAttention, section 3.1), which is
 *            seldom after the first pieces. The sum is of the weights as halves, so that rounding them does not shift the output.
 *            Weights are 2^15 times the exponential: those down to 2^-29 of the largest keep all bits of a half.
 *            Bytes: 4 + 4 (cache) + 2 a score.
 */
#include "gpu-worker/backend/cuda/cuda_prefill_ops.h"

#include <float.h>

#include "gpu-worker/backend/cuda/cuda.cuh"

#define WEIGHT_OF_LARGEST 32768.0f

/* Finite, so that a huge score cannot turn into infinity - infinity; a NaN passes and shows. */
static __device__ __forceinline__ float finite_score(float score)
{
    if (score > FLT_MAX)
        return FLT_MAX;
    return score < -FLT_MAX ? -FLT_MAX : score;
}

/* Tokens of the piece that a query sees: those before the returned one. */
static __device__ __forceinline__ uint32_t visible_to(const struct cuda_prefill_softmax &s, uint32_t query)
{
    if (!s.is_causal)
        return s.n_tokens;
    const uint32_t end = query / s.group + 1; /* positions */
    return end <= s.causal_first ? 0 : min(end - s.causal_first, s.n_tokens);
}

/* The largest of a block in every thread, NaN if any is; `scratch` [32] in shared memory. */
static __device__ __forceinline__ float block_max(float x, bool is_nan, float *scratch)
{
    x = cuda_warp_max(x);
    if (cuda_lane() == 0)
        scratch[threadIdx.x / CUDA_WARP] = x;
    const bool any_nan = __syncthreads_or(is_nan) != 0;
    x = cuda_warp_max(cuda_lane() < blockDim.x / CUDA_WARP ? scratch[cuda_lane()] : -INFINITY);
    __syncthreads(); /* scratch may be used again */
    return any_nan ? NAN : x;
}

CUDA_HOT static __global__ void __launch_bounds__(1024)
    weigh(const float *__restrict__ all_scores, struct cuda_prefill_softmax s)
{
    __shared__ float scratch[32];
    const uint32_t query = s.first_query + blockIdx.x, visible = visible_to(s, query);
    const size_t row = (static_cast<size_t>(blockIdx.y) * s.tile_queries + blockIdx.x) * CUDA_PREFILL_PIECE;
    const size_t at = static_cast<size_t>(blockIdx.y) * s.n_queries + query;
    const float *__restrict__ scores = all_scores + row;
    __half *__restrict__ weights = reinterpret_cast<__half *>(s.weights) + row;
    for (uint32_t c = visible + threadIdx.x; c < s.n_columns; c += blockDim.x)
        weights[c] = __float2half_rn(0.0f);

    const float scale = s.scale * s.factors[at];
    float largest = -INFINITY;
    bool is_nan = false;
    for (uint32_t c = threadIdx.x; c < visible; c += blockDim.x) {
        const float score = finite_score(scores[c] * scale);
        is_nan = is_nan || isnan(score);
        largest = fmaxf(largest, score);
    }
    largest = block_max(largest, is_nan, scratch);
    if (!visible)
        return; /* the whole block */
    const float before = s.states[2 * at], max = before >= largest ? before : largest;
    const float factor = expf(before - max); /* 0 the first time */
    float sum = 0;
    for (uint32_t c = threadIdx.x; c < visible; c += blockDim.x) {
        const __half weight = __float2half_rn(expf(finite_score(scores[c] * scale) - max) * WEIGHT_OF_LARGEST);
        weights[c] = weight;
        sum += __half2float(weight);
    }
    sum = cuda_block_sum(sum, scratch); /* all have read the state */
    if (threadIdx.x == 0) {
        s.states[2 * at] = max;
        s.states[2 * at + 1] = fmaf(s.states[2 * at + 1], factor, sum);
    }
    if (s.is_first || factor == 1.0f)
        return;
    float *out = s.out + at * s.head_dim;
    for (uint32_t d = threadIdx.x; d < s.head_dim; d += blockDim.x)
        out[d] *= factor;
}

cudaError_t cuda_prefill_weigh(const struct cuda_queue *queue, const struct cuda_prefill_softmax *softmax)
{
    if (!softmax->tile_queries || !softmax->n_kv_heads || !softmax->n_columns)
        return cudaSuccess;
    if (softmax->n_kv_heads > 65535u || softmax->n_columns > CUDA_PREFILL_PIECE)
        return cudaErrorInvalidValue;
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    CUDA_LAUNCH(weigh, dim3(softmax->tile_queries, softmax->n_kv_heads), n_threads, 0, queue->stream)
    (softmax->scores, *softmax);
    return cudaGetLastError();
}
