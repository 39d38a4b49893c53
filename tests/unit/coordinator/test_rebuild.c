/* What a new coordinator makes of segments: whole sessions, cut reservations, broken ones. */
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

enum { N_STORES = 2, N_BLOCKS = 20, SESSION = 0x5e55, MODEL = 3 };

static struct descriptors *descriptors;
static struct placement *placement;
static struct sessions *sessions;
static struct hand_segment segments[N_STORES];
static const uint8_t lanes[LAYOUT_N_LANES] = {0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1};

static int setup(void **state)
{
    (void)state;
    int result = descriptors_new(&descriptors) | placement_new(&placement) | sessions_new(4, &sessions);
    for (uint32_t i = 0; i < N_STORES; i++) {
        segments_make(&segments[i], i, 70 + i, N_BLOCKS, &segments_shape);
    }
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

static struct block_handle handle_of(uint32_t number)
{
    return (struct block_handle){7 + number / 2, 30 + number}; /* in store number % 2 */
}

/* Block `number` with n_ids ids, chained as it should be. */
static void block(uint32_t number, uint32_t n_ids)
{
    struct block_handle none = {0, 0};
    segments_write_block(&segments[number % 2], handle_of(number), SESSION, number,
                         number > 0 ? handle_of(number - 1) : none, number > 0 ? (number - 1) % 2 : 0, n_ids);
}

static void write_session(uint32_t n_full, uint32_t n_rest, uint32_t n_reserved)
{
    for (uint32_t i = 0; i < N_STORES; i++)
        segments_write_record(&segments[i], 3, SESSION, MODEL, lanes, SESSION_EPHEMERAL);
    for (uint32_t i = 0; i < n_full; i++)
        block(i, 64);
    block(n_full, n_rest);
    for (uint32_t i = 1; i <= n_reserved; i++)
        block(n_full + i, 0);
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

static void read_both(void)
{
    read_store(0);
    read_store(1);
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

static void expect_broken(const char *part)
{
    struct rebuild_verdict verdict = judge(3, true);
    assert_true(verdict.broken);
    if (!strstr(verdict.reason, part))
        fail_msg("\"%s\" does not say \"%s\"", verdict.reason, part);
    assert_int_equal(verdict.session->state, SESSION_RECOVERING);
    assert_true(verdict.session->close_wanted);
    drop(&verdict);
    assert_int_equal(rebuild_judge(sessions, 3, true, &verdict), -ENOENT); /* judged once */
}

static void a_whole_session_is_ready(void **state)
{
    (void)state;
    write_session(4, 10, 2);
    read_both();
    struct rebuild_verdict verdict = judge(3, false);
    struct session *session = verdict.session;
    assert_false(verdict.broken);
    assert_int_equal(verdict.release_from, REBUILD_NOTHING);
    assert_int_equal(verdict.n_cut, 0);
    drop(&verdict);
    assert_int_equal(session->state, SESSION_READY);
    assert_int_equal(session->n_blocks, 7);
    for (uint32_t i = 0; i < 7; i++) {
        struct block_handle handle = handle_of(i);
        assert_memory_equal(&session->blocks[i].handle, &handle, sizeof(handle));
        assert_int_equal(session->blocks[i].store, i % 2);
    }
    assert_int_equal(sessions_n_tokens(session, descriptors), 4 * 64 + 10);
    assert_int_equal(session->terms.flags, SESSION_EPHEMERAL);
    assert_string_equal(session->terms.policy, "full");
    uint64_t model[2];
    assert_true(sessions_model(sessions, model));
    assert_int_equal(model[0], MODEL);
    assert_int_equal(placement_n_free(placement, 0), N_BLOCKS - 4);
    assert_int_equal(placement_n_free(placement, 1), N_BLOCKS - 3);
}

static void a_session_waits_for_its_stores(void **state)
{
    (void)state;
    write_session(2, 1, 0);
    read_store(0);
    struct rebuild_verdict verdict;
    assert_int_equal(rebuild_judge(sessions, 1, false, &verdict), -ENOENT);
    assert_int_equal(sessions_find(sessions, SESSION)->state, SESSION_RECOVERING);
    read_store(1);
    verdict = judge(3, false);
    assert_false(verdict.broken);
    drop(&verdict);
}

static void a_session_without_blocks_is_whole(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < N_STORES; i++)
        segments_write_record(&segments[i], 0, SESSION, MODEL, lanes, 0);
    read_both();
    struct rebuild_verdict verdict = judge(3, false);
    assert_false(verdict.broken);
    assert_int_equal(verdict.session->n_blocks, 0);
    drop(&verdict);
}

static void blocks_that_were_being_reserved_are_cut(void **state)
{
    (void)state;
    write_session(2, 5, 1); /* numbers 0 .. 3 */
    block(5, 0);            /* store 1 has its part of the reservation, store 0 does not */
    block(7, 0);
    read_both();
    struct rebuild_verdict verdict = judge(3, false);
    assert_false(verdict.broken);
    assert_int_equal(verdict.release_from, 4);
    assert_int_equal(verdict.n_cut, 2);
    assert_int_equal(verdict.cut[0].store, 1);
    assert_int_equal(verdict.cut[0].handle.generation, handle_of(5).generation);
    assert_int_equal(verdict.session->n_blocks, 4);
    drop(&verdict);
}

static void a_missing_block_breaks_it(void **state)
{
    (void)state;
    write_session(4, 5, 0);
    atomic_store(&segments_block(&segments[0], handle_of(2).index)->state, BLOCK_FREE);
    read_both();
    expect_broken("block 2 is missing");
}

static void another_generation_breaks_the_chain(void **state)
{
    (void)state;
    write_session(4, 5, 0);
    segments_block(&segments[1], handle_of(3).index)->previous.generation++;
    read_both();
    expect_broken("block 3");
}

static void a_block_in_the_wrong_store_breaks_it(void **state)
{
    (void)state;
    write_session(3, 5, 0);
    atomic_store(&segments_block(&segments[1], handle_of(1).index)->state, BLOCK_FREE);
    segments_write_block(&segments[0], (struct block_handle){19, 1}, SESSION, 1, handle_of(0), 0, 64);
    read_both();
    expect_broken("wrong place");
}

static void a_number_twice_breaks_it(void **state)
{
    (void)state;
    write_session(3, 5, 0);
    segments_write_block(&segments[0], (struct block_handle){19, 1}, SESSION, 2, handle_of(1), 1, 64);
    read_both();
    expect_broken("block 3"); /* number 2 again stands where number 3 should */
}

static void ids_after_a_gap_break_it(void **state)
{
    (void)state;
    write_session(3, 5, 0);
    atomic_store(&segments_block(&segments[1], handle_of(1).index)->n_ids, 63);
    read_both();
    expect_broken("not full");
}

static void impossible_counts_break_it(void **state)
{
    (void)state;
    write_session(3, 5, 0);
    atomic_store(&segments_block(&segments[1], handle_of(1).index)->n_ids, 65);
    read_both();
    expect_broken("65 ids");
}

static void a_missing_record_breaks_it(void **state)
{
    (void)state;
    write_session(3, 5, 0);
    atomic_store(&segments_record(&segments[1], 3)->state, SESSION_RECORD_FREE);
    read_both();
    expect_broken("value-store 1 has no record");
}

static void disagreeing_records_break_it(void **state)
{
    (void)state;
    write_session(3, 5, 0);
    segments_record(&segments[1], 3)->exact_tokens = 1;
    read_both();
    expect_broken("disagree");
}

static void blocks_of_nobody_are_found(void **state)
{
    (void)state;
    segments_write_block(&segments[0], (struct block_handle){4, 1}, 99, 0, (struct block_handle){0, 0}, 0, 64);
    read_both();
    struct rebuild_verdict verdict = judge(1, false); /* no other store can change that */
    assert_true(verdict.broken);
    assert_int_equal(verdict.session->id, 99);
    assert_int_equal(verdict.session->n_blocks, 1); /* to be released */
    assert_int_equal(sessions_stores(verdict.session), 1);
    drop(&verdict);
    uint64_t model[2];
    assert_false(sessions_model(sessions, model));
}

static void a_store_that_will_never_come_breaks_it(void **state)
{
    (void)state;
    uint8_t far[LAYOUT_N_LANES] = {0, 1, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9};
    for (uint32_t i = 0; i < N_STORES; i++)
        segments_write_record(&segments[i], 0, SESSION, MODEL, far, 0);
    read_both();
    struct rebuild_verdict verdict;
    assert_int_equal(rebuild_judge(sessions, 3, false, &verdict), -ENOENT);
    expect_broken("value-store 9");
}

static void garbage_headers_are_not_blocks(void **state)
{
    (void)state;
    write_session(1, 5, 0);
    struct block_header *header = segments_block(&segments[0], 0);
    header->magic = 1;
    header->session = SESSION;
    atomic_store(&header->state, 77);
    read_both();
    struct rebuild_verdict verdict = judge(3, true);
    assert_false(verdict.broken);
    drop(&verdict);
}

static void an_adopted_segment_is_compared(void **state)
{
    (void)state;
    write_session(3, 5, 1);
    read_both();
    struct rebuild_verdict verdict = judge(3, true);
    drop(&verdict);
    const struct segment_view *view = descriptors_view(descriptors, 0);
    assert_true(rebuild_still_whole(verdict.session, 0, view));
    struct block_header *header = segments_block(&segments[0], handle_of(2).index);
    atomic_store(&header->state, BLOCK_FREE);
    assert_false(rebuild_still_whole(verdict.session, 0, view));
    atomic_store(&header->state, BLOCK_SEALED);
    assert_true(rebuild_still_whole(verdict.session, 0, view));
    header->handle.generation++;
    assert_false(rebuild_still_whole(verdict.session, 0, view));
    header->handle.generation--;
    atomic_store(&segments_record(&segments[0], 3)->state, SESSION_RECORD_FREE);
    assert_false(rebuild_still_whole(verdict.session, 0, view));
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(a_whole_session_is_ready),
        TEST(a_session_waits_for_its_stores),
        TEST(a_session_without_blocks_is_whole),
        TEST(blocks_that_were_being_reserved_are_cut),
        TEST(a_missing_block_breaks_it),
        TEST(another_generation_breaks_the_chain),
        TEST(a_block_in_the_wrong_store_breaks_it),
        TEST(a_number_twice_breaks_it),
        TEST(ids_after_a_gap_break_it),
        TEST(impossible_counts_break_it),
        TEST(a_missing_record_breaks_it),
        TEST(disagreeing_records_break_it),
        TEST(blocks_of_nobody_are_found),
        TEST(a_store_that_will_never_come_breaks_it),
        TEST(garbage_headers_are_not_blocks),
        TEST(an_adopted_segment_is_compared),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
