/*
 * test_cuda_stores.c - a worker on the emulated device, and the stores from which its prefills have K and V: killed, through the
 * coordinator, cancelled, in exchanges that the device cannot reach. The tokens are those of an undisturbed generation.
 */
#include "tests/system/jobs.h"
#include "tests/system/rows.h"
#include "tests/system/service.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"

enum { N_PROMPT = 230, N_TOKENS = 6, CALL_MS = 600000 };

static uint32_t ids[N_PROMPT];
static struct answer truth; /* of a service that is not disturbed */

static void start(struct service *service, const char *backend, const char *registered)
{
    const char *model = service_tiny_model("--layers 2 --heads 4 --kv-heads 2 --embd 64 --ff 64");
    service_start(service,
                  (const char *const[]){"--model", model, "--backend", backend, "--stores", "2", "--memory", "64MiB",
                                        "--exact-tokens", "0", NULL},
                  (const char *const[]){"HCATTN_PREFILL_CHUNK=48", registered, NULL});
}

static uint64_t open_session(struct service *service)
{
    struct hcattn_session session;
    struct hcattn_error error = {0};
    if (hcattn_open_session(service->client, NULL, CALL_MS, &session, &error) < 0)
        fail_msg("open: %s", error.sentence);
    return session.session;
}

static void close_session(struct service *service, uint64_t session)
{
    assert_int_equal(hcattn_close_session(service->client, session, CALL_MS, NULL, NULL), 0);
}

/* Appends the prompt, then generates: the last token is computed once more, alone, which a device does to rounding. */
static void run(struct service *service, const struct hcattn_events *events, struct answer *answer)
{
    const uint64_t session = open_session(service);
    const struct hcattn_input input = {.ids = ids, .n_ids = N_PROMPT};
    const struct hcattn_generate generate = {
        .session = session, .at = N_PROMPT, .max_tokens = N_TOKENS, .logprobs = true, .ignore_end = true};
    struct hcattn_appended appended;
    struct hcattn_error error = {0};
    if (hcattn_append(service->client, session, &input, 0, events, CALL_MS, &appended, &error) < 0)
        fail_msg("append: %s", error.sentence);
    assert_int_equal(appended.n_tokens, N_PROMPT);
    *answer = (struct answer){0};
    if (service_generate(service->client, &generate, answer, &error) < 0)
        fail_msg("generate: %s", error.sentence);
    close_session(service, session);
}

static void assert_true_answer(struct service *service, const struct hcattn_events *events)
{
    struct answer answer;
    run(service, events, &answer);
    service_answer_assert_equal(&truth, &answer);
    service_answer_free(&answer);
}

static int set_up(void **state)
{
    static struct service service;
    jobs_make_ids(3, ids, N_PROMPT);
    start(&service, "cpu", NULL); /* gathers the model's statistics, sooner */
    service_stop(&service);
    start(&service, "cuda", NULL);
    run(&service, NULL, &truth);
    assert_int_equal(truth.n, N_TOKENS);
    *state = &service;
    return 0;
}

static int tear_down(void **state)
{
    service_answer_free(&truth);
    service_stop(*state);
    return 0;
}

/* At half of a prefill. */
struct interruption {
    pid_t victim; /* 0: the request is cancelled */
    bool done;
};

static int interrupt(void *context, uint64_t n_done, uint64_t n_total)
{
    struct interruption *interruption = context;
    if (n_done < n_total / 2 || interruption->done)
        return 0;
    interruption->done = true;
    if (interruption->victim == 0)
        return -1;
    assert_int_equal(kill(interruption->victim, SIGKILL), 0);
    return 0;
}

static void assert_nothing_left(struct service *service)
{
    uint64_t deadline = clock_deadline_us(20000000);
    while (rows_n_used_blocks(service, 2) != 0 && clock_now_us() < deadline)
        clock_sleep_us(50000);
    assert_int_equal(rows_n_used_blocks(service, 2), 0);
}

static void kill_each_store(struct service *service)
{
    const pid_t worker = service_process(service, "hc-gpu-worker", 0);
    for (uint32_t i = 0; i < 2; i++) {
        struct interruption interruption = {.victim = service_process(service, "hc-value-store", i)};
        const struct hcattn_events events = {.context = &interruption, .progress = interrupt};
        assert_true_answer(service, &events);
        assert_true(interruption.done);
    }
    assert_int_equal(service_process(service, "hc-gpu-worker", 0), worker);
    assert_nothing_left(service);
}

static void a_store_is_killed(void **state)
{
    kill_each_store(*state);
}

static void a_store_is_killed_behind_the_coordinator(void **state)
{
    struct service *service = *state;
    assert_int_equal(hcattn_set_transport(service->client, "routed", CALL_MS, NULL), 0);
    kill_each_store(service);
    assert_int_equal(hcattn_set_transport(service->client, "ring", CALL_MS, NULL), 0);
}

static void a_prefill_is_cancelled(void **state)
{
    struct service *service = *state;
    struct interruption interruption = {0};
    const struct hcattn_events events = {.context = &interruption, .progress = interrupt};
    const struct hcattn_input input = {.ids = ids, .n_ids = N_PROMPT};
    const uint64_t session = open_session(service);
    assert_int_equal(hcattn_append(service->client, session, &input, 0, &events, CALL_MS, NULL, NULL), -ECANCELED);
    assert_true_answer(service, NULL); /* another session, at once */
    close_session(service, session);
    assert_nothing_left(service);
}

/* The device reaches no exchange, or one of two: the other is copied, with the same bits. */
static void exchanges_that_cannot_be_registered(void **state)
{
    (void)state;
    static const char *const registered[] = {"HCATTN_TEST_CUDA_REGISTERED_BYTES=0",
                                             "HCATTN_TEST_CUDA_REGISTERED_BYTES=1500000"};
    for (size_t i = 0; i < 2; i++) {
        struct service service;
        start(&service, "cuda", registered[i]);
        assert_true_answer(&service, NULL);
        assert_true(service_log_contains(&service, "MiB of the exchange could be registered with the device"));
        service_stop(&service);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_store_is_killed),
        cmocka_unit_test(a_store_is_killed_behind_the_coordinator),
        cmocka_unit_test(a_prefill_is_cancelled),
        cmocka_unit_test(exchanges_that_cannot_be_registered),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
