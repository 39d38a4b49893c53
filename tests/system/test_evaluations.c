/*
 * test_evaluations.c - jobs of the worker by RPC: evaluations, statistics, codebooks; beside sessions, cancelled, and with
 * processes that die.
 */
#include <jansson.h>

#include "client/hcattn_jobs.h"
#include "tests/system/jobs.h"
#include "tests/system/programs.h"
#include "tests/system/service.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MODEL "--layers 3 --heads 6 --kv-heads 2 --embd 96 --head-dim 32 --ff 128 --context 1024"
#ifdef HCATTN_SANITIZED
enum { CONTEXT = 320, CALL_MS = 900000 };
#else
enum { CONTEXT = 640, CALL_MS = 120000 };
#endif
enum { TAIL = 64, MAX_ROWS = 16, TEXT_BYTES = 16384 };

/* Words that look like nothing in particular; every seed gives others. */
static char *make_text(uint32_t seed)
{
    char *text = calloc(1, TEXT_BYTES);
    assert_non_null(text);
    uint64_t state = seed;
    for (size_t i = 0; i + 1 < TEXT_BYTES; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        uint32_t x = (uint32_t)(state >> 40) % 32;
        text[i] = x < 26 ? (char)('a' + x) : x < 31 ? ' ' : '.';
    }
    return text;
}

struct rows {
    uint32_t n;
    struct hcattn_eval_row rows[MAX_ROWS]; /* numbers only */
    char presets[MAX_ROWS][64];
    double done; /* last progress */
    uint32_t n_progress, stop_after;
};

static int take_row(void *context, const struct hcattn_eval_row *row)
{
    struct rows *rows = context;
    assert_int_equal(row->index, rows->n);
    assert_true(rows->n < MAX_ROWS);
    for (uint32_t i = 0; i < row->n_layers * row->n_kv_heads; i++)
        assert_true(row->kept_by_head[i] >= 0 && row->kept_by_head[i] <= 1);
    snprintf(rows->presets[rows->n], sizeof(rows->presets[0]), "%s", row->preset);
    rows->rows[rows->n++] = *row;
    return 0;
}

static int take_progress(void *context, const struct hcattn_job_progress *progress)
{
    struct rows *rows = context;
    assert_true(progress->done >= rows->done && progress->done <= 1);
    assert_true(strlen(progress->phase) > 0);
    rows->done = progress->done;
    return ++rows->n_progress == rows->stop_after ? -ECANCELED : 0;
}

static int evaluate(struct hcattn *client, const char *text, const char *const *presets, size_t n_presets,
                    struct rows *rows, struct hcattn_error *ret_error)
{
    const struct hcattn_text texts[] = {{.name = "words", .text = text}};
    const struct hcattn_evaluate request = {
        .texts = texts, .n_texts = 1, .context = CONTEXT, .tail = TAIL, .presets = presets, .n_presets = n_presets};
    const struct hcattn_job_events events = {.context = rows, .progress = take_progress, .row = take_row};
    return hcattn_evaluate(client, &request, &events, CALL_MS, NULL, ret_error);
}

static void start(struct service *service)
{
    service_start(service,
                  (const char *const[]){"--model", service_tiny_model(MODEL), "--memory", "64MiB", "--exact-tokens",
                                        "0", "--stores", "2", NULL},
                  NULL);
}

/* ---- the same as sessions ---- */

struct scored {
    uint32_t n, n_vocab;
    float *all; /* [TAIL][n_vocab] */
};

static int take_scores(void *context, const struct hcattn_scored *scored)
{
    struct scored *scores = context;
    for (size_t i = 0; i < scored->n_scores; i++, scores->n++) {
        scores->n_vocab = (uint32_t)scored->scores[i].n_all;
        if (scores->all == NULL)
            scores->all = malloc((size_t)TAIL * scores->n_vocab * sizeof(float));
        assert_non_null(scores->all);
        assert_true(scores->n < TAIL);
        memcpy(scores->all + (size_t)scores->n * scores->n_vocab, scored->scores[i].all,
               scores->n_vocab * sizeof(float));
    }
    return 0;
}

/* Distributions after each of the positions before the last, decoded from CONTEXT - TAIL on. */
static void score(struct hcattn *client, const char *policy, const uint32_t *ids, struct scored *scores)
{
    struct hcattn_session_config config = {.policy = policy, .exact_tokens = HCATTN_EXACT_NONE};
    struct hcattn_session session;
    struct hcattn_error error = {0};
    struct hcattn_events events = {.context = scores, .scored = take_scores};
    struct hcattn_score_done done;
    assert_int_equal(hcattn_open_session(client, &config, CALL_MS, &session, &error), 0);
    /* decode steps begin with the tail; the distribution after its first token is the first that is compared */
    struct hcattn_score request = {.session = session.session,
                                   .input = {.ids = ids, .n_ids = CONTEXT},
                                   .from = CONTEXT - TAIL,
                                   .all_logprobs = true};
    *scores = (struct scored){0};
    if (hcattn_score(client, &request, &events, CALL_MS, &done, &error) < 0)
        fail_msg("score: %s", error.sentence);
    assert_int_equal(scores->n, TAIL);
    jobs_close_session(client, session.session);
}

static double divergence(const struct scored *full, const struct scored *other)
{
    double sum = 0;
    /* the first of both is that of the last prompt position: no decode step */
    for (size_t i = full->n_vocab; i < (size_t)TAIL * full->n_vocab; i++)
        sum += exp((double)full->all[i]) * ((double)full->all[i] - (double)other->all[i]);
    return sum / (TAIL - 1);
}

static void evaluations_say_what_sessions_show(void **state)
{
    static const char *const presets[] = {
        "full", "default", "quality", "pair2,deviation=0.1", "rot2,mass=0.5,notail", "rot4,mass=0.9,weights,notail"};
    enum { N = sizeof(presets) / sizeof(presets[0]) };
    struct service service;
    struct rows rows = {0};
    struct hcattn_error error = {0};
    struct hcattn_tokens tokens;
    struct scored full;
    (void)state;
    char *text = make_text(1);
    start(&service);
    if (evaluate(service.client, text, presets, N, &rows, &error) < 0)
        fail_msg("evaluate: %s", error.sentence);
    assert_int_equal(rows.n, N);
    struct hcattn_input input = {.text = text};
    assert_int_equal(hcattn_tokenize(service.client, &input, CALL_MS, &tokens, NULL), 0);
    assert_true(tokens.n_ids >= CONTEXT);
    score(service.client, "full", tokens.ids, &full);
    assert_true(rows.rows[0].kld_mean < 1e-6 && rows.rows[0].top1 == 1.0);
    for (uint32_t i = 1; i < N; i++) {
        struct scored other;
        assert_string_equal(rows.presets[i], presets[i]);
        score(service.client, presets[i], tokens.ids, &other);
        double expected = divergence(&full, &other), got = rows.rows[i].kld_mean;
        print_message("%s: divergence %.3g, of sessions %.3g; %.1f %% kept, %.2f %% of the bytes\n", presets[i], got,
                      expected, 100 * rows.rows[i].kept, 100 * rows.rows[i].device_bytes_fraction);
        assert_true(fabs(got - expected) <= 0.15 * expected + 1e-7); /* the tail's first position is not in both */
        assert_true(rows.rows[i].kept > 0 && rows.rows[i].kept < 1);
        free(other.all);
    }
    hcattn_tokens_free(&tokens);
    free(full.all);
    free(text);
    service_stop(&service);
}

/* ---- beside sessions ---- */

static void sessions_go_on_beside_an_evaluation(void **state)
{
    enum { N_PROMPT = 300, N_TOKENS = 40 };
    static const char *const presets[] = {"default", "quality", "rot3,mass=0.9"};
    struct service service;
    struct rows rows = {0};
    struct hcattn_error error = {0};
    uint32_t ids[N_PROMPT];
    (void)state;
    jobs_make_ids(5, ids, N_PROMPT);
    char *text = make_text(2);
    start(&service);
    struct job alone = {.policy = "default", .ids = ids, .n_ids = N_PROMPT, .max_tokens = N_TOKENS}, beside = alone;
    jobs_run_alone(&service, &alone, 1);
    jobs_start(&service, &beside);
    if (evaluate(service.client, text, presets, 3, &rows, &error) < 0)
        fail_msg("evaluate: %s", error.sentence);
    jobs_wait(&beside);
    service_answer_assert_equal(&alone.answer, &beside.answer);
    assert_int_equal(rows.n, 3);
    jobs_free(&alone, 1);
    jobs_free(&beside, 1);
    free(text);
    service_stop(&service);
}

static void a_cancelled_job_makes_room_for_the_next(void **state)
{
    static const char *const presets[] = {"default"};
    struct service service;
    struct hcattn_error error = {0};
    (void)state;
    char *text = make_text(3);
    start(&service);
    struct rows stopped = {.stop_after = 1}, rows = {0};
    int r = evaluate(service.client, text, presets, 1, &stopped, &error);
    assert_true(r == -ECANCELED || stopped.n_progress == 0); /* or it was done before it told anything */
    for (int i = 0; (r = evaluate(service.client, text, presets, 1, &rows, &error)) < 0 && i < 100; i++)
        assert_int_equal(error.code, HCATTN_BUSY);
    assert_int_equal(r, 0);
    assert_int_equal(rows.n, 1);
    free(text);
    service_stop(&service);
}

static void bad_evaluations_are_refused(void **state)
{
    static const struct {
        const char *preset, *part;
    } cases[] = {
        {"rot9,deviation=0.02", "rot9"},
        {"pq2/256,mass=0.9,weights,notail", "codebook"},
        {"", "preset"},
    };
    struct service service;
    (void)state;
    char *text = make_text(4);
    start(&service);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct rows rows = {0};
        struct hcattn_error error = {0};
        assert_true(evaluate(service.client, text, &cases[i].preset, 1, &rows, &error) < 0);
        print_message("%s\n", error.sentence);
        assert_non_null(strstr(error.sentence, cases[i].part));
        assert_int_equal(rows.n, 0);
    }
    struct rows rows = {0};
    struct hcattn_error error = {0};
    static const char *const preset = "default";
    assert_true(evaluate(service.client, "a few words", &preset, 1, &rows, &error) < 0);
    print_message("%s\n", error.sentence);
    assert_non_null(strstr(error.sentence, "words"));
    free(text);
    service_stop(&service);
}

/* ---- what codecs learn ---- */

static int train(struct hcattn *client, const char *text, bool again, struct rows *rows, struct hcattn_error *ret_error)
{
    const struct hcattn_text texts[] = {{.name = "words", .text = text}};
    const struct hcattn_train_codebook request = {
        .texts = texts, .n_texts = 1, .n_dims = 2, .n_centroids = 256, .seed = 7, .max_iterations = 20, .again = again};
    const struct hcattn_job_events events = {.context = rows, .progress = take_progress};
    return hcattn_train_codebook(client, &request, &events, CALL_MS, NULL, ret_error);
}

static void a_codebook_is_trained_once(void **state)
{
    enum { N_PROMPT = 300, N_TOKENS = 12 };
    struct service service;
    struct rows rows = {0};
    struct hcattn_error error = {0};
    uint32_t ids[N_PROMPT];
    (void)state;
    jobs_make_ids(5, ids, N_PROMPT);
    char *text = make_text(5);
    start(&service);
    struct job job = {.policy = "pq2/256,mass=0.9,weights,notail",
                      .ids = ids,
                      .n_ids = N_PROMPT,
                      .max_tokens = N_TOKENS,
                      .may_fail = true};
    jobs_run_alone(&service, &job, 1);
    assert_true(job.result < 0);
    assert_int_equal(job.error.code, HCATTN_NOT_SUPPORTED);
    jobs_free(&job, 1);
    if (train(service.client, text, false, &rows, &error) < 0)
        fail_msg("train: %s", error.sentence);
    job.may_fail = false;
    jobs_run_alone(&service, &job, 1);
    /* another life of the service finds it beside the model, and recovers with it */
    service_stop(&service);
    start(&service);
    struct job again = job;
    memset(&again.answer, 0, sizeof(again.answer));
    jobs_start(&service, &again);
    kill(service_process(&service, "hc-gpu-worker", 0), SIGKILL);
    jobs_wait(&again);
    service_answer_assert_equal(&job.answer, &again.answer);
    rows = (struct rows){0};
    assert_int_equal(train(service.client, text, false, &rows, &error), 0); /* at once */
    jobs_free(&job, 1);
    jobs_free(&again, 1);
    free(text);
    service_stop(&service);
}

/* ---- the command ---- */

static bool has_preset(const json_t *means, const char *preset)
{
    size_t i;
    json_t *mean;
    json_array_foreach(means, i,
                       mean) if (strcmp(json_string_value(json_object_get(mean, "preset")), preset) == 0) return true;
    return false;
}

/* What people type first, on a model that nothing has been learnt of: everything that is missing is made, and tables come. */
static void the_command_does_it_all(void **state)
{
    static const char *const expected[] = {"default",          "quality", "small", "tiny",     "hcattention-25",
                                           "hcattention-12.5", "full",    "q8_0",  "streaming"};
    struct service service;
    char path[160], folder[128], log[128], context[16];
    (void)state;
    start(&service);
    snprintf(path, sizeof(path), "%s/words.txt", service.directory);
    snprintf(folder, sizeof(folder), "%s/report", service.directory);
    snprintf(log, sizeof(log), "%s/eval.log", service.directory);
    snprintf(context, sizeof(context), "%d", CONTEXT);
    char *text = make_text(7);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
    free(text);
    const struct program program = {.runtime_dir = service.directory};
    const char *const arguments[] = {"eval",  "--text",    path,  "--context", context, "--tail",
                                     "64",    "--presets", "all", "--tasks",   "copy",  "--lengths",
                                     context, "--samples", "1",   "--out",     folder,  NULL};
    const int status = programs_wait(programs_start(&program, arguments, log), CALL_MS / 1000);
    if (status != 0)
        fail_msg("status %d: %s", status, log);
    snprintf(path, sizeof(path), "%s/eval.json", folder);
    json_error_t problem;
    json_t *report = json_load_file(path, 0, &problem);
    if (report == NULL)
        fail_msg("%s: %s", path, problem.text);
    for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++)
        if (!has_preset(json_object_get(report, "means"), expected[i]))
            fail_msg("no row for %s", expected[i]);
    assert_false(has_preset(json_object_get(report, "means"), "all"));
    json_decref(report);
    service_stop(&service);
}

static size_t file_bytes(const char *path)
{
    struct stat status;
    return stat(path, &status) < 0 ? 0 : (size_t)status.st_size;
}

/* Once a codebook is there, --out is a matter of a copy. */
static void a_codebook_is_copied_out(void **state)
{
    struct service service;
    char out[128], nowhere[128];
    (void)state;
    start(&service);
    snprintf(out, sizeof(out), "%s/copy", service.directory);
    snprintf(nowhere, sizeof(nowhere), "%s/no/copy", service.directory);
    const struct program program = {.runtime_dir = service.directory};
    for (int i = 0; i < 2; i++) {
        struct outcome outcome =
            programs_run(&program, (const char *const[]){"codebook", "train", "--pq-groups", "d/8", "--centroids",
                                                         "256", "--out", out, NULL});
        assert_int_equal(outcome.status, 0);
        assert_non_null(strstr(outcome.out, i == 0 ? "of the keys' variance" : "already"));
        assert_int_equal(file_bytes(out), 80 + 3 * 2 * 32 * 256 * sizeof(float) + 4);
        assert_int_equal(unlink(out), 0);
        programs_free(&outcome);
    }
    struct outcome outcome =
        programs_run(&program, (const char *const[]){"codebook", "train", "--pq-groups", "d/8", "--centroids", "256",
                                                     "--out", nowhere, NULL});
    assert_int_equal(outcome.status, 1);
    assert_non_null(strstr(outcome.err, "No such file"));
    programs_free(&outcome);
    service_stop(&service);
}

static int kill_worker(void *context, const struct hcattn_job_progress *progress)
{
    struct service *service = context;
    (void)progress;
    kill(service_process(service, "hc-gpu-worker", 0), SIGKILL);
    return 0;
}

static void a_job_whose_worker_dies_ends(void **state)
{
    struct service service;
    struct hcattn_error error = {0};
    (void)state;
    char *text = make_text(6);
    start(&service);
    struct hcattn *other = service.client;
    struct hcattn_config config = {.runtime_dir = service.directory, .connect_timeout_ms = 60000};
    assert_int_equal(hcattn_open(&config, &service.client, NULL),
                     0); /* for kill_worker(), within a call of the other */
    static const char *const presets[] = {"default", "quality"};
    /* long enough for its worker to be killed before it ends, on a busy machine, too */
    const struct hcattn_text texts[] = {{.name = "a", .text = text}, {.name = "b", .text = text},
                                        {.name = "c", .text = text}, {.name = "d", .text = text},
                                        {.name = "e", .text = text}, {.name = "f", .text = text}};
    const struct hcattn_evaluate request = {.texts = texts,
                                            .n_texts = sizeof(texts) / sizeof(texts[0]),
                                            .context = CONTEXT,
                                            .tail = TAIL,
                                            .presets = presets,
                                            .n_presets = 2};
    const struct hcattn_job_events events = {.context = &service, .progress = kill_worker};
    assert_true(hcattn_evaluate(other, &request, &events, CALL_MS, NULL, &error) < 0);
    print_message("%s\n", error.sentence);
    assert_int_equal(error.code, HCATTN_UNAVAILABLE);
    service_wait_ready(&service);
    struct rows rows = {0};
    assert_int_equal(evaluate(other, text, presets, 2, &rows, &error), 0);
    hcattn_close(other);
    free(text);
    service_stop(&service);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(evaluations_say_what_sessions_show),
        cmocka_unit_test(sessions_go_on_beside_an_evaluation),
        cmocka_unit_test(a_cancelled_job_makes_room_for_the_next),
        cmocka_unit_test(bad_evaluations_are_refused),
        cmocka_unit_test(a_codebook_is_trained_once),
        cmocka_unit_test(the_command_does_it_all),
        cmocka_unit_test(a_codebook_is_copied_out),
        cmocka_unit_test(a_job_whose_worker_dies_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
