/* key_codebook.c - see key_codebook.h: codebooks in memory and as files. */
#include "gpu-worker/keys/key_codebook.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/file.h"
#include "kernels/kernels.h"

#define FILE_MAGIC   0x42434348u /* "HCCB" */
#define FILE_VERSION 1u

struct file_header {
    uint32_t magic, version;
    uint32_t n_layers, n_kv_heads, head_dim, n_dims, n_centroids, n_iterations;
    uint8_t model_hash[16];
    uint64_t seed, text_hash, n_samples;
    double error;
};
_Static_assert(sizeof(struct file_header) == 80, "raise FILE_VERSION");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are little endian");

static size_t centroid_bytes(const struct key_codebook *codebook)
{
    return (size_t)codebook->n_layers * codebook->n_kv_heads * codebook->head_dim * codebook->n_centroids *
           sizeof(float);
}

int key_codebook_new(const struct row_shape *shape, const uint8_t model_hash[16], uint32_t n_dims, uint32_t n_centroids,
                     struct key_codebook **ret_codebook)
{
    const bool possible = (n_dims == 2 || n_dims == 4 || n_dims == 8) && n_centroids >= 256 && n_centroids <= 4096 &&
                          (n_centroids & (n_centroids - 1)) == 0 && shape->n_layers > 0 && shape->n_kv_heads > 0 &&
                          shape->n_layers <= LAYOUT_MAX_LAYERS && shape->n_kv_heads <= UINT16_MAX &&
                          shape->head_dim > 0 && shape->head_dim <= KERNELS_MAX_HEAD_DIM &&
                          shape->head_dim % n_dims == 0;
    if (!possible)
        return -EINVAL;
    struct key_codebook *codebook = calloc(1, sizeof *codebook);
    if (codebook == NULL)
        return -ENOMEM;
    codebook->n_layers = shape->n_layers;
    codebook->n_kv_heads = shape->n_kv_heads;
    codebook->head_dim = shape->head_dim;
    codebook->n_dims = n_dims;
    codebook->n_centroids = n_centroids;
    memcpy(codebook->model_hash, model_hash, sizeof codebook->model_hash);
    codebook->centroids = calloc(1, centroid_bytes(codebook));
    if (codebook->centroids == NULL) {
        free(codebook);
        return -ENOMEM;
    }
    *ret_codebook = codebook;
    return 0;
}

struct key_codebook *key_codebook_free(struct key_codebook *codebook)
{
    if (codebook != NULL)
        free(codebook->centroids);
    free(codebook);
    return NULL;
}

float *key_codebook_head(const struct key_codebook *codebook, uint32_t layer, uint32_t kv_head)
{
    return codebook->centroids +
           ((size_t)layer * codebook->n_kv_heads + kv_head) * codebook->head_dim * codebook->n_centroids;
}

/* ---- files ---- */

/* Reads what follows the header; NULL: it is whole, otherwise what is wrong with it. */
static const char *read_values(int file, const struct file_header *header, struct key_codebook *codebook, int *ret_r)
{
    uint32_t crc = kernels_crc32c(0, header, sizeof *header), kept;
    *ret_r = file_read_all(file, codebook->centroids, centroid_bytes(codebook));
    if (*ret_r == 0)
        *ret_r = file_read_all(file, &kept, sizeof kept);
    if (*ret_r < 0)
        return "it ends early";
    *ret_r = -EBADMSG;
    crc = kernels_crc32c(crc, codebook->centroids, centroid_bytes(codebook));
    if (crc != kept)
        return "its checksum is wrong";
    for (size_t i = 0; i < centroid_bytes(codebook) / sizeof(float); i++)
        if (!isfinite(codebook->centroids[i]))
            return "it holds numbers that are not finite";
    *ret_r = 0;
    return NULL;
}

/* What is wrong with the file, or NULL with a codebook; *ret_r says which kind of error it is. */
static const char *read_file(int file, const struct row_shape *shape, const uint8_t model_hash[16],
                             struct key_codebook **ret_codebook, int *ret_r)
{
    struct file_header header;
    struct stat status;
    *ret_r = file_read_all(file, &header, sizeof header);
    if (*ret_r < 0 || header.magic != FILE_MAGIC) {
        *ret_r = *ret_r < 0 ? *ret_r : -EBADMSG;
        return "it is no codebook";
    }
    *ret_r = -EBADMSG;
    if (header.version != FILE_VERSION)
        return "it has another version";
    if (memcmp(header.model_hash, model_hash, sizeof header.model_hash) != 0)
        return "it is of another model";
    if (header.n_layers != shape->n_layers || header.n_kv_heads != shape->n_kv_heads ||
        header.head_dim != shape->head_dim || !(header.error >= 0))
        return "it does not fit the model";
    struct key_codebook *codebook = NULL;
    const int r = key_codebook_new(shape, model_hash, header.n_dims, header.n_centroids, &codebook);
    if (r < 0) {
        *ret_r = r == -EINVAL ? -EBADMSG : r;
        return r == -EINVAL ? "its sizes are not possible" : "there is no memory for it";
    }
    const char *wrong = NULL;
    if (fstat(file, &status) < 0) {
        *ret_r = -errno;
        wrong = "it cannot be read";
    } else if ((uint64_t)status.st_size != sizeof header + centroid_bytes(codebook) + sizeof(uint32_t)) {
        wrong = "its length is not what its sizes ask for";
    } else {
        wrong = read_values(file, &header, codebook, ret_r);
    }
    if (wrong != NULL) {
        key_codebook_free(codebook);
        return wrong;
    }
    codebook->seed = header.seed;
    codebook->text_hash = header.text_hash;
    codebook->n_iterations = header.n_iterations;
    codebook->n_samples = header.n_samples;
    codebook->error = header.error;
    *ret_codebook = codebook;
    return NULL;
}

int key_codebook_load(const char *path, const struct row_shape *shape, const uint8_t model_hash[16],
                      struct key_codebook **ret_codebook, char *sentence, size_t sentence_size)
{
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    int r = file < 0 ? -errno : 0;
    const char *wrong = r < 0 ? strerror(-r) : read_file(file, shape, model_hash, ret_codebook, &r);
    if (file >= 0)
        close(file);
    if (wrong != NULL)
        snprintf(sentence, sentence_size, "codebook %s: %s", path, wrong);
    return r;
}

int key_codebook_save(const struct key_codebook *codebook, const char *path)
{
    struct file_header header = {.magic = FILE_MAGIC,
                                 .version = FILE_VERSION,
                                 .n_layers = codebook->n_layers,
                                 .n_kv_heads = codebook->n_kv_heads,
                                 .head_dim = codebook->head_dim,
                                 .n_dims = codebook->n_dims,
                                 .n_centroids = codebook->n_centroids,
                                 .n_iterations = codebook->n_iterations,
                                 .seed = codebook->seed,
                                 .text_hash = codebook->text_hash,
                                 .n_samples = codebook->n_samples,
                                 .error = codebook->error};
    char temporary[PATH_MAX];
    const int n = snprintf(temporary, sizeof temporary, "%s.new", path);
    if (n < 0 || (size_t)n >= sizeof temporary)
        return -ENAMETOOLONG;
    memcpy(header.model_hash, codebook->model_hash, sizeof header.model_hash);
    uint32_t crc = kernels_crc32c(0, &header, sizeof header);
    crc = kernels_crc32c(crc, codebook->centroids, centroid_bytes(codebook));
    const int file = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0)
        return -errno;
    int r = file_write_all(file, &header, sizeof header);
    if (r == 0)
        r = file_write_all(file, codebook->centroids, centroid_bytes(codebook));
    if (r == 0)
        r = file_write_all(file, &crc, sizeof crc);
    if (r == 0 && fsync(file) < 0)
        r = -errno;
    if (close(file) < 0 && r == 0)
        r = -errno;
    if (r == 0 && rename(temporary, path) < 0)
        r = -errno;
    if (r < 0)
        unlink(temporary);
    return r;
}
