/*
 * test_reversible.c - nothing is forgotten: a fact of the prompt is asked for after hundreds of decode steps about something
 * else, and is found under the service's policies; what evicts tokens for good has lost it by then. On the real model.
 *
 * What is checked is the answer, not whether some head selected the fact's tokens meanwhile: to the service that makes no
 * difference, since nothing that was selected or not is remembered. An evaluation tells no log-probabilities of single tokens;
 * so there are two texts, with the same answer at their end, but of one of them the fact has another number. By how much the
 * tail is likelier behind the true fact is what the fact was worth, in nats, to those who still had it.
 */
#include "client/hcattn_jobs.h"
#include "tests/system/service.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The fact is in the prompt, hundreds of tokens before its end; MIN_BETWEEN tokens are decoded before the question. */
enum { CALL_MS = 900000, CONTEXT = 1088, TAIL = 448, N_DIGITS = 5, MIN_BETWEEN = 400 };
enum { FACT_AT = 6000, END_AT = FACT_AT + 3200 }; /* bytes of the prose; the paragraphs that begin next */

static const char prose_path[] = "tests/system/texts/prose.txt";
static const char digits[] = "74921", other_digits[] = "30586";
static const char fact[] = "The secret passcode of the harbour office is 74921. Remember it.\n\n";
static const char question[] = "Question: What is the secret passcode of the harbour office?\n"
                               "Answer: The secret passcode of the harbour office is 74921";

/* What the fact is worth under them, as a share of what it is under full attention. */
static const struct {
    const char *preset;
    double at_least, at_most;
} cases[] = {
    {"default", 0.9, 1.1},
    {"tiny", 0.9, 1.1},
    {"h2o=0.05", -1, 0.4},
    {"streaming", -1, 0.2},
};
enum { N_CASES = sizeof(cases) / sizeof(cases[0]), N_TEXTS = 2 };
static const double min_worth = 10; /* nats, under full attention: two a digit */

struct fixture {
    struct service service;
    char *text, *other_text;     /* story, fact, story, question and answer: CONTEXT tokens */
    struct hcattn_tokens tokens; /* of the first */
    size_t n_before, n_question; /* tokens before the fact; of the question without the answer */
};

/* ---- the text ---- */

static size_t count(struct hcattn *client, const char *text, bool no_bos)
{
    struct hcattn_input input = {.text = text, .no_bos = no_bos};
    struct hcattn_tokens tokens;
    assert_int_equal(hcattn_tokenize(client, &input, CALL_MS, &tokens, NULL), 0);
    size_t n = tokens.n_ids;
    hcattn_tokens_free(&tokens);
    return n;
}

static const char *paragraph_after(const char *text, size_t at)
{
    const char *end = strstr(text + at, "\n\n");
    assert_non_null(end);
    return end + 2;
}

/* As long as it has to be: cut at its front. */
static void make_text(struct fixture *fixture)
{
    struct hcattn *client = fixture->service.client;
    char prose[32768], head[32768];
    FILE *file = fopen(prose_path, "r");
    assert_non_null(file);
    prose[fread(prose, 1, sizeof(prose) - 1, file)] = '\0';
    fclose(file);
    const char *middle = paragraph_after(prose, FACT_AT), *end = paragraph_after(prose, END_AT);
    char *text = calloc(1, strlen(prose) + sizeof(fact) + sizeof(question));
    assert_non_null(text);
    sprintf(text, "%.*s%s%.*s%s", (int)(middle - prose), prose, fact, (int)(end - middle), middle, question);
    size_t n, cut = 0;
    while ((n = count(client, text + cut, false)) != CONTEXT) {
        assert_true(n > CONTEXT); /* a byte fewer is a token fewer at most, but for rare luck: a miss shows here */
        cut += n - CONTEXT;
    }
    fixture->text = strdup(text + cut);
    fixture->other_text = strdup(text + cut);
    free(text);
    memcpy(strstr(fixture->other_text, digits), other_digits, N_DIGITS);
    assert_int_equal(count(client, fixture->other_text, false), CONTEXT);
    struct hcattn_input input = {.text = fixture->text};
    assert_int_equal(hcattn_tokenize(client, &input, CALL_MS, &fixture->tokens, NULL), 0);
    snprintf(head, sizeof(head), "%.*s", (int)(strstr(fixture->text, fact) - fixture->text), fixture->text);
    fixture->n_before = count(client, head, false);
    fixture->n_question = count(client, question, true) - N_DIGITS;
    char *answer;
    assert_int_equal(
        hcattn_detokenize(client, fixture->tokens.ids + CONTEXT - N_DIGITS, N_DIGITS, false, CALL_MS, &answer, NULL),
        0);
    assert_string_equal(answer, digits);
    free(answer);
    size_t n_decoded = TAIL - fixture->n_question - N_DIGITS;
    print_message("the fact at token %zu, decoded from %u on, the question at %zu\n", fixture->n_before, CONTEXT - TAIL,
                  CONTEXT - fixture->n_question - N_DIGITS);
    assert_true(n_decoded >= MIN_BETWEEN);
    /* it is no longer in the window when decoding begins */
    assert_true(fixture->n_before + count(client, fact, true) + 128 < CONTEXT - TAIL);
}

/* The one of all tests here, or skip(). */
static struct fixture *started(void **state)
{
    struct fixture *fixture = *state;
    const char *model = service_real_model();
    if (fixture->service.pid != 0)
        return fixture;
    service_start(&fixture->service, (const char *const[]){"--model", model, "--memory", "256MiB", NULL}, NULL);
    make_text(fixture);
    return fixture;
}

static int set_up(void **state)
{
    static struct fixture fixture;
    *state = &fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    if (fixture->service.pid != 0)
        service_stop(&fixture->service);
    hcattn_tokens_free(&fixture->tokens);
    free(fixture->text);
    free(fixture->other_text);
    return 0;
}

/* ---- against what evicts ---- */

struct perplexities {
    uint32_t n;
    double full[N_TEXTS], preset[N_TEXTS][N_CASES];
};

static int take_row(void *context, const struct hcattn_eval_row *row)
{
    struct perplexities *perplexities = context;
    uint32_t text = perplexities->n / N_CASES, preset = perplexities->n % N_CASES;
    assert_int_equal(row->index, perplexities->n);
    assert_true(text < N_TEXTS);
    assert_string_equal(row->preset, cases[preset].preset);
    print_message("%s, %s (%s): divergence %.5f, p99 %.4f; perplexity %.3f, of full attention %.3f\n", row->text,
                  row->preset, row->meaning, row->kld_mean, row->kld_p99, row->perplexity, row->full_perplexity);
    perplexities->full[text] = row->full_perplexity;
    perplexities->preset[text][preset] = row->perplexity;
    perplexities->n++;
    return 0;
}

/* Nats, over all positions whose next token is there. */
static double worth(double perplexity, double other_perplexity)
{
    return (TAIL - 1) * log(other_perplexity / perplexity);
}

static void policies_find_what_evictions_lose(void **state)
{
    struct fixture *fixture = started(state);
    const struct hcattn_text texts[N_TEXTS] = {{.name = "true fact", .text = fixture->text},
                                               {.name = "other fact", .text = fixture->other_text}};
    const char *presets[N_CASES];
    struct hcattn_error error = {0};
    struct perplexities perplexities = {0};
    uint32_t n_wrong = 0;
    for (uint32_t i = 0; i < N_CASES; i++)
        presets[i] = cases[i].preset;
    const struct hcattn_evaluate request = {
        .texts = texts, .n_texts = N_TEXTS, .context = CONTEXT, .tail = TAIL, .presets = presets, .n_presets = N_CASES};
    const struct hcattn_job_events events = {.context = &perplexities, .row = take_row};
    if (hcattn_evaluate(fixture->service.client, &request, &events, CALL_MS, NULL, &error) < 0)
        fail_msg("evaluate: %s", error.sentence);
    assert_int_equal(perplexities.n, N_TEXTS * N_CASES);
    double full = worth(perplexities.full[0], perplexities.full[1]);
    print_message("the fact is worth %.1f nats under full attention\n", full);
    assert_true(full >= min_worth);
    for (uint32_t i = 0; i < N_CASES; i++) {
        double share = worth(perplexities.preset[0][i], perplexities.preset[1][i]) / full;
        bool is_right = share >= cases[i].at_least && share <= cases[i].at_most;
        print_message("and under %s %.1f %% of that%s\n", cases[i].preset, 100 * share, is_right ? "" : ": WRONG");
        n_wrong += !is_right;
    }
    assert_int_equal(n_wrong, 0);
}

/* ---- a session ---- */

/* All that follows the prompt is decoded, the question as well. */
static void ask(struct fixture *fixture, const char *policy)
{
    struct hcattn *client = fixture->service.client;
    const uint32_t *ids = fixture->tokens.ids, n_prompt = CONTEXT - TAIL;
    struct hcattn_session_config config = {.policy = policy, .exact_tokens = HCATTN_EXACT_NONE, .ephemeral = true};
    struct hcattn_session session;
    struct hcattn_error error = {0};
    struct hcattn_score_done done;
    assert_int_equal(hcattn_open_session(client, &config, CALL_MS, &session, &error), 0);
    struct hcattn_input prompt = {.ids = ids, .n_ids = n_prompt};
    if (hcattn_append(client, session.session, &prompt, 0, NULL, CALL_MS, NULL, &error) < 0)
        fail_msg("append: %s", error.sentence);
    struct hcattn_score rest = {.session = session.session,
                                .input = {.ids = ids + n_prompt, .n_ids = TAIL - N_DIGITS},
                                .at = n_prompt,
                                .from = n_prompt};
    if (hcattn_score(client, &rest, NULL, CALL_MS, &done, &error) < 0)
        fail_msg("score: %s", error.sentence);
    assert_int_equal(done.n_tokens, CONTEXT - N_DIGITS);
    assert_int_equal(done.timings.n_decode, TAIL - N_DIGITS);
    struct answer answer = {0};
    struct hcattn_generate go_on = {
        .session = session.session, .at = CONTEXT - N_DIGITS, .max_tokens = N_DIGITS, .ignore_end = true};
    if (service_generate(client, &go_on, &answer, &error) < 0)
        fail_msg("generate: %s", error.sentence);
    print_message("%s: \"%s\" after %u decode steps of %.1f ms\n", policy, answer.text, TAIL - N_DIGITS,
                  (double)done.timings.decode_us / 1e3 / (TAIL - N_DIGITS));
    assert_string_equal(answer.text, digits);
    service_answer_free(&answer);
    assert_int_equal(hcattn_close_session(client, session.session, CALL_MS, NULL, NULL), 0);
}

static void sessions_answer_after_400_steps(void **state)
{
    struct fixture *fixture = started(state);
    ask(fixture, "full"); /* or the question would be too hard for the model itself */
    ask(fixture, "default");
    ask(fixture, "tiny");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(policies_find_what_evictions_lose),
        cmocka_unit_test(sessions_answer_after_400_steps),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
