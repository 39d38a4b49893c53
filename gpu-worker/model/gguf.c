/*
 * gguf.c - reads the head of a GGUF file: one cursor that never passes the end, one table of keys, one of tensors.
 *
 * Owner      whoever opened it.
 * Threads    immutable after gguf_open(), any thread.
 * Invariant  a value's bytes lie inside the mapping once its entry is in the table.
 */
#include "gpu-worker/model/gguf.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gpu-worker/model/gguf_entry.h"
#include "gpu-worker/model/string_map.h"

/* Files in the wild have tens of keys and at most a few thousand tensors; far above that a count is damage. */
enum { MAX_KEYS = 1 << 16, MAX_TENSORS = 1 << 20, MAX_KEY_BYTES = 1 << 10, MAX_DIMENSIONS = 4 };
enum { DEFAULT_ALIGNMENT = 32, MAX_ALIGNMENT = 1 << 16 };

const uint8_t gguf_value_bytes[GGUF_N_VALUE_TYPES] = {
    [GGUF_VALUE_U8] = 1,  [GGUF_VALUE_I8] = 1,  [GGUF_VALUE_U16] = 2, [GGUF_VALUE_I16] = 2,
    [GGUF_VALUE_U32] = 4, [GGUF_VALUE_I32] = 4, [GGUF_VALUE_F32] = 4, [GGUF_VALUE_BOOL] = 1,
    [GGUF_VALUE_U64] = 8, [GGUF_VALUE_I64] = 8, [GGUF_VALUE_F64] = 8,
};

struct gguf {
    const uint8_t *bytes;
    size_t n_bytes;
    size_t n_head_bytes;
    size_t body_offset;
    uint32_t alignment;
    uint32_t n_entries;
    uint32_t n_tensors;
    struct gguf_entry *entries;
    struct tensor *tensors;
    struct string_map *keys;         /* -> index in entries */
    struct string_map *tensor_names; /* -> index in tensors */
};

/* Where reading stands, and where to complain. */
struct cursor {
    const uint8_t *at;
    size_t n_left;
    const char *path;
    char *error;
    size_t error_size;
};

__attribute__((format(printf, 3, 4))) static int fail(const struct cursor *cursor, int code, const char *format, ...)
{
    char reason[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(reason, sizeof reason, format, arguments);
    va_end(arguments);
    if (cursor->error_size)
        snprintf(cursor->error, cursor->error_size, "%s: %s", cursor->path, reason);
    return code;
}

const char *gguf_printable(struct gguf_string string, char *buffer, size_t buffer_size)
{
    size_t n = 0;
    if (buffer_size == 0)
        return "";
    for (; n < string.n_bytes && n + 1 < buffer_size; n++) {
        unsigned char byte = (unsigned char)string.data[n];
        buffer[n] = byte >= 0x20 && byte < 0x7f ? (char)byte : '?';
    }
    buffer[n] = 0;
    return buffer;
}

static bool take(struct cursor *cursor, void *out, size_t n_bytes)
{
    if (cursor->n_left < n_bytes)
        return false;
    memcpy(out, cursor->at, n_bytes);
    cursor->at += n_bytes;
    cursor->n_left -= n_bytes;
    return true;
}

static bool take_string(struct cursor *cursor, struct gguf_string *ret_string)
{
    uint64_t n_bytes;
    if (!take(cursor, &n_bytes, sizeof n_bytes) || n_bytes > cursor->n_left)
        return false;
    *ret_string = (struct gguf_string){(const char *)cursor->at, (size_t)n_bytes};
    cursor->at += n_bytes;
    cursor->n_left -= (size_t)n_bytes;
    return true;
}

/* Names end up in messages and in C strings. */
static bool is_name(struct gguf_string string, size_t max_bytes)
{
    if (string.n_bytes == 0 || string.n_bytes > max_bytes)
        return false;
    for (size_t i = 0; i < string.n_bytes; i++)
        if (string.data[i] <= 0x20 || string.data[i] >= 0x7f)
            return false;
    return true;
}

static int read_value(struct cursor *cursor, const char *key, struct gguf_entry *entry)
{
    uint32_t type;
    if (!take(cursor, &type, sizeof type))
        return fail(cursor, -EINVAL, "truncated in the metadata, at key %s", key);
    entry->n_elements = 1;
    if (type == GGUF_VALUE_ARRAY) {
        entry->is_array = true;
        if (!take(cursor, &type, sizeof type) || !take(cursor, &entry->n_elements, sizeof entry->n_elements))
            return fail(cursor, -EINVAL, "truncated in the metadata, at key %s", key);
        if (type == GGUF_VALUE_ARRAY)
            return fail(cursor, -ENOTSUP, "metadata key %s is an array of arrays", key);
    }
    if (type >= GGUF_N_VALUE_TYPES)
        return fail(cursor, -EINVAL, "metadata key %s has the unknown type %u", key, type);
    entry->type = (enum gguf_value_type)type;
    entry->data = cursor->at;
    if (entry->type == GGUF_VALUE_STRING) {
        /* A string takes 8 bytes at least, so this loop is bounded by the file's size. */
        struct gguf_string string;
        for (uint64_t i = 0; i < entry->n_elements; i++)
            if (!take_string(cursor, &string))
                return fail(cursor, -EINVAL,
                            "truncated in the metadata: the strings of key %s pass the end of the file", key);
        return 0;
    }
    if (entry->n_elements > cursor->n_left / gguf_value_bytes[type])
        return fail(cursor, -EINVAL, "truncated in the metadata: the value of key %s passes the end of the file", key);
    size_t n_bytes = (size_t)entry->n_elements * gguf_value_bytes[type];
    if (entry->type == GGUF_VALUE_BOOL)
        for (size_t i = 0; i < n_bytes; i++)
            if (cursor->at[i] > 1)
                return fail(cursor, -EINVAL, "metadata key %s holds %u as a truth value", key, cursor->at[i]);
    cursor->at += n_bytes;
    cursor->n_left -= n_bytes;
    return 0;
}

static int read_metadata(struct gguf *gguf, struct cursor *cursor)
{
    for (uint32_t i = 0; i < gguf->n_entries; i++) {
        struct gguf_string name;
        char key[96];
        if (!take_string(cursor, &name))
            return fail(cursor, -EINVAL, "truncated in the metadata, at key %u of %u", i, gguf->n_entries);
        if (!is_name(name, MAX_KEY_BYTES))
            return fail(cursor, -EINVAL, "the name of metadata key %u is empty, too long or not printable", i);
        gguf_printable(name, key, sizeof key);
        int r = string_map_add(gguf->keys, name.data, name.n_bytes, i);
        if (r == -EEXIST)
            return fail(cursor, -EINVAL, "metadata key %s appears twice", key);
        r = read_value(cursor, key, &gguf->entries[i]);
        if (r)
            return r;
    }
    return 0;
}

/* The tensor's place is an offset here; place_tensors() turns it into an address once the body's start is known. */
static int read_tensor_info(struct gguf *gguf, struct cursor *cursor, uint32_t index, uint64_t *ret_offset)
{
    struct tensor *tensor = &gguf->tensors[index];
    struct gguf_string name;
    uint32_t n_dimensions, type;
    uint64_t dimensions[MAX_DIMENSIONS], n_rows = 1;
    static const char truncated[] = "truncated in the tensor list, at tensor %u of %u";

    if (!take_string(cursor, &name))
        return fail(cursor, -EINVAL, truncated, index, gguf->n_tensors);
    if (!is_name(name, sizeof tensor->name - 1))
        return fail(cursor, -EINVAL, "the name of tensor %u is empty, too long or not printable", index);
    gguf_printable(name, tensor->name, sizeof tensor->name);
    if (string_map_add(gguf->tensor_names, name.data, name.n_bytes, index) == -EEXIST)
        return fail(cursor, -EINVAL, "tensor %s appears twice", tensor->name);
    if (!take(cursor, &n_dimensions, sizeof n_dimensions))
        return fail(cursor, -EINVAL, truncated, index, gguf->n_tensors);
    if (n_dimensions == 0 || n_dimensions > MAX_DIMENSIONS)
        return fail(cursor, -EINVAL, "tensor %s has %u dimensions", tensor->name, n_dimensions);
    if (!take(cursor, dimensions, n_dimensions * sizeof dimensions[0]) || !take(cursor, &type, sizeof type) ||
        !take(cursor, ret_offset, sizeof *ret_offset))
        return fail(cursor, -EINVAL, truncated, index, gguf->n_tensors);

    for (uint32_t i = 0; i < n_dimensions; i++) {
        if (dimensions[i] == 0 || dimensions[i] > INT32_MAX)
            return fail(cursor, -EINVAL, "tensor %s has a dimension of %llu", tensor->name,
                        (unsigned long long)dimensions[i]);
        if (i > 0 && (n_rows *= dimensions[i]) > INT32_MAX)
            return fail(cursor, -EINVAL, "tensor %s has too many rows", tensor->name);
    }
    if (!tensor_block(type))
        return fail(cursor, -ENOTSUP, "tensor %s has type %s (%u), which is not supported", tensor->name,
                    tensor_type_name(type), type);
    tensor->type = (enum tensor_type)type;
    tensor->n_columns = (uint32_t)dimensions[0];
    tensor->n_rows = (uint32_t)n_rows;
    size_t n_row_bytes = tensor_row_bytes(tensor->type, tensor->n_columns);
    if (n_row_bytes == 0)
        return fail(cursor, -EINVAL, "tensor %s: rows of %u columns are not whole blocks of type %s", tensor->name,
                    tensor->n_columns, tensor_type_name(type));
    tensor->n_bytes = n_row_bytes * tensor->n_rows; /* < 2^31 x 2^33 */
    return 0;
}

static int place_tensors(struct gguf *gguf, struct cursor *cursor, const uint64_t *offsets)
{
    size_t mask = gguf->alignment - 1;
    gguf->n_head_bytes = gguf->n_bytes - cursor->n_left;
    gguf->body_offset = (gguf->n_head_bytes + mask) & ~mask;
    size_t n_body_bytes = gguf->n_bytes > gguf->body_offset ? gguf->n_bytes - gguf->body_offset : 0;
    for (uint32_t i = 0; i < gguf->n_tensors; i++) {
        struct tensor *tensor = &gguf->tensors[i];
        if (offsets[i] & mask)
            return fail(cursor, -EINVAL, "tensor %s is not aligned to %u bytes", tensor->name, gguf->alignment);
        if (offsets[i] > n_body_bytes || tensor->n_bytes > n_body_bytes - offsets[i])
            return fail(cursor, -EINVAL, "truncated: tensor %s passes the end of the file", tensor->name);
        tensor->data = gguf->bytes + gguf->body_offset + offsets[i];
    }
    return 0;
}

static int read_alignment(struct gguf *gguf, struct cursor *cursor)
{
    uint32_t alignment;
    int r = gguf_get_u32(gguf, "general.alignment", &alignment);
    if (r == -ENOENT)
        alignment = DEFAULT_ALIGNMENT;
    else if (r)
        return fail(cursor, -EINVAL, "general.alignment is not a number of bytes");
    if (alignment < DEFAULT_ALIGNMENT || alignment > MAX_ALIGNMENT || (alignment & (alignment - 1)))
        return fail(cursor, -ENOTSUP, "general.alignment %u is not a power of two from %d to %d", alignment,
                    DEFAULT_ALIGNMENT, MAX_ALIGNMENT);
    gguf->alignment = alignment;
    return 0;
}

static int read_counts(struct gguf *gguf, struct cursor *cursor)
{
    char magic[4];
    uint32_t version;
    uint64_t n_tensors, n_entries;
    if (!take(cursor, magic, sizeof magic))
        return fail(cursor, -EINVAL, "not a GGUF file: it has %zu bytes", gguf->n_bytes);
    if (memcmp(magic, "GGUF", 4) != 0)
        return fail(cursor, -EINVAL, "not a GGUF file: it starts with %02x %02x %02x %02x", (unsigned char)magic[0],
                    (unsigned char)magic[1], (unsigned char)magic[2], (unsigned char)magic[3]);
    if (!take(cursor, &version, sizeof version))
        return fail(cursor, -EINVAL, "truncated after the magic number");
    if (version != 0 && (version & 0xffff) == 0)
        return fail(cursor, -ENOTSUP, "a big-endian GGUF file (version %u); only little-endian ones are supported",
                    __builtin_bswap32(version));
    if (version != 3)
        return fail(cursor, -ENOTSUP, "GGUF version %u is not supported, only version 3", version);
    if (!take(cursor, &n_tensors, sizeof n_tensors) || !take(cursor, &n_entries, sizeof n_entries))
        return fail(cursor, -EINVAL, "truncated in the header");
    /* Smallest entries: length, one byte, type, value; length, one byte, dimensions, one dimension, type, offset. */
    if (n_entries > MAX_KEYS || n_entries > cursor->n_left / 14)
        return fail(cursor, -EINVAL, "damaged or truncated: it claims %llu metadata keys",
                    (unsigned long long)n_entries);
    if (n_tensors > MAX_TENSORS || n_tensors > cursor->n_left / 33)
        return fail(cursor, -EINVAL, "damaged or truncated: it claims %llu tensors", (unsigned long long)n_tensors);
    gguf->n_entries = (uint32_t)n_entries;
    gguf->n_tensors = (uint32_t)n_tensors;
    return 0;
}

static int read_head(struct gguf *gguf, struct cursor *cursor)
{
    uint64_t *offsets = NULL;
    int r = read_counts(gguf, cursor);
    if (r)
        return r;
    gguf->entries = calloc((size_t)gguf->n_entries + 1, sizeof *gguf->entries);
    gguf->tensors = calloc((size_t)gguf->n_tensors + 1, sizeof *gguf->tensors);
    offsets = calloc((size_t)gguf->n_tensors + 1, sizeof *offsets);
    gguf->keys = string_map_new(gguf->n_entries);
    gguf->tensor_names = string_map_new(gguf->n_tensors);
    if (!gguf->entries || !gguf->tensors || !offsets || !gguf->keys || !gguf->tensor_names)
        r = fail(cursor, -ENOMEM, "no memory for its tables");
    if (r == 0)
        r = read_metadata(gguf, cursor);
    if (r == 0)
        r = read_alignment(gguf, cursor);
    for (uint32_t i = 0; r == 0 && i < gguf->n_tensors; i++)
        r = read_tensor_info(gguf, cursor, i, &offsets[i]);
    if (r == 0)
        r = place_tensors(gguf, cursor, offsets);
    free(offsets);
    return r;
}

static int map_file(struct gguf *gguf, const struct cursor *cursor)
{
    struct stat status;
    int fd = open(cursor->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        int code = errno;
        return fail(cursor, -code, "%s", strerror(code));
    }
    int r = 0;
    if (fstat(fd, &status) < 0)
        r = fail(cursor, -EIO, "its size is unknown");
    else if (!S_ISREG(status.st_mode))
        r = fail(cursor, -EINVAL, "not a regular file");
    else if (status.st_size == 0)
        r = fail(cursor, -EINVAL, "not a GGUF file: it is empty");
    if (r == 0) {
        void *bytes = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (bytes == MAP_FAILED) {
            int code = errno;
            r = fail(cursor, -code, "cannot map it: %s", strerror(code));
        } else {
            gguf->bytes = bytes;
            gguf->n_bytes = (size_t)status.st_size;
        }
    }
    close(fd);
    return r;
}

int gguf_open(const char *path, struct gguf **ret_gguf, char *error, size_t error_size)
{
    struct cursor cursor = {.path = path, .error = error, .error_size = error_size};
    struct gguf *gguf = calloc(1, sizeof *gguf);
    if (!gguf)
        return fail(&cursor, -ENOMEM, "no memory");
    int r = map_file(gguf, &cursor);
    if (r == 0) {
        cursor.at = gguf->bytes;
        cursor.n_left = gguf->n_bytes;
        r = read_head(gguf, &cursor);
    }
    if (r) {
        gguf_close(gguf);
        return r;
    }
    *ret_gguf = gguf;
    return 0;
}

struct gguf *gguf_close(struct gguf *gguf)
{
    if (!gguf)
        return NULL;
    if (gguf->bytes)
        munmap((void *)(uintptr_t)gguf->bytes, gguf->n_bytes);
    string_map_free(gguf->keys);
    string_map_free(gguf->tensor_names);
    free(gguf->entries);
    free(gguf->tensors);
    free(gguf);
    return NULL;
}

uint32_t gguf_n_tensors(const struct gguf *gguf)
{
    return gguf->n_tensors;
}

const struct tensor *gguf_tensor(const struct gguf *gguf, uint32_t index)
{
    return &gguf->tensors[index];
}

const struct tensor *gguf_find_tensor(const struct gguf *gguf, const char *name)
{
    uint32_t index;
    return string_map_find(gguf->tensor_names, name, strlen(name), &index) ? &gguf->tensors[index] : NULL;
}

struct gguf_string gguf_head(const struct gguf *gguf)
{
    return (struct gguf_string){(const char *)gguf->bytes, gguf->n_head_bytes};
}

struct gguf_string gguf_body(const struct gguf *gguf)
{
    if (gguf->n_bytes <= gguf->body_offset)
        return (struct gguf_string){(const char *)gguf->bytes, 0};
    return (struct gguf_string){(const char *)gguf->bytes + gguf->body_offset, gguf->n_bytes - gguf->body_offset};
}

const struct gguf_entry *gguf_find_entry(const struct gguf *gguf, const char *key)
{
    uint32_t index;
    return string_map_find(gguf->keys, key, strlen(key), &index) ? &gguf->entries[index] : NULL;
}
