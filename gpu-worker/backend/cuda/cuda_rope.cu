/*
 * cuda_rope.cu - rotary position embedding, pairs (2i, 2i + 1).
 *
 * Grid       one block a token; 128 threads (32 .. 1024). Shared memory: 8 bytes a pair, at most 1 KiB.
 * Algorithm  the block computes cosine and sine of the token's angles once, in double up to a fraction of a turn (an f32 angle
 *            of a million radians has no digits left), then turns the pairs of all heads.
 */
#include "gpu-worker/backend/cuda/cuda_ops.h"

#include "gpu-worker/backend/cuda/cuda.cuh"

#define TURNS_PER_RADIAN 0.15915494309189533577

CUDA_HOT static __global__ void __launch_bounds__(1024)
    rope(float *x, uint32_t n_heads, uint32_t head_dim, const uint32_t *__restrict__ positions, uint32_t n_pairs,
         const float *__restrict__ frequencies, float magnitude)
{
    CUDA_DYNAMIC_SHARED(float2, turns); /* [n_pairs] cosine, sine */
    const double position = static_cast<double>(positions[blockIdx.x]);
    for (uint32_t i = threadIdx.x; i < n_pairs; i += blockDim.x) {
        const double turn = position * static_cast<double>(frequencies[i]) * TURNS_PER_RADIAN;
        float sine, cosine;
        sincospif(static_cast<float>(2 * (turn - rint(turn))), &sine, &cosine);
        turns[i] = make_float2(cosine * magnitude, sine * magnitude);
    }
    __syncthreads();
    x += static_cast<size_t>(blockIdx.x) * n_heads * head_dim;
    for (uint32_t at = threadIdx.x; at < n_heads * n_pairs; at += blockDim.x) {
        const uint32_t i = at % n_pairs;
        float *pair = x + static_cast<size_t>(at / n_pairs) * head_dim + 2 * i;
        const float2 turn = turns[i];
        const float a = pair[0], b = pair[1];
        pair[0] = fmaf(a, turn.x, -(b * turn.y));
        pair[1] = fmaf(a, turn.y, b * turn.x);
    }
}

cudaError_t cuda_rope(const struct cuda_queue *queue, float *x, uint32_t n_tokens, uint32_t n_heads, uint32_t head_dim,
                      const uint32_t *positions, uint32_t n_rotated, const float *frequencies, float magnitude)
{
    const uint32_t n_pairs = n_rotated / 2;
    if (!n_tokens || !n_heads || !n_pairs)
        return cudaSuccess;
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 128;
    CUDA_LAUNCH(rope, n_tokens, n_threads, n_pairs * sizeof(float2), queue->stream)
    (x, n_heads, head_dim, positions, n_pairs, frequencies, magnitude);
    return cudaGetLastError();
}
