/* test_graphs.c - parts of steps as graphs: the same results as without, captured and replayed when they should be, no leaks. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu-worker/backend/cuda/cuda_graphs.h"
#include "gpu-worker/backend/cuda/cuda_internal.h"
#include "tests/backend/cuda-on-cpu/device.h"
#include "tests/backend/cuda-on-cpu/emulation_control.h"
#include "tests/backend/cuda-on-cpu/kernels_of_emulation.h"
#include "tests/backend/fixture.h"

enum { N = 64, HEADS = 4, MAX_T = 4, N_PARTS = 3 };

static struct tensor matrix, norm;

static int make_tensors(void **state)
{
    (void)state;
    matrix = fixture_tensor(TENSOR_Q8_0, N, N);
    norm = fixture_tensor(TENSOR_F32, 1, N);
    return 0;
}

static int free_tensors(void **state)
{
    (void)state;
    fixture_tensor_free(&matrix);
    fixture_tensor_free(&norm);
    return 0;
}

/* A model of one matrix and one norm, that runs in parts. */
struct machine {
    struct backend *backend;
    struct weight *matrix_weight, *norm_weight;
    struct backend_rope rope;
    float frequencies[N / HEADS / 2];
    float *x, *h; /* device [MAX_T][N] */
    float *out;   /* pinned */
};

static void machine_close(struct machine *machine)
{
    if (machine->backend != NULL) {
        backend_cuda.weight_free(machine->backend, machine->matrix_weight);
        backend_cuda.weight_free(machine->backend, machine->norm_weight);
        backend_cuda.free(machine->backend, machine->x);
        backend_cuda.free(machine->backend, machine->h);
        backend_cuda.device->host_free(machine->backend, machine->out);
        backend_cuda.close(machine->backend);
    }
}

static int machine_open(struct machine *machine)
{
    char error[256];
    const struct backend_options options = {.device = BACKEND_DEVICE_BY_WORKER};
    memset(machine, 0, sizeof *machine);
    for (int i = 0; i < N / HEADS / 2; i++)
        machine->frequencies[i] = 1.0f / (float)(1 + i);
    machine->rope = (struct backend_rope){N / HEADS, machine->frequencies, 1};
    int r = backend_cuda.open(&options, &machine->backend, error, sizeof error);
    if (r == 0)
        r = backend_cuda.weight_new(machine->backend, &matrix, &machine->matrix_weight);
    if (r == 0)
        r = backend_cuda.weight_new(machine->backend, &norm, &machine->norm_weight);
    if (r == 0) {
        machine->x = backend_cuda.alloc(machine->backend, MAX_T * N * sizeof(float));
        machine->h = backend_cuda.alloc(machine->backend, MAX_T * N * sizeof(float));
        machine->out = backend_cuda.device->host_alloc(machine->backend, MAX_T * N * sizeof(float));
        r = machine->x && machine->h && machine->out ? 0 : -ENOMEM;
    }
    return r;
}

/* Positions go on with each step, and what is staged with them; part 2 waits in the middle: two plays. */
static int run_step(struct machine *machine, uint32_t step, uint32_t n_tokens, float *out)
{
    struct backend *backend = machine->backend;
    const struct backend_ops *ops = &backend_cuda;
    uint32_t positions[MAX_T];
    float x[MAX_T * N];
    int r = 0;
    for (uint32_t t = 0; t < n_tokens; t++)
        positions[t] = 10 * step + t;
    for (uint32_t i = 0; i < n_tokens * N; i++)
        x[i] = (float)((i * 7 + step * 13) % 32) / 16 - 1;
    ops->device->part(backend, 0);
    ops->device->to_device(backend, machine->x, x, n_tokens * N * sizeof *x);
    for (uint32_t part = 1; part <= N_PARTS && r == 0; part++) {
        ops->device->part(backend, part);
        ops->rms_norm(backend, machine->x, n_tokens, N, machine->norm_weight, 1e-5f, machine->h);
        ops->rope(backend, machine->h, n_tokens, HEADS, N / HEADS, positions, &machine->rope);
        if (part == 2)
            r = ops->device->finish(backend);
        ops->matmul(backend, (const struct weight *const[]){machine->matrix_weight}, 1, machine->h, n_tokens,
                    (float *const[]){machine->x});
        if (part == N_PARTS)
            ops->device->to_host(backend, machine->out, machine->x, n_tokens * N * sizeof *x);
    }
    ops->device->part(backend, 0);
    const int last = ops->device->finish(backend);
    r = r < 0 ? r : last;
    if (r == 0)
        memcpy(out, machine->out, n_tokens * N * sizeof *out);
    return r;
}

/* Shapes of the steps; the results. */
static const uint32_t shapes[] = {2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 2, 3, 2, 3, 2, 3, 3};
enum { N_STEPS = sizeof shapes / sizeof *shapes };

static void run_steps(struct machine *machine, float out[N_STEPS][MAX_T * N])
{
    for (uint32_t i = 0; i < N_STEPS; i++)
        assert_int_equal(run_step(machine, i, shapes[i], out[i]), 0);
}

static void graphs_give_what_launches_give(void **state)
{
    (void)state;
    static float plain[N_STEPS][MAX_T * N], played[N_STEPS][MAX_T * N];
    const size_t n_before = emulation_n_objects();
    struct machine machine;
    device_run(0);
    assert_int_equal(machine_open(&machine), 0);
    cuda_graphs_allow(machine.backend, false);
    run_steps(&machine, plain);
    assert_int_equal(cuda_graphs_counts(machine.backend)->n_captures, 0);
    cuda_graphs_allow(machine.backend, true);
    run_steps(&machine, played);
    assert_memory_equal(plain, played, sizeof plain);

    const struct cuda_graphs_counts counts = *cuda_graphs_counts(machine.backend);
    assert_true(counts.n_graphs >= N_PARTS + 1 && counts.n_graphs <= 2 * (N_PARTS + 1));
    assert_true(counts.n_replays > counts.n_captures);
    assert_true(counts.n_recaptures > 0);
    assert_int_equal(counts.n_refused, 0);
    assert_string_equal(counts.note, "");
    /* those before the first replay, at a change, and all where shapes take turns are launched plainly */
    assert_true(counts.n_plain > 0);
    machine_close(&machine);
    assert_int_equal(emulation_n_objects(), n_before);
}

/* A list of one command: x [N] <- x * factor + 1, which may wait (what no capture takes). */
struct list {
    uint64_t factor, waits;
};

static struct list list;
static float *numbers;

static cudaError_t launch_list(struct backend *backend, const char **ret_name)
{
    *ret_name = "scale";
    const cudaError_t error = kernels_scale(backend->stream, numbers, N, (float)list.factor);
    return error == cudaSuccess && list.waits ? cudaStreamSynchronize(backend->stream) : error;
}

/* Plays it, by a graph or else plainly. */
static void play(struct backend *backend, uint32_t part, uint32_t number, uint64_t factor, uint64_t waits)
{
    const struct cuda_graphs_place place = {part, number, 0};
    const char *name = NULL;
    list = (struct list){factor, waits};
    if (!cuda_graphs_play(backend, &place, &list, sizeof list, launch_list))
        assert_int_equal(launch_list(backend, &name), cudaSuccess);
}

/* What is twice alike is captured, then replayed until another list comes twice in a row. */
static void when_a_graph_is_made(void **state)
{
    (void)state;
    static const struct {
        uint64_t factor, n_plain, n_captures, n_recaptures, n_replays;
    } steps[] = {
        {2, 1, 0, 0, 0}, {2, 1, 1, 0, 0}, {2, 1, 1, 0, 1}, {2, 1, 1, 0, 2}, {3, 2, 1, 0, 2}, {2, 2, 1, 0, 3},
        {3, 3, 1, 0, 3}, {2, 3, 1, 0, 4}, {3, 4, 1, 0, 4}, {3, 4, 2, 1, 4}, {3, 4, 2, 1, 5}, {2, 5, 2, 1, 5},
    };
    struct machine machine;
    assert_int_equal(machine_open(&machine), 0);
    const struct cuda_graphs_counts *counts = cuda_graphs_counts(machine.backend);
    const float zeros[N] = {0};
    float got[N], expected = 0;
    numbers = device_new(zeros, sizeof zeros);
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        play(machine.backend, 7, 0, steps[i].factor, 0);
        expected = expected * (float)steps[i].factor + 1;
        device_read(got, numbers, sizeof got);
        for (int k = 0; k < N; k++)
            assert_true(got[k] == expected);
        assert_int_equal(counts->n_plain, steps[i].n_plain);
        assert_int_equal(counts->n_captures, steps[i].n_captures);
        assert_int_equal(counts->n_recaptures, steps[i].n_recaptures);
        assert_int_equal(counts->n_replays, steps[i].n_replays);
        assert_int_equal(counts->n_graphs, counts->n_captures > 0);
    }
    /* places that have none: no part, too large a number, too many plays of a part */
    const uint64_t n_captures = counts->n_captures;
    for (int i = 0; i < 3; i++) {
        play(machine.backend, 0, 0, 1, 0);
        play(machine.backend, CUDA_GRAPHS_N_PARTS, 0, 1, 0);
        play(machine.backend, 7, CUDA_GRAPHS_N_PLAYS, 1, 0);
    }
    assert_int_equal(counts->n_captures, n_captures);
    play(machine.backend, CUDA_GRAPHS_N_PARTS - 1, CUDA_GRAPHS_N_PLAYS - 1, 1, 0);
    play(machine.backend, CUDA_GRAPHS_N_PARTS - 1, CUDA_GRAPHS_N_PLAYS - 1, 1, 0);
    assert_int_equal(counts->n_graphs, 2);
    cuda_graphs_forget(machine.backend);
    assert_int_equal(counts->n_graphs, 0);
    device_free(numbers);
    machine_close(&machine);
}

/* It is launched plainly, said, and not tried again; the back end is unhurt, and other lists become graphs. */
static void what_cannot_be_captured(void **state)
{
    (void)state;
    struct machine machine;
    assert_int_equal(machine_open(&machine), 0);
    const struct cuda_graphs_counts *counts = cuda_graphs_counts(machine.backend);
    const float zeros[N] = {0};
    float got[N];
    numbers = device_new(zeros, sizeof zeros);
    for (int i = 0; i < 5; i++)
        play(machine.backend, 1, 0, 1, 1);
    device_read(got, numbers, sizeof got);
    assert_true(got[0] == 5 && got[N - 1] == 5);
    assert_int_equal(counts->n_refused, 1);
    assert_int_equal(counts->n_plain, 5);
    assert_int_equal(counts->n_graphs, 0);
    assert_non_null(strstr(counts->note, "scale: "));
    assert_non_null(strstr(counts->note, "cudaErrorStreamCaptureUnsupported"));
    for (int i = 0; i < 3; i++)
        play(machine.backend, 1, 0, 1, 0);
    assert_int_equal(counts->n_replays, 1);
    assert_int_equal(backend_cuda.device->finish(machine.backend), 0);
    device_free(numbers);
    machine_close(&machine);
}

/* The n-th call of CUDA in these steps fails, n = 1, 2, 3 ... until none does: what is told is an error, or the results are right. */
static void every_call_fails_in_turn(void **state)
{
    (void)state;
    enum { N_TIMES = 5 };
    static float expected[N_TIMES][MAX_T * N], out[MAX_T * N];
    const size_t n_before = emulation_n_objects();
    uint32_t n_refused = 0;
    bool failed = true;
    for (uint64_t n = 0; failed; n++) {
        struct machine machine;
        int r = machine_open(&machine);
        assert_int_equal(r, 0);
        emulation_fail_call(n);
        bool plays = false;
        for (uint32_t i = 0; i < N_TIMES && r == 0; i++) {
            memset(out, 0, sizeof out);
            r = run_step(&machine, i, 2, out);
            if (n == 0)
                memcpy(expected[i], out, sizeof out);
            if (r == 0)
                assert_memory_equal(out, expected[i], sizeof out);
            plays = r == 0 && i == N_TIMES - 1;
        }
        if (plays)
            n_refused += cuda_graphs_counts(machine.backend)->n_refused > 0;
        failed = n == 0 || emulation_call_failed();
        machine_close(&machine);
        emulation_restore_device();
        assert_int_equal(emulation_n_objects(), n_before);
        if (!failed)
            assert_int_equal(r, 0);
    }
    assert_true(n_refused > 3); /* captures that fail cost nothing but themselves */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(graphs_give_what_launches_give),
        cmocka_unit_test(when_a_graph_is_made),
        cmocka_unit_test(what_cannot_be_captured),
        cmocka_unit_test(every_call_fails_in_turn),
    };
    return cmocka_run_group_tests(tests, make_tensors, free_tensors);
}
