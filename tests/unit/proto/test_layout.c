/* test_layout.c - offsets that do not overlap, and checks of headers that another process wrote. */
#include "proto/layout.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static const struct row_shape shapes[] = {
    {1, 1, 2, ROW_CODEC_F16},  {30, 3, 64, ROW_CODEC_F16},       {32, 8, 128, ROW_CODEC_F16},
    {3, 1, 6, ROW_CODEC_F16},  {512, 1024, 256, ROW_CODEC_F16},  {28, 4, 80, ROW_CODEC_F16},
    {1, 1, 2, ROW_CODEC_Q8_0}, {30, 3, 64, ROW_CODEC_Q8_0},      {32, 8, 128, ROW_CODEC_Q8_0},
    {3, 1, 6, ROW_CODEC_Q8_0}, {512, 1024, 256, ROW_CODEC_Q8_0}, {28, 4, 80, ROW_CODEC_Q8_0},
};

static void shapes_are_bounded(void **state)
{
    (void)state;
    const struct row_shape bad[] = {
        {0, 1, 2, 1}, {513, 1, 2, 1}, {1, 0, 2, 1}, {1, 1025, 2, 1}, {1, 1, 0, 1},
        {1, 1, 3, 1}, {1, 1, 258, 1}, {1, 1, 2, 0}, {1, 1, 2, 3},    {UINT32_MAX, UINT32_MAX, UINT32_MAX - 1, 1},
    };
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        assert_int_equal(layout_check_shape(&shapes[i]), 0);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(layout_check_shape(&bad[i]), -EINVAL);
}

/* Header page, sums, rows: one after the other, in the order of (layer, head), to the end of the block. */
static void places_of_a_block_follow_each_other(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        const struct row_shape *shape = &shapes[i];
        uint64_t sums = LAYOUT_PAGE_BYTES, rows = layout_rows_offset(shape);
        assert_true(sizeof(struct block_header) <= sums);
        assert_int_equal(layout_row_bytes(shape) % 2, 0); /* f16 in every row */
        for (uint32_t layer = 0; layer < shape->n_layers; layer++) {
            for (uint32_t head = 0; head < shape->n_kv_heads; head++) {
                assert_true(layout_head_sums_offset(shape, layer, head) == sums);
                assert_true(layout_head_rows_offset(shape, layer, head) == rows);
                sums += 2 * shape->head_dim * sizeof(float);
                rows += 64 * layout_row_bytes(shape);
            }
        }
        assert_true(sums <= layout_rows_offset(shape));
        assert_true(layout_rows_offset(shape) - sums < LAYOUT_PAGE_BYTES);
        assert_true(rows <= layout_block_bytes(shape) && layout_block_bytes(shape) - rows < LAYOUT_PAGE_BYTES);
        assert_int_equal(layout_block_bytes(shape) % LAYOUT_PAGE_BYTES, 0);
    }
}

/* Two numbers of 16 bits, or of 8 with a scale for every 32 of them, K's and V's apart. */
static void rows_have_the_bytes_of_their_codec(void **state)
{
    (void)state;
    const struct {
        uint32_t head_dim, f16, q8_0;
    } wanted[] = {{2, 8, 8},      {32, 128, 68},   {34, 136, 76},   {64, 256, 136},
                  {80, 320, 172}, {128, 512, 272}, {256, 1024, 544}};
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        struct row_shape shape = {.n_layers = 1, .n_kv_heads = 1, .head_dim = wanted[i].head_dim};
        shape.codec = ROW_CODEC_F16;
        assert_int_equal(layout_row_bytes(&shape), wanted[i].f16);
        shape.codec = ROW_CODEC_Q8_0;
        assert_int_equal(layout_row_bytes(&shape), wanted[i].q8_0);
        assert_int_equal(layout_head_rows_bytes(&shape), 64 * wanted[i].q8_0);
    }
}

static struct segment_header good_segment(uint64_t *ret_n_bytes)
{
    struct segment_header header = {
        .magic = SEGMENT_MAGIC,
        .layout = LAYOUT_VERSION,
        .session_capacity = 40,
        .sessions_offset = 4096,
        .blocks_offset = 3 * 4096, /* 40 records need two pages */
        .n_blocks = 5,
        .shape = shapes[1],
        .ready = 1,
    };
    header.block_bytes = layout_block_bytes(&header.shape);
    header.n_bytes = header.blocks_offset + 5 * header.block_bytes;
    *ret_n_bytes = header.n_bytes;
    return header;
}

#define SEGMENT_DAMAGES                                                                                                \
    X(magic++)                                                                                                         \
    X(layout++)                                                                                                        \
    X(n_bytes += 4096)                                                                                                 \
    X(n_bytes -= 4096)                                                                                                 \
    X(session_capacity = 43)                                                                                           \
    X(session_capacity = UINT64_MAX)                                                                                   \
    X(sessions_offset = 0)                                                                                             \
    X(sessions_offset = 4104)                                                                                          \
    X(sessions_offset = 4 * 4096)                                                                                      \
    X(sessions_offset = UINT64_MAX - 4095)                                                                             \
    X(blocks_offset += 8)                                                                                              \
    X(blocks_offset = 0)                                                                                               \
    X(blocks_offset += 4096)                                                                                           \
    X(blocks_offset = UINT64_MAX - 4095)                                                                               \
    X(block_bytes = 0)                                                                                                 \
    X(block_bytes += 4096)                                                                                             \
    X(n_blocks = 6)                                                                                                    \
    X(n_blocks = UINT32_MAX)                                                                                           \
    X(shape.codec = ROW_CODEC_Q8_0)                                                                                    \
    X(shape.head_dim = 65)                                                                                             \
    X(shape.n_layers++)                                                                                                \
    X(shape.n_layers = 0)                                                                                              \
    X(ready = 2)

static void segments_must_add_up(void **state)
{
    (void)state;
    uint64_t n_bytes;
    struct segment_header header = good_segment(&n_bytes);
    assert_int_equal(layout_check_segment(&header, n_bytes), 0);
    assert_int_equal(layout_check_segment(&header, n_bytes + 4096), -EPROTO);
    assert_int_equal(layout_check_segment(&header, 4095), -EPROTO);
    assert_int_equal(layout_check_segment(&header, 0), -EPROTO);
#define X(damage)                                                                                                      \
    header = good_segment(&n_bytes);                                                                                   \
    header.damage;                                                                                                     \
    if (layout_check_segment(&header, n_bytes) == 0)                                                                   \
        fail_msg("taken: %s", #damage);
    SEGMENT_DAMAGES
#undef X
    header = good_segment(&n_bytes);
    header.ready = 0;
    assert_int_equal(layout_check_segment(&header, n_bytes), -EAGAIN);
    memset(&header, 0, sizeof(header)); /* fresh pages */
    assert_int_equal(layout_check_segment(&header, n_bytes), -EAGAIN);
    memset(&header, 0xff, sizeof(header));
    assert_int_equal(layout_check_segment(&header, n_bytes), -EPROTO);
}

static void blocks_are_where_the_header_says(void **state)
{
    (void)state;
    uint64_t n_bytes;
    struct segment_header header = good_segment(&n_bytes);
    for (uint32_t i = 0; i < header.n_blocks; i++) {
        uintptr_t offset = (uintptr_t)layout_block(&header, i) - (uintptr_t)&header;
        assert_true(offset == header.blocks_offset + i * header.block_bytes);
    }
}

static struct exchange_header good_exchange(uint64_t *ret_n_bytes)
{
    struct exchange_header header = {
        .magic = EXCHANGE_MAGIC,
        .layout = LAYOUT_VERSION,
        .n_slots = 4,
        .request_bytes = 3 * 4096,
        .reply_bytes = 2 * 4096,
        .ready = 1,
    };
    header.n_bytes = 4096 + 4 * 5 * 4096;
    *ret_n_bytes = header.n_bytes;
    return header;
}

#define EXCHANGE_DAMAGES                                                                                               \
    X(magic++)                                                                                                         \
    X(layout++)                                                                                                        \
    X(n_bytes += 4096)                                                                                                 \
    X(n_slots = 0)                                                                                                     \
    X(n_slots = EXCHANGE_MAX_SLOTS + 1)                                                                                \
    X(n_slots = 5)                                                                                                     \
    X(n_slots = UINT32_MAX)                                                                                            \
    X(request_bytes = 0)                                                                                               \
    X(request_bytes += 16)                                                                                             \
    X(request_bytes += 4096)                                                                                           \
    X(request_bytes = UINT32_MAX - 4095)                                                                               \
    X(reply_bytes = 0)                                                                                                 \
    X(reply_bytes += 64)                                                                                               \
    X(reply_bytes += 4096)                                                                                             \
    X(reply_bytes = UINT32_MAX - 4095)                                                                                 \
    X(ready = 0)                                                                                                       \
    X(ready = 7)

static void exchanges_must_add_up(void **state)
{
    (void)state;
    uint64_t n_bytes;
    struct exchange_header header = good_exchange(&n_bytes);
    assert_int_equal(layout_check_exchange(&header, n_bytes), 0);
    assert_int_equal(layout_check_exchange(&header, n_bytes + 1), -EPROTO);
    assert_int_equal(layout_check_exchange(&header, 64), -EPROTO);
#define X(damage)                                                                                                      \
    header = good_exchange(&n_bytes);                                                                                  \
    header.damage;                                                                                                     \
    if (layout_check_exchange(&header, n_bytes) != -EPROTO)                                                            \
        fail_msg("taken: %s", #damage);
    EXCHANGE_DAMAGES
#undef X
    header = good_exchange(&n_bytes);
    uint64_t end = 4096;
    for (uint32_t slot = 0; slot < header.n_slots; slot++) {
        assert_true(layout_request_offset(&header, slot) == end);
        assert_true(layout_reply_offset(&header, slot) == end + header.request_bytes);
        end += header.request_bytes + header.reply_bytes;
    }
    assert_true(end == n_bytes);
}

/* No more slots than the ring has posts, whatever the memory would hold. */
static void slots_are_those_of_the_ring(void **state)
{
    (void)state;
    uint64_t n_bytes;
    struct exchange_header header = good_exchange(&n_bytes);
    header.n_bytes = n_bytes = 4096 + 100 * 5 * 4096;
    header.n_slots = EXCHANGE_MAX_SLOTS;
    assert_int_equal(layout_check_exchange(&header, n_bytes), 0);
    header.n_slots++;
    assert_int_equal(layout_check_exchange(&header, n_bytes), -EPROTO);
}

static void the_ring_lies_in_the_header_page(void **state)
{
    (void)state;
    static uint8_t page[LAYOUT_PAGE_BYTES];
    uintptr_t ring = (uintptr_t)layout_ring(page), begin = (uintptr_t)page;
    assert_true(ring >= begin + sizeof(struct exchange_header));
    assert_true(ring + sizeof(struct exchange_ring) <= begin + LAYOUT_PAGE_BYTES);
    /* Bells on cache lines of their own: the two sides do not slow each other. */
    assert_int_equal(offsetof(struct exchange_ring, requests) % 64, 0);
    assert_int_equal(offsetof(struct exchange_ring, replies) % 64, 0);
    assert_int_equal((ring - begin) % 64, 0);
}

static void entries_of_replies_keep_kind_and_index(void **state)
{
    (void)state;
    assert_int_equal(REPLY_ENTRY(REPLY_ENTRY_NONE, 0), 0);
    assert_int_equal(REPLY_ENTRY(REPLY_ENTRY_FETCH, 12345) >> 30, REPLY_ENTRY_FETCH);
    assert_int_equal(REPLY_ENTRY(REPLY_ENTRY_FETCH, 12345) & 0x3fffffff, 12345);
    assert_int_equal(REPLY_ENTRY(REPLY_ENTRY_APPEND, UINT32_MAX) >> 30, REPLY_ENTRY_APPEND);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes_are_bounded),
        cmocka_unit_test(places_of_a_block_follow_each_other),
        cmocka_unit_test(segments_must_add_up),
        cmocka_unit_test(blocks_are_where_the_header_says),
        cmocka_unit_test(exchanges_must_add_up),
        cmocka_unit_test(entries_of_replies_keep_kind_and_index),
        cmocka_unit_test(rows_have_the_bytes_of_their_codec),
        cmocka_unit_test(slots_are_those_of_the_ring),
        cmocka_unit_test(the_ring_lies_in_the_header_page),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
