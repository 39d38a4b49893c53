/*
 * test_adopt.c - a segment after its store died: at every instruction (single-stepped), and after its headers were damaged.
 */
#include "tests/unit/value-store/fixture.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define ALL      UINT32_MAX
#define N_BLOCKS 4u /* of the session; as many of its fork behind them */
#define N_PHASES 12u
#ifdef HCATTN_SANITIZED
#define N_LAYERS 1u /* several times the instructions */
#else
#define N_LAYERS 2u
#endif

/* As few instructions as possible that still are more than one of everything. */
static const struct row_shape tiny = {.n_layers = N_LAYERS, .n_kv_heads = 2, .head_dim = 2, .codec = ROW_CODEC_F16};

/* ---- killed anywhere ---- */

/* Room that the dying store and its judge share. */
struct stage {
    struct fixture fixture; /* segment in shared memory */
    _Atomic uint32_t *phase;
};

static uint32_t generation_of(const struct fixture *fixture, uint32_t index)
{
    const struct segment_header *header = (const struct segment_header *)(const void *)fixture->segment;
    return layout_block(header, index)->handle.generation;
}

/*
 * The life of a session, in steps that a coordinator or worker orders and orders again when no answer came: number n lives
 * in block n. Rows are prepared outside, so that the steps that count are few.
 */
struct tokens {
    uint32_t ids[N_BLOCKS][64];
    void *rows[N_BLOCKS][N_LAYERS];
};

static void prepare(const struct fixture *fixture, struct tokens *tokens)
{
    for (uint32_t number = 0; number < N_BLOCKS; number++) {
        for (uint32_t i = 0; i < 64; i++)
            tokens->ids[number][i] = fixture_id(FIXTURE_SESSION, number * 64 + i);
        for (uint32_t layer = 0; layer < N_LAYERS; layer++)
            tokens->rows[number][layer] = fixture_rows(fixture, FIXTURE_SESSION, number * 64, 64, layer);
    }
}

static void drop(struct tokens *tokens)
{
    for (uint32_t number = 0; number < N_BLOCKS; number++) {
        for (uint32_t layer = 0; layer < N_LAYERS; layer++)
            free(tokens->rows[number][layer]);
    }
}

static int append(struct fixture *fixture, const struct tokens *tokens, uint32_t number, uint32_t n)
{
    int result = 0;
    for (uint32_t layer = 0; layer < N_LAYERS && result == 0; layer++) {
        const struct blocks_append order = {
            .session = FIXTURE_SESSION,
            .handle = {number, generation_of(fixture, number)},
            .layer = layer,
            .n_tokens = n,
            .ids = layer == 0 ? tokens->ids[number] : NULL,
            .rows = tokens->rows[number][layer],
        };
        result = blocks_append(fixture->blocks, &order);
    }
    return result;
}

/* Reserves what is not reserved, with generations above those that are there: what a coordinator that reads headers does. */
static int reserve(struct fixture *fixture, uint32_t first, uint32_t end)
{
    struct blocks_reservation order[N_BLOCKS];
    uint32_t n = 0, failed;
    for (uint32_t number = first; number < end; number++) {
        struct blocks_view view;
        struct block_handle handle = {number, generation_of(fixture, number)};
        if (blocks_find(fixture->blocks, FIXTURE_SESSION, handle, &view) != 0)
            order[n++] = fixture_reservation(number, handle.generation + 1, number);
    }
    return n == 0 ? 0 : blocks_reserve(fixture->blocks, FIXTURE_SESSION, order, n, &failed);
}

/* The fork: numbers 0 and 1, copied from blocks 0 and 1 into N_BLOCKS and N_BLOCKS + 1. */
static int open_fork(struct fixture *fixture)
{
    const struct session_record record = {.session = FIXTURE_OTHER, .model = {7, 8}, .policy = "full"};
    int result = blocks_session_open(fixture->blocks, &record);
    for (uint32_t number = 0; number < 2 && result == 0; number++) {
        struct blocks_view view;
        uint32_t failed, index = N_BLOCKS + number;
        struct block_handle handle = {index, generation_of(fixture, index)};
        struct blocks_reservation order = fixture_reservation(index, handle.generation + 1, number);
        if (blocks_find(fixture->blocks, FIXTURE_OTHER, handle, &view) != 0)
            result = blocks_reserve(fixture->blocks, FIXTURE_OTHER, &order, 1, &failed);
    }
    return result;
}

static int copy(struct fixture *fixture, uint32_t number)
{
    const struct blocks_copy order = {
        .from = {number, generation_of(fixture, number)},
        .to = {N_BLOCKS + number, generation_of(fixture, N_BLOCKS + number)},
    };
    return blocks_copy(fixture->blocks, FIXTURE_SESSION, FIXTURE_OTHER, &order);
}

static bool fork_is_final(const struct fixture *fixture)
{
    for (uint32_t i = N_BLOCKS; i < N_BLOCKS + 2; i++) {
        struct block_handle handle = {i, generation_of(fixture, i)};
        if (blocks_verify(fixture->blocks, i) != 0 ||
            !fixture_copy_is_right(fixture, fixture->blocks, FIXTURE_OTHER, handle, FIXTURE_SESSION))
            return false;
    }
    return true;
}

static int do_phase(struct fixture *fixture, const struct tokens *tokens, uint32_t phase)
{
    const struct session_record record = {.session = FIXTURE_SESSION, .model = {7, 8}, .policy = "full"};
    switch (phase) {
    case 0:
        return blocks_session_open(fixture->blocks, &record);
    case 1:
        return reserve(fixture, 0, 3);
    case 2:
        return append(fixture, tokens, 0, 64);
    case 3:
        return append(fixture, tokens, 1, 64);
    case 4:
        return append(fixture, tokens, 2, 20);
    case 5:
        blocks_release(fixture->blocks, FIXTURE_SESSION, 1, 0);
        return 0;
    case 6:
        return reserve(fixture, 1, 4);
    case 7:
        return append(fixture, tokens, 1, 64);
    case 8:
        return append(fixture, tokens, 2, 33);
    case 9:
        return open_fork(fixture);
    default:
        return copy(fixture, phase - 10);
    }
}

static bool is_final(const struct fixture *fixture)
{
    static const struct {
        enum block_state state;
        uint32_t n_ids;
    } wanted[N_BLOCKS] = {{BLOCK_SEALED, 64}, {BLOCK_SEALED, 64}, {BLOCK_OPEN, 33}, {BLOCK_OPEN, 0}};
    for (uint32_t i = 0; i < N_BLOCKS; i++) {
        struct block_handle handle = {i, generation_of(fixture, i)};
        struct blocks_view view;
        if (blocks_find(fixture->blocks, FIXTURE_SESSION, handle, &view) != 0 || view.number != i ||
            atomic_load(&view.header->state) != wanted[i].state ||
            atomic_load(&view.header->n_ids) != wanted[i].n_ids ||
            !fixture_block_is_right(fixture, fixture->blocks, FIXTURE_SESSION, handle))
            return false;
        for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
            if (blocks_n_rows(&view, layer) != wanted[i].n_ids)
                return false;
        }
    }
    return blocks_session_find(fixture->blocks, FIXTURE_SESSION) != NULL && fork_is_final(fixture);
}

static void *shared_memory(size_t n_bytes)
{
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    return memory;
}

static void open_stage(struct stage *stage)
{
    fixture_open(&stage->fixture, &tiny, N_BLOCKS + 2);
    void *shared = shared_memory(stage->fixture.plan.n_bytes);
    stage->phase = shared_memory(4096);
    stage->fixture.blocks = blocks_free(stage->fixture.blocks);
    free(stage->fixture.segment);
    stage->fixture.segment = shared;
    struct blocks_owner owner = fixture_owner(&stage->fixture, 1);
    assert_int_equal(blocks_format(shared, &stage->fixture.plan, &tiny, &owner, &stage->fixture.blocks), 0);
}

static void close_stage(struct stage *stage)
{
    stage->fixture.blocks = blocks_free(stage->fixture.blocks);
    munmap(stage->fixture.segment, stage->fixture.plan.n_bytes);
    munmap((void *)stage->phase, 4096);
}

/* The child: stops, then works until it is done; it is stepped through from outside. */
static void live(struct stage *stage, const struct tokens *tokens)
{
    if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0)
        _exit(42);
    raise(SIGSTOP);
    for (uint32_t phase = 0; phase < N_PHASES; phase++) {
        atomic_store(stage->phase, phase);
        if (do_phase(&stage->fixture, tokens, phase) != 0)
            _exit(1);
    }
    _exit(0);
}

/* A copy of the segment as it is now is adopted, is sound, and the orders from the current one on lead to the same end. */
static void judge(const struct stage *stage, const struct tokens *tokens, uint8_t *copy, unsigned long step)
{
    struct fixture heir = stage->fixture;
    struct blocks_adoption adoption;
    char text[BLOCKS_CHECK_TEXT] = "";
    uint32_t phase = atomic_load(stage->phase);
    struct blocks_owner owner = fixture_owner(&heir, 2);
    memcpy(copy, stage->fixture.segment, heir.plan.n_bytes);
    heir.segment = copy;
    assert_int_equal(blocks_adopt(copy, heir.plan.n_bytes, &owner, &adoption, &heir.blocks), 0);
    if (adoption.n_quarantined + adoption.n_orphans + adoption.n_records_dropped != 0)
        fail_msg("step %lu, phase %u: %u quarantined, %u orphans, %u records dropped", step, phase,
                 adoption.n_quarantined, adoption.n_orphans, adoption.n_records_dropped);
    if (blocks_check(heir.blocks, text) != 0)
        fail_msg("step %lu, phase %u: %s", step, phase, text);
    for (uint32_t i = 0; i < N_BLOCKS; i++) {
        struct block_handle handle = {i, generation_of(&heir, i)};
        struct blocks_view view;
        if (blocks_find(heir.blocks, FIXTURE_SESSION, handle, &view) == 0 &&
            !fixture_block_is_right(&heir, heir.blocks, FIXTURE_SESSION, handle))
            fail_msg("step %lu, phase %u: block %u has what no token has", step, phase, i);
    }
    for (uint32_t i = N_BLOCKS; i < N_BLOCKS + 2; i++) {
        struct block_handle handle = {i, generation_of(&heir, i)};
        struct blocks_view view;
        if (blocks_find(heir.blocks, FIXTURE_OTHER, handle, &view) == 0 &&
            !fixture_copy_is_right(&heir, heir.blocks, FIXTURE_OTHER, handle, FIXTURE_SESSION))
            fail_msg("step %lu, phase %u: block %u, a copy, is not right", step, phase, i);
    }
    for (; phase < N_PHASES; phase++) {
        int result = do_phase(&heir, tokens, phase);
        if (result != 0)
            fail_msg("step %lu: phase %u again: %s", step, phase, strerror(-result));
    }
    if (!is_final(&heir))
        fail_msg("step %lu: healed, but to something else", step);
    blocks_free(heir.blocks);
}

/*
 * Every instruction would take minutes; a stride that is prime to loop lengths visits all kinds of places, and after each
 * step that changed a header every one is looked at.
 */
static void killed_at_any_instruction(void **state)
{
    (void)state;
#ifdef __SANITIZE_THREAD__
    skip(); /* one thread, and a minute of steps through the sanitizer */
#endif
#ifdef HCATTN_SANITIZED
    const unsigned long stride = 1009;
#else
    const unsigned long stride = 97;
#endif
    struct stage stage;
    struct tokens tokens;
    unsigned long step = 0, n_judged = 0;
    int status;
    open_stage(&stage);
    prepare(&stage.fixture, &tokens);
    uint8_t *copy = aligned_alloc(LAYOUT_PAGE_BYTES, stage.fixture.plan.n_bytes);
    struct block_header before[N_BLOCKS + 2];
    assert_non_null(copy);
    memset(before, 0, sizeof(before));
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        live(&stage, &tokens);
    assert_int_equal(waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 42) {
        print_message("no right to trace a child here: skipped\n");
        free(copy);
        drop(&tokens);
        close_stage(&stage);
        skip();
    }
    assert_int_equal(ptrace(PTRACE_SETOPTIONS, child, NULL, PTRACE_O_EXITKILL),
                     0); /* when this test fails on the way */
    while (WIFSTOPPED(status)) {
        bool changed = false;
        for (uint32_t i = 0; i < N_BLOCKS + 2; i++) {
            const void *header =
                stage.fixture.segment + stage.fixture.plan.blocks_offset + i * stage.fixture.plan.block_bytes;
            changed |= memcmp(&before[i], header, sizeof(before[i])) != 0;
            memcpy(&before[i], header, sizeof(before[i]));
        }
        if (changed || step % stride == 0) {
            judge(&stage, &tokens, copy, step);
            n_judged++;
        }
        assert_int_equal(ptrace(PTRACE_SINGLESTEP, child, NULL, NULL), 0);
        assert_int_equal(waitpid(child, &status, 0), child);
        step++;
    }
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_true(is_final(&stage.fixture) == false); /* this process' view of entries is old: adopt */
    judge(&stage, &tokens, copy, step);
    print_message("%lu instructions, judged at %lu\n", step, n_judged);
    assert_true(step > 10000 && n_judged > 200);
    free(copy);
    drop(&tokens);
    close_stage(&stage);
}

/* ---- damaged ---- */

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
        cmocka_unit_test(killed_at_any_instruction),
        cmocka_unit_test_setup_teardown(sound_segment_is_kept, set_up, tear_down),
        cmocka_unit_test_setup_teardown(unfinished_work_is_finished, set_up, tear_down),
        cmocka_unit_test_setup_teardown(damaged_block_is_quarantined, set_up, tear_down),
        cmocka_unit_test_setup_teardown(damaged_records_are_dropped, set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_is_no_segment_is_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(random_damage_is_survived, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
