/* test_step_device.c - prefill rows on a device whose memory is not the host's, against rows read from the segments. */
#include "tests/unit/gpu-worker/cmocka_all.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/fetches.h"
#include "gpu-worker/step.h"
#include "tests/unit/gpu-worker/fake_stores.h"

enum { N_HEADS = 4, N_KV = 2, DIM = 16, MAX_ROWS = 96, N_BLOCKS = 50, LAYER = 1, MAX_SPANS = 400 };

/*
 * A device in plain loops. Rows of the host are read as late as the contract allows: when somebody waits for them, hides their
 * memory, or ends; so a slot that is used again too early gives other numbers.
 */
struct fake_device {
    struct backend_prefill prefill;
    bool has_begun;
    struct {
        struct backend_span span;
        bool is_causal;
    } spans[MAX_SPANS];
    uint32_t n_spans, n_read;
    uint64_t n_tokens, n_ends;
    uint32_t most_under_way;
    double *partials; /* [n][n_heads][2 + head_dim] */
    int error;        /* of the next wait() */
};
static struct fake_device device; /* the back end is another's: calls do not bring it */

static void read_span(const struct backend_span *span, bool is_causal)
{
    const struct backend_prefill *p = &device.prefill;
    const struct kernels *kernels = kernels_get(KERNELS_ISA_PLAIN);
    const uint32_t d = p->head_dim, group = p->n_heads / p->n_kv_heads;
    for (uint32_t i = 0; i < p->n * p->n_heads; i++) {
        const uint32_t position = i / p->n_heads, head = i % p->n_heads;
        double *partial = device.partials + (size_t)i * (2 + d);
        for (uint32_t token = 0; token < span->n_tokens && !(is_causal && token > position); token++) {
            const uint8_t *row =
                (const uint8_t *)span->rows + head / group * span->head_bytes + token * span->token_bytes;
            float kv[2 * DIM];
            kernels->block_sums(row, 1, d, p->codec, kv); /* of one row: itself */
            double score = 0;
            for (uint32_t k = 0; k < d; k++)
                score += (double)p->q[(size_t)i * d + k] * kv[k];
            double weight = exp(score * p->scale); /* small numbers: no maximum is needed */
            partial[1] += weight;
            for (uint32_t k = 0; k < d; k++)
                partial[2 + k] += weight * kv[d + k];
        }
    }
    device.n_tokens += span->n_tokens;
}

static void read_until(uint32_t n)
{
    for (; device.n_read < n; device.n_read++)
        read_span(&device.spans[device.n_read].span, device.spans[device.n_read].is_causal);
}

static void prefill_begin(struct backend *backend, const struct backend_prefill *prefill)
{
    (void)backend;
    assert_false(device.has_begun);
    device.has_begun = true;
    device.prefill = *prefill;
    device.n_spans = device.n_read = 0;
    device.n_tokens = 0;
    device.partials = calloc((size_t)prefill->n * prefill->n_heads, (2 + prefill->head_dim) * sizeof(double));
    assert_non_null(device.partials);
}

static uint64_t prefill_rows(struct backend *backend, const struct backend_span *spans, uint32_t n_spans, bool on_host,
                             bool is_causal)
{
    (void)backend;
    assert_true(device.has_begun);
    assert_true(device.n_spans + n_spans <= MAX_SPANS);
    for (uint32_t i = 0; i < n_spans; i++) {
        device.spans[device.n_spans].is_causal = is_causal;
        device.spans[device.n_spans++].span = spans[i];
    }
    if (!on_host)
        read_until(device.n_spans);
    uint32_t under_way = device.n_spans - device.n_read;
    device.most_under_way = under_way > device.most_under_way ? under_way : device.most_under_way;
    return device.n_spans;
}

static void prefill_end(struct backend *backend)
{
    (void)backend;
    assert_true(device.has_begun);
    read_until(device.n_spans);
    device.has_begun = false;
    device.n_ends++;
    const struct backend_prefill *p = &device.prefill;
    for (uint32_t i = 0; i < p->n * p->n_heads; i++)
        for (uint32_t k = 0; k < p->head_dim; k++) {
            const double *partial = device.partials + (size_t)i * (2 + p->head_dim);
            p->out[(size_t)i * p->head_dim + k] = (float)(partial[2 + k] / partial[1]);
        }
    free(device.partials);
}

static int wait_mark(struct backend *backend, uint64_t mark)
{
    (void)backend;
    int error = device.error;
    device.error = 0;
    read_until((uint32_t)mark);
    return error;
}

static const struct backend_device_ops device_ops = {
    .prefill_begin = prefill_begin, .prefill_rows = prefill_rows, .prefill_end = prefill_end, .wait = wait_mark};

static size_t show(void *context, void *memory, size_t n_bytes)
{
    (void)context;
    (void)memory;
    return n_bytes;
}

static void hide(void *context, void *memory, size_t n_bytes)
{
    (void)context;
    (void)memory;
    (void)n_bytes;
    if (device.has_begun)
        read_until(device.n_spans);
}

/* ---- a step ---- */

struct fixture {
    struct fake_stores fakes;
    struct backend_ops ops;
    struct network network;
    struct step *step;
    struct session session;
    struct run runs[2]; /* of the same session, which nobody minds here */
    float *expected;
};

static float uniform(void)
{
    return (float)random() / (float)RAND_MAX * 2 - 1;
}

static void start(struct fixture *fixture, enum row_codec codec, uint32_t n_stores)
{
    const struct row_shape shape = {.n_layers = 2, .n_kv_heads = N_KV, .head_dim = DIM, .codec = codec};
    const struct stores_device shown = {.show = show, .hide = hide};
    const uint64_t reply = LAYOUT_PAGE_BYTES + 3 * N_KV * layout_head_rows_bytes(&shape); /* three blocks */
    device = (struct fake_device){0};
    fake_stores_start(&fixture->fakes, &shape, n_stores, N_BLOCKS, 2 * LAYOUT_PAGE_BYTES,
                      (uint32_t)(reply + LAYOUT_PAGE_BYTES - 1) / LAYOUT_PAGE_BYTES * LAYOUT_PAGE_BYTES, &shown);
    assert_int_equal(fetches_most_blocks(&fixture->fakes.stores, 1), codec == ROW_CODEC_F16 ? 3 : 4);
    fixture->ops = backend_reference;
    fixture->network = (struct network){.ops = &fixture->ops,
                                        .shape = {.n_layers = 2,
                                                  .n_embd = 8,
                                                  .n_heads = N_HEADS,
                                                  .n_kv_heads = N_KV,
                                                  .head_dim = DIM,
                                                  .n_ff = 8,
                                                  .n_vocab = 8}};
    const struct backend_options options = {0};
    char error[128];
    assert_int_equal(fixture->ops.open(&options, &fixture->network.backend, error, sizeof(error)), 0);
    const struct step_limits limits = {.max_rows = MAX_ROWS, .max_decode = 1, .n_ctx = 4096, .max_halves = 1};
    assert_int_equal(step_new(&fixture->network, kernels_get(KERNELS_ISA_PLAIN), &fixture->fakes.stores,
                              &fixture->fakes.link, NULL, TRANSPORT_ROUTED, &limits, &fixture->step),
                     0);
    fixture->session = (struct session){.id = FAKE_STORES_SESSION, .exact_tokens = 512};
    for (uint32_t i = 0; i < 2; i++)
        fixture->runs[i] = (struct run){.request = &fixture->fakes.request, .session = &fixture->session};
    fixture->expected = calloc((size_t)MAX_ROWS * N_HEADS, DIM * sizeof(float));
}

static void stop(struct fixture *fixture)
{
    fixture->ops.device = NULL; /* whose memory it never was */
    step_free(fixture->step);
    fake_stores_stop(&fixture->fakes);
    fixture->ops.close(fixture->network.backend);
    free(fixture->expected);
}

/* n rows of a run behind those that there are: their queries, and their own rows as a step has them. */
static void add_rows(struct fixture *fixture, struct run *run, uint32_t position, uint32_t n)
{
    struct step *step = fixture->step;
    const size_t row = layout_row_bytes(&step->shape);
    for (uint32_t i = 0; i < n; i++) {
        struct step_row *to = &step->rows[step->n_rows];
        *to = (struct step_row){.run = run, .position = position + i};
        for (uint32_t k = 0; k < N_HEADS * DIM; k++)
            step->q[(size_t)step->n_rows * N_HEADS * DIM + k] = uniform();
        for (uint32_t head = 0; head < N_KV; head++)
            memcpy(step->row_bytes + ((size_t)step->n_rows * N_KV + head) * row,
                   fake_stores_row(&fixture->fakes, position + i, LAYER, head), row);
        step->n_rows++;
    }
    step->halves[0] = (struct step_half){.end = step->n_rows, .calls = step->halves[0].calls};
}

/* What it should be: from the segments, then; and what it is: from the device. */
static int attend(struct fixture *fixture)
{
    struct step *step = fixture->step;
    const size_t n_bytes = (size_t)step->n_rows * N_HEADS * DIM * sizeof(float);
    assert_int_equal(step_prefill_attention(step, &step->halves[0], LAYER), 0);
    memcpy(fixture->expected, step->attention, n_bytes);
    memset(step->attention, 0xff, n_bytes);
    fixture->ops.device = &device_ops;
    int r = step_prefill_attention(step, &step->halves[0], LAYER);
    fixture->ops.device = NULL;
    assert_false(device.has_begun);
    assert_int_equal(fake_stores_n_slots(&fixture->fakes, SLOT_BUSY), 0);
    return r;
}

static void is_right(const struct fixture *fixture, uint32_t first, uint32_t end)
{
    for (size_t i = (size_t)first * N_HEADS * DIM; i < (size_t)end * N_HEADS * DIM; i++)
        assert_true(fabsf(fixture->step->attention[i] - fixture->expected[i]) < 2e-5f);
}

/* Positions before which there are none, some tokens, whole blocks, whole blocks and some; one store and several. */
static void as_read_from_the_segments(void **state)
{
    (void)state;
    static const struct {
        enum row_codec codec;
        uint32_t n_stores, position, n;
    } cases[] = {
        {ROW_CODEC_F16, 3, 0, 70},     {ROW_CODEC_F16, 3, 5, 1},     {ROW_CODEC_Q8_0, 1, 64, 96},
        {ROW_CODEC_Q8_0, 12, 65, 30},  {ROW_CODEC_F16, 3, 3071, 96}, {ROW_CODEC_F16, 1, 1600, 33},
        {ROW_CODEC_Q8_0, 5, 2999, 64},
    };
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        struct fixture fixture;
        start(&fixture, cases[c].codec, cases[c].n_stores);
        add_rows(&fixture, &fixture.runs[0], cases[c].position, cases[c].n);
        assert_int_equal(attend(&fixture), 0);
        is_right(&fixture, 0, cases[c].n);
        assert_int_equal(device.n_tokens, cases[c].position + cases[c].n);
        assert_true(device.most_under_way <= 3);
        assert_true(cases[c].position < 1000 || device.most_under_way > 1);
        assert_int_equal(fake_stores_n_slots(&fixture.fakes, SLOT_QUARANTINED), 0);
        stop(&fixture);
    }
}

/* What the device is given does not depend on which store is slow: the bits are the same. */
static void in_the_same_order(void **state)
{
    (void)state;
    float first[MAX_ROWS * N_HEADS * DIM];
    for (uint32_t slow = 0; slow < 3; slow++) {
        struct fixture fixture;
        srandom(7);
        start(&fixture, ROW_CODEC_F16, 3);
        fixture.fakes.all[slow].slow_us = 3000;
        add_rows(&fixture, &fixture.runs[0], 3000, 20);
        assert_int_equal(attend(&fixture), 0);
        if (slow == 0)
            memcpy(first, fixture.step->attention, 20 * N_HEADS * DIM * sizeof(float));
        assert_memory_equal(first, fixture.step->attention, 20 * N_HEADS * DIM * sizeof(float));
        stop(&fixture);
    }
}

static void asks_again(void **state)
{
    (void)state;
    struct fixture fixture;
    start(&fixture, ROW_CODEC_F16, 3);
    fixture.fakes.all[1].n_unanswered = 3;
    fixture.fakes.link.request_timeout_us = 100 * 1000;
    add_rows(&fixture, &fixture.runs[0], 3000, 20);
    assert_int_equal(attend(&fixture), 0);
    is_right(&fixture, 0, 20);
    assert_int_equal(fake_stores_n_slots(&fixture.fakes, SLOT_QUARANTINED), 3);
    stop(&fixture);
}

/* Copies were under way, answers waited, others were asked for: the next life is asked again. */
static void a_store_comes_back(void **state)
{
    (void)state;
    for (uint32_t n = 1; n < 6; n++) {
        struct fixture fixture;
        start(&fixture, ROW_CODEC_F16, 2);
        fixture.fakes.all[n % 2].dies_after = n;
        fixture.fakes.all[1 - n % 2].dies_after = 6 - n;
        add_rows(&fixture, &fixture.runs[0], 3100, 40);
        assert_int_equal(attend(&fixture), 0);
        is_right(&fixture, 0, 40);
        assert_int_equal(device.n_tokens, 3140);
        assert_int_equal(fixture.fakes.n_lives, 4);
        stop(&fixture);
    }
}

static void does_not_come_back(void **state)
{
    (void)state;
    struct fixture fixture;
    start(&fixture, ROW_CODEC_F16, 3);
    fixture.fakes.all[2].n_unanswered = UINT32_MAX;
    fixture.fakes.link.recovery_timeout_us = 200 * 1000;
    add_rows(&fixture, &fixture.runs[0], 3000, 20);
    assert_int_equal(attend(&fixture), -ETIMEDOUT);
    assert_int_equal(fixture.runs[0].error, 0); /* the step says so, and fails it */
    stop(&fixture);
}

static void a_refusal_fails_its_run_alone(void **state)
{
    (void)state;
    struct fixture fixture;
    start(&fixture, ROW_CODEC_F16, 3);
    struct run_request other = fixture.fakes.request;
    add_rows(&fixture, &fixture.runs[0], 1000, 20);
    add_rows(&fixture, &fixture.runs[1], 1500, 20);
    struct step_half *half = &fixture.step->halves[0];
    assert_int_equal(step_prefill_attention(fixture.step, half, LAYER), 0); /* of both */
    memcpy(fixture.expected, fixture.step->attention, 40 * N_HEADS * DIM * sizeof(float));
    other.session = 0x78;
    fixture.runs[0].request = &other;
    fixture.ops.device = &device_ops;
    assert_int_equal(step_prefill_attention(fixture.step, half, LAYER), 0);
    fixture.ops.device = NULL;
    assert_int_equal(fixture.runs[0].error, -ESTALE);
    assert_non_null(strstr(fixture.runs[0].sentence, "refused a fetch"));
    assert_int_equal(fixture.runs[1].error, 0);
    assert_int_equal(fake_stores_n_slots(&fixture.fakes, SLOT_BUSY), 0);
    is_right(&fixture, 20, 40);
    assert_int_equal(device.n_ends, 2);
    stop(&fixture);
}

static uint32_t n_between;

static void cancel(void *context)
{
    struct run *run = context;
    if (++n_between == 4)
        run_fail(run, -ECANCELED, "cancelled");
}

static void a_cancelled_run_asks_no_more(void **state)
{
    (void)state;
    struct fixture fixture;
    start(&fixture, ROW_CODEC_F16, 1);
    fixture.fakes.all[0].slow_us = 2000;
    n_between = 0;
    fixture.step->between_layers = cancel;
    fixture.step->engine = &fixture.runs[0];
    add_rows(&fixture, &fixture.runs[0], 3000, 20);
    assert_int_equal(attend(&fixture), 0);
    assert_int_equal(fixture.runs[0].error, -ECANCELED);
    assert_int_equal(n_between, 4);
    assert_true(atomic_load(&fixture.fakes.all[0].n_served) < 10); /* of 16 */
    assert_int_equal(device.n_ends, 1);
    stop(&fixture);
}

static void the_devices_error(void **state)
{
    (void)state;
    struct fixture fixture;
    start(&fixture, ROW_CODEC_F16, 3);
    device.error = -ENODEV;
    add_rows(&fixture, &fixture.runs[0], 3000, 20);
    assert_int_equal(attend(&fixture), -ENODEV);
    stop(&fixture);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_read_from_the_segments),
        cmocka_unit_test(in_the_same_order),
        cmocka_unit_test(asks_again),
        cmocka_unit_test(a_store_comes_back),
        cmocka_unit_test(does_not_come_back),
        cmocka_unit_test(a_refusal_fails_its_run_alone),
        cmocka_unit_test(a_cancelled_run_asks_no_more),
        cmocka_unit_test(the_devices_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
