/* test_adopt.c - a segment after its store died: work that was not finished, headers that were damaged. */
#include "tests/unit/value-store/fixture.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define ALL      UINT32_MAX
#define N_BLOCKS 4u

static int set_up(void **state)
{
    struct fixture *fixture = malloc(sizeof(*fixture));
    assert_non_null(fixture);
    fixture_open(fixture, &fixture_shape, N_BLOCKS);
    fixture_session(fixture->blocks, FIXTURE_SESSION);
    fixture_session(fixture->blocks, FIXTURE_OTHER);
    for (uint32_t i = 0; i < 3; i++) {
        fixture_reserve(fixture->blocks, FIXTURE_SESSION, i, 5 + i, i);
        struct block_handle handle = {i, 5 + i};
        assert_int_equal(fixture_append(fixture, fixture->blocks, FIXTURE_SESSION, handle, i, 0, i == 2 ? 20 : 64, ALL),
                         0);
    }
    *state = fixture;
    return 0;
}

static int tear_down(void **state)
{
    fixture_close(*state);
    free(*state);
    return 0;
}

static struct block_header *block(const struct fixture *fixture, uint32_t index)
{
    /* Not by the header: it may be what is damaged. */
    return (struct block_header *)(void *)(fixture->segment + fixture->plan.blocks_offset +
                                           index * fixture->plan.block_bytes);
}

static struct session_record *record(const struct fixture *fixture, uint32_t index)
{
    return (struct session_record *)(void *)(fixture->segment + fixture->plan.sessions_offset) + index;
}

/* Adopts in place. The result's adoption; blocks replaced. */
static struct blocks_adoption adopt(struct fixture *fixture)
{
    struct blocks_adoption adoption;
    char text[BLOCKS_CHECK_TEXT] = "";
    struct blocks_owner owner = fixture_owner(fixture, 2);
    fixture->blocks = blocks_free(fixture->blocks);
    assert_int_equal(blocks_adopt(fixture->segment, fixture->plan.n_bytes, &owner, &adoption, &fixture->blocks), 0);
    if (blocks_check(fixture->blocks, text) != 0)
        fail_msg("%s", text);
    return adoption;
}

static void expect_others_kept(const struct fixture *fixture, uint32_t lost)
{
    for (uint32_t i = 0; i < 3; i++) {
        bool is_there = fixture_block_is_right(fixture, fixture->blocks, FIXTURE_SESSION,
                                               (struct block_handle){.index = i, .generation = 5 + i});
        assert_int_equal(is_there, i != lost);
    }
}

static void sound_segment_is_kept(void **state)
{
    struct fixture *fixture = *state;
    struct blocks_adoption adoption = adopt(fixture), none = {0};
    assert_memory_equal(&adoption, &none, sizeof(none));
    expect_others_kept(fixture, ALL);
    struct blocks_counts counts = blocks_count(fixture->blocks);
    assert_true(counts.n_sealed == 2 && counts.n_open == 1 && counts.n_free == 1 && counts.n_sessions == 2);
    const struct segment_header *header = (const struct segment_header *)(const void *)fixture->segment;
    assert_int_equal(header->incarnation, 2);
    assert_int_equal(block(fixture, 2)->writer, 1); /* until it is written to */
    assert_int_equal(
        fixture_append(fixture, fixture->blocks, FIXTURE_SESSION, (struct block_handle){2, 7}, 2, 20, 1, ALL), 0);
    assert_int_equal(block(fixture, 2)->writer, 2);
}

static void unfinished_work_is_finished(void **state)
{
    struct fixture *fixture = *state;
    /* Block 0: complete, not sealed. Block 1: a layer's sums are not there, another layer's count is not. */
    atomic_store(&block(fixture, 0)->state, BLOCK_OPEN);
    block(fixture, 0)->checksum = 0;
    memset((uint8_t *)block(fixture, 0) + layout_sums_offset(), 0xff, layout_sums_bytes(&fixture_shape));
    atomic_store(&block(fixture, 1)->state, BLOCK_OPEN);
    atomic_store(&block(fixture, 1)->n_rows[2], 63);
    memset((uint8_t *)block(fixture, 1) + layout_sums_offset(), 0xff, layout_sums_bytes(&fixture_shape));
    struct blocks_adoption adoption = adopt(fixture);
    assert_true(adoption.n_sealed == 1 && adoption.n_layers_summed == 3 + 2 && adoption.n_quarantined == 0);
    expect_others_kept(fixture, ALL);
    assert_int_equal(atomic_load(&block(fixture, 0)->state), BLOCK_SEALED);
    assert_int_equal(blocks_verify(fixture->blocks, 0), 0);
    assert_int_equal(
        fixture_append(fixture, fixture->blocks, FIXTURE_SESSION, (struct block_handle){1, 6}, 1, 0, 64, ALL), 0);
    assert_int_equal(blocks_verify(fixture->blocks, 1), 0);
    expect_others_kept(fixture, ALL);
}

#define DAMAGES                                                                                                        \
    X(magic = 0)                                                                                                       \
    X(layout = LAYOUT_VERSION + 1)                                                                                     \
    X(handle.index = 2)                                                                                                \
    X(handle.generation = 0)                                                                                           \
    X(previous.generation = 0)                                                                                         \
    X(number = 0)                                                                                                      \
    X(session = 0)                                                                                                     \
    X(state = 3)                                                                                                       \
    X(state = UINT32_MAX)                                                                                              \
    X(n_ids = 65)                                                                                                      \
    X(n_ids = 63)                                                                                                      \
    X(n_ids = UINT32_MAX)                                                                                              \
    X(n_rows[0] = 65)                                                                                                  \
    X(n_rows[1] = 255)                                                                                                 \
    X(n_rows[2] = 63)

static void damaged_block_is_quarantined(void **state)
{
    struct fixture *fixture = *state;
    uint8_t *sound = malloc(fixture->plan.n_bytes);
    assert_non_null(sound);
    memcpy(sound, fixture->segment, fixture->plan.n_bytes);
#define X(damage)                                                                                                      \
    memcpy(fixture->segment, sound, fixture->plan.n_bytes);                                                            \
    block(fixture, 1)->damage;                                                                                         \
    if (adopt(fixture).n_quarantined != 1)                                                                             \
        fail_msg("not found: %s", #damage);                                                                            \
    expect_others_kept(fixture, 1);                                                                                    \
    assert_int_equal(blocks_count(fixture->blocks).n_free, 2);                                                         \
    assert_true(block(fixture, 1)->handle.generation > 7); /* above all that could be believed */
    DAMAGES
#undef X
    free(sound);
    /* The block can be used again. */
    fixture_reserve(fixture->blocks, FIXTURE_OTHER, 1, block(fixture, 1)->handle.generation + 1, 0);
}

static void damaged_records_are_dropped(void **state)
{
    struct fixture *fixture = *state;
    memset(record(fixture, 1)->policy, 'x', LAYOUT_POLICY_BYTES);
    *record(fixture, 7) = *record(fixture, 0); /* the same session again */
    atomic_store(&record(fixture, 9)->state, 77);
    struct blocks_adoption adoption = adopt(fixture);
    assert_int_equal(adoption.n_records_dropped, 3);
    assert_int_equal(blocks_count(fixture->blocks).n_sessions, 1);
    expect_others_kept(fixture, ALL);
    /* Without its record a session's blocks belong to nobody. */
    atomic_store(&record(fixture, 0)->state, SESSION_RECORD_FREE);
    adoption = adopt(fixture);
    assert_int_equal(adoption.n_orphans, 3);
    assert_int_equal(blocks_count(fixture->blocks).n_free, N_BLOCKS);
}

static void what_is_no_segment_is_refused(void **state)
{
    struct fixture *fixture = *state;
    struct segment_header *header = (struct segment_header *)(void *)fixture->segment;
    struct blocks_owner owner = fixture_owner(fixture, 2);
    struct blocks_adoption adoption;
    struct blocks *blocks;
    uint64_t n_bytes = fixture->plan.n_bytes;
    assert_int_equal(blocks_adopt(fixture->segment, n_bytes - 4096, &owner, &adoption, &blocks), -EPROTO);
    atomic_store(&header->ready, 0);
    assert_int_equal(blocks_adopt(fixture->segment, n_bytes, &owner, &adoption, &blocks), -EAGAIN);
    atomic_store(&header->ready, 1);
    owner.store++;
    assert_int_equal(blocks_adopt(fixture->segment, n_bytes, &owner, &adoption, &blocks), -EXDEV);
    owner.store--;
    header->block_bytes += 4096;
    assert_int_equal(blocks_adopt(fixture->segment, n_bytes, &owner, &adoption, &blocks), -EPROTO);
    assert_int_equal(header->incarnation, 1);
}

/* Random damage to all headers: a typed error, or a segment that is sound. */
static void random_damage_is_survived(void **state)
{
    struct fixture *fixture = *state;
    uint8_t *sound = malloc(fixture->plan.n_bytes);
    uint32_t n_adopted = 0;
    assert_non_null(sound);
    memcpy(sound, fixture->segment, fixture->plan.n_bytes);
    fixture->blocks = blocks_free(fixture->blocks);
    for (uint32_t round = 0; round < 1500; round++) {
        struct blocks_owner owner = fixture_owner(fixture, 2);
        struct blocks_adoption adoption;
        struct blocks *blocks;
        char text[BLOCKS_CHECK_TEXT] = "";
        memcpy(fixture->segment, sound, fixture->plan.n_bytes);
        srand(round);
        for (int change = rand() % 6; change >= 0; change--) {
            uint8_t *where = rand() % 8 == 0   ? fixture->segment
                             : rand() % 4 == 0 ? (uint8_t *)record(fixture, (uint32_t)rand() % 3)
                                               : (uint8_t *)block(fixture, (uint32_t)rand() % N_BLOCKS);
            where[rand() % (rand() % 2 ? 128 : 400)] = (uint8_t)rand();
        }
        int result = blocks_adopt(fixture->segment, fixture->plan.n_bytes, &owner, &adoption, &blocks);
        if (result == 0) {
            if (blocks_check(blocks, text) != 0)
                fail_msg("round %u: %s", round, text);
            blocks_free(blocks);
            n_adopted++;
        }
        assert_true(result == 0 || result == -EPROTO || result == -EAGAIN || result == -EXDEV);
    }
    assert_true(n_adopted > 300 && n_adopted < 1500);
    free(sound);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(sound_segment_is_kept, set_up, tear_down),
        cmocka_unit_test_setup_teardown(unfinished_work_is_finished, set_up, tear_down),
        cmocka_unit_test_setup_teardown(damaged_block_is_quarantined, set_up, tear_down),
        cmocka_unit_test_setup_teardown(damaged_records_are_dropped, set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_is_no_segment_is_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(random_damage_is_survived, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
