/*
 * test_soak.c - eight sessions of 6k tokens side by side for a while: generations that are cancelled now and then, forks,
 * rings that come and go. What a session continues with stays the same to the last token, and in the end nothing is left.
 * In sanitizer builds nothing leaks or races either: service_stop() looks for their reports. With HCATTN_TEST_LONG
 * (scripts/test --long) it goes on for two minutes.
 */
#include "tests/system/jobs.h"
#include "tests/system/rows.h"
#include "tests/system/volley.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"

#ifdef HCATTN_SANITIZED
enum { SOAK_S = 40, CALL_MS = 1800000, FORK_BLOCKS = 90 };
#else
enum { SOAK_S = 10, CALL_MS = 300000, FORK_BLOCKS = 60 };
#endif
enum { LONG_SOAK_S = 120 };
#define MODEL "--layers 2 --heads 2 --kv-heads 1 --embd 32 --head-dim 32 --ff 32 --context 8192"
enum { N_SESSIONS = 8, N_ROOTS = 2, N_PROMPT = 6000, N_MOST = 7800, N_STORES = 2, MAX_TOKENS = 24, N_CTX = 8192 };

static const char *const policies[N_ROOTS] = {"default", "rot4,mass=0.9,weights"};

/* Sessions whose first n_prompt tokens are given; all others follow from them. */
struct root {
    uint64_t session;
    uint32_t ids[N_PROMPT];
};

struct soaker {
    const struct service *service;
    const struct root *root;
    uint32_t number;
    uint64_t seed;
    pthread_t thread;
    struct hcattn *client;
    uint64_t session;
    uint32_t ids[N_CTX];     /* of the session, as far as the client was told */
    uint32_t n_ids, n_given; /* from n_given on all are generated in one go */
    uint32_t n_lives, n_generated, n_cancelled, n_forks, n_compared;
    char trouble[600];
};

static _Atomic bool end;

static bool fails(struct soaker *soaker, int result, int allowed, const struct hcattn_error *error)
{
    if (result >= 0 || result == allowed)
        return false;
    snprintf(soaker->trouble, sizeof(soaker->trouble), "session %u: %s", soaker->number, error->sentence);
    return true;
}

/* A generation of at most max_tokens into ids, stopped after `stop` of them. */
struct taken {
    uint32_t *ids;
    uint32_t n, stop;
};

static int take(void *context, const struct hcattn_generated *generated)
{
    struct taken *taken = context;
    for (size_t i = 0; i < generated->n_ids; i++)
        taken->ids[taken->n++] = generated->ids[i];
    return taken->n >= taken->stop;
}

static int generate(struct soaker *soaker, uint64_t session, struct taken *taken, uint32_t max_tokens)
{
    struct hcattn_error error = {0};
    struct hcattn_generate request = {
        .session = session, .at = HCATTN_AT_ANY, .max_tokens = max_tokens, .ignore_end = true};
    struct hcattn_events events = {.context = taken, .generated = take};
    int r = hcattn_generate(soaker->client, &request, &events, CALL_MS, NULL, &error);
    return fails(soaker, r, taken->stop <= max_tokens ? -ECANCELED : 0, &error) ? -1 : 0;
}

/* The session again from its root: a fork, and tokens of its own. */
static int live_again(struct soaker *soaker)
{
    struct hcattn_error error = {0};
    struct hcattn_fork fork = {
        .session = soaker->root->session,
        .n_tokens = 64 * (uint64_t)(FORK_BLOCKS + volley_random(&soaker->seed, N_PROMPT / 64 - FORK_BLOCKS + 1))};
    struct hcattn_forked forked;
    if (soaker->session != 0 &&
        fails(soaker, hcattn_close_session(soaker->client, soaker->session, CALL_MS, NULL, &error), 0, &error))
        return -1;
    if (fails(soaker, hcattn_fork(soaker->client, &fork, CALL_MS, &forked, &error), 0, &error))
        return -1;
    soaker->session = forked.session;
    soaker->n_ids = (uint32_t)forked.n_tokens;
    memcpy(soaker->ids, soaker->root->ids, soaker->n_ids * sizeof(uint32_t));
    uint32_t n_more = N_PROMPT - soaker->n_ids; /* up to 6k: every session is as long */
    jobs_make_ids(volley_random(&soaker->seed, 1000), soaker->ids + soaker->n_ids, n_more);
    struct hcattn_input input = {.ids = soaker->ids + soaker->n_ids, .n_ids = n_more};
    int r = hcattn_append(soaker->client, soaker->session, &input, soaker->n_ids, NULL, CALL_MS, NULL, &error);
    soaker->n_given = soaker->n_ids = N_PROMPT;
    soaker->n_lives++;
    return fails(soaker, r, 0, &error) ? -1 : 0;
}

/* After a cancel the journal may hold tokens that were not told: what follows them is compared from here on. */
static int count_again(struct soaker *soaker)
{
    struct hcattn_error error = {0};
    struct hcattn_description description;
    if (fails(soaker, hcattn_describe_session(soaker->client, soaker->session, CALL_MS, &description, &error), 0,
              &error))
        return -1;
    uint64_t n_tokens = description.stats.n_tokens;
    hcattn_description_free(&description);
    if (n_tokens < soaker->n_ids || n_tokens > soaker->n_ids + MAX_TOKENS) {
        snprintf(soaker->trouble, sizeof(soaker->trouble), "session %u holds %llu tokens after a cancel, %u were told",
                 soaker->number, (unsigned long long)n_tokens, soaker->n_ids);
        return -1;
    }
    soaker->n_ids = soaker->n_given = (uint32_t)n_tokens;
    return 0;
}

static int go_on(struct soaker *soaker)
{
    uint32_t max_tokens = 1 + volley_random(&soaker->seed, MAX_TOKENS);
    bool cancels = volley_random(&soaker->seed, 6) == 0;
    struct taken taken = {.ids = soaker->ids + soaker->n_ids,
                          .stop = cancels ? 1 + volley_random(&soaker->seed, max_tokens) : UINT32_MAX};
    if (generate(soaker, soaker->session, &taken, max_tokens) < 0)
        return -1;
    soaker->n_generated += taken.n;
    soaker->n_ids += taken.n;
    if (!cancels)
        return 0;
    soaker->n_cancelled++;
    return count_again(soaker);
}

/* A fork somewhere in what was generated goes on as the session did. */
static int fork_and_compare(struct soaker *soaker)
{
    uint32_t at = (soaker->n_given + 63) / 64 * 64;
    if (soaker->n_ids < at + MAX_TOKENS)
        return 0;
    struct hcattn_error error = {0};
    struct hcattn_fork fork = {.session = soaker->session, .n_tokens = at + 63, .ephemeral = true};
    struct hcattn_forked forked;
    uint32_t ids[MAX_TOKENS + 1];
    struct taken taken = {.ids = ids, .stop = UINT32_MAX};
    if (fails(soaker, hcattn_fork(soaker->client, &fork, CALL_MS, &forked, &error), 0, &error) ||
        generate(soaker, forked.session, &taken, MAX_TOKENS) < 0 ||
        fails(soaker, hcattn_close_session(soaker->client, forked.session, CALL_MS, NULL, &error), 0, &error))
        return -1;
    soaker->n_forks++;
    soaker->n_compared += taken.n;
    if (forked.n_tokens != at || taken.n != MAX_TOKENS ||
        memcmp(ids, soaker->ids + at, MAX_TOKENS * sizeof(uint32_t)) != 0) {
        snprintf(soaker->trouble, sizeof(soaker->trouble), "session %u: its fork at %u goes another way",
                 soaker->number, at);
        return -1;
    }
    return 0;
}

static void *soak(void *context)
{
    struct soaker *soaker = context;
    struct hcattn_config config = {.runtime_dir = soaker->service->directory};
    struct hcattn_error error = {0};
    if (fails(soaker, hcattn_open(&config, &soaker->client, &error), 0, &error))
        return NULL;
    int r = live_again(soaker);
    while (r == 0 && !atomic_load(&end)) {
        r = go_on(soaker);
        if (r == 0 && volley_random(&soaker->seed, 4) == 0)
            r = fork_and_compare(soaker);
        if (r == 0 && soaker->n_ids > N_MOST)
            r = live_again(soaker);
    }
    if (r == 0)
        fails(soaker, hcattn_close_session(soaker->client, soaker->session, CALL_MS, NULL, &error), 0, &error);
    soaker->client = hcattn_close(soaker->client);
    return NULL;
}

static void open_roots(struct service *service, struct root roots[N_ROOTS])
{
    for (uint32_t i = 0; i < N_ROOTS; i++) {
        struct hcattn_error error = {0};
        struct hcattn_input input = {.ids = roots[i].ids, .n_ids = N_PROMPT};
        roots[i].session = jobs_open_session(service->client, policies[i], HCATTN_EXACT_NONE);
        jobs_make_ids(100 + i, roots[i].ids, N_PROMPT);
        if (hcattn_append(service->client, roots[i].session, &input, 0, NULL, CALL_MS, NULL, &error) < 0)
            fail_msg("append: %s", error.sentence);
    }
}

static void eight_sessions(void **state)
{
    static struct root roots[N_ROOTS];
    static struct soaker soakers[N_SESSIONS];
    (void)state;
    struct service service;
    service_start(&service,
                  (const char *const[]){"--model", service_tiny_model(MODEL), "--stores", "2", "--memory", "64MiB",
                                        "--exact-tokens", "0", "--micro-batches", "2", NULL},
                  NULL);
    open_roots(&service, roots);
    uint64_t soak_s = getenv("HCATTN_TEST_LONG") != NULL ? LONG_SOAK_S : SOAK_S;
    uint64_t begun = clock_now_us(), deadline = clock_deadline_us(soak_s * 1000000);
    for (uint32_t i = 0; i < N_SESSIONS; i++) {
        soakers[i] = (struct soaker){.service = &service, .root = &roots[i % N_ROOTS], .number = i, .seed = i + 1};
        assert_int_equal(pthread_create(&soakers[i].thread, NULL, soak, &soakers[i]), 0);
    }
    for (uint32_t n = 0; clock_now_us() < deadline; n++) {
        clock_sleep_us(500000);
        if (n % 4 == 3) /* for a moment the coordinator carries all */
            for (int i = 0; i < 2; i++)
                assert_int_equal(hcattn_set_transport(service.client, i == 0 ? "routed" : "ring", CALL_MS, NULL), 0);
    }
    atomic_store(&end, true);
    uint32_t n_generated = 0, n_cancelled = 0, n_forks = 0, n_lives = 0;
    for (uint32_t i = 0; i < N_SESSIONS; i++) {
        pthread_join(soakers[i].thread, NULL);
        n_generated += soakers[i].n_generated;
        n_cancelled += soakers[i].n_cancelled;
        n_forks += soakers[i].n_forks;
        n_lives += soakers[i].n_lives;
    }
    print_message("%.0f s: %u tokens, %u generations cancelled, %u forks compared, %u sessions\n",
                  (double)(clock_now_us() - begun) / 1e6, n_generated, n_cancelled, n_forks, n_lives);
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        if (soakers[i].trouble[0] != '\0') {
            service_show_log(&service);
            fail_msg("%s", soakers[i].trouble);
        }
    assert_true(n_generated > 100 && n_cancelled > 0);
    for (uint32_t i = 0; i < N_ROOTS; i++)
        jobs_close_session(service.client, roots[i].session);
    deadline = clock_deadline_us(UINT64_C(20000000));
    while (rows_n_used_blocks(&service, N_STORES) != 0 && clock_now_us() < deadline)
        clock_sleep_us(20000);
    assert_int_equal(rows_n_used_blocks(&service, N_STORES), 0);
    service_stop(&service);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(eight_sessions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
