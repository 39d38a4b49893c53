/* test_codebook.c - codebooks as files: what was saved is loaded, and a damaged or foreign file is refused with a sentence. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "gpu-worker/keys/key_codebook.h"
#include "kernels/kernels.h"

static const uint8_t hash[16] = {9, 8, 7, 6, 5, 4, 3, 2, 1};
static const struct row_shape shape = {.n_layers = 2, .n_kv_heads = 3, .head_dim = 8, .codec = ROW_CODEC_F16};
static char folder[] = "/tmp/hcattn-codebook-XXXXXX", path[64];

enum { HEADER_BYTES = 80, CENTROID_BYTES = 2 * 3 * 8 * 256 * 4, FILE_BYTES = HEADER_BYTES + CENTROID_BYTES + 4 };

static struct key_codebook *made(void)
{
    struct key_codebook *codebook = NULL;
    assert_int_equal(key_codebook_new(&shape, hash, 4, 256, &codebook), 0);
    for (uint32_t i = 0; i < CENTROID_BYTES / 4; i++)
        codebook->centroids[i] = (float)i * 0.25f - 100;
    codebook->seed = 42;
    codebook->text_hash = 43;
    codebook->n_iterations = 44;
    codebook->n_samples = 45;
    codebook->error = 0.046;
    return codebook;
}

static uint8_t *file_bytes(void)
{
    static uint8_t bytes[FILE_BYTES + 1];
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fread(bytes, 1, sizeof bytes, file), FILE_BYTES);
    fclose(file);
    return bytes;
}

static void put_file(const uint8_t *bytes, size_t n_bytes)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n_bytes, file), n_bytes);
    assert_int_equal(fclose(file), 0);
}

static void repair(uint8_t *bytes)
{
    const uint32_t crc = kernels_crc32c(0, bytes, FILE_BYTES - 4);
    memcpy(bytes + FILE_BYTES - 4, &crc, sizeof crc);
}

static void refuse(int error, const char *words)
{
    struct key_codebook *codebook = NULL;
    char sentence[256] = "";
    assert_int_equal(key_codebook_load(path, &shape, hash, &codebook, sentence, sizeof sentence), error);
    assert_null(codebook);
    assert_non_null(strstr(sentence, path));
    assert_non_null(strstr(sentence, words));
}

static void test_saved_and_loaded(void **unused)
{
    (void)unused;
    struct key_codebook *codebook = made(), *loaded = NULL;
    char sentence[256] = "";
    assert_int_equal(key_codebook_save(codebook, path), 0);
    assert_int_equal(key_codebook_save(codebook, path), 0); /* over the old one */
    assert_int_equal(key_codebook_load(path, &shape, hash, &loaded, sentence, sizeof sentence), 0);
    assert_memory_equal(loaded->centroids, codebook->centroids, CENTROID_BYTES);
    assert_memory_equal(loaded->model_hash, hash, sizeof hash);
    assert_true(loaded->seed == 42 && loaded->text_hash == 43 && loaded->n_iterations == 44);
    assert_true(loaded->n_samples == 45 && loaded->error == 0.046 && loaded->n_dims == 4);
    assert_true(key_codebook_head(loaded, 1, 2) == loaded->centroids + 5 * 8 * 256);
    key_codebook_free(loaded);
    key_codebook_free(codebook);
    char temporary[80];
    snprintf(temporary, sizeof temporary, "%s.new", path);
    assert_int_equal(access(temporary, F_OK), -1);
}

static void test_what_cannot_be_written(void **unused)
{
    (void)unused;
    struct key_codebook *codebook = made();
    assert_int_equal(key_codebook_save(codebook, "/tmp/no-such-folder-of-hcattn/x"), -ENOENT);
    assert_int_equal(key_codebook_save(codebook, folder), -EISDIR);
    char temporary[80];
    snprintf(temporary, sizeof temporary, "%s.new", folder);
    assert_int_equal(access(temporary, F_OK), -1);
    key_codebook_free(codebook);
}

static void test_damaged(void **unused)
{
    (void)unused;
    struct key_codebook *codebook = made();
    unlink(path);
    refuse(-ENOENT, "No such file");
    assert_int_equal(key_codebook_save(codebook, path), 0);
    static uint8_t bytes[FILE_BYTES + 1];
    memcpy(bytes, file_bytes(), sizeof bytes);
    const size_t lengths[] = {0, 3, HEADER_BYTES - 1, HEADER_BYTES, FILE_BYTES / 2, FILE_BYTES - 1, FILE_BYTES + 1};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        put_file(bytes, lengths[i]);
        refuse(-EBADMSG, lengths[i] < HEADER_BYTES ? "no codebook" : "length");
    }
    /* one bit anywhere */
    for (size_t at = 0; at < FILE_BYTES; at += at < HEADER_BYTES ? 1 : 4999) {
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
        {0, 1, "no codebook"},
        {4, 2, "version"},
        {8, 3, "fit"},
        {12, 0xffffffff, "fit"},
        {16, 9, "fit"},
        {20, 3, "possible"},
        {20, 0, "possible"},
        {24, 0, "possible"},
        {24, 300, "possible"},
        {24, 8192, "possible"},
        {24, 512, "length"},
        {32, 1, "another model"},
        {HEADER_BYTES + 400, 0x7f800000, "finite"},
        {HEADER_BYTES, 0xffc00000, "finite"},
        {76, 0xfff00000, "fit"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        uint32_t kept;
        memcpy(&kept, bytes + wrong[i].at, sizeof kept);
        memcpy(bytes + wrong[i].at, &wrong[i].value, sizeof kept);
        repair(bytes);
        put_file(bytes, FILE_BYTES);
        refuse(-EBADMSG, wrong[i].words);
        memcpy(bytes + wrong[i].at, &kept, sizeof kept);
    }
    key_codebook_free(codebook);
}

static void test_impossible_sizes(void **unused)
{
    (void)unused;
    struct key_codebook *codebook = NULL;
    static const uint32_t sizes[][3] = {{8, 3, 256}, {8, 16, 256}, {12, 8, 256}, {8, 0, 256},
                                        {8, 2, 128}, {8, 2, 3000}, {8, 2, 8192}, {8, 2, 0}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const struct row_shape other = {1, 1, sizes[i][0], ROW_CODEC_F16};
        assert_int_equal(key_codebook_new(&other, hash, sizes[i][1], sizes[i][2], &codebook), -EINVAL);
    }
    assert_null(codebook);
    assert_null(key_codebook_free(NULL));
}

static int make_folder(void **unused)
{
    (void)unused;
    if (mkdtemp(folder) == NULL)
        return -1;
    snprintf(path, sizeof path, "%s/x.codebook", folder);
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
        cmocka_unit_test(test_what_cannot_be_written),
        cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_impossible_sizes),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
