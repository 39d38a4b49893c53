/*
 * test_pair.c - the pair codecs against their definition in double precision: who gets how many bits, nearest codewords, scales,
 * what is left along the mean query, scores on every instruction set, the error of scores on keys of known spread, and what
 * becomes of broken statistics, keys and queries.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu-worker/keys/key_statistics.h"
#include "tests/unit/keys/fixture.h"
#include "tests/unit/keys/fixture_pair.h"
#include "tests/unit/keys/halves_pair.h"

#define N_TILES     3u
#define MAX_QUERIES 9u
#define STRIDE      (N_TILES * 64 + 8)

/* By "bits": those of pair, and klt1, klt0, klt2. */
enum { PAIR = 3, KLT1, KLT0, KLT2, N_CODECS };
static const enum policy_codec codecs[] = {0,
                                           POLICY_CODEC_PAIR1,
                                           POLICY_CODEC_PAIR2,
                                           POLICY_CODEC_PAIR3,
                                           POLICY_CODEC_KLT1,
                                           POLICY_CODEC_KLT0,
                                           POLICY_CODEC_KLT2};
static float keys[64 * KERNELS_MAX_HEAD_DIM], q[MAX_QUERIES * KERNELS_MAX_HEAD_DIM];
static float sides[N_TILES], expected[MAX_QUERIES * STRIDE], scores[MAX_QUERIES * STRIDE];
static double weights[KERNELS_MAX_HEAD_DIM], spreads[KERNELS_MAX_HEAD_DIM], q_mean[KERNELS_MAX_HEAD_DIM];

static const struct kernels *plain(void)
{
    return kernels_get(KERNELS_ISA_PLAIN);
}

static void *exactly(size_t n_bytes)
{
    void *memory = aligned_alloc(64, (n_bytes + 63) / 64 * 64);
    assert_non_null(memory);
    memset(memory, 0x5a, n_bytes);
    return memory;
}

/* weights, spreads (alike within a pair, over two decades) and mean query -> the head's table */
static struct key_head head_of(uint32_t head_dim, uint32_t bits)
{
    const struct row_shape shape = {1, 1, head_dim, ROW_CODEC_F16};
    const uint8_t hash[16] = {0};
    struct key_statistics *statistics;
    struct pair_table *table = NULL;
    assert_int_equal(key_statistics_new(&shape, hash, &statistics), 0);
    const struct key_statistics_head head = key_statistics_head(statistics, 0, 0);
    for (uint32_t i = 0; i < head_dim; i++) {
        head.q_mean[i] = (float)q_mean[i];
        head.q_square[i * head_dim + i] = (float)weights[i];
        head.k_spread[i * head_dim + i] = (float)spreads[i];
    }
    if (bits > PAIR)
        assert_int_equal(codec_pair_klt_tables(statistics,
                                               (bits == KLT2   ? 18.0
                                                : bits == KLT1 ? 10.0
                                                               : 6.3) *
                                                   head_dim,
                                               &table),
                         0);
    else
        assert_int_equal(codec_pair_table_new(statistics, 0, 0, codec_pair_table_groups(head_dim, bits), &table), 0);
    key_statistics_free(statistics);
    return (struct key_head){head_dim, table};
}

static void free_head(struct key_head head)
{
    free((void *)(uintptr_t)head.table);
}

static void fill_statistics(uint32_t head_dim, double mean_size)
{
    fixture_seed(head_dim);
    for (uint32_t i = 0; i < head_dim; i++) {
        weights[i] = i % 2 ? weights[i - 1] : pow(10, fixture_uniform());
        spreads[i] = i % 2 ? spreads[i - 1] : pow(10, fixture_uniform());
        q_mean[i] = mean_size * sqrt(weights[i]) * fixture_normal();
    }
}

/* Keys and queries of these statistics; the mean of a block is far from 0. Queries: the mean's square is not in the weights. */
static void fill_keys(uint32_t head_dim)
{
    for (uint32_t i = 0; i < head_dim; i++) {
        const double mean = 4 * fixture_normal();
        for (uint32_t j = 0; j < 64; j++)
            keys[j * head_dim + i] = (float)(mean + sqrt(spreads[i]) * fixture_normal());
    }
}
static void fill_queries(uint32_t head_dim)
{
    for (uint32_t k = 0; k < MAX_QUERIES; k++)
        for (uint32_t i = 0; i < head_dim; i++)
            q[k * head_dim + i] = (float)(q_mean[i] + sqrt(weights[i]) * fixture_normal());
}

static void test_sizes(void **unused)
{
    (void)unused;
    static const size_t bytes[] = {0, 640, 1152, 1664, 640, 384, 1152};
    static const double shares[] = {0, 0.0395, 0.071, 0.102, 0.0395, 0.025, 0.071};
    static const char *const names[] = {"", "pair1", "pair2", "pair3", "klt1", "klt0", "klt2"};
    for (uint32_t bits = 1; bits < N_CODECS; bits++) {
        const struct key_codec *codec = key_codec_find(codecs[bits]);
        assert_string_equal(codec->name, names[bits]);
        for (const uint32_t *d = fixture_head_dims; *d; d++) {
            fill_statistics(*d, 1);
            struct key_head head = head_of(*d, bits);
            assert_int_equal(codec->tile_bytes(&head) % 64, 0);
            if (*d == 64) {
                assert_int_equal(codec->tile_bytes(&head), bytes[bits]);
                assert_true((double)(bytes[bits] + sizeof(float)) / (64 * 64 * 4) <= shares[bits]);
            }
            free_head(head);
        }
    }
}

static const double distortion[5] = {1.0, 0.36338, 0.11748, 0.034548, 0.0095007};

/* Bits of coordinate c by counting its different levels. */
static uint32_t bits_of(const struct pair_table *table, const struct pair_group *group, uint32_t i)
{
    uint32_t n_levels = 0;
    for (uint32_t c = 0; c < 16; c++) {
        bool seen = false;
        for (uint32_t other = 0; other < c; other++)
            seen |= table->codewords[group->codewords + c * group->n + i] ==
                    table->codewords[group->codewords + other * group->n + i];
        n_levels += !seen;
    }
    assert_true(n_levels == 2 || n_levels == 4 || n_levels == 8 || n_levels == 16);
    return (uint32_t)__builtin_ctz(n_levels);
}

/* All bits are given, each dimension once, no group holds more than 4, and no better gift was left out (but for what it takes to
 * fill groups). Returns the error of scores that is to be expected: the sum of weight, spread and distortion. */
static double check_bits(const struct pair_table *table)
{
    uint32_t bits[KERNELS_MAX_HEAD_DIM] = {0}, total = 0, seen = 0;
    for (uint32_t g = 0; g < table->layout.n_groups; g++) {
        uint32_t of_group = 0;
        assert_true(table->groups[g].first == seen);
        for (uint32_t i = 0; i < table->groups[g].n; i++, seen++) {
            uint32_t *it = &bits[table->dimension[seen]];
            assert_int_equal(*it, 0);
            *it = bits_of(table, &table->groups[g], i);
            of_group += *it;
        }
        assert_true(of_group == 4 || total == 4 * table->layout.head_dim);
        total += of_group;
    }
    assert_int_equal(seen, table->n_coordinates);
    assert_int_equal(total, table->layout.n_groups < table->layout.head_dim ? 4 * table->layout.n_groups
                                                                            : 4 * table->layout.head_dim);
    double error = 0, least_given = INFINITY, most_left = 0;
    for (uint32_t i = 0; i < table->layout.head_dim; i++) {
        const double square = weights[i] * spreads[i];
        error += square * distortion[bits[i]];
        if (bits[i] > 0)
            least_given = fmin(least_given, square * (distortion[bits[i] - 1] - distortion[bits[i]]));
        if (bits[i] < 4)
            most_left = fmax(most_left, square * (distortion[bits[i]] - distortion[bits[i] + 1]));
    }
    assert_true(least_given >= most_left * 0.2);
    return error;
}

static void test_bits(void **unused)
{
    (void)unused;
    for (const uint32_t *d = fixture_head_dims; *d; d++)
        for (uint32_t bits = 1; bits <= 3; bits++) {
            fill_statistics(*d, 1);
            struct key_head head = head_of(*d, bits);
            check_bits(head.table);
            free_head(head);
        }
}

static void test_quantize_is_the_definition(void **unused)
{
    (void)unused;
    for (const uint32_t *d = fixture_head_dims; *d; d++)
        for (uint32_t bits = 1; bits < N_CODECS; bits++) {
            const uint32_t n = *d;
            fill_statistics(n, 1);
            fill_keys(n);
            const struct key_head head = head_of(n, bits);
            const struct pair_table *table = head.table;
            uint8_t *tile = exactly(key_codec_find(codecs[bits])->tile_bytes(&head));
            float side;
            key_codec_find(codecs[bits])->quantize(plain(), &head, keys, tile, &side);
            double r[KERNELS_MAX_HEAD_DIM], said[KERNELS_MAX_HEAD_DIM], furthest = 0, largest = 0;
            for (uint32_t i = 0; i < n; i++) {
                double mean = 0;
                for (uint32_t j = 0; j < 64; j++)
                    mean += (double)keys[j * n + i] / 64;
                largest = fmax(largest, fabs(mean));
                assert_true(fabs(mean - fixture_pair_mean(table, tile, side, i)) <=
                            0.5002 * (double)pair_mean_step(side) + 1e-6 * largest);
            }
            assert_true(fabs((double)pair_mean_step(side) * 127 / largest - 1) < 1e-4);
            for (uint32_t i = n; i < (n + 63) / 64 * 64; i++)
                assert_int_equal(fixture_pair_means(table, tile)[i], 0);
            for (uint32_t j = 0; j < 64; j++) {
                double size = 0, product = 0, square = 0, left = 0;
                for (uint32_t i = 0; i < n; i++)
                    r[i] = (double)keys[j * n + i] - fixture_pair_mean(table, tile, side, i);
                for (uint32_t c = 0; c < table->n_coordinates; c++)
                    size += pow(fixture_pair_coordinate(table, r, c), 2) * (double)table->inverse_spread[c];
                size = exp2(rint(log2(sqrt(size)) * 8) / 8);
                for (uint32_t g = 0; g < table->layout.n_groups; g++) {
                    const struct pair_group *group = &table->groups[g];
                    double nearest = INFINITY, chosen = 0;
                    for (uint32_t w = 0; w < 16; w++) {
                        double distance = 0;
                        for (uint32_t i = 0; i < group->n; i++) {
                            const uint32_t c = group->first + i;
                            const double y = fixture_pair_coordinate(table, r, c),
                                         codeword = (double)table->codewords[group->codewords + w * group->n + i];
                            distance += pow(y / size - codeword, 2);
                            if (w == fixture_pair_code(tile, g, j)) {
                                product += y * codeword;
                                square += codeword * codeword;
                            }
                        }
                        nearest = fmin(nearest, distance);
                        chosen = w == fixture_pair_code(tile, g, j) ? distance : chosen;
                    }
                    assert_true(chosen <= nearest * 1.0001 + 1e-3 * (nearest > 0));
                }
                const double a = fixture_pair_scale(table, tile, j);
                const double wanted = log2(product / square);
                if (table->layout.is_klt) /* coarser, and not below or beyond its codes */
                    assert_true(fabs(fmin(fmax(wanted, -1.75), 1.75) - log2(a)) <= 1.0 / 8 + 1.0 / 16 + 1e-4);
                else
                    assert_true(fabs(wanted - log2(a)) <= 1.0 / 16 + 1e-4);
                fixture_pair_codewords(table, tile, j, said);
                for (uint32_t i = 0; i < n; i++)
                    left += (double)table->direction[i] * (r[i] - a * said[i]);
                furthest = fmax(furthest, fabs(left));
                assert_true(table->layout.is_klt || fabs(left - fixture_pair_along(table, tile, side, j)) <=
                                                        0.5001 * fixture_pair_along_step(side) + 1e-4);
            }
            if (!table->layout.is_klt)
                assert_true(furthest <= fixture_pair_along_step(side) * 127.6 &&
                            furthest > fixture_pair_along_step(side) * 127 / 1.1);
            free(tile);
            free_head(head);
        }
}

/* Tiles of keys of these statistics, and prepared queries; exactly as large as promised. */
struct case_of {
    struct key_head head;
    const struct key_codec *codec;
    uint8_t *tiles, *query;
    size_t tile_bytes;
};
static struct case_of set_up(uint32_t head_dim, uint32_t bits)
{
    fill_statistics(head_dim, 1);
    struct case_of it = {.head = head_of(head_dim, bits), .codec = key_codec_find(codecs[bits])};
    it.tile_bytes = it.codec->tile_bytes(&it.head);
    it.tiles = exactly(N_TILES * it.tile_bytes);
    it.query = exactly(it.codec->query_bytes(&it.head, MAX_QUERIES));
    for (uint32_t t = 0; t < N_TILES; t++) {
        fill_keys(head_dim);
        it.codec->quantize(plain(), &it.head, keys, it.tiles + t * it.tile_bytes, &sides[t]);
    }
    const struct pair_layout *layout = &((const struct pair_table *)it.head.table)->layout;
    it.tiles[it.tile_bytes + pair_scales_offset(layout) + 5] = 0; /* a key that is its block's mean */
    fill_queries(head_dim);
    it.codec->prepare(plain(), &it.head, q, MAX_QUERIES, 0.125f, it.query);
    return it;
}
static void tear_down(struct case_of it)
{
    free(it.tiles);
    free(it.query);
    free_head(it.head);
}

static void test_scores_are_products_with_decoded_keys(void **unused)
{
    (void)unused;
    static double decoded[64 * KERNELS_MAX_HEAD_DIM];
    for (const uint32_t *d = fixture_head_dims; *d; d++)
        for (uint32_t bits = 1; bits < N_CODECS; bits++) {
            const uint32_t n = *d;
            const struct case_of it = set_up(n, bits);
            const struct pair_table *table = it.head.table;
            it.codec->score(plain(), &it.head, it.query, MAX_QUERIES, it.tiles, sides, N_TILES, scores, STRIDE);
            double error = 0, allowed = 0;
            for (uint32_t t = 0; t < N_TILES; t++) {
                const uint8_t *tile = it.tiles + t * it.tile_bytes;
                fixture_pair_decode(table, tile, sides[t], decoded);
                for (uint32_t k = 0; k < MAX_QUERIES; k++) {
                    struct pair_query numbers;
                    memcpy(&numbers, it.query + k * pair_query_bytes(&table->layout), sizeof numbers);
                    for (uint32_t j = 0; j < 64; j++) {
                        double exact = 0, size = 0;
                        for (uint32_t i = 0; i < n; i++) {
                            exact += 0.125 * (double)q[k * n + i] * decoded[j * n + i];
                            size += 0.125 * fabs((double)q[k * n + i]) * (fabs(decoded[j * n + i]) + 1);
                        }
                        const double step = (double)numbers.factor * fixture_pair_scale(table, tile, j);
                        const double difference = (double)scores[k * STRIDE + t * 64 + j] - exact;
                        assert_true(fabs(difference) <= 0.5001 * step * table->layout.n_groups + 1e-5 * size);
                        error += difference * difference;
                        allowed += step * step * table->layout.n_groups / 12;
                    }
                }
            }
            assert_true(error <= 2 * allowed + 1e-9); /* of look-ups in 8 bits, which round to nearest */
            tear_down(it);
        }
}

static void check_tables(const struct case_of *it, uint32_t n_queries)
{
    const struct pair_table *table = it->head.table;
    const struct pair_kernels *all[4] = {&codec_pair_plain};
    uint32_t n = 1;
    if (kernels_get(KERNELS_ISA_AVX2)) {
        all[n++] = &codec_pair_avx2;
        all[n++] = &halves_pair;
    }
    if (kernels_get(KERNELS_ISA_AVX512))
        all[n++] = &codec_pair_avx512;
    for (uint32_t i = 0; i < n; i++) {
        float *to = i == 0 ? expected : scores;
        memset(to, 0x77, sizeof scores);
        all[i]->score(&table->layout, it->query, n_queries, it->tiles, sides, N_TILES, to, STRIDE);
        if (i > 0)
            assert_memory_equal(scores, expected, sizeof scores); /* what lies between rows, too */
    }
}

static void test_tables_agree(void **unused)
{
    (void)unused;
    for (const uint32_t *d = fixture_head_dims; *d; d++)
        for (uint32_t bits = 1; bits < N_CODECS; bits++) {
            const struct case_of it = set_up(*d, bits);
            for (uint32_t n = 1; n <= MAX_QUERIES; n++)
                check_tables(&it, n);
            /* the largest sums there can be */
            const struct pair_table *table = it.head.table;
            for (uint32_t k = 0; k < MAX_QUERIES; k++)
                memset(it.query + (k + 1) * pair_query_bytes(&table->layout) -
                           ((size_t)table->layout.n_groups * 16 + 63) / 64 * 64,
                       0xff, (size_t)table->layout.n_groups * 16);
            check_tables(&it, MAX_QUERIES);
            tear_down(it);
        }
}

static void test_alone_and_together(void **unused)
{
    (void)unused;
    const enum kernels_isa sets[] = {KERNELS_ISA_PLAIN, KERNELS_ISA_AVX2, KERNELS_ISA_AVX512};
    for (size_t s = 0; s < sizeof sets / sizeof *sets; s++) {
        const struct kernels *kernels = kernels_get(sets[s]);
        for (const uint32_t *d = fixture_head_dims; kernels && *d; d++)
            for (uint32_t bits = 1; bits < N_CODECS; bits++) {
                const struct case_of it = set_up(*d, bits);
                it.codec->score(kernels, &it.head, it.query, MAX_QUERIES, it.tiles, sides, N_TILES, expected, STRIDE);
                uint8_t *one = exactly(it.codec->query_bytes(&it.head, 1));
                for (uint32_t k = 0; k < MAX_QUERIES; k++) {
                    it.codec->prepare(kernels, &it.head, q + k * *d, 1, 0.125f, one);
                    for (uint32_t t = 0; t < N_TILES; t++) {
                        it.codec->score(kernels, &it.head, one, 1, it.tiles + t * it.tile_bytes, sides + t, 1, scores,
                                        64);
                        assert_memory_equal(scores, expected + k * STRIDE + t * 64, 64 * sizeof(float));
                    }
                }
                free(one);
                tear_down(it);
            }
    }
}

/* Mean square of q . (k - k^), over queries of the statistics, for one bits and size of the mean query. */
static double score_error(uint32_t n, uint32_t bits, double mean_size, bool with_along, double *ret_expected)
{
    static double decoded[64 * KERNELS_MAX_HEAD_DIM];
    fill_statistics(n, mean_size);
    struct key_head head = head_of(n, bits);
    struct pair_table *table = (struct pair_table *)(uintptr_t)head.table;
    *ret_expected = check_bits(table);
    if (!with_along)
        memset(table->direction, 0, n * sizeof(float));
    const struct key_codec *codec = key_codec_find(codecs[bits]);
    uint8_t *tile = exactly(codec->tile_bytes(&head));
    double sum = 0;
    const uint32_t n_rounds = 24;
    for (uint32_t round = 0; round < n_rounds; round++) {
        float side;
        fill_keys(n);
        fill_queries(n);
        codec->quantize(plain(), &head, keys, tile, &side);
        fixture_pair_decode(table, tile, side, decoded);
        for (uint32_t k = 0; k < MAX_QUERIES; k++)
            for (uint32_t j = 0; j < 64; j++) {
                double error = 0;
                for (uint32_t i = 0; i < n; i++)
                    error += (double)q[k * n + i] * ((double)keys[j * n + i] - decoded[j * n + i]);
                sum += error * error / (64 * MAX_QUERIES * n_rounds);
            }
    }
    free(tile);
    free_head(head);
    return sum;
}

/* Normal keys of the statistics' spread cost what Lloyd and Max say, and 8 bits of mean and sizes a little. */
static void test_error_of_scores(void **unused)
{
    (void)unused;
    for (uint32_t bits = 1; bits <= PAIR; bits++) {
        double should;
        const double is = score_error(64, bits, 0, true, &should);
        assert_true(is < 1.12 * should + 0.02 && is > 0.9 * should);
        /* a mean query moves all scores alike: along it nothing is lost */
        const double with = score_error(64, bits, 3, true, &should), without = score_error(64, bits, 3, false, &should);
        assert_true(with < 0.25 * without && with < 1.6 * should + 0.3);
    }
}

static void test_bytes_are_the_same_everywhere(void **unused)
{
    (void)unused;
    static const double sizes[] = {1.0, 0x1p-24, 0x1p-100, 1e-39, 10000};
#if defined(__x86_64__)
    for (const uint32_t *d = fixture_head_dims; *d; d++)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            fill_statistics(*d, 1);
            const uint32_t bits = s % 2 ? 2 : KLT1;
            const struct key_head head = head_of(*d, bits);
            const struct key_codec *codec = key_codec_find(codecs[bits]);
            const size_t n_bytes = codec->tile_bytes(&head);
            uint8_t *tile = exactly(n_bytes), *other = exactly(n_bytes);
            float side, other_side;
            fill_keys(*d);
            for (uint32_t i = 0; i < 64 * *d; i++)
                keys[i] = (float)(sizes[s] * (double)keys[i]);
            codec->quantize(plain(), &head, keys, tile, &side);
            const uint32_t before = __builtin_ia32_stmxcsr();
            __builtin_ia32_ldmxcsr(before | 0x8040u); /* as kernels_thread_setup() */
            codec->quantize(plain(), &head, keys, other, &other_side);
            __builtin_ia32_ldmxcsr(before);
            assert_memory_equal(tile, other, n_bytes);
            assert_memory_equal(&side, &other_side, sizeof side);
            codec->quantize(kernels_get(KERNELS_ISA_AUTO), &head, keys, other, &other_side);
            assert_memory_equal(tile, other, n_bytes);
            assert_memory_equal(&side, &other_side, sizeof side);
            free(tile);
            free(other);
            free_head(head);
        }
#endif
}

/* All scores of some queries, broken ones among them, are numbers. */
static void check_finite(const struct key_head *head, uint32_t bits)
{
    static const float wrong[] = {1.0f, NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 1e-40f, 0.0f};
    const struct key_codec *codec = key_codec_find(codecs[bits]);
    uint8_t *tile = exactly(codec->tile_bytes(head)), *query = exactly(codec->query_bytes(head, 1));
    float side;
    codec->quantize(plain(), head, keys, tile, &side);
    assert_true(isfinite(side));
    for (size_t w = 0; w < sizeof wrong / sizeof *wrong; w++) {
        for (uint32_t i = 0; i < head->head_dim; i++)
            q[i] = i % 3 || w % 2 ? wrong[w] : 0.5f;
        codec->prepare(plain(), head, q, 1, 0.125f, query);
        codec->score(plain(), head, query, 1, tile, &side, 1, scores, 64);
        for (uint32_t j = 0; j < 64; j++)
            assert_true(isfinite(scores[j]));
    }
    free(tile);
    free(query);
}

static void test_broken_numbers(void **unused)
{
    (void)unused;
    const uint32_t n = 20;
    for (uint32_t bits = 1; bits < N_CODECS; bits++)
        for (uint32_t kind = 0; kind < 6; kind++) {
            fill_statistics(n, kind == 5 ? 1e4 : 1);
            for (uint32_t i = 0; i < n; i++) {
                weights[i] = kind == 1 ? 0 : kind == 2 && i > 3 ? 0 : kind == 3 ? 1e-30 : kind == 4 ? -1 : weights[i];
                spreads[i] = kind == 1 ? 0 : kind == 2 && i < 9 ? 0 : kind == 3 ? 1e30 : kind == 4 ? 1e-38 : spreads[i];
                q_mean[i] = kind == 1 ? 0 : q_mean[i];
            }
            const struct key_head head = head_of(n, bits);
            for (int round = 0; round < 6; round++) {
                fixture_normals(keys, 64 * n, round == 1 ? 1e-39 : round == 2 ? 30000 : 1);
                for (uint32_t i = 0; i < 64 * n; i++) {
                    const double u = fixture_uniform();
                    if (round == 3)
                        keys[i] = u > 0.3 ? NAN : u > 0 ? INFINITY : -INFINITY;
                    if (round == 4)
                        keys[i] = 0;
                    if (round == 5)
                        keys[i] = u > 0 ? 65504.0f : -65504.0f;
                }
                check_finite(&head, bits);
            }
            free_head(head);
        }
}

/* NaN is 0, infinity the largest half: the same bytes as those keys give. Keys that are all alike are their mean. */
static void test_broken_keys_mean_something(void **unused)
{
    (void)unused;
    const uint32_t n = 64;
    fill_statistics(n, 1);
    const struct key_head head = head_of(n, 1);
    const struct key_codec *codec = key_codec_find(POLICY_CODEC_PAIR1);
    const size_t n_bytes = codec->tile_bytes(&head);
    uint8_t *tile = exactly(n_bytes), *other = exactly(n_bytes), *query = exactly(codec->query_bytes(&head, 1));
    float side, other_side;
    fill_keys(n);
    for (uint32_t i = 0; i < 64 * n; i += 7)
        keys[i] = i % 3 ? NAN : i % 2 ? INFINITY : -INFINITY;
    codec->quantize(plain(), &head, keys, tile, &side);
    for (uint32_t i = 0; i < 64 * n; i++)
        keys[i] = isnan(keys[i]) ? 0 : isinf(keys[i]) ? copysignf(65504, keys[i]) : keys[i];
    codec->quantize(plain(), &head, keys, other, &other_side);
    assert_memory_equal(tile, other, n_bytes);
    assert_memory_equal(&side, &other_side, sizeof side);
    for (uint32_t i = 0; i < 64 * n; i++)
        keys[i] = 3.0f;
    codec->quantize(plain(), &head, keys, tile, &side);
    for (uint32_t i = 0; i < n; i++)
        q[i] = 1;
    codec->prepare(plain(), &head, q, 1, 1.0f, query);
    codec->score(plain(), &head, query, 1, tile, &side, 1, scores, 64);
    for (uint32_t j = 0; j < 64; j++)
        assert_true(fabsf(scores[j] - 3.0f * 64) < 0.05f);
    free(tile);
    free(other);
    free(query);
    free_head(head);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_bits),
        cmocka_unit_test(test_quantize_is_the_definition),
        cmocka_unit_test(test_scores_are_products_with_decoded_keys),
        cmocka_unit_test(test_tables_agree),
        cmocka_unit_test(test_alone_and_together),
        cmocka_unit_test(test_error_of_scores),
        cmocka_unit_test(test_bytes_are_the_same_everywhere),
        cmocka_unit_test(test_broken_numbers),
        cmocka_unit_test(test_broken_keys_mean_something),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
