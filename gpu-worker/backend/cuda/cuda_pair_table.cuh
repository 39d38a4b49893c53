/* cuda_pair_table.cuh - the table of a head in a pair codec (struct pair_table of codec_pair.h) as it lies on the device. */
#pragma once

#include <stdint.h>

#include "gpu-worker/keys/codec_pair.h"

struct cuda_pair_table {
    uint32_t head_dim, n_groups, n_coordinates;
    bool is_klt, dense;
    const uint16_t *dimension;
    const float *analysis, *synthesis, *inverse_spread, *along, *direction;
    const struct pair_group *groups;
    const float *codewords, *half_squares;
};
