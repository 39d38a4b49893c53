/*
 * cuda_sample.cu - the choice of a token of each row of logits: greedy, or temperature, top-k, top-p, min-p and a draw.
 *
 * Grid       scan, weigh: x: chunks of 4096 ids; y: rows. 256 threads. choose: x: rows. 1024 threads.
 * Shared     weigh: 24 KiB, choose: 44 KiB, fixed.
 * Order      tokens stand by logit, largest first, then by id: in one word, its inverted bits above the id's (`code_of`).
 * Algorithm  scan: biases and penalties in place, the first token of the order, the smallest logit of all.
 *            weigh: tokens by their logits' distance to the largest, in 2048 buckets of one width; how many there are in each, and
 *            what they weigh: exp((logit - max) / temperature) in double precision, as integers. Integers add up to the same
 *            in every order.
 *            choose: top-k, top-p, min-p and the draw each ask for the token at which a sum along the order (of tokens or of
 *            weight) passes a limit. Sums of buckets tell the bucket; its tokens come to a list and are told apart by the digits
 *            of their codes, 8 bits at a time. Lists that do not fit (all logits alike) are read from the row again and again.
 *            No cut is applied: what is drawn of less weight than a cut has lies before it.
 *            Bytes: the row once by scan, once by weigh, and once out of the cache for each of up to three searches.
 */
#include "gpu-worker/backend/cuda/cuda_sample.h"

#include "gpu-worker/backend/cuda/cuda.cuh"
#include "gpu-worker/sampler.h"

#define CHUNK     4096u
#define N_BUCKETS 2048u
#define N_DIGITS  256u
#define MAX_LIST  2048u
#define UNIT      35184372088832.0 /* 2^45: 2^18 weights of up to 1 fit into 64 bits */
#define REACH     32.0f /* exp(-32) is less than half a unit: nothing beyond that, in temperatures, has weight */
#define MAX_ROWS  65535u

typedef unsigned long long wide;

/* Of a row, zeroes at first. */
struct sample_state {
    wide first;       /* inverted code of the first token in the order */
    uint32_t last;    /* inverted order of the smallest logit that is a number and not -inf */
    uint32_t n_above; /* tokens of at least min_p, and their weight */
    wide mass_above;
    wide masses[N_BUCKETS];
    uint32_t counts[N_BUCKETS];
};

/* Larger for larger numbers; -0 is 0. */
static __device__ __forceinline__ uint32_t order_of(float logit)
{
    const uint32_t bits = __float_as_uint(logit == 0.0f ? 0.0f : logit);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

static __device__ __forceinline__ float logit_of(uint32_t order)
{
    return __uint_as_float(order >> 31 ? order & 0x7fffffffu : ~order);
}

/* Smaller for tokens that come first; what is not a number comes last. */
static __device__ __forceinline__ wide code_of(float logit, uint32_t id)
{
    return static_cast<wide>(isnan(logit) ? 0xffffffffu : ~order_of(logit)) << 32 | id;
}

static __device__ __forceinline__ bool is_candidate(float logit)
{
    return logit > -INFINITY; /* a number, too */
}

static __device__ __forceinline__ bool is_greedy(const struct backend_sample *row, float max)
{
    return !(row->temperature > 0) || row->top_k == 1 || isinf(max) || isnan(max);
}

/* ---- scan ---- */

static __global__ void __launch_bounds__(1024)
    scan(const struct backend_sample *__restrict__ rows, uint32_t n_vocab, struct sample_state *states)
{
    const struct backend_sample *row = rows + blockIdx.y;
    const uint32_t begin = blockIdx.x * CHUNK, end = min(begin + CHUNK, n_vocab);
    float *logits = row->logits;
    for (uint32_t i = threadIdx.x; i < row->n_changes; i += blockDim.x) {
        const struct sampler_change *change = row->changes + i;
        const uint32_t id = change->id;
        if (id < begin || id >= end || (i && change[-1].id == id))
            continue; /* another block's, or another thread's of this block: all changes of an id are one's */
        float logit = logits[id];
        for (uint32_t k = i; k < row->n_changes && row->changes[k].id == id; k++) {
            const struct sampler_change one = row->changes[k];
            logit += one.add;
            if (one.divide != 0)
                logit = logit > 0 ? __fdiv_rn(logit, one.divide) : logit * one.divide;
            logit -= one.subtract;
        }
        logits[id] = logit;
    }
    __syncthreads();
    wide first = 0;
    uint32_t last = 0;
#pragma unroll 4
    for (uint32_t id = begin + threadIdx.x; id < end; id += blockDim.x) {
        const float logit = logits[id];
        first = max(first, ~code_of(logit, id));
        last = max(last, is_candidate(logit) ? ~order_of(logit) : 0);
    }
    for (int bits = 16; bits; bits /= 2)
        first = max(first, __shfl_xor_sync(CUDA_ALL_LANES, first, bits));
    last = __reduce_max_sync(CUDA_ALL_LANES, last);
    if (cuda_lane() == 0) {
        atomicMax(&states[blockIdx.y].first, first);
        atomicMax(&states[blockIdx.y].last, last);
    }
}

/* ---- weigh ---- */

/* What maps logits to buckets and weights: the same in both kernels. */
struct weighing {
    float max, scale; /* buckets a logit */
    double temperature;
};

static __device__ __forceinline__ weighing weighing_of(const struct backend_sample *row,
                                                       const struct sample_state *state)
{
    weighing w;
    w.max = logit_of(~static_cast<uint32_t>(~state->first >> 32));
    w.temperature = static_cast<double>(row->temperature);
    const float range = fminf(w.max - logit_of(~state->last), row->temperature * REACH);
    w.scale = range > 0 ? __fdiv_rn(static_cast<float>(N_BUCKETS), range) : 0.0f;
    return w;
}

/* Never smaller for smaller logits; a product that is not a number or too large is of the last one. */
static __device__ __forceinline__ uint32_t bucket_of(const weighing &w, float logit)
{
    const float bucket = (w.max - logit) * w.scale;
    return bucket < static_cast<float>(N_BUCKETS) ? static_cast<uint32_t>(bucket) : N_BUCKETS - 1;
}

static __device__ __forceinline__ double weight_of(const weighing &w, float logit)
{
    return exp((static_cast<double>(logit) - static_cast<double>(w.max)) / w.temperature);
}

static __device__ __forceinline__ wide mass_of(double weight)
{
    return static_cast<wide>(rint(weight * UNIT));
}

static __global__ void __launch_bounds__(1024)
    weigh(const struct backend_sample *__restrict__ rows, uint32_t n_vocab, struct sample_state *states)
{
    __shared__ wide masses[N_BUCKETS];
    __shared__ uint32_t counts[N_BUCKETS];
    __shared__ wide mass_above;
    __shared__ uint32_t n_above;
    const struct backend_sample *row = rows + blockIdx.y;
    struct sample_state *state = states + blockIdx.y;
    const weighing w = weighing_of(row, state);
    if (is_greedy(row, w.max))
        return; /* the whole block */
    for (uint32_t i = threadIdx.x; i < N_BUCKETS; i += blockDim.x)
        masses[i] = counts[i] = 0;
    if (threadIdx.x == 0)
        mass_above = n_above = 0;
    __syncthreads();
    const uint32_t begin = blockIdx.x * CHUNK, end = min(begin + CHUNK, n_vocab);
    const double min_p = static_cast<double>(row->min_p);
    wide above = 0;
    uint32_t n = 0;
    for (uint32_t id = begin + threadIdx.x; id < end; id += blockDim.x) {
        const float logit = row->logits[id];
        if (!is_candidate(logit))
            continue;
        const double weight = weight_of(w, logit);
        const wide mass = mass_of(weight);
        if (!mass)
            continue; /* can be neither drawn nor missed */
        const uint32_t bucket = bucket_of(w, logit);
        atomicAdd(&masses[bucket], mass);
        atomicAdd(&counts[bucket], 1u);
        above += weight >= min_p ? mass : 0;
        n += weight >= min_p;
    }
    atomicAdd(&mass_above, above);
    atomicAdd(&n_above, n);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < N_BUCKETS; i += blockDim.x) {
        if (counts[i]) {
            atomicAdd(&state->masses[i], masses[i]);
            atomicAdd(&state->counts[i], counts[i]);
        }
    }
    if (threadIdx.x == 0 && n_above) {
        atomicAdd(&state->mass_above, mass_above);
        atomicAdd(&state->n_above, n_above);
    }
}

/* ---- choose ---- */

/* Sums along the order: of all tokens before, in buckets or by a digit, and what was found in them. */
struct sums {
    wide mass;
    uint32_t count, index;
};

struct choose_memory {
    wide masses[N_BUCKETS], digit_masses[N_DIGITS], list[MAX_LIST];
    uint32_t counts[N_BUCKETS], digit_counts[N_DIGITS];
    uint32_t n_list;
    sums found;
};

/* By all lanes of a warp: the first of n (whole warps) at which the sum, begun at `before`, is more than `limit`. */
static __device__ __forceinline__ sums find(const wide *masses, const uint32_t *counts, uint32_t n, bool by_count,
                                            wide limit, sums before)
{
    for (uint32_t first = 0; first < n; first += CUDA_WARP) {
        const uint32_t i = first + cuda_lane();
        wide mass = masses[i];
        uint32_t count = counts[i];
        for (uint32_t distance = 1; distance < CUDA_WARP; distance *= 2) {
            const wide other_mass = __shfl_up_sync(CUDA_ALL_LANES, mass, distance);
            const uint32_t other_count = __shfl_up_sync(CUDA_ALL_LANES, count, distance);
            mass += cuda_lane() >= distance ? other_mass : 0;
            count += cuda_lane() >= distance ? other_count : 0;
        }
        const bool is_beyond = by_count ? before.count + count > limit : before.mass + mass > limit;
        const uint32_t beyond = __ballot_sync(CUDA_ALL_LANES, is_beyond);
        const uint32_t found = beyond ? static_cast<uint32_t>(__ffs(static_cast<int>(beyond))) - 1 : CUDA_WARP;
        if (found) { /* what lies before the one that was found, or all 32 */
            before.mass += __shfl_sync(CUDA_ALL_LANES, mass, static_cast<int>(found - 1));
            before.count += __shfl_sync(CUDA_ALL_LANES, count, static_cast<int>(found - 1));
        }
        if (beyond) {
            before.index = first + found;
            return before;
        }
    }
    before.index = n - 1;
    return before;
}

/*
 * The token at which the sum along the order is more than `limit`, by the whole block: index is its id, mass and count are those of
 * all up to it, itself too. The sum of all is more than `limit`.
 */
static __device__ sums search(choose_memory *memory, const weighing &w, const float *logits, uint32_t n_vocab,
                              bool by_count, wide limit)
{
    const bool is_first_warp = threadIdx.x < CUDA_WARP;
    __syncthreads(); /* the last search's results are read */
    if (is_first_warp) {
        const sums found = find(memory->masses, memory->counts, N_BUCKETS, by_count, limit, {});
        if (cuda_lane() == 0) {
            memory->found = found;
            memory->n_list = 0;
        }
    }
    __syncthreads();
    const uint32_t bucket = memory->found.index, n_all = memory->counts[bucket];
    const bool is_listed = n_all <= MAX_LIST;
    for (uint32_t id = threadIdx.x; is_listed && id < n_vocab; id += blockDim.x) {
        const float logit = logits[id];
        if (is_candidate(logit) && bucket_of(w, logit) == bucket && mass_of(weight_of(w, logit))) {
            const uint32_t at = atomicAdd(&memory->n_list, 1u);
            if (at < MAX_LIST)
                memory->list[at] = code_of(logit, id);
        }
    }
    __syncthreads();
    const uint32_t n = is_listed ? min(memory->n_list, MAX_LIST) : n_vocab;

    wide prefix = 0; /* of the code that is looked for: digits above `shift` */
    for (int shift = 56; shift >= 0; shift -= shift == 32 ? 16 : 8) { /* ids have 18 bits: one digit less */
        for (uint32_t i = threadIdx.x; i < N_DIGITS; i += blockDim.x)
            memory->digit_masses[i] = memory->digit_counts[i] = 0;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
            wide code;
            if (is_listed) {
                code = memory->list[i];
            } else {
                const float logit = logits[i];
                if (!is_candidate(logit) || bucket_of(w, logit) != bucket)
                    continue;
                code = code_of(logit, i);
            }
            if (shift < 56 && code >> shift >> 8 != prefix >> shift >> 8)
                continue;
            const wide mass = mass_of(weight_of(w, logit_of(~static_cast<uint32_t>(code >> 32))));
            if (!mass)
                continue;
            atomicAdd(&memory->digit_masses[code >> shift & (N_DIGITS - 1)], mass);
            atomicAdd(&memory->digit_counts[code >> shift & (N_DIGITS - 1)], 1u);
        }
        __syncthreads();
        if (is_first_warp) {
            const sums found =
                find(memory->digit_masses, memory->digit_counts, N_DIGITS, by_count, limit, memory->found);
            __syncwarp(); /* all lanes have read what one writes */
            if (cuda_lane() == 0)
                memory->found = found;
        }
        __syncthreads();
        prefix |= static_cast<wide>(memory->found.index) << shift;
    }
    sums found = memory->found;
    found.mass += memory->digit_masses[found.index];
    found.count += memory->digit_counts[found.index];
    found.index = static_cast<uint32_t>(prefix);
    return found;
}

static __global__ void __launch_bounds__(1024, 1)
    choose(const struct backend_sample *__restrict__ rows, uint32_t n_vocab, const struct sample_state *states)
{
    __shared__ choose_memory memory;
    const struct backend_sample *row = rows + blockIdx.x;
    const struct sample_state *state = states + blockIdx.x;
    const weighing w = weighing_of(row, state);
    const uint32_t best = static_cast<uint32_t>(~state->first);
    if (is_greedy(row, w.max)) {
        if (threadIdx.x == 0)
            *row->id = best;
        return; /* the whole block */
    }
    if (threadIdx.x == 0)
        memory.found = {};
    __syncthreads();
    wide mass = 0;
    uint32_t count = 0;
    for (uint32_t i = threadIdx.x; i < N_BUCKETS; i += blockDim.x) {
        memory.masses[i] = state->masses[i];
        memory.counts[i] = state->counts[i];
        mass += memory.masses[i];
        count += memory.counts[i];
    }
    atomicAdd(&memory.found.mass, mass);
    atomicAdd(&memory.found.count, count);
    __syncthreads();
    sums kept = memory.found; /* tokens that may be drawn: so many from the first on */

    if (row->top_k && row->top_k < kept.count)
        kept = search(&memory, w, row->logits, n_vocab, true, row->top_k - 1);
    if (row->top_p > 0 && row->top_p < 1) {
        /* as many as make the sum reach the goal, rounded up */
        const wide goal = static_cast<wide>(ceil(static_cast<double>(row->top_p) * static_cast<double>(kept.mass)));
        kept = search(&memory, w, row->logits, n_vocab, false, goal ? goal - 1 : 0);
    }
    if (row->min_p > 0 && state->n_above < kept.count) {
        kept.count = max(state->n_above, 1u); /* the first one always */
        kept.mass = state->n_above ? state->mass_above : static_cast<wide>(UNIT);
    }
    const wide goal = static_cast<wide>(row->uniform * static_cast<double>(kept.mass));
    const sums drawn = search(&memory, w, row->logits, n_vocab, false, min(goal, kept.mass - 1));
    if (threadIdx.x == 0)
        *row->id = drawn.index < n_vocab ? drawn.index : best;
}

size_t cuda_sample_bytes(uint32_t n_rows)
{
    return n_rows * sizeof(struct sample_state);
}

cudaError_t cuda_sample(const struct cuda_queue *queue, const struct backend_sample *rows, uint32_t n_rows,
                        uint32_t n_vocab, void *scratch)
{
    if (!n_rows)
        return cudaSuccess;
    if (!n_vocab || n_vocab > CUDA_SAMPLE_MAX_VOCAB || n_rows > MAX_ROWS)
        return cudaErrorInvalidValue;
    struct sample_state *states = static_cast<struct sample_state *>(scratch);
    const cudaError_t error = cudaMemsetAsync(scratch, 0, cuda_sample_bytes(n_rows), queue->stream);
    if (error)
        return error;
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    const dim3 grid(cuda_blocks(n_vocab, CHUNK), n_rows);
    CUDA_LAUNCH(scan, grid, n_threads, 0, queue->stream)(rows, n_vocab, states);
    CUDA_LAUNCH(weigh, grid, n_threads, 0, queue->stream)(rows, n_vocab, states);
    CUDA_LAUNCH(choose, n_rows, queue->n_threads ? queue->n_threads : 1024, 0, queue->stream)(rows, n_vocab, states);
    return cudaGetLastError();
}
