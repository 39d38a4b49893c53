/*
 * test_quality.c - what the presets cost on the real model: one evaluation of four texts of different kinds, against gates in
 * the mean over the texts; a fact planted among 4k tokens.
 */
#include "client/hcattn_jobs.h"
#include "tests/system/service.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CALL_MS = 900000, N_TEXTS = 4, N_PRESETS = 4 };

struct gate {
    double kld, bytes, top1; /* nats, share of f16 K and V, share of positions */
};

/* A preset's, of a short context and of those that are measured with --long. */
static const struct {
    const char *preset;
    struct gate brief, full;
} gates[N_PRESETS] = {
    {"default", {0.0012, 0.075, 0.97}, {0.0006, 0.075, 0.985}},
    {"quality", {0.0003, 0.135, 0.98}, {0.0001, 0.135, 0.995}},
    {"small", {0.006, 0.04, 0.95}, {0.003, 0.04, 0.97}},
    {"tiny", {0.02, 0.025, 0.93}, {0.01, 0.025, 0.95}},
};
static const char *const text_names[N_TEXTS] = {"prose", "code", "legal", "list"};

struct fixture {
    struct service service;
    char *texts[N_TEXTS];
};

static char *read_text(const char *path)
{
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    long n = ftell(file);
    rewind(file);
    char *text = calloc(1, (size_t)n + 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, (size_t)n, file), n);
    fclose(file);
    return text;
}

static int set_up(void **state)
{
    static struct fixture fixture;
    char directory[] = "/tmp/hcattn-texts-XXXXXX", command[128], path[128];
    assert_non_null(mkdtemp(directory));
    snprintf(command, sizeof(command), "bench/texts/make-texts %s", directory);
    assert_int_equal(system(command), 0);
    for (uint32_t i = 0; i < N_TEXTS; i++) {
        snprintf(path, sizeof(path), "%s/%s.txt", directory, text_names[i]);
        fixture.texts[i] = read_text(path);
        unlink(path);
    }
    rmdir(directory);
    *state = &fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    if (fixture->service.pid != 0)
        service_stop(&fixture->service);
    for (uint32_t i = 0; i < N_TEXTS; i++)
        free(fixture->texts[i]);
    return 0;
}

/* The one of all tests here, or skip(). */
static struct hcattn *client_of(struct fixture *fixture)
{
    const char *model = service_real_model();
    if (fixture->service.pid == 0)
        service_start(&fixture->service,
                      (const char *const[]){"--model", model, "--memory", "512MiB", "--exact-tokens", "0", NULL}, NULL);
    return fixture->service.client;
}

/* ---- divergence ---- */

struct measured {
    double kld[N_PRESETS][N_TEXTS], top1[N_PRESETS], bytes[N_PRESETS]; /* the latter two: mean over the texts */
    uint32_t n;
};

static int take_row(void *context, const struct hcattn_eval_row *row)
{
    struct measured *measured = context;
    assert_int_equal(row->index, measured->n);
    assert_true(measured->n < N_TEXTS * N_PRESETS);
    uint32_t text = measured->n / N_PRESETS, preset = measured->n % N_PRESETS;
    assert_string_equal(row->text, text_names[text]);
    assert_string_equal(row->preset, gates[preset].preset);
    print_message("%-5s %-7s (%s): divergence %.6f, p99 %.5f; top-1 %.2f %%; %.2f %% of the bytes, %.1f %% kept\n",
                  row->text, row->preset, row->meaning, row->kld_mean, row->kld_p99, 100 * row->top1,
                  100 * row->device_bytes_fraction, 100 * row->kept);
    assert_true(row->kld_mean > 0 && row->kept > 0 && row->kept < 1); /* it is not full attention */
    measured->kld[preset][text] = row->kld_mean;
    measured->top1[preset] += row->top1 / N_TEXTS;
    measured->bytes[preset] += row->device_bytes_fraction / N_TEXTS;
    measured->n++;
    return 0;
}

static void evaluate(struct fixture *fixture, uint32_t n_context, uint32_t n_tail, struct measured *ret_measured)
{
    struct hcattn *client = client_of(fixture);
    struct hcattn_error error = {0};
    struct hcattn_text texts[N_TEXTS];
    const char *presets[N_PRESETS];
    for (uint32_t i = 0; i < N_TEXTS; i++)
        texts[i] = (struct hcattn_text){.name = text_names[i], .text = fixture->texts[i]};
    for (uint32_t i = 0; i < N_PRESETS; i++)
        presets[i] = gates[i].preset;
    const struct hcattn_evaluate request = {.texts = texts,
                                            .n_texts = N_TEXTS,
                                            .context = n_context,
                                            .tail = n_tail,
                                            .presets = presets,
                                            .n_presets = N_PRESETS};
    const struct hcattn_job_events events = {.context = ret_measured, .row = take_row};
    *ret_measured = (struct measured){0};
    if (hcattn_evaluate(client, &request, &events, CALL_MS, NULL, &error) < 0)
        fail_msg("evaluate: %s", error.sentence);
    assert_int_equal(ret_measured->n, N_TEXTS * N_PRESETS);
}

/* All of them are printed before the first that is not met ends the test. `worst`: a single text's, in gates; 0: any. */
static void check(const struct measured *measured, bool is_long, double worst)
{
    uint32_t n_missed = 0;
    for (uint32_t i = 0; i < N_PRESETS; i++) {
        const struct gate *gate = is_long ? &gates[i].full : &gates[i].brief;
        double mean = 0, largest = 0;
        for (uint32_t k = 0; k < N_TEXTS; k++) {
            mean += measured->kld[i][k] / N_TEXTS;
            largest = measured->kld[i][k] > largest ? measured->kld[i][k] : largest;
        }
        bool met = mean <= gate->kld && measured->bytes[i] <= gate->bytes && measured->top1[i] >= gate->top1 &&
                   (worst == 0 || largest <= worst * gate->kld);
        print_message("%s: divergence %.6f of %.4f (worst text %.6f), bytes %.2f of %.1f %%, top-1 %.2f of %.1f %%%s\n",
                      gates[i].preset, mean, gate->kld, largest, 100 * measured->bytes[i], 100 * gate->bytes,
                      100 * measured->top1[i], 100 * gate->top1, met ? "" : ": MISSED");
        n_missed += !met;
    }
    assert_int_equal(n_missed, 0);
}

/* The context is short and the tail too, for the time it takes: the gates are loose. */
static void presets_at_2k(void **state)
{
    struct measured measured;
    evaluate(*state, 2048, 128, &measured);
    check(&measured, false, 0);
}

static void presets_at_4k(void **state)
{
    struct measured measured;
    if (getenv("HCATTN_TEST_LONG") == NULL)
        skip(); /* scripts/test --long */
    evaluate(*state, 4096, 256, &measured);
    check(&measured, true, 3);
}

/* ---- a fact ---- */

enum { PROSE_BYTES = 17600 }; /* about 4,000 tokens */
static const char fact[] = "The secret passcode of the harbour office is 74921. Remember it.\n\n";
static const char question[] = "\n\nWhat is the secret passcode of the harbour office? Answer with the number only.";

/* The prose with the fact before the paragraph in its middle, and the question after it. */
static char *plant(const char *prose)
{
    char *text = calloc(1, PROSE_BYTES + sizeof(fact) + sizeof(question) + 64);
    assert_non_null(text);
    assert_true(strlen(prose) > PROSE_BYTES);
    const char *paragraph = strstr(prose + PROSE_BYTES / 2, "\n\n");
    assert_true(paragraph != NULL && paragraph + 2 < prose + PROSE_BYTES);
    sprintf(text, "Here is a story.\n\n%.*s%s%.*s%s", (int)(paragraph + 2 - prose), prose, fact,
            (int)(prose + PROSE_BYTES - paragraph - 2), paragraph + 2, question);
    return text;
}

static void a_planted_fact_at_4k(void **state)
{
    struct fixture *fixture = *state;
    struct hcattn *client = client_of(fixture);
    static const char *const policies[] = {"default", "tiny"};
    char *text = plant(fixture->texts[0]);
    for (size_t i = 0; i < 2; i++) {
        struct hcattn_session_config config = {.policy = policies[i], .ephemeral = true};
        struct hcattn_session session;
        struct hcattn_error error = {0};
        struct answer answer = {0};
        struct hcattn_message message = {.role = "user", .content = text};
        assert_int_equal(hcattn_open_session(client, &config, CALL_MS, &session, &error), 0);
        struct hcattn_generate request = {
            .session = session.session, .input = {.messages = &message, .n_messages = 1}, .max_tokens = 24};
        if (service_generate(client, &request, &answer, &error) < 0)
            fail_msg("generate: %s", error.sentence);
        print_message("%s, %u tokens: %s\n", policies[i], answer.n_prompt, answer.text);
        assert_true(answer.n_prompt > 4000);
        assert_non_null(strstr(answer.text, "74921"));
        service_answer_free(&answer);
        assert_int_equal(hcattn_close_session(client, session.session, CALL_MS, NULL, NULL), 0);
    }
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(presets_at_2k),
        cmocka_unit_test(presets_at_4k),
        cmocka_unit_test(a_planted_fact_at_4k),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
