/*
 * test_codec.c - key codecs against their definition in double precision: rotation, mean, nearest levels, scales, scores,
 * distortion, and what becomes of extreme and broken keys.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/keys/fixture.h"

#define MAX_KEYS (64u * KERNELS_MAX_HEAD_DIM)

static float keys[MAX_KEYS];
static double decoded[MAX_KEYS];
static double matrix[KERNELS_MAX_HEAD_DIM * KERNELS_MAX_HEAD_DIM];
static _Alignas(64) uint8_t tile[FIXTURE_MAX_TILE];
static _Alignas(64) uint8_t other[FIXTURE_MAX_TILE];

static const struct kernels *plain(void)
{
    return kernels_get(KERNELS_ISA_PLAIN);
}

static float quantize(uint32_t bits, uint32_t head_dim)
{
    float side = NAN;
    fixture_rot(bits)->quantize(plain(), fixture_head(head_dim), keys, tile, &side);
    return side;
}

/* Keys as a model has them after RoPE: a mean that outweighs the differences, a few dimensions that outweigh the others. */
static void fill_like_a_model(uint32_t head_dim, double mean_size, double large)
{
    double mean[KERNELS_MAX_HEAD_DIM], spread[KERNELS_MAX_HEAD_DIM];
    for (uint32_t i = 0; i < head_dim; i++) {
        mean[i] = mean_size * fixture_normal();
        spread[i] = i % 16 == 3 ? large : 0.5;
    }
    for (uint32_t j = 0; j < 64; j++)
        for (uint32_t i = 0; i < head_dim; i++)
            keys[j * head_dim + i] = (float)(mean[i] + spread[i] * fixture_normal());
}

static void test_find(void **unused)
{
    (void)unused;
    assert_null(key_codec_find(POLICY_CODEC_NONE));
    assert_string_equal(key_codec_find(POLICY_CODEC_F16)->name, "f16");
    assert_string_equal(key_codec_find(POLICY_CODEC_ROT4)->name, "rot4");
    assert_string_equal(key_codec_find(POLICY_CODEC_ROT3)->name, "rot3");
    assert_string_equal(key_codec_find(POLICY_CODEC_ROT2)->name, "rot2");
}

static void test_sizes(void **unused)
{
    (void)unused;
    assert_int_equal(fixture_rot(2)->tile_bytes(fixture_head(64)), 1024 + 64 + 64);
    assert_int_equal(fixture_rot(3)->tile_bytes(fixture_head(64)), 1536 + 64 + 64);
    assert_int_equal(fixture_rot(4)->tile_bytes(fixture_head(64)), 2048 + 64 + 64);
    assert_int_equal(fixture_rot(2)->tile_bytes(fixture_head(80)), 5 * 256 + 64 + 128);
    for (const uint32_t *d = fixture_head_dims; *d; d++)
        for (uint32_t bits = 2; bits <= 4; bits++)
            assert_int_equal(fixture_rot(bits)->tile_bytes(fixture_head(*d)) % 64, 0);
    /* the default's share of f16 K and V */
    assert_true(fabs((1152 + 4) / (64 * 64 * 2 * 2.0) - 0.0706) < 0.0001);
}

/* Signs and Hadamard, by the definition of the latter: (-1)^(number of common ones). */
static void test_rotation(void **unused)
{
    (void)unused;
    for (const uint32_t *d = fixture_head_dims; *d; d++) {
        const uint32_t n = *d;
        uint32_t size = 1, n_negative = 0;
        while (n % (2 * size) == 0)
            size *= 2;
        fixture_rotation(n, matrix);
        for (uint32_t column = 0; column < n; column++) {
            const double sign =
                matrix[column / size * size * n + column] > 0 ? 1 : -1; /* Hadamard's first row is ones */
            n_negative += sign < 0;
            for (uint32_t row = 0; row < n; row++) {
                const double one = __builtin_popcount(row % size & column % size) % 2 ? -1 : 1;
                const double expected = row / size == column / size ? sign * one / sqrt(size) : 0;
                assert_true(fabs(matrix[row * n + column] - expected) < 1e-6);
            }
        }
        if (n >= 64)
            assert_true(n_negative > n / 3 && n_negative < n - n / 3);
    }
}

static void check_tile(uint32_t bits, uint32_t n, float side)
{
    double largest = 0, mean[KERNELS_MAX_HEAD_DIM], residual[KERNELS_MAX_HEAD_DIM], z[KERNELS_MAX_HEAD_DIM];
    fixture_rotation(n, matrix);
    for (uint32_t i = 0; i < n; i++) {
        mean[i] = 0;
        for (uint32_t j = 0; j < 64; j++)
            mean[i] += (double)keys[j * n + i] / 64;
        largest = fmax(largest, fabs(mean[i]));
    }
    assert_true(fabs(side - largest / 127) <= 1e-5 * side);
    for (uint32_t i = 0; i < n; i++)
        assert_true(fabs(fixture_mean(bits, n, tile, side, i) - mean[i]) <= 0.5001 * (double)side);
    for (uint32_t j = 0; j < 64; j++) {
        double norm = 0, zz = 0, cz = 0;
        for (uint32_t i = 0; i < n; i++)
            residual[i] = (double)keys[j * n + i] - fixture_mean(bits, n, tile, side, i);
        for (uint32_t row = 0; row < n; row++) {
            z[row] = 0;
            for (uint32_t i = 0; i < n; i++)
                z[row] += matrix[row * n + i] * residual[i];
            norm += z[row] * z[row] / n;
        }
        norm = sqrt(norm);
        for (uint32_t row = 0; row < n; row++) {
            z[row] /= norm;
            const double level = fixture_level(bits, fixture_code(bits, n, tile, j, row));
            for (uint32_t code = 0; code < 1u << bits; code++) /* none is nearer */
                assert_true(fabs(z[row] - level) <= fabs(z[row] - fixture_level(bits, code)) + 1e-4);
            zz += z[row] * z[row];
            cz += z[row] * level;
        }
        const double scale = fixture_scale(bits, n, tile, j);
        assert_true(fabs(log2(scale / (norm * zz / cz))) <= 1.0 / 16 + 1e-4);
    }
}

static void test_quantize_is_the_definition(void **unused)
{
    (void)unused;
    for (const uint32_t *d = fixture_head_dims; *d; d++)
        for (uint32_t bits = 2; bits <= 4; bits++) {
            fixture_seed(*d * 8 + bits);
            fill_like_a_model(*d, 2.0, 5.0);
            check_tile(bits, *d, quantize(bits, *d));
            fixture_normals(keys, 64 * *d, 0.01);
            check_tile(bits, *d, quantize(bits, *d));
            fixture_normals(keys, 64 * *d, 9000);
            check_tile(bits, *d, quantize(bits, *d));
        }
}

/* Scores against q . k^ in double: the query's 8 bits are the only difference beyond rounding. */
static void test_scores_are_products_with_decoded_keys(void **unused)
{
    (void)unused;
    static float q[4 * KERNELS_MAX_HEAD_DIM], scores[4 * 64];
    for (const uint32_t *d = fixture_head_dims; *d; d++)
        for (uint32_t bits = 2; bits <= 4; bits++) {
            const uint32_t n = *d;
            const struct key_codec *codec = fixture_rot(bits);
            fixture_seed(n + bits);
            fill_like_a_model(n, 2.0, 5.0);
            const float side = quantize(bits, n), scale = 0.125f;
            fixture_decode(bits, n, tile, side, decoded);
            fixture_rotation(n, matrix);
            fixture_normals(q, 4 * n, 3.0);
            void *query = aligned_alloc(64, (codec->query_bytes(fixture_head(n), 4) + 63) / 64 * 64);
            codec->prepare(plain(), fixture_head(n), q, 4, scale, query);
            codec->score(plain(), fixture_head(n), query, 4, tile, &side, 1, scores, 64);
            free(query);
            for (uint32_t k = 0; k < 4; k++) {
                double rotated[KERNELS_MAX_HEAD_DIM], largest = 0;
                for (uint32_t row = 0; row < n; row++) {
                    rotated[row] = 0;
                    for (uint32_t i = 0; i < n; i++)
                        rotated[row] += matrix[row * n + i] * q[k * n + i];
                    largest = fmax(largest, fabs(rotated[row]));
                }
                for (uint32_t j = 0; j < 64; j++) {
                    double exact = 0, size = 0, in_8_bits = 0, half_steps = 0;
                    const double a = fixture_scale(bits, n, tile, j);
                    for (uint32_t i = 0; i < n; i++) {
                        const double level = fixture_level(bits, fixture_code(bits, n, tile, j, i));
                        exact += q[k * n + i] * decoded[j * n + i];
                        size += fabs(q[k * n + i] * decoded[j * n + i]);
                        in_8_bits += (double)q[k * n + i] * fixture_mean(bits, n, tile, side, i);
                        in_8_bits += a * level * largest / 127 * rint(rotated[i] * 127 / largest);
                        half_steps += a * fabs(level) * largest / 127 / 2;
                    }
                    const double score = (double)scores[k * 64 + j] / (double)scale;
                    assert_true(fabs(score - exact) <= half_steps * 1.001 + 1e-5 * size);
                    /* a tie of the query's rounding may go the other way here: none of these seeds has more than one */
                    assert_true(fabs(score - in_8_bits) <= 1e-5 * (size + half_steps) + 2.001 * half_steps / n * 2);
                }
            }
        }
}

/* <k, k^> = |k|^2 of the distance to the mean, but for the 8 bits of the scale. */
static void test_scale_keeps_the_product(void **unused)
{
    (void)unused;
    const uint32_t n = 64;
    for (uint32_t bits = 2; bits <= 4; bits++) {
        fixture_seed(bits);
        fill_like_a_model(n, 2.0, 5.0);
        const float side = quantize(bits, n);
        fixture_decode(bits, n, tile, side, decoded);
        for (uint32_t j = 0; j < 64; j++) {
            double product = 0, square = 0;
            for (uint32_t i = 0; i < n; i++) {
                const double m = fixture_mean(bits, n, tile, side, i), r = (double)keys[j * n + i] - m;
                product += r * (decoded[j * n + i] - m);
                square += r * r;
            }
            assert_true(fabs(log2(product / square)) <= 1.0 / 16 + 1e-4);
        }
    }
}

/* Mean squared error of N(0, 1) to the nearest level, at the unit the codec uses, by integration. */
static double distortion(uint32_t bits)
{
    double sum = 0, weight = 0;
    for (double x = -9; x < 9; x += 1e-4) {
        double nearest = INFINITY;
        for (uint32_t code = 0; code < 1u << bits; code++)
            nearest = fmin(nearest, fabs(x - fixture_level(bits, code)));
        sum += nearest * nearest * exp(-x * x / 2);
        weight += exp(-x * x / 2);
    }
    return sum / weight;
}

static const double ideal[5] = {[2] = 0.1175, [3] = 0.03454, [4] = 0.009497};

/* Small integers cost next to nothing: 0.117724, 0.034589 and 0.009586. */
static void test_levels(void **unused)
{
    (void)unused;
    static const double more[5] = {[2] = 1.0025, [3] = 1.002, [4] = 1.01};
    for (uint32_t bits = 2; bits <= 4; bits++) {
        const double d = distortion(bits);
        assert_true(d < ideal[bits] * more[bits] && d > ideal[bits] * 0.999);
        const struct rot_format *format = &codec_rot_formats[bits];
        for (uint32_t code = 0; code < 1u << bits; code++) /* symmetric, growing */
            assert_int_equal(format->levels[code] + format->levels[(1u << bits) - 1 - code], format->top);
        for (uint32_t code = 1; code < 1u << bits; code++)
            assert_true(format->levels[code] > format->levels[code - 1]);
    }
}

/* |k - k^|^2 / |k - mean|^2 over some blocks. */
static double relative_error(uint32_t bits, uint32_t n, double mean_size, double large)
{
    double error = 0, size = 0;
    for (int round = 0; round < 16; round++) {
        fill_like_a_model(n, mean_size, large);
        const float side = quantize(bits, n);
        fixture_decode(bits, n, tile, side, decoded);
        for (uint32_t i = 0; i < n; i++) {
            double mean = 0;
            for (uint32_t j = 0; j < 64; j++)
                mean += (double)keys[j * n + i] / 64;
            for (uint32_t j = 0; j < 64; j++) {
                error += pow((double)keys[j * n + i] - decoded[j * n + i], 2);
                size += pow((double)keys[j * n + i] - mean, 2);
            }
        }
    }
    return error / size;
}

/*
 * D / (1 - D) by the scale that keeps products, and 0.00063 for its 8 bits, when keys are normal. A mean that outweighs the
 * differences costs nothing (the error of its 8 bits is part of what the codes say), and large dimensions rather help: a few
 * of them make rotated components that are less spread than normal ones.
 */
static void test_keys_like_a_models(void **unused)
{
    (void)unused;
    for (uint32_t bits = 2; bits <= 4; bits++) {
        const double expected = ideal[bits] / (1 - ideal[bits]) + 0.00063;
        fixture_seed(77 + bits);
        const double normal = relative_error(bits, 256, 0, 0.5), small = relative_error(bits, 64, 0, 0.5);
        assert_true(fabs(normal / expected - 1) < 0.05);
        assert_true(fabs(small / expected - 1) < 0.08);
        static const uint32_t head_dims[] = {64, 80, 128};
        for (int i = 0; i < 3; i++)
            for (double mean = 0; mean <= 8; mean += 4) {
                const double error = relative_error(bits, head_dims[i], mean, 5.0);
                assert_true(error > 0.6 * expected && error < 1.03 * expected);
            }
    }
}

/* All scores of a query of ones are finite; returns the largest difference to `value`. */
static double furthest_score(uint32_t bits, uint32_t n, float side, double value)
{
    static float q[KERNELS_MAX_HEAD_DIM], scores[64];
    static _Alignas(64) uint8_t query[4096];
    const struct key_codec *codec = fixture_rot(bits);
    for (uint32_t i = 0; i < n; i++)
        q[i] = 1;
    assert_true(codec->query_bytes(fixture_head(n), 1) <= sizeof query);
    codec->prepare(plain(), fixture_head(n), q, 1, 1.0f, query);
    codec->score(plain(), fixture_head(n), query, 1, tile, &side, 1, scores, 64);
    double furthest = 0;
    for (uint32_t j = 0; j < 64; j++) {
        assert_true(isfinite(scores[j]));
        furthest = fmax(furthest, fabs((double)scores[j] - value));
    }
    return furthest;
}

static void test_extreme_keys(void **unused)
{
    (void)unused;
    for (const uint32_t *d = fixture_head_dims; *d; d++)
        for (uint32_t bits = 2; bits <= 4; bits++) {
            const uint32_t n = *d;
            fixture_seed(n);
            memset(keys, 0, sizeof keys);
            float side = quantize(bits, n);
            assert_true(side == 0);
            assert_true(furthest_score(bits, n, side, 0) == 0);
            for (uint32_t i = 0; i < 64 * n; i++) /* all keys equal: the mean says it all */
                keys[i] = 3.0f;
            side = quantize(bits, n);
            assert_true(furthest_score(bits, n, side, 3.0 * n) <= 1e-5 * n);
            for (uint32_t i = 0; i < 64 * n; i++) /* the smallest half */
                keys[i] = i % 3 == 0 ? 0x1p-24f : 0;
            assert_true(furthest_score(bits, n, quantize(bits, n), 0) < 1e-3);
            for (uint32_t i = 0; i < 64 * n; i++)
                keys[i] = fixture_uniform() > 0 ? 65504.0f : -65504.0f;
            side = quantize(bits, n);
            assert_true(furthest_score(bits, n, side, 0) < 4.0 * 65504 * n);
            for (uint32_t j = 0; j < 64; j++) {
                const double a = fixture_scale(bits, n, tile, j);
                assert_true(a > 8192 && a <= 65536);
            }
        }
}

/* NaN is 0, infinity the largest half, denormals nothing: the same bytes as those keys give, flushed or not. */
static void test_broken_keys(void **unused)
{
    (void)unused;
    const uint32_t n = 64;
    for (uint32_t bits = 2; bits <= 4; bits++)
        for (int round = 0; round < 3; round++) {
            float side, other_side = -1;
            fixture_seed((uint64_t)round);
            fixture_normals(keys, 64 * n, round == 2 ? 1e-39 : 1.0);
            if (round < 2)
                for (uint32_t i = 0; i < 64 * n; i++) {
                    const double u = fixture_uniform();
                    keys[i] = round == 0 || u > 0.9 ? (u > 0.3 ? NAN : u > 0 ? INFINITY : -INFINITY) : keys[i];
                }
            side = quantize(bits, n);
            assert_true(furthest_score(bits, n, side, 0) < 1e9);
            memcpy(other, tile, sizeof other);
            for (uint32_t i = 0; i < 64 * n; i++)
                keys[i] = isnan(keys[i]) ? 0 : isinf(keys[i]) ? copysignf(65504, keys[i]) : round == 2 ? 0 : keys[i];
            other_side = quantize(bits, n);
            assert_memory_equal(tile, other, fixture_rot(bits)->tile_bytes(fixture_head(n)));
            assert_memory_equal(&side, &other_side, sizeof side);
        }
}

static void test_broken_queries(void **unused)
{
    (void)unused;
    static const float wrong[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 1e-40f, 0.0f};
    static _Alignas(64) uint8_t query[4096];
    float q[64], scores[64];
    fixture_seed(5);
    fixture_normals(keys, 64 * 64, 65504);
    for (uint32_t bits = 2; bits <= 4; bits++) {
        const float side = quantize(bits, 64);
        for (size_t w = 0; w < sizeof wrong / sizeof *wrong; w++) {
            fixture_normals(q, 64, 1.0);
            for (uint32_t i = 0; i < 64; i += w % 2 ? 1 : 7)
                q[i] = wrong[w];
            fixture_rot(bits)->prepare(plain(), fixture_head(64), q, 1, 0.125f, query);
            fixture_rot(bits)->score(plain(), fixture_head(64), query, 1, tile, &side, 1, scores, 64);
            for (uint32_t j = 0; j < 64; j++)
                assert_true(isfinite(scores[j]));
        }
    }
}

static void test_f16(void **unused)
{
    (void)unused;
    const struct key_codec *codec = key_codec_find(POLICY_CODEC_F16);
    for (const uint32_t *d = fixture_head_dims; *d; d++) {
        const uint32_t n = *d;
        static float q[3 * KERNELS_MAX_HEAD_DIM], scores[3 * 64], alone[64];
        static _Alignas(64) uint8_t query[3 * KERNELS_MAX_HEAD_DIM * 4 + 256];
        float side = NAN;
        assert_int_equal(codec->tile_bytes(fixture_head(n)), 64 * n * 2);
        fixture_seed(n);
        fixture_normals(keys, 64 * n, 1.0);
        fixture_normals(q, 3 * n, 1.0);
        keys[1] = NAN;
        codec->quantize(plain(), fixture_head(n), keys, tile, &side);
        keys[1] = 0;
        plain()->f16_encode(keys, 64 * n, (uint16_t *)(void *)other);
        assert_memory_equal(tile, other, 64 * n * 2);
        assert_true(codec->query_bytes(fixture_head(n), 3) <= sizeof query);
        codec->prepare(plain(), fixture_head(n), q, 3, 0.125f, query);
        codec->score(plain(), fixture_head(n), query, 3, tile, &side, 1, scores, 64);
        for (uint32_t k = 0; k < 3; k++) {
            codec->prepare(plain(), fixture_head(n), q + k * n, 1, 0.125f, query);
            codec->score(plain(), fixture_head(n), query, 1, tile, &side, 1, alone, 64);
            assert_memory_equal(alone, scores + k * 64, sizeof alone);
            for (uint32_t j = 0; j < 64; j++) {
                double exact = 0, size = 0;
                for (uint32_t i = 0; i < n; i++) {
                    exact += 0.125 * q[k * n + i] * keys[j * n + i];
                    size += 0.125 * fabs(q[k * n + i] * keys[j * n + i]);
                }
                assert_true(fabs((double)alone[j] - exact) <= size * 0x1p-10);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_find),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_rotation),
        cmocka_unit_test(test_quantize_is_the_definition),
        cmocka_unit_test(test_scores_are_products_with_decoded_keys),
        cmocka_unit_test(test_scale_keeps_the_product),
        cmocka_unit_test(test_levels),
        cmocka_unit_test(test_keys_like_a_models),
        cmocka_unit_test(test_extreme_keys),
        cmocka_unit_test(test_broken_keys),
        cmocka_unit_test(test_broken_queries),
        cmocka_unit_test(test_f16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
