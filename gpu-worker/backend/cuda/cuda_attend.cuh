/* cuda_attend.cuh - what the kernels of exact partials share: the layout of rows, what a query sees, scores that are numbers. */
#pragma once

#include <float.h>

#include "gpu-worker/backend/cuda/cuda.cuh"
#include "gpu-worker/backend/cuda/cuda_ops.h"

#define CUDA_ROW_GROUP      32u /* numbers of a scale: row_format.h of kernels/ */
#define CUDA_ATTEND_ITEMS   65535u
#define CUDA_ATTEND_THREADS 256u

/* The tokens that query `query` sees of a piece; those of a later query hold them. */
static __device__ __forceinline__ uint64_t cuda_attend_mask(const struct backend_attend *item, uint32_t piece,
                                                            uint32_t query)
{
    const uint64_t mask = item->pieces[piece].mask;
    if (piece != item->causal_piece)
        return mask;
    const uint32_t last = item->causal_first + query / item->group;
    return last < 63 ? mask & ((UINT64_C(2) << last) - 1) : mask;
}

/* Finite, so that a huge score cannot turn into infinity - infinity; a NaN passes and shows. */
static __device__ __forceinline__ float cuda_finite_score(float score)
{
    if (score > FLT_MAX)
        return FLT_MAX;
    return score < -FLT_MAX ? -FLT_MAX : score;
}
