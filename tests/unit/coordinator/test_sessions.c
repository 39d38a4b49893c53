/* The session table and the duplicates of segments that it reads journals from. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "coordinator/sessions.h"
#include "tests/unit/coordinator/segments.h"

static void every_move_is_in_the_table(void **state)
{
    (void)state;
    enum { N = SESSION_CLOSED + 1 };
    static const uint8_t legal[N] = {
        [SESSION_OPENING] = 1 << SESSION_READY | 1 << SESSION_CLOSING,
        [SESSION_READY] = 1 << SESSION_RUNNING | 1 << SESSION_CLOSING,
        [SESSION_RUNNING] = 1 << SESSION_READY,
        [SESSION_RECOVERING] = 1 << SESSION_READY | 1 << SESSION_CLOSING,
        [SESSION_CLOSING] = 1 << SESSION_CLOSED,
    };
    for (int from = 0; from < N; from++)
        for (int to = 0; to <= N; to++) {
            struct session session = {.state = (enum session_state)from};
            int expected = to < N && legal[from] >> to & 1 ? 0 : -EPROTO;
            assert_int_equal(sessions_move(&session, (enum session_state)to), expected);
            assert_int_equal(session.state, expected == 0 ? to : from);
        }
}

static void the_table_is_bounded(void **state)
{
    (void)state;
    struct sessions *sessions;
    struct session *session, *found;
    assert_int_equal(sessions_new(2, &sessions), 0);
    assert_int_equal(sessions_add(sessions, 0, SESSION_OPENING, &session), -EINVAL);
    assert_int_equal(sessions_add(sessions, 1, SESSION_READY, &session), -EINVAL);
    assert_int_equal(sessions_add(sessions, 1, SESSION_OPENING, &session), 0);
    assert_int_equal(sessions_add(sessions, 1, SESSION_OPENING, &found), -EEXIST);
    assert_int_equal(sessions_add(sessions, 2, SESSION_OPENING, &found), 0);
    assert_int_equal(sessions_add(sessions, 3, SESSION_OPENING, &found), -ENOSPC);
    assert_int_equal(sessions_add(sessions, 3, SESSION_RECOVERING, &found), 0); /* what is in a store is there */
    assert_ptr_equal(sessions_find(sessions, 1), session);
    sessions_remove(sessions, session);
    assert_null(sessions_find(sessions, 1));
    assert_int_equal(sessions_count(sessions), 2);
    sessions = sessions_free(sessions);
    assert_null(sessions);
}

static void idle_sessions_end(void **state)
{
    (void)state;
    struct session session = {.state = SESSION_READY, .active_us = 1000000};
    assert_false(sessions_idle(&session, 601000000, 600));
    assert_true(sessions_idle(&session, 601000001, 600));
    session.terms.flags = SESSION_EPHEMERAL;
    assert_true(sessions_idle(&session, 61000001, 600));
    assert_false(sessions_idle(&session, 61000000, 600));
    session.terms.flags = 0;
    session.terms.idle_timeout_s = 5;
    assert_true(sessions_idle(&session, 6000001, 600));
    session.request = &session; /* somebody works on it */
    assert_false(sessions_idle(&session, 900000000, 600));
    session.request = NULL;
    session.state = SESSION_RECOVERING;
    assert_false(sessions_idle(&session, 900000000, 600));
}

static void descriptors_are_checked(void **state)
{
    (void)state;
    struct descriptors *descriptors;
    struct hand_segment segment;
    int fd;
    assert_int_equal(descriptors_new(&descriptors), 0);
    segments_make(&segment, 1, 77, 3, &segments_shape);
    assert_int_equal(descriptors_keep(descriptors, 0, 77, segment.fd), -EPROTO); /* of store 1 */
    assert_int_equal(descriptors_keep(descriptors, 1, 78, segment.fd), -EPROTO); /* of another owner */
    assert_int_equal(descriptors_keep(descriptors, DESCRIPTORS_MAX_STORES, 77, segment.fd), -EINVAL);
    assert_int_equal(segment_reopen_readonly(segment.fd, &fd), 0);
    assert_int_equal(descriptors_keep(descriptors, 1, 77, fd), -EPROTO); /* nobody could adopt it */
    close(fd);
    fd = open("/dev/null", O_RDWR);
    assert_true(descriptors_keep(descriptors, 1, 77, fd) < 0);
    close(fd);
    segment.header->block_bytes += 4096;
    assert_int_equal(descriptors_keep(descriptors, 1, 77, segment.fd), -EPROTO);
    segment.header->block_bytes -= 4096;
    atomic_store(&segment.header->ready, 0);
    assert_int_equal(descriptors_keep(descriptors, 1, 77, segment.fd), -EPROTO);
    atomic_store(&segment.header->ready, 1);
    assert_null(descriptors_view(descriptors, 1));
    assert_int_equal(descriptors_hand_over(descriptors, 1, &fd), -ENOENT);
    int given = fcntl(segment.fd, F_DUPFD_CLOEXEC, 0);
    assert_int_equal(descriptors_keep(descriptors, 1, 77, given), 0);
    assert_int_equal(descriptors_view(descriptors, 1)->header.n_blocks, 3);
    assert_true(descriptors_same(descriptors, 1, segment.fd));
    segments_drop(&segment);
    descriptors = descriptors_free(descriptors);
    assert_int_equal(fcntl(given, F_GETFD), -1); /* it was theirs */
}

static void a_segment_is_handed_over_after_a_death_only(void **state)
{
    (void)state;
    struct descriptors *descriptors;
    struct hand_segment segment;
    struct segment_mapping mapping;
    int fd;
    assert_int_equal(descriptors_new(&descriptors), 0);
    segments_make(&segment, 0, 77, 3, &segments_shape);
    assert_int_equal(descriptors_keep(descriptors, 0, 77, fcntl(segment.fd, F_DUPFD_CLOEXEC, 0)), 0);
    assert_int_equal(descriptors_hand_over(descriptors, 0, &fd), -EBUSY);
    descriptors_owner_died(descriptors, 0, 76); /* somebody else */
    assert_int_equal(descriptors_hand_over(descriptors, 0, &fd), -EBUSY);
    assert_int_equal(descriptors_readonly(descriptors, 0, &fd), 0);
    assert_int_equal(segment_map(fd, 0, true, &mapping), -EACCES);
    close(fd);
    segments_drop(&segment); /* the store is gone, the pages are not */
    descriptors_owner_died(descriptors, 0, 77);
    assert_int_equal(descriptors_hand_over(descriptors, 0, &fd), 0);
    assert_int_equal(segment_map(fd, 0, true, &mapping), 0);
    assert_int_equal(((struct segment_header *)mapping.address)->incarnation, 77);
    segment_unmap(&mapping);
    close(fd);
    descriptors_free(descriptors);
}

static void tokens_are_counted_in_the_journal(void **state)
{
    (void)state;
    struct descriptors *descriptors;
    struct hand_segment segment;
    struct placed_block blocks[3] = {{{2, 5}, 0}, {{0, 6}, 0}, {{1, 7}, 0}};
    struct session session = {.id = 9};
    assert_int_equal(descriptors_new(&descriptors), 0);
    segments_make(&segment, 0, 77, 3, &segments_shape);
    assert_int_equal(descriptors_keep(descriptors, 0, 77, fcntl(segment.fd, F_DUPFD_CLOEXEC, 0)), 0);
    assert_int_equal(sessions_add_blocks(&session, blocks, 3), 0);
    assert_int_equal(sessions_first_unconfirmed(&session), 0);
    segments_write_block(&segment, blocks[0].handle, 9, 0, (struct block_handle){0, 0}, 0, 64);
    segments_write_block(&segment, blocks[1].handle, 9, 1, blocks[0].handle, 0, 10);
    segments_write_block(&segment, blocks[2].handle, 9, 2, blocks[1].handle, 0, 3);
    assert_int_equal(sessions_n_tokens(&session, descriptors), 0); /* not confirmed: not ours yet */
    for (int i = 0; i < 3; i++)
        session.blocks[i].confirmed = true;
    assert_int_equal(sessions_n_tokens(&session, descriptors), 74); /* the journal ends where a block is not full */
    segments_block(&segment, 0)->handle.generation++;
    assert_int_equal(sessions_n_tokens(&session, descriptors), 64); /* another life of that block */
    segments_block(&segment, 2)->session = 10;
    assert_int_equal(sessions_n_tokens(&session, descriptors), 0);
    sessions_cut_blocks(&session, 1);
    assert_int_equal(session.n_blocks, 1);
    assert_int_equal(sessions_stores(&session), 1);
    sessions_forget_store(&session, 0);
    assert_int_equal(session.blocks[0].handle.generation, 0);
    free(session.blocks);
    segments_drop(&segment);
    descriptors_free(descriptors);
}

static void complete_blocks_are_those_that_are_sealed(void **state)
{
    (void)state;
    struct descriptors *descriptors;
    struct hand_segment segment;
    struct placed_block blocks[4] = {{{0, 5}, 0}, {{1, 5}, 0}, {{2, 5}, 0}, {{3, 5}, 0}};
    struct session session = {.id = 9}, other = {.id = 10};
    assert_int_equal(descriptors_new(&descriptors), 0);
    segments_make(&segment, 0, 77, 4, &segments_shape);
    assert_int_equal(descriptors_keep(descriptors, 0, 77, fcntl(segment.fd, F_DUPFD_CLOEXEC, 0)), 0);
    assert_int_equal(sessions_add_blocks(&session, blocks, 3), 0);
    assert_int_equal(sessions_add_blocks(&other, blocks + 3, 1), 0);
    for (uint32_t i = 0; i < 4; i++)
        segments_write_block(&segment, blocks[i].handle, i < 3 ? 9 : 10, i % 3, (struct block_handle){0, 0}, 0, 64);
    for (int i = 0; i < 3; i++)
        session.blocks[i].confirmed = true;
    assert_int_equal(sessions_n_sealed(&session, descriptors), 0); /* 64 ids, and rows that are on their way */
    atomic_store(&segments_block(&segment, 0)->state, BLOCK_SEALED);
    atomic_store(&segments_block(&segment, 2)->state, BLOCK_SEALED);
    assert_int_equal(sessions_n_sealed(&session, descriptors), 1); /* up to the first that is not */
    atomic_store(&segments_block(&segment, 1)->state, BLOCK_SEALED);
    assert_int_equal(sessions_n_sealed(&session, descriptors), 3);
    assert_false(sessions_same_ids(&session, &other, descriptors, 1)); /* not confirmed */
    other.blocks[0].confirmed = true;
    assert_true(sessions_same_ids(&session, &other, descriptors, 1));
    assert_true(sessions_same_ids(&session, &other, descriptors, 0));
    assert_false(sessions_same_ids(&session, &other, descriptors, 2)); /* it has one block only */
    segments_block(&segment, 3)->ids[63] = 4711;
    assert_false(sessions_same_ids(&session, &other, descriptors, 1));
    segments_block(&segment, 1)->handle.generation++;
    assert_int_equal(sessions_n_sealed(&session, descriptors), 1);
    free(session.blocks);
    free(other.blocks);
    segments_drop(&segment);
    descriptors_free(descriptors);
}

static void sessions_of_a_worker_are_counted(void **state)
{
    (void)state;
    struct sessions *sessions;
    struct session *session;
    assert_int_equal(sessions_new(10, &sessions), 0);
    for (uint64_t i = 1; i <= 4; i++) {
        assert_int_equal(sessions_add(sessions, i, SESSION_OPENING, &session), 0);
        session->worker = i == 4 ? 8 : 7;
    }
    assert_int_equal(sessions_bound_to(sessions, 7), 3);
    assert_int_equal(sessions_bound_to(sessions, 8), 1);
    assert_int_equal(sessions_bound_to(sessions, 9), 0);
    assert_int_equal(sessions_move(sessions_find(sessions, 2), SESSION_CLOSING), 0);
    assert_int_equal(sessions_bound_to(sessions, 7), 2);
    sessions_free(sessions);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_move_is_in_the_table),
        cmocka_unit_test(the_table_is_bounded),
        cmocka_unit_test(idle_sessions_end),
        cmocka_unit_test(descriptors_are_checked),
        cmocka_unit_test(a_segment_is_handed_over_after_a_death_only),
        cmocka_unit_test(tokens_are_counted_in_the_journal),
        cmocka_unit_test(complete_blocks_are_those_that_are_sealed),
        cmocka_unit_test(sessions_of_a_worker_are_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
