/*
 * test_quality.c - what the default policy costs on the real model: the divergence of its distributions from those of full
 * attention at 4k tokens of context, for prose and for a list that is read twice; a fact planted among
 * 6k tokens.
 */
#include "tests/system/service.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/system/volley.h"

enum { CALL_MS = 900000, N_CONTEXT = 4096, N_DECODE = 192, N_TOKENS = N_CONTEXT + N_DECODE };

static const char prose_path[] = "tests/system/texts/prose.txt";
/* Mean nats. */
static const double max_prose = 0.0006, max_list = 0.0015;

struct fixture {
    struct service service;
    char *prose;
};

static int set_up(void **state)
{
    static struct fixture fixture;
    FILE *file = fopen(prose_path, "r");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    long n = ftell(file);
    rewind(file);
    fixture.prose = calloc(1, (size_t)n + 1);
    assert_int_equal(fread(fixture.prose, 1, (size_t)n, file), n);
    fclose(file);
    *state = &fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    if (fixture->service.pid != 0)
        service_stop(&fixture->service);
    free(fixture->prose);
    return 0;
}

/* The one of all tests here, or skip(). */
static struct hcattn *client_of(struct fixture *fixture)
{
    const char *model = service_real_model();
    if (fixture->service.pid == 0)
        service_start(&fixture->service, (const char *const[]){"--model", model, "--memory", "1GiB", NULL}, NULL);
    return fixture->service.client;
}

/* ---- divergence ---- */

/* The distributions that one policy gave, beside those of the one before. */
struct scores {
    float *all; /* [N_DECODE][n_vocab]; NULL: none yet */
    uint32_t n_vocab, n;
    bool compare;
    double sum, largest;
    uint32_t n_same_best;
};

static uint32_t best_of(const float *logprobs, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        best = logprobs[i] > logprobs[best] ? i : best;
    return best;
}

static void compare(struct scores *scores, const float *expected, const float *got)
{
    double divergence = 0;
    for (uint32_t i = 0; i < scores->n_vocab; i++)
        divergence += exp((double)expected[i]) * ((double)expected[i] - (double)got[i]);
    scores->sum += divergence;
    scores->largest = divergence > scores->largest ? divergence : scores->largest;
    scores->n_same_best += best_of(expected, scores->n_vocab) == best_of(got, scores->n_vocab);
}

static int take_scores(void *context, const struct hcattn_scored *scored)
{
    struct scores *scores = context;
    for (size_t i = 0; i < scored->n_scores; i++) {
        const struct hcattn_logprobs *one = &scored->scores[i];
        assert_int_equal(scored->first + i, N_CONTEXT + scores->n);
        assert_true(scores->n < N_DECODE);
        if (scores->all == NULL) {
            scores->n_vocab = (uint32_t)one->n_all;
            scores->all = malloc(N_DECODE * one->n_all * sizeof(float));
            assert_non_null(scores->all);
        }
        assert_int_equal(one->n_all, scores->n_vocab);
        float *expected = scores->all + (size_t)scores->n * scores->n_vocab;
        if (scores->compare)
            compare(scores, expected, one->all);
        else
            memcpy(expected, one->all, scores->n_vocab * sizeof(float));
        scores->n++;
    }
    return 0;
}

static void score(struct hcattn *client, const char *policy, const uint32_t *ids, struct scores *scores)
{
    struct hcattn_session_config config = {.policy = policy, .ephemeral = true};
    struct hcattn_session session;
    struct hcattn_error error = {0};
    struct hcattn_score_done done;
    struct hcattn_events events = {.context = scores, .scored = take_scores};
    assert_int_equal(hcattn_open_session(client, &config, CALL_MS, &session, &error), 0);
    struct hcattn_score request = {
        .session = session.session, .input = {.ids = ids, .n_ids = N_TOKENS}, .from = N_CONTEXT, .all_logprobs = true};
    scores->n = 0;
    if (hcattn_score(client, &request, &events, CALL_MS, &done, &error) < 0)
        fail_msg("score: %s", error.sentence);
    assert_int_equal(scores->n, N_DECODE);
    struct hcattn_description description;
    assert_int_equal(hcattn_describe_session(client, session.session, CALL_MS, &description, NULL), 0);
    double kept = 0;
    uint32_t n_heads = description.n_layers * description.n_kv_heads;
    for (uint32_t i = 0; description.counted && i < n_heads; i++)
        kept += description.counts.kept[i] / n_heads;
    print_message("%s: %.1f %% of the old tokens read; %.0f s of prefill, %.1f ms a decode step\n", policy, 100 * kept,
                  (double)done.timings.prefill_us / 1e6, (double)done.timings.decode_us / 1e3 / N_DECODE);
    hcattn_description_free(&description);
    assert_int_equal(hcattn_close_session(client, session.session, CALL_MS, NULL, NULL), 0);
}

static void check_divergence(struct fixture *fixture, const char *what, const char *text, const char *policy,
                             double limit)
{
    struct hcattn_input input = {.text = text};
    struct hcattn_tokens tokens;
    struct scores scores = {0};
    struct hcattn *client = client_of(fixture);
    assert_int_equal(hcattn_tokenize(client, &input, CALL_MS, &tokens, NULL), 0);
    print_message("%s: %zu tokens\n", what, tokens.n_ids);
    assert_true(tokens.n_ids >= N_TOKENS);
    const uint32_t *ids = tokens.ids + (strcmp(what, "prose") == 0 ? 0 : tokens.n_ids - N_TOKENS);
    score(client, "full", ids, &scores);
    scores.compare = true;
    score(client, policy, ids, &scores);
    double mean = scores.sum / N_DECODE;
    print_message("%s: mean divergence %.6f (largest %.4f), the same best token in %u of %u steps\n", what, mean,
                  scores.largest, scores.n_same_best, N_DECODE);
    hcattn_tokens_free(&tokens);
    free(scores.all);
    assert_true(mean <= limit);
    assert_true(mean > 0); /* it is not the same thing twice */
}

static void prose_at_4k(void **state)
{
    struct fixture *fixture = *state;
    check_divergence(fixture, "prose", fixture->prose, "default", max_prose);
}

enum { N_KEYS = 320, N_AGAIN = 30, LINE_BYTES = 40 };

/* Keys and random values, and then some of them again: each digit is found by looking 4k tokens back. */
static const char *make_list(bool in_order)
{
    static char text[(N_KEYS + N_AGAIN) * LINE_BYTES];
    uint32_t values[N_KEYS];
    uint64_t seed = 20260101;
    size_t n = 0;
    for (uint32_t i = 0; i < N_KEYS; i++)
        values[i] = volley_random(&seed, 100000);
    for (uint32_t i = 0; i < N_KEYS + N_AGAIN; i++) {
        uint32_t key = i < N_KEYS ? i : in_order ? i - N_KEYS : volley_random(&seed, N_KEYS);
        n += (size_t)sprintf(text + n, "key-%u is value %05u\n", key, values[key]);
    }
    return text;
}

static void list_at_4k(void **state)
{
    check_divergence(*state, "list", make_list(true), "default", max_list);
}

/*
 * Keys in random order, of which the model itself is unsure, are too much for 2-bit keys: 0.013 was measured under policy
 * default, most of it in seven of 192 steps (0.017 in a simulation in floating point); 0.0006 with rot3, 0.0005 with rot4.
 */
static void lookups_at_4k(void **state)
{
    if (getenv("HCATTN_TEST_LONG") == NULL)
        skip(); /* scripts/test --long */
    check_divergence(*state, "lookups", make_list(false), "quality", max_list);
}

/* ---- a fact ---- */

static const char fact[] = "The secret passcode of the harbour office is 74921. Remember it.\n\n";
static const char question[] = "\n\nWhat is the secret passcode of the harbour office? Answer with the number only.";

/* The prose with the fact before the paragraph in its middle, and the question after it. */
static char *plant(const char *prose)
{
    char *text = calloc(1, strlen(prose) + sizeof(fact) + sizeof(question) + 64);
    assert_non_null(text);
    const char *paragraph = strstr(prose + strlen(prose) / 2, "\n\n");
    assert_non_null(paragraph);
    sprintf(text, "Here is a story.\n\n%.*s%s%s%s", (int)(paragraph + 2 - prose), prose, fact, paragraph + 2, question);
    return text;
}

static void a_planted_fact_at_6k(void **state)
{
    struct fixture *fixture = *state;
    struct hcattn *client = client_of(fixture);
    static const char *const policies[] = {"full", "default"};
    char *text = plant(fixture->prose);
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
        assert_true(answer.n_prompt > 6000);
        assert_non_null(strstr(answer.text, "74921"));
        service_answer_free(&answer);
        assert_int_equal(hcattn_close_session(client, session.session, CALL_MS, NULL, NULL), 0);
    }
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prose_at_4k),
        cmocka_unit_test(list_at_4k),
        cmocka_unit_test(lookups_at_4k),
        cmocka_unit_test(a_planted_fact_at_6k),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
