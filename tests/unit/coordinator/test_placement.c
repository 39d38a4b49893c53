/* Lanes, generations, room with numbers, reuse. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "coordinator/placement.h"

static struct placement *placement;

static int setup(void **state)
{
    (void)state;
    return placement_new(&placement);
}

static int teardown(void **state)
{
    (void)state;
    placement = placement_free(placement);
    return 0;
}

static void add_store(uint32_t store, uint32_t n_blocks, uint64_t block_bytes)
{
    uint32_t *generations = calloc(n_blocks, sizeof(uint32_t));
    assert_non_null(generations);
    assert_int_equal(placement_add_store(placement, store, n_blocks, block_bytes, generations), 0);
    free(generations);
}

static void count_lanes(const uint8_t lanes[LAYOUT_N_LANES], uint32_t counts[PLACEMENT_MAX_STORES])
{
    memset(counts, 0, PLACEMENT_MAX_STORES * sizeof(uint32_t));
    for (uint32_t i = 0; i < LAYOUT_N_LANES; i++)
        counts[lanes[i]]++;
}

static void equal_stores_get_equal_lanes(void **state)
{
    (void)state;
    uint8_t lanes[LAYOUT_N_LANES];
    uint32_t counts[PLACEMENT_MAX_STORES];
    for (uint32_t n = 1; n <= 16; n++) {
        add_store(n - 1, 100, 4096);
        assert_int_equal(placement_lanes(placement, (UINT64_C(1) << n) - 1, lanes), 0);
        count_lanes(lanes, counts);
        uint32_t n_used = 0;
        for (uint32_t store = 0; store < n; store++) {
            n_used += counts[store] > 0;
            assert_true(counts[store] <= (LAYOUT_N_LANES + n - 1) / n);
        }
        assert_int_equal(n_used, n < LAYOUT_N_LANES ? n : LAYOUT_N_LANES);
    }
}

static void lanes_follow_room_and_readiness(void **state)
{
    (void)state;
    uint8_t lanes[LAYOUT_N_LANES];
    uint32_t counts[PLACEMENT_MAX_STORES];
    assert_int_equal(placement_lanes(placement, 3, lanes), -ENODEV);
    add_store(0, 300, 4096);
    add_store(1, 100, 4096);
    add_store(5, 100, 4096);
    assert_int_equal(placement_lanes(placement, 3, lanes), 0);
    count_lanes(lanes, counts);
    assert_int_equal(counts[0], 9);
    assert_int_equal(counts[1], 3);
    assert_int_equal(placement_lanes(placement, 1u << 5, lanes), 0);
    count_lanes(lanes, counts);
    assert_int_equal(counts[5], 12);
    assert_int_equal(placement_lanes(placement, 1u << 4, lanes), -ENODEV);
}

static void blocks_lie_in_the_store_of_their_lane(void **state)
{
    (void)state;
    uint8_t lanes[LAYOUT_N_LANES] = {0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2};
    struct placed_block blocks[30];
    struct placement_room room;
    for (uint32_t i = 0; i < 3; i++)
        add_store(i, 10, 4096);
    assert_int_equal(placement_reserve(placement, lanes, 0, 30, blocks, &room), 0);
    bool seen[3][10] = {{false}};
    for (uint32_t i = 0; i < 30; i++) {
        assert_int_equal(blocks[i].store, lanes[i % 12]);
        assert_int_equal(blocks[i].handle.generation, 1);
        assert_false(seen[blocks[i].store][blocks[i].handle.index]);
        seen[blocks[i].store][blocks[i].handle.index] = true;
    }
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(placement_n_free(placement, i), 0);
}

static void refusal_says_what_is_asked_and_free(void **state)
{
    (void)state;
    uint8_t lanes[LAYOUT_N_LANES] = {0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1};
    struct placed_block blocks[8] = {0};
    struct placement_room room;
    add_store(0, 3, 1000);
    add_store(1, 10, 1000);
    /* numbers 0, 2, 4 fit store 0, number 6 does not: 0 .. 5 is all this session can get */
    assert_int_equal(placement_reserve(placement, lanes, 0, 8, blocks, &room), -ENOMEM);
    assert_int_equal(room.bytes_asked, 8000);
    assert_int_equal(room.bytes_free, 6000);
    assert_int_equal(blocks[0].handle.generation, 0); /* all or none */
    assert_int_equal(placement_n_free(placement, 0), 3);
    assert_int_equal(placement_n_free(placement, 1), 10);
    assert_int_equal(placement_reserve(placement, lanes, 0, 6, blocks, &room), 0);
    uint64_t total, used;
    assert_true(placement_usage(placement, 0, &total, &used));
    assert_int_equal(total, 3000);
    assert_int_equal(used, 3000);
    assert_false(placement_usage(placement, 7, &total, &used));
    lanes[0] = 7;
    assert_int_equal(placement_reserve(placement, lanes, 0, 1, blocks, &room), -EINVAL);
}

static void a_generation_is_never_given_again(void **state)
{
    (void)state;
    uint8_t lanes[LAYOUT_N_LANES] = {0};
    uint32_t generations[2] = {41, UINT32_MAX - 1};
    uint32_t last[2] = {41, UINT32_MAX - 1};
    struct placed_block block, stale;
    struct placement_room room;
    assert_int_equal(placement_add_store(placement, 0, 2, 4096, generations), 0);
    int n_given = 0;
    while (placement_reserve(placement, lanes, 0, 1, &block, &room) == 0 && n_given < 50) {
        assert_true(block.handle.generation > last[block.handle.index]);
        last[block.handle.index] = block.handle.generation;
        n_given++;
        stale = block;
        stale.handle.generation--;
        assert_int_equal(placement_release(placement, 0, stale.handle), -ESTALE);
        assert_int_equal(placement_release(placement, 0, block.handle), 0);
        assert_int_equal(placement_release(placement, 0, block.handle), -ESTALE); /* twice */
    }
    assert_int_equal(n_given, 50); /* the other block goes on */
}

static void an_exhausted_block_is_not_given(void **state)
{
    (void)state;
    uint8_t lanes[LAYOUT_N_LANES] = {0};
    uint32_t generations[1] = {UINT32_MAX - 1};
    struct placed_block block;
    struct placement_room room;
    assert_int_equal(placement_add_store(placement, 0, 1, 4096, generations), 0);
    assert_int_equal(placement_reserve(placement, lanes, 0, 1, &block, &room), 0);
    assert_int_equal(block.handle.generation, UINT32_MAX);
    assert_int_equal(placement_release(placement, 0, block.handle), 0);
    assert_int_equal(placement_reserve(placement, lanes, 0, 1, &block, &room), -ENOMEM);
}

static void handles_are_above_what_the_store_has_seen(void **state)
{
    (void)state;
    uint8_t lanes[LAYOUT_N_LANES] = {0};
    struct placed_block block;
    struct placement_room room;
    add_store(0, 1, 4096);
    assert_int_equal(placement_reserve(placement, lanes, 0, 1, &block, &room), 0);
    placement_raise(placement, 0, 0, 50); /* the store mended that block's header meanwhile */
    placement_raise(placement, 0, 0, 40);
    placement_raise(placement, 0, 1, 1); /* no such block, no such store */
    placement_raise(placement, 1, 0, 1);
    assert_int_equal(placement_release(placement, 0, block.handle), 0); /* still the handle that was given */
    assert_int_equal(placement_reserve(placement, lanes, 0, 1, &block, &room), 0);
    assert_int_equal(block.handle.generation, 51);
}

static void claimed_blocks_are_used(void **state)
{
    (void)state;
    uint8_t lanes[LAYOUT_N_LANES] = {0};
    struct placed_block blocks[4];
    struct placement_room room;
    add_store(0, 4, 4096);
    assert_int_equal(placement_claim(placement, 0, (struct block_handle){2, 9}), 0);
    assert_int_equal(placement_claim(placement, 0, (struct block_handle){2, 9}), -EBUSY);
    assert_int_equal(placement_claim(placement, 0, (struct block_handle){4, 1}), -EINVAL);
    assert_int_equal(placement_claim(placement, 1, (struct block_handle){0, 1}), -EINVAL);
    assert_int_equal(placement_reserve(placement, lanes, 0, 4, blocks, &room), -ENOMEM);
    assert_int_equal(placement_reserve(placement, lanes, 0, 3, blocks, &room), 0);
    for (int i = 0; i < 3; i++)
        assert_int_not_equal(blocks[i].handle.index, 2);
    assert_int_equal(placement_release(placement, 0, (struct block_handle){2, 9}), 0);
    assert_int_equal(placement_reserve(placement, lanes, 0, 1, blocks, &room), 0);
    assert_int_equal(blocks[0].handle.index, 2);
    assert_int_equal(blocks[0].handle.generation, 10);
}

static void a_store_without_blocks_is_none(void **state)
{
    (void)state;
    uint32_t generation = 0;
    assert_int_equal(placement_add_store(placement, 0, 0, 4096, &generation), -EINVAL);
    assert_int_equal(placement_add_store(placement, PLACEMENT_MAX_STORES, 1, 4096, &generation), -EINVAL);
    add_store(0, 5, 4096);
    placement_remove_store(placement, 0);
    assert_int_equal(placement_n_free(placement, 0), 0);
    assert_int_equal(placement_release(placement, 0, (struct block_handle){0, 1}), -ESTALE);
}

static void room_is_told_without_taking_any(void **state)
{
    (void)state;
    const uint8_t lanes[LAYOUT_N_LANES] = {0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1};
    struct placed_block blocks[8];
    struct placement_room room = {7, 7};
    add_store(0, 4, 4096);
    assert_int_equal(placement_room(placement, lanes, 0, 1, &room), -EINVAL);
    assert_int_equal(room.bytes_asked, 7);
    assert_false(placement_could_hold(placement, lanes, 0)); /* a lane without a store */
    add_store(1, 2, 8192);
    assert_int_equal(placement_room(placement, lanes, 0, 4, &room), 0);
    assert_int_equal(room.bytes_asked, 2 * 4096 + 2 * 8192);
    assert_int_equal(room.bytes_free, room.bytes_asked);
    assert_int_equal(placement_n_free(placement, 0) + placement_n_free(placement, 1), 6);
    assert_int_equal(placement_reserve(placement, lanes, 0, 3, blocks, &room), 0);
    assert_int_equal(placement_room(placement, lanes, 3, 3, &room), -ENOMEM); /* store 1 has one left: for number 3 */
    assert_int_equal(room.bytes_asked, 8192 + 4096 + 8192);
    assert_int_equal(room.bytes_free, 8192 + 4096);
    /* alone it could have as many as its smallest share allows, whatever is used now */
    assert_true(placement_could_hold(placement, lanes, 5)); /* 3 in store 0, 2 in store 1 */
    assert_false(placement_could_hold(placement, lanes, 6));
    assert_false(placement_could_hold(placement, lanes, UINT64_MAX / 2));
}

static void one_block_in_a_given_store(void **state)
{
    (void)state;
    struct placed_block block = {{7, 7}, 7};
    uint32_t generations[2] = {UINT32_MAX, 41};
    assert_int_equal(placement_reserve_in(placement, 0, &block), -EINVAL);
    assert_int_equal(placement_reserve_in(placement, PLACEMENT_MAX_STORES, &block), -EINVAL);
    assert_int_equal(block.handle.generation, 7); /* untouched */
    assert_int_equal(placement_add_store(placement, 3, 2, 4096, generations), 0);
    assert_int_equal(placement_reserve_in(placement, 3, &block), 0);
    assert_int_equal(block.store, 3);
    assert_int_equal(block.handle.index, 1); /* the other one is at its end */
    assert_int_equal(block.handle.generation, 42);
    assert_int_equal(placement_reserve_in(placement, 3, &block), -ENOMEM);
    placement_raise(placement, 3, 1, 60);
    assert_int_equal(placement_release(placement, 3, (struct block_handle){1, 42}), 0);
    assert_int_equal(placement_reserve_in(placement, 3, &block), 0);
    assert_int_equal(block.handle.generation, 61);
}

/* All lanes in store 0, but for the last two in store 1. */
static const uint8_t mostly_zero[LAYOUT_N_LANES] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1};

static void lanes_that_move_are_spread(void **state)
{
    (void)state;
    uint8_t lanes[LAYOUT_N_LANES];
    uint32_t counts[PLACEMENT_MAX_STORES];
    struct placement_room room = {7, 7};
    for (uint32_t i = 0; i < 4; i++)
        add_store(i, 100, 4096);
    for (uint32_t n_blocks = 0; n_blocks <= 120; n_blocks += 40) { /* those without blocks, too */
        assert_int_equal(placement_move_lanes(placement, 15, 0, mostly_zero, n_blocks, lanes, &room), 0);
        count_lanes(lanes, counts);
        assert_int_equal(counts[0], 0);
        assert_int_equal(counts[1] + counts[2] + counts[3], LAYOUT_N_LANES);
        assert_true(counts[1] >= 2 + 3 && counts[2] >= 3 && counts[3] >= 3);
        assert_int_equal(lanes[10], 1); /* they stay */
        assert_int_equal(lanes[11], 1);
    }
    assert_int_equal(room.bytes_asked, 7);
    assert_int_equal(placement_n_free(placement, 1), 100); /* nothing was taken */
    assert_int_equal(placement_move_lanes(placement, 15, 2, mostly_zero, 50, lanes, &room), 0);
    assert_memory_equal(lanes, mostly_zero, sizeof(lanes)); /* nothing lives there */
}

static void lanes_that_move_follow_room(void **state)
{
    (void)state;
    uint8_t lanes[LAYOUT_N_LANES];
    uint32_t counts[PLACEMENT_MAX_STORES];
    struct placement_room room;
    add_store(0, 200, 1000);
    add_store(1, 30, 1000);
    add_store(2, 90, 1000);
    assert_int_equal(placement_move_lanes(placement, 6, 0, mostly_zero, 0, lanes, &room), 0);
    count_lanes(lanes, counts);
    assert_true(counts[2] > counts[1] - 2);
    /* what fits comes first: 9 blocks a lane, of which store 1 can take three and store 2 the other seven */
    assert_int_equal(placement_move_lanes(placement, 6, 0, mostly_zero, 9 * LAYOUT_N_LANES, lanes, &room), 0);
    count_lanes(lanes, counts);
    assert_true((counts[1] - 2) * 9 <= 30 && counts[2] * 9 <= 90);
    /* 12 a lane: 24 of store 1 and 84 of store 2 are nine lanes, the tenth fits nowhere whole */
    uint8_t before[LAYOUT_N_LANES];
    memcpy(before, lanes, sizeof(before));
    assert_int_equal(placement_move_lanes(placement, 6, 0, mostly_zero, 12 * LAYOUT_N_LANES, lanes, &room), -ENOMEM);
    assert_int_equal(room.bytes_asked, 10 * 12 * 1000);
    assert_true(room.bytes_free >= 9 * 12 * 1000 && room.bytes_free < room.bytes_asked);
    assert_memory_equal(lanes, before, sizeof(lanes)); /* untouched */
    /* numbers that are no multiple of the lanes: lanes 0 .. 4 have one block more */
    assert_int_equal(placement_move_lanes(placement, 6, 0, mostly_zero, 9 * LAYOUT_N_LANES + 5, lanes, &room), 0);
    assert_int_equal(placement_move_lanes(placement, 2, 0, mostly_zero, 3 * LAYOUT_N_LANES, lanes, &room), 0);
    assert_int_equal(placement_move_lanes(placement, 2, 0, mostly_zero, 3 * LAYOUT_N_LANES + 1, lanes, &room), -ENOMEM);
    assert_int_equal(room.bytes_asked, 31000);
    assert_int_equal(room.bytes_free, 30000);
}

static void lanes_without_a_target_stay(void **state)
{
    (void)state;
    uint8_t lanes[LAYOUT_N_LANES] = {9};
    struct placement_room room = {7, 7};
    add_store(0, 10, 4096);
    add_store(1, 10, 4096);
    assert_int_equal(placement_move_lanes(placement, 0, 0, mostly_zero, 5, lanes, &room), -ENODEV);
    assert_int_equal(placement_move_lanes(placement, 1, 0, mostly_zero, 5, lanes, &room), -ENODEV); /* only itself */
    assert_int_equal(placement_move_lanes(placement, 8, 0, mostly_zero, 5, lanes, &room), -ENODEV); /* unknown */
    assert_int_equal(lanes[0], 9);
    assert_int_equal(room.bytes_asked, 7);
    /* lanes of a store that is unknown by now go, too */
    placement_remove_store(placement, 0);
    assert_int_equal(placement_move_lanes(placement, 3, 0, mostly_zero, 5, lanes, &room), 0);
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
        assert_int_equal(lanes[lane], 1);
}

static void full_stores_take_lanes_without_blocks(void **state)
{
    (void)state;
    uint8_t lanes[LAYOUT_N_LANES], all[LAYOUT_N_LANES] = {0};
    uint32_t counts[PLACEMENT_MAX_STORES];
    struct placement_room room;
    struct placed_block block;
    for (uint32_t i = 0; i < 3; i++)
        add_store(i, 1, 4096);
    assert_int_equal(placement_reserve_in(placement, 1, &block), 0);
    assert_int_equal(placement_reserve_in(placement, 2, &block), 0);
    assert_int_equal(placement_move_lanes(placement, 6, 0, all, 0, lanes, &room), 0);
    count_lanes(lanes, counts);
    assert_int_equal(counts[1], 6); /* spread all the same, for when there is room */
    assert_int_equal(counts[2], 6);
    assert_int_equal(placement_move_lanes(placement, 6, 0, all, 1, lanes, &room), -ENOMEM);
    assert_int_equal(room.bytes_free, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(equal_stores_get_equal_lanes, setup, teardown),
        cmocka_unit_test_setup_teardown(lanes_follow_room_and_readiness, setup, teardown),
        cmocka_unit_test_setup_teardown(blocks_lie_in_the_store_of_their_lane, setup, teardown),
        cmocka_unit_test_setup_teardown(refusal_says_what_is_asked_and_free, setup, teardown),
        cmocka_unit_test_setup_teardown(a_generation_is_never_given_again, setup, teardown),
        cmocka_unit_test_setup_teardown(an_exhausted_block_is_not_given, setup, teardown),
        cmocka_unit_test_setup_teardown(handles_are_above_what_the_store_has_seen, setup, teardown),
        cmocka_unit_test_setup_teardown(claimed_blocks_are_used, setup, teardown),
        cmocka_unit_test_setup_teardown(a_store_without_blocks_is_none, setup, teardown),
        cmocka_unit_test_setup_teardown(room_is_told_without_taking_any, setup, teardown),
        cmocka_unit_test_setup_teardown(one_block_in_a_given_store, setup, teardown),
        cmocka_unit_test_setup_teardown(lanes_that_move_are_spread, setup, teardown),
        cmocka_unit_test_setup_teardown(lanes_that_move_follow_room, setup, teardown),
        cmocka_unit_test_setup_teardown(lanes_without_a_target_stay, setup, teardown),
        cmocka_unit_test_setup_teardown(full_stores_take_lanes_without_blocks, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
