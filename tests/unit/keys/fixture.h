/* fixture.h - what the tests of key codecs share: random numbers, head_dims, tables, and a slow decoder of tiles. */
#pragma once

#include "gpu-worker/keys/codec_rot.h"

#define FIXTURE_MAX_TILE (64u * KERNELS_MAX_HEAD_DIM * 2u)

extern const struct rot_kernels halves_rot; /* needs AVX2 */

extern const uint32_t fixture_head_dims[]; /* ends with 0 */

struct fixture_table {
    const char *name;
    const struct rot_kernels *rot;
};
/* Those that this machine can run, plain first; ends with a NULL name. */
const struct fixture_table *fixture_tables(void);
const struct key_codec *fixture_rot(uint32_t bits);
const struct key_head *fixture_head(uint32_t head_dim); /* without a table */
/* All heads alike; for a few pools. Valid until the next call. */
const struct key_quantizer *fixture_quantizer(const struct key_codec *codec, uint32_t n_layers, uint32_t n_kv_heads,
                                              uint32_t head_dim);

void fixture_seed(uint64_t seed);
double fixture_uniform(void); /* -1 .. 1 */
double fixture_normal(void);
void fixture_normals(float *x, size_t n, double size);

/* The rotation as a matrix [head_dim][head_dim]. */
void fixture_rotation(uint32_t head_dim, double *matrix);
/* What the tile says of key j: scale (0 or 2^((code - 128) / 8)), and levels [head_dim] in units of N(0, 1). */
uint32_t fixture_code(uint32_t bits, uint32_t head_dim, const void *tile, uint32_t key, uint32_t i);
double fixture_level(uint32_t bits, uint32_t code);
double fixture_scale(uint32_t bits, uint32_t head_dim, const void *tile, uint32_t key);
double fixture_mean(uint32_t bits, uint32_t head_dim, const void *tile, float side, uint32_t i);
/* k^ [64][head_dim] */
void fixture_decode(uint32_t bits, uint32_t head_dim, const void *tile, float side, double *keys);
