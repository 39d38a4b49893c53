/*
 * test_import.c - blocks of another store's segment become ours: sealed and open ones, again after more rows came, and out of
 * segments that lie.
 */
#include "tests/unit/value-store/fixture.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define ALL    UINT32_MAX
#define OTHER  5u /* number of the other store */
#define N_ROWS 37u

/* Numbers 0 .. 2 of the session lie in the other store's blocks 0 .. 2, the last one open; reserved here in 3 .. 5. */
static const struct block_handle theirs[3] = {{0, 7}, {1, 8}, {2, 9}}, ours[3] = {{3, 4}, {4, 5}, {5, 6}};

struct stores {
    struct fixture from, to;
    struct blocks_source source;
};

static int set_up(void **state, enum row_codec codec)
{
    struct stores *stores = malloc(sizeof(*stores));
    const struct row_shape shape = {.n_layers = 3, .n_kv_heads = 2, .head_dim = 40, .codec = codec};
    assert_non_null(stores);
    fixture_open(&stores->from, &shape, 3);
    fixture_open(&stores->to, &shape, 7);
    ((struct segment_header *)(void *)stores->from.segment)->store = OTHER;
    fixture_session(stores->from.blocks, FIXTURE_SESSION);
    fixture_session(stores->to.blocks, FIXTURE_SESSION);
    fixture_session(stores->to.blocks, FIXTURE_OTHER);
    for (uint32_t i = 0; i < 3; i++) {
        fixture_reserve(stores->from.blocks, FIXTURE_SESSION, theirs[i].index, theirs[i].generation, i);
        fixture_reserve(stores->to.blocks, FIXTURE_SESSION, ours[i].index, ours[i].generation, i);
        assert_int_equal(fixture_append(&stores->from, stores->from.blocks, FIXTURE_SESSION, theirs[i], i, 0,
                                        i == 2 ? N_ROWS : 64, ALL),
                         0);
    }
    assert_int_equal(
        blocks_import_open(stores->to.blocks, stores->from.segment, stores->from.plan.n_bytes, OTHER, &stores->source),
        0);
    *state = stores;
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
    struct stores *stores = *state;
    char text[BLOCKS_CHECK_TEXT] = "";
    int result = blocks_check(stores->to.blocks, text);
    if (result < 0)
        print_error("blocks_check: %s\n", text);
    fixture_close(&stores->from);
    fixture_close(&stores->to);
    free(stores);
    return result;
}

static int import_as(struct stores *stores, uint64_t session, struct block_handle from, struct block_handle to)
{
    const struct blocks_copy order = {.from = from, .to = to};
    uint64_t n_bytes = 0;
    int checked = blocks_import_check(stores->to.blocks, &stores->source, session, &order);
    int result = blocks_import(stores->to.blocks, &stores->source, session, &order, &n_bytes);
    assert_int_equal(checked, result);
    return result;
}

/* Number i, from where it is to where it belongs. The bytes of rows that were copied, or an error. */
static int64_t import_number(struct stores *stores, uint32_t i)
{
    const struct blocks_copy order = {.from = theirs[i], .to = ours[i]};
    uint64_t n_bytes = 0;
    int result = blocks_import(stores->to.blocks, &stores->source, FIXTURE_SESSION, &order, &n_bytes);
    return result < 0 ? result : (int64_t)n_bytes;
}

static struct block_header *their(const struct stores *stores, uint32_t number)
{
    /* Not by the header: it may lie. */
    return (struct block_header *)(void *)(stores->from.segment + stores->from.plan.blocks_offset +
                                           theirs[number].index * stores->from.plan.block_bytes);
}

static struct block_header *our(const struct stores *stores, uint32_t number)
{
    return layout_block(stores->to.segment, ours[number].index);
}

static int64_t bytes_of(const struct stores *stores, uint32_t n_tokens)
{
    const struct row_shape *shape = &stores->to.shape;
    return (int64_t)(layout_row_bytes(shape) * n_tokens * shape->n_layers * shape->n_kv_heads);
}

static bool is_right(const struct stores *stores, uint32_t number)
{
    return fixture_block_is_right(&stores->to, stores->to.blocks, FIXTURE_SESSION, ours[number]);
}

static void sealed_blocks_are_sealed_here(void **state)
{
    struct stores *stores = *state;
    for (uint32_t i = 0; i < 2; i++) {
        const uint64_t decoded = UINT64_C(0x8000000000000001) << i;
        atomic_store(&their(stores, i)->decoded, decoded);
        assert_int_equal(import_number(stores, i), bytes_of(stores, 64));
        assert_int_equal(blocks_verify(stores->to.blocks, ours[i].index), 0);
        assert_true(is_right(stores, i));
        assert_true(atomic_load(&our(stores, i)->decoded) == decoded);
        assert_int_equal(our(stores, i)->checksum, their(stores, i)->checksum);
        assert_int_equal(our(stores, i)->handle.generation, ours[i].generation);
        assert_int_equal(our(stores, i)->previous_store, 0); /* as it was reserved */
    }
    struct blocks_counts counts = blocks_count(stores->to.blocks);
    assert_true(counts.n_sealed == 2 && counts.n_open == 1 && counts.n_free == 4);
}

/* An open block is taken as far as it is filled, and the rest with the next order. */
static void open_block_comes_in_parts(void **state)
{
    struct stores *stores = *state;
    struct fixture *from = &stores->from;
    atomic_store(&their(stores, 2)->decoded, ~UINT64_C(0) << 30); /* beyond the ids nothing is said yet */
    assert_int_equal(import_number(stores, 2), bytes_of(stores, N_ROWS));
    assert_int_equal(atomic_load(&our(stores, 2)->n_ids), N_ROWS);
    assert_int_equal(atomic_load(&our(stores, 2)->n_rows[2]), N_ROWS);
    assert_true(atomic_load(&our(stores, 2)->decoded) == ((UINT64_C(1) << N_ROWS) - (UINT64_C(1) << 30)));
    assert_true(is_right(stores, 2));
    assert_int_equal(import_number(stores, 2), 0);

    /* A step that has come as far as layer 1: ids of all, rows of two layers. */
    atomic_store(&their(stores, 2)->decoded, UINT64_C(7) << 30);
    for (uint32_t layer = 0; layer < 2; layer++)
        assert_int_equal(fixture_append(from, from->blocks, FIXTURE_SESSION, theirs[2], 2, N_ROWS, 3, layer), 0);
    assert_int_equal(import_number(stores, 2), bytes_of(stores, 3) * 2 / 3);
    assert_int_equal(atomic_load(&our(stores, 2)->n_ids), N_ROWS + 3);
    assert_int_equal(atomic_load(&our(stores, 2)->n_rows[1]), N_ROWS + 3);
    assert_int_equal(atomic_load(&our(stores, 2)->n_rows[2]), N_ROWS);
    assert_true(is_right(stores, 2));

    assert_int_equal(fixture_append(from, from->blocks, FIXTURE_SESSION, theirs[2], 2, N_ROWS, 64 - N_ROWS, ALL), 0);
    assert_int_equal(atomic_load(&their(stores, 2)->state), BLOCK_SEALED);
    assert_true(import_number(stores, 2) > 0);
    assert_int_equal(blocks_verify(stores->to.blocks, ours[2].index), 0);
    assert_true(is_right(stores, 2));
}

static void import_goes_on_from_any_progress(void **state)
{
    struct stores *stores = *state;
    struct fixture *to = &stores->to;
    /* Layer 0 has some, layer 1 all, layer 2 nothing: as one leaves it that was killed in an import and was adopted. */
    assert_int_equal(fixture_append(to, to->blocks, FIXTURE_SESSION, ours[0], 0, 0, 64, 0), 0);
    assert_int_equal(fixture_append(to, to->blocks, FIXTURE_SESSION, ours[0], 0, 0, 64, 1), 0);
    atomic_store(&our(stores, 0)->n_rows[0], 20);
    assert_int_equal(import_number(stores, 0), bytes_of(stores, 64 + 44) / 3);
    assert_int_equal(blocks_verify(to->blocks, ours[0].index), 0);
    assert_true(is_right(stores, 0));
}

/* Complete, but its store died before it was sealed. */
static void complete_block_is_sealed(void **state)
{
    struct stores *stores = *state;
    uint32_t checksum = their(stores, 0)->checksum;
    atomic_store(&their(stores, 0)->state, BLOCK_OPEN);
    their(stores, 0)->checksum = 0;
    assert_int_equal(import_number(stores, 0), bytes_of(stores, 64));
    assert_int_equal(atomic_load(&our(stores, 0)->state), BLOCK_SEALED);
    assert_int_equal(our(stores, 0)->checksum, checksum);
}

static void repeated_orders_change_nothing(void **state)
{
    struct stores *stores = *state;
    uint8_t *before = malloc(stores->to.plan.n_bytes);
    assert_non_null(before);
    for (uint32_t i = 0; i < 3; i++)
        assert_true(import_number(stores, i) > 0);
    memcpy(before, stores->to.segment, stores->to.plan.n_bytes);
    for (uint32_t round = 0; round < 6; round++)
        assert_int_equal(import_number(stores, round % 3), 0);
    assert_memory_equal(before, stores->to.segment, stores->to.plan.n_bytes);
    free(before);
    /* Nor when we are further than they are. */
    assert_int_equal(
        fixture_append(&stores->to, stores->to.blocks, FIXTURE_SESSION, ours[2], 2, N_ROWS, 64 - N_ROWS, ALL), 0);
    assert_int_equal(import_number(stores, 2), 0);
    assert_int_equal(blocks_verify(stores->to.blocks, ours[2].index), 0);
}

static void refused(void **state)
{
    struct stores *stores = *state;
    struct fixture *to = &stores->to;
    const uint64_t session = FIXTURE_SESSION;
    uint8_t *before = malloc(to->plan.n_bytes);
    assert_non_null(before);
    memcpy(before, to->segment, to->plan.n_bytes);
    assert_int_equal(import_as(stores, session, theirs[0], ours[1]), -EINVAL);
    assert_int_equal(import_as(stores, session, theirs[1], ours[0]), -EINVAL);
    assert_int_equal(import_as(stores, FIXTURE_OTHER, theirs[0], ours[0]), -ESTALE);
    assert_int_equal(import_as(stores, 0, theirs[0], ours[0]), -ESTALE);
    assert_int_equal(import_as(stores, session, theirs[0], (struct block_handle){3, 3}), -ESTALE);
    assert_int_equal(import_as(stores, session, theirs[0], (struct block_handle){6, 0}), -ESTALE); /* free */
    assert_int_equal(import_as(stores, session, theirs[0], (struct block_handle){7, 1}), -ESTALE);
    assert_int_equal(import_as(stores, session, (struct block_handle){0, 6}, ours[0]), -ENOENT);
    assert_int_equal(import_as(stores, session, (struct block_handle){0, 0}, ours[0]), -ENOENT);
    assert_int_equal(import_as(stores, session, (struct block_handle){3, 7}, ours[0]), -ENOENT);
    assert_int_equal(import_as(stores, session, (struct block_handle){UINT32_MAX, 7}, ours[0]), -ENOENT);
    assert_memory_equal(before, to->segment, to->plan.n_bytes);
    free(before);

    /* Tokens of its own are there already; of an equal beginning the next one is another. */
    uint32_t ids[2] = {fixture_id(session, 0), fixture_id(session, 1) + 1};
    const struct blocks_append order = {.session = session, .handle = ours[0], .n_tokens = 2, .ids = ids};
    assert_int_equal(blocks_append(to->blocks, &order), 0);
    assert_int_equal(import_as(stores, session, theirs[0], ours[0]), -EEXIST);
    /* The session was released there meanwhile, or the block reused. */
    blocks_release(stores->from.blocks, session, 1, 1u << 1);
    assert_int_equal(import_as(stores, session, theirs[1], ours[1]), -ENOENT);
    fixture_reserve(stores->from.blocks, session, theirs[1].index, theirs[1].generation + 1, 1);
    assert_int_equal(import_as(stores, session, theirs[1], ours[1]), -ENOENT);
}

#define LIES                                                                                                           \
    X(magic = 0, -EBADMSG)                                                                                             \
    X(layout = LAYOUT_VERSION + 1, -EBADMSG)                                                                           \
    X(handle.index = 2, -EBADMSG)                                                                                      \
    X(handle.generation = 9, -ENOENT)                                                                                  \
    X(session = FIXTURE_OTHER, -ENOENT)                                                                                \
    X(number = 2, -EINVAL)                                                                                             \
    X(state = BLOCK_FREE, -ENOENT)                                                                                     \
    X(state = 3, -EBADMSG)                                                                                             \
    X(state = UINT32_MAX, -EBADMSG)                                                                                    \
    X(n_ids = 65, -EBADMSG)                                                                                            \
    X(n_ids = 63, -EBADMSG)                                                                                            \
    X(n_ids = UINT32_MAX, -EBADMSG)                                                                                    \
    X(n_rows[0] = 65, -EBADMSG)                                                                                        \
    X(n_rows[1] = 255, -EBADMSG)                                                                                       \
    X(n_rows[2] = 63, -EBADMSG)

static void lies_are_refused(void **state)
{
    struct stores *stores = *state;
    uint8_t *sound = malloc(stores->from.plan.n_bytes), *before = malloc(stores->to.plan.n_bytes);
    assert_true(sound && before);
    memcpy(sound, stores->from.segment, stores->from.plan.n_bytes);
    memcpy(before, stores->to.segment, stores->to.plan.n_bytes);
#define X(lie, wanted)                                                                                                 \
    memcpy(stores->from.segment, sound, stores->from.plan.n_bytes);                                                    \
    their(stores, 1)->lie;                                                                                             \
    if (import_as(stores, FIXTURE_SESSION, theirs[1], ours[1]) != (wanted))                                            \
        fail_msg("not found: %s", #lie);
    LIES
#undef X
        assert_memory_equal(before, stores->to.segment, stores->to.plan.n_bytes);
    free(sound);
    free(before);
}

/* Whatever the other headers say: an error, or blocks that are sound. */
static void random_lies_do_no_harm(void **state)
{
    struct stores *stores = *state;
    uint8_t *sound = malloc(stores->from.plan.n_bytes), *before = malloc(stores->to.plan.n_bytes);
    uint32_t n_taken = 0;
    assert_true(sound && before);
    memcpy(sound, stores->from.segment, stores->from.plan.n_bytes);
    for (uint32_t round = 0; round < 2000; round++) {
        char text[BLOCKS_CHECK_TEXT] = "";
        uint32_t number = round % 3;
        memcpy(stores->from.segment, sound, stores->from.plan.n_bytes);
        srand(round);
        for (int change = rand() % 4; change >= 0; change--) {
            uint8_t *where = rand() % 4 == 0 ? stores->from.segment : (uint8_t *)their(stores, number);
            where[rand() % (rand() % 2 ? 128 : 400)] = (uint8_t)rand();
        }
        int result = blocks_import_open(stores->to.blocks, stores->from.segment, stores->from.plan.n_bytes, OTHER,
                                        &stores->source);
        assert_true(result == 0 || result == -EPROTO || result == -EAGAIN || result == -EXDEV ||
                    result == -EMEDIUMTYPE);
        if (result < 0)
            continue;
        n_taken += import_number(stores, number) > 0;
        if (blocks_check(stores->to.blocks, text) != 0)
            fail_msg("round %u: %s", round, text);
        blocks_release(stores->to.blocks, FIXTURE_SESSION, 1, 0);
        blocks_release(stores->to.blocks, FIXTURE_SESSION, 0, 1);
        for (uint32_t i = 0; i < 3; i++) {
            uint32_t generation = our(stores, i)->handle.generation + 1;
            fixture_reserve(stores->to.blocks, FIXTURE_SESSION, ours[i].index, generation, i);
            our(stores, i)->handle.generation = ours[i].generation; /* always the same handle for the next round */
        }
        struct blocks_owner owner = fixture_owner(&stores->to, 1);
        struct blocks_adoption adoption;
        stores->to.blocks = blocks_free(stores->to.blocks);
        assert_int_equal(
            blocks_adopt(stores->to.segment, stores->to.plan.n_bytes, &owner, &adoption, &stores->to.blocks), 0);
    }
    assert_true(n_taken > 200 && n_taken < 2000);
    free(sound);
    free(before);
}

static void what_is_no_such_segment_is_refused(void **state)
{
    struct stores *stores = *state;
    struct segment_header *header = (struct segment_header *)(void *)stores->from.segment;
    const struct segment_header sound = *header;
    const struct blocks *blocks = stores->to.blocks;
    uint64_t n_bytes = stores->from.plan.n_bytes;
    struct blocks_source source;
    assert_int_equal(blocks_import_open(blocks, header, n_bytes - 4096, OTHER, &source), -EPROTO); /* cut off */
    assert_int_equal(blocks_import_open(blocks, header, 4095, OTHER, &source), -EPROTO);
    assert_int_equal(blocks_import_open(blocks, header, n_bytes, OTHER + 1, &source), -EXDEV);
    atomic_store(&header->ready, 0);
    assert_int_equal(blocks_import_open(blocks, header, n_bytes, OTHER, &source), -EAGAIN);
    *header = sound;
    header->n_blocks++;
    assert_int_equal(blocks_import_open(blocks, header, n_bytes, OTHER, &source), -EPROTO);
    *header = sound;
    header->shape.n_layers = 2; /* and sizes that agree */
    header->block_bytes = layout_block_bytes(&header->shape);
    assert_int_equal(blocks_import_open(blocks, header, n_bytes, OTHER, &source), -EMEDIUMTYPE);
    *header = sound;
    assert_int_equal(blocks_import_open(blocks, header, n_bytes, OTHER, &source), 0);
}

/* A store that is killed in the middle of an import leaves an open block with fewer rows; its successor goes on. */
static void half_imported_block_is_adopted(void **state)
{
    struct stores *stores = *state;
    struct blocks_adoption adoption, none = {0};
    char text[BLOCKS_CHECK_TEXT] = "";
    assert_int_equal(import_number(stores, 2), bytes_of(stores, N_ROWS));
    assert_int_equal(import_number(stores, 0), bytes_of(stores, 64));
    /* As if killed before layer 2 was counted. */
    atomic_store(&our(stores, 0)->state, BLOCK_OPEN);
    atomic_store(&our(stores, 0)->n_rows[2], 0);
    our(stores, 0)->checksum = 0;
    struct blocks_owner owner = fixture_owner(&stores->to, 2);
    stores->to.blocks = blocks_free(stores->to.blocks);
    assert_int_equal(blocks_adopt(stores->to.segment, stores->to.plan.n_bytes, &owner, &adoption, &stores->to.blocks),
                     0);
    none.n_layers_summed = 2;
    assert_memory_equal(&adoption, &none, sizeof(none));
    if (blocks_check(stores->to.blocks, text) != 0)
        fail_msg("%s", text);
    for (uint32_t i = 0; i < 3; i++)
        assert_true(is_right(stores, i));
    assert_int_equal(atomic_load(&our(stores, 2)->n_ids), N_ROWS);
    assert_int_equal(import_number(stores, 0), bytes_of(stores, 64) / 3);
    assert_int_equal(our(stores, 0)->writer, 2);
    assert_int_equal(blocks_verify(stores->to.blocks, ours[0].index), 0);
    assert_true(is_right(stores, 0));
}

/* ---- the other store works meanwhile ---- */

struct worker {
    struct stores *stores;
    _Atomic bool over;
};

/* Token by token, layer by layer, as decode steps do. */
static void *append_all(void *argument)
{
    struct worker *worker = argument;
    struct fixture *from = &worker->stores->from;
    for (uint32_t token = N_ROWS; token < 64; token++) {
        for (uint32_t layer = 0; layer < from->shape.n_layers; layer++) {
            (void)fixture_append(from, from->blocks, FIXTURE_SESSION, theirs[2], 2, token, 1, layer);
            sched_yield();
        }
    }
    atomic_store(&worker->over, true);
    return NULL;
}

static void rows_come_while_it_is_imported(void **state)
{
    struct stores *stores = *state;
    struct worker worker = {.stores = stores};
    pthread_t thread;
    uint32_t n_parts = 0;
    assert_int_equal(pthread_create(&thread, NULL, append_all, &worker), 0);
    for (bool over = false; !over;) {
        over = atomic_load(&worker.over);
        int64_t n_bytes = import_number(stores, 2);
        assert_true(n_bytes >= 0);
        n_parts += n_bytes > 0;
        assert_true(is_right(stores, 2));
        sched_yield();
    }
    pthread_join(thread, NULL);
    assert_true(n_parts > 0);
    assert_int_equal(blocks_verify(stores->to.blocks, ours[2].index), 0);
}

/* Frees the block that is imported, and lets another session fill it, over and over. */
static void *reuse(void *argument)
{
    struct worker *worker = argument;
    struct fixture *from = &worker->stores->from;
    for (uint32_t life = 0; life < 1500; life++) {
        uint64_t session = life % 2 ? FIXTURE_SESSION : FIXTURE_OTHER;
        struct block_handle handle = {theirs[1].index, theirs[1].generation + 1 + life};
        blocks_release(from->blocks, FIXTURE_SESSION, 1, 1u << 1);
        blocks_release(from->blocks, FIXTURE_OTHER, 1, 1u << 1);
        fixture_reserve(from->blocks, session, handle.index, handle.generation, 1);
        (void)fixture_append(from, from->blocks, session, handle, 1, 0, 64, ALL);
    }
    atomic_store(&worker->over, true);
    return NULL;
}

static void block_is_reused_while_it_is_imported(void **state)
{
    struct stores *stores = *state;
    struct worker worker = {.stores = stores};
    pthread_t thread;
    uint32_t generation = ours[1].generation, n_taken = 0, n_gone = 0;
#ifdef __SANITIZE_THREAD__
    skip(); /* rows are read that are being written; what was read is thrown away then */
#endif
    fixture_session(stores->from.blocks, FIXTURE_OTHER);
    assert_int_equal(pthread_create(&thread, NULL, reuse, &worker), 0);
    while (!atomic_load(&worker.over)) {
        struct block_handle to = {ours[1].index, generation++};
        uint64_t n_bytes = 0;
        const struct blocks_copy order = {
            .from = {theirs[1].index, atomic_load((_Atomic uint32_t *)&their(stores, 1)->handle.generation)}, .to = to};
        int result = blocks_import(stores->to.blocks, &stores->source, FIXTURE_SESSION, &order, &n_bytes);
        assert_true(result == 0 || result == -ENOENT || result == -EBADMSG);
        n_taken += n_bytes > 0;
        n_gone += result < 0;
        if (!fixture_block_is_right(&stores->to, stores->to.blocks, FIXTURE_SESSION, to))
            fail_msg("after %u imports and %u that were refused: rows of nobody", n_taken, n_gone);
        blocks_release(stores->to.blocks, FIXTURE_SESSION, 1, 1u << 1);
        fixture_reserve(stores->to.blocks, FIXTURE_SESSION, to.index, generation, 1);
    }
    pthread_join(thread, NULL);
    assert_true(n_gone > 0);
}

int main(void)
{
#define TEST(name)                                                                                                     \
    {#name " (f16)", name, set_up_f16, tear_down, NULL},                                                               \
    {                                                                                                                  \
#name " (q8_0)", name, set_up_q8_0, tear_down, NULL                                                            \
    }
    const struct CMUnitTest tests[] = {
        TEST(sealed_blocks_are_sealed_here),
        TEST(open_block_comes_in_parts),
        TEST(import_goes_on_from_any_progress),
        TEST(complete_block_is_sealed),
        TEST(repeated_orders_change_nothing),
        TEST(refused),
        TEST(lies_are_refused),
        TEST(random_lies_do_no_harm),
        TEST(what_is_no_such_segment_is_refused),
        TEST(half_imported_block_is_adopted),
        TEST(rows_come_while_it_is_imported),
        TEST(block_is_reused_while_it_is_imported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
