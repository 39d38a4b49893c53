/* cuda_keys.cuh - what the kernels of key codecs share: sizes on a logarithmic scale, numbers of a broken model, dot16. */
#pragma once

#include "gpu-worker/backend/cuda/cuda.cuh"
#include "gpu-worker/backend/cuda/cuda_keys.h"
#include "gpu-worker/keys/key_scale.h"

#define KEYS_OF_TILE  64u
#define ROUND_MAGIC   12582912.0f /* added and taken away: rounds to the nearest integer, ties to even */
#define SMALLEST      0x1p-40f    /* anything smaller is 0: no row has it */
#define KEY_LARGEST   65504.0f    /* of f16 */
#define QUERY_LARGEST 0x1p40f

/* As key_scale_value(). By selects: a table would lie in each thread's local memory. */
static __device__ __forceinline__ float cuda_scale_value(uint32_t code)
{
    constexpr uint32_t table[8] = KEY_SCALE_TABLE;
    const uint32_t i = code % 8;
    const uint32_t low = i & 2 ? (i & 1 ? table[3] : table[2]) : (i & 1 ? table[1] : table[0]);
    const uint32_t high = i & 2 ? (i & 1 ? table[7] : table[6]) : (i & 1 ? table[5] : table[4]);
    return __uint_as_float(code ? (i & 4 ? high : low) + (code << 20) : 0);
}

/* As key_scale_code(). */
static __device__ __forceinline__ uint32_t cuda_scale_code(float value)
{
    constexpr float halfway[8] = {1.04427378f, 1.13878863f, 1.24185781f, 1.35425555f,
                                  1.47682615f, 1.61049033f, 1.75625216f, 1.91520656f};
    if (!(value >= 8.31991373e-06f))
        return 0;
    const uint32_t bits = __float_as_uint(value);
    const float mantissa = __uint_as_float((bits & 0x7fffffu) | 0x3f800000u);
    int32_t code = (static_cast<int32_t>(bits >> 23) - 127) * 8 + 128;
#pragma unroll
    for (int i = 0; i < 8; i++)
        code += mantissa >= halfway[i];
    return static_cast<uint32_t>(code < 1 ? 1 : code > 255 ? 255 : code);
}

/* NaN and what is smaller than any row's numbers: 0; what is beyond `largest`: that, with its sign. */
static __device__ __forceinline__ float cuda_cleaned(float x, float largest)
{
    const uint32_t bits = __float_as_uint(x);
    uint32_t magnitude = bits & 0x7fffffffu;
    magnitude = magnitude < __float_as_uint(SMALLEST) || magnitude > 0x7f800000u ? 0 : magnitude;
    magnitude = min(magnitude, __float_as_uint(largest));
    return __uint_as_float(magnitude | (bits & 0x80000000u));
}

/*
 * dot16 of codec_rot.h for n_at_once queries [n_at_once][16 n_sixteenths] in shared memory and the mean of a tile: half of a warp
 * for each query, lane i for numbers i mod 16. Every lane gets all the sums.
 */
template <uint32_t n_at_once>
static __device__ __forceinline__ void cuda_dot16(const float *queries, const int8_t *__restrict__ mean,
                                                  uint32_t n_sixteenths, float *dots)
{
    const uint32_t half = cuda_lane() / 16, at = cuda_lane() % 16;
#pragma unroll
    for (uint32_t first = 0; first < n_at_once; first += 2) {
        const float *query = queries + static_cast<size_t>(min(first + half, n_at_once - 1)) * 16 * n_sixteenths;
        float sum = 0;
        for (uint32_t i = at; i < 16 * n_sixteenths; i += 16)
            sum = fmaf(query[i], static_cast<float>(mean[i]), sum);
        sum += __shfl_xor_sync(CUDA_ALL_LANES, sum, 8);
        sum += __shfl_xor_sync(CUDA_ALL_LANES, sum, 2);
        sum += __shfl_xor_sync(CUDA_ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(CUDA_ALL_LANES, sum, 4);
        dots[first] = __shfl_sync(CUDA_ALL_LANES, sum, 0);
        if (first + 1 < n_at_once)
            dots[first + 1] = __shfl_sync(CUDA_ALL_LANES, sum, 16);
    }
}

/* Number i of a row's K. */
static __device__ __forceinline__ float cuda_key_number(const uint8_t *row, enum kernels_rows codec, uint32_t scales_at,
                                                        uint32_t i)
{
    if (codec == KERNELS_ROWS_F16)
        return __half2float(__ushort_as_half(reinterpret_cast<const uint16_t *>(row)[i]));
    const uint16_t scale = reinterpret_cast<const uint16_t *>(row + scales_at)[i / 32]; /* a group of q8_0 */
    return static_cast<float>(reinterpret_cast<const int8_t *>(row)[i]) * __half2float(__ushort_as_half(scale));
}

/* Tile t of a run, and its side. */
static __device__ __forceinline__ const uint8_t *cuda_key_tile(const struct cuda_key_run &run, uint32_t t,
                                                               uint32_t tile_bytes)
{
    return run.chunks[t / CUDA_KEY_CHUNK_TILES] + run.tiles + t % CUDA_KEY_CHUNK_TILES * tile_bytes;
}
static __device__ __forceinline__ float cuda_key_side(const struct cuda_key_run &run, uint32_t t)
{
    return reinterpret_cast<const float *>(run.chunks[t / CUDA_KEY_CHUNK_TILES] + run.sides)[t % CUDA_KEY_CHUNK_TILES];
}

/* The largest scores that a warp has found for query heads from the first on, `most` in each lane, are told if asked for. */
template <uint32_t n_at_once>
static __device__ __forceinline__ void cuda_key_largest(const struct cuda_key_run &run, uint32_t first_query,
                                                        uint32_t n_queries, const float (&most)[n_at_once])
{
    if (!run.largest)
        return;
#pragma unroll
    for (uint32_t n = 0; n < n_at_once; n++) {
        if (first_query + n >= n_queries)
            continue; /* the whole warp */
        const float of_warp = cuda_warp_max(most[n]);
        if (cuda_lane() == 0 && of_warp > -INFINITY) {
            const uint32_t bits = __float_as_uint(of_warp); /* cuda_keys_order() */
            atomicMax(&run.largest[first_query + n], bits & 0x80000000u ? ~bits : bits | 0x80000000u);
        }
    }
}

/* Blocks for the tiles of a run: one warp a tile, several tiles a warp where there are many. */
static inline unsigned int cuda_tile_blocks(uint32_t n_tiles, unsigned int n_threads, unsigned int most)
{
    const unsigned int n = cuda_blocks(n_tiles, n_threads / CUDA_WARP);
    return n < most ? n : most;
}
