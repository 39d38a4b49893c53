/*
 * gguf.h - a GGUF v3 file, mapped read-only: typed metadata and where the tensors lie.
 *
 * Owner      whoever opened it; strings and tensor data point into the mapping and live until gguf_close().
 * Threads    immutable after gguf_open(), any thread.
 * Invariant  every count, length, offset and type was checked against the file's size before it is handed out;
 *            keys and tensor names are unique, printable ASCII. What values mean is for the caller to check.
 * Refuses    other versions, big-endian files, tensor types that tensor.h does not know, nested arrays.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu-worker/model/tensor.h"

struct gguf;

/* Bytes in the mapping, not terminated, possibly not UTF-8. */
struct gguf_string {
    const char *data;
    size_t n_bytes;
};

/*
 * On failure `error` holds one line that names the file and what is wrong.
 * -ENOENT, -EACCES ...: from open(); -EINVAL: not a GGUF file or a damaged one; -ENOTSUP: valid but not for us; -ENOMEM.
 */
int gguf_open(const char *path, struct gguf **ret_gguf, char *error, size_t error_size);
struct gguf *gguf_close(struct gguf *gguf); /* accepts NULL, returns NULL */

uint32_t gguf_n_tensors(const struct gguf *gguf);
const struct tensor *gguf_tensor(const struct gguf *gguf, uint32_t index);
const struct tensor *gguf_find_tensor(const struct gguf *gguf, const char *name); /* NULL: none */

/* Everything before the tensor data (header, metadata, tensor infos), for an identity of the file. */
struct gguf_string gguf_head(const struct gguf *gguf);

/* Bytes of the tensor data. */
struct gguf_string gguf_body(const struct gguf *gguf);

/*
 * Metadata. -ENOENT: no such key; -EINVAL: of another type; -ERANGE: does not fit.
 * Numbers: u32 from any integer type, f32 from any float or integer type.
 */
bool gguf_has(const struct gguf *gguf, const char *key);
int gguf_get_u32(const struct gguf *gguf, const char *key, uint32_t *ret_value);
int gguf_get_f32(const struct gguf *gguf, const char *key, float *ret_value);
int gguf_get_bool(const struct gguf *gguf, const char *key, bool *ret_value);
int gguf_get_string(const struct gguf *gguf, const char *key, struct gguf_string *ret_value);

/* Arrays are copied; the caller frees *ret_values (not NULL even if empty). Also -ENOMEM. */
int gguf_get_strings(const struct gguf *gguf, const char *key, struct gguf_string **ret_values, size_t *ret_n);
int gguf_get_i32s(const struct gguf *gguf, const char *key, int32_t **ret_values, size_t *ret_n);
int gguf_get_f32s(const struct gguf *gguf, const char *key, float **ret_values, size_t *ret_n);

/* Elements of an array of any type; 0: no such key, or not an array. */
uint64_t gguf_array_size(const struct gguf *gguf, const char *key);

/* A string from the file as one printable line, cut to fit (for messages). Returns buffer. */
const char *gguf_printable(struct gguf_string string, char *buffer, size_t buffer_size);
