/* blocks_copy.c - a sealed block becomes another session's: ids, rows and sums, each before the count that makes it count. */
#include "value-store/blocks_private.h"

#include <errno.h>
#include <string.h>

int blocks_copy_check(const struct blocks *blocks, uint64_t from_session, uint64_t to_session,
                      const struct blocks_copy *copy)
{
    struct blocks_view from, to;
    if (from_session == to_session)
        return -EINVAL;
    if (blocks_find(blocks, from_session, copy->from, &from) != 0 ||
        blocks_find(blocks, to_session, copy->to, &to) != 0)
        return -ESTALE;
    if (from.number != to.number)
        return -EINVAL;
    if (!from.is_sealed)
        return -ENODATA;
    uint32_t n_ids = atomic_load_explicit(&to.header->n_ids, memory_order_relaxed);
    return memcmp(to.header->ids, from.header->ids, n_ids * sizeof(uint32_t)) == 0 ? 0 : -EEXIST;
}

/* Rows of a layer from n_there on, its sums, its count. */
static void copy_layer(const struct blocks *blocks, const struct block_header *from, struct block_header *to,
                       uint32_t layer, uint32_t n_there)
{
    const struct row_shape *shape = &blocks->shape;
    uint64_t row_bytes = layout_row_bytes(shape);
    for (uint32_t head = 0; head < shape->n_kv_heads; head++) {
        uint64_t rows = layout_head_rows_offset(shape, layer, head) + n_there * row_bytes;
        uint64_t sums = layout_head_sums_offset(shape, layer, head);
        memcpy((uint8_t *)to + rows, (const uint8_t *)from + rows, (LAYOUT_BLOCK_TOKENS - n_there) * row_bytes);
        memcpy((uint8_t *)to + sums, (const uint8_t *)from + sums, 2 * shape->head_dim * sizeof(float));
    }
    atomic_store_explicit(&to->n_rows[layer], LAYOUT_BLOCK_TOKENS, memory_order_release);
}

int blocks_copy(struct blocks *blocks, uint64_t from_session, uint64_t to_session, const struct blocks_copy *copy)
{
    int result = blocks_copy_check(blocks, from_session, to_session, copy);
    if (result < 0 || blocks->entries[copy->to.index].state == BLOCK_SEALED)
        return result;
    const struct block_header *from = blocks_header(blocks, copy->from.index);
    struct block_header *to = blocks_header(blocks, copy->to.index);
    to->writer = blocks->incarnation;
    uint32_t n_ids = atomic_load_explicit(&to->n_ids, memory_order_relaxed);
    memcpy(to->ids + n_ids, from->ids + n_ids, (LAYOUT_BLOCK_TOKENS - n_ids) * sizeof(uint32_t));
    atomic_store_explicit(&to->decoded, atomic_load_explicit(&from->decoded, memory_order_relaxed),
                          memory_order_relaxed);
    atomic_store_explicit(&to->n_ids, LAYOUT_BLOCK_TOKENS, memory_order_release);
    for (uint32_t layer = 0; layer < blocks->shape.n_layers; layer++) {
        uint32_t n_there = atomic_load_explicit(&to->n_rows[layer], memory_order_relaxed);
        if (n_there < LAYOUT_BLOCK_TOKENS)
            copy_layer(blocks, from, to, layer, n_there);
    }
    /* The same bytes have the same checksum; computing it anew would vouch for what memory did to them meanwhile. */
    to->checksum = from->checksum;
    blocks_set_state(blocks, copy->to.index, BLOCK_SEALED);
    return 0;
}
