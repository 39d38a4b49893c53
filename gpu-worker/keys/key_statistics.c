/*
 * key_statistics.c - see key_statistics.h: memory, and the file, of which nothing is believed before it is checked.
 */
#include "gpu-worker/keys/key_statistics.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/file.h"
#include "kernels/kernels.h"

#define FILE_MAGIC   0x54534348u /* "HCST" */
#define FILE_VERSION 3u

struct file_header {
    uint32_t magic, version;
    uint32_t n_layers, n_kv_heads, head_dim;
    uint32_t n_values_per_head;
    uint8_t model_hash[16];
    uint64_t n_tokens;
    uint64_t text_hash;
    uint32_t n_samples;
    uint32_t padding;
};
_Static_assert(sizeof(struct file_header) == 64, "raise FILE_VERSION");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are written as they lie in memory");

static size_t head_values(uint32_t head_dim)
{
    return head_dim + 2 * (size_t)head_dim * head_dim;
}

static size_t n_values(const struct key_statistics *statistics)
{
    return (size_t)statistics->n_layers * statistics->n_kv_heads * head_values(statistics->head_dim);
}

static size_t samples_bytes(const struct key_statistics *statistics)
{
    return (size_t)statistics->n_layers * statistics->n_kv_heads * statistics->n_samples * statistics->head_dim *
           sizeof *statistics->samples;
}

int key_statistics_new(const struct row_shape *shape, const uint8_t model_hash[16],
                       struct key_statistics **ret_statistics)
{
    struct key_statistics *statistics = calloc(1, sizeof *statistics);
    if (!statistics)
        return -ENOMEM;
    statistics->n_layers = shape->n_layers;
    statistics->n_kv_heads = shape->n_kv_heads;
    statistics->head_dim = shape->head_dim;
    memcpy(statistics->model_hash, model_hash, sizeof statistics->model_hash);
    statistics->values = calloc(n_values(statistics), sizeof *statistics->values);
    if (!statistics->values) {
        key_statistics_free(statistics);
        return -ENOMEM;
    }
    *ret_statistics = statistics;
    return 0;
}

struct key_statistics *key_statistics_free(struct key_statistics *statistics)
{
    if (statistics) {
        free(statistics->values);
        free(statistics->samples);
    }
    free(statistics);
    return NULL;
}

int key_statistics_make_samples(struct key_statistics *statistics, uint32_t n_samples)
{
    statistics->n_samples = n_samples;
    statistics->samples = n_samples ? calloc(samples_bytes(statistics), 1) : NULL;
    if (n_samples == 0 || statistics->samples)
        return 0;
    statistics->n_samples = 0;
    return -ENOMEM;
}

uint16_t *key_statistics_samples(const struct key_statistics *statistics, uint32_t layer, uint32_t kv_head)
{
    return statistics->samples +
           ((size_t)layer * statistics->n_kv_heads + kv_head) * statistics->n_samples * statistics->head_dim;
}

struct key_statistics_head key_statistics_head(const struct key_statistics *statistics, uint32_t layer,
                                               uint32_t kv_head)
{
    const size_t head_dim = statistics->head_dim;
    float *values =
        statistics->values + ((size_t)layer * statistics->n_kv_heads + kv_head) * head_values(statistics->head_dim);
    return (struct key_statistics_head){values, values + head_dim, values + head_dim + head_dim * head_dim};
}

/* ---- the file ---- */

__attribute__((format(printf, 4, 5))) static int refuse(int error, char *sentence, size_t sentence_size,
                                                        const char *format, ...)
{
    if (sentence_size) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(sentence, sentence_size, format, arguments);
        va_end(arguments);
    }
    return error;
}

static int check_header(const char *path, const struct file_header *header, uint64_t n_bytes,
                        const struct row_shape *shape, const uint8_t model_hash[16], char *sentence,
                        size_t sentence_size)
{
    if (header->magic != FILE_MAGIC)
        return refuse(-EBADMSG, sentence, sentence_size, "%s is not a file of key statistics", path);
    if (header->version != FILE_VERSION)
        return refuse(-EBADMSG, sentence, sentence_size, "%s is of version %u, this program reads version %u", path,
                      header->version, FILE_VERSION);
    if (memcmp(header->model_hash, model_hash, sizeof header->model_hash) != 0)
        return refuse(-EBADMSG, sentence, sentence_size, "%s was made from another model", path);
    if (header->n_layers != shape->n_layers || header->n_kv_heads != shape->n_kv_heads ||
        header->head_dim != shape->head_dim || header->n_values_per_head != head_values(shape->head_dim))
        return refuse(-EBADMSG, sentence, sentence_size,
                      "%s is of %u layers, %u KV heads and head_dim %u; the model has %u, %u and %u", path,
                      header->n_layers, header->n_kv_heads, header->head_dim, shape->n_layers, shape->n_kv_heads,
                      shape->head_dim);
    if (header->n_samples > KEY_STATISTICS_MOST_SAMPLES)
        return refuse(-EBADMSG, sentence, sentence_size, "%s is damaged: it cannot have %u samples", path,
                      header->n_samples);
    const uint64_t head_bytes =
        head_values(shape->head_dim) * sizeof(float) + (uint64_t)header->n_samples * shape->head_dim * sizeof(uint16_t);
    const uint64_t expected =
        sizeof *header + (uint64_t)shape->n_layers * shape->n_kv_heads * head_bytes + sizeof(uint32_t);
    if (n_bytes != expected)
        return refuse(-EBADMSG, sentence, sentence_size, "%s is damaged: %llu bytes long instead of %llu", path,
                      (unsigned long long)n_bytes, (unsigned long long)expected);
    return 0;
}

static uint32_t checksum_of(const struct file_header *header, const struct key_statistics *statistics)
{
    const uint32_t crc = kernels_crc32c(kernels_crc32c(0, header, sizeof *header), statistics->values,
                                        n_values(statistics) * sizeof(float));
    return kernels_crc32c(crc, statistics->samples, samples_bytes(statistics));
}

static int load(int fd, const char *path, const struct row_shape *shape, const uint8_t model_hash[16],
                struct key_statistics **ret_statistics, char *sentence, size_t sentence_size)
{
    struct stat status;
    struct file_header header;
    struct key_statistics *statistics = NULL;
    uint32_t checksum;
    if (fstat(fd, &status) != 0)
        return refuse(-errno, sentence, sentence_size, "%s: %s", path, strerror(errno));
    if (!S_ISREG(status.st_mode) || status.st_size < (off_t)sizeof header)
        return refuse(-EBADMSG, sentence, sentence_size, "%s is not a file of key statistics", path);
    int r = file_read_all(fd, &header, sizeof header);
    if (r == 0)
        r = check_header(path, &header, (uint64_t)status.st_size, shape, model_hash, sentence, sentence_size);
    else
        refuse(r, sentence, sentence_size, "%s cannot be read: %s", path, strerror(-r));
    if (r)
        return r;
    r = key_statistics_new(shape, model_hash, &statistics);
    if (r == 0 && (r = key_statistics_make_samples(statistics, header.n_samples)))
        key_statistics_free(statistics);
    if (r)
        return refuse(r, sentence, sentence_size, "no memory for %s", path);
    statistics->n_tokens = header.n_tokens;
    statistics->text_hash = header.text_hash;
    const size_t n = n_values(statistics);
    if ((r = file_read_all(fd, statistics->values, n * sizeof(float))) ||
        (r = file_read_all(fd, statistics->samples, samples_bytes(statistics))) ||
        (r = file_read_all(fd, &checksum, sizeof checksum))) {
        key_statistics_free(statistics);
        return refuse(r, sentence, sentence_size, "%s cannot be read: %s", path, strerror(-r));
    }
    bool finite = true;
    for (size_t i = 0; i < n; i++)
        finite &= isfinite(statistics->values[i]) != 0;
    for (size_t i = 0; i < samples_bytes(statistics) / sizeof *statistics->samples; i++)
        finite &= (statistics->samples[i] & 0x7c00u) != 0x7c00u;
    if (!finite || checksum != checksum_of(&header, statistics)) {
        key_statistics_free(statistics);
        return refuse(-EBADMSG, sentence, sentence_size, "%s is damaged: %s", path,
                      finite ? "its checksum is another" : "it holds numbers that are none");
    }
    *ret_statistics = statistics;
    return 0;
}

int key_statistics_load(const char *path, const struct row_shape *shape, const uint8_t model_hash[16],
                        struct key_statistics **ret_statistics, char *sentence, size_t sentence_size)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return refuse(-errno, sentence, sentence_size, "%s: %s", path, strerror(errno));
    const int r = load(fd, path, shape, model_hash, ret_statistics, sentence, sentence_size);
    close(fd);
    return r;
}

/* So that the new name outlives a power cut. Best effort: some file systems cannot. */
static void sync_directory_of(const char *path)
{
    char directory[4096];
    const char *slash = strrchr(path, '/');
    const size_t n = slash ? (size_t)(slash - path) + 1 : 0;
    if (n >= sizeof directory)
        return;
    memcpy(directory, path, n);
    directory[n] = '\0';
    const int fd = open(n ? directory : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return;
    (void)fsync(fd);
    close(fd);
}

static int save(int fd, const struct key_statistics *statistics)
{
    struct file_header written = {
        .magic = FILE_MAGIC,
        .version = FILE_VERSION,
        .n_layers = statistics->n_layers,
        .n_kv_heads = statistics->n_kv_heads,
        .head_dim = statistics->head_dim,
        .n_values_per_head = (uint32_t)head_values(statistics->head_dim),
        .n_tokens = statistics->n_tokens,
        .text_hash = statistics->text_hash,
        .n_samples = statistics->n_samples,
    };
    memcpy(written.model_hash, statistics->model_hash, sizeof written.model_hash);
    const uint32_t checksum = checksum_of(&written, statistics);
    int r;
    if ((r = file_write_all(fd, &written, sizeof written)) ||
        (r = file_write_all(fd, statistics->values, n_values(statistics) * sizeof(float))) ||
        (r = file_write_all(fd, statistics->samples, samples_bytes(statistics))) ||
        (r = file_write_all(fd, &checksum, sizeof checksum)))
        return r;
    return fsync(fd) == 0 ? 0 : -errno;
}

int key_statistics_save(const struct key_statistics *statistics, const char *path)
{
    char temporary[4096];
    if (snprintf(temporary, sizeof temporary, "%s.%ld.tmp", path, (long)getpid()) >= (int)sizeof temporary)
        return -ENAMETOOLONG;
    const int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0)
        return -errno;
    int r = save(fd, statistics);
    if (close(fd) != 0 && r == 0)
        r = -errno;
    if (r == 0 && rename(temporary, path) != 0)
        r = -errno;
    if (r == 0)
        sync_directory_of(path);
    else
        unlink(temporary);
    return r;
}
