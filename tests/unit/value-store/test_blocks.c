/* test_blocks.c - reservation, append, seal, release, session records: what is taken, what is refused, what is left. */
#include "tests/unit/value-store/fixture.h"

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define ALL UINT32_MAX

static const struct block_handle first_block = {.index = 0, .generation = 1};

static int set_up(void **state)
{
    struct fixture *fixture = malloc(sizeof(*fixture));
    assert_non_null(fixture);
    fixture_open(fixture, &fixture_shape, 6);
    fixture_session(fixture->blocks, FIXTURE_SESSION);
    fixture_reserve(fixture->blocks, FIXTURE_SESSION, 0, 1, 0);
    *state = fixture;
    return 0;
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

static const struct block_header *header_of(const struct fixture *fixture, struct block_handle handle)
{
    struct blocks_view view;
    assert_int_equal(blocks_find(fixture->blocks, FIXTURE_SESSION, handle, &view), 0);
    return view.header;
}

static void plan_fits_what_is_asked(void **state)
{
    (void)state;
    struct blocks_plan plan;
    struct row_shape bad = {.n_layers = 1, .n_kv_heads = 1, .head_dim = 7, .codec = ROW_CODEC_F16};
    assert_int_equal(blocks_plan(&bad, 1 << 30, &plan), -EINVAL);
    assert_int_equal(blocks_plan(&fixture_shape, 4096, &plan), -ENOSPC);
    for (uint64_t max_bytes = 1 << 20; max_bytes < 1 << 22; max_bytes += 12345) {
        assert_int_equal(blocks_plan(&fixture_shape, max_bytes, &plan), 0);
        assert_true(plan.n_bytes <= max_bytes && plan.n_bytes + plan.block_bytes > max_bytes);
        assert_int_equal(plan.n_bytes % LAYOUT_PAGE_BYTES, 0);
    }
    assert_int_equal(blocks_plan(&fixture_shape, plan.blocks_offset + plan.block_bytes - 1, &plan), -ENOSPC);
}

static void sums_are_sums(void **state)
{
    struct fixture *fixture = *state;
    assert_int_equal(fixture_append(fixture, fixture->blocks, FIXTURE_SESSION, first_block, 0, 0, 64, ALL), 0);
    const uint8_t *block = (const uint8_t *)header_of(fixture, first_block);
    const float *sums = (const float *)(const void *)(block + layout_head_sums_offset(&fixture_shape, 1, 1));
    for (uint32_t i = 0; i < fixture_shape.head_dim * 2; i++) {
        double sum = 0;
        for (uint32_t token = 0; token < 64; token++) {
            uint16_t row[16];
            float value;
            fixture_row(fixture, FIXTURE_SESSION, token, 1, 1, row);
            fixture->kernels->f16_decode(&row[i], 1, &value);
            sum += (double)value;
        }
        assert_true(fabs((double)sums[i] - sum) < 1e-4);
    }
}

/* Random cuts, with tokens sent twice, layers in any progress: always the same block. */
static void any_split_gives_the_same_block(void **state)
{
    struct fixture *fixture = *state;
    uint32_t checksum = 0;
    srand(1);
    for (uint32_t life = 1; life <= 40; life++) {
        struct block_handle handle = {.index = 1, .generation = life};
        fixture_reserve(fixture->blocks, FIXTURE_SESSION, 1, life, 1);
        uint32_t n_there[3] = {0};
        while (n_there[0] + n_there[1] + n_there[2] < 3 * 64) {
            uint32_t layer = (uint32_t)rand() % 3;
            uint32_t limit = layer == 0 ? 64 : n_there[0];
            if (n_there[layer] == limit)
                continue;
            assert_true(atomic_load(&header_of(fixture, handle)->state) == BLOCK_OPEN);
            uint32_t first = (uint32_t)rand() % (n_there[layer] + 1);
            uint32_t end = n_there[layer] + 1 + (uint32_t)rand() % (limit - n_there[layer]);
            assert_int_equal(
                fixture_append(fixture, fixture->blocks, FIXTURE_SESSION, handle, 1, first, end - first, layer), 0);
            n_there[layer] = end;
            assert_int_equal(atomic_load(&header_of(fixture, handle)->n_rows[layer]), end);
            assert_true(fixture_block_is_right(fixture, fixture->blocks, FIXTURE_SESSION, handle));
        }
        const struct block_header *header = header_of(fixture, handle);
        assert_int_equal(atomic_load(&header->state), BLOCK_SEALED);
        if (life == 1)
            checksum = header->checksum;
        assert_int_equal(header->checksum, checksum);
        assert_int_equal(blocks_release(fixture->blocks, FIXTURE_SESSION, 1, 0), 1);
    }
}

static void sealed_block_is_checksummed(void **state)
{
    struct fixture *fixture = *state;
    assert_int_equal(blocks_verify(fixture->blocks, 0), -EINVAL);
    assert_int_equal(fixture_append(fixture, fixture->blocks, FIXTURE_SESSION, first_block, 0, 0, 64, ALL), 0);
    assert_int_equal(blocks_verify(fixture->blocks, 0), 0);
    uint8_t *block = fixture->segment + fixture->plan.blocks_offset;
    const size_t places[] = {offsetof(struct block_header, ids) + 255, layout_sums_offset(),
                             layout_head_rows_offset(&fixture_shape, 0, 0), fixture->plan.block_bytes - 1};
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        block[places[i]] ^= 1;
        assert_int_equal(blocks_verify(fixture->blocks, 0), -EBADMSG);
        block[places[i]] ^= 1;
    }
    assert_int_equal(blocks_verify(fixture->blocks, 0), 0);
    struct blocks_counts counts = blocks_count(fixture->blocks);
    assert_true(counts.n_sealed == 1 && counts.n_open == 0 && counts.n_free == 5 && counts.n_sessions == 1);
}

static void what_is_there_is_skipped(void **state)
{
    struct fixture *fixture = *state;
    assert_int_equal(fixture_append(fixture, fixture->blocks, FIXTURE_SESSION, first_block, 0, 0, 10, ALL), 0);
    /* Other rows for tokens that are there: the first ones stay. */
    void *other = fixture_rows(fixture, FIXTURE_OTHER, 0, 10, 2);
    struct blocks_append append = {
        .session = FIXTURE_SESSION, .handle = first_block, .layer = 2, .first_token = 0, .n_tokens = 10, .rows = other};
    assert_int_equal(blocks_append(fixture->blocks, &append), 0);
    free(other);
    assert_true(fixture_block_is_right(fixture, fixture->blocks, FIXTURE_SESSION, first_block));
    assert_int_equal(fixture_append(fixture, fixture->blocks, FIXTURE_SESSION, first_block, 0, 4, 60, ALL), 0);
    assert_true(fixture_block_is_right(fixture, fixture->blocks, FIXTURE_SESSION, first_block));
    /* And the whole again, sealed. */
    assert_int_equal(fixture_append(fixture, fixture->blocks, FIXTURE_SESSION, first_block, 0, 0, 64, ALL), 0);
    assert_int_equal(blocks_verify(fixture->blocks, 0), 0);
}

/* Which tokens are decode steps': as they came first, in one append or many, to the last bit of the block. */
static void decode_steps_are_noted(void **state)
{
    struct fixture *fixture = *state;
    uint32_t ids[64] = {0};
    static const struct {
        uint32_t first, end;
        bool decoded;
        uint64_t noted;
    } steps[] = {{0, 3, false, 0},
                 {2, 4, true, 0x8}, /* what was there is not changed */
                 {4, 5, true, 0x18},
                 {0, 8, false, 0x18},
                 {8, 64, true, 0xffffffffffffff18}};
    for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
        struct blocks_append append = {.session = FIXTURE_SESSION,
                                       .handle = first_block,
                                       .first_token = steps[i].first,
                                       .n_tokens = steps[i].end - steps[i].first,
                                       .ids = ids,
                                       .decoded = steps[i].decoded};
        assert_int_equal(blocks_append(fixture->blocks, &append), 0);
        assert_true(atomic_load(&header_of(fixture, first_block)->decoded) == steps[i].noted);
    }
}

static void another_id_is_refused_and_nothing_written(void **state)
{
    struct fixture *fixture = *state;
    assert_int_equal(fixture_append(fixture, fixture->blocks, FIXTURE_SESSION, first_block, 0, 0, 10, ALL), 0);
    uint8_t *before = malloc(fixture->plan.n_bytes);
    assert_non_null(before);
    memcpy(before, fixture->segment, fixture->plan.n_bytes);
    uint32_t ids[20];
    for (uint32_t i = 0; i < 20; i++)
        ids[i] = fixture_id(FIXTURE_SESSION, i);
    ids[9]++;
    void *rows = fixture_rows(fixture, FIXTURE_SESSION, 0, 20, 0);
    struct blocks_append append = {
        .session = FIXTURE_SESSION, .handle = first_block, .n_tokens = 20, .ids = ids, .rows = rows};
    assert_int_equal(blocks_append(fixture->blocks, &append), -EEXIST);
    assert_memory_equal(before, fixture->segment, fixture->plan.n_bytes);
    free(rows);
    free(before);
}

static void gaps_are_refused(void **state)
{
    struct fixture *fixture = *state;
    uint32_t ids[64] = {0};
    void *rows = fixture_rows(fixture, FIXTURE_SESSION, 0, 64, 1);
    struct blocks_append append = {.session = FIXTURE_SESSION, .handle = first_block, .n_tokens = 2};
    assert_int_equal(fixture_append(fixture, fixture->blocks, FIXTURE_SESSION, first_block, 0, 0, 10, 0), 0);

    append.first_token = 11; /* ids 0 .. 9 are there */
    append.ids = ids;
    assert_int_equal(blocks_append(fixture->blocks, &append), -ENODATA);
    append.ids = NULL; /* layer 1 has none */
    append.layer = 1;
    append.rows = rows;
    append.first_token = 1;
    assert_int_equal(blocks_append(fixture->blocks, &append), -ENODATA);
    append.first_token = 0; /* rows of tokens without ids */
    append.n_tokens = 11;
    assert_int_equal(blocks_append(fixture->blocks, &append), -ENODATA);
    append.n_tokens = 10;
    assert_int_equal(blocks_append(fixture->blocks, &append), 0);
    /* An id alone: the last token of a generation. */
    append = (struct blocks_append){
        .session = FIXTURE_SESSION, .handle = first_block, .layer = 999, .first_token = 10, .n_tokens = 1, .ids = ids};
    assert_int_equal(blocks_append(fixture->blocks, &append), 0);
    assert_int_equal(atomic_load(&header_of(fixture, first_block)->n_ids), 11);
    assert_int_equal(atomic_load(&header_of(fixture, first_block)->n_rows[0]), 10);
    free(rows);
}

static void malformed_appends_are_refused(void **state)
{
    struct fixture *fixture = *state;
    uint32_t ids[64] = {0};
    uint16_t rows[2 * 2 * 8] = {0};
    const struct blocks_append good = {
        .session = FIXTURE_SESSION, .handle = first_block, .n_tokens = 1, .ids = ids, .rows = rows};
    struct blocks_append bad = good;
    bad.ids = NULL, bad.rows = NULL;
    assert_int_equal(blocks_append(fixture->blocks, &bad), -EINVAL);
    bad = good, bad.n_tokens = 0;
    assert_int_equal(blocks_append(fixture->blocks, &bad), -EINVAL);
    bad = good, bad.n_tokens = 65;
    assert_int_equal(blocks_append(fixture->blocks, &bad), -EINVAL);
    bad = good, bad.first_token = 64;
    assert_int_equal(blocks_append(fixture->blocks, &bad), -EINVAL);
    bad = good, bad.first_token = UINT32_MAX;
    assert_int_equal(blocks_append(fixture->blocks, &bad), -EINVAL);
    bad = good, bad.n_tokens = UINT32_MAX;
    assert_int_equal(blocks_append(fixture->blocks, &bad), -EINVAL);
    bad = good, bad.layer = fixture_shape.n_layers;
    assert_int_equal(blocks_append(fixture->blocks, &bad), -EINVAL);
    assert_int_equal(blocks_append(fixture->blocks, &good), 0);
}

static void stale_handles_are_refused(void **state)
{
    struct fixture *fixture = *state;
    struct blocks *blocks = fixture->blocks;
    struct blocks_view view;
    assert_int_equal(fixture_append(fixture, blocks, FIXTURE_SESSION, first_block, 0, 0, 20, ALL), 0);
    assert_int_equal(blocks_find(blocks, FIXTURE_OTHER, first_block, &view), -ESTALE);
    assert_int_equal(blocks_find(blocks, 0, first_block, &view), -ESTALE);
    const struct block_handle stale[] = {{0, 0}, {0, 2}, {1, 1}, {6, 1}, {UINT32_MAX, 1}};
    for (size_t i = 0; i < sizeof(stale) / sizeof(stale[0]); i++) {
        assert_int_equal(blocks_find(blocks, FIXTURE_SESSION, stale[i], &view), -ESTALE);
        assert_int_equal(blocks_find(blocks, 0, stale[i], &view), -ESTALE);
        assert_int_equal(fixture_append(fixture, blocks, FIXTURE_SESSION, stale[i], 0, 0, 1, ALL), -ESTALE);
    }
    assert_int_equal(blocks_release(blocks, FIXTURE_SESSION, 0, 0), 1);
    assert_int_equal(blocks_find(blocks, FIXTURE_SESSION, first_block, &view), -ESTALE);

    /* The next life: nothing of the old one is left that counts, and its handle stays refused. */
    fixture_session(blocks, FIXTURE_OTHER);
    fixture_reserve(blocks, FIXTURE_OTHER, 0, 2, 0);
    struct block_handle next = {.index = 0, .generation = 2};
    assert_int_equal(blocks_find(blocks, FIXTURE_SESSION, next, &view), -ESTALE);
    assert_int_equal(blocks_find(blocks, FIXTURE_OTHER, first_block, &view), -ESTALE);
    assert_int_equal(blocks_find(blocks, FIXTURE_OTHER, next, &view), 0);
    assert_int_equal(atomic_load(&view.header->n_ids), 0);
    for (uint32_t i = 0; i < 64; i++)
        assert_int_equal(view.header->ids[i], 0);
    for (uint32_t layer = 0; layer < fixture_shape.n_layers; layer++)
        assert_int_equal(blocks_n_rows(&view, layer), 0);
}

static void reservation_is_all_or_nothing(void **state)
{
    struct fixture *fixture = *state;
    struct blocks *blocks = fixture->blocks;
    fixture_reserve(blocks, FIXTURE_SESSION, 5, 4, 1);
    assert_int_equal(blocks_release(blocks, FIXTURE_SESSION, 1, 0), 1);
    const struct {
        struct blocks_reservation bad;
        int result;
    } cases[] = {
        {fixture_reservation(6, 1, 7), -EINVAL},          /* no such block */
        {fixture_reservation(2, 1, 7), -EINVAL},          /* twice */
        {fixture_reservation(4, 0, 7), -EINVAL},          /* generation 0 */
        {fixture_reservation(0, 2, 7), -EBUSY},           /* open */
        {fixture_reservation(0, 1, 7), -EBUSY},           /* open, the same life, another number */
        {fixture_reservation(5, 4, 7), -ESTALE},          /* that life is over */
        {fixture_reservation(5, 3, 7), -ESTALE},          /* so is an earlier one */
        {{.handle = {4, 1}, .number = 7}, -EINVAL},       /* number 7 and no previous */
        {{.handle = {4, 1}, .previous = {0, 1}}, -EINVAL} /* number 0 and a previous */
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct blocks_reservation order[4] = {fixture_reservation(1, 1, 1), fixture_reservation(2, 1, 2), cases[i].bad,
                                              fixture_reservation(3, 1, 3)};
        uint32_t failed = 99;
        assert_int_equal(blocks_reserve(blocks, FIXTURE_SESSION, order, 4, &failed), cases[i].result);
        assert_int_equal(failed, 2);
        assert_int_equal(blocks_count(blocks).n_open, 1);
    }
    struct blocks_reservation order[2] = {fixture_reservation(1, 1, 1), fixture_reservation(5, 5, 2)};
    uint32_t failed = 99;
    assert_int_equal(blocks_reserve(blocks, FIXTURE_OTHER, order, 2, &failed), -ENOENT);
    assert_int_equal(blocks_reserve(blocks, FIXTURE_SESSION, order, 2, &failed), 0);
    assert_int_equal(blocks_count(blocks).n_open, 3);
    /* The same order again, after rows have come: nothing changes. */
    struct block_handle handle = {.index = 1, .generation = 1};
    assert_int_equal(fixture_append(fixture, blocks, FIXTURE_SESSION, handle, 1, 0, 9, ALL), 0);
    assert_int_equal(blocks_reserve(blocks, FIXTURE_SESSION, order, 2, &failed), 0);
    assert_int_equal(atomic_load(&header_of(fixture, handle)->n_ids), 9);
    assert_int_equal(blocks_count(blocks).n_open, 3);
}

static void release_begins_at_a_number(void **state)
{
    struct fixture *fixture = *state;
    struct blocks *blocks = fixture->blocks;
    fixture_session(blocks, FIXTURE_OTHER);
    for (uint32_t i = 1; i < 5; i++)
        fixture_reserve(blocks, FIXTURE_SESSION, i, 1, i);
    fixture_reserve(blocks, FIXTURE_OTHER, 5, 1, 3);
    assert_int_equal(blocks_release(blocks, FIXTURE_SESSION, 3, 0), 2);
    assert_int_equal(blocks_release(blocks, FIXTURE_SESSION, 3, 0), 0);
    assert_int_equal(blocks_count(blocks).n_open, 4);
    assert_non_null(blocks_session_find(blocks, FIXTURE_SESSION));
    assert_int_equal(blocks_release(blocks, FIXTURE_SESSION, 0, 0), 3);
    assert_null(blocks_session_find(blocks, FIXTURE_SESSION));
    assert_non_null(blocks_session_find(blocks, FIXTURE_OTHER));
    assert_int_equal(blocks_release(blocks, FIXTURE_SESSION, 0, 0), 0);
    assert_int_equal(blocks_release(blocks, 0, 0, 0), 0);
    assert_int_equal(blocks_count(blocks).n_open, 1);
}

static void release_may_be_of_lanes(void **state)
{
    struct fixture *fixture = *state;
    struct blocks *blocks = fixture->blocks;
    const uint32_t numbers[4] = {1, 12, 13, 14};
    for (uint32_t i = 0; i < 4; i++)
        fixture_reserve(blocks, FIXTURE_SESSION, 1 + i, 1, numbers[i]);
    assert_int_equal(blocks_release(blocks, FIXTURE_SESSION, 0, 1u << 2 | 1u << 3), 1); /* 14 */
    assert_int_equal(blocks_release(blocks, FIXTURE_SESSION, 2, 1u << 1), 1);           /* 13 */
    assert_int_equal(blocks_release(blocks, FIXTURE_SESSION, 0, 1u << 1), 1);           /* 1 */
    struct blocks_view view;
    assert_int_equal(blocks_find(blocks, FIXTURE_SESSION, (struct block_handle){2, 1}, &view), 0);
    assert_int_equal(blocks_release(blocks, FIXTURE_SESSION, 0, 0xfff), 2); /* 0 and 12 */
    assert_non_null(blocks_session_find(blocks, FIXTURE_SESSION));          /* lanes never forget the session */
    assert_int_equal(blocks_release(blocks, FIXTURE_SESSION, 0, 0), 0);
    assert_null(blocks_session_find(blocks, FIXTURE_SESSION));
}

/* A record with these moves, and lanes that all are in `store`. */
static struct session_record moved(uint64_t session, uint32_t moves, uint8_t store)
{
    struct session_record record = {.session = session, .model = {7, 8}, .policy = "full", .moves = moves};
    memset(record.lane_store[moves % 2], store, LAYOUT_N_LANES);
    return record;
}

static int open_moved(struct fixture *fixture, uint32_t moves, uint8_t store)
{
    struct session_record record = moved(77, moves, store);
    return blocks_session_open(fixture->blocks, &record);
}

static void expect_lanes(const struct fixture *fixture, uint32_t moves, uint8_t store)
{
    const struct session_record *record = blocks_session_find(fixture->blocks, 77);
    uint8_t lanes[LAYOUT_N_LANES];
    memset(lanes, store, sizeof(lanes));
    assert_int_equal(atomic_load(&record->moves), moves);
    assert_memory_equal(record->lane_store[moves % 2], lanes, sizeof(lanes));
}

static void sessions_move(void **state)
{
    struct fixture *fixture = *state;
    /* A store that joined late hears of a session that has moved before. */
    assert_int_equal(open_moved(fixture, 5, 1), 0);
    expect_lanes(fixture, 5, 1);
    assert_int_equal(open_moved(fixture, 5, 1), 0);
    assert_int_equal(open_moved(fixture, 5, 2), -EEXIST);
    assert_int_equal(open_moved(fixture, 4, 1), -ESTALE);
    assert_int_equal(open_moved(fixture, 0, 1), -ESTALE);
    assert_int_equal(open_moved(fixture, 7, 2), -EINVAL); /* would be written over what holds now */
    expect_lanes(fixture, 5, 1);
    assert_int_equal(open_moved(fixture, 6, 2), 0);
    expect_lanes(fixture, 6, 2);
    const struct session_record *record = blocks_session_find(fixture->blocks, 77);
    assert_int_equal(record->lane_store[1][0], 1); /* the answer of before is whole, too */
    assert_int_equal(open_moved(fixture, 6, 2), 0);
    assert_int_equal(open_moved(fixture, 5, 1), -ESTALE);
    assert_int_equal(open_moved(fixture, 9, 3), 0); /* the other slot, three moves later */
    expect_lanes(fixture, 9, 3);
    /* Only lanes move. */
    struct session_record other = moved(77, 10, 4);
    other.exact_tokens = 1;
    assert_int_equal(blocks_session_open(fixture->blocks, &other), -EEXIST);
    other = moved(77, 10, 4);
    strcpy(other.policy, "default");
    assert_int_equal(blocks_session_open(fixture->blocks, &other), -EEXIST);
    expect_lanes(fixture, 9, 3);
    assert_int_equal(blocks_count(fixture->blocks).n_sessions, 2);
}

/* Killed between the lanes and the count: the answer of before holds, and the repeated order ends the move. */
static void half_a_move_is_none(void **state)
{
    struct fixture *fixture = *state;
    struct blocks_adoption adoption, none = {0};
    struct blocks_owner owner = fixture_owner(fixture, 2);
    assert_int_equal(open_moved(fixture, 1, 1), 0);
    struct session_record *record = (struct session_record *)(uintptr_t)blocks_session_find(fixture->blocks, 77);
    memset(record->lane_store[0], 2, 7); /* not even all of them */
    fixture->blocks = blocks_free(fixture->blocks);
    assert_int_equal(blocks_adopt(fixture->segment, fixture->plan.n_bytes, &owner, &adoption, &fixture->blocks), 0);
    assert_memory_equal(&adoption, &none, sizeof(none));
    expect_lanes(fixture, 1, 1);
    assert_int_equal(open_moved(fixture, 1, 1), 0);
    assert_int_equal(open_moved(fixture, 2, 2), 0);
    expect_lanes(fixture, 2, 2);
}

static void sessions_are_bounded(void **state)
{
    struct fixture *fixture = *state;
    struct session_record record = {.session = FIXTURE_SESSION, .model = {7, 8}, .policy = "full"};
    assert_int_equal(blocks_session_open(fixture->blocks, &record), 0); /* again, the same */
    record.exact_tokens = 5;
    assert_int_equal(blocks_session_open(fixture->blocks, &record), -EEXIST);
    record.session = 0;
    assert_int_equal(blocks_session_open(fixture->blocks, &record), -EINVAL);
    record.session = 1;
    memset(record.policy, 'x', sizeof(record.policy));
    assert_int_equal(blocks_session_open(fixture->blocks, &record), -EINVAL);
    record.policy[3] = 0;
    for (uint32_t i = 1; i < BLOCKS_SESSION_CAPACITY; i++) {
        record.session = i;
        assert_int_equal(blocks_session_open(fixture->blocks, &record), 0);
    }
    record.session = BLOCKS_SESSION_CAPACITY;
    assert_int_equal(blocks_session_open(fixture->blocks, &record), -ENOSPC);
    blocks_release(fixture->blocks, 77, 0, 0);
    assert_int_equal(blocks_session_open(fixture->blocks, &record), 0);
    assert_int_equal(blocks_session_find(fixture->blocks, record.session)->exact_tokens, 5);
    assert_int_equal(blocks_count(fixture->blocks).n_sessions, BLOCKS_SESSION_CAPACITY);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(plan_fits_what_is_asked),
        TEST(sums_are_sums),
        TEST(any_split_gives_the_same_block),
        TEST(sealed_block_is_checksummed),
        TEST(what_is_there_is_skipped),
        TEST(decode_steps_are_noted),
        TEST(another_id_is_refused_and_nothing_written),
        TEST(gaps_are_refused),
        TEST(malformed_appends_are_refused),
        TEST(stale_handles_are_refused),
        TEST(reservation_is_all_or_nothing),
        TEST(release_begins_at_a_number),
        TEST(release_may_be_of_lanes),
        TEST(sessions_move),
        TEST(half_a_move_is_none),
        TEST(sessions_are_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
