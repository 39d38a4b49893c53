/*
 * cuda_selection_search.cu - selection, second part: the highest threshold of the grid that satisfies the selector.
 *
 * Launches   three times attempt (x: blocks of tokens, half a warp a block; y: items; 32 .. 256 threads). Shared memory: 36 bytes.
 * Algorithm  what 8 thresholds leave unread of a block is computed from one reading of its weights; 322 steps shrink to 46, 6 and 1.
 *            No answer goes to the host, so that all of it can be captured. The 8 sums over 16 lanes take 8 shuffles together: in each
 *            round a lane gives away the half of its sums that its partner keeps. The last block of an item adds blocks' values in the
 *            order of passes_loops.h, 16 lanes for each threshold, and decides.
 *            Bytes: the weights three times, 4 a token; 32 a block and pass written and read.
 */
#include "gpu-worker/backend/cuda/cuda_selection.cuh"

/* Of step -1 (just above every old weight) to SELECTION_STEPS, then of all tokens with a weight. As threshold_of() of selection.c. */
static __device__ __forceinline__ float threshold_of(float top, int32_t step)
{
    if (step < 0)
        return __uint_as_float(__float_as_uint(top) + 1);
    if (step > SELECTION_STEPS)
        return FLT_MIN;
    const int32_t i = step % 8;
    const float fraction = i & 4
                               ? (i & 2 ? (i & 1 ? 0.545253866f : 0.594603558f) : (i & 1 ? 0.648419777f : 0.707106781f))
                               : (i & 2 ? (i & 1 ? 0.771105413f : 0.840896415f) : (i & 1 ? 0.917004043f : 1.0f));
    const float octave = __uint_as_float(static_cast<uint32_t>(127 - step / 8) << 23);
    return fmaxf(top * fraction * octave, FLT_MIN);
}

/* The steps that the threshold lies between. */
static __device__ __forceinline__ int32_t failed_of(const selection_state *state)
{
    return static_cast<int32_t>(state->failed) - 1;
}
static __device__ __forceinline__ int32_t enough_of(const selection_state *state)
{
    return SELECTION_STEPS + 1 - static_cast<int32_t>(state->missing);
}

/* The step that pass `pass` tries as its t-th; where nothing is left between, one of the ends again. */
static __device__ __forceinline__ int32_t step_of(const selection_state *state, uint32_t pass, uint32_t t)
{
    if (pass == 0)
        return t == 0   ? -1
               : t == 1 ? SELECTION_STEPS + 1
                        : -1 + static_cast<int32_t>(t - 1) * (SELECTION_STEPS + 2) / 7;
    return failed_of(state) + (enough_of(state) - failed_of(state)) * static_cast<int32_t>(t + 1) / 9;
}

/* The threshold whose sum lane `lane` has after sum_of_each(), and the lane of half a warp that has threshold t's. */
static __device__ __forceinline__ uint32_t kept_by(uint32_t lane)
{
    return (lane & 8u) / 2 + (lane & 2u) + (lane & 1u);
}
static __device__ __forceinline__ uint32_t keeper_of(uint32_t t)
{
    return (t & 4u) * 2 + (t & 2u) + (t & 1u);
}

/* One round: n sums become n / 2. */
template <uint32_t n, uint32_t bit> static __device__ __forceinline__ void halve(float *x)
{
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (uint32_t i = 0; i < n / 2; i++) {
        const float given = upper ? x[i] : x[i + n / 2], kept = upper ? x[i + n / 2] : x[i];
        x[i] = kept + __shfl_xor_sync(CUDA_ALL_LANES, given, static_cast<int>(bit));
    }
}

/* selection_sum() of each of x [8]: that of threshold kept_by(lane). */
static __device__ __forceinline__ float sum_of_each(float *x)
{
    halve<8, 8>(x);
    halve<4, 2>(x);
    halve<2, 1>(x);
    return x[0] + __shfl_xor_sync(CUDA_ALL_LANES, x[0], 4);
}

/*
 * What is read (mass) or unread of a block with each threshold; w [4] are the lane's. In each lane: of threshold kept_by(lane).
 */
static __device__ __forceinline__ float mass_of(const float *w, const float *thresholds)
{
    float sums[SELECTION_AT_ONCE];
#pragma unroll
    for (uint32_t t = 0; t < SELECTION_AT_ONCE; t++) {
        float part[4];
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            part[k] = w[k] < thresholds[t] ? 0.0f : w[k];
        sums[t] = (part[0] + part[1]) + (part[2] + part[3]);
    }
    return sum_of_each(sums);
}

template <int selector> static __device__ __forceinline__ float deviation_of(const float *w, const float *thresholds)
{
    float sums[SELECTION_AT_ONCE], counts[SELECTION_AT_ONCE];
#pragma unroll
    for (uint32_t t = 0; t < SELECTION_AT_ONCE; t++) {
        float part[4], count = 0;
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            part[k] = w[k] < thresholds[t] ? w[k] : 0.0f;
            count += w[k] < thresholds[t] ? 1.0f : 0.0f;
        }
        sums[t] = (part[0] + part[1]) + (part[2] + part[3]);
        counts[t] = count;
    }
    const float count = sum_of_each(counts);
    float mean = sum_of_each(sums) / (count > 0 ? count : 1.0f);
    mean *= selector == POLICY_SELECTOR_DEVIATION ? 1.0f - 0x1p-20f : PASSES_BEFORE_SQUARE;
#pragma unroll
    for (uint32_t t = 0; t < SELECTION_AT_ONCE; t++) {
        const float of_block = __shfl_sync(CUDA_ALL_LANES, mean, static_cast<int>(keeper_of(t)), 16);
        float d[4];
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            if constexpr (selector == POLICY_SELECTOR_DEVIATION)
                d[k] = of_block - w[k] > 0 ? of_block - w[k] : 0.0f;
            else
                d[k] = w[k] < thresholds[t] ? fmaf(w[k], PASSES_BEFORE_SQUARE, -of_block) : 0.0f;
        }
        if constexpr (selector == POLICY_SELECTOR_DEVIATION)
            sums[t] = (d[0] + d[1]) + (d[2] + d[3]);
        else
            sums[t] = fmaf(d[0], d[0], d[1] * d[1]) + fmaf(d[2], d[2], d[3] * d[3]);
    }
    const float sum = sum_of_each(sums);
    if constexpr (selector == POLICY_SELECTOR_DEVIATION)
        return 2.0f * sum;
    const float rounding = mean * (0x1p-20f * 8.0f); /* of each of 64 */
    return sum > rounding * rounding ? sum : 0.0f;
}

/* After the sums of all blocks: which steps the threshold now lies between. One thread. */
static __device__ __forceinline__ void narrow(selection_state *state, bool by_mass, uint32_t pass, float top,
                                              float parameter, const float *reached)
{
    uint32_t t = 0;
    if (pass == 0) {
        state->bound = by_mass ? parameter * reached[1] : parameter; /* may be infinite: more than there can be */
        if (!(top > 0)) {
            state->threshold = FLT_MIN;
            state->found = 1;
            return;
        }
        if (by_mass ? reached[0] >= state->bound : reached[0] <= state->bound) {
            state->threshold = threshold_of(top, -1);
            state->found = 1;
            return;
        }
        t = 2; /* those after the ends rise */
    }
    int32_t failed = failed_of(state), enough = enough_of(state);
    for (; t < SELECTION_AT_ONCE; t++) {
        const int32_t step = step_of(state, pass, t);
        if (step <= failed || step >= enough)
            continue;
        if (by_mass ? reached[t] >= state->bound : reached[t] <= state->bound)
            enough = step;
        else
            failed = step;
    }
    state->failed = static_cast<uint32_t>(failed + 1);
    state->missing = static_cast<uint32_t>(SELECTION_STEPS + 1 - enough);
    if (enough - failed <= 1) {
        state->threshold = threshold_of(top, enough);
        state->found = 1;
    }
}

/* The whole block, once it is the last one. */
template <int selector>
static __device__ __forceinline__ void decide(const struct cuda_selection_item &item, selection_state *state,
                                              uint32_t pass, uint32_t n_all, const struct selection_work &work)
{
    __shared__ float reached[SELECTION_AT_ONCE];
    for (uint32_t t = threadIdx.x / 16; t < SELECTION_AT_ONCE;
         t += blockDim.x / 16) { /* both halves of a warp or none */
        const float sum = selection_sum(selection_serial_sum(
            selection_floats(item, work.values) + static_cast<size_t>(t) * work.n_values, n_all, threadIdx.x % 16));
        if (threadIdx.x % 16 == 0)
            reached[t] = sum;
    }
    __syncthreads();
    float parameter = item.parameter;
    if constexpr (selector == POLICY_SELECTOR_L2) {
        parameter *= PASSES_BEFORE_SQUARE;
        parameter *= parameter;
    }
    if (threadIdx.x == 0)
        narrow(state, selector == POLICY_SELECTOR_MASS, pass, __uint_as_float(state->top), parameter, reached);
}

template <int selector>
CUDA_HOT static __global__ void __launch_bounds__(256)
    attempt(const struct cuda_selection_item *__restrict__ items, uint32_t pass, struct selection_work work)
{
    __shared__ uint32_t is_last;
    const struct cuda_selection_item item = items[blockIdx.y];
    selection_state *state = selection_state_of(item);
    if (state->found) /* all blocks: the last one of this launch writes it when all the others have come */
        return;
    const uint32_t n_all = item.n_blocks + (item.n_exact + PASSES_BLOCK_TOKENS - 1) / PASSES_BLOCK_TOKENS;
    const float top = __uint_as_float(state->top), *weights = selection_floats(item, work.w);
    float thresholds[SELECTION_AT_ONCE], *values = selection_floats(item, work.values);
#pragma unroll
    for (uint32_t t = 0; t < SELECTION_AT_ONCE; t++)
        thresholds[t] = threshold_of(top, step_of(state, pass, t));
    const uint32_t half = cuda_lane() / 16, lane = cuda_lane() % 16, n_warps = gridDim.x * blockDim.x / CUDA_WARP;
    for (uint32_t first = (blockIdx.x * blockDim.x + threadIdx.x) / CUDA_WARP * 2; first < n_all;
         first += 2 * n_warps) {
        const uint32_t block = min(first + half, n_all - 1); /* an odd last one twice */
        float w[4];
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            w[k] = weights[static_cast<size_t>(block) * PASSES_BLOCK_TOKENS + k * PASSES_LANES + lane];
        float value;
        if constexpr (selector == POLICY_SELECTOR_MASS)
            value = mass_of(w, thresholds);
        else
            value = deviation_of<selector>(w, thresholds);
        if (!(lane & 4u) && first + half < n_all)
            values[static_cast<size_t>(kept_by(lane)) * work.n_values + block] = value;
    }
    if (selection_is_last(&state->tried[pass], gridDim.x, &is_last))
        decide<selector>(item, state, pass, n_all, work);
}

template <int selector>
static void launch(const struct cuda_queue *queue, const struct cuda_selection *selection,
                   const struct cuda_selection_item *items, uint32_t n_items)
{
    const struct selection_work work = selection_work_of(selection);
    const unsigned int n_threads = queue->n_threads ? queue->n_threads : 256;
    const dim3 grid(selection_grid(selection->most_blocks + SELECTION_EXACT_BLOCKS, n_threads / 16), n_items);
    for (uint32_t pass = 0; pass < SELECTION_PASSES; pass++)
        CUDA_LAUNCH((attempt<selector>), grid, n_threads, 0, queue->stream)(items, pass, work);
}

cudaError_t cuda_selection_search(const struct cuda_queue *queue, const struct cuda_selection *selection,
                                  const struct cuda_selection_item *items, uint32_t n_items)
{
    if (selection->selector == POLICY_SELECTOR_L2)
        launch<POLICY_SELECTOR_L2>(queue, selection, items, n_items);
    else if (selection->selector == POLICY_SELECTOR_MASS)
        launch<POLICY_SELECTOR_MASS>(queue, selection, items, n_items);
    else
        launch<POLICY_SELECTOR_DEVIATION>(queue, selection, items, n_items);
    return cudaGetLastError();
}
