/*
 * cuda_sample.h - the choice of a token on the device; the rest as cuda_ops.h has it.
 *
 * Result     the token that sampler_choose() (gpu-worker/sampler.h) takes of the same logits, biases and penalties, but where the
 *            draw or a cut falls within 1e-8 of all the weight of a boundary between two tokens: weights are counted in units of
 *            2^-45 of the largest. It does not depend on what else is in the call.
 */
#pragma once

#include "gpu-worker/backend/cuda/cuda_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rows [n_rows], and all that they point to but `id`, in device memory; up to 65535 rows, n_vocab up to CUDA_SAMPLE_MAX_VOCAB. */
#define CUDA_SAMPLE_MAX_VOCAB (1u << 18)
cudaError_t cuda_sample(const struct cuda_queue *queue, const struct backend_sample *rows, uint32_t n_rows,
                        uint32_t n_vocab, void *scratch);
/* Of scratch, any 8-byte aligned device memory. */
size_t cuda_sample_bytes(uint32_t n_rows);

#ifdef __cplusplus
}
#endif
