/* train_codebook_checkpoint.c - see train_codebook_checkpoint.h. */
#include "gpu-worker/train/train_codebook_checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "common/file.h"
#include "kernels/kernels.h"

#define FILE_MAGIC   0x50434348u /* "HCCP" */
#define FILE_VERSION 2u

struct record_header {
    uint32_t space, n_iterations;
    double error, variance;
};
_Static_assert(sizeof(struct record_header) == 24, "raise FILE_VERSION");

struct train_codebook_checkpoint {
    int file;
    bool broken; /* nothing is written any more */
    uint32_t n_spaces;
    size_t n_values; /* of a sub-space */
    char *path;
    uint8_t *record;
};

static size_t record_bytes(const struct train_codebook_checkpoint *checkpoint)
{
    return sizeof(struct record_header) + checkpoint->n_values * sizeof(float) + sizeof(uint32_t);
}

/* One record; false: there is none that is whole. */
static bool read_record(struct train_codebook_checkpoint *checkpoint, struct train_codebook_space *spaces,
                        struct key_codebook *codebook)
{
    const size_t n_bytes = record_bytes(checkpoint), value_bytes = checkpoint->n_values * sizeof(float);
    const uint8_t *values = checkpoint->record + sizeof(struct record_header);
    struct record_header header;
    uint32_t crc;
    if (file_read_all(checkpoint->file, checkpoint->record, n_bytes) < 0)
        return false;
    memcpy(&header, checkpoint->record, sizeof header);
    memcpy(&crc, values + value_bytes, sizeof crc);
    if (crc != kernels_crc32c(0, checkpoint->record, n_bytes - sizeof crc) || header.space >= checkpoint->n_spaces ||
        !(header.error >= 0) || !isfinite(header.error) || !(header.variance >= 0) || !isfinite(header.variance))
        return false;
    for (size_t i = 0; i < checkpoint->n_values; i++) {
        float value;
        memcpy(&value, values + i * sizeof value, sizeof value);
        if (!isfinite(value))
            return false;
    }
    memcpy(codebook->centroids + header.space * checkpoint->n_values, values, value_bytes);
    spaces[header.space] = (struct train_codebook_space){.done = true,
                                                         .saved = true,
                                                         .n_iterations = header.n_iterations,
                                                         .error = header.error,
                                                         .variance = header.variance};
    return true;
}

/* Leaves the file where the next record goes. */
static bool read_file(struct train_codebook_checkpoint *checkpoint, const struct train_codebook_identity *identity,
                      struct train_codebook_space *spaces, struct key_codebook *codebook)
{
    struct {
        struct train_codebook_identity identity;
        uint32_t crc, padding;
    } wanted = {.identity = *identity}, found;
    wanted.identity.magic = FILE_MAGIC;
    wanted.identity.version = FILE_VERSION;
    wanted.crc = kernels_crc32c(0, &wanted.identity, sizeof wanted.identity);
    off_t end = sizeof wanted;
    if (file_read_all(checkpoint->file, &found, sizeof found) == 0 && memcmp(&found, &wanted, sizeof found) == 0) {
        while (read_record(checkpoint, spaces, codebook))
            end += (off_t)record_bytes(checkpoint);
        return ftruncate(checkpoint->file, end) == 0 && lseek(checkpoint->file, end, SEEK_SET) == end;
    }
    return ftruncate(checkpoint->file, 0) == 0 && lseek(checkpoint->file, 0, SEEK_SET) == 0 &&
           file_write_all(checkpoint->file, &wanted, sizeof wanted) == 0;
}

struct train_codebook_checkpoint *train_codebook_checkpoint_open(const char *path,
                                                                 const struct train_codebook_identity *identity,
                                                                 struct train_codebook_space *spaces,
                                                                 struct key_codebook *codebook)
{
    if (path[0] == '\0')
        return NULL;
    struct train_codebook_checkpoint *checkpoint = calloc(1, sizeof *checkpoint);
    if (checkpoint == NULL)
        return NULL;
    checkpoint->n_spaces = identity->n_layers * identity->n_kv_heads * (identity->head_dim / identity->n_dims);
    checkpoint->n_values = (size_t)identity->n_centroids * identity->n_dims;
    checkpoint->path = strdup(path);
    checkpoint->record = malloc(record_bytes(checkpoint));
    checkpoint->file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    /* Another worker of the same model may train the same: it goes without. */
    if (checkpoint->path == NULL || checkpoint->record == NULL || checkpoint->file < 0 ||
        flock(checkpoint->file, LOCK_EX | LOCK_NB) < 0 || !read_file(checkpoint, identity, spaces, codebook))
        return train_codebook_checkpoint_close(checkpoint, false);
    return checkpoint;
}

void train_codebook_checkpoint_save(struct train_codebook_checkpoint *checkpoint, struct train_codebook_space *spaces,
                                    const struct key_codebook *codebook)
{
    bool wrote = false;
    if (checkpoint == NULL)
        return;
    for (uint32_t i = 0; i < checkpoint->n_spaces && !checkpoint->broken; i++) {
        if (!spaces[i].done || spaces[i].saved)
            continue;
        const struct record_header header = {i, spaces[i].n_iterations, spaces[i].error, spaces[i].variance};
        const size_t value_bytes = checkpoint->n_values * sizeof(float), n_bytes = record_bytes(checkpoint);
        memcpy(checkpoint->record, &header, sizeof header);
        memcpy(checkpoint->record + sizeof header, codebook->centroids + i * checkpoint->n_values, value_bytes);
        const uint32_t crc = kernels_crc32c(0, checkpoint->record, n_bytes - sizeof crc);
        memcpy(checkpoint->record + sizeof header + value_bytes, &crc, sizeof crc);
        checkpoint->broken = file_write_all(checkpoint->file, checkpoint->record, n_bytes) < 0;
        spaces[i].saved = wrote = true;
    }
    if (wrote && fsync(checkpoint->file) < 0)
        checkpoint->broken = true;
}

struct train_codebook_checkpoint *train_codebook_checkpoint_close(struct train_codebook_checkpoint *checkpoint,
                                                                  bool remove)
{
    if (checkpoint == NULL)
        return NULL;
    if (remove)
        unlink(checkpoint->path);
    if (checkpoint->file >= 0)
        close(checkpoint->file);
    free(checkpoint->path);
    free(checkpoint->record);
    free(checkpoint);
    return NULL;
}
