/*
 * cuda_prepare_pair.cu - queries as the pair codecs score them, to the byte as codec_pair.c prepares them; and heads' tables on the
 * device, which that and quantizing need.
 *
 * Grid       x: query heads of a KV head, y: heads; 128 threads (64 .. 1024, whole warps).
 * Shared     21 KiB: all look-ups in f32.
 * Algorithm  B q (a thread a coordinate), its products with codewords (a thread a product), least and largest of a group (a thread
 *            a group), sums over dimensions and groups by one thread each, in order: they are short.
 */
#include "gpu-worker/backend/cuda/cuda_keys.h"

#include <stdlib.h>
#include <string.h>

#include "gpu-worker/backend/cuda/cuda_keys.cuh"
#include "gpu-worker/backend/cuda/cuda_pair_table.cuh"

struct pair_query_memory {
    float given[KERNELS_MAX_HEAD_DIM], coordinates[KERNELS_MAX_HEAD_DIM];
    float values[PAIR_MAX_GROUPS * PAIR_CODEWORDS], least[PAIR_MAX_GROUPS], widths[PAIR_MAX_GROUPS];
    float along, offset, widest;
};

/* B q */
static __device__ __forceinline__ float synthesize(const struct cuda_pair_table &table, const float *q, uint32_t c)
{
    if (!table.dense)
        return table.synthesis[c] * q[table.dimension[c]];
    float sum = 0;
    for (uint32_t i = 0; i < table.head_dim; i++)
        sum += table.synthesis[static_cast<size_t>(i) * table.n_coordinates + c] * q[i];
    return sum;
}

CUDA_HOT static __global__ void __launch_bounds__(1024)
    prepare_pair(const struct cuda_key_query *__restrict__ queries, float scale)
{
    __shared__ struct pair_query_memory memory;
    const struct cuda_key_query head = queries[blockIdx.y];
    const struct cuda_pair_table table = *head.table;
    const uint32_t n_padded = (table.head_dim + 15) / 16 * 16, n_values = table.n_groups * PAIR_CODEWORDS;
    const uint32_t table_bytes = (n_values + 63) / 64 * 64;
    uint8_t *query = static_cast<uint8_t *>(head.query) +
                     blockIdx.x * (sizeof(struct pair_query) + n_padded * sizeof(float) + table_bytes);
    float *numbers = reinterpret_cast<float *>(query), *given = numbers + sizeof(struct pair_query) / sizeof(float);
    uint8_t *tables = reinterpret_cast<uint8_t *>(given + n_padded);
    for (uint32_t i = threadIdx.x; i < n_padded; i += blockDim.x) {
        float x = 0;
        if (i < table.head_dim) {
            x = head.q[static_cast<size_t>(blockIdx.x) * table.head_dim + i];
            x = fabsf(x) < QUERY_LARGEST ? x : x != x ? 0 : copysignf(QUERY_LARGEST, x);
            memory.given[i] = x;
        }
        given[i] = x;
    }
    __syncthreads();
    for (uint32_t c = threadIdx.x; c < table.n_coordinates; c += blockDim.x)
        memory.coordinates[c] = synthesize(table, memory.given, c);
    __syncthreads();
    for (uint32_t at = threadIdx.x; at < n_values; at += blockDim.x) {
        const struct pair_group group = table.groups[at / PAIR_CODEWORDS];
        const float *codeword = table.codewords + group.codewords + at % PAIR_CODEWORDS * group.n;
        float value = 0;
        for (uint32_t i = 0; i < group.n; i++)
            value += memory.coordinates[group.first + i] * codeword[i];
        memory.values[at] = value;
    }
    __syncthreads();
    for (uint32_t g = threadIdx.x; g < table.n_groups; g += blockDim.x) {
        float lowest = INFINITY, highest = -INFINITY;
        for (uint32_t c = 0; c < PAIR_CODEWORDS; c++) {
            const float value = memory.values[g * PAIR_CODEWORDS + c];
            lowest = value < lowest ? value : lowest;
            highest = value > highest ? value : highest;
        }
        memory.least[g] = lowest;
        memory.widths[g] = highest - lowest;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        float along = 0;
        for (uint32_t i = 0; i < table.head_dim; i++)
            along += memory.given[i] * table.direction[i];
        memory.along = along;
    } else if (threadIdx.x == CUDA_WARP) {
        float offset = 0, widest = 0;
        for (uint32_t g = 0; g < table.n_groups; g++) {
            offset += memory.least[g];
            widest = memory.widths[g] > widest ? memory.widths[g] : widest;
        }
        memory.offset = offset;
        memory.widest = widest;
    }
    __syncthreads();
    const float widest = memory.widest, inverse = widest > 0x1p-100f ? 255.0f / widest : 0;
    for (uint32_t at = threadIdx.x; at < table_bytes; at += blockDim.x) {
        float steps = 0;
        if (at < n_values)
            steps = ((memory.values[at] - memory.least[at / PAIR_CODEWORDS]) * inverse + ROUND_MAGIC) - ROUND_MAGIC;
        tables[at] = static_cast<uint8_t>(static_cast<uint32_t>(steps));
    }
    if (threadIdx.x < sizeof(struct pair_query) / sizeof(float))
        numbers[threadIdx.x] = threadIdx.x == 0   ? scale * (widest / 255.0f)
                               : threadIdx.x == 1 ? scale * memory.offset
                               : threadIdx.x == 2 ? scale
                               : threadIdx.x == 3 ? scale * memory.along
                                                  : 0.0f;
}

cudaError_t cuda_prepare_pair(const struct cuda_queue *queue, uint32_t n_queries, float scale,
                              const struct cuda_key_query *queries, uint32_t n_heads)
{
    if (!n_queries || !n_heads)
        return cudaSuccess;
    const unsigned int n_threads = queue->n_threads > CUDA_WARP ? queue->n_threads : queue->n_threads ? 64 : 128;
    CUDA_LAUNCH(prepare_pair, dim3(n_queries, n_heads), n_threads, 0, queue->stream)(queries, scale);
    return cudaGetLastError();
}

/* Room for an array behind what is there already, in the copy on the host; *at is moved on. */
template <typename type>
static const type *put(uint8_t *host, const uint8_t *memory, size_t *at, const type *from, size_t n)
{
    const type *there = reinterpret_cast<const type *>(memory + *at);
    if (host && n)
        memcpy(host + *at, from, n * sizeof *from);
    *at += (n * sizeof *from + 63) / 64 * 64;
    return there;
}

/* The table as it will lie at `memory`; host NULL: only its bytes are counted. */
static size_t lay_out(const struct pair_table *table, uint8_t *host, const uint8_t *memory)
{
    const uint32_t n = table->n_coordinates, d = table->layout.head_dim, n_groups = table->layout.n_groups;
    const size_t n_factors = table->dense ? static_cast<size_t>(n) * d : n;
    struct cuda_pair_table there = {};
    size_t at = (sizeof there + 63) / 64 * 64;
    there.head_dim = d;
    there.n_groups = n_groups;
    there.n_coordinates = n;
    there.is_klt = table->layout.is_klt;
    there.dense = table->dense;
    there.dimension = put(host, memory, &at, table->dimension, table->dense ? 0 : n);
    there.analysis = put(host, memory, &at, table->analysis, n_factors);
    there.synthesis = put(host, memory, &at, table->synthesis, n_factors);
    there.inverse_spread = put(host, memory, &at, table->inverse_spread, n);
    there.along = put(host, memory, &at, table->along, n);
    there.direction = put(host, memory, &at, table->direction, d);
    there.groups = put(host, memory, &at, table->groups, n_groups);
    there.codewords = put(host, memory, &at, table->codewords, static_cast<size_t>(n) * PAIR_CODEWORDS);
    there.half_squares = put(host, memory, &at, table->half_squares, static_cast<size_t>(n_groups) * PAIR_CODEWORDS);
    if (host)
        memcpy(host, &there, sizeof there);
    return at;
}

size_t cuda_prepare_pair_table_bytes(const struct pair_table *table)
{
    return lay_out(table, NULL, NULL);
}

cudaError_t cuda_prepare_pair_table(const struct cuda_queue *queue, const struct pair_table *table, void *memory)
{
    const size_t n_bytes = lay_out(table, NULL, NULL);
    uint8_t *host = static_cast<uint8_t *>(calloc(1, n_bytes));
    if (!host)
        return cudaErrorMemoryAllocation;
    lay_out(table, host, static_cast<uint8_t *>(memory));
    /* from pageable memory: read before the call returns, in order in the stream */
    const cudaError_t error = cudaMemcpyAsync(memory, host, n_bytes, cudaMemcpyHostToDevice, queue->stream);
    free(host);
    return error;
}
