/*
 * test_prefill.c - prefill attention of the cuda back end on the emulated device, with cuBLAS and without, against the reference's
 * attend: rows of both codecs in every layout, on the device, in memory of the host that it reaches and that it does not.
 */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu-worker/backend/cuda/cuda_internal.h"
#include "tests/backend/cuda-on-cpu/blas_load.h"
#include "tests/backend/cuda-on-cpu/emulation_control.h"
#include "tests/backend/fixture.h"

#define MAX_SPANS 5u

enum place { DEVICE, REACHED, NOT_REACHED };
enum order { BY_HEAD, BY_TOKEN, BY_HEAD_WITH_GAPS };

struct prefill_case {
    uint32_t n, n_kv_heads, group, head_dim;
    uint32_t spans[MAX_SPANS]; /* tokens; 0: no more */
};

static const struct prefill_case cases[] = {
    {1, 3, 1, 64, {0}},               /* nothing but itself */
    {17, 2, 3, 64, {64, 128}},        /* */
    {64, 1, 4, 128, {320, 40}},       /* */
    {256, 1, 8, 64, {64, 64}},        /* */
    {1, 2, 8, 256, {100}},            /* */
    {17, 2, 4, 80, {192, 1, 6}},      /* single tokens */
    {64, 2, 1, 80, {5, 320}},         /* */
    {256, 1, 3, 128, {0}},            /* a first chunk: causal alone */
    {64, 1, 1, 256, {64}},            /* */
    {3, 2, 2, 16, {2000, 100, 3000}}, /* pieces that begin within a span */
    {2055, 1, 1, 8, {70}},            /* positions that take more than a piece themselves */
};
#ifdef HCATTN_SANITIZED
#define STEP 3 /* memory is what these builds look at; all of it takes them minutes */
#else
#define STEP 1
#endif
#define N_CASES (sizeof cases / sizeof *cases)

static struct backend *reference, *cuda;
static const struct backend_device_ops *device_ops_of_cuda(void)
{
    return backend_cuda.device;
}

/* On a real device that is no failure. */
static void need_cublas(void)
{
#ifdef HCATTN_ON_DEVICE
    if (cuda->blas == NULL)
        skip();
#else
    assert_non_null(cuda->blas);
#endif
}

static void open_cuda(bool with_blas)
{
    char error[256];
    const struct backend_options options = {.device = BACKEND_DEVICE_BY_WORKER};
    blas_load_set_there(with_blas);
    assert_int_equal(backend_cuda.open(&options, &cuda, error, sizeof error), 0);
}

static int open_both(void **state)
{
    (void)state;
    char error[64];
    open_cuda(true);
    return backend_reference.open(&(struct backend_options){0}, &reference, error, sizeof error);
}

static int close_both(void **state)
{
    (void)state;
    reference = backend_reference.close(reference);
    cuda = backend_cuda.close(cuda);
    return 0;
}

/* ---- a call: all rows by KV head, queries, what is expected ---- */

struct call {
    struct prefill_case c;
    enum kernels_rows codec;
    uint32_t n_context, n_all;
    size_t row_bytes;
    uint8_t *rows; /* [n_kv_heads][n_all]: context, then the positions' own */
    float *q, *expected, *got;
};

static struct call new_call(const struct prefill_case *c, enum kernels_rows codec, float q_size)
{
    struct call call = {.c = *c, .codec = codec, .row_bytes = kernels_row_bytes(c->head_dim, codec)};
    for (uint32_t i = 0; i < MAX_SPANS; i++)
        call.n_context += c->spans[i];
    call.n_all = call.n_context + c->n;
    const size_t n_rows = (size_t)c->n_kv_heads * call.n_all;
    const size_t n_q = (size_t)c->n * c->n_kv_heads * c->group * c->head_dim;
    call.rows = malloc(n_rows * call.row_bytes);
    call.q = malloc(n_q * sizeof *call.q);
    call.expected = malloc(n_q * sizeof *call.expected);
    call.got = malloc(n_q * sizeof *call.got);
    float numbers[2 * 256];
    for (size_t r = 0; r < n_rows; r++) {
        fixture_fill(numbers, 2 * c->head_dim, 2.0f);
        kernels_get(KERNELS_ISA_PLAIN)
            ->encode_row(numbers, numbers + c->head_dim, c->head_dim, codec, call.rows + r * call.row_bytes);
    }
    fixture_fill(call.q, n_q, q_size);
    return call;
}

static void free_call(struct call *call)
{
    free(call->rows);
    free(call->q);
    free(call->expected);
    free(call->got);
}

static float scale_of(const struct call *call)
{
    return 1.0f / sqrtf((float)call->c.head_dim);
}

/* The reference's, position by position: all rows up to its own. */
static void expect(struct call *call)
{
    const struct prefill_case *c = &call->c;
    const uint32_t width = KERNELS_PARTIAL_FLOATS(c->head_dim), n_heads = c->n_kv_heads * c->group;
    struct backend_piece *pieces = calloc(call->n_all / 64 + 1, sizeof *pieces);
    float *partials = calloc((size_t)c->group * width, sizeof *partials);
    for (uint32_t position = 0; position < c->n; position++) {
        for (uint32_t head = 0; head < c->n_kv_heads; head++) {
            const uint32_t n_rows = call->n_context + position + 1, n_pieces = (n_rows + 63) / 64;
            for (uint32_t i = 0; i < n_pieces; i++)
                pieces[i] = (struct backend_piece){
                    .rows = call->rows + ((size_t)head * call->n_all + (size_t)i * 64) * call->row_bytes,
                    .mask = i == n_pieces - 1 && n_rows % 64 ? (UINT64_C(1) << n_rows % 64) - 1 : ~UINT64_C(0)};
            const size_t first = ((size_t)position * n_heads + (size_t)head * c->group) * c->head_dim;
            const struct backend_attend item = {.q = call->q + first,
                                                .partials = partials,
                                                .pieces = pieces,
                                                .n_pieces = n_pieces,
                                                .n_queries = c->group,
                                                .group = c->group,
                                                .causal_piece = n_pieces,
                                                .is_first = true};
            backend_reference.attend(reference, &item, 1, c->head_dim, call->codec, scale_of(call));
            for (uint32_t g = 0; g < c->group; g++)
                for (uint32_t d = 0; d < c->head_dim; d++)
                    call->expected[first + g * c->head_dim + d] = partials[g * width + 2 + d] / partials[g * width + 1];
        }
    }
    free(pieces);
    free(partials);
}

/* Tokens first .. first + n - 1 in one of the orders, in memory of the heap; gaps are no numbers. */
static uint8_t *lay_out(const struct call *call, uint32_t first, uint32_t n, enum order order,
                        struct backend_span *ret_span, size_t *ret_bytes)
{
    const uint32_t n_heads = call->c.n_kv_heads;
    const size_t gap = order == BY_HEAD_WITH_GAPS ? 3 : 0; /* rows behind those of a head */
    *ret_span = (struct backend_span){.n_tokens = n,
                                      .head_bytes = order == BY_TOKEN ? call->row_bytes : (n + gap) * call->row_bytes,
                                      .token_bytes = order == BY_TOKEN ? n_heads * call->row_bytes : call->row_bytes};
    *ret_bytes = n_heads * (n + gap) * call->row_bytes;
    uint8_t *memory = malloc(*ret_bytes);
    memset(memory, 0xff, *ret_bytes);
    for (uint32_t head = 0; head < n_heads; head++)
        for (uint32_t t = 0; t < n; t++)
            memcpy(memory + head * ret_span->head_bytes + t * ret_span->token_bytes,
                   call->rows + ((size_t)head * call->n_all + first + t) * call->row_bytes, call->row_bytes);
    return memory;
}

/* A span where it shall be. */
struct given {
    struct backend_span span;
    enum place place;
    void *memory;
};

static struct given place_span(const struct call *call, uint32_t first, uint32_t n, enum order order, enum place place)
{
    struct given given = {.place = place};
    size_t n_bytes;
    uint8_t *memory = lay_out(call, first, n, order, &given.span, &n_bytes);
    if (place == NOT_REACHED) {
        given.memory = memory;
    } else if (place == REACHED) {
        given.memory = device_ops_of_cuda()->host_alloc(cuda, n_bytes);
        memcpy(given.memory, memory, n_bytes);
    } else {
        given.memory = backend_cuda.alloc(cuda, n_bytes);
        device_ops_of_cuda()->to_device(cuda, given.memory, memory, n_bytes);
    }
    if (place != NOT_REACHED)
        free(memory);
    given.span.rows = given.memory;
    return given;
}

static void forget_span(struct given *given)
{
    if (given->place == NOT_REACHED)
        free(given->memory);
    else if (given->place == REACHED)
        device_ops_of_cuda()->host_free(cuda, given->memory);
    else
        backend_cuda.free(cuda, given->memory);
}

/* call->got; `mix` chooses layouts, places, and when the own rows come. Host memory of a span is overwritten as soon as it may be.
 * The first error, of marks or of the end. */
static int run_call(struct call *call, uint32_t mix)
{
    const struct prefill_case *c = &call->c;
    const struct backend_device_ops *ops = device_ops_of_cuda();
    const size_t q_bytes = (size_t)c->n * c->n_kv_heads * c->group * c->head_dim * sizeof(float);
    float *q = backend_cuda.alloc(cuda, q_bytes), *out = backend_cuda.alloc(cuda, q_bytes);
    struct given own = place_span(call, call->n_context, c->n, mix % 2 ? BY_TOKEN : BY_HEAD, DEVICE);
    const struct backend_prefill prefill = {
        q, out, c->n, c->n_kv_heads * c->group, c->n_kv_heads, c->head_dim, call->codec, scale_of(call)};
    ops->to_device(cuda, q, call->q, q_bytes);
    ops->prefill_begin(cuda, &prefill);
    if (mix % 3 == 0)
        ops->prefill_rows(cuda, &own.span, 1, false, true);
    uint32_t first = 0;
    int error = 0;
    for (uint32_t i = 0; i < MAX_SPANS && c->spans[i] > 0; first += c->spans[i++]) {
        const enum place place = (enum place)((mix + i) % 3);
        struct given given = place_span(call, first, c->spans[i], (enum order)((mix / 3 + i) % 3), place);
        uint64_t mark = ops->prefill_rows(cuda, &given.span, 1, place != DEVICE, false);
        int r = ops->wait(cuda, mark);
        error = error < 0 ? error : r;
        if (place != DEVICE)
            memset(given.memory, 0xff, c->spans[i] * call->row_bytes);
        forget_span(&given);
    }
    if (mix % 3 != 0)
        ops->prefill_rows(cuda, &own.span, 1, false, true);
    ops->prefill_end(cuda);
    ops->to_host(cuda, call->got, out, q_bytes);
    int r = ops->finish(cuda);
    error = error < 0 ? error : r;
    forget_span(&own);
    backend_cuda.free(cuda, q);
    backend_cuda.free(cuda, out);
    return error;
}

/* Values are up to 2. With cuBLAS: queries, and weights, as halves; scores are about 1 in size. */
static void check(const struct call *call, bool with_blas, const char *what)
{
    const size_t n = (size_t)call->c.n * call->c.n_kv_heads * call->c.group * call->c.head_dim;
    double errors = 0;
    for (size_t i = 0; i < n; i++) {
        const double error = (double)call->got[i] - (double)call->expected[i];
        errors += error * error;
    }
    const double noise = sqrt(errors / (double)n), limit = with_blas ? 4e-4 : 1e-5;
    if (!(noise <= limit))
        fail_msg("%s: error %.3g", what, noise);
    fixture_near(what, "cuda", call->got, call->expected, n, with_blas ? 2e-3 : 1e-4, 0);
}

static void all_cases(bool with_blas)
{
    for (size_t k = 0; k < 2 * N_CASES; k += STEP) {
        /* without cuBLAS, and of large ones, a codec each and one run */
        const bool once = !with_blas || cases[k / 2].n * cases[k / 2].group > 2000;
        if (once && k % 2 != k / 2 % 2)
            continue;
        char what[64];
        struct call call = new_call(&cases[k / 2], k % 2 ? KERNELS_ROWS_Q8_0 : KERNELS_ROWS_F16, 3.0f);
        snprintf(what, sizeof what, "case %zu, %s", k / 2, k % 2 ? "q8_0" : "f16");
        expect(&call);
        for (uint32_t i = once ? 1 : 0; i < 2; i++) {
            emulation_set_seed(i == 0 ? 0 : k + 1);
            cuda->queue.n_threads = i == 0 ? 0 : k % 2 ? 96 : 32;
            assert_int_equal(run_call(&call, (uint32_t)k + 5 * i), 0);
            check(&call, with_blas, what);
        }
        free_call(&call);
    }
    cuda->queue.n_threads = 0;
}

static void with_cublas(void **state)
{
    (void)state;
    need_cublas();
    all_cases(true);
}

static void without_cublas(void **state)
{
    (void)state;
    backend_cuda.close(cuda);
    open_cuda(false);
    all_cases(false);
    backend_cuda.close(cuda);
    open_cuda(true);
}

/* Queries far out of the range of halves, and none at all: tokens count alike. */
static void tiny_queries(void **state)
{
    (void)state;
    need_cublas();
    static const float sizes[] = {1e-30f, 0.0f};
    for (uint32_t i = 0; i < 2; i++) {
        struct call call = new_call(&cases[1], KERNELS_ROWS_F16, sizes[i]);
        expect(&call);
        assert_int_equal(run_call(&call, i), 0);
        check(&call, true, "tiny queries");
        free_call(&call);
    }
}

/* A key that is no number shows in the positions that see it. */
static void a_nan_in_a_key(void **state)
{
    (void)state;
    static const struct prefill_case c = {9, 1, 2, 64, {64}};
    const uint16_t nan = 0x7e00;
    struct call call = new_call(&c, KERNELS_ROWS_F16, 1.0f);
    memcpy(call.rows + (64 + 5) * call.row_bytes + 20, &nan, sizeof nan);
    assert_int_equal(run_call(&call, 0), 0);
    for (uint32_t i = 0; i < c.n * c.group * c.head_dim; i++)
        assert_int_equal(isfinite(call.got[i]) != 0, i / (c.group * c.head_dim) < 5);
    free_call(&call);
}

/* Numbers of q8_0 that halves do not have become the largest of halves, not infinity. */
static void numbers_beyond_halves(void **state)
{
    (void)state;
    need_cublas();
    static const struct prefill_case c = {1, 1, 1, 32, {0}};
    struct call call = new_call(&c, KERNELS_ROWS_Q8_0, 1.0f);
    float k[32] = {0}, v[32] = {-1e6f, 1e6f, 1e5f};
    kernels_get(KERNELS_ISA_PLAIN)->encode_row(k, v, 32, KERNELS_ROWS_Q8_0, call.rows);
    assert_int_equal(run_call(&call, 0), 0);
    assert_true(call.got[0] == -65504.0f && call.got[1] == 65504.0f && call.got[2] == 65504.0f && call.got[3] == 0.0f);
    free_call(&call);
}

/* A refusal is told once, by the mark or at the end; what follows until the end does nothing, and then all goes on. */
static void what_cublas_refuses(void **state)
{
    (void)state;
    need_cublas();
    struct call call = new_call(&cases[9], KERNELS_ROWS_F16, 3.0f); /* pieces become whole before the end */
    expect(&call);
    for (int n = 0; n < 3; n++) {
        blas_load_refuse(n);
        assert_int_equal(run_call(&call, 0), -EIO);
        assert_string_equal(backend_cuda.device->error(cuda),
                            "cublasGemmStridedBatchedEx: CUBLAS_STATUS_NOT_SUPPORTED");
        blas_load_refuse(-1);
        assert_int_equal(run_call(&call, 0), 0);
        check(&call, true, "after a refusal");
    }
    free_call(&call);
}

/* Too little memory for works is told as that. */
static void no_memory(void **state)
{
    (void)state;
    struct call call = new_call(&cases[3], KERNELS_ROWS_F16, 3.0f);
    backend_cuda.close(cuda);
    open_cuda(true);
    emulation_set_device_bytes(backend_cuda.bytes(cuda) + ((size_t)8 << 20));
    assert_int_equal(run_call(&call, 0), -ENOMEM);
    emulation_set_device_bytes((size_t)8 << 30);
    expect(&call);
    assert_int_equal(run_call(&call, 0), 0);
    check(&call, true, "after no memory");
    free_call(&call);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(with_cublas),
        cmocka_unit_test(without_cublas),
        cmocka_unit_test(tiny_queries),
        cmocka_unit_test(a_nan_in_a_key),
        cmocka_unit_test(numbers_beyond_halves),
        cmocka_unit_test(what_cublas_refuses),
        cmocka_unit_test(no_memory),
    };
    return cmocka_run_group_tests(tests, open_both, close_both);
}
