/* cuda_key_ops.h - what backend_device.h says of old keys: quantizing sealed blocks, selecting old tokens. */
#pragma once

#include "gpu-worker/backend/backend_device.h"

/* cuda_key_quantize.c */
void cuda_key_quantize(struct backend *backend, const struct key_quantizer *quantizer, enum kernels_rows codec,
                       const struct key_cache_tile *tiles, uint32_t n_tiles);
/* cuda_key_select.c */
void cuda_key_select(struct backend *backend, const struct backend_select *items, uint32_t n_items, uint32_t group,
                     uint32_t head_dim, enum kernels_rows codec, float scale);
