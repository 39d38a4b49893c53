/* vector_table.h - a whole table at the width of the file that includes it: VECTOR_TABLE(symbol, isa, name). */
#pragma once

#include "kernels/kernels.h"
#include "kernels/vector_attend.h"
#include "kernels/vector_partial.h"
#include "kernels/vector_rows.h"
#include "kernels/vector_weigh.h"

#define VECTOR_TABLE(symbol, which, its_name)                                                                          \
    const struct kernels symbol = {                                                                                    \
        .isa = which,                                                                                                  \
        .name = its_name,                                                                                              \
        .attend_block = attend_block,                                                                                  \
        .attend_rows = attend_rows,                                                                                    \
        .weigh_rows = weigh_rows,                                                                                      \
        .weigh_mean = weigh_mean,                                                                                      \
        .partial_merge = partial_merge,                                                                                \
        .partial_finish = partial_finish,                                                                              \
        .f16_encode = f16_encode,                                                                                      \
        .f16_decode = f16_decode,                                                                                      \
        .encode_row = encode_row,                                                                                      \
        .decode_keys = decode_keys,                                                                                    \
        .block_sums = block_sums,                                                                                      \
        .score_f16 = score_f16,                                                                                        \
    }
