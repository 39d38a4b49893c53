/*
 * string_map.c - open addressing with linear probing; the full hash is kept, so strings are rarely compared in vain.
 *
 * Threads    see the header.
 */
#include "gpu-worker/model/string_map.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct slot {
    const char *string; /* NULL: empty */
    size_t n_bytes;
    uint64_t hash;
    uint32_t number;
};

struct string_map {
    size_t mask;
    size_t n_left;
    struct slot slots[];
};

uint64_t string_map_hash(const void *bytes, size_t n_bytes)
{
    const unsigned char *at = bytes;
    uint64_t hash = 0x9e3779b97f4a7c15u ^ n_bytes;
    while (n_bytes >= 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        hash = (hash ^ word) * 0xff51afd7ed558ccdu;
        hash ^= hash >> 32;
        at += 8;
        n_bytes -= 8;
    }
    for (; n_bytes; n_bytes--)
        hash = (hash ^ *at++) * 0x100000001b3u;
    hash *= 0xc4ceb9fe1a85ec53u;
    return hash ^ hash >> 29;
}

struct string_map *string_map_new(size_t max_strings)
{
    size_t n_slots = 16;
    while (n_slots / 2 < max_strings)
        n_slots *= 2;
    struct string_map *map = calloc(1, sizeof *map + n_slots * sizeof map->slots[0]);
    if (!map)
        return NULL;
    map->mask = n_slots - 1;
    map->n_left = max_strings;
    return map;
}

struct string_map *string_map_free(struct string_map *map)
{
    free(map);
    return NULL;
}

/* The slot that holds the string, or the empty one where it would go. */
static size_t probe(const struct string_map *map, const char *string, size_t n_bytes, uint64_t hash)
{
    size_t i = (size_t)hash & map->mask;
    for (;; i = (i + 1) & map->mask) {
        const struct slot *slot = &map->slots[i];
        if (!slot->string ||
            (slot->hash == hash && slot->n_bytes == n_bytes && memcmp(slot->string, string, n_bytes) == 0))
            return i;
    }
}

int string_map_add(struct string_map *map, const char *string, size_t n_bytes, uint32_t number)
{
    uint64_t hash = string_map_hash(string, n_bytes);
    struct slot *slot = &map->slots[probe(map, string, n_bytes, hash)];
    if (slot->string)
        return -EEXIST;
    if (map->n_left == 0)
        return -ENOSPC;
    map->n_left--;
    *slot = (struct slot){string, n_bytes, hash, number};
    return 0;
}

bool string_map_find(const struct string_map *map, const char *string, size_t n_bytes, uint32_t *ret_number)
{
    const struct slot *slot = &map->slots[probe(map, string, n_bytes, string_map_hash(string, n_bytes))];
    if (!slot->string)
        return false;
    *ret_number = slot->number;
    return true;
}
