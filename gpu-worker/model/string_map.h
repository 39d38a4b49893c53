/*
 * string_map.h - byte strings to 32-bit numbers: keys and tensors of a file, tokens of a vocabulary.
 *
 * Owner      whoever made it. Strings are not copied: they outlive the map.
 * Threads    string_map_find() from any thread once filled.
 * Invariant  at most half full, so a search always ends at an empty slot. The hash is not secret: a hostile file can
 *            make searches slow, and is bounded by its own size.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct string_map;

struct string_map *string_map_new(size_t max_strings); /* NULL: no memory */
struct string_map *string_map_free(struct string_map *map);

/* 0; -EEXIST: the string is there already (its number stays); -ENOSPC: more than max_strings. */
int string_map_add(struct string_map *map, const char *string, size_t n_bytes, uint32_t number);
bool string_map_find(const struct string_map *map, const char *string, size_t n_bytes, uint32_t *ret_number);

/* 64-bit hash of some bytes, also for tables of others. */
uint64_t string_map_hash(const void *bytes, size_t n_bytes);
