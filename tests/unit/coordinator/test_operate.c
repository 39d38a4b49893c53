/* The real coordinator with fakes around it: policies, exact tokens, sessions in detail, Drain. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/coordinator/fakes.h"

static struct fakes fakes;

static int teardown(void **state)
{
    (void)state;
    fakes_finish(&fakes);
    return 0;
}

static int setup(void **state)
{
    (void)state;
    fakes_start(&fakes, 2, NULL);
    fakes_all_ready(&fakes);
    return 0;
}

static int setup_given(void **state)
{
    (void)state;
    fakes_start(&fakes, 2,
                (const char *const[]){"--policy", "quality", "--exact-tokens", "0", "--hang-timeout", "1s",
                                      "--recovery-timeout", "700ms", NULL});
    fakes_all_ready(&fakes);
    return 0;
}

static void expect_opened(uint64_t id, const char *policy, uint32_t exact_tokens)
{
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(SESSION_OPENED));
    assert_string_equal(reply->session_opened->policy, policy);
    assert_int_equal(reply->session_opened->exact_tokens, exact_tokens);
    hcattn__reply__free_unpacked(reply, NULL);
}

static void expect_policy_set(uint64_t id, const char *policy)
{
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(POLICY_SET));
    assert_string_equal(reply->policy_set->policy, policy);
    hcattn__reply__free_unpacked(reply, NULL);
}

/* A Run of the session: what it says. It is left with n_tokens. */
static void run_once(uint64_t session, const char *policy, uint32_t exact_tokens, uint64_t n_tokens)
{
    uint64_t id = fake_client_append(&fakes, session, "abc");
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    assert_string_equal(run->run->policy, policy);
    assert_int_equal(run->run->exact_tokens, exact_tokens);
    fake_store_journal(&fakes, session, n_tokens);
    fake_worker_finished(&fakes.workers[0], run->work, 0, n_tokens);
    fake_client_drop(&fakes, id, REPLY(APPENDED));
    fakes_drop(run);
}

static const struct session_record *record_of(const struct fake_store *store, uint64_t session)
{
    for (uint32_t i = 0; i < store->segment.header->session_capacity; i++) {
        const struct session_record *record = segments_record((struct hand_segment *)(uintptr_t)&store->segment, i);
        if (atomic_load(&record->state) == SESSION_RECORD_LIVE && record->session == session)
            return record;
    }
    return NULL;
}

static void terms_of_a_session(void **state)
{
    (void)state;
    static const char *const good[] = {
        "full", "default", "quality", "rot2,deviation=0.02", "f16,mass=1", "rot3,mass=0.9,weights,notail"};
    static const char *const bad[] = {
        "clever",         "rot2",
        "rot2,mass=1.5",  "rot2,mass=0.9,weights,weights",
        "rot2,mass=0.9,", "rot2,deviation=0.0000000000000000000000000000000000000000000000000002"};
    for (uint64_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        expect_opened(fake_client_ask_exact(&fakes, 10 + i, good[i], (int64_t)i), good[i], (uint32_t)i);
        assert_string_equal(record_of(&fakes.stores[0], 10 + i)->policy, good[i]);
        assert_int_equal(record_of(&fakes.stores[1], 10 + i)->exact_tokens, i);
    }
    run_once(15, good[5], 5, 3);
    for (uint64_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        Hcattn__Reply *reply = fake_client_take(&fakes, fake_client_ask_open(&fakes, 30 + i, bad[i]), REPLY(ERROR));
        assert_int_equal(reply->error->code, ERROR_CODE(NOT_SUPPORTED));
        assert_non_null(strstr(reply->error->sentence, "policy \""));
        hcattn__reply__free_unpacked(reply, NULL);
    }
    fake_client_expect_error(&fakes, fake_client_ask_exact(&fakes, 40, "", INT64_C(1) << 31),
                             ERROR_CODE(INVALID_ARGUMENT));
    /* the server's defaults, and what is not named agrees with what is there */
    expect_opened(fake_client_ask_open(&fakes, 41, ""), "default", 1024);
    expect_opened(fake_client_ask_open(&fakes, 15, ""), good[5], 5);
    expect_opened(fake_client_ask_exact(&fakes, 15, good[5], 5), good[5], 5);
    fake_client_expect_error(&fakes, fake_client_ask_exact(&fakes, 15, "", 6), ERROR_CODE(CONFLICT));
    fake_client_expect_error(&fakes, fake_client_ask_open(&fakes, 15, "full"), ERROR_CODE(CONFLICT));
    Hcattn__Reply *reply = fake_client_list(&fakes);
    assert_int_equal(reply->session_list->n_sessions, 7);
    for (size_t i = 0; i < 7; i++)
        if (reply->session_list->sessions[i]->session == 15) {
            assert_string_equal(reply->session_list->sessions[i]->policy, good[5]);
            assert_int_equal(reply->session_list->sessions[i]->exact_tokens, 5);
            assert_int_equal(reply->session_list->sessions[i]->n_tokens, 3);
        }
    hcattn__reply__free_unpacked(reply, NULL);
}

static void terms_outlive_the_coordinator(void **state)
{
    (void)state;
    expect_opened(fake_client_ask_exact(&fakes, 5, "rot4,mass=0.9", 0), "rot4,mass=0.9", 0);
    fakes_kill_coordinator(&fakes);
    FAKES_WAIT(&fakes, fakes.stores[0].hung_up && fakes.stores[1].hung_up && fakes.workers[0].hung_up);
    fakes_start_coordinator(&fakes, NULL);
    for (uint32_t i = 0; i < 2; i++)
        fake_store_register(&fakes, i, true);
    fake_worker_register(&fakes, 0);
    run_once(5, "rot4,mass=0.9", 0, 3);
}

static void options_are_the_defaults(void **state)
{
    (void)state;
    expect_opened(fake_client_ask_open(&fakes, 5, ""), "quality", 0);
    expect_opened(fake_client_ask_exact(&fakes, 6, "", 9), "quality", 9);
    Hcattn__Reply *reply = fake_client_stats(&fakes);
    assert_string_equal(reply->stats->policy, "quality");
    assert_int_equal(reply->stats->exact_tokens, 0);
    assert_false(reply->stats->draining);
    hcattn__reply__free_unpacked(reply, NULL);
    run_once(5, "quality", 0, 3);
}

static void the_policy_of_an_empty_session(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 5, false);
    expect_policy_set(fake_client_set_policy(&fakes, 5, "rot4,mass=0.9"), "rot4,mass=0.9");
    for (int i = 0; i < 2; i++)
        assert_string_equal(record_of(&fakes.stores[i], 5)->policy, "rot4,mass=0.9");
    uint32_t n_opens = fakes.stores[0].n_opens;
    expect_policy_set(fake_client_set_policy(&fakes, 5, "rot4,mass=0.9"), "rot4,mass=0.9"); /* as it is */
    assert_int_equal(fakes.stores[0].n_opens, n_opens);
    /* blocks that were reserved and not used are given back, and the session is as new */
    uint64_t id = fake_client_append(&fakes, 5, "abc");
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    fake_client_expect_error(&fakes, fake_client_set_policy(&fakes, 5, "full"), ERROR_CODE(BUSY));
    fake_worker_error(&fakes.workers[0], run->work, ERROR_CODE(INTERNAL));
    fake_client_expect_error(&fakes, id, ERROR_CODE(INTERNAL));
    fakes_drop(run);
    assert_int_equal(fake_store_held(&fakes.stores[0], 5) + fake_store_held(&fakes.stores[1], 5), 1);
    expect_policy_set(fake_client_set_policy(&fakes, 5, "full"), "full");
    assert_int_equal(fake_store_held(&fakes.stores[0], 5) + fake_store_held(&fakes.stores[1], 5), 0);
    run_once(5, "full", 1024, 3);
    Hcattn__Reply *reply = fake_client_take(&fakes, fake_client_set_policy(&fakes, 5, "quality"), REPLY(ERROR));
    assert_int_equal(reply->error->code, ERROR_CODE(CONFLICT));
    assert_int_equal(reply->error->n_tokens, 3);
    hcattn__reply__free_unpacked(reply, NULL);
    expect_policy_set(fake_client_set_policy(&fakes, 5, "full"), "full"); /* which it has */
    fake_client_expect_error(&fakes, fake_client_set_policy(&fakes, 6, "full"), ERROR_CODE(NOT_FOUND));
    fake_client_expect_error(&fakes, fake_client_set_policy(&fakes, 5, ""), ERROR_CODE(NOT_SUPPORTED));
    fake_client_expect_error(&fakes, fake_client_set_policy(&fakes, 0, "clever"), ERROR_CODE(NOT_SUPPORTED));
}

static void the_policy_of_later_sessions(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 5, false);
    expect_policy_set(fake_client_set_policy(&fakes, 0, "full"), "full");
    expect_opened(fake_client_ask_open(&fakes, 6, ""), "full", 1024);
    expect_opened(fake_client_ask_open(&fakes, 5, ""), "default", 1024); /* open already */
    Hcattn__Reply *reply = fake_client_stats(&fakes);
    assert_string_equal(reply->stats->policy, "full");
    hcattn__reply__free_unpacked(reply, NULL);
}

static void stores_fail_while_a_policy_is_set(void **state)
{
    (void)state;
    struct fake_store *store = &fakes.stores[1];
    fake_client_open_session(&fakes, 5, false);
    store->open_status = -ENOSPC; /* the old record is gone, the new one is refused: the session cannot live */
    fake_client_expect_error(&fakes, fake_client_set_policy(&fakes, 5, "full"), ERROR_CODE(INTERNAL));
    store->open_status = 0;
    FAKES_WAIT(&fakes, !record_of(&fakes.stores[0], 5));
    fake_client_expect_error(&fakes, fake_client_append(&fakes, 5, "x"), ERROR_CODE(NOT_FOUND));
    /* lost in the middle: told again */
    fake_client_open_session(&fakes, 6, false);
    uint64_t dead = store->incarnation;
    uint32_t n_opens = store->n_opens;
    store->silent = true;
    uint64_t id = fake_client_set_policy(&fakes, 6, "full");
    FAKES_WAIT(&fakes, store->n_opens == n_opens + 1);
    fake_client_drop(&fakes, fake_client_cancel(&fakes, id),
                     REPLY(CANCELLED)); /* nobody waits: it happens all the same */
    fake_client_expect_error(&fakes, id, ERROR_CODE(CANCELLED));
    fake_store_rebirth(store);
    fake_supervisor_child_dead(&fakes.store_supervisor[1], dead);
    fake_store_register(&fakes, 1, false);
    run_once(6, "full", 1024, 3);
    assert_string_equal(record_of(store, 6)->policy, "full");
}

/* A reservation that fails from the first block on takes the record with it: it is written again. */
static void an_empty_session_outlives_a_refused_reservation(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 5, false);
    fakes.stores[0].reserve_status = fakes.stores[1].reserve_status = -EIO;
    fake_client_expect_error(&fakes, fake_client_append(&fakes, 5, "abc"), ERROR_CODE(INTERNAL));
    fakes.stores[0].reserve_status = fakes.stores[1].reserve_status = 0;
    run_once(5, "default", 1024, 3);
}

static void a_session_in_detail(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 5, false);
    run_once(5, "default", 1024, 3);
    uint64_t id = fake_client_describe(&fakes, 5);
    Hcattn__Work__WorkRequest *count = fake_worker_take(&fakes, &fakes.workers[0], WORK(COUNT));
    assert_int_equal(count->count->session, 5);
    fake_worker_counts(&fakes.workers[0], count->work, 42, false);
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(SESSION_DESCRIBED));
    assert_int_equal(reply->session_described->stats->session, 5);
    assert_int_equal(reply->session_described->stats->n_tokens, 3);
    assert_int_equal(reply->session_described->counts->n_steps, 42);
    assert_int_equal(reply->session_described->counts->n_kept[1], 4);
    assert_int_equal(reply->session_described->n_layers, segments_shape.n_layers);
    assert_int_equal(reply->session_described->n_kv_heads, segments_shape.n_kv_heads);
    assert_null(reply->session_described->profile);
    hcattn__reply__free_unpacked(reply, NULL);
    fakes_drop(count);
    /* with FastGen residency */
    id = fake_client_describe(&fakes, 5);
    count = fake_worker_take(&fakes, &fakes.workers[0], WORK(COUNT));
    fake_worker_counts(&fakes.workers[0], count->work, 44, true);
    reply = fake_client_take(&fakes, id, REPLY(SESSION_DESCRIBED));
    const Hcattn__HeadProfile *profile = reply->session_described->profile;
    assert_int_equal(reply->session_described->counts->n_steps, 44);
    assert_non_null(profile);
    assert_int_equal(profile->n_tokens, 64);
    assert_true(profile->recovery == 0.95f && profile->n_classes == 2 && profile->n_kept_mass == 2);
    assert_int_equal(profile->classes[1], HCATTN__HEAD_CLASS__HEAD_LOCAL);
    assert_true(profile->kept_mass[1] == 0.97f);
    hcattn__reply__free_unpacked(reply, NULL);
    fakes_drop(count);
    /* the worker does not know it; what it says late is nothing to anybody */
    id = fake_client_describe(&fakes, 5);
    count = fake_worker_take(&fakes, &fakes.workers[0], WORK(COUNT));
    fake_worker_error(&fakes.workers[0], count->work, ERROR_CODE(NOT_FOUND));
    fake_worker_counts(&fakes.workers[0], count->work, 43, true);
    reply = fake_client_take(&fakes, id, REPLY(SESSION_DESCRIBED));
    assert_null(reply->session_described->counts);
    hcattn__reply__free_unpacked(reply, NULL);
    fakes_drop(count);
    fake_client_expect_error(&fakes, fake_client_describe(&fakes, 6), ERROR_CODE(NOT_FOUND));
    fake_client_expect_error(&fakes, fake_client_describe(&fakes, 0), ERROR_CODE(INVALID_ARGUMENT));
    /* it is closed, or its worker dies, while that is asked */
    id = fake_client_describe(&fakes, 5);
    fakes_drop(fake_worker_take(&fakes, &fakes.workers[0], WORK(COUNT)));
    uint64_t dead = fakes.workers[0].incarnation;
    fake_worker_rebirth(&fakes.workers[0]);
    fake_supervisor_child_dead(&fakes.worker_supervisor[0], dead);
    reply = fake_client_take(&fakes, id, REPLY(SESSION_DESCRIBED));
    assert_null(reply->session_described->counts);
    hcattn__reply__free_unpacked(reply, NULL);
    /* no worker */
    FAKES_WAIT(&fakes, fakes.stores[0].worker_gone == dead);
    reply = fake_client_take(&fakes, fake_client_describe(&fakes, 5), REPLY(SESSION_DESCRIBED));
    assert_null(reply->session_described->counts);
    assert_false(reply->session_described->stats->held);
    hcattn__reply__free_unpacked(reply, NULL);
}

static void a_worker_that_does_not_count(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 5, false);
    Hcattn__Reply *reply = fake_client_take(&fakes, fake_client_describe(&fakes, 5), REPLY(ERROR));
    assert_int_equal(reply->error->code, ERROR_CODE(UNAVAILABLE));
    assert_non_null(strstr(reply->error->sentence, "gpu-worker 0"));
    hcattn__reply__free_unpacked(reply, NULL);
    /* closed meanwhile */
    uint64_t id = fake_client_describe(&fakes, 5);
    Hcattn__Work__WorkRequest *count = fake_worker_take(&fakes, &fakes.workers[0], WORK(COUNT));
    fakes_drop(count);
    count = fake_worker_take(&fakes, &fakes.workers[0], WORK(COUNT)); /* of the second one */
    fake_client_drop(&fakes, fake_client_close_session(&fakes, 5), REPLY(SESSION_CLOSED));
    fake_worker_counts(&fakes.workers[0], count->work, 1, false);
    fake_client_expect_error(&fakes, id, ERROR_CODE(NOT_FOUND));
    fakes_drop(count);
}

static void expect_draining(bool draining)
{
    Hcattn__Reply *reply = fake_client_stats(&fakes);
    assert_int_equal(reply->stats->draining, draining);
    hcattn__reply__free_unpacked(reply, NULL);
}

static void expect_drained(uint64_t id, uint32_t n_finished, uint32_t n_sessions)
{
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(DRAINED));
    assert_int_equal(reply->drained->n_finished, n_finished);
    assert_int_equal(reply->drained->n_sessions, n_sessions);
    hcattn__reply__free_unpacked(reply, NULL);
}

static void a_drain_waits_for_those_that_run_and_wait(void **state)
{
    (void)state;
    for (uint64_t i = 1; i <= 3; i++)
        fake_client_open_session(&fakes, i, false);
    uint64_t ids[3];
    Hcattn__Work__WorkRequest *run, *waited;
    ids[0] = fake_client_generate(&fakes, 1, "abc", 1000);
    fake_client_drop(&fakes, ids[0], REPLY(ACCEPTED));
    run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    uint64_t drain = fake_client_drain(&fakes, false);
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, drain));
    expect_draining(true);
    fake_client_expect_error(&fakes, fake_client_generate(&fakes, 2, "x", 1), ERROR_CODE(UNAVAILABLE));
    fake_client_expect_error(&fakes, fake_client_append(&fakes, 2, "x"), ERROR_CODE(UNAVAILABLE));
    fake_client_expect_error(&fakes, fake_client_score(&fakes, 2, "xy", 1), ERROR_CODE(UNAVAILABLE));
    fake_client_expect_error(&fakes, fake_client_ask_open(&fakes, 9, ""), ERROR_CODE(UNAVAILABLE));
    Hcattn__Reply *reply = fake_client_take(&fakes, fake_client_fork(&fakes, 2, 9, 0), REPLY(ERROR));
    assert_int_equal(reply->error->code, ERROR_CODE(UNAVAILABLE));
    assert_non_null(strstr(reply->error->sentence, "draining"));
    hcattn__reply__free_unpacked(reply, NULL);
    /* a running one may be asked for again, and everything else is served */
    fake_client_resume(&fakes, ids[0], 1, "abc", 1000, 0, 0);
    fake_client_drop(&fakes, ids[0], REPLY(ACCEPTED));
    fake_client_drop(&fakes, fake_client_close_session(&fakes, 3), REPLY(SESSION_CLOSED));
    fake_worker_finished(&fakes.workers[0], run->work, 1, 4);
    fake_client_drop(&fakes, ids[0], REPLY(GENERATE_DONE));
    fakes_drop(run);
    expect_drained(drain, 1, 2);
    fake_client_expect_error(&fakes, fake_client_append(&fakes, 2, "x"), ERROR_CODE(UNAVAILABLE)); /* still */
    expect_drained(fake_client_drain(&fakes, false), 0, 2);
    expect_drained(fake_client_drain(&fakes, true), 0, 2);
    expect_draining(false);
    ids[1] = fake_client_append(&fakes, 2, "abc");
    fake_client_drop(&fakes, ids[1], REPLY(ACCEPTED));
    waited = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    /* resumed by somebody: the one who waited is told */
    drain = fake_client_drain(&fakes, false);
    expect_drained(fake_client_drain(&fakes, true), 0, 2);
    fake_client_expect_error(&fakes, drain, ERROR_CODE(CONFLICT));
    fake_worker_finished(&fakes.workers[0], waited->work, 0, 3);
    fake_client_drop(&fakes, ids[1], REPLY(APPENDED));
    fakes_drop(waited);
}

static void a_drain_waits_for_the_line(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 1, false);
    for (uint64_t i = 0; i < 8; i++) { /* 8 sessions of 15 or 16 blocks fill 128 */
        fake_client_open_session(&fakes, 10 + i, false);
        uint64_t id = fake_client_generate(&fakes, 10 + i, "abc", 1000);
        fake_client_drop(&fakes, id, REPLY(ACCEPTED));
        Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
        fake_worker_finished(&fakes.workers[0], run->work, 1, 4);
        fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
        fakes_drop(run);
    }
    uint64_t id = fake_client_append(&fakes, 1, "abc"), drain = fake_client_drain(&fakes, false);
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, drain));
    assert_false(fake_client_has(&fakes.client, id));
    fake_client_drop(&fakes, fake_client_close_session(&fakes, 10), REPLY(SESSION_CLOSED));
    fake_client_drop(&fakes, id, REPLY(ACCEPTED)); /* it was there before: it is served */
    Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    fake_worker_finished(&fakes.workers[0], run->work, 0, 3);
    fake_client_drop(&fakes, id, REPLY(APPENDED));
    fakes_drop(run);
    expect_drained(drain, 1, 8);
}

static void a_drain_is_patient_and_outlives_its_client(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 1, false);
    uint64_t id = fake_client_append(&fakes, 1, "abc");
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    fakes.workers[0].busy = true;
    uint64_t drain = fake_client_drain(&fakes, false);
    for (int i = 0; i < 60; i++) { /* longer than anything else may wait */
        fakes.workers[0].progress++;
        fakes_pump(&fakes);
    }
    assert_false(fake_client_has(&fakes.client, drain));
    fake_client_drop(&fakes, fake_client_cancel(&fakes, drain), REPLY(CANCELLED));
    fake_client_expect_error(&fakes, drain, ERROR_CODE(CANCELLED));
    expect_draining(true);
    fakes.workers[0].busy = false;
    fake_worker_finished(&fakes.workers[0], run->work, 0, 3);
    fake_client_drop(&fakes, id, REPLY(APPENDED));
    fakes_drop(run);
    expect_drained(fake_client_drain(&fakes, false), 0, 1);
}

int main(void)
{
#define TEST(name, how) cmocka_unit_test_setup_teardown(name, how, teardown)
    const struct CMUnitTest tests[] = {
        TEST(terms_of_a_session, setup),
        TEST(terms_outlive_the_coordinator, setup),
        TEST(options_are_the_defaults, setup_given),
        TEST(the_policy_of_an_empty_session, setup),
        TEST(the_policy_of_later_sessions, setup),
        TEST(stores_fail_while_a_policy_is_set, setup),
        TEST(an_empty_session_outlives_a_refused_reservation, setup),
        TEST(a_session_in_detail, setup),
        TEST(a_worker_that_does_not_count, setup_given),
        TEST(a_drain_waits_for_those_that_run_and_wait, setup),
        TEST(a_drain_waits_for_the_line, setup),
        TEST(a_drain_is_patient_and_outlives_its_client, setup_given),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
