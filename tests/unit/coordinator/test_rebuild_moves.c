/* What a new coordinator makes of sessions whose lanes were moved, or were being moved when the old one died. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "coordinator/rebuild.h"
#include "tests/unit/coordinator/segments.h"

enum { N_STORES = 3, N_BLOCKS = 30, SESSION = 0x5e55, MODEL = 3, ALL = 7, ODD_LANES = 0xaaa };

static struct descriptors *descriptors;
static struct placement *placement;
static struct sessions *sessions;
static struct hand_segment segments[N_STORES];
static const uint8_t old_lanes[LAYOUT_N_LANES] = {0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1};
static const uint8_t new_lanes[LAYOUT_N_LANES] = {0, 2, 0, 2, 0, 2, 0, 2, 0, 2, 0, 2}; /* store 1 was drained */

static int setup(void **state)
{
    (void)state;
    int result = descriptors_new(&descriptors) | placement_new(&placement) | sessions_new(4, &sessions);
    for (uint32_t i = 0; i < N_STORES; i++)
        segments_make(&segments[i], i, 70 + i, N_BLOCKS, &segments_shape);
    return result;
}

static int teardown(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < N_STORES; i++)
        segments_drop(&segments[i]);
    sessions = sessions_free(sessions);
    placement = placement_free(placement);
    descriptors = descriptors_free(descriptors);
    return 0;
}

static struct block_handle handle_in(uint32_t store, uint32_t number)
{
    return (struct block_handle){2 + number, 30 + number + 10 * store};
}

/* Block `number` in that store, linked as blocks are before their session moves. */
static void block(uint32_t store, uint32_t number, uint32_t n_ids)
{
    struct block_handle previous = {0, 0};
    uint32_t previous_store = 0;
    if (number > 0) {
        previous_store = old_lanes[(number - 1) % LAYOUT_N_LANES];
        previous = handle_in(previous_store, number - 1);
    }
    segments_write_block(&segments[store], handle_in(store, number), SESSION, number, previous, previous_store, n_ids);
}

/* `n_full` full blocks and one with 9 ids, where `lanes` says. */
static void blocks_at(const uint8_t lanes[LAYOUT_N_LANES], uint32_t n_full)
{
    for (uint32_t i = 0; i <= n_full; i++)
        block(lanes[i % LAYOUT_N_LANES], i, i < n_full ? 64 : 9);
}

static void record(uint32_t store, bool moved)
{
    segments_write_record(&segments[store], store, SESSION, MODEL, old_lanes, 0);
    if (moved)
        segments_move_record(&segments[store], store, new_lanes);
}

static void read_store(uint32_t store)
{
    uint32_t generations[N_BLOCKS];
    assert_int_equal(descriptors_keep(descriptors, store, 70 + store, fcntl(segments[store].fd, F_DUPFD_CLOEXEC, 0)),
                     0);
    const struct segment_view *view = descriptors_view(descriptors, store);
    for (uint32_t i = 0; i < N_BLOCKS; i++)
        generations[i] = descriptors_block(view, i)->handle.generation;
    assert_int_equal(placement_add_store(placement, store, N_BLOCKS, view->header.block_bytes, generations), 0);
    assert_int_equal(rebuild_store(sessions, placement, store, view), 0);
}

static void read_all(void)
{
    for (uint32_t i = 0; i < N_STORES; i++)
        read_store(i);
}

static struct rebuild_verdict judge(uint64_t there, bool all)
{
    struct rebuild_verdict verdict;
    assert_int_equal(rebuild_judge(sessions, there, all, &verdict), 0);
    return verdict;
}

static void drop(struct rebuild_verdict *verdict)
{
    free(verdict->cut);
    free(verdict->strays);
}

/* Whole, with blocks [0, n_blocks) where `lanes` says. */
static void check_whole(const struct rebuild_verdict *verdict, const uint8_t lanes[LAYOUT_N_LANES], uint32_t n_blocks)
{
    const struct session *session = verdict->session;
    if (verdict->broken)
        fail_msg("broken: %s", verdict->reason);
    assert_int_equal(session->state, SESSION_READY);
    assert_memory_equal(session->terms.lane_store, lanes, LAYOUT_N_LANES);
    assert_int_equal(session->n_blocks, n_blocks);
    for (uint32_t i = 0; i < n_blocks; i++) {
        struct block_handle handle = handle_in(lanes[i % LAYOUT_N_LANES], i);
        assert_int_equal(session->blocks[i].store, lanes[i % LAYOUT_N_LANES]);
        assert_memory_equal(&session->blocks[i].handle, &handle, sizeof(handle));
    }
    assert_int_equal(sessions_n_tokens(session, descriptors), (n_blocks - 1) * 64 + 9);
}

/* Broken for that reason, and everything that was found is to be freed. */
static void check_broken(const char *part, uint32_t n_found)
{
    struct rebuild_verdict verdict = judge(ALL, true);
    assert_true(verdict.broken);
    if (!strstr(verdict.reason, part))
        fail_msg("\"%s\" does not say \"%s\"", verdict.reason, part);
    assert_true(verdict.session->close_wanted);
    assert_int_equal(verdict.session->n_blocks, n_found);
    assert_int_equal(verdict.n_strays, 0);
    assert_int_equal(verdict.n_cut, 0);
    drop(&verdict);
    assert_int_equal(rebuild_judge(sessions, ALL, true, &verdict), -ENOENT); /* judged once */
}

/* The same segments in every order of reading, and with every store that can be late with the news of the move. */
static void most_moves_win_in_any_order(void **state)
{
    (void)state;
    static const uint32_t orders[][N_STORES] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    static const uint32_t told[] = {1 << 2, 1 << 0, 1 << 0 | 1 << 2}; /* the commit had got so far */
    for (uint32_t i = 0; i < sizeof(orders) / sizeof(orders[0]); i++)
        for (uint32_t j = 0; j < sizeof(told) / sizeof(told[0]); j++) {
            for (uint32_t store = 0; store < N_STORES; store++)
                record(store, told[j] >> store & 1u);
            blocks_at(old_lanes, 14);
            blocks_at(new_lanes, 14); /* those of store 0 are the same ones */
            for (uint32_t k = 0; k < N_STORES; k++)
                read_store(orders[i][k]);
            struct rebuild_verdict verdict = judge(ALL, false);
            check_whole(&verdict, new_lanes, 15);
            assert_int_equal(verdict.session->terms.moves, 1);
            assert_int_equal(verdict.session->outdated, ALL & ~told[j]);
            assert_int_equal(verdict.n_strays, 7); /* what store 1 still has */
            for (uint32_t k = 0; k < verdict.n_strays; k++)
                assert_int_equal(verdict.strays[k].store, 1);
            assert_int_equal(verdict.stray_lanes[1], ODD_LANES);
            assert_int_equal(verdict.stray_lanes[0] | verdict.stray_lanes[2], 0);
            assert_int_equal(verdict.release_from, REBUILD_NOTHING);
            drop(&verdict);
            teardown(NULL);
            setup(NULL);
        }
}

static void counts_of_moves_grow(void **state)
{
    (void)state;
    for (uint32_t store = 0; store < N_STORES; store++) {
        record(store, true);
        segments_move_record(&segments[store], store, old_lanes); /* and back */
    }
    segments_move_record(&segments[0], 0, new_lanes);
    blocks_at(old_lanes, 3);
    blocks_at(new_lanes, 3);
    read_all();
    struct rebuild_verdict verdict = judge(ALL, false);
    check_whole(&verdict, new_lanes, 4);
    assert_int_equal(verdict.session->terms.moves, 3);
    assert_int_equal(verdict.session->outdated, 6);
    drop(&verdict);
}

static void links_of_moved_sessions_name_old_places(void **state)
{
    (void)state;
    record(0, true);
    record(2, true);
    blocks_at(new_lanes, 5);
    for (uint32_t i = 1; i <= 5; i++) /* whatever they were */
        segments_block(&segments[new_lanes[i]], handle_in(new_lanes[i], i).index)->previous =
            (struct block_handle){9, i};
    read_all();
    struct rebuild_verdict verdict = judge(ALL, false);
    check_whole(&verdict, new_lanes, 6);
    assert_int_equal(verdict.n_strays, 0);
    assert_int_equal(verdict.session->outdated, 0);
    drop(&verdict);
}

static void moved_blocks_that_are_missing_break_it(void **state)
{
    (void)state;
    record(0, true);
    record(1, false);
    record(2, true);
    blocks_at(old_lanes, 5);
    blocks_at(new_lanes, 5);
    atomic_store(&segments_block(&segments[2], handle_in(2, 3).index)->state, BLOCK_FREE);
    read_all();
    check_broken("block 3 is missing", 3 + 3 + 2); /* in store 0; what the move left; what is in store 2 */
    assert_int_equal(sessions_stores(sessions_find(sessions, SESSION)), ALL);
}

/* The move was not committed: what it staged is left over. */
static void staged_blocks_are_strays(void **state)
{
    (void)state;
    record(0, false);
    record(1, false);
    record(2, false); /* opened for the move */
    blocks_at(old_lanes, 5);
    block(2, 1, 64);
    block(2, 3, 10); /* half copied */
    block(2, 5, 0);
    atomic_store(&segments_block(&segments[2], handle_in(2, 5).index)->n_ids, 99); /* nobody cares any more */
    read_all();
    struct rebuild_verdict verdict = judge(ALL, false);
    check_whole(&verdict, old_lanes, 6);
    assert_int_equal(verdict.session->terms.moves, 0);
    assert_int_equal(verdict.session->outdated, 0);
    assert_int_equal(verdict.n_strays, 3);
    assert_int_equal(verdict.stray_lanes[2], 1 << 1 | 1 << 3 | 1 << 5);
    drop(&verdict);
    assert_int_equal(placement_n_free(placement, 2), N_BLOCKS - 3); /* until the store has freed them */
}

/* They went to a store in which the session has other lanes: the same record, more blocks. */
static void staged_blocks_among_others_are_strays(void **state)
{
    (void)state;
    record(0, false);
    record(1, false);
    blocks_at(old_lanes, 5);
    block(0, 1, 64);
    block(0, 13, 0); /* staged for a reservation that came meanwhile */
    read_all();
    struct rebuild_verdict verdict = judge(ALL, false);
    check_whole(&verdict, old_lanes, 6);
    assert_int_equal(verdict.n_strays, 2);
    assert_int_equal(verdict.stray_lanes[0], 1 << 1); /* block 13 is of that lane, too */
    assert_int_equal(verdict.stray_lanes[1], 0);
    drop(&verdict);
}

static void a_store_that_the_session_does_not_know_may_have_blocks(void **state)
{
    (void)state;
    record(0, false);
    record(1, false);
    blocks_at(old_lanes, 2);
    block(2, 7, 0); /* without a record: its release was under way */
    read_all();
    struct rebuild_verdict verdict = judge(ALL, false);
    check_whole(&verdict, old_lanes, 3);
    assert_int_equal(verdict.n_strays, 1);
    assert_int_equal(verdict.stray_lanes[2], 1 << 7);
    assert_false(sessions_stores(verdict.session) >> 2 & 1u);
    drop(&verdict);
}

static void reserved_and_stray_blocks_come_together(void **state)
{
    (void)state;
    record(0, false);
    record(1, false);
    record(2, false);
    blocks_at(old_lanes, 2);
    block(1, 5, 0); /* of a reservation that store 0 had no part of yet */
    block(2, 1, 64);
    block(2, 3, 0);
    read_all();
    struct rebuild_verdict verdict = judge(ALL, false);
    check_whole(&verdict, old_lanes, 3);
    assert_int_equal(verdict.release_from, 3);
    assert_int_equal(verdict.n_cut, 1);
    assert_int_equal(verdict.cut[0].store, 1);
    assert_int_equal(verdict.n_strays, 2);
    drop(&verdict);
}

static void equal_counts_with_other_lanes_break_it(void **state)
{
    (void)state;
    record(0, true);
    record(1, false);
    segments_move_record(&segments[1], 1, old_lanes); /* one move, too */
    record(2, true);
    blocks_at(old_lanes, 3);
    blocks_at(new_lanes, 3);
    read_all();
    check_broken("disagree", 2 + 2 + 2);
}

static void other_terms_break_it_whatever_has_moved(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        record(0, true);
        record(1, false);
        record(2, true);
        struct session_record *odd = segments_record(&segments[i], i);
        if (i == 0)
            odd->exact_tokens = 5;
        else if (i == 1)
            memcpy(odd->policy, "other", 6);
        else
            odd->flags = SESSION_EPHEMERAL;
        blocks_at(new_lanes, 3);
        read_all();
        check_broken("disagree", 4);
        teardown(NULL);
        setup(NULL);
    }
}

static void a_session_waits_for_the_stores_of_the_newest_record(void **state)
{
    (void)state;
    record(0, true);
    record(1, false);
    record(2, true);
    blocks_at(new_lanes, 3);
    read_store(0);
    read_store(1);
    struct rebuild_verdict verdict;
    assert_int_equal(rebuild_judge(sessions, 3, false, &verdict), -ENOENT); /* store 2 is named, store 1 is not */
    assert_int_equal(sessions_find(sessions, SESSION)->state, SESSION_RECOVERING);
    read_store(2);
    verdict = judge(5, false); /* store 1 need not serve any more */
    check_whole(&verdict, new_lanes, 4);
    drop(&verdict);
}

static void a_record_that_is_missing_after_a_move_breaks_it(void **state)
{
    (void)state;
    record(0, true);
    record(1, false);
    blocks_at(old_lanes, 3);
    blocks_at(new_lanes, 3);
    read_all();
    check_broken("value-store 2 has no record", 2 + 2 + 2);
}

static void lanes_that_name_no_store_break_it(void **state)
{
    (void)state;
    uint8_t lanes[LAYOUT_N_LANES];
    memcpy(lanes, old_lanes, sizeof(lanes));
    lanes[3] = 65; /* not to be taken for store 1, nor block 3 for a stray */
    for (uint32_t store = 0; store < 2; store++)
        segments_write_record(&segments[store], store, SESSION, MODEL, lanes, 0);
    blocks_at(old_lanes, 3);
    read_all();
    check_broken("no store of that number", 4);
}

/* A session lives already when a store comes late with what a move left in it. */
static void what_comes_late_is_only_noted(void **state)
{
    (void)state;
    record(0, true);
    record(1, false);
    record(2, true);
    blocks_at(old_lanes, 3);
    blocks_at(new_lanes, 3);
    read_store(0);
    read_store(2);
    struct rebuild_verdict verdict = judge(5, true);
    check_whole(&verdict, new_lanes, 4);
    drop(&verdict);
    read_store(1);
    struct session *session = sessions_find(sessions, SESSION);
    assert_int_equal(session->state, SESSION_READY);
    assert_memory_equal(session->terms.lane_store, new_lanes, LAYOUT_N_LANES);
    assert_int_equal(session->n_blocks, 4);
    assert_int_equal(session->n_found, 2); /* to be released */
    assert_true(session->records >> 1 & 1u);
    assert_int_equal(placement_n_free(placement, 1), N_BLOCKS - 2);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(most_moves_win_in_any_order),
        TEST(counts_of_moves_grow),
        TEST(links_of_moved_sessions_name_old_places),
        TEST(moved_blocks_that_are_missing_break_it),
        TEST(staged_blocks_are_strays),
        TEST(staged_blocks_among_others_are_strays),
        TEST(a_store_that_the_session_does_not_know_may_have_blocks),
        TEST(reserved_and_stray_blocks_come_together),
        TEST(equal_counts_with_other_lanes_break_it),
        TEST(other_terms_break_it_whatever_has_moved),
        TEST(a_session_waits_for_the_stores_of_the_newest_record),
        TEST(a_record_that_is_missing_after_a_move_breaks_it),
        TEST(lanes_that_name_no_store_break_it),
        TEST(what_comes_late_is_only_noted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
