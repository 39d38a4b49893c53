/*
 * test_killed.c - a store that dies at any instruction (single-stepped) leaves a segment that is adopted, is sound, and comes
 * to the same end with the same orders.
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
#define N_BLOCKS 4u /* of the session; behind them two of its fork, and one that comes from another store */
#define N_ALL    (N_BLOCKS + 3u)
#define N_PHASES 15u
#ifdef HCATTN_SANITIZED
#define N_LAYERS 1u /* several times the instructions */
#else
#define N_LAYERS 2u
#endif

/* As few instructions as possible that still are more than one of everything. */
static const struct row_shape tiny = {.n_layers = N_LAYERS, .n_kv_heads = 2, .head_dim = 2, .codec = ROW_CODEC_F16};

/* Room that the dying store and its judge share. */
struct stage {
    struct fixture fixture;   /* segment in shared memory */
    struct fixture neighbour; /* of which number N_BLOCKS of the session is imported */
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

static struct block_handle imported(const struct fixture *fixture)
{
    return (struct block_handle){N_ALL - 1, generation_of(fixture, N_ALL - 1)};
}

static int reserve_import(struct fixture *fixture)
{
    struct blocks_view view;
    uint32_t failed;
    struct block_handle handle = imported(fixture);
    struct blocks_reservation order = fixture_reservation(handle.index, handle.generation + 1, N_BLOCKS);
    return blocks_find(fixture->blocks, FIXTURE_SESSION, handle, &view) == 0
               ? 0
               : blocks_reserve(fixture->blocks, FIXTURE_SESSION, &order, 1, &failed);
}

static int import(struct fixture *fixture, const struct fixture *neighbour)
{
    const struct blocks_copy order = {.from = {0, 1}, .to = imported(fixture)};
    struct blocks_source source;
    uint64_t n_bytes;
    int result =
        blocks_import_open(fixture->blocks, neighbour->segment, neighbour->plan.n_bytes, FIXTURE_STORE, &source);
    return result < 0 ? result : blocks_import(fixture->blocks, &source, FIXTURE_SESSION, &order, &n_bytes);
}

/* The last step: the session's lanes lie elsewhere now. */
static int move(struct fixture *fixture)
{
    struct session_record record = {.session = FIXTURE_SESSION, .model = {7, 8}, .policy = "full", .moves = 1};
    memset(record.lane_store[1], 9, LAYOUT_N_LANES);
    return blocks_session_open(fixture->blocks, &record);
}

static bool lanes_are_whole(const struct fixture *fixture)
{
    const struct session_record *record = blocks_session_find(fixture->blocks, FIXTURE_SESSION);
    uint8_t lanes[LAYOUT_N_LANES];
    if (!record)
        return true;
    memset(lanes, record->moves == 1 ? 9 : 0, sizeof(lanes));
    return memcmp(record->lane_store[record->moves % 2], lanes, sizeof(lanes)) == 0;
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

static int do_phase(struct fixture *fixture, const struct fixture *neighbour, const struct tokens *tokens,
                    uint32_t phase)
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
    case 12:
        return reserve_import(fixture);
    case 13:
        return import(fixture, neighbour);
    case 14:
        return move(fixture);
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
    const struct session_record *record = blocks_session_find(fixture->blocks, FIXTURE_SESSION);
    return record && record->moves == 1 && fork_is_final(fixture) && blocks_verify(fixture->blocks, N_ALL - 1) == 0;
}

static void *shared_memory(size_t n_bytes)
{
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    return memory;
}

static void open_stage(struct stage *stage)
{
    fixture_open(&stage->neighbour, &tiny, 1);
    fixture_session(stage->neighbour.blocks, FIXTURE_SESSION);
    fixture_reserve(stage->neighbour.blocks, FIXTURE_SESSION, 0, 1, N_BLOCKS);
    assert_int_equal(fixture_append(&stage->neighbour, stage->neighbour.blocks, FIXTURE_SESSION,
                                    (struct block_handle){0, 1}, N_BLOCKS, 0, 64, ALL),
                     0);
    fixture_open(&stage->fixture, &tiny, N_ALL);
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
    fixture_close(&stage->neighbour);
}

/* The child: stops, then works until it is done; it is stepped through from outside. */
static void live(struct stage *stage, const struct tokens *tokens)
{
    if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0)
        _exit(42);
    raise(SIGSTOP);
    for (uint32_t phase = 0; phase < N_PHASES; phase++) {
        atomic_store(stage->phase, phase);
        if (do_phase(&stage->fixture, &stage->neighbour, tokens, phase) != 0)
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
    if (!lanes_are_whole(&heir))
        fail_msg("step %lu, phase %u: half of a move", step, phase);
    for (uint32_t i = 0; i < N_ALL; i++) {
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
        int result = do_phase(&heir, &stage->neighbour, tokens, phase);
        if (result != 0)
            fail_msg("step %lu: phase %u again: %s", step, phase, strerror(-result));
    }
    if (!is_final(&heir))
        fail_msg("step %lu: healed, but to something else", step);
    blocks_free(heir.blocks);
}

/*
 * Every instruction would take minutes; a stride that is prime to loop lengths visits all kinds of places, and after each
 * step that changed a header or a record every one is looked at.
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
    struct block_header before[N_ALL];
    assert_non_null(copy);
    struct session_record records[2];
    memset(before, 0, sizeof(before));
    memset(records, 0, sizeof(records));
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
        for (uint32_t i = 0; i < N_ALL; i++) {
            const void *header =
                stage.fixture.segment + stage.fixture.plan.blocks_offset + i * stage.fixture.plan.block_bytes;
            changed |= memcmp(&before[i], header, sizeof(before[i])) != 0;
            memcpy(&before[i], header, sizeof(before[i]));
        }
        const void *now = stage.fixture.segment + stage.fixture.plan.sessions_offset;
        changed |= memcmp(records, now, sizeof(records)) != 0;
        memcpy(records, now, sizeof(records));
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

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(killed_at_any_instruction)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
