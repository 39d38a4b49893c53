/*
 * test_quantizers.c - which quantizer a policy gets: from nothing, from what is taken over, from files; what newer statistics and
 * codebooks change, and what is said where something is missing or damaged.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "gpu-worker/keys/codec_pair.h"
#include "gpu-worker/keys/quantizers.h"

static const uint8_t hash[16] = {0xab, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0xcd};
static const uint8_t other_hash[16] = {1};
static const struct row_shape shape = {.n_layers = 2, .n_kv_heads = 3, .head_dim = 20, .codec = ROW_CODEC_F16};
static const struct policy_terms pair2 = {.codec = POLICY_CODEC_PAIR2}, pair1 = {.codec = POLICY_CODEC_PAIR1},
                                 rot2 = {.codec = POLICY_CODEC_ROT2},
                                 pq = {.codec = POLICY_CODEC_PQ, .n_dims = 4, .n_centroids = 256};
static char folder[] = "/tmp/hcattn-quantizers-XXXXXX", directory[96], statistics_path[192], codebook_path[192];

static struct key_statistics *statistics_of(const uint8_t *model_hash, float size)
{
    struct key_statistics *statistics;
    assert_int_equal(key_statistics_new(&shape, model_hash, &statistics), 0);
    for (uint32_t i = 0; i < 6; i++) {
        const struct key_statistics_head head = key_statistics_head(statistics, i / 3, i % 3);
        for (uint32_t j = 0; j < 20; j++) {
            head.q_mean[j] = (float)i;
            head.q_square[j * 21] = size;
            head.k_spread[j * 21] = (float)(1 + j);
        }
    }
    return statistics;
}

static struct key_codebook *codebook_of(const uint8_t *model_hash)
{
    struct key_codebook *codebook;
    assert_int_equal(key_codebook_new(&shape, model_hash, 4, 256, &codebook), 0);
    for (uint32_t i = 0; i < 2 * 3 * 20 * 256; i++)
        codebook->centroids[i] = (float)(i * 7 % 1000) * 0.01f;
    return codebook;
}

static struct quantizers *made(const char *where)
{
    struct quantizers *quantizers;
    assert_int_equal(quantizers_new(&shape, hash, where, &quantizers), 0);
    assert_memory_equal(quantizers_model_hash(quantizers), hash, 16);
    return quantizers;
}

static const struct key_quantizer *find(struct quantizers *quantizers, const struct policy_terms *terms)
{
    const struct key_quantizer *quantizer = NULL;
    char sentence[256];
    assert_true(quantizers_has(quantizers, terms));
    assert_int_equal(quantizers_find(quantizers, terms, &quantizer, sentence, sizeof sentence), 0);
    return quantizer;
}

static void refuse(struct quantizers *quantizers, const struct policy_terms *terms, int error, const char *words)
{
    const struct key_quantizer *untouched = (const void *)folder, *quantizer = untouched;
    char sentence[256] = "";
    assert_int_equal(quantizers_find(quantizers, terms, &quantizer, sentence, sizeof sentence), error);
    assert_ptr_equal(quantizer, untouched);
    assert_non_null(strstr(sentence, words));
    assert_false(quantizers_has(quantizers, terms));
}

static void take_statistics(struct quantizers *quantizers, float size, bool kept)
{
    bool is_kept = !kept;
    char sentence[256] = "";
    assert_int_equal(quantizers_take_statistics(quantizers, statistics_of(hash, size), &is_kept, sentence, 256), 0);
    assert_int_equal(is_kept, kept);
}

static void take_codebook(struct quantizers *quantizers, bool kept)
{
    bool is_kept = !kept;
    char sentence[256] = "";
    assert_int_equal(quantizers_take_codebook(quantizers, codebook_of(hash), &is_kept, sentence, 256), 0);
    assert_int_equal(is_kept, kept);
}

static void test_codecs_that_learn_nothing(void **unused)
{
    (void)unused;
    struct quantizers *quantizers = made(NULL);
    const struct policy_terms full = {.codec = POLICY_CODEC_NONE};
    assert_null(find(quantizers, &full));
    static const enum policy_codec codecs[] = {POLICY_CODEC_F16, POLICY_CODEC_ROT4, POLICY_CODEC_ROT3,
                                               POLICY_CODEC_ROT2};
    for (size_t i = 0; i < sizeof codecs / sizeof *codecs; i++) {
        const struct policy_terms terms = {.codec = codecs[i]};
        const struct key_quantizer *quantizer = find(quantizers, &terms);
        assert_ptr_equal(quantizer->codec, key_codec_find(codecs[i]));
        assert_true(quantizer->n_layers == 2 && quantizer->n_kv_heads == 3 && quantizer->table_bytes == 0);
        assert_int_equal(key_quantizer_head(quantizer, 1, 2)->head_dim, 20);
        assert_null(key_quantizer_head(quantizer, 1, 2)->table);
        assert_ptr_equal(find(quantizers, &terms), quantizer); /* made once */
    }
    assert_null(quantizers_free(quantizers));
    assert_null(quantizers_free(NULL));
}

static void test_taken_over(void **unused)
{
    (void)unused;
    struct quantizers *quantizers = made(NULL);
    char path[64] = "x";
    quantizers_checkpoint_path(quantizers, 4, 256, path, sizeof path);
    assert_string_equal(path, "");
    refuse(quantizers, &pair2, -ENOENT, "pair2 keys need statistics");
    refuse(quantizers, &pq, -ENOENT, "pq4/256 keys need a codebook");
    const struct policy_terms eight = {.codec = POLICY_CODEC_PQ, .n_dims = 8, .n_centroids = 256};
    refuse(quantizers, &eight, -EINVAL, "head_dim 20");
    const struct key_quantizer *rotated = find(quantizers, &rot2);
    take_statistics(quantizers, 1, false);
    take_codebook(quantizers, false);
    const struct key_quantizer *first = find(quantizers, &pair2), *one = find(quantizers, &pair1),
                               *coded = find(quantizers, &pq);
    assert_true(first != one && first->table_bytes > 0 && coded->table_bytes > 0);
    const struct pair_table *table = key_quantizer_head(first, 1, 2)->table;
    assert_true(table->layout.head_dim == 20 && table->direction[7] > 0.2f && table->n_bytes * 6 == first->table_bytes);
    assert_true(((const struct pair_table *)key_quantizer_head(first, 0, 0)->table)->direction[7] == 0);
    /* newer ones: new quantizers, and the old ones stay whole */
    take_statistics(quantizers, 4, false);
    take_codebook(quantizers, false);
    assert_true(find(quantizers, &pair2) != first && find(quantizers, &pair1) != one && find(quantizers, &pq) != coded);
    assert_ptr_equal(find(quantizers, &rot2), rotated);
    assert_ptr_equal(key_quantizer_head(first, 1, 2)->table, table);
    assert_true(table->direction[7] > 0.2f);
    quantizers_free(quantizers);
}

static void test_of_another_model(void **unused)
{
    (void)unused;
    struct quantizers *quantizers = made(NULL);
    bool kept = true;
    char sentence[256] = "";
    assert_int_equal(quantizers_take_statistics(quantizers, statistics_of(other_hash, 1), &kept, sentence, 256),
                     -EINVAL);
    assert_non_null(strstr(sentence, "another model"));
    assert_int_equal(quantizers_take_codebook(quantizers, codebook_of(other_hash), &kept, sentence, 256), -EINVAL);
    refuse(quantizers, &pair2, -ENOENT, "hcattn statistics");
    refuse(quantizers, &pq, -ENOENT, "hcattn codebook train");
    quantizers_free(quantizers);
}

static void copy_over(const char *from, const char *to, long n_bytes) /* n_bytes < 0: whole */
{
    static uint8_t bytes[1 << 20];
    FILE *file = fopen(from, "rb");
    assert_non_null(file);
    const size_t n = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    file = fopen(to, "wb");
    assert_non_null(file);
    const size_t wanted = n_bytes < 0 ? n : (size_t)n_bytes;
    assert_int_equal(fwrite(bytes, 1, wanted, file), wanted);
    assert_int_equal(fclose(file), 0);
}

static void test_kept_in_files(void **unused)
{
    (void)unused;
    struct quantizers *quantizers = made(directory); /* which is not there yet */
    refuse(quantizers, &pair2, -ENOENT, "pair2 keys need statistics");
    take_statistics(quantizers, 1, true);
    take_codebook(quantizers, true);
    quantizers_free(quantizers);
    quantizers = made(directory);
    const struct key_quantizer *loaded = find(quantizers, &pair2), *coded = find(quantizers, &pq);
    assert_true(((const struct pair_table *)key_quantizer_head(loaded, 1, 2)->table)->direction[7] > 0.2f);
    assert_int_equal(coded->codec == key_codec_find(POLICY_CODEC_PQ), 1);
    quantizers_free(quantizers);

    /* a codebook under another's name, and half files */
    char wrong_path[192], path[192];
    snprintf(wrong_path, sizeof wrong_path, "%s/ab0102030405060708090a0b0c0d0ecd.pq2-256.codebook", directory);
    copy_over(codebook_path, wrong_path, -1);
    copy_over(statistics_path, statistics_path, 1000);
    quantizers = made(directory);
    const struct policy_terms two = {.codec = POLICY_CODEC_PQ, .n_dims = 2, .n_centroids = 256};
    refuse(quantizers, &two, -EBADMSG, wrong_path);
    refuse(quantizers, &pair2, -EBADMSG, statistics_path);
    take_statistics(quantizers, 1, true); /* heals it */
    assert_non_null(find(quantizers, &pair2));
    quantizers_checkpoint_path(quantizers, 4, 256, path, sizeof path);
    assert_non_null(strstr(path, directory));
    assert_non_null(strstr(path, "pq4-256"));
    assert_true(strcmp(path, codebook_path) != 0);
    quantizers_free(quantizers);
    unlink(wrong_path);
    unlink(codebook_path);
    unlink(statistics_path);
    assert_int_equal(rmdir(directory), 0); /* nothing else was left there */
}

static void test_what_cannot_be_kept(void **unused)
{
    (void)unused;
    char nowhere[128];
    snprintf(nowhere, sizeof nowhere, "%s/none/deeper", folder);
    struct quantizers *quantizers = made(nowhere);
    bool kept = true;
    char sentence[256] = "";
    assert_int_equal(quantizers_take_statistics(quantizers, statistics_of(hash, 1), &kept, sentence, 256), 0);
    assert_false(kept);
    assert_non_null(strstr(sentence, nowhere));
    sentence[0] = '\0';
    kept = true;
    assert_int_equal(quantizers_take_codebook(quantizers, codebook_of(hash), &kept, sentence, 256), 0);
    assert_false(kept);
    assert_non_null(strstr(sentence, nowhere));
    assert_non_null(find(quantizers, &pair2)); /* used all the same */
    assert_non_null(find(quantizers, &pq));
    quantizers_free(quantizers);
}

static int make_folder(void **unused)
{
    (void)unused;
    if (mkdtemp(folder) == NULL)
        return -1;
    snprintf(directory, sizeof directory, "%s/learnt", folder);
    snprintf(statistics_path, sizeof statistics_path, "%s/ab0102030405060708090a0b0c0d0ecd.statistics", directory);
    snprintf(codebook_path, sizeof codebook_path, "%s/ab0102030405060708090a0b0c0d0ecd.pq4-256.codebook", directory);
    return 0;
}

static int remove_folder(void **unused)
{
    (void)unused;
    return rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_codecs_that_learn_nothing), cmocka_unit_test(test_taken_over),
        cmocka_unit_test(test_of_another_model),          cmocka_unit_test(test_kept_in_files),
        cmocka_unit_test(test_what_cannot_be_kept),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
