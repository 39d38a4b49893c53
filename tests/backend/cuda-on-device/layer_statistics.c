/* layer_statistics.c - see layer.h: second moments as the keys and queries were made, and some keys less their block's mean. */
#include <errno.h>
#include <string.h>

#include "tests/backend/cuda-on-device/layer.h"

#define N_SAMPLES 512u

static void take_samples(const struct layer_rows *rows, struct key_statistics *statistics, uint32_t kv_head)
{
    const struct key_statistics_head head = key_statistics_head(statistics, 0, kv_head);
    static float keys[LAYER_TOKENS * LAYER_DIM];
    double squares[LAYER_DIM] = {0};
    for (uint32_t s = 0; s < N_SAMPLES; s++) {
        const uint32_t block = s % rows->size.n_distinct, token = s * 37 % LAYER_TOKENS;
        float rest[LAYER_DIM];
        rows->kernels->decode_keys(layer_rows_of(rows, block, kv_head), LAYER_TOKENS, LAYER_DIM, KERNELS_ROWS_F16,
                                   keys);
        for (uint32_t i = 0; i < LAYER_DIM; i++) {
            float sum = 0;
            for (uint32_t t = 0; t < LAYER_TOKENS; t++)
                sum += keys[t * LAYER_DIM + i];
            rest[i] = keys[token * LAYER_DIM + i] - sum / LAYER_TOKENS;
            squares[i] += (double)(rest[i] * rest[i]);
        }
        rows->kernels->f16_encode(rest, LAYER_DIM,
                                  key_statistics_samples(statistics, 0, kv_head) + (size_t)s * LAYER_DIM);
    }
    for (uint32_t i = 0; i < LAYER_DIM; i++)
        head.k_spread[i * LAYER_DIM + i] = (float)(squares[i] / N_SAMPLES);
}

int layer_statistics(const struct layer_rows *rows, struct key_statistics **ret_statistics)
{
    const struct row_shape shape = {1, LAYER_N_KV_HEADS, LAYER_DIM, ROW_CODEC_F16};
    const uint8_t hash[16] = {0};
    struct key_statistics *statistics;
    int r = key_statistics_new(&shape, hash, &statistics);
    if (r < 0)
        return r;
    r = key_statistics_make_samples(statistics, N_SAMPLES);
    if (r < 0) {
        key_statistics_free(statistics);
        return r;
    }
    statistics->n_tokens = N_SAMPLES;
    for (uint32_t head = 0; head < LAYER_N_KV_HEADS; head++) {
        const struct key_statistics_head of = key_statistics_head(statistics, 0, head);
        for (uint32_t i = 0; i < LAYER_DIM; i++) /* queries point anywhere, all dimensions alike */
            of.q_square[i * LAYER_DIM + i] = 1;
        take_samples(rows, statistics, head);
    }
    *ret_statistics = statistics;
    return 0;
}
