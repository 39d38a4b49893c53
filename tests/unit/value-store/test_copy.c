/* test_copy.c - sealed blocks become another session's: what is taken, what is refused, what a repeated order does. */
#include "tests/unit/value-store/fixture.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define N_BLOCKS 3u /* of FIXTURE_SESSION in 0 .. 2, the last one open; reserved for FIXTURE_OTHER: 3 .. 5 */

static const struct block_handle handles[2 * N_BLOCKS] = {{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4, 5}, {5, 6}};

static int set_up(void **state, enum row_codec codec)
{
    struct fixture *fixture = malloc(sizeof(*fixture));
    const struct row_shape shape = {.n_layers = 3, .n_kv_heads = 2, .head_dim = 40, .codec = codec};
    assert_non_null(fixture);
    fixture_open(fixture, &shape, 2 * N_BLOCKS + 1);
    fixture_session(fixture->blocks, FIXTURE_SESSION);
    fixture_session(fixture->blocks, FIXTURE_OTHER);
    for (uint32_t i = 0; i < 2 * N_BLOCKS; i++)
        fixture_reserve(fixture->blocks, i < N_BLOCKS ? FIXTURE_SESSION : FIXTURE_OTHER, i, handles[i].generation,
                        i % N_BLOCKS);
    for (uint32_t i = 0; i < N_BLOCKS; i++)
        assert_int_equal(
            fixture_append(fixture, fixture->blocks, FIXTURE_SESSION, handles[i], i, 0, i == 2 ? 63 : 64, UINT32_MAX),
            0);
    *state = fixture;
    return 0;
}

static int set_up_f16(void **state)
{
    return set_up(state, ROW_CODEC_F16);
}

static int set_up_q8_0(void **state)
{
    return set_up(state, ROW_CODEC_Q8_0);
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    char text[BLOCKS_CHECK_TEXT] = "";
    int result = blocks_check(fixture->blocks, text);
    if (result < 0)
        print_error("blocks_check: %s\n", text);
    fixture_close(fixture);
    free(fixture);
    return result;
}

static int copy(struct fixture *fixture, struct block_handle from, struct block_handle to)
{
    const struct blocks_copy order = {.from = from, .to = to};
    return blocks_copy(fixture->blocks, FIXTURE_SESSION, FIXTURE_OTHER, &order);
}

static struct block_header *header_of(const struct fixture *fixture, uint32_t index)
{
    return layout_block(fixture->segment, index);
}

static void copies_are_sealed_blocks(void **state)
{
    struct fixture *fixture = *state;
    for (uint32_t i = 0; i < 2; i++) {
        const uint64_t decoded = UINT64_C(0x8000000000000001) << i;
        atomic_store(&header_of(fixture, i)->decoded, decoded);
        assert_int_equal(copy(fixture, handles[i], handles[3 + i]), 0);
        assert_true(atomic_load(&header_of(fixture, 3 + i)->decoded) == decoded);
        assert_true(fixture_copy_is_right(fixture, fixture->blocks, FIXTURE_OTHER, handles[3 + i], FIXTURE_SESSION));
        assert_int_equal(blocks_verify(fixture->blocks, 3 + i), 0);
        assert_int_equal(header_of(fixture, 3 + i)->checksum, header_of(fixture, i)->checksum);
        assert_int_equal(header_of(fixture, 3 + i)->writer, 1);
        assert_int_equal(header_of(fixture, 3 + i)->handle.generation, handles[3 + i].generation);
    }
    struct blocks_counts counts = blocks_count(fixture->blocks);
    assert_true(counts.n_sealed == 4 && counts.n_open == 2 && counts.n_free == 1);
    /* Both go their own way: the fork outlives what it came from. */
    assert_int_equal(blocks_release(fixture->blocks, FIXTURE_SESSION, 0, 0), 3);
    assert_true(fixture_copy_is_right(fixture, fixture->blocks, FIXTURE_OTHER, handles[3], FIXTURE_SESSION));
    assert_int_equal(fixture_append(fixture, fixture->blocks, FIXTURE_OTHER, handles[5], 2, 0, 10, UINT32_MAX), 0);
}

static void repeated_orders_change_nothing(void **state)
{
    struct fixture *fixture = *state;
    uint8_t *before = malloc(fixture->plan.n_bytes);
    assert_non_null(before);
    assert_int_equal(copy(fixture, handles[0], handles[3]), 0);
    memcpy(before, fixture->segment, fixture->plan.n_bytes);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(copy(fixture, handles[0], handles[3]), 0);
    assert_memory_equal(before, fixture->segment, fixture->plan.n_bytes);
    free(before);
}

static void refused(void **state)
{
    struct fixture *fixture = *state;
    const struct blocks_copy good = {handles[0], handles[3]};
    uint8_t *before = malloc(fixture->plan.n_bytes);
    assert_non_null(before);
    memcpy(before, fixture->segment, fixture->plan.n_bytes);
    assert_int_equal(blocks_copy_check(fixture->blocks, FIXTURE_SESSION, FIXTURE_OTHER, &good), 0);
    assert_int_equal(copy(fixture, handles[2], handles[5]), -ENODATA);
    assert_int_equal(copy(fixture, handles[0], handles[4]), -EINVAL);
    assert_int_equal(copy(fixture, handles[1], handles[3]), -EINVAL);
    assert_int_equal(copy(fixture, (struct block_handle){0, 2}, handles[3]), -ESTALE);
    assert_int_equal(copy(fixture, (struct block_handle){0, 0}, handles[3]), -ESTALE);
    assert_int_equal(copy(fixture, (struct block_handle){UINT32_MAX, 1}, handles[3]), -ESTALE);
    assert_int_equal(copy(fixture, handles[3], handles[3]), -ESTALE);
    assert_int_equal(copy(fixture, handles[0], (struct block_handle){3, 3}), -ESTALE);
    assert_int_equal(copy(fixture, handles[0], handles[1]), -ESTALE);
    assert_int_equal(copy(fixture, handles[0], (struct block_handle){6, 0}), -ESTALE); /* free */
    assert_int_equal(copy(fixture, handles[0], (struct block_handle){7, 1}), -ESTALE);
    const uint64_t pairs[][2] = {{FIXTURE_OTHER, FIXTURE_SESSION}, {77, FIXTURE_OTHER}, {FIXTURE_SESSION, 77}, {0, 77}};
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(blocks_copy(fixture->blocks, pairs[i][0], pairs[i][1], &good), -ESTALE);
    assert_int_equal(blocks_copy(fixture->blocks, FIXTURE_SESSION, FIXTURE_SESSION, &good), -EINVAL);
    assert_memory_equal(before, fixture->segment, fixture->plan.n_bytes);
    free(before);

    /* Tokens of its own are there already. */
    assert_int_equal(fixture_append(fixture, fixture->blocks, FIXTURE_OTHER, handles[3], 0, 0, 1, UINT32_MAX), 0);
    assert_int_equal(copy(fixture, handles[0], handles[3]), -EEXIST);
    assert_true(fixture_block_is_right(fixture, fixture->blocks, FIXTURE_OTHER, handles[3]));
}

/* A block that holds the first of the same tokens, in any progress of its layers, is completed. */
static void what_is_there_is_kept(void **state)
{
    struct fixture *fixture = *state;
    uint32_t ids[64];
    for (uint32_t i = 0; i < 64; i++)
        ids[i] = fixture_id(FIXTURE_SESSION, i);
    for (uint32_t layer = 0; layer < 2; layer++) {
        uint32_t n = layer == 0 ? 20 : 64;
        void *rows = fixture_rows(fixture, FIXTURE_SESSION, 0, n, layer);
        const struct blocks_append append = {
            .session = FIXTURE_OTHER, .handle = handles[3], .layer = layer, .n_tokens = n, .ids = ids, .rows = rows};
        assert_int_equal(blocks_append(fixture->blocks, &append), 0);
        free(rows);
    }
    assert_int_equal(copy(fixture, handles[0], handles[3]), 0);
    assert_int_equal(blocks_verify(fixture->blocks, 3), 0);
    assert_true(fixture_copy_is_right(fixture, fixture->blocks, FIXTURE_OTHER, handles[3], FIXTURE_SESSION));
}

int main(void)
{
#define TEST(name)                                                                                                     \
    {#name " (f16)", name, set_up_f16, tear_down, NULL},                                                               \
    {                                                                                                                  \
#name " (q8_0)", name, set_up_q8_0, tear_down, NULL                                                            \
    }
    const struct CMUnitTest tests[] = {
        TEST(copies_are_sealed_blocks),
        TEST(repeated_orders_change_nothing),
        TEST(refused),
        TEST(what_is_there_is_kept),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
