/* fixture_pair.h - what a tile of the pair codecs says, in double precision and number by number. */
#pragma once

#include "gpu-worker/keys/codec_pair.h"

uint32_t fixture_pair_code(const uint8_t *tile, uint32_t group, uint32_t key);
/* what comes after the groups */
const uint8_t *fixture_pair_tail(const struct pair_table *table, const uint8_t *tile);
double fixture_pair_scale(const struct pair_table *table, const uint8_t *tile, uint32_t key);
/* of t, from a side */
double fixture_pair_along_step(float side);
/* [head_dim], in steps */
const int8_t *fixture_pair_means(const struct pair_table *table, const uint8_t *tile);
double fixture_pair_mean(const struct pair_table *table, const uint8_t *tile, float side, uint32_t i);
double fixture_pair_along(const struct pair_table *table, const uint8_t *tile, float side, uint32_t key);
/* coordinate c of a residual [head_dim] */
double fixture_pair_coordinate(const struct pair_table *table, const double *r, uint32_t c);
/* what one of coordinate c is in dimension i */
double fixture_pair_synthesis(const struct pair_table *table, uint32_t i, uint32_t c);
/* B' codewords, without a, [head_dim] */
void fixture_pair_codewords(const struct pair_table *table, const uint8_t *tile, uint32_t key, double *sum);
/* k^ [64][head_dim] */
void fixture_pair_decode(const struct pair_table *table, const uint8_t *tile, float side, double *decoded);
