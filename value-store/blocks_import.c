/*
 * blocks_import.c - a block of another store becomes ours: ids, rows and sums, each before the count that makes it count.
 *
 * The other store's memory is not believed: a header is copied once and checked as a whole, and before a count of ours is
 * written the block must still be the one that was checked, since its store may have freed and reused it meanwhile.
 */
#include "value-store/blocks_private.h"

#include <errno.h>
#include <string.h>

int blocks_import_open(const struct blocks *blocks, const void *segment, uint64_t n_bytes, uint32_t store,
                       struct blocks_source *ret_source)
{
    struct segment_header header;
    if (n_bytes < LAYOUT_PAGE_BYTES)
        return -EPROTO;
    memcpy(&header, segment, sizeof(header));
    int result = layout_check_segment(&header, n_bytes);
    if (result < 0)
        return result;
    if (header.store != store)
        return -EXDEV;
    if (memcmp(&header.shape, &blocks->shape, sizeof(header.shape)) != 0)
        return -EMEDIUMTYPE;
    *ret_source = (struct blocks_source){
        .segment = segment,
        .blocks_offset = header.blocks_offset,
        .block_bytes = header.block_bytes,
        .n_blocks = header.n_blocks,
    };
    return 0;
}

/* What is to be copied, from where: a header's copy that agrees with itself. */
struct import {
    const struct block_header
        *from;                  /* in foreign memory: for rows and sums, and to look whether it is still the same */
    struct block_header header; /* counts as they were when it was looked at; what they count is there */
    struct block_header *to;
};

/* Its store may append meanwhile: counts are read before what they count, and nothing else of what it writes then. */
static void take_header(const struct block_header *from, uint32_t n_layers, struct block_header *ret_header)
{
    uint32_t state = atomic_load_explicit(&from->state, memory_order_acquire);
    atomic_store_explicit(&ret_header->state, state, memory_order_relaxed);
    for (uint32_t layer = 0; layer < n_layers; layer++) {
        uint8_t n_rows = atomic_load_explicit(&from->n_rows[layer], memory_order_acquire);
        atomic_store_explicit(&ret_header->n_rows[layer], n_rows, memory_order_relaxed);
    }
    uint32_t n_ids = atomic_load_explicit(&from->n_ids, memory_order_acquire);
    atomic_store_explicit(&ret_header->n_ids, n_ids, memory_order_relaxed);
    uint64_t decoded = atomic_load_explicit(&from->decoded, memory_order_relaxed);
    atomic_store_explicit(&ret_header->decoded, decoded, memory_order_relaxed);
    memcpy(ret_header->ids, from->ids, (n_ids < LAYOUT_BLOCK_TOKENS ? n_ids : LAYOUT_BLOCK_TOKENS) * sizeof(uint32_t));
    ret_header->checksum = state == BLOCK_SEALED ? from->checksum : 0;
    memcpy(ret_header, from, offsetof(struct block_header, writer)); /* who it is: last, in case it is reused */
}

static uint32_t n_ids_of(const struct block_header *header)
{
    return atomic_load_explicit(&header->n_ids, memory_order_relaxed);
}

static uint32_t n_rows_of(const struct block_header *header, uint32_t layer)
{
    return atomic_load_explicit(&header->n_rows[layer], memory_order_relaxed);
}

static int check_header(const struct blocks *blocks, const struct block_header *header, uint64_t session,
                        struct block_handle handle)
{
    uint32_t state = atomic_load_explicit(&header->state, memory_order_relaxed);
    if (header->magic != BLOCK_MAGIC || header->layout != LAYOUT_VERSION || header->handle.index != handle.index)
        return -EBADMSG;
    if (state == BLOCK_FREE || header->session != session || header->handle.generation != handle.generation)
        return -ENOENT;
    if (state > BLOCK_SEALED || n_ids_of(header) > LAYOUT_BLOCK_TOKENS)
        return -EBADMSG;
    for (uint32_t layer = 0; layer < blocks->shape.n_layers; layer++) {
        if (n_rows_of(header, layer) > n_ids_of(header))
            return -EBADMSG;
    }
    return state == BLOCK_OPEN || blocks_complete(blocks, header) ? 0 : -EBADMSG;
}

static int begin(const struct blocks *blocks, const struct blocks_source *source, uint64_t session,
                 const struct blocks_copy *copy, struct import *import)
{
    struct blocks_view to;
    if (blocks_find(blocks, session, copy->to, &to) != 0)
        return -ESTALE;
    if (copy->from.index >= source->n_blocks || copy->from.generation == 0)
        return -ENOENT;
    import->to = blocks_header(blocks, copy->to.index);
    import->from = (const struct block_header *)(const void *)(source->segment + source->blocks_offset +
                                                               copy->from.index * source->block_bytes);
    take_header(import->from, blocks->shape.n_layers, &import->header);
    int result = check_header(blocks, &import->header, session, copy->from);
    if (result < 0)
        return result;
    if (import->header.number != to.number)
        return -EINVAL;
    uint32_t n_there = n_ids_of(import->to), n_new = n_ids_of(&import->header);
    uint32_t n_both = n_there < n_new ? n_there : n_new;
    return memcmp(import->to->ids, import->header.ids, n_both * sizeof(uint32_t)) == 0 ? 0 : -EEXIST;
}

/* After reading of the block: was what was read that block's? */
static bool is_still_there(const struct import *import)
{
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&import->from->state, memory_order_relaxed) != BLOCK_FREE &&
           import->from->session == import->header.session &&
           import->from->handle.generation == import->header.handle.generation;
}

static void import_ids(const struct import *import)
{
    const struct block_header *header = &import->header;
    struct block_header *to = import->to;
    uint32_t n_there = n_ids_of(to), n_new = n_ids_of(header);
    if (n_new <= n_there)
        return;
    uint64_t kept = (UINT64_C(1) << n_there) - 1; /* n_there < 64 */
    uint64_t known = n_new == LAYOUT_BLOCK_TOKENS ? ~UINT64_C(0) : (UINT64_C(1) << n_new) - 1;
    uint64_t decoded = (atomic_load_explicit(&to->decoded, memory_order_relaxed) & kept) |
                       (atomic_load_explicit(&header->decoded, memory_order_relaxed) & known & ~kept);
    memcpy(to->ids + n_there, header->ids + n_there, (n_new - n_there) * sizeof(uint32_t));
    atomic_store_explicit(&to->decoded, decoded, memory_order_relaxed);
    atomic_store_explicit(&to->n_ids, n_new, memory_order_release);
}

/* Rows of a layer from n_there on, the sums of a full one, its count. Returns the bytes of rows; 0: the block is gone. */
static uint64_t import_layer(const struct blocks *blocks, const struct import *import, uint32_t layer, uint32_t n_there)
{
    const struct row_shape *shape = &blocks->shape;
    uint64_t row_bytes = layout_row_bytes(shape);
    uint32_t n_new = n_rows_of(&import->header, layer);
    const uint8_t *from = (const uint8_t *)import->from;
    uint8_t *to = (uint8_t *)import->to;
    for (uint32_t head = 0; head < shape->n_kv_heads; head++) {
        uint64_t rows = layout_head_rows_offset(shape, layer, head) + n_there * row_bytes;
        memcpy(to + rows, from + rows, (n_new - n_there) * row_bytes);
    }
    if (n_new == LAYOUT_BLOCK_TOKENS) { /* of all heads, one behind the other */
        uint64_t sums = layout_head_sums_offset(shape, layer, 0);
        memcpy(to + sums, from + sums, (uint64_t)shape->n_kv_heads * 2 * shape->head_dim * sizeof(float));
    }
    if (!is_still_there(import))
        return 0;
    atomic_store_explicit(&import->to->n_rows[layer], (uint8_t)n_new, memory_order_release);
    return (n_new - n_there) * row_bytes * shape->n_kv_heads;
}

/* A complete block is sealed. The same bytes have the same checksum: see blocks_copy(). */
static void seal(struct blocks *blocks, const struct import *import, uint32_t index)
{
    if (!blocks_complete(blocks, import->to))
        return;
    if (atomic_load_explicit(&import->header.state, memory_order_relaxed) == BLOCK_SEALED) {
        import->to->checksum = import->header.checksum;
        blocks_set_state(blocks, index, BLOCK_SEALED);
    } else {
        blocks_seal(blocks, import->to);
    }
}

int blocks_import_check(const struct blocks *blocks, const struct blocks_source *source, uint64_t session,
                        const struct blocks_copy *copy)
{
    struct import import;
    return begin(blocks, source, session, copy, &import);
}

int blocks_import(struct blocks *blocks, const struct blocks_source *source, uint64_t session,
                  const struct blocks_copy *copy, uint64_t *ret_n_bytes)
{
    struct import import;
    uint64_t n_bytes = 0;
    int result = begin(blocks, source, session, copy, &import);
    if (result < 0)
        return result;
    if (blocks->entries[copy->to.index].state == BLOCK_OPEN) {
        if (!is_still_there(&import))
            return -ENOENT;
        import.to->writer = blocks->incarnation;
        import_ids(&import);
        for (uint32_t layer = 0; layer < blocks->shape.n_layers; layer++) {
            uint32_t n_there = n_rows_of(import.to, layer);
            if (n_rows_of(&import.header, layer) <= n_there)
                continue;
            uint64_t n_copied = import_layer(blocks, &import, layer, n_there);
            if (n_copied == 0)
                return -ENOENT;
            n_bytes += n_copied;
        }
        seal(blocks, &import, copy->to.index);
    }
    *ret_n_bytes = n_bytes;
    return 0;
}
