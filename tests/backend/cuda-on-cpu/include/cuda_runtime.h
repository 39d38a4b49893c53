/*
 * cuda_runtime.h - the device side of CUDA as C++17 functions: stands in for NVIDIA's header of this name where the .cu files
 * of the back end are compiled for the CPU (see emulation.h). Only what docs/cuda.md lists.
 */
#pragma once

#include <math.h>
#include <string.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <type_traits>

#include <cuda_runtime_api.h>

#include "tests/backend/cuda-on-cpu/emulation.h"

using std::isfinite;
using std::isnan;
using std::max;
using std::min;

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __constant__
#if defined(__SANITIZE_ADDRESS__)
#define __shared__ static
#else
#define __shared__ static __attribute__((section("emulated_shared")))
#endif

#define threadIdx (emulation_thread->index)
#define blockIdx  (emulation_place.block_index)
#define blockDim  (emulation_place.block)
#define gridDim   (emulation_place.grid)
#define warpSize  32

struct __align__(8) int2
{
    int x, y;
};
struct __align__(16) int4
{
    int x, y, z, w;
};
struct __align__(8) uint2
{
    unsigned int x, y;
};
struct __align__(16) uint4
{
    unsigned int x, y, z, w;
};
struct __align__(8) float2
{
    float x, y;
};
struct __align__(16) float4
{
    float x, y, z, w;
};

static inline float2 make_float2(float x, float y)
{
    return {x, y};
}

static inline float4 make_float4(float x, float y, float z, float w)
{
    return {x, y, z, w};
}

/* ---- launches: CUDA_LAUNCH of gpu-worker/backend/cuda/cuda.cuh ---- */

template <typename... Parameters> struct emulation_launcher {
    struct call {
        void (*kernel)(Parameters...);
        std::tuple<Parameters...> arguments;
    };
    static_assert((std::is_trivially_copyable_v<Parameters> && ...));

    void (*kernel)(Parameters...);
    struct emulation_kernel launch;
    cudaStream_t stream;

    emulation_launcher(void (*kernel_)(Parameters...), const char *name, dim3 grid, dim3 block, size_t shared_bytes,
                       cudaStream_t stream_)
        : kernel(kernel_), launch{name,         reinterpret_cast<const void *>(kernel_),
                                  grid,         block,
                                  shared_bytes, check_all,
                                  run_thread},
          stream(stream_)
    {
    }

    void operator()(Parameters... arguments) const
    {
        const call one{kernel, {arguments...}};
        emulation_launch(&launch, stream, &one, sizeof one);
    }

    static void run_thread(const void *context)
    {
        const call *to = static_cast<const call *>(context);
        std::apply(to->kernel, to->arguments);
    }

    static void check_all(const char *name, const void *context)
    {
        int n = 0;
        std::apply([&](const Parameters &...arguments) { (check(name, n++, arguments), ...); },
                   static_cast<const call *>(context)->arguments);
        (void)n;
    }

    template <typename Argument> static void check(const char *name, int n, const Argument &argument)
    {
        if constexpr (std::is_pointer_v<Argument>)
            emulation_check_pointer(name, n, argument);
        else
            (void)name, (void)n, (void)argument;
    }
};

/* ---- barriers and warps ---- */

template <typename To, typename From> static inline To emulation_bits(From from)
{
    static_assert(std::is_trivially_copyable_v<To> && std::is_trivially_copyable_v<From>);
    To to{};
    memcpy(static_cast<void *>(&to), &from, sizeof from < sizeof to ? sizeof from : sizeof to);
    return to;
}

/* Where a barrier or warp operation stands in the source: written as the last parameters of each. */
#define EMULATION_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

static inline void __syncthreads(EMULATION_HERE)
{
    emulation_barrier(0, file, line);
}

static inline int __syncthreads_count(int predicate, EMULATION_HERE)
{
    return (int)emulation_barrier(predicate, file, line);
}

static inline int __syncthreads_or(int predicate, EMULATION_HERE)
{
    return emulation_barrier(predicate, file, line) != 0;
}

/* the same for all lanes */
static inline void emulation_give(unsigned int mask, uint64_t result, uint64_t *results)
{
    for (; mask; mask &= mask - 1)
        results[__builtin_ctz(mask)] = result;
}

static inline void emulation_ballot(const uint64_t *values, const uint64_t *, unsigned int mask, uint64_t *results)
{
    uint64_t ballot = 0;
    for (unsigned int rest = mask; rest; rest &= rest - 1)
        ballot |= (uint64_t)(values[__builtin_ctz(rest)] != 0) << __builtin_ctz(rest);
    emulation_give(mask, ballot, results);
}

/* arguments: the lanes to read from; one that is not in the mask fails */
static inline void emulation_read_lanes(const uint64_t *values, const uint64_t *from, unsigned int mask,
                                        uint64_t *results)
{
    for (unsigned int rest = mask; rest; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        if (!(mask >> from[lane] & 1))
            emulation_fail("lane %d shuffles from lane %u, which is not in mask %08x", lane, (unsigned int)from[lane],
                           mask);
        results[lane] = values[from[lane]];
    }
}

template <typename T, T (*combine)(T, T)>
static inline void emulation_reduce(const uint64_t *values, const uint64_t *, unsigned int mask, uint64_t *results)
{
    T result = emulation_bits<T>(values[__builtin_ctz(mask)]);
    for (unsigned int rest = mask & (mask - 1); rest; rest &= rest - 1)
        result = combine(result, emulation_bits<T>(values[__builtin_ctz(rest)]));
    emulation_give(mask, emulation_bits<uint64_t>(result), results);
}

static inline unsigned int emulation_lane()
{
    return emulation_thread->lane;
}

/* lane + distance inside its segment of `width` lanes; its own where that is outside */
static inline unsigned int emulation_neighbour(int distance, int width)
{
    const int lane = (int)emulation_lane(), first = lane / width * width, to = lane + distance;
    return (unsigned int)(to < first || to >= first + width ? lane : to);
}

template <typename T>
static inline T emulation_shuffle(unsigned int mask, T value, unsigned int from, const char *file, int line)
{
    static_assert(sizeof(T) <= 8);
    return emulation_bits<T>(
        emulation_warp(mask, emulation_bits<uint64_t>(value), from, emulation_read_lanes, file, line));
}

template <typename T> static inline T __shfl_sync(unsigned int mask, T value, int from, int width = 32, EMULATION_HERE)
{
    const unsigned int first = emulation_lane() / (unsigned int)width * (unsigned int)width;
    return emulation_shuffle(mask, value, first + (unsigned int)from % (unsigned int)width, file, line);
}

template <typename T>
static inline T __shfl_xor_sync(unsigned int mask, T value, int bits, int width = 32, EMULATION_HERE)
{
    const int distance = ((int)emulation_lane() ^ bits) - (int)emulation_lane();
    return emulation_shuffle(mask, value, emulation_neighbour(distance, width), file, line);
}

template <typename T>
static inline T __shfl_down_sync(unsigned int mask, T value, unsigned int distance, int width = 32, EMULATION_HERE)
{
    return emulation_shuffle(mask, value, emulation_neighbour((int)distance, width), file, line);
}

template <typename T>
static inline T __shfl_up_sync(unsigned int mask, T value, unsigned int distance, int width = 32, EMULATION_HERE)
{
    return emulation_shuffle(mask, value, emulation_neighbour(-(int)distance, width), file, line);
}

static inline void __syncwarp(unsigned int mask = ~0u, EMULATION_HERE)
{
    emulation_warp(mask, 0, 0, emulation_ballot, file, line);
}

static inline unsigned int __ballot_sync(unsigned int mask, int predicate, EMULATION_HERE)
{
    return (unsigned int)emulation_warp(mask, predicate != 0, 0, emulation_ballot, file, line);
}

static inline int __any_sync(unsigned int mask, int predicate, EMULATION_HERE)
{
    return emulation_warp(mask, predicate != 0, 0, emulation_ballot, file, line) != 0;
}

static inline int __all_sync(unsigned int mask, int predicate, EMULATION_HERE)
{
    return emulation_warp(mask, predicate != 0, 0, emulation_ballot, file, line) == mask;
}

template <typename T> static inline T emulation_sum(T a, T b)
{
    return a + b;
}

template <typename T> static inline T emulation_max(T a, T b)
{
    return a > b ? a : b;
}

template <typename T> static inline T emulation_min(T a, T b)
{
    return a < b ? a : b;
}

template <typename T> static inline T emulation_or(T a, T b)
{
    return a | b;
}

template <typename T> static inline T emulation_and(T a, T b)
{
    return a & b;
}

/* int or unsigned int, as on the device */
#define EMULATION_REDUCE(name, function)                                                                               \
    template <typename T> static inline T name(unsigned int mask, T value, EMULATION_HERE)                             \
    {                                                                                                                  \
        static_assert(std::is_integral_v<T> && sizeof(T) == 4);                                                        \
        return emulation_bits<T>(                                                                                      \
            emulation_warp(mask, emulation_bits<uint64_t>(value), 0, emulation_reduce<T, function<T>>, file, line));   \
    }
EMULATION_REDUCE(__reduce_add_sync, emulation_sum)
EMULATION_REDUCE(__reduce_max_sync, emulation_max)
EMULATION_REDUCE(__reduce_min_sync, emulation_min)
EMULATION_REDUCE(__reduce_or_sync, emulation_or)
EMULATION_REDUCE(__reduce_and_sync, emulation_and)

static inline void __threadfence()
{
}

/* ---- atomics: one host thread, no preemption ---- */

template <typename T> static inline T atomicAdd(T *to, T value)
{
    const T before = *to;
    *to = before + value;
    return before;
}

template <typename T> static inline T atomicMax(T *to, T value)
{
    const T before = *to;
    *to = before > value ? before : value;
    return before;
}

template <typename T> static inline T atomicMin(T *to, T value)
{
    const T before = *to;
    *to = before < value ? before : value;
    return before;
}

template <typename T> static inline T atomicOr(T *to, T value)
{
    const T before = *to;
    *to = before | value;
    return before;
}

template <typename T> static inline T atomicAnd(T *to, T value)
{
    const T before = *to;
    *to = before & value;
    return before;
}

template <typename T> static inline T atomicExch(T *to, T value)
{
    const T before = *to;
    *to = value;
    return before;
}

template <typename T> static inline T atomicCAS(T *to, T expected, T value)
{
    const T before = *to;
    if (before == expected)
        *to = value;
    return before;
}

/* ---- intrinsics ---- */

template <typename T> static inline T __ldg(const T *from)
{
    return *from;
}

static inline int __popc(unsigned int x)
{
    return __builtin_popcount(x);
}

static inline int __popcll(unsigned long long x)
{
    return __builtin_popcountll(x);
}

static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}

static inline int __ffsll(long long x)
{
    return __builtin_ffsll(x);
}

static inline int __clz(int x)
{
    return x ? __builtin_clz((unsigned int)x) : 32;
}

static inline int __clzll(long long x)
{
    return x ? __builtin_clzll((unsigned long long)x) : 64;
}

static inline int __dp4a(int a, int b, int sum)
{
    for (int i = 0; i < 4; i++)
        sum += (int)(signed char)(a >> 8 * i) * (int)(signed char)(b >> 8 * i);
    return sum;
}

static inline unsigned int __dp4a(unsigned int a, unsigned int b, unsigned int sum)
{
    for (int i = 0; i < 4; i++)
        sum += (a >> 8 * i & 255u) * (b >> 8 * i & 255u);
    return sum;
}

static inline unsigned int __byte_perm(unsigned int a, unsigned int b, unsigned int selector)
{
    const unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned int result = 0;
    for (unsigned int i = 0; i < 4; i++) {
        const unsigned int pick = selector >> 4 * i & 15u, byte = (unsigned int)(both >> 8 * (pick & 7u)) & 255u;
        result |= (pick & 8u ? (byte & 128u ? 255u : 0u) : byte) << 8 * i;
    }
    return result;
}

static inline unsigned int __float_as_uint(float x)
{
    return emulation_bits<unsigned int>(x);
}

static inline int __float_as_int(float x)
{
    return emulation_bits<int>(x);
}

static inline float __uint_as_float(unsigned int x)
{
    return emulation_bits<float>(x);
}

static inline float __int_as_float(int x)
{
    return emulation_bits<float>(x);
}

static inline int __float2int_rn(float x)
{
    return (int)rintf(x);
}

static inline float __fdiv_rn(float a, float b)
{
    return a / b;
}

static inline float __fsqrt_rn(float x)
{
    return sqrtf(x);
}

static inline float rsqrtf(float x)
{
    return (float)(1.0 / sqrt((double)x));
}

/* Fast ones are as exact as they can be here: tolerances of tests must hold the device's error. (The C library has functions of
 * these names of its own.) */
#define __expf(x) expf(x)
#define __logf(x) logf(x)

static inline float __fdividef(float a, float b)
{
    return a / b;
}

static inline void sincospif(float x, float *sine, float *cosine)
{
    const double angle = (double)x * 3.14159265358979323846;
    *sine = (float)sin(angle);
    *cosine = (float)cos(angle);
}
