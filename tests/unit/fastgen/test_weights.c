/* test_weights.c - attention weights and outputs of whole rows against doubles, for every instruction set and both codecs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/fastgen/fastgen_weights.h"

enum { N_TOKENS = 400, GROUP = 3, BLOCK = 64 };

struct head {
    uint32_t head_dim;
    enum kernels_rows codec;
    size_t row_bytes;
    uint8_t *rows;
    float *keys, *values; /* [N_TOKENS][head_dim], as the rows have them */
    float *q;             /* [N_TOKENS][GROUP][head_dim] */
    uint32_t missing;     /* block */
};

static float uniform(void)
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (float)(state >> 40) * 0x1p-23f - 1.0f;
}

static const void *block_of(void *context, uint32_t block)
{
    const struct head *head = context;
    assert_true(block <= (N_TOKENS - 1) / BLOCK);
    return block == head->missing ? NULL : head->rows + block * BLOCK * head->row_bytes;
}

/* Number i of a row, [K | V]. */
static float number_of(const struct head *head, uint32_t token, uint32_t i)
{
    const struct kernels *plain = kernels_get(KERNELS_ISA_PLAIN);
    const uint8_t *row = head->rows + token * head->row_bytes;
    uint32_t d = head->head_dim, groups = (d + 31) / 32;
    uint16_t bits;
    float number;
    if (head->codec == KERNELS_ROWS_F16) {
        memcpy(&bits, row + 2 * (size_t)i, 2);
        plain->f16_decode(&bits, 1, &number);
        return number;
    }
    memcpy(&bits, row + 2 * (size_t)d + 2 * (i < d ? i / 32 : groups + (i - d) / 32), 2);
    plain->f16_decode(&bits, 1, &number);
    return number * (float)(int8_t)row[i];
}

static void head_init(struct head *head, uint32_t head_dim, enum kernels_rows codec)
{
    *head = (struct head){.head_dim = head_dim, .codec = codec, .missing = UINT32_MAX};
    head->row_bytes = kernels_row_bytes(head_dim, codec);
    head->rows = calloc((N_TOKENS / BLOCK + 1) * BLOCK, head->row_bytes);
    head->keys = calloc(N_TOKENS, head_dim * sizeof(float));
    head->values = calloc(N_TOKENS, head_dim * sizeof(float));
    head->q = calloc(N_TOKENS, GROUP * head_dim * sizeof(float));
    assert_true(head->rows && head->keys && head->values && head->q);
    for (uint32_t i = 0; i < N_TOKENS * head_dim; i++) {
        head->keys[i] = 2 * uniform();
        head->values[i] = uniform();
    }
    for (uint32_t i = 0; i < N_TOKENS * GROUP * head_dim; i++)
        head->q[i] = 3 * uniform();
    for (uint32_t t = 0; t < N_TOKENS; t++)
        kernels_get(KERNELS_ISA_PLAIN)
            ->encode_row(head->keys + t * head_dim, head->values + t * head_dim, head_dim, codec,
                         head->rows + t * head->row_bytes);
    for (uint32_t t = 0; t < N_TOKENS; t++)
        for (uint32_t d = 0; d < head_dim; d++) {
            head->keys[t * head_dim + d] = number_of(head, t, d);
            head->values[t * head_dim + d] = number_of(head, t, head_dim + d);
        }
    /* what lies behind the last token of its block is nobody's: it must not be read */
    memset(head->rows + N_TOKENS * head->row_bytes, 0x7f, (BLOCK - N_TOKENS % BLOCK) * head->row_bytes);
}

static void head_fini(struct head *head)
{
    free(head->rows);
    free(head->keys);
    free(head->values);
    free(head->q);
}

/* weights [position + 1] and out [GROUP][head_dim], in doubles. */
static void naive(const struct head *head, uint32_t position, double *weights, double *out)
{
    uint32_t d = head->head_dim;
    memset(weights, 0, N_TOKENS * sizeof *weights);
    memset(out, 0, GROUP * d * sizeof *out);
    for (uint32_t g = 0; g < GROUP; g++) {
        double scores[N_TOKENS], sum = 0;
        for (uint32_t j = 0; j <= position; j++) {
            double dot = 0;
            for (uint32_t k = 0; k < d; k++)
                dot += (double)head->q[(position * GROUP + g) * d + k] * (double)head->keys[j * d + k];
            scores[j] = exp(dot / sqrt(d));
            sum += scores[j];
        }
        for (uint32_t j = 0; j <= position; j++) {
            weights[j] += scores[j] / sum / GROUP;
            for (uint32_t k = 0; k < d; k++)
                out[g * d + k] += scores[j] / sum * (double)head->values[j * d + k];
        }
    }
}

struct result {
    size_t stride;
    float weights[FASTGEN_WEIGHTS_POSITIONS][N_TOKENS + BLOCK];
    float out[FASTGEN_WEIGHTS_POSITIONS][GROUP * KERNELS_MAX_HEAD_DIM];
};

static int run(const struct kernels *kernels, struct head *head, const uint32_t *positions, uint32_t n, bool with_out,
               struct result *result)
{
    const float *q[FASTGEN_WEIGHTS_POSITIONS];
    float *out[FASTGEN_WEIGHTS_POSITIONS];
    uint32_t last = 0;
    for (uint32_t i = 0; i < n; i++) {
        q[i] = head->q + (size_t)positions[i] * GROUP * head->head_dim;
        out[i] = result->out[i];
        last = positions[i] > last ? positions[i] : last;
    }
    struct fastgen_rows rows = {
        .kernels = kernels,
        .head_dim = head->head_dim,
        .group = GROUP,
        .codec = head->codec,
        .scale = 1.0f / sqrtf((float)head->head_dim),
        .n_positions = n,
        .positions = positions,
        .q = q,
        .block = block_of,
        .context = head,
    };
    /* exactly as much as is asked for, so that a sanitizer sees one byte too many */
    void *scratch = malloc(fastgen_weights_scratch_bytes(n, last, GROUP, head->head_dim));
    assert_non_null(scratch);
    memset(scratch, 0xff, fastgen_weights_scratch_bytes(n, last, GROUP, head->head_dim));
    memset(result, 0xff, sizeof *result);
    result->stride = N_TOKENS + BLOCK;
    int r = fastgen_weights(&rows, scratch, result->weights[0], result->stride, with_out ? out : NULL);
    free(scratch);
    return r;
}

static void check(const struct head *head, const uint32_t *positions, uint32_t n, const struct result *result)
{
    double weights[N_TOKENS], *out = malloc(GROUP * head->head_dim * sizeof *out);
    /* keys of q8_0 are rounded to 11 bits: a score of 8 by 0.004 at most */
    double bound = head->codec == KERNELS_ROWS_F16 ? 2e-5 : 2e-3, largest = 0;
    assert_non_null(out);
    for (uint32_t i = 0; i < n; i++) {
        naive(head, positions[i], weights, out);
        for (uint32_t j = 0; j <= positions[i]; j++) {
            if (!(fabs((double)result->weights[i][j] - weights[j]) <= bound * weights[j]))
                fail_msg("weight of %u at %u: %g, expected %g", j, positions[i], (double)result->weights[i][j],
                         weights[j]);
            largest = fmax(largest, weights[j]);
        }
        for (uint32_t j = positions[i] + 1; j < (positions[i] / BLOCK + 1) * BLOCK; j++)
            assert_true(result->weights[i][j] == 0);
        for (uint32_t k = 0; k < GROUP * head->head_dim; k++)
            if (!(fabs((double)result->out[i][k] - out[k]) <= bound))
                fail_msg("out %u at %u: %g, expected %g", k, positions[i], (double)result->out[i][k], out[k]);
    }
    assert_true(largest > 0.01);
    free(out);
}

static void test_weights(void **state)
{
    (void)state;
    static const uint32_t positions[] = {0, 1, 62, 63, 64, 127, 200, N_TOKENS - 1}, dims[] = {64, 20, 256};
    struct result *result = malloc(sizeof *result), *alone = malloc(sizeof *alone);
    assert_true(result && alone);
    for (uint32_t c = 0; c < 6; c++) {
        struct head head;
        head_init(&head, dims[c / 2], c % 2 ? KERNELS_ROWS_Q8_0 : KERNELS_ROWS_F16);
        for (int isa = KERNELS_ISA_PLAIN; isa < KERNELS_N_ISA; isa++) {
            const struct kernels *kernels = kernels_get((enum kernels_isa)isa);
            if (kernels == NULL)
                continue;
            assert_int_equal(run(kernels, &head, positions, 8, true, result), 0);
            check(&head, positions, 8, result);
            for (uint32_t i = 0; i < 8; i++) { /* the same bits without company, and without an output */
                size_t n_bytes = (positions[i] / BLOCK + 1) * BLOCK * sizeof(float);
                assert_int_equal(run(kernels, &head, positions + i, 1, i % 2, alone), 0);
                assert_memory_equal(alone->weights[0], result->weights[i], n_bytes);
                if (i % 2)
                    assert_memory_equal(alone->out[0], result->out[i], GROUP * head.head_dim * sizeof(float));
            }
        }
        head_fini(&head);
    }
    free(result);
    free(alone);
}

/* Rows of a broken model: weights are numbers, none of them negative, and of no more than 1 together. */
static void test_not_finite(void **state)
{
    (void)state;
    static const uint32_t positions[] = {70, 150};
    struct result *result = malloc(sizeof *result);
    struct head head;
    assert_non_null(result);
    head_init(&head, 64, KERNELS_ROWS_F16);
    for (uint32_t t = 0; t < N_TOKENS; t += 3) {
        static const uint16_t bits[] = {0x7e00, 0x7c00, 0xfc00}; /* NaN, infinity */
        memcpy(head.rows + t * head.row_bytes + 2 * (t % 60), &bits[t / 3 % 3], 2);
    }
    for (int isa = KERNELS_ISA_PLAIN; isa < KERNELS_N_ISA; isa++) {
        const struct kernels *kernels = kernels_get((enum kernels_isa)isa);
        if (kernels == NULL)
            continue;
        assert_int_equal(run(kernels, &head, positions, 2, true, result), 0);
        for (uint32_t i = 0; i < 2; i++) {
            double sum = 0;
            for (uint32_t j = 0; j <= positions[i]; j++) {
                assert_true(result->weights[i][j] >= 0);
                sum += (double)result->weights[i][j];
            }
            assert_true(sum <= 1.0001);
        }
    }
    head_fini(&head);
    free(result);
}

static void test_stale(void **state)
{
    (void)state;
    static const uint32_t positions[] = {63, 300};
    struct result *result = malloc(sizeof *result);
    struct head head;
    assert_non_null(result);
    head_init(&head, 64, KERNELS_ROWS_F16);
    for (uint32_t block = 0; block < 6; block++) {
        head.missing = block;
        assert_int_equal(run(kernels_get(KERNELS_ISA_AUTO), &head, positions, 2, true, result),
                         block <= 300 / BLOCK ? -ESTALE : 0);
        assert_int_equal(run(kernels_get(KERNELS_ISA_AUTO), &head, positions, 1, true, result),
                         block == 0 ? -ESTALE : 0);
    }
    head_fini(&head);
    free(result);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_weights),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_stale),
    };
    kernels_thread_setup();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
