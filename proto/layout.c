#include "proto/layout.h"

#include <errno.h>

#define MAX_KV_HEADS 1024u
#define MAX_HEAD_DIM 256u

int layout_check_shape(const struct row_shape *shape)
{
    if (shape->n_layers == 0 || shape->n_layers > LAYOUT_MAX_LAYERS)
        return -EINVAL;
    if (shape->n_kv_heads == 0 || shape->n_kv_heads > MAX_KV_HEADS)
        return -EINVAL;
    if (shape->head_dim == 0 || shape->head_dim > MAX_HEAD_DIM || shape->head_dim % 2 != 0)
        return -EINVAL;
    return shape->codec == ROW_CODEC_F16 || shape->codec == ROW_CODEC_Q8_0 ? 0 : -EINVAL;
}

int layout_check_segment(const void *mapping, uint64_t n_bytes)
{
    if (n_bytes < LAYOUT_PAGE_BYTES)
        return -EPROTO;
    const struct segment_header *header = mapping;
    if (atomic_load_explicit(&header->ready, memory_order_acquire) != 1)
        return header->magic == 0 || header->magic == SEGMENT_MAGIC ? -EAGAIN : -EPROTO;
    if (header->magic != SEGMENT_MAGIC || header->layout != LAYOUT_VERSION || header->n_bytes != n_bytes)
        return -EPROTO;
    if (layout_check_shape(&header->shape) != 0 || header->block_bytes != layout_block_bytes(&header->shape))
        return -EPROTO;
    if (header->sessions_offset < LAYOUT_PAGE_BYTES || header->sessions_offset > n_bytes ||
        header->blocks_offset > n_bytes || header->blocks_offset < header->sessions_offset ||
        header->sessions_offset % LAYOUT_PAGE_BYTES != 0 || header->blocks_offset % LAYOUT_PAGE_BYTES != 0)
        return -EPROTO;
    if (header->session_capacity > (header->blocks_offset - header->sessions_offset) / sizeof(struct session_record))
        return -EPROTO;
    if (header->n_blocks > (n_bytes - header->blocks_offset) / header->block_bytes)
        return -EPROTO;
    return 0;
}

int layout_check_exchange(const void *mapping, uint64_t n_bytes)
{
    if (n_bytes < LAYOUT_PAGE_BYTES)
        return -EPROTO;
    const struct exchange_header *header = mapping;
    if (atomic_load_explicit(&header->ready, memory_order_acquire) != 1)
        return -EPROTO;
    if (header->magic != EXCHANGE_MAGIC || header->layout != LAYOUT_VERSION || header->n_bytes != n_bytes)
        return -EPROTO;
    if (header->n_slots == 0 || header->n_slots > EXCHANGE_MAX_SLOTS || header->request_bytes < LAYOUT_PAGE_BYTES ||
        header->reply_bytes < LAYOUT_PAGE_BYTES || header->request_bytes % LAYOUT_PAGE_BYTES != 0 ||
        header->reply_bytes % LAYOUT_PAGE_BYTES != 0)
        return -EPROTO;
    uint64_t slot_bytes = (uint64_t)header->request_bytes + header->reply_bytes;
    return header->n_slots <= (n_bytes - LAYOUT_PAGE_BYTES) / slot_bytes ? 0 : -EPROTO;
}
