/* test_statistics.c - statistics as files: what was saved is loaded, and a damaged or foreign file is refused with a sentence. */
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

#include "gpu-worker/keys/key_statistics.h"
#include "kernels/kernels.h"

static const uint8_t hash[16] = {9, 8, 7, 6, 5, 4, 3, 2, 1};
static const struct row_shape shape = {.n_layers = 2, .n_kv_heads = 3, .head_dim = 8, .codec = ROW_CODEC_F16};
static char folder[] = "/tmp/hcattn-statistics-XXXXXX", path[64];

enum {
    HEADER_BYTES = 64,
    N_VALUES = 2 * 3 * (8 + 2 * 64),
    N_HALVES = 2 * 3 * 5 * 8,
    FILE_BYTES = HEADER_BYTES + N_VALUES * 4 + N_HALVES * 2 + 4
};

static struct key_statistics *made(void)
{
    struct key_statistics *statistics = NULL;
    assert_int_equal(key_statistics_new(&shape, hash, &statistics), 0);
    for (uint32_t i = 0; i < N_VALUES; i++) {
        assert_true(statistics->values[i] == 0);
        statistics->values[i] = (float)i * 0.25f - 100;
    }
    assert_int_equal(key_statistics_make_samples(statistics, 5), 0);
    for (uint32_t i = 0; i < N_HALVES; i++)
        statistics->samples[i] = (uint16_t)(i * 7);
    statistics->n_tokens = 1u << 20;
    statistics->text_hash = 0x123456789abcdef0u;
    return statistics;
}

static void get_file(uint8_t *bytes)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fread(bytes, 1, FILE_BYTES + 1, file), FILE_BYTES);
    fclose(file);
}

static void put_file(const uint8_t *bytes, size_t n_bytes)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n_bytes, file), n_bytes);
    assert_int_equal(fclose(file), 0);
}

static void refuse(int error, const char *words)
{
    struct key_statistics *statistics = NULL;
    char sentence[256] = "";
    assert_int_equal(key_statistics_load(path, &shape, hash, &statistics, sentence, sizeof sentence), error);
    assert_null(statistics);
    assert_non_null(strstr(sentence, path));
    assert_non_null(strstr(sentence, words));
    assert_int_equal(key_statistics_load(path, &shape, hash, &statistics, NULL, 0), error);
}

static uint32_t n_files(void) /* in the folder: none but the one may be left */
{
    struct stat status;
    uint32_t n = 0;
    char name[96];
    snprintf(name, sizeof name, "%s.%ld.tmp", path, (long)getpid());
    n += stat(name, &status) == 0;
    snprintf(name, sizeof name, "%s.%ld.tmp", folder, (long)getpid());
    n += stat(name, &status) == 0;
    return n;
}

static void test_saved_and_loaded(void **unused)
{
    (void)unused;
    struct key_statistics *statistics = made(), *loaded = NULL;
    char sentence[256] = "";
    assert_int_equal(key_statistics_save(statistics, path), 0);
    statistics->values[3] = 7;
    assert_int_equal(key_statistics_save(statistics, path), 0); /* over the old one */
    assert_int_equal(key_statistics_load(path, &shape, hash, &loaded, sentence, sizeof sentence), 0);
    assert_memory_equal(loaded->values, statistics->values, N_VALUES * sizeof(float));
    assert_int_equal(loaded->n_samples, 5);
    assert_memory_equal(loaded->samples, statistics->samples, N_HALVES * sizeof(uint16_t));
    assert_ptr_equal(key_statistics_samples(loaded, 1, 2), loaded->samples + 5 * 5 * 8);
    assert_memory_equal(loaded->model_hash, hash, sizeof hash);
    assert_true(loaded->n_layers == 2 && loaded->n_kv_heads == 3 && loaded->head_dim == 8);
    assert_true(loaded->n_tokens == 1u << 20 && loaded->text_hash == 0x123456789abcdef0u);
    const struct key_statistics_head head = key_statistics_head(loaded, 1, 2);
    assert_ptr_equal(head.q_mean, loaded->values + 5 * 136);
    assert_ptr_equal(head.q_square, head.q_mean + 8);
    assert_ptr_equal(head.k_spread, head.q_square + 64);
    key_statistics_free(loaded);
    key_statistics_free(statistics);
    assert_int_equal(n_files(), 0);
    assert_null(key_statistics_free(NULL));
}

static void test_without_samples(void **unused)
{
    (void)unused;
    struct key_statistics *statistics = NULL, *loaded = NULL;
    assert_int_equal(key_statistics_new(&shape, hash, &statistics), 0);
    assert_int_equal(key_statistics_save(statistics, path), 0);
    assert_int_equal(key_statistics_load(path, &shape, hash, &loaded, NULL, 0), 0);
    assert_int_equal(loaded->n_samples, 0);
    key_statistics_free(loaded);
    key_statistics_free(statistics);
}

static void test_what_cannot_be_written(void **unused)
{
    (void)unused;
    struct key_statistics *statistics = made();
    assert_int_equal(key_statistics_save(statistics, "/tmp/no-such-folder-of-hcattn/x"), -ENOENT);
    assert_int_equal(key_statistics_save(statistics, folder), -EISDIR);
    assert_int_equal(n_files(), 0);
    key_statistics_free(statistics);
}

static void test_damaged(void **unused)
{
    (void)unused;
    static uint8_t bytes[FILE_BYTES + 1];
    struct key_statistics *statistics = made();
    unlink(path);
    refuse(-ENOENT, "No such file");
    assert_int_equal(key_statistics_save(statistics, path), 0);
    key_statistics_free(statistics);
    get_file(bytes);
    const size_t lengths[] = {0, 3, HEADER_BYTES - 1, HEADER_BYTES, FILE_BYTES / 2, FILE_BYTES - 1, FILE_BYTES + 1};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        put_file(bytes, lengths[i]);
        refuse(-EBADMSG, lengths[i] < HEADER_BYTES ? "not a file" : "bytes long");
    }
    for (size_t at = 0; at < FILE_BYTES; at += at < HEADER_BYTES ? 1 : 97) { /* one bit anywhere */
        bytes[at] ^= 0x10;
        put_file(bytes, FILE_BYTES);
        refuse(-EBADMSG, "");
        bytes[at] ^= 0x10;
    }
    /* whole by its checksum, and wrong all the same */
    static const struct {
        uint32_t at, value;
        const char *words;
    } wrong[] = {
        {0, 1, "not a file"},
        {4, 1, "version"},
        {8, 3, "layers"},
        {12, 0xffffffff, "layers"},
        {16, 9, "layers"},
        {20, 3, "layers"},
        {24, 1, "another model"},
        {HEADER_BYTES, 0x7f800000, "none"},
        {FILE_BYTES - 8, 0x7e000000, "none"},
        {HEADER_BYTES + 4 * N_VALUES - 4, 0xffc00000, "none"},
        {56, 6, "bytes long"},
        {56, 0xffffffff, "damaged"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        uint32_t kept;
        memcpy(&kept, bytes + wrong[i].at, sizeof kept);
        memcpy(bytes + wrong[i].at, &wrong[i].value, sizeof kept);
        const uint32_t crc = kernels_crc32c(0, bytes, FILE_BYTES - 4);
        memcpy(bytes + FILE_BYTES - 4, &crc, sizeof crc);
        put_file(bytes, FILE_BYTES);
        refuse(-EBADMSG, wrong[i].words);
        memcpy(bytes + wrong[i].at, &kept, sizeof kept);
    }
}

static int make_folder(void **unused)
{
    (void)unused;
    if (mkdtemp(folder) == NULL)
        return -1;
    snprintf(path, sizeof path, "%s/x.statistics", folder);
    return 0;
}

static int remove_folder(void **unused)
{
    (void)unused;
    unlink(path);
    return rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_saved_and_loaded),
        cmocka_unit_test(test_without_samples),
        cmocka_unit_test(test_what_cannot_be_written),
        cmocka_unit_test(test_damaged),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
