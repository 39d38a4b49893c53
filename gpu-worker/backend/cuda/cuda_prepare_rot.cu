/*
 * cuda_prepare_rot.cu - queries as rot4, rot3 and rot2 score them, to the byte as codec_rot.c prepares them.
 *
 * Grid       x: query heads of a KV head, y: heads; 128 threads (any whole warps). Shared memory: 2.2 KiB.
 * Algorithm  rotated in shared memory, the largest number by each warp for itself, integers, their sum.
 */
#include "gpu-worker/backend/cuda/cuda_keys.h"

#include "gpu-worker/backend/cuda/cuda_rotation.cuh"

CUDA_HOT static __global__ void __launch_bounds__(1024)
    prepare_rot(const struct cuda_key_query *__restrict__ queries, float unit, int32_t top, uint32_t head_dim,
                uint32_t query_bytes, float scale)
{
    __shared__ float rotated[KERNELS_MAX_HEAD_DIM];
    __shared__ int sum;
    const uint32_t n_padded = (head_dim + 15) / 16 * 16;
    const float *q = queries[blockIdx.y].q + static_cast<size_t>(blockIdx.x) * head_dim;
    uint8_t *query = static_cast<uint8_t *>(queries[blockIdx.y].query) + static_cast<size_t>(blockIdx.x) * query_bytes;
    float *numbers = reinterpret_cast<float *>(query);
    float *given = numbers + sizeof(struct rot_query) / sizeof(float);
    uint32_t *integers = reinterpret_cast<uint32_t *>(given + n_padded);
    for (uint32_t i = threadIdx.x; i < n_padded; i += blockDim.x) {
        const float x = i < head_dim ? cuda_cleaned(q[i], QUERY_LARGEST) : 0.0f;
        given[i] = x;
        if (i < head_dim)
            rotated[i] = x * cuda_rotation_sign(i);
    }
    if (threadIdx.x == 0)
        sum = 0;
    cuda_rotation_hadamard(rotated, head_dim, 1, 1);

    const float normal = 1.0f / sqrtf(static_cast<float>(cuda_rotation_size(head_dim)));
    float largest = 0;
    for (uint32_t i = cuda_lane(); i < head_dim; i += CUDA_WARP)
        largest = fmaxf(largest, fabsf(rotated[i] * normal));
    largest = cuda_warp_max(largest);
    const float step = largest / 127.0f, inverse = largest > 0 ? 127.0f / largest : 0.0f;
    int of_thread = 0;
    for (uint32_t word = threadIdx.x; word < n_padded / 4; word += blockDim.x) {
        uint32_t four = 0;
        for (uint32_t b = 0; b < 4; b++) {
            const uint32_t i = 4 * word + b;
            const int small =
                i < head_dim ? static_cast<int>((rotated[i] * normal * inverse + ROUND_MAGIC) - ROUND_MAGIC) : 0;
            of_thread += small;
            four |= (static_cast<uint32_t>(small) & 255u) << 8 * b;
        }
        for (uint32_t k = 0; k < ROT_QUERY_LANES / 4; k++)
            integers[word * (ROT_QUERY_LANES / 4) + k] = four;
    }
    if (of_thread != 0)
        atomicAdd(&sum, of_thread);
    __syncthreads();
    if (threadIdx.x < sizeof(struct rot_query) / sizeof(float))
        numbers[threadIdx.x] = threadIdx.x == 0   ? (scale * step) * unit
                               : threadIdx.x == 1 ? 0.5f * static_cast<float>(top * sum)
                               : threadIdx.x == 2 ? scale
                                                  : 0.0f;
}

cudaError_t cuda_prepare_rot(const struct cuda_queue *queue, uint32_t bits, uint32_t head_dim, uint32_t n_queries,
                             float scale, const struct cuda_key_query *queries, uint32_t n_heads)
{
    if (head_dim == 0 || head_dim > KERNELS_MAX_HEAD_DIM || bits < 2 || bits > 4)
        return cudaErrorInvalidValue;
    if (!n_queries || !n_heads)
        return cudaSuccess;
    const float unit = bits == 2 ? ROT2_UNIT : bits == 3 ? ROT3_UNIT : ROT4_UNIT;
    const int32_t top = bits == 2 ? ROT2_TOP : bits == 3 ? ROT3_TOP : ROT4_TOP;
    CUDA_LAUNCH(prepare_rot, dim3(n_queries, n_heads), (queue->n_threads ? queue->n_threads : 128), 0, queue->stream)
    (queries, unit, top, head_dim, static_cast<uint32_t>(rot_query_bytes(rot_groups(head_dim))), scale);
    return cudaGetLastError();
}
