/*
 * gguf_values.c - metadata entries as C values: conversions and range checks.
 *
 * Threads    any; the file is immutable.
 */
#include "gpu-worker/model/gguf_entry.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Element `index` of an integer entry; false: not an integer type, or a u64 beyond i64. */
static bool integer_at(const struct gguf_entry *entry, size_t index, int64_t *ret_value)
{
    const uint8_t *at = entry->data + index * gguf_value_bytes[entry->type];
    uint64_t word = 0;
    memcpy(&word, at, gguf_value_bytes[entry->type]);
    switch (entry->type) {
    case GGUF_VALUE_U8:
    case GGUF_VALUE_U16:
    case GGUF_VALUE_U32:
    case GGUF_VALUE_U64:
        *ret_value = word > INT64_MAX ? INT64_MAX : (int64_t)word;
        return true;
    case GGUF_VALUE_I8:
        *ret_value = (int8_t)word;
        return true;
    case GGUF_VALUE_I16:
        *ret_value = (int16_t)word;
        return true;
    case GGUF_VALUE_I32:
        *ret_value = (int32_t)word;
        return true;
    case GGUF_VALUE_I64:
        *ret_value = (int64_t)word;
        return true;
    default:
        return false;
    }
}

static bool number_at(const struct gguf_entry *entry, size_t index, float *ret_value)
{
    const uint8_t *at = entry->data + index * gguf_value_bytes[entry->type];
    double wide;
    int64_t integer;
    if (entry->type == GGUF_VALUE_F32) {
        memcpy(ret_value, at, sizeof *ret_value);
    } else if (entry->type == GGUF_VALUE_F64) {
        memcpy(&wide, at, sizeof wide);
        *ret_value = (float)wide;
    } else {
        if (!integer_at(entry, index, &integer))
            return false;
        *ret_value = (float)integer;
    }
    return true;
}

bool gguf_has(const struct gguf *gguf, const char *key)
{
    return gguf_find_entry(gguf, key) != NULL;
}

int gguf_get_u32(const struct gguf *gguf, const char *key, uint32_t *ret_value)
{
    const struct gguf_entry *entry = gguf_find_entry(gguf, key);
    int64_t value;
    if (!entry)
        return -ENOENT;
    if (entry->is_array || !integer_at(entry, 0, &value))
        return -EINVAL;
    if (value < 0 || value > UINT32_MAX)
        return -ERANGE;
    *ret_value = (uint32_t)value;
    return 0;
}

int gguf_get_f32(const struct gguf *gguf, const char *key, float *ret_value)
{
    const struct gguf_entry *entry = gguf_find_entry(gguf, key);
    float value;
    if (!entry)
        return -ENOENT;
    if (entry->is_array || !number_at(entry, 0, &value))
        return -EINVAL;
    if (!isfinite(value))
        return -ERANGE;
    *ret_value = value;
    return 0;
}

int gguf_get_bool(const struct gguf *gguf, const char *key, bool *ret_value)
{
    const struct gguf_entry *entry = gguf_find_entry(gguf, key);
    if (!entry)
        return -ENOENT;
    if (entry->is_array || entry->type != GGUF_VALUE_BOOL)
        return -EINVAL;
    *ret_value = *entry->data != 0;
    return 0;
}

/* The file was checked when it was opened, so this cannot pass its end. */
static const uint8_t *string_at(const uint8_t *at, struct gguf_string *ret_string)
{
    uint64_t n_bytes;
    memcpy(&n_bytes, at, sizeof n_bytes);
    *ret_string = (struct gguf_string){(const char *)at + sizeof n_bytes, (size_t)n_bytes};
    return at + sizeof n_bytes + n_bytes;
}

int gguf_get_string(const struct gguf *gguf, const char *key, struct gguf_string *ret_value)
{
    const struct gguf_entry *entry = gguf_find_entry(gguf, key);
    if (!entry)
        return -ENOENT;
    if (entry->is_array || entry->type != GGUF_VALUE_STRING)
        return -EINVAL;
    string_at(entry->data, ret_value);
    return 0;
}

int gguf_get_strings(const struct gguf *gguf, const char *key, struct gguf_string **ret_values, size_t *ret_n)
{
    const struct gguf_entry *entry = gguf_find_entry(gguf, key);
    if (!entry)
        return -ENOENT;
    if (!entry->is_array || entry->type != GGUF_VALUE_STRING)
        return -EINVAL;
    struct gguf_string *values = calloc((size_t)entry->n_elements + 1, sizeof *values);
    if (!values)
        return -ENOMEM;
    const uint8_t *at = entry->data;
    for (size_t i = 0; i < entry->n_elements; i++)
        at = string_at(at, &values[i]);
    *ret_values = values;
    *ret_n = (size_t)entry->n_elements;
    return 0;
}

int gguf_get_i32s(const struct gguf *gguf, const char *key, int32_t **ret_values, size_t *ret_n)
{
    const struct gguf_entry *entry = gguf_find_entry(gguf, key);
    if (!entry)
        return -ENOENT;
    if (!entry->is_array || entry->type == GGUF_VALUE_STRING)
        return -EINVAL;
    int32_t *values = calloc((size_t)entry->n_elements + 1, sizeof *values);
    if (!values)
        return -ENOMEM;
    for (size_t i = 0; i < entry->n_elements; i++) {
        int64_t value = 0;
        int r = integer_at(entry, i, &value) ? 0 : -EINVAL;
        if (r == 0 && (value < INT32_MIN || value > INT32_MAX))
            r = -ERANGE;
        if (r) {
            free(values);
            return r;
        }
        values[i] = (int32_t)value;
    }
    *ret_values = values;
    *ret_n = (size_t)entry->n_elements;
    return 0;
}

int gguf_get_f32s(const struct gguf *gguf, const char *key, float **ret_values, size_t *ret_n)
{
    const struct gguf_entry *entry = gguf_find_entry(gguf, key);
    if (!entry)
        return -ENOENT;
    if (!entry->is_array || entry->type == GGUF_VALUE_STRING)
        return -EINVAL;
    float *values = calloc((size_t)entry->n_elements + 1, sizeof *values);
    if (!values)
        return -ENOMEM;
    for (size_t i = 0; i < entry->n_elements; i++) {
        if (!number_at(entry, i, &values[i])) {
            free(values);
            return -EINVAL;
        }
    }
    *ret_values = values;
    *ret_n = (size_t)entry->n_elements;
    return 0;
}

uint64_t gguf_array_size(const struct gguf *gguf, const char *key)
{
    const struct gguf_entry *entry = gguf_find_entry(gguf, key);
    return entry && entry->is_array ? entry->n_elements : 0;
}
