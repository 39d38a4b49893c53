/* blocks.c - a segment's format; blocks reserved, appended to, sealed, released. See blocks.h for the order of writes. */
#include "value-store/blocks_private.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t round_to_page(uint64_t n_bytes)
{
    return (n_bytes + LAYOUT_PAGE_BYTES - 1) / LAYOUT_PAGE_BYTES * LAYOUT_PAGE_BYTES;
}

int blocks_plan(const struct row_shape *shape, uint64_t max_bytes, struct blocks_plan *ret_plan)
{
    if (layout_check_shape(shape) != 0)
        return -EINVAL;
    struct blocks_plan plan = {
        .sessions_offset = LAYOUT_PAGE_BYTES,
        .block_bytes = layout_block_bytes(shape),
    };
    plan.blocks_offset = plan.sessions_offset + round_to_page(BLOCKS_SESSION_CAPACITY * sizeof(struct session_record));
    if (max_bytes < plan.blocks_offset + plan.block_bytes)
        return -ENOSPC;
    uint64_t n_blocks = (max_bytes - plan.blocks_offset) / plan.block_bytes;
    plan.n_blocks = n_blocks > UINT32_MAX ? UINT32_MAX : (uint32_t)n_blocks;
    plan.n_bytes = plan.blocks_offset + plan.n_blocks * plan.block_bytes;
    *ret_plan = plan;
    return 0;
}

struct blocks *blocks_new(void *segment, const struct blocks_owner *owner)
{
    const struct segment_header *header = segment;
    struct blocks *blocks = calloc(1, sizeof(*blocks) + header->n_blocks * sizeof(blocks->entries[0]));
    if (!blocks)
        return NULL;
    blocks->segment = segment;
    blocks->n_bytes = header->n_bytes;
    blocks->sessions_offset = header->sessions_offset;
    blocks->blocks_offset = header->blocks_offset;
    blocks->block_bytes = header->block_bytes;
    blocks->incarnation = owner->incarnation;
    blocks->n_blocks = header->n_blocks;
    blocks->session_capacity = (uint32_t)header->session_capacity;
    blocks->shape = header->shape;
    blocks->kernels = owner->kernels;
    blocks->n_in_state[BLOCK_FREE] = header->n_blocks;
    return blocks;
}

int blocks_format(void *segment, const struct blocks_plan *plan, const struct row_shape *shape,
                  const struct blocks_owner *owner, struct blocks **ret_blocks)
{
    if (layout_check_shape(shape) != 0 || plan->n_blocks == 0 || plan->block_bytes != layout_block_bytes(shape) ||
        plan->n_bytes < plan->blocks_offset + plan->n_blocks * plan->block_bytes)
        return -EINVAL;
    struct segment_header *header = segment;
    *header = (struct segment_header){
        .magic = SEGMENT_MAGIC,
        .layout = LAYOUT_VERSION,
        .n_bytes = plan->n_bytes,
        .incarnation = owner->incarnation,
        .session_capacity = BLOCKS_SESSION_CAPACITY,
        .sessions_offset = plan->sessions_offset,
        .blocks_offset = plan->blocks_offset,
        .block_bytes = plan->block_bytes,
        .n_blocks = plan->n_blocks,
        .store = owner->store,
        .shape = *shape,
        .numa_node = owner->numa_node,
    };
    struct blocks *blocks = blocks_new(segment, owner);
    if (!blocks)
        return -ENOMEM;
    for (uint32_t i = 0; i < blocks->n_blocks; i++)
        blocks_write_free_header(blocks, i, 0);
    atomic_store_explicit(&header->ready, 1, memory_order_release);
    *ret_blocks = blocks;
    return 0;
}

struct blocks *blocks_free(struct blocks *blocks)
{
    free(blocks);
    return NULL;
}

const struct row_shape *blocks_shape(const struct blocks *blocks)
{
    return &blocks->shape;
}

struct blocks_counts blocks_count(const struct blocks *blocks)
{
    struct blocks_counts counts = {
        .n_blocks = blocks->n_blocks,
        .n_free = blocks->n_in_state[BLOCK_FREE],
        .n_open = blocks->n_in_state[BLOCK_OPEN],
        .n_sealed = blocks->n_in_state[BLOCK_SEALED],
    };
    for (uint32_t i = 0; i < blocks->session_capacity; i++) {
        const struct session_record *record = blocks_session_record(blocks, i);
        counts.n_sessions += atomic_load_explicit(&record->state, memory_order_relaxed) == SESSION_RECORD_LIVE;
    }
    return counts;
}

struct block_header *blocks_header(const struct blocks *blocks, uint32_t index)
{
    assert(index < blocks->n_blocks);
    return (struct block_header *)(void *)(blocks->segment + blocks->blocks_offset + index * blocks->block_bytes);
}

void blocks_set_state(struct blocks *blocks, uint32_t index, enum block_state state)
{
    struct block_header *header = blocks_header(blocks, index);
    struct block_entry *entry = &blocks->entries[index];
    blocks->n_in_state[entry->state]--;
    blocks->n_in_state[state]++;
    entry->state = state;
    entry->session = state == BLOCK_FREE ? 0 : header->session;
    entry->number = header->number;
    entry->generation = header->handle.generation;
    atomic_store_explicit(&header->state, state, memory_order_release);
}

void blocks_write_free_header(struct blocks *blocks, uint32_t index, uint32_t generation)
{
    struct block_header *header = blocks_header(blocks, index);
    atomic_store_explicit(&header->state, BLOCK_FREE, memory_order_release);
    header->magic = BLOCK_MAGIC;
    header->layout = LAYOUT_VERSION;
    header->handle = (struct block_handle){.index = index, .generation = generation};
    /* Never through a moment without magic or generation: whoever adopts the segment must know what this block was. */
    size_t rest = offsetof(struct block_header, previous);
    memset((uint8_t *)header + rest, 0, sizeof(*header) - rest);
    header->writer = blocks->incarnation;
}

/* ---- reservation ---- */

static bool is_reserved_so(const struct block_header *header, uint64_t session, const struct blocks_reservation *wanted)
{
    return header->session == session && header->number == wanted->number &&
           header->handle.generation == wanted->handle.generation && header->previous.index == wanted->previous.index &&
           header->previous.generation == wanted->previous.generation &&
           header->previous_store == wanted->previous_store;
}

static int check_reservation(struct blocks *blocks, uint64_t session, const struct blocks_reservation *wanted)
{
    if (wanted->handle.index >= blocks->n_blocks || wanted->handle.generation == 0 ||
        (wanted->number == 0) != (wanted->previous.generation == 0))
        return -EINVAL;
    struct block_entry *entry = &blocks->entries[wanted->handle.index];
    if (entry->mark == blocks->n_orders)
        return -EINVAL;
    entry->mark = blocks->n_orders;
    const struct block_header *header = blocks_header(blocks, wanted->handle.index);
    if (entry->state != BLOCK_FREE)
        return is_reserved_so(header, session, wanted) ? 0 : -EBUSY;
    return wanted->handle.generation > header->handle.generation ? 0 : -ESTALE;
}

static void reserve_one(struct blocks *blocks, uint64_t session, const struct blocks_reservation *wanted)
{
    if (blocks->entries[wanted->handle.index].state != BLOCK_FREE)
        return;
    struct block_header *header = blocks_header(blocks, wanted->handle.index);
    blocks_write_free_header(blocks, wanted->handle.index, wanted->handle.generation);
    header->previous = wanted->previous;
    header->previous_store = wanted->previous_store;
    header->number = wanted->number;
    header->session = session;
    blocks_set_state(blocks, wanted->handle.index, BLOCK_OPEN);
}

int blocks_reserve(struct blocks *blocks, uint64_t session, const struct blocks_reservation *reservations, uint32_t n,
                   uint32_t *ret_failed)
{
    blocks->n_orders++;
    if (!blocks_session_find(blocks, session)) {
        *ret_failed = 0;
        return -ENOENT;
    }
    for (uint32_t i = 0; i < n; i++) {
        int result = check_reservation(blocks, session, &reservations[i]);
        if (result < 0) {
            *ret_failed = i;
            return result;
        }
    }
    for (uint32_t i = 0; i < n; i++)
        reserve_one(blocks, session, &reservations[i]);
    return 0;
}

/* ---- append and seal ---- */

int blocks_find(const struct blocks *blocks, uint64_t session, struct block_handle handle, struct blocks_view *ret_view)
{
    if (handle.index >= blocks->n_blocks)
        return -ESTALE;
    const struct block_entry *entry = &blocks->entries[handle.index];
    if (entry->state == BLOCK_FREE || entry->session != session)
        return -ESTALE;
    if (entry->generation != handle.generation)
        return -ESTALE;
    *ret_view = (struct blocks_view){
        .header = blocks_header(blocks, handle.index),
        .number = entry->number,
        .is_sealed = entry->state == BLOCK_SEALED,
    };
    return 0;
}

uint32_t blocks_n_rows(const struct blocks_view *view, uint32_t layer)
{
    if (view->is_sealed)
        return LAYOUT_BLOCK_TOKENS;
    return atomic_load_explicit(&view->header->n_rows[layer], memory_order_acquire);
}

const void *blocks_head_rows(const struct blocks *blocks, const struct blocks_view *view, uint32_t layer,
                             uint32_t kv_head)
{
    return (const uint8_t *)view->header + layout_head_rows_offset(&blocks->shape, layer, kv_head);
}

enum kernels_rows blocks_codec(const struct blocks *blocks)
{
    static_assert((int)ROW_CODEC_F16 == (int)KERNELS_ROWS_F16 && (int)ROW_CODEC_Q8_0 == (int)KERNELS_ROWS_Q8_0,
                  "one numbering of row codecs");
    return (enum kernels_rows)blocks->shape.codec;
}

void blocks_write_sums(struct blocks *blocks, struct block_header *header, uint32_t layer)
{
    const struct row_shape *shape = &blocks->shape;
    uint8_t *block = (uint8_t *)header;
    for (uint32_t head = 0; head < shape->n_kv_heads; head++) {
        const void *rows = block + layout_head_rows_offset(shape, layer, head);
        void *sums = block + layout_head_sums_offset(shape, layer, head);
        blocks->kernels->block_sums(rows, LAYOUT_BLOCK_TOKENS, shape->head_dim, blocks_codec(blocks), sums);
    }
}

bool blocks_complete(const struct blocks *blocks, const struct block_header *header)
{
    if (atomic_load_explicit(&header->n_ids, memory_order_relaxed) != LAYOUT_BLOCK_TOKENS)
        return false;
    for (uint32_t layer = 0; layer < blocks->shape.n_layers; layer++) {
        if (atomic_load_explicit(&header->n_rows[layer], memory_order_relaxed) != LAYOUT_BLOCK_TOKENS)
            return false;
    }
    return true;
}

static uint32_t checksum(const struct blocks *blocks, const struct block_header *header)
{
    const struct row_shape *shape = &blocks->shape;
    const uint8_t *block = (const uint8_t *)header;
    uint64_t rows_bytes = (uint64_t)shape->n_layers * shape->n_kv_heads * layout_head_rows_bytes(shape);
    uint32_t crc = kernels_crc32c(0, header->ids, sizeof(header->ids));
    crc = kernels_crc32c(crc, block + layout_sums_offset(), layout_sums_bytes(shape));
    return kernels_crc32c(crc, block + layout_rows_offset(shape), rows_bytes);
}

void blocks_seal(struct blocks *blocks, struct block_header *header)
{
    assert(blocks_complete(blocks, header));
    header->checksum = checksum(blocks, header);
    blocks_set_state(blocks, header->handle.index, BLOCK_SEALED);
}

int blocks_verify(const struct blocks *blocks, uint32_t index)
{
    if (index >= blocks->n_blocks || blocks->entries[index].state != BLOCK_SEALED)
        return -EINVAL;
    const struct block_header *header = blocks_header(blocks, index);
    return header->checksum == checksum(blocks, header) ? 0 : -EBADMSG;
}

/* Rows of the tokens [n_there, end): from [token][kv_head] to [kv_head][token]. */
static void write_rows(struct blocks *blocks, struct block_header *header, const struct blocks_append *append,
                       uint32_t n_there)
{
    const struct row_shape *shape = &blocks->shape;
    uint64_t row_bytes = layout_row_bytes(shape);
    uint32_t end = append->first_token + append->n_tokens;
    for (uint32_t head = 0; head < shape->n_kv_heads; head++) {
        uint8_t *to = (uint8_t *)header + layout_head_rows_offset(shape, append->layer, head);
        const uint8_t *from = append->rows;
        for (uint32_t token = n_there; token < end; token++)
            memcpy(to + token * row_bytes,
                   from + ((uint64_t)(token - append->first_token) * shape->n_kv_heads + head) * row_bytes, row_bytes);
    }
    if (end == LAYOUT_BLOCK_TOKENS)
        blocks_write_sums(blocks, header, append->layer);
    atomic_store_explicit(&header->n_rows[append->layer], (uint8_t)end, memory_order_release);
}

static int check_append(const struct block_header *header, const struct blocks_append *append)
{
    uint32_t n_ids = atomic_load_explicit(&header->n_ids, memory_order_relaxed);
    uint32_t end = append->first_token + append->n_tokens;
    if (append->ids) {
        if (append->first_token > n_ids)
            return -ENODATA;
        for (uint32_t token = append->first_token; token < end && token < n_ids; token++) {
            if (header->ids[token] != append->ids[token - append->first_token])
                return -EEXIST;
        }
        if (end > n_ids)
            n_ids = end;
    }
    if (append->rows) {
        uint32_t n_rows = atomic_load_explicit(&header->n_rows[append->layer], memory_order_relaxed);
        if (append->first_token > n_rows || end > n_ids)
            return -ENODATA;
    }
    return 0;
}

/* For tokens [first, end), first < end; also over what one wrote that was killed before it told the count. */
static void note_decoded(struct block_header *header, uint32_t first, uint32_t end, bool decoded)
{
    uint64_t tokens = ~UINT64_C(0) >> (LAYOUT_BLOCK_TOKENS - (end - first)) << first;
    uint64_t others = atomic_load_explicit(&header->decoded, memory_order_relaxed) & ~tokens;
    atomic_store_explicit(&header->decoded, decoded ? others | tokens : others, memory_order_relaxed);
}

int blocks_append(struct blocks *blocks, const struct blocks_append *append)
{
    if ((!append->ids && !append->rows) || append->n_tokens == 0 || append->first_token >= LAYOUT_BLOCK_TOKENS ||
        append->n_tokens > LAYOUT_BLOCK_TOKENS - append->first_token ||
        (append->rows && append->layer >= blocks->shape.n_layers))
        return -EINVAL;
    struct blocks_view view;
    int result = blocks_find(blocks, append->session, append->handle, &view);
    if (result < 0)
        return result;
    struct block_header *header = blocks_header(blocks, append->handle.index);
    result = check_append(header, append);
    if (result < 0)
        return result;

    uint32_t end = append->first_token + append->n_tokens;
    uint32_t n_ids = atomic_load_explicit(&header->n_ids, memory_order_relaxed);
    if (append->ids && end > n_ids) {
        header->writer = blocks->incarnation;
        memcpy(header->ids + n_ids, append->ids + (n_ids - append->first_token), (end - n_ids) * sizeof(uint32_t));
        note_decoded(header, n_ids, end, append->decoded);
        atomic_store_explicit(&header->n_ids, end, memory_order_release);
    }
    uint32_t n_rows = append->rows ? blocks_n_rows(&view, append->layer) : end;
    if (append->rows && end > n_rows) {
        header->writer = blocks->incarnation;
        write_rows(blocks, header, append, n_rows);
    }
    if (end == LAYOUT_BLOCK_TOKENS && blocks->entries[append->handle.index].state == BLOCK_OPEN &&
        blocks_complete(blocks, header))
        blocks_seal(blocks, header);
    return 0;
}

/* ---- invariants ---- */

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            snprintf(text, BLOCKS_CHECK_TEXT, __VA_ARGS__);                                                            \
            return -EUCLEAN;                                                                                           \
        }                                                                                                              \
    } while (0)

static int check_block(const struct blocks *blocks, uint32_t i, char text[BLOCKS_CHECK_TEXT])
{
    const struct block_header *header = blocks_header(blocks, i);
    const struct block_entry *entry = &blocks->entries[i];
    uint32_t n_ids = atomic_load_explicit(&header->n_ids, memory_order_relaxed);
    CHECK(header->magic == BLOCK_MAGIC && header->layout == LAYOUT_VERSION, "block %u: magic or layout", i);
    CHECK(header->handle.index == i, "block %u: says it is block %u", i, header->handle.index);
    CHECK(atomic_load_explicit(&header->state, memory_order_relaxed) == entry->state, "block %u: state", i);
    if (entry->state == BLOCK_FREE) {
        CHECK(entry->session == 0, "block %u: free, and of a session", i);
        return 0;
    }
    CHECK(header->session == entry->session && header->number == entry->number, "block %u: owner", i);
    CHECK(header->handle.generation > 0 && header->handle.generation == entry->generation, "block %u: generation", i);
    CHECK(blocks_session_find(blocks, header->session), "block %u: of a session without a record", i);
    CHECK(n_ids <= LAYOUT_BLOCK_TOKENS, "block %u: %u ids", i, n_ids);
    for (uint32_t layer = 0; layer < blocks->shape.n_layers; layer++) {
        uint32_t n_rows = atomic_load_explicit(&header->n_rows[layer], memory_order_relaxed);
        CHECK(n_rows <= n_ids, "block %u: layer %u has %u rows, %u ids", i, layer, n_rows, n_ids);
    }
    CHECK((entry->state == BLOCK_SEALED) == blocks_complete(blocks, header), "block %u: complete or sealed, not both",
          i);
    return 0;
}

int blocks_check(const struct blocks *blocks, char text[BLOCKS_CHECK_TEXT])
{
    uint32_t n_in_state[3] = {0};
    for (uint32_t i = 0; i < blocks->n_blocks; i++) {
        CHECK(blocks->entries[i].state <= BLOCK_SEALED, "block %u: state %u", i, blocks->entries[i].state);
        n_in_state[blocks->entries[i].state]++;
        int result = check_block(blocks, i, text);
        if (result < 0)
            return result;
    }
    CHECK(memcmp(n_in_state, blocks->n_in_state, sizeof(n_in_state)) == 0, "blocks per state are miscounted");
    CHECK(layout_check_segment(blocks->segment, blocks->n_bytes) == 0, "segment header");
    return 0;
}
