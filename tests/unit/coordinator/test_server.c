/* The real coordinator with fakes around it: registration, admission, streams, ends of requests. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/coordinator/fakes.h"

static struct fakes fakes;

static int setup(void **state)
{
    (void)state;
    fakes_start(&fakes, 2, NULL);
    return 0;
}

static int setup_ready(void **state)
{
    (void)state;
    fakes_start(&fakes, 2, NULL);
    fakes_all_ready(&fakes);
    return 0;
}

static int setup_without_queue(void **state)
{
    (void)state;
    fakes_start(&fakes, 2, (const char *const[]){"--max-queue", "0", NULL});
    fakes_all_ready(&fakes);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    fakes_finish(&fakes);
    return 0;
}

static void expect_health(bool ready, const char *part)
{
    Hcattn__Reply *reply = fake_client_health(&fakes);
    assert_true(reply->health->live);
    assert_int_equal(reply->health->ready, ready);
    assert_int_not_equal(reply->health->coordinator, 0);
    if (!strstr(reply->health->sentence, part))
        fail_msg("\"%s\" does not say \"%s\"", reply->health->sentence, part);
    hcattn__reply__free_unpacked(reply, NULL);
}

/* Starts a Generate and gives the Run that reaches the worker. */
static Hcattn__Work__WorkRequest *run_generate(uint64_t session, const char *text, uint32_t max_tokens,
                                               uint64_t *ret_id)
{
    *ret_id = fake_client_generate(&fakes, session, text, max_tokens);
    fake_client_drop(&fakes, *ret_id, REPLY(ACCEPTED));
    return fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
}

static void expect_generated(uint64_t id, uint32_t first, uint32_t n)
{
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(GENERATED));
    assert_int_equal(reply->generated->first, first);
    assert_int_equal(reply->generated->n_ids, n);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(reply->generated->ids[i], 500 + first + i);
    hcattn__reply__free_unpacked(reply, NULL);
}

static void finish(uint64_t session, const Hcattn__Work__WorkRequest *run, uint64_t id, uint32_t n_generated)
{
    uint64_t n_tokens = run->run->at + run->run->n_input_ids + n_generated;
    fake_store_journal(&fakes, session, n_tokens);
    fake_worker_finished(&fakes.workers[0], run->work, n_generated, n_tokens);
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(GENERATE_DONE));
    assert_int_equal(reply->generate_done->n_tokens, n_tokens);
    assert_int_equal(reply->generate_done->n_generated, n_generated);
    hcattn__reply__free_unpacked(reply, NULL);
}

static void registration_in_any_order(void **state)
{
    (void)state;
    expect_health(false, "value-store 1 is not there");
    expect_health(false, "no gpu-worker");
    fake_store_register(&fakes, 0, false);
    fakes_quiet(&fakes);
    assert_int_equal(fakes.stores[0].n_formats, 0); /* nobody has said which shape */
    expect_health(false, "waits for a worker's row shape");
    fake_worker_register(&fakes, 0);
    FAKES_WAIT(&fakes, fakes.stores[0].n_formats == 1 && fakes.workers[0].n_exchange_ready == 1);
    assert_int_equal(fakes.stores[0].segment.header->shape.head_dim, segments_shape.head_dim);
    expect_health(false, "value-store 1 is not there");
    fake_store_register(&fakes, 1, false);
    FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 2);
    expect_health(true, "");
    assert_int_equal(fakes.workers[0].store_route[1], fakes.stores[1].route);
    assert_int_equal(fakes.workers[0].store_incarnation[1], fakes.stores[1].incarnation);
    assert_false(fakes.workers[0].segment_writable);
}

static void those_in_the_way_are_refused_by_name(void **state)
{
    (void)state;
    fakes_all_ready(&fakes);
    /* a second store 0: the first one is kept aside */
    struct fake_store first = fakes.stores[0];
    fakes.stores[0] = (struct fake_store){.index = 0, .incarnation = 4, .fd = -1, .segment = {.fd = -1}};
    fake_store_register(&fakes, 0, false);
    FAKES_WAIT(&fakes, fakes.stores[0].refused[0] && fakes.stores[0].hung_up);
    assert_non_null(strstr(fakes.stores[0].refused, "value-store 0 is alive"));
    fakes.stores[0] = first;
    /* a store beyond what is expected is no matter: it joins */
    fake_store_register(&fakes, 2, false);
    FAKES_WAIT(&fakes, fakes.workers[0].n_exchange_ready == 3);
    expect_health(true, "");
    /* a worker with another model */
    fakes.workers[1].model = 0xdef;
    fake_worker_register(&fakes, 1);
    FAKES_WAIT(&fakes, fakes.workers[1].refused[0] && fakes.workers[1].hung_up);
    assert_non_null(strstr(fakes.workers[1].refused, "one model at a time"));
    /* and one with the same is welcome */
    fakes.workers[1].model = fakes.workers[0].model;
    fake_worker_register(&fakes, 1);
    FAKES_WAIT(&fakes, fakes.workers[1].n_exchange_ready == 3);
    expect_health(true, "");
}

static void one_generation(void **state)
{
    (void)state;
    uint64_t id, session = fake_client_open_session(&fakes, 0, false);
    assert_int_not_equal(session, 0);
    assert_int_equal(fakes.stores[0].n_opens, 1);
    assert_int_equal(fakes.stores[1].n_opens, 1);

    id = fake_client_generate(&fakes, session, "hello", 100);
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(ACCEPTED));
    assert_int_equal(reply->accepted->n_prompt_ids, 5);
    assert_int_equal(reply->accepted->prompt_ids[1], 'e');
    assert_int_equal(reply->accepted->at, 0);
    assert_int_equal(reply->accepted->reserved_tokens, 128); /* 5 + 100 + 1 in blocks of 64 */
    hcattn__reply__free_unpacked(reply, NULL);
    assert_int_equal(fake_store_held(&fakes.stores[0], session), 1);
    assert_int_equal(fake_store_held(&fakes.stores[1], session), 1);

    Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    assert_int_equal(run->run->session, session);
    assert_string_equal(run->run->policy, "default");
    assert_int_equal(run->run->n_blocks, 2);
    assert_int_equal(run->run->n_input_ids, 5);
    assert_int_equal(run->run->at, 0);
    assert_int_equal(run->run->max_tokens, 100);
    assert_int_equal(run->run->resume_from, 0);
    assert_int_equal(run->run->lane_store.len, LAYOUT_N_LANES);
    for (uint32_t number = 0; number < 2; number++) {
        struct fake_store *store = &fakes.stores[run->run->lane_store.data[number]];
        const struct block_header *header = segments_block(&store->segment, run->run->blocks[number]->index);
        assert_int_equal(header->session, session);
        assert_int_equal(header->number, number);
        assert_int_equal(header->handle.generation, run->run->blocks[number]->generation);
    }

    Hcattn__Reply *health = fake_client_health(&fakes);
    assert_int_equal(health->health->n_running, 1);
    assert_int_equal(health->health->running[0], id);
    hcattn__reply__free_unpacked(health, NULL);

    fake_worker_progress(&fakes.workers[0], run->work, 3);
    fake_client_drop(&fakes, id, REPLY(PROGRESS));
    fake_worker_generated(&fakes.workers[0], run->work, 0, 2);
    expect_generated(id, 0, 2);
    fake_worker_generated(&fakes.workers[0], run->work, 2, 1);
    expect_generated(id, 2, 1);
    fake_store_journal(&fakes, session, 8);
    fake_worker_finished(&fakes.workers[0], run->work, 3, 8);
    reply = fake_client_take(&fakes, id, REPLY(GENERATE_DONE));
    assert_int_equal(reply->generate_done->n_tokens, 8);
    assert_non_null(reply->generate_done->timings);
    assert_true(reply->generate_done->timings->queued_us > 0);
    hcattn__reply__free_unpacked(reply, NULL);
    hcattn__work__work_request__free_unpacked(run, NULL);

    /* the next one goes on where the journal ends, in the blocks that are there */
    uint32_t n_reserves = fakes.stores[0].n_reserves + fakes.stores[1].n_reserves;
    id = fake_client_generate(&fakes, session, "more", 50);
    reply = fake_client_take(&fakes, id, REPLY(ACCEPTED));
    assert_int_equal(reply->accepted->at, 8);
    hcattn__reply__free_unpacked(reply, NULL);
    assert_int_equal(fakes.stores[0].n_reserves + fakes.stores[1].n_reserves, n_reserves);
    run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    assert_int_equal(run->run->at, 8);
    finish(session, run, id, 50);
    hcattn__work__work_request__free_unpacked(run, NULL);

    id = fake_client_close_session(&fakes, session);
    reply = fake_client_take(&fakes, id, REPLY(SESSION_CLOSED));
    assert_int_equal(reply->session_closed->freed_bytes, 2 * fakes.stores[0].segment.header->block_bytes);
    hcattn__reply__free_unpacked(reply, NULL);
    assert_int_equal(fake_store_held(&fakes.stores[0], session), 0);
    Hcattn__Work__WorkRequest *forget = fake_worker_take(&fakes, &fakes.workers[0], WORK(FORGET));
    assert_int_equal(forget->forget->session, session);
    hcattn__work__work_request__free_unpacked(forget, NULL);
}

static void append_and_score(void **state)
{
    (void)state;
    uint64_t session = fake_client_open_session(&fakes, 77, false);
    assert_int_equal(session, 77);
    uint64_t id = fake_client_append(&fakes, session, "0123456789");
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    assert_int_equal(run->run->max_tokens, 0);
    assert_false(run->run->score);
    fake_store_journal(&fakes, session, 10);
    fake_worker_finished(&fakes.workers[0], run->work, 0, 10);
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(APPENDED));
    assert_int_equal(reply->appended->n_input_tokens, 10);
    assert_int_equal(reply->appended->n_tokens, 10);
    hcattn__reply__free_unpacked(reply, NULL);
    hcattn__work__work_request__free_unpacked(run, NULL);

    id = fake_client_score(&fakes, session, "abcdef", 12);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    assert_true(run->run->score);
    assert_int_equal(run->run->score_from, 12);
    fake_worker_scored(&fakes.workers[0], run->work, 12, 3);
    fake_worker_scored(&fakes.workers[0], run->work, 15, 1);
    reply = fake_client_take(&fakes, id, REPLY(SCORED));
    assert_int_equal(reply->scored->first, 12);
    assert_int_equal(reply->scored->n_scores, 3);
    hcattn__reply__free_unpacked(reply, NULL);
    reply = fake_client_take(&fakes, id, REPLY(SCORED));
    assert_int_equal(reply->scored->first, 15);
    hcattn__reply__free_unpacked(reply, NULL);
    fake_worker_finished(&fakes.workers[0], run->work, 0, 16);
    fake_client_drop(&fakes, id, REPLY(SCORE_DONE));
    hcattn__work__work_request__free_unpacked(run, NULL);

    fake_client_expect_error(&fakes, fake_client_score(&fakes, session, "abc", 0), ERROR_CODE(INVALID_ARGUMENT));
    fake_client_expect_error(&fakes, fake_client_score(&fakes, session, "abc", 500), ERROR_CODE(INVALID_ARGUMENT));
}

static void what_does_not_fit_is_refused_with_numbers(void **state)
{
    (void)state;
    uint64_t session = fake_client_open_session(&fakes, 1, false);
    char text[1101];
    memset(text, 'x', sizeof(text));
    text[1100] = 0;
    uint64_t id = fake_client_generate(&fakes, session, text, 0);
    Hcattn__Reply *reply = fake_client_take(&fakes, id, REPLY(ERROR));
    assert_int_equal(reply->error->code, ERROR_CODE(CONTEXT_EXCEEDED));
    assert_int_equal(reply->error->n_prompt_tokens, 1100);
    assert_int_equal(reply->error->n_ctx, 1024);
    hcattn__reply__free_unpacked(reply, NULL);
    text[1000] = 0;
    id = fake_client_generate(&fakes, session, text, 25);
    reply = fake_client_take(&fakes, id, REPLY(ERROR));
    assert_int_equal(reply->error->code, ERROR_CODE(CONTEXT_EXCEEDED));
    assert_int_equal(reply->error->max_tokens, 25);
    hcattn__reply__free_unpacked(reply, NULL);
    /* the default is made to fit */
    Hcattn__Work__WorkRequest *run = run_generate(session, text, 0, &id);
    assert_int_equal(run->run->max_tokens, 24);
    finish(session, run, id, 24);
    hcattn__work__work_request__free_unpacked(run, NULL);
    /* 17 blocks of 128 are used; stores of 64 blocks each have room for six more sessions of 17 */
    for (uint64_t i = 0; i < 6; i++) {
        fake_client_open_session(&fakes, 10 + i, false);
        run = run_generate(10 + i, text, 0, &id);
        finish(10 + i, run, id, 24);
        hcattn__work__work_request__free_unpacked(run, NULL);
    }
    fake_client_open_session(&fakes, 99, false);
    id = fake_client_generate(&fakes, 99, text, 0);
    reply = fake_client_take(&fakes, id, REPLY(ERROR));
    uint64_t block_bytes = fakes.stores[0].segment.header->block_bytes;
    assert_int_equal(reply->error->code, ERROR_CODE(NO_MEMORY));
    assert_int_equal(reply->error->bytes_asked, 17 * block_bytes);
    assert_true(reply->error->bytes_free < 17 * block_bytes);
    assert_int_equal(reply->error->bytes_free % block_bytes, 0);
    hcattn__reply__free_unpacked(reply, NULL);
    /* with one session closed there is room */
    fake_client_drop(&fakes, fake_client_close_session(&fakes, 10), REPLY(SESSION_CLOSED));
    run = run_generate(99, text, 0, &id);
    finish(99, run, id, 24);
    hcattn__work__work_request__free_unpacked(run, NULL);
}

static void typed_errors(void **state)
{
    (void)state;
    uint64_t id, session = fake_client_open_session(&fakes, 5, false);
    fake_client_expect_error(&fakes, fake_client_ask_open(&fakes, 6, "no-such-policy"), ERROR_CODE(NOT_SUPPORTED));
    fake_client_drop(&fakes, fake_client_ask_open(&fakes, 5, "default"), REPLY(SESSION_OPENED)); /* the same again */
    fake_client_expect_error(&fakes, fake_client_generate(&fakes, 4711, "x", 1), ERROR_CODE(NOT_FOUND));
    fake_client_expect_error(&fakes, fake_client_generate(&fakes, 0, "x", 1), ERROR_CODE(INVALID_ARGUMENT));
    fake_client_expect_error(&fakes, fake_client_close_session(&fakes, 4711), ERROR_CODE(NOT_FOUND));
    fake_client_expect_error(&fakes, fake_client_generate(&fakes, session, "", 1), ERROR_CODE(INVALID_ARGUMENT));
    fake_client_expect_error(&fakes, fake_client_generate(&fakes, session, NULL, 1), ERROR_CODE(INVALID_ARGUMENT));
    fake_client_expect_error(&fakes, fake_client_append(&fakes, session, ""), ERROR_CODE(INVALID_ARGUMENT));
    fake_client_expect_error(&fakes, fake_client_generate(&fakes, session, "\xc3(", 1), ERROR_CODE(INVALID_ARGUMENT));
    fake_client_expect_error(&fakes, fake_client_resume(&fakes, 50, session, "x", 1, 3, 0), ERROR_CODE(CONFLICT));
    Hcattn__Work__WorkRequest *run = run_generate(session, "x", 5, &id);
    fake_client_expect_error(&fakes, fake_client_generate(&fakes, session, "y", 5), ERROR_CODE(BUSY));
    /* what the worker says goes on as it is, and the session is free again */
    fake_worker_error(&fakes.workers[0], run->work, ERROR_CODE(CONFLICT));
    fake_client_expect_error(&fakes, id, ERROR_CODE(CONFLICT));
    hcattn__work__work_request__free_unpacked(run, NULL);
    run = run_generate(session, "y", 5, &id);
    finish(session, run, id, 5);
    hcattn__work__work_request__free_unpacked(run, NULL);
    /* nothing to add is fine once there is something */
    run = run_generate(session, NULL, 5, &id);
    assert_int_equal(run->run->n_input_ids, 0);
    assert_int_equal(run->run->at, 6);
    finish(session, run, id, 5);
    hcattn__work__work_request__free_unpacked(run, NULL);
}

static void cancel_stops_the_worker(void **state)
{
    (void)state;
    uint64_t id, cancel, session = fake_client_open_session(&fakes, 5, false);
    Hcattn__Work__WorkRequest *run = run_generate(session, "x", 50, &id);
    cancel = fake_client_cancel(&fakes, id);
    Hcattn__Reply *reply = fake_client_take(&fakes, cancel, REPLY(CANCELLED));
    assert_true(reply->cancelled->found);
    hcattn__reply__free_unpacked(reply, NULL);
    Hcattn__Work__WorkRequest *stop = fake_worker_take(&fakes, &fakes.workers[0], WORK(STOP));
    assert_int_equal(stop->stop->work, run->work);
    hcattn__work__work_request__free_unpacked(stop, NULL);
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, id)); /* not before the worker has stopped */
    fake_worker_error(&fakes.workers[0], run->work, ERROR_CODE(CANCELLED));
    fake_client_expect_error(&fakes, id, ERROR_CODE(CANCELLED));
    hcattn__work__work_request__free_unpacked(run, NULL);
    reply = fake_client_take(&fakes, fake_client_cancel(&fakes, id), REPLY(CANCELLED));
    assert_false(reply->cancelled->found);
    hcattn__reply__free_unpacked(reply, NULL);
    /* before it runs it ends at once */
    fakes.workers[0].mute = true;
    id = fake_client_generate(&fakes, session, "x", 5);
    hcattn__work__work_request__free_unpacked(fake_worker_take(&fakes, &fakes.workers[0], WORK(PREPARE)), NULL);
    fake_client_drop(&fakes, fake_client_cancel(&fakes, id), REPLY(CANCELLED));
    fake_client_expect_error(&fakes, id, ERROR_CODE(CANCELLED));
    fakes.workers[0].mute = false;
    run = run_generate(session, "y", 5, &id);
    finish(session, run, id, 5);
    hcattn__work__work_request__free_unpacked(run, NULL);
}

static void closing_a_running_session_stops_it_first(void **state)
{
    (void)state;
    uint64_t id, session = fake_client_open_session(&fakes, 5, false);
    Hcattn__Work__WorkRequest *run = run_generate(session, "x", 50, &id);
    uint64_t close_id = fake_client_close_session(&fakes, session);
    hcattn__work__work_request__free_unpacked(fake_worker_take(&fakes, &fakes.workers[0], WORK(STOP)), NULL);
    fakes_quiet(&fakes);
    assert_int_equal(fakes.stores[0].n_releases + fakes.stores[1].n_releases, 0); /* the worker may still use them */
    fake_client_expect_error(&fakes, fake_client_generate(&fakes, session, "y", 5), ERROR_CODE(NOT_FOUND));
    fake_worker_error(&fakes.workers[0], run->work, ERROR_CODE(CANCELLED));
    fake_client_expect_error(&fakes, id, ERROR_CODE(CANCELLED));
    fake_client_drop(&fakes, close_id, REPLY(SESSION_CLOSED));
    assert_int_equal(fake_store_held(&fakes.stores[0], session) + fake_store_held(&fakes.stores[1], session), 0);
    hcattn__work__work_request__free_unpacked(run, NULL);
}

static void an_ephemeral_session_ends_with_its_client(void **state)
{
    (void)state;
    uint64_t id, session = fake_client_open_session(&fakes, 5, true);
    Hcattn__Work__WorkRequest *run = run_generate(session, "x", 50, &id);
    fake_worker_generated(&fakes.workers[0], run->work, 0, 1);
    expect_generated(id, 0, 1);
    fake_client_close(&fakes.client);
    fakes_quiet(&fakes);
    fake_worker_generated(&fakes.workers[0], run->work, 1, 1);
    hcattn__work__work_request__free_unpacked(fake_worker_take(&fakes, &fakes.workers[0], WORK(STOP)), NULL);
    assert_int_equal(fakes.stores[0].n_releases, 0);
    fake_worker_error(&fakes.workers[0], run->work, ERROR_CODE(CANCELLED));
    FAKES_WAIT(&fakes, fakes.stores[0].n_releases == 1 && fakes.stores[1].n_releases == 1);
    assert_int_equal(fake_store_held(&fakes.stores[0], session), 0);
    hcattn__work__work_request__free_unpacked(run, NULL);
    /* and the next client is served */
    fake_client_open(&fakes);
    fake_client_expect_error(&fakes, fake_client_generate(&fakes, session, "x", 5), ERROR_CODE(NOT_FOUND));
}

static void a_client_that_does_not_read_loses_its_request(void **state)
{
    (void)state;
    enum { MANY = 64 };
    uint64_t id, session = fake_client_open_session(&fakes, 5, true);
    Hcattn__Work__WorkRequest *run = run_generate(session, "x", 200, &id);
    /* Replies with whole distributions: far more than sockets and queues hold. The client's socket is not read. */
    struct socket *reader = fakes.client.socket;
    fakes.client.socket = NULL;
    Hcattn__Generated generated = HCATTN__GENERATED__INIT;
    Hcattn__Work__WorkReply reply = HCATTN__WORK__WORK_REPLY__INIT;
    Hcattn__TokenLogprobs logprobs = HCATTN__TOKEN_LOGPROBS__INIT, *pointer = &logprobs;
    uint32_t token = 0;
    logprobs.all.len = 16 << 10;
    logprobs.all.data = calloc(1, logprobs.all.len);
    reply.work = run->work;
    reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_GENERATED;
    reply.generated = &generated;
    generated.n_ids = generated.n_logprobs = 1;
    generated.ids = &token;
    generated.logprobs = &pointer;
    bool stopped = false;
    for (uint32_t i = 0; i < 100 * MANY && !stopped; i++) {
        generated.first = i;
        fake_worker_answer(&fakes.workers[0], &reply);
        if (i % MANY == 0)
            fakes_pump(&fakes);
        stopped = fakes.workers[0].n_queue > 0;
    }
    hcattn__work__work_request__free_unpacked(fake_worker_take(&fakes, &fakes.workers[0], WORK(STOP)), NULL);
    fake_worker_error(&fakes.workers[0], run->work, ERROR_CODE(CANCELLED));
    FAKES_WAIT(&fakes, fakes.stores[0].n_releases == 1);
    free(logprobs.all.data);
    hcattn__work__work_request__free_unpacked(run, NULL);
    socket_free(reader);
    /* who asks for the session hears why it is gone */
    fake_client_open(&fakes);
    Hcattn__Reply *error = fake_client_take(&fakes, fake_client_generate(&fakes, session, "x", 5), REPLY(ERROR));
    assert_int_equal(error->error->code, ERROR_CODE(NOT_FOUND));
    assert_non_null(strstr(error->error->sentence, "closed: its client did not read"));
    hcattn__reply__free_unpacked(error, NULL);
}

static void the_same_request_again_is_the_same_request(void **state)
{
    (void)state;
    uint64_t id, session = fake_client_open_session(&fakes, 5, false);
    Hcattn__Work__WorkRequest *run = run_generate(session, "abc", 50, &id), *again;
    fake_worker_generated(&fakes.workers[0], run->work, 0, 4);
    expect_generated(id, 0, 4);
    /* with everything received it just goes on */
    fake_client_resume(&fakes, id, session, "abc", 50, 0, 4);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    fakes_quiet(&fakes);
    assert_int_equal(fakes.workers[0].n_queue, 0);
    fake_worker_generated(&fakes.workers[0], run->work, 4, 2);
    expect_generated(id, 4, 2);
    /* what the worker repeats is not sent again; what overlaps is cut */
    fake_worker_generated(&fakes.workers[0], run->work, 2, 3);
    fake_worker_generated(&fakes.workers[0], run->work, 5, 3);
    expect_generated(id, 6, 2);
    /* with something lost it is run again from there */
    fake_client_resume(&fakes, id, session, "abc", 50, 0, 3);
    hcattn__work__work_request__free_unpacked(fake_worker_take(&fakes, &fakes.workers[0], WORK(STOP)), NULL);
    fake_worker_generated(&fakes.workers[0], run->work, 8, 1); /* on its way already */
    fake_worker_error(&fakes.workers[0], run->work, ERROR_CODE(CANCELLED));
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    again = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    assert_int_equal(again->run->resume_from, 3);
    assert_int_not_equal(again->work, run->work);
    fake_worker_generated(&fakes.workers[0], again->work, 3, 6);
    expect_generated(id, 3, 6);
    finish(session, again, id, 9);
    hcattn__work__work_request__free_unpacked(run, NULL);
    hcattn__work__work_request__free_unpacked(again, NULL);
}

static void a_gap_in_the_tokens_is_an_error(void **state)
{
    (void)state;
    uint64_t id, session = fake_client_open_session(&fakes, 5, false);
    Hcattn__Work__WorkRequest *run = run_generate(session, "abc", 50, &id);
    fake_worker_generated(&fakes.workers[0], run->work, 1, 1);
    fake_client_expect_error(&fakes, id, ERROR_CODE(INTERNAL));
    hcattn__work__work_request__free_unpacked(fake_worker_take(&fakes, &fakes.workers[0], WORK(STOP)), NULL);
    fake_worker_error(&fakes.workers[0], run->work, ERROR_CODE(CANCELLED));
    hcattn__work__work_request__free_unpacked(run, NULL);
    run = run_generate(session, "abc", 50, &id); /* the session itself is fine */
    finish(session, run, id, 1);
    hcattn__work__work_request__free_unpacked(run, NULL);
}

static void a_store_that_refuses_blocks_is_rolled_back(void **state)
{
    (void)state;
    uint64_t id, session = fake_client_open_session(&fakes, 5, false);
    fakes.stores[1].reserve_status = -EBUSY;
    id = fake_client_generate(&fakes, session, "abc", 250);
    fake_client_expect_error(&fakes, id, ERROR_CODE(INTERNAL));
    FAKES_WAIT(&fakes, fakes.stores[0].n_releases == 1 && fakes.stores[1].n_releases == 1);
    fakes.stores[1].reserve_status = 0;
    Hcattn__Work__WorkRequest *run = run_generate(session, "abc", 250, &id);
    assert_int_equal(run->run->n_blocks, 4);
    assert_int_equal(fake_store_held(&fakes.stores[0], session) + fake_store_held(&fakes.stores[1], session), 4);
    finish(session, run, id, 1);
    hcattn__work__work_request__free_unpacked(run, NULL);
}

static void statistics_name_everybody(void **state)
{
    (void)state;
    uint64_t id, session = fake_client_open_session(&fakes, 5, false);
    Hcattn__Work__WorkRequest *run = run_generate(session, "abc", 100, &id);
    finish(session, run, id, 7);
    hcattn__work__work_request__free_unpacked(run, NULL);
    Hcattn__Reply *reply = fake_client_stats(&fakes);
    const Hcattn__StatsReply *stats = reply->stats;
    assert_string_equal(stats->version, HCATTN_VERSION);
    assert_string_equal(stats->model, "tiny");
    assert_string_equal(stats->policy, "default");
    assert_string_equal(stats->transport, "ring");
    assert_int_equal(stats->n_ctx, 1024);
    assert_int_equal(stats->default_max_tokens, 256);
    assert_int_equal(stats->n_processes, 4);
    uint64_t used = 0;
    uint32_t n_stores = 0, n_workers = 0;
    for (size_t i = 0; i < stats->n_processes; i++) {
        assert_string_equal(stats->processes[i]->state, "ready");
        used += stats->processes[i]->bytes_used;
        n_stores += strcmp(stats->processes[i]->program, "hc-value-store") == 0;
        n_workers += strcmp(stats->processes[i]->program, "hc-gpu-worker") == 0;
    }
    assert_int_equal(n_stores, 2);
    assert_int_equal(n_workers, 1);
    assert_int_equal(stats->n_sessions, 1);
    assert_int_equal(stats->sessions[0]->session, session);
    assert_int_equal(stats->sessions[0]->n_tokens, 10);
    assert_int_equal(stats->sessions[0]->reserved_tokens, 128);
    assert_int_equal(stats->sessions[0]->bytes, used);
    assert_string_equal(stats->sessions[0]->state, "ready");
    hcattn__reply__free_unpacked(reply, NULL);
}

static void open_requests_end_with_the_coordinator(void **state)
{
    (void)state;
    uint64_t id, session = fake_client_open_session(&fakes, 5, false);
    Hcattn__Work__WorkRequest *run = run_generate(session, "abc", 100, &id);
    assert_int_equal(fakes_stop_coordinator(&fakes), 0);
    fake_client_expect_error(&fakes, id, ERROR_CODE(UNAVAILABLE));
    hcattn__work__work_request__free_unpacked(run, NULL);
}

int main(void)
{
#define EMPTY(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
#define READY(name) cmocka_unit_test_setup_teardown(name, setup_ready, teardown)
    const struct CMUnitTest tests[] = {
        EMPTY(registration_in_any_order),
        EMPTY(those_in_the_way_are_refused_by_name),
        READY(one_generation),
        READY(append_and_score),
        cmocka_unit_test_setup_teardown(what_does_not_fit_is_refused_with_numbers, setup_without_queue, teardown),
        READY(typed_errors),
        READY(cancel_stops_the_worker),
        READY(closing_a_running_session_stops_it_first),
        READY(an_ephemeral_session_ends_with_its_client),
        READY(a_client_that_does_not_read_loses_its_request),
        READY(the_same_request_again_is_the_same_request),
        READY(a_gap_in_the_tokens_is_an_error),
        READY(a_store_that_refuses_blocks_is_rolled_back),
        READY(statistics_name_everybody),
        READY(open_requests_end_with_the_coordinator),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
