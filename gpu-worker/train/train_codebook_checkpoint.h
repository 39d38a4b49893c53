/*
 * train_codebook_checkpoint.h - what a training of codebooks has finished, in a file that grows: whoever trains the same again
 * goes on from there.
 *
 * Owner      a job. Threads: one at a time.
 * File       little endian: struct train_codebook_identity with its CRC-32C, then records: number of the sub-space, iterations,
 *            error, variance, f32 centroids, CRC-32C of the record. A record that is not whole ends the file; what is behind it
 *            is cut off.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "gpu-worker/keys/key_codebook.h"

/* All that a result follows from. Files of another identity are begun anew. */
struct train_codebook_identity {
    uint32_t magic, version; /* filled in by _open() */
    uint32_t n_layers, n_kv_heads, head_dim, row_codec, n_dims, n_centroids;
    uint32_t max_iterations, n_offsets;
    uint8_t model_hash[16];
    uint64_t seed, text_hash, n_samples;
};
_Static_assert(sizeof(struct train_codebook_identity) == 80, "no bytes that nobody wrote");

struct train_codebook_space {
    bool done, saved;
    uint32_t n_iterations;
    double error, variance;
};

struct train_codebook_checkpoint;

/*
 * Fills `spaces` [n_layers x n_kv_heads x head_dim / n_dims] and the codebook with what the file has. NULL without a path, or
 * where the file cannot be used: nothing is kept then.
 */
struct train_codebook_checkpoint *train_codebook_checkpoint_open(const char *path,
                                                                 const struct train_codebook_identity *identity,
                                                                 struct train_codebook_space *spaces,
                                                                 struct key_codebook *codebook);
/* Appends what is done and not saved yet, and waits until it is on disk. A failure ends the keeping. Accepts NULL. */
void train_codebook_checkpoint_save(struct train_codebook_checkpoint *checkpoint, struct train_codebook_space *spaces,
                                    const struct key_codebook *codebook);
/* Accepts NULL, returns NULL. */
struct train_codebook_checkpoint *train_codebook_checkpoint_close(struct train_codebook_checkpoint *checkpoint,
                                                                  bool remove);
