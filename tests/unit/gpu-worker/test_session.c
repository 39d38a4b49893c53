/* test_session.c - exact set and key cache of one session. */
#include "tests/unit/gpu-worker/cmocka_all.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/policy/exact_set.h"
#include "gpu-worker/policy/policy.h"
#include "gpu-worker/session.h"

static const struct row_shape shape = {.n_layers = 2, .n_kv_heads = 3, .head_dim = 4, .codec = ROW_CODEC_F16};

struct fixture {
    const struct kernels *kernels;
    struct backend *backend;
    struct session *session;
};

static int set_up(void **state)
{
    struct fixture *fixture = calloc(1, sizeof(*fixture));
    char error[128];
    struct backend_options options = {.isa = KERNELS_ISA_PLAIN};
    struct policy policy;
    fixture->kernels = kernels_get(KERNELS_ISA_PLAIN);
    assert_int_equal(backend_reference.open(&options, &fixture->backend, error, sizeof(error)), 0);
    assert_int_equal(policy_find(NULL, "full", &policy, error, sizeof(error)), 0);
    assert_int_equal(session_new(9, &shape, &policy, 0, &backend_reference, fixture->backend, &fixture->session), 0);
    *state = fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    session_free(fixture->session);
    backend_reference.close(fixture->backend);
    free(fixture);
    return 0;
}

/* A value that names its place. */
static uint16_t mark(uint32_t layer, uint32_t head, uint32_t position, uint32_t element)
{
    return (uint16_t)(position * 64 + layer * 32 + head * 8 + element);
}

static void put(struct session *session, uint32_t position)
{
    uint16_t rows[3 * 8];
    for (uint32_t layer = 0; layer < shape.n_layers; layer++) {
        for (uint32_t head = 0; head < 3; head++)
            for (uint32_t i = 0; i < 8; i++)
                rows[head * 8 + i] = mark(layer, head, position, i);
        session_put_rows(session, layer, position, 1, rows, sizeof(rows), 8 * sizeof(*rows));
    }
}

/* Adds the tokens of the exact set of a query at `position` to `seen`; each must be there with its own row. */
static void see_exact(const struct session *session, uint32_t position, uint8_t *seen)
{
    struct backend_piece pieces[16];
    assert_in_range(session_max_pieces(session), 1, 16);
    uint32_t n = session_pieces(session, 1, 2, position, pieces);
    assert_in_range(n, 1, session_max_pieces(session));
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < 64; j++) {
            if ((pieces[i].mask >> j & 1) == 0)
                continue;
            const uint16_t *row = (const uint16_t *)pieces[i].rows + j * 8;
            uint32_t token = row[0] / 64; /* as mark() made it */
            assert_in_range(token, 0, position);
            assert_int_equal(row[3], mark(1, 2, token, 3));
            seen[token]++;
        }
}

/* Every token is either in a piece of the exact set, once, with its own row, or old: never both, never neither. */
static void check_partition(const struct session *session, uint32_t position)
{
    uint8_t seen[1024] = {0};
    see_exact(session, position, seen);
    uint32_t n_old = exact_set_n_old_blocks(position, session->exact_tokens), n_old_tokens = 0;
    for (uint32_t block = 0; block < n_old; block++)
        for (uint32_t j = 0; j < 64; j++)
            if ((exact_set_old_mask(block) >> j & 1) != 0) {
                seen[block * 64 + j]++;
                n_old_tokens++;
            }
    assert_int_equal(n_old_tokens, exact_set_n_old_tokens(position, session->exact_tokens));
    for (uint32_t token = 0; token <= position; token++)
        assert_int_equal(seen[token], 1);
}

static void exact_set_and_old_tokens_are_a_partition(void **state)
{
    struct fixture *fixture = *state;
    assert_int_equal(session_reserve(fixture->session, 2, 0), 0);
    for (uint32_t position = 0; position < 400; position++) {
        put(fixture->session, position);
        fixture->session->n_rows = position + 1;
        check_partition(fixture->session, position);
    }
}

/* Up to its exact tokens a session has everything; the window grows and shrinks without losing a row it still needs. */
static void a_session_with_exact_tokens_keeps_them_all(void **state)
{
    struct fixture *fixture = *state;
    struct session *session = fixture->session;
    session->exact_tokens = 330;
    for (uint32_t position = 0; position < 600; position++) {
        if (position == 0)
            assert_int_equal(session_reserve(session, exact_set_window_blocks(0, 100, 330), 0), 0);
        if (position == 100) /* the session goes on, longer than was thought */
            assert_int_equal(session_reserve(session, exact_set_window_blocks(100, 600, 330), 0), 0);
        if (position == 330)
            assert_int_equal(session_reserve(session, EXACT_SET_WINDOW_BLOCKS, 0), 0);
        put(session, position);
        session->n_rows = position + 1;
        check_partition(session, position);
        assert_int_equal(exact_set_n_old_blocks(position, 330), position < 330 ? 0 : position / 64 - 1);
    }
    assert_int_equal(session->n_window_blocks, 2);
    assert_int_equal(exact_set_window_blocks(330, 600, 330), 2);
    assert_int_equal(exact_set_window_blocks(0, 1000, 330), 6);
    assert_int_equal(exact_set_window_blocks(0, 30, 330), 2);
}

static void what_a_later_query_needs_is_kept(void **state)
{
    struct fixture *fixture = *state;
    assert_int_equal(session_reserve(fixture->session, 2, 0), 0);
    for (uint32_t last = 0; last < 300; last++)
        for (uint32_t position = 0; position <= last; position++) {
            bool old = position / 64 < exact_set_n_old_blocks(last, 0) && position >= LAYOUT_N_SINKS;
            assert_int_equal(session_keeps(fixture->session, position, last), !old);
        }
}

/* A run that was stopped goes on with what is there, unless a row that it needs has lost its place. */
static void a_run_goes_on_where_it_was(void **state)
{
    struct session *session = ((struct fixture *)*state)->session;
    assert_int_equal(session_reserve(session, EXACT_SET_WINDOW_BLOCKS, 0), 0);
    for (uint32_t end = 1; end < 400; end += 7)
        for (uint32_t touched = end; touched < end + 100; touched += 33) {
            session->n_rows = end;
            session->n_touched = touched;
            assert_false(session_goes_on(session, end + 1)); /* never computed */
            for (uint32_t position = end > 140 ? end - 140 : 0; position <= end; position += 3) {
                bool whole = true;
                /* what was put, in order: all that was computed, then what the stopped step put */
                for (uint32_t p = 0; p < touched; p++)
                    put(session, p);
                put(session, position); /* the run's next row */
                struct backend_piece pieces[16];
                uint32_t n = session_pieces(session, 1, 2, position, pieces), at = 0;
                uint32_t n_old = exact_set_n_old_blocks(position, 0);
                for (uint32_t i = 0; i < n; i++) {
                    uint32_t block = n_old > 0 && i == 0 ? 0 : n_old + at++;
                    for (uint32_t j = 0; j < 64; j++)
                        if (pieces[i].mask >> j & 1) {
                            const uint16_t *row = (const uint16_t *)pieces[i].rows + j * 8u;
                            whole = whole && row[0] == mark(1, 2, block * 64 + j, 0);
                        }
                }
                if (session_goes_on(session, position) && !whole)
                    fail_msg("%u rows, %u touched: does not go on at %u", end, touched, position);
                if (touched == end && position / 64 == (end - 1) / 64)
                    assert_true(session_goes_on(session, position)); /* as after every Stop between two steps */
            }
        }
    session_release(session);
    assert_false(session_goes_on(session, 1));
    assert_true(session_goes_on(session, 0));
}

static void counted_bytes_are_allocated_bytes(void **state)
{
    struct fixture *fixture = *state;
    struct session *session = fixture->session;
    struct policy policy;
    struct quantizers *quantizers;
    assert_int_equal(quantizers_new(&shape, (const uint8_t[16]){0}, NULL, &quantizers), 0);
    char sentence[128];
    assert_int_equal(policy_find(quantizers, "rot2,deviation=0.02", &policy, sentence, sizeof(sentence)), 0);
    assert_int_equal(session_reset(session, &policy), 0);
    size_t before = backend_reference.bytes(fixture->backend);
    assert_int_equal(session_bytes(session), 0);
    for (uint32_t n = 2; n < 40; n += 9) {
        assert_int_equal(session_reserve(session, n, n), 0);
        assert_int_equal(session_bytes(session), session_bytes_for(&shape, policy.quantizer, n, n));
        size_t measured = backend_reference.bytes(fixture->backend) - before;
        assert_in_range(session_bytes(session) * 100, measured * 95, measured * 105);
    }
    size_t has = session_bytes(session);
    assert_int_equal(session_reset(session, &policy), 0); /* the memory stays for the rebuild */
    assert_int_equal(session_bytes(session), has);
    assert_int_equal(key_cache_n_blocks(session->keys), 0);
    assert_int_equal(policy_find(NULL, "full", &policy, sentence, sizeof(sentence)), 0);
    assert_int_equal(session_reset(session, &policy), 0);
    assert_int_equal(session_bytes(session), session_exact_bytes(session));
    quantizers_free(quantizers); /* no session uses one of its quantizers any more */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(exact_set_and_old_tokens_are_a_partition, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_session_with_exact_tokens_keeps_them_all, set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_a_later_query_needs_is_kept, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_run_goes_on_where_it_was, set_up, tear_down),
        cmocka_unit_test_setup_teardown(counted_bytes_are_allocated_bytes, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
