/*
 * test_golden.c - greedy continuations of the real model under full attention, beside what llama.cpp computed from the same
 * weights: with all tokens exactly on the device, as short sessions are by default, and read from the stores at every length.
 */
#include "tests/system/service.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How close: see tests/golden/README.md. */
static const double max_gap = 0.05;  /* between the peer's best two, where a continuation may part from the peer's */
static const double max_mean = 0.02; /* mean |log-probability difference| */

struct golden {
    json_t *root, *continuations;
};

static int set_up(void **state)
{
    static struct golden golden;
    json_error_t error;
    golden.root = json_load_file("tests/golden/continuations.json", 0, &error);
    if (golden.root == NULL)
        fail_msg("tests/golden/continuations.json:%d: %s", error.line, error.text);
    golden.continuations = json_object_get(golden.root, "continuations");
    assert_true(json_array_size(golden.continuations) >= 20);
    *state = &golden;
    return 0;
}

static int tear_down(void **state)
{
    struct golden *golden = *state;
    json_decref(golden->root);
    return 0;
}

static double number(const json_t *array, size_t i)
{
    return json_number_value(json_array_get(array, i));
}

struct difference {
    double sum;
    uint64_t n;
    uint32_t n_parted; /* continuations that went another way */
};

/* Follows the peer's continuation as far as ours is the same. */
static void compare(const json_t *entry, struct hcattn *client, uint32_t max_tokens, struct difference *difference)
{
    const char *kind = json_string_value(json_object_get(entry, "kind"));
    const json_t *prompt_ids = json_object_get(entry, "prompt_ids"), *ids = json_object_get(entry, "ids");
    const json_t *logprobs = json_object_get(entry, "logprobs"), *top = json_object_get(entry, "top");
    struct answer answer = {0};
    service_generate_text(client, json_string_value(json_object_get(entry, "prompt")), max_tokens, 0, &answer);
    assert_int_equal(answer.n_prompt, json_array_size(prompt_ids));
    for (uint32_t i = 0; i < answer.n_prompt; i++)
        assert_int_equal(answer.prompt_ids[i], json_integer_value(json_array_get(prompt_ids, i)));

    bool ended = strcmp(json_string_value(json_object_get(entry, "stopped")), "eos") == 0;
    size_t n = json_array_size(ids);
    if (max_tokens < n) {
        n = max_tokens;
        ended = false;
    }
    for (size_t i = 0; i < n; i++) {
        uint32_t expected = (uint32_t)json_integer_value(json_array_get(ids, i));
        bool at_end = ended && i + 1 == n;
        uint32_t ours = i < answer.n ? answer.ids[i] : answer.finished.end_id;
        if (ours != expected || (at_end && answer.finished.reason != HCATTN_FINISH_END)) {
            const json_t *best = json_array_get(top, i);
            double gap = number(json_array_get(best, 0), 1) - number(json_array_get(best, 1), 1);
            print_message("%s: token %zu is %u, the peer's %u; its best two are %.3f apart\n", kind, i, ours, expected,
                          gap);
            if (gap > max_gap)
                fail_msg("%s parts where the peer is sure", kind);
            difference->n_parted++;
            break;
        }
        if (at_end)
            break;
        difference->sum += fabs((double)answer.logprobs[i] - number(logprobs, i));
        difference->n++;
    }
    service_answer_free(&answer);
}

static void check(void **state, const char *const *arguments, size_t max_prompt, size_t stride, uint32_t max_tokens)
{
    struct golden *golden = *state;
    struct service service;
    struct difference difference = {0};
    service_start(&service, arguments, NULL);
    size_t n = json_array_size(golden->continuations);
    for (size_t i = 0; i < n; i++) {
        const json_t *entry = json_array_get(golden->continuations, i);
        bool chosen = i % stride == 0 || i + 1 == n; /* the last one is the long one */
        if (chosen && json_array_size(json_object_get(entry, "prompt_ids")) <= max_prompt)
            compare(entry, service.client, max_tokens, &difference);
    }
    service_stop(&service);
    double mean = difference.sum / (double)difference.n;
    print_message("%llu log-probabilities, mean difference %.5f; %u continuations parted at a near tie\n",
                  (unsigned long long)difference.n, mean, difference.n_parted);
    assert_true(difference.n >= 32);
    assert_true(mean <= max_mean);
}

static void cpu_back_end(void **state)
{
    check(state, (const char *const[]){"--model", service_real_model(), "--stores", "2", "--policy", "full", NULL},
          SIZE_MAX, 2, 64);
}

static void read_from_the_stores(void **state)
{
    check(state,
          (const char *const[]){"--model", service_real_model(), "--stores", "2", "--policy", "full", "--exact-tokens",
                                "0", NULL},
          SIZE_MAX, 20, 64);
}

static void reference_back_end(void **state)
{
    check(state,
          (const char *const[]){"--model", service_real_model(), "--backend", "reference", "--policy", "full", NULL},
          60, 12, 16);
}

/* ---- the peer on the Q4_1 file itself, where it rounds activations to 8 bits: a looser comparison, teacher-forced ---- */

struct scores {
    const json_t *ids;
    size_t first; /* position of ids[0] */
    const json_t *logprobs;
    struct difference difference;
    uint32_t n_other; /* steps whose most likely token is not the peer's */
};

static int take_scores(void *context, const struct hcattn_scored *scored)
{
    struct scores *scores = context;
    for (size_t i = 0; i < scored->n_scores; i++) {
        size_t step = scored->first + i - scores->first;
        uint32_t id = (uint32_t)json_integer_value(json_array_get(scores->ids, step));
        assert_int_equal(scored->scores[i].n_top, 1);
        scores->n_other += scored->scores[i].top[0].id != id;
        scores->difference.sum += fabs((double)scored->scores[i].logprob - number(scores->logprobs, step));
        scores->difference.n++;
    }
    return 0;
}

static void score(const json_t *entry, struct hcattn *client, struct scores *scores)
{
    const json_t *prompt_ids = json_object_get(entry, "prompt_ids");
    scores->ids = json_object_get(entry, "ids");
    scores->logprobs = json_object_get(entry, "logprobs");
    scores->first = json_array_size(prompt_ids);
    size_t n = scores->first + json_array_size(scores->ids);
    uint32_t *ids = calloc(n, sizeof(*ids));
    for (size_t i = 0; i < n; i++)
        ids[i] = (uint32_t)json_integer_value(i < scores->first ? json_array_get(prompt_ids, i)
                                                                : json_array_get(scores->ids, i - scores->first));
    struct hcattn_session_config config = {.ephemeral = true};
    struct hcattn_session session;
    struct hcattn_error error = {0};
    struct hcattn_score_done done;
    assert_int_equal(hcattn_open_session(client, &config, 60000, &session, &error), 0);
    struct hcattn_score request = {
        .session = session.session, .input = {.ids = ids, .n_ids = n}, .from = scores->first, .top_logprobs = 1};
    struct hcattn_events events = {.context = scores, .scored = take_scores};
    if (hcattn_score(client, &request, &events, 600000, &done, &error) < 0)
        fail_msg("score: %s", error.sentence);
    assert_int_equal(hcattn_close_session(client, session.session, 60000, NULL, NULL), 0);
    free(ids);
}

static void the_peer_with_8_bit_activations(void **state)
{
    (void)state;
    struct service service;
    struct scores scores = {0};
    json_error_t error;
    json_t *root = json_load_file("tests/golden/continuations-q4_1.json", 0, &error);
    assert_non_null(root);
    json_t *list = json_object_get(root, "continuations");
    service_start(&service, (const char *const[]){"--model", service_real_model(), "--policy", "full", NULL}, NULL);
    for (size_t i = 0; i < json_array_size(list); i += 3)
        if (json_array_size(json_object_get(json_array_get(list, i), "prompt_ids")) < 100)
            score(json_array_get(list, i), service.client, &scores);
    service_stop(&service);
    json_decref(root);
    double mean = scores.difference.sum / (double)scores.difference.n;
    print_message("%llu log-probabilities, mean difference %.4f; another best token in %u steps\n",
                  (unsigned long long)scores.difference.n, mean, scores.n_other);
    assert_true(scores.difference.n > 500);
    assert_true(mean <= 0.04);
    assert_true(scores.n_other * 100 <= scores.difference.n * 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cpu_back_end),
        cmocka_unit_test(read_from_the_stores),
        cmocka_unit_test(reference_back_end),
        cmocka_unit_test(the_peer_with_8_bit_activations),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
