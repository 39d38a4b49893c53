/* test_eval.c - evaluations of policies on a tiny model: what rows say, in what order they come, and how requests are refused. */
#include "tests/unit/eval/worker_fixture.h"

#include <errno.h>
#include <math.h>

#include "gpu-worker/eval/eval.h"
#include "gpu-worker/keys/quantizers.h"
#include "gpu-worker/train/train.h"
#include "proto/policy.h"

#define TINY "--layers 2 --heads 6 --kv-heads 2 --embd 192 --context 1024"

enum { N_LAYERS = 2, N_KV_HEADS = 2, HEAD_DIM = 32, N_HEADS = N_LAYERS * N_KV_HEADS, ROW_BYTES = 4 * HEAD_DIM };
enum { CONTEXT = 512, TAIL = 128, MAX_ROWS = 24, MAX_TEXT = 4096 };

static struct worker_fixture *open_tiny(void)
{
    struct worker_fixture *fixture = worker_fixture_new(TINY, "cpu", ROW_CODEC_F16);
    const struct model_shape *shape = &fixture->model->shape;
    const struct row_shape rows = {shape->n_layers, shape->n_kv_heads, shape->head_dim, ROW_CODEC_F16};
    assert_int_equal(shape->head_dim, HEAD_DIM);
    assert_int_equal(quantizers_new(&rows, fixture->model->hash, NULL, &fixture->tools.quantizers), 0);
    return fixture;
}

static void close_tiny(struct worker_fixture *fixture)
{
    quantizers_free(fixture->tools.quantizers);
    worker_fixture_free(fixture);
}

/* A text of n letters that no merge joins, with spaces and points. */
static char *make_text(uint32_t n, uint32_t seed)
{
    char *text = calloc(1, n + 1);
    assert_non_null(text);
    for (uint32_t i = 0; i < n; i++) {
        seed = seed * 1664525 + 1013904223;
        text[i] = "BCDFGHJKLMNPQRSTVWXZ .,"[(seed >> 8) % 23];
    }
    return text;
}

struct row {
    struct eval_row row;
    char text[16], preset[64], meaning[96];
    float kept_by_head[N_HEADS];
    struct method_attention attention[N_LAYERS];
};

struct evaluation {
    int result;
    char sentence[JOB_SENTENCE_SIZE];
    uint32_t n_rows;
    struct row rows[MAX_ROWS];
};

static struct eval_request make_request(uint32_t n_texts, const uint32_t *lengths, const char *const *presets)
{
    struct eval_request request = {.n_texts = n_texts, .context = CONTEXT, .tail = TAIL};
    request.texts = calloc(n_texts, sizeof(*request.texts));
    for (uint32_t i = 0; i < n_texts; i++) {
        char name[] = "text 0";
        name[5] = (char)('0' + i);
        request.texts[i] = (struct job_text){strdup(name), make_text(lengths[i], i + 1)};
    }
    while (presets[request.n_presets] != NULL)
        request.n_presets++;
    request.presets = calloc(request.n_presets, sizeof(char *));
    for (uint32_t i = 0; i < request.n_presets; i++)
        request.presets[i] = strdup(presets[i]);
    return request;
}

static void take_row(struct evaluation *evaluation, const struct eval_row *row)
{
    assert_true(evaluation->n_rows < MAX_ROWS);
    struct row *to = &evaluation->rows[evaluation->n_rows++];
    to->row = *row;
    assert_int_equal(row->n_layers, N_LAYERS);
    assert_int_equal(row->n_kv_heads, N_KV_HEADS);
    snprintf(to->text, sizeof(to->text), "%s", row->text);
    snprintf(to->preset, sizeof(to->preset), "%s", row->preset);
    snprintf(to->meaning, sizeof(to->meaning), "%s", row->meaning);
    memcpy(to->kept_by_head, row->kept_by_head, sizeof(to->kept_by_head));
    if (row->attention != NULL)
        memcpy(to->attention, row->attention, sizeof(to->attention));
}

static struct evaluation run(const struct worker_fixture *fixture, struct eval_request request)
{
    struct evaluation evaluation = {.result = -1};
    struct job job = {0};
    evaluation.result = eval_job_new(&request, &job, evaluation.sentence);
    if (evaluation.result != 0)
        return evaluation;
    double done = 0;
    for (int r = 1; r > 0; evaluation.result = r) {
        struct job_report report = {0};
        r = job.ops->advance(job.state, &fixture->tools, &report, evaluation.sentence);
        if (r < 0)
            continue;
        assert_non_null(report.phase);
        assert_true(strlen(report.phase) > 0);
        assert_true(report.done >= done && report.done <= 1);
        done = report.done;
        if (report.row != NULL)
            take_row(&evaluation, report.row);
    }
    assert_true(evaluation.result < 0 || done >= 1);
    assert_true(strlen(evaluation.sentence) > 0);
    job.ops->free(job.state);
    return evaluation;
}

static struct evaluation evaluate(const struct worker_fixture *fixture, const char *const *presets)
{
    struct evaluation evaluation = run(fixture, make_request(1, (const uint32_t[]){MAX_TEXT}, presets));
    if (evaluation.result != 0)
        fail_msg("%s", evaluation.sentence);
    return evaluation;
}

static bool is_near(double a, double b)
{
    return fabs(a - b) <= 1e-6 * fmax(fabs(a), fabs(b));
}

/* Old tokens of a position, in the mean over the tail. */
static double mean_old(void)
{
    double sum = 0;
    for (uint32_t position = CONTEXT - TAIL; position < CONTEXT; position++)
        sum += (position / 64 - 1) * 64 - 4;
    return sum / TAIL;
}

/* ---- what a row says ---- */

static void test_full_is_full(void **state)
{
    (void)state;
    struct worker_fixture *fixture = open_tiny();
    struct evaluation got = evaluate(fixture, (const char *const[]){"full", NULL});
    const struct eval_row *row = &got.rows[0].row;
    assert_int_equal(got.n_rows, 1);
    assert_true(row->kld_mean < 1e-6 && row->kld_p99 < 1e-5);
    assert_true(row->top1 >= 1);
    assert_true(fabs(row->perplexity / row->full_perplexity - 1) < 1e-3 && row->full_perplexity > 1);
    assert_true(is_near(row->kept, 1));
    assert_true(row->device_bytes_fraction <= 0 && row->device_bytes_measured <= 0 && row->table_bytes <= 0);
    assert_true(is_near(row->store_bytes, mean_old() * N_HEADS * ROW_BYTES));
    assert_int_equal(row->context, CONTEXT);
    assert_int_equal(row->tail, TAIL);
    assert_false(row->baseline);
    assert_null(row->attention);
    close_tiny(fixture);
}

static void test_less_is_further_away(void **state)
{
    (void)state;
    struct worker_fixture *fixture = open_tiny();
    struct evaluation got =
        evaluate(fixture, (const char *const[]){"f16,deviation=0.001", "rot4,deviation=0.02", "rot2,deviation=0.1",
                                                "rot2,deviation=0.1,notail", "rot2,mass=0.3,weights,notail", NULL});
    for (uint32_t i = 0; i < got.n_rows; i++) {
        const struct eval_row *row = &got.rows[i].row;
        print_message("%-32s KLD %.3g (%.3g), top-1 %.3f, kept %.3f\n", got.rows[i].preset, row->kld_mean, row->kld_p99,
                      row->top1, row->kept);
        assert_true(row->kld_mean > 0 && row->kld_p99 >= row->kld_mean && row->kld_mean < 1);
        assert_true(row->top1 > 0 && row->top1 <= 1);
        assert_true(row->kept > 0 && row->kept < 1);
        double kept = 0;
        for (uint32_t head = 0; head < N_HEADS; head++) {
            const double of_head = (double)got.rows[i].kept_by_head[head];
            assert_true(of_head >= 0 && of_head <= 1);
            kept += of_head / N_HEADS;
        }
        assert_true(is_near(kept, row->kept));
        assert_true(is_near(row->store_bytes, row->kept * mean_old() * N_HEADS * ROW_BYTES));
        assert_true(is_near(row->full_perplexity, got.rows[0].row.full_perplexity));
        if (i > 0)
            assert_true(row->kld_mean > 2 * got.rows[i - 1].row.kld_mean);
    }
    assert_int_equal(got.n_rows, 5);
    close_tiny(fixture);
}

/* Where everything is selected, neither scores nor the way of summing matter. */
static void test_everything_selected(void **state)
{
    (void)state;
    struct worker_fixture *fixture = open_tiny();
    struct evaluation got =
        evaluate(fixture, (const char *const[]){"rot2,deviation=0,notail", "f16,deviation=0,weights,notail",
                                                "f16,mass=1", NULL});
    assert_int_equal(got.n_rows, 3);
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(got.rows[i].row.kept > 0.99);
        assert_true(got.rows[i].row.kld_mean < 1e-6);
    }
    close_tiny(fixture);
}

static void test_accounts(void **state)
{
    (void)state;
    struct worker_fixture *fixture = open_tiny();
    struct evaluation got = evaluate(fixture, (const char *const[]){"f16,deviation=0.02", "rot4,deviation=0.02", NULL});
    const double tile = 64 * HEAD_DIM * 2 + 4, f16_bytes = 2 * 2 * HEAD_DIM; /* keys and a scale; K and V of a token */
    const struct eval_row *row = &got.rows[0].row;
    assert_true(is_near(row->device_bytes_fraction, tile / 64 / f16_bytes));
    /* six blocks are old for the last position; memory comes for sixteen */
    assert_true(is_near(row->device_bytes_measured, tile * 16 / (6 * 64) / f16_bytes));
    assert_true(is_near(row->exact_bytes, N_HEADS * (4 + 128) * ROW_BYTES));
    assert_true(row->table_bytes <= 0);
    assert_true(got.rows[1].row.device_bytes_fraction < row->device_bytes_fraction / 3);
    assert_true(got.rows[1].row.device_bytes_measured > got.rows[1].row.device_bytes_fraction);
    close_tiny(fixture);
}

static void test_attention(void **state)
{
    (void)state;
    struct worker_fixture *fixture = open_tiny();
    struct eval_request request = make_request(
        1, (const uint32_t[]){MAX_TEXT},
        (const char *const[]){"full", "f16,deviation=0.1", "f16,mass=0.7,notail", "rot2,deviation=0.1", NULL});
    request.attention = true;
    struct evaluation got = run(fixture, request);
    assert_int_equal(got.n_rows, 4);
    for (uint32_t i = 0; i < got.n_rows; i++)
        for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
            const struct method_attention *attention = &got.rows[i].attention[layer];
            print_message("%s, layer %u: recall %.4f, mass %.4f, output %.2g, tail %.2g\n", got.rows[i].preset, layer,
                          attention->recall, attention->mass, attention->output_error, attention->tail_error);
            assert_int_equal(attention->n, TAIL / 8 * N_KV_HEADS);
            assert_true(attention->recall > 0 && attention->recall <= 1);
            assert_true(attention->mass > 0 && attention->mass < 1 + 1e-6);
            if (i < 3) /* exact keys: the exact selection, and a tail of the exact mass */
                assert_true(is_near(attention->recall, 1) && attention->tail_error < 1e-4);
            else
                assert_true(attention->recall < 1 && attention->tail_error > 1e-4);
        }
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        assert_true(is_near(got.rows[0].attention[layer].mass, 1));
        assert_true(got.rows[0].attention[layer].output_error < 1e-4);
        assert_true(got.rows[1].attention[layer].output_error > 1e-3);
        /* the set that holds so much */
        assert_true(got.rows[2].attention[layer].mass > 0.69 && got.rows[2].attention[layer].mass < 0.8);
    }
    close_tiny(fixture);
}

/* Looking changes nothing. */
static void test_looks_only(void **state)
{
    (void)state;
    struct worker_fixture *fixture = open_tiny();
    const char *const presets[] = {"rot2,deviation=0.02", NULL};
    struct eval_request request = make_request(1, (const uint32_t[]){MAX_TEXT}, presets);
    request.attention = true;
    struct evaluation with = run(fixture, request), without = evaluate(fixture, presets);
    assert_memory_equal(&with.rows[0].row.kld_mean, &without.rows[0].row.kld_mean, sizeof(double));
    assert_memory_equal(with.rows[0].kept_by_head, without.rows[0].kept_by_head, sizeof(with.rows[0].kept_by_head));
    close_tiny(fixture);
}

/* ---- FastGen ---- */

static void test_fastgen(void **state)
{
    (void)state;
    struct worker_fixture *fixture = open_tiny();
    struct evaluation got =
        evaluate(fixture, (const char *const[]){"rot2,deviation=0.02", "rot2,deviation=0.02,fastgen=1",
                                                "rot2,deviation=0.02,fastgen=0.3",
                                                "f16,mass=0.5,weights,notail,fastgen=0.3", NULL});
    const struct eval_row *plain = &got.rows[0].row, *all = &got.rows[1].row, *few = &got.rows[2].row;
    /* no fixed set has all of the mass: every head stays */
    assert_memory_equal(&plain->kld_mean, &all->kld_mean, sizeof(double));
    assert_memory_equal(got.rows[0].kept_by_head, got.rows[1].kept_by_head, sizeof(got.rows[0].kept_by_head));
    assert_true(is_near(plain->device_bytes_fraction, all->device_bytes_fraction));
    /* attention of random weights is nearly even: any set that is large enough will do for 0.3 */
    assert_true(few->device_bytes_fraction < plain->device_bytes_fraction);
    assert_true(few->kept > 0 && few->kept < 1);
    assert_true(few->kld_mean > plain->kld_mean);
    /* a fixed head is scored again exactly and has no tail, whatever the others do */
    assert_true(got.rows[3].row.kept > 0 && got.rows[3].row.kld_mean > 0);
    assert_true(few->device_bytes_fraction <= 0 && got.rows[3].row.device_bytes_fraction <= 0);
    assert_memory_equal(&few->kld_mean, &got.rows[3].row.kld_mean, sizeof(double));
    close_tiny(fixture);
}

static void test_fastgen_looks(void **state)
{
    (void)state;
    struct worker_fixture *fixture = open_tiny();
    struct eval_request request =
        make_request(1, (const uint32_t[]){MAX_TEXT}, (const char *const[]){"rot2,mass=0.8,fastgen=0.3", NULL});
    request.attention = true;
    struct evaluation got = run(fixture, request);
    assert_int_equal(got.result, 0);
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        assert_true(got.rows[0].attention[layer].mass > 0.25 && got.rows[0].attention[layer].mass < 1);
        assert_true(got.rows[0].attention[layer].output_error > 0);
    }
    close_tiny(fixture);
}

/* ---- order, slices, ends ---- */

static void test_rows_in_order(void **state)
{
    (void)state;
    struct worker_fixture *fixture = open_tiny();
    struct evaluation got = run(fixture, make_request(2, (const uint32_t[]){MAX_TEXT, 3 * CONTEXT},
                                                      (const char *const[]){"quality", "f16,mass=0.9", NULL}));
    assert_int_equal(got.result, 0);
    assert_int_equal(got.n_rows, 4);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(got.rows[i].row.index, i);
        assert_string_equal(got.rows[i].text, i < 2 ? "text 0" : "text 1");
        assert_string_equal(got.rows[i].preset, i % 2 == 0 ? "quality" : "f16,mass=0.9");
    }
    assert_string_equal(got.rows[1].meaning, "f16,mass=0.9");
    assert_string_not_equal(got.rows[0].meaning, "quality");
    assert_memory_equal(&got.rows[0].row.full_perplexity, &got.rows[1].row.full_perplexity, sizeof(double));
    assert_memory_not_equal(&got.rows[0].row.full_perplexity, &got.rows[2].row.full_perplexity, sizeof(double));
    assert_non_null(strstr(got.sentence, "2 texts, 2 presets"));
    close_tiny(fixture);
}

static void finish_job(const struct worker_fixture *fixture, struct job *job)
{
    struct job_report report;
    char sentence[JOB_SENTENCE_SIZE];
    int r = 1;
    while (r == 1)
        r = job->ops->advance(job->state, &fixture->tools, &report, sentence);
    if (r < 0)
        fail_msg("%s", sentence);
    job->ops->free(job->state);
}

/* As long as the context: it stands at one place only, which makes trainings short. */
static struct job_text *one_text(void)
{
    struct job_text *texts = calloc(1, sizeof(*texts));
    assert_non_null(texts);
    texts[0] = (struct job_text){strdup("letters"), make_text(MAX_TEXT, 9)};
    return texts;
}

/* What learnt codecs need, for the tiny model. */
static void learn(const struct worker_fixture *fixture)
{
    char sentence[JOB_SENTENCE_SIZE];
    struct job job;
    struct train_statistics_request statistics = {.n_texts = 1, .texts = one_text()};
    assert_int_equal(train_statistics_job_new(&statistics, &job, sentence), 0);
    finish_job(fixture, &job);
    for (uint32_t n_dims = 2; n_dims <= 4; n_dims += 2) {
        struct train_codebook_request codebook = {
            .n_texts = 1, .texts = one_text(), .n_dims = n_dims, .n_centroids = 4096, .max_iterations = 1};
        assert_int_equal(train_codebook_job_new(&codebook, &job, sentence), 0);
        finish_job(fixture, &job);
    }
}

/* "all" wherever it stands; what it has and what is named again is done once. */
static void test_all(void **state)
{
    (void)state;
    struct worker_fixture *fixture = open_tiny();
    const char *name, *meaning;
    learn(fixture);
    struct eval_request request = make_request(1, (const uint32_t[]){MAX_TEXT},
                                               (const char *const[]){"streaming", "quality", "all", "quality", NULL});
    request.context = 256; /* there are many of them */
    request.tail = 64;
    struct evaluation got = run(fixture, request);
    if (got.result != 0)
        fail_msg("%s", got.sentence);
    assert_string_equal(got.rows[0].preset, "streaming");
    assert_string_equal(got.rows[1].preset, "quality");
    uint32_t row = 2;
    for (uint32_t i = 0; (name = policy_preset(i, &meaning)) != NULL; i++)
        if (strcmp(name, "quality") != 0)
            assert_string_equal(got.rows[row++].preset, name);
    for (uint32_t i = 0; (name = methods_baseline_name(i)) != NULL; i++)
        if (strcmp(name, "streaming") != 0)
            assert_string_equal(got.rows[row++].preset, name);
    assert_int_equal(got.n_rows, row);
    assert_true(row > 12);
    close_tiny(fixture);
}

/* The last position's next token counts only if the text has it. */
static void test_exact_length(void **state)
{
    (void)state;
    struct worker_fixture *fixture = open_tiny();
    double perplexity[2];
    for (uint32_t more = 0; more < 2; more++) {
        struct eval_request request =
            make_request(1, (const uint32_t[]){MAX_TEXT}, (const char *const[]){"full", NULL});
        uint32_t *ids, length = MAX_TEXT;
        size_t n_ids = SIZE_MAX;
        while (n_ids > CONTEXT + more) { /* letter by letter to the length that is wanted */
            request.texts[0].text[--length] = '\0';
            assert_int_equal(
                tokenizer_encode(fixture->tokenizer, request.texts[0].text, length, TOKENIZER_ADD_BOS, &ids, &n_ids),
                0);
            free(ids);
        }
        assert_int_equal(n_ids, CONTEXT + more);
        struct evaluation got = run(fixture, request);
        assert_int_equal(got.result, 0);
        perplexity[more] = got.rows[0].row.full_perplexity;
    }
    assert_false(is_near(perplexity[0], perplexity[1]));
    assert_true(fabs(log(perplexity[0] / perplexity[1])) < 0.2); /* one of 128 */
    close_tiny(fixture);
}

static void expect_refusal(const struct worker_fixture *fixture, struct eval_request request, int error,
                           const char *part)
{
    struct evaluation got = run(fixture, request);
    print_message("%s\n", got.sentence);
    assert_int_equal(got.result, error);
    assert_non_null(strstr(got.sentence, part));
    assert_null(strchr(got.sentence, '\n'));
    assert_int_equal(got.n_rows, 0);
}

static void test_refusals(void **state)
{
    (void)state;
    struct worker_fixture *fixture = open_tiny();
    const char *const full[] = {"full", NULL};
    const uint32_t enough[] = {MAX_TEXT, MAX_TEXT}, short_text[] = {MAX_TEXT, 200};
    expect_refusal(fixture, make_request(2, short_text, full), -E2BIG, "text 1");
    expect_refusal(fixture, make_request(1, enough, (const char *const[]){"full", "rot\n7,mass=1", NULL}), -EINVAL,
                   "rot");
    expect_refusal(fixture, make_request(1, enough, (const char *const[]){"pair2,deviation=0.02", NULL}), -ENOENT,
                   "statistics");
    char long_name[200] = {0};
    memset(long_name, 'q', sizeof(long_name) - 1);
    expect_refusal(fixture, make_request(1, enough, (const char *const[]){long_name, NULL}), -EINVAL, "qqq");
    expect_refusal(fixture, make_request(1, enough, (const char *const[]){NULL}), -EINVAL, "preset");
    expect_refusal(fixture, make_request(0, enough, full), -EINVAL, "text");
    struct eval_request request = make_request(1, enough, full);
    request.texts[0].text[17] = (char)0xff;
    expect_refusal(fixture, request, -EINVAL, "UTF-8");
    const uint32_t sizes[][2] = {{500, 64}, {512, 60}, {512, 512}, {512, 0}, {0, 0}, {2048, 64}};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        request = make_request(1, enough, full);
        request.context = sizes[i][0];
        request.tail = sizes[i][1];
        expect_refusal(fixture, request, -EINVAL, "context");
    }
    close_tiny(fixture);
}

/* Ending a job anywhere leaves nothing behind. */
static void test_cancelled(void **state)
{
    (void)state;
    struct worker_fixture *fixture = open_tiny();
    const size_t before = fixture->ops.bytes(fixture->backend);
#ifndef HCATTN_SANITIZED
    fixture->tools.slice_us = 1; /* slower machines have slices enough */
#endif
    for (uint32_t n_slices = 0;; n_slices = 2 * n_slices + 1) {
        struct eval_request request = make_request(1, (const uint32_t[]){MAX_TEXT},
                                                   (const char *const[]){"quality", "rot4,mass=0.9,fastgen=0.5", NULL});
        struct job job = {0};
        char sentence[JOB_SENTENCE_SIZE];
        int r = eval_job_new(&request, &job, sentence);
        assert_int_equal(r, 0);
        r = 1;
        for (uint32_t i = 0; i < n_slices && r > 0; i++) {
            struct job_report report;
            r = job.ops->advance(job.state, &fixture->tools, &report, sentence);
            assert_true(r >= 0);
        }
        job.ops->free(job.state);
        assert_int_equal(fixture->ops.bytes(fixture->backend), before);
        if (r == 0)
            break;
    }
    close_tiny(fixture);
}

static int n_until_failure;

static void *failing_alloc(struct backend *backend, size_t n_bytes)
{
    return n_until_failure-- == 0 ? NULL : backend_cpu.alloc(backend, n_bytes);
}

static void test_no_memory(void **state)
{
    (void)state;
    struct worker_fixture *fixture = open_tiny();
    const size_t before = fixture->ops.bytes(fixture->backend);
    fixture->ops.alloc = failing_alloc;
#ifdef HCATTN_SANITIZED
    const int step = 5;
#else
    const int step = 1;
#endif
    int n = 0;
    for (;; n += step) {
        n_until_failure = n;
        struct evaluation got =
            run(fixture, make_request(1, (const uint32_t[]){MAX_TEXT}, (const char *const[]){"quality", NULL}));
        assert_int_equal(fixture->ops.bytes(fixture->backend), before);
        if (got.result == 0)
            break;
        assert_int_equal(got.result, -ENOMEM);
        assert_non_null(strstr(got.sentence, "memory"));
    }
    assert_true(n > 10);
    close_tiny(fixture);
}

int main(void)
{
    kernels_thread_setup();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_full_is_full),
        cmocka_unit_test(test_less_is_further_away),
        cmocka_unit_test(test_everything_selected),
        cmocka_unit_test(test_accounts),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_looks_only),
        cmocka_unit_test(test_fastgen),
        cmocka_unit_test(test_fastgen_looks),
        cmocka_unit_test(test_rows_in_order),
        cmocka_unit_test(test_all),
        cmocka_unit_test(test_exact_length),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_cancelled),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
