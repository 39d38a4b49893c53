/*
 * test_cuda_sampling.c - tokens chosen on the (emulated) device: a request that asks for log-probabilities has its logits brought
 * to the host, and its tokens chosen there; another one's are chosen where they are. Both must be the same.
 */
#include "tests/system/jobs.h"
#include "tests/system/service.h"

#include <string.h>

enum { N_PROMPT = 20, N_TOKENS = 12, CALL_MS = 120000 };

static void generate(struct hcattn *client, const uint32_t *ids, const struct hcattn_sampling *sampling, bool logprobs,
                     struct answer *answer)
{
    struct hcattn_error error = {0};
    struct hcattn_session_config config = {.ephemeral = true};
    struct hcattn_session session;
    if (hcattn_open_session(client, &config, CALL_MS, &session, &error) < 0)
        fail_msg("open session: %s", error.sentence);
    struct hcattn_generate request = {.session = session.session,
                                      .input = {.ids = ids, .n_ids = N_PROMPT},
                                      .max_tokens = N_TOKENS,
                                      .sampling = *sampling,
                                      .logprobs = logprobs,
                                      .ignore_end = true};
    if (service_generate(client, &request, answer, &error) < 0)
        fail_msg("generate: %s", error.sentence);
    if (hcattn_close_session(client, session.session, CALL_MS, NULL, &error) < 0)
        fail_msg("close session: %s", error.sentence);
}

static void device_and_host_choose_the_same(void **state)
{
    (void)state;
    uint32_t ids[N_PROMPT];
    jobs_make_ids(3, ids, N_PROMPT);
    const struct hcattn_bias biases[] = {{ids[0], 4}, {ids[1], -4}, {ids[0], 1.5F}};
    const struct hcattn_sampling samplings[] = {
        {.temperature = 0},
        {.temperature = 1, .seed = 1},
        {.temperature = 0.8F, .top_p = 0.9F, .seed = 2, .repeat_penalty = 1.3F},
        {.temperature = 2, .top_k = 40, .min_p = 0.05F, .seed = 3, .presence_penalty = 0.5F, .frequency_penalty = 0.5F},
        {.temperature = 1.5F, .seed = 4, .bias = biases, .n_bias = 3, .penalty_window = 8, .repeat_penalty = 2},
        {.temperature = 0, .repeat_penalty = 1.5F, .bias = biases, .n_bias = 3},
    };
    struct service service;
    service_start(
        &service,
        (const char *const[]){"--model", service_tiny_model(""), "--memory", "64MiB", "--backend", "cuda", NULL}, NULL);
    struct hcattn *client = service.client;
    struct answer first = {0};
    uint32_t n_different = 0;
    for (size_t i = 0; i < sizeof(samplings) / sizeof(samplings[0]); i++) {
        struct answer by_device = {0}, by_host = {0};
        generate(client, ids, &samplings[i], false, &by_device);
        generate(client, ids, &samplings[i], true, &by_host);
        assert_int_equal(by_device.n, N_TOKENS);
        assert_int_equal(by_host.n, N_TOKENS);
        assert_memory_equal(by_device.ids, by_host.ids, N_TOKENS * sizeof(uint32_t));
        if (i == 0)
            first = by_device;
        else
            n_different += memcmp(first.ids, by_device.ids, N_TOKENS * sizeof(uint32_t)) != 0;
        if (i > 0)
            service_answer_free(&by_device);
        service_answer_free(&by_host);
    }
    assert_true(n_different >= 4); /* what was asked for has an effect */
    service_answer_free(&first);
    service_stop(&service);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(device_and_host_choose_the_same),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
