/*
 * quantizers.h - the key codecs as the worker's model has them: each made when a policy first asks for it, from what was
 * learnt from the model and is kept beside it.
 *
 * Files      DIRECTORY/HASH.statistics (key_statistics.h), DIRECTORY/HASH.pqD-C.codebook (key_codebook.h); HASH is the model's content
 *            hash in hexadecimal. A file of another model or a damaged one is refused with its name.
 * Owner      the worker. Threads: the engine thread (before it runs: the main thread).
 * Lifetime   a quantizer lives as long as the object, also when newer statistics or codebooks have replaced what it was made
 *            from: sessions that use it go on; the next run of a session takes the new one, and its keys are made again.
 */
#pragma once

#include "gpu-worker/keys/key_codebook.h"
#include "gpu-worker/keys/codec.h"
#include "gpu-worker/keys/key_statistics.h"
#include "proto/layout.h"

struct quantizers;

/* directory: NULL: nothing is kept on disk. -ENOMEM. */
int quantizers_new(const struct row_shape *shape, const uint8_t model_hash[16], const char *directory,
                   struct quantizers **ret_quantizers);
struct quantizers *quantizers_free(struct quantizers *quantizers); /* accepts NULL, returns NULL */

/*
 * The quantizer that a policy's terms name; NULL with 0 where it looks at no keys. With a sentence:
 * -ENOENT there are no statistics or no such codebook yet (how to get them is said); -EINVAL head_dim does not divide into
 * such sub-spaces; -EBADMSG a damaged file or one of another model; -ENOMEM.
 */
int quantizers_find(struct quantizers *quantizers, const struct policy_terms *terms,
                    const struct key_quantizer **ret_quantizer, char *sentence, size_t sentence_size);

/* Is what the terms need there (loaded, or as a file that is whole)? No tables are made. */
bool quantizers_has(struct quantizers *quantizers, const struct policy_terms *terms);

/*
 * From now on these are used; taken over, also on failure. Kept on disk if there is a directory: a failure to write is told in
 * the sentence and by *ret_kept, and changes nothing else. -EINVAL: of another shape or model.
 */
int quantizers_take_statistics(struct quantizers *quantizers, struct key_statistics *statistics, bool *ret_kept,
                               char *sentence, size_t sentence_size);
int quantizers_take_codebook(struct quantizers *quantizers, struct key_codebook *codebook, bool *ret_kept,
                             char *sentence, size_t sentence_size);

/* Where this codebook is kept; "" without a directory. */
void quantizers_codebook_path(const struct quantizers *quantizers, uint32_t n_dims, uint32_t n_centroids, char *path,
                              size_t path_size);
/* Path of a file that a training may keep what it has so far in; "" without a directory. */
void quantizers_checkpoint_path(const struct quantizers *quantizers, uint32_t n_dims, uint32_t n_centroids, char *path,
                                size_t path_size);
const uint8_t *quantizers_model_hash(const struct quantizers *quantizers);
