/*
 * test_clients.c - clients that vanish, do not read, change their mind, or want more than there is: their blocks are free
 * soon, others do not notice.
 */
#include "tests/system/programs.h"
#include "tests/system/rows.h"
#include "tests/system/service.h"
#include "tests/system/volley.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/clock.h"

enum { N_STORES = 2, CALL_MS = 60000 * PATIENCE, N_LONG = 3000 };

static struct service service;
static struct volley volley;

static int set_up(void **state)
{
    (void)state;
    const char *model = service_tiny_model("--layers 3 --heads 6 --kv-heads 2 --embd 96 --ff 128 --context 4096");
    service_start(&service, (const char *const[]){"--model", model, "--stores", "2", "--memory", "64MiB", NULL},
                  (const char *const[]){"HCATTN_PREFILL_CHUNK=32", NULL});
    volley_begin(&volley, &service, N_STORES);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    volley_end(&volley);
    service_stop(&service);
    return 0;
}

static void assert_blocks(uint32_t n)
{
    uint64_t deadline = clock_deadline_us(UINT64_C(20000000) * PATIENCE);
    while (rows_n_used_blocks(&service, N_STORES) != n && clock_now_us() < deadline)
        clock_sleep_us(10000);
    assert_int_equal(rows_n_used_blocks(&service, N_STORES), n);
}

/* ---- requests by hand ---- */

static struct hcattn_session open_session(bool ephemeral, uint32_t idle_timeout_s)
{
    struct hcattn_session_config config = {.ephemeral = ephemeral, .idle_timeout_s = idle_timeout_s};
    struct hcattn_session session;
    struct hcattn_error error;
    if (hcattn_open_session(service.client, &config, CALL_MS, &session, &error) < 0)
        fail_msg("%s", error.sentence);
    return session;
}

enum kind { PREFILL, DECODE, SCORE };

static uint64_t next_request = 100;

/* Something that takes long: of N_LONG tokens that are prefilled, generated or scored. Returns the packed size. */
static size_t pack_long(enum kind kind, uint64_t session, uint64_t id, uint8_t *bytes, size_t size)
{
    static uint32_t ids[N_LONG];
    Hcattn__Tokens tokens = HCATTN__TOKENS__INIT;
    Hcattn__Input input = HCATTN__INPUT__INIT;
    Hcattn__Append append = HCATTN__APPEND__INIT;
    Hcattn__Generate generate = HCATTN__GENERATE__INIT;
    Hcattn__Score score = HCATTN__SCORE__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    for (uint32_t i = 0; i < N_LONG; i++)
        ids[i] = (i * 7919 + 13) % 256;
    tokens.ids = ids;
    tokens.n_ids = kind == DECODE ? 10 : N_LONG;
    input.input_case = HCATTN__INPUT__INPUT_TOKENS;
    input.tokens = &tokens;
    request.request_id = id;
    if (kind == PREFILL) {
        append.session = session;
        append.input = &input;
        request.request_case = HCATTN__REQUEST__REQUEST_APPEND;
        request.append = &append;
    } else if (kind == DECODE) {
        generate.session = session;
        generate.input = &input;
        generate.max_tokens = N_LONG;
        generate.ignore_end = true;
        request.request_case = HCATTN__REQUEST__REQUEST_GENERATE;
        request.generate = &generate;
    } else {
        score.session = session;
        score.input = &input;
        score.from = 1;
        score.all_logprobs = true;
        request.request_case = HCATTN__REQUEST__REQUEST_SCORE;
        request.score = &score;
    }
    assert_true(hcattn__request__get_packed_size(&request) <= size);
    return hcattn__request__pack(&request, bytes);
}

static uint64_t ask_long(struct volley_client *client, enum kind kind, uint64_t session)
{
    static uint8_t bytes[4 * N_LONG];
    uint64_t id = ++next_request;
    volley_client_send(client, bytes, pack_long(kind, session, id, bytes, sizeof(bytes)));
    return id;
}

/* Replies of a request until one of that kind (`wanted`) has come; others pass by if they are on the way there. */
static Hcattn__Reply *wait_for(struct volley_client *client, uint64_t id, Hcattn__Reply__ReplyCase wanted)
{
    for (;;) {
        Hcattn__Reply *reply = volley_client_reply(client, CALL_MS);
        assert_non_null(reply);
        if (reply->request_id == id && reply->reply_case == wanted)
            return reply;
        bool passes = reply->request_id != id || reply->reply_case == HCATTN__REPLY__REPLY_ACCEPTED ||
                      reply->reply_case == HCATTN__REPLY__REPLY_PROGRESS ||
                      reply->reply_case == HCATTN__REPLY__REPLY_GENERATED;
        if (!passes)
            fail_msg("reply %d instead of %d: %s", (int)reply->reply_case, (int)wanted,
                     reply->reply_case == HCATTN__REPLY__REPLY_ERROR ? reply->error->sentence : "");
        hcattn__reply__free_unpacked(reply, NULL);
    }
}

static void wait_until(struct volley_client *client, uint64_t id, enum kind kind)
{
    hcattn__reply__free_unpacked(
        wait_for(client, id, kind == PREFILL ? HCATTN__REPLY__REPLY_PROGRESS : HCATTN__REPLY__REPLY_GENERATED), NULL);
}

/* The request ends with this error. */
static void wait_error(struct volley_client *client, uint64_t id, Hcattn__ErrorCode code)
{
    Hcattn__Reply *reply = wait_for(client, id, HCATTN__REPLY__REPLY_ERROR);
    if (reply->error->code != code)
        fail_msg("code %d (%s) instead of %d", (int)reply->error->code, reply->error->sentence, (int)code);
    hcattn__reply__free_unpacked(reply, NULL);
}

static void close_session(uint64_t session)
{
    struct hcattn_error error;
    uint64_t freed = 0;
    if (hcattn_close_session(service.client, session, CALL_MS, &freed, &error) < 0)
        fail_msg("%s", error.sentence);
}

static void wait_state(uint64_t session, const char *state)
{
    uint64_t deadline = clock_deadline_us(UINT64_C(20000000) * PATIENCE);
    char seen[32] = "";
    while (strcmp(seen, state) != 0 && clock_now_us() < deadline) {
        struct hcattn_stats stats;
        clock_sleep_us(2000);
        assert_int_equal(hcattn_stats(service.client, CALL_MS, &stats, NULL), 0);
        strcpy(seen, "gone");
        for (size_t i = 0; i < stats.n_sessions; i++)
            if (stats.sessions[i].session == session)
                snprintf(seen, sizeof(seen), "%s", stats.sessions[i].state);
        hcattn_stats_free(&stats);
    }
    assert_string_equal(seen, state);
}

/* ---- gone ---- */

static void vanishes(void **state)
{
    (void)state;
    for (enum kind kind = PREFILL; kind <= DECODE; kind++) {
        struct volley_client *client = volley_client_new(&volley, "client.sock");
        struct hcattn_session passing = open_session(true, 0);
        wait_until(client, ask_long(client, kind, passing.session), kind);
        client = volley_client_free(client);
        wait_state(passing.session, "gone");
        assert_blocks(0);
        /* one that is not ephemeral stays, at rest */
        client = volley_client_new(&volley, "client.sock");
        struct hcattn_session lasting = open_session(false, 0);
        wait_until(client, ask_long(client, kind, lasting.session), kind);
        client = volley_client_free(client);
        wait_state(lasting.session, "ready");
        close_session(lasting.session);
        assert_blocks(0);
    }
    volley_assert_well(&volley);
}

static void command_is_killed(void **state)
{
    (void)state;
    char log[96];
    struct program program = {.runtime_dir = service.directory};
    static const int signals[] = {SIGKILL, SIGINT, SIGTERM};
    for (int i = 0; i < 3; i++) {
        unlink(volley_path(&volley, "command", log));
        pid_t pid = programs_start(
            &program, (const char *const[]){"generate", "--raw", "--ignore-end", "-n", "3000", "words", NULL}, log);
        uint64_t deadline = clock_deadline_us(UINT64_C(20000000) * PATIENCE);
        while (rows_n_used_blocks(&service, N_STORES) == 0 && clock_now_us() < deadline)
            clock_sleep_us(1000);
        assert_true(rows_n_used_blocks(&service, N_STORES) > 0);
        kill(pid, signals[i]);
        assert_int_equal(programs_wait(pid, 20 * PATIENCE), signals[i] == SIGKILL ? 128 + SIGKILL : 130);
        assert_blocks(0);
    }
    unlink(log);
    volley_assert_well(&volley);
}

/* A stream whose reader never reads: it ends when what may wait for it is full, long before it is through. */
static void never_reads(void **state)
{
    (void)state;
    static uint8_t bytes[4 * N_LONG];
    struct hcattn_session session = open_session(true, 0);
    size_t n_bytes = pack_long(SCORE, session.session, 77, bytes, sizeof(bytes));
    int fd = volley_connect(&volley, "client.sock", SOCK_STREAM);
    volley_greet(fd, "neverread", 9);
    volley_frame(fd, 2, n_bytes, bytes, n_bytes);
    wait_state(session.session, "gone");
    assert_true(service_log_contains(&service, "did not read"));
    assert_blocks(0);
    close(fd);
    volley_assert_well(&volley);
}

/* Questions without end, and no answer is read. */
static void asks_and_never_reads(void **state)
{
    (void)state;
    uint8_t bytes[64];
    Hcattn__Stats stats = HCATTN__STATS__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    request.request_id = 1;
    request.request_case = HCATTN__REQUEST__REQUEST_STATS;
    request.stats = &stats;
    size_t n_bytes = hcattn__request__pack(&request, bytes);
    int fd = volley_connect(&volley, "client.sock", SOCK_STREAM);
    volley_greet(fd, "askstoomuch", 11);
    for (int i = 0; i < 5000; i++)
        volley_frame(fd, 0, n_bytes, bytes, n_bytes);
    struct answer answer = {0};
    uint32_t ids[] = {1, 2, 3};
    service_generate_ids(service.client, ids, 3, 4, &answer);
    service_answer_free(&answer);
    close(fd);
    volley_assert_well(&volley);
}

/* ---- a changed mind ---- */

static void cancels(void **state)
{
    (void)state;
    struct volley_client *client = volley_client_new(&volley, "client.sock");
    for (enum kind kind = PREFILL; kind <= DECODE; kind++) {
        struct hcattn_session session = open_session(false, 0);
        uint64_t id = ask_long(client, kind, session.session);
        wait_until(client, id, kind);
        Hcattn__Cancel cancel = HCATTN__CANCEL__INIT;
        Hcattn__Request request = HCATTN__REQUEST__INIT;
        cancel.request = id;
        request.request_id = ++next_request;
        request.request_case = HCATTN__REQUEST__REQUEST_CANCEL;
        request.cancel = &cancel;
        volley_client_ask(client, &request);
        bool cancelled = false, ended = false;
        while (!cancelled || !ended) { /* in either order */
            Hcattn__Reply *reply = volley_client_reply(client, CALL_MS);
            assert_non_null(reply);
            if (reply->request_id == request.request_id) {
                assert_int_equal(reply->reply_case, HCATTN__REPLY__REPLY_CANCELLED);
                cancelled = reply->cancelled->found;
            } else if (reply->reply_case == HCATTN__REPLY__REPLY_ERROR) {
                assert_int_equal(reply->error->code, HCATTN__ERROR_CODE__CANCELLED);
                ended = true;
            }
            hcattn__reply__free_unpacked(reply, NULL);
        }
        wait_state(session.session, "ready");
        close_session(session.session);
        assert_blocks(0);
    }
    volley_client_free(client);
    volley_assert_well(&volley);
}

static void closes_while_it_runs(void **state)
{
    (void)state;
    struct volley_client *client = volley_client_new(&volley, "client.sock");
    for (enum kind kind = PREFILL; kind <= DECODE; kind++) {
        struct hcattn_session session = open_session(false, 0);
        struct hcattn_error error;
        uint64_t id = ask_long(client, kind, session.session), freed = 0;
        wait_until(client, id, kind);
        assert_int_equal(hcattn_close_session(service.client, session.session, CALL_MS, &freed, &error), 0);
        assert_true(freed > 0);
        wait_error(client, id, HCATTN__ERROR_CODE__CANCELLED);
        assert_blocks(0);
        assert_int_equal(hcattn_close_session(service.client, session.session, CALL_MS, NULL, &error), -ENOENT);
    }
    volley_client_free(client);
    volley_assert_well(&volley);
}

static void two_at_once(void **state)
{
    (void)state;
    static uint8_t bytes[4 * N_LONG];
    struct volley_client *client = volley_client_new(&volley, "client.sock");
    struct hcattn_session session = open_session(false, 0);
    uint64_t id = ask_long(client, PREFILL, session.session);
    wait_until(client, id, PREFILL);
    for (enum kind kind = PREFILL; kind <= SCORE; kind++)
        wait_error(client, ask_long(client, kind, session.session), HCATTN__ERROR_CODE__BUSY);
    /* the same request again, as a client that has doubts sends it, runs once */
    size_t n_bytes = pack_long(PREFILL, session.session, id, bytes, sizeof(bytes));
    for (int i = 0; i < 3; i++)
        volley_client_send(client, bytes, n_bytes);
    Hcattn__Reply *reply = wait_for(client, id, HCATTN__REPLY__REPLY_APPENDED);
    assert_int_equal(reply->appended->n_tokens, N_LONG);
    hcattn__reply__free_unpacked(reply, NULL);
    close_session(session.session);
    volley_client_free(client);
    volley_assert_well(&volley);
}

/* ---- many ---- */

static void abandoned_sessions(void **state)
{
    (void)state;
    enum { N = 50 };
    uint32_t ids[] = {1, 2, 3};
    for (int i = 0; i < N; i++) {
        struct hcattn_session session = open_session(false, 1);
        struct hcattn_input input = {.ids = ids, .n_ids = 3};
        struct hcattn_error error;
        if (hcattn_append(service.client, session.session, &input, 0, NULL, CALL_MS, NULL, &error) < 0)
            fail_msg("%s", error.sentence);
    }
    assert_blocks(0);
    struct hcattn_stats stats;
    assert_int_equal(hcattn_stats(service.client, CALL_MS, &stats, NULL), 0);
    assert_int_equal(stats.n_sessions, 0);
    hcattn_stats_free(&stats);
    volley_assert_well(&volley);
}

/* Sessions of one block each until the stores are full to the last block. */
static void up_to_the_last_block(void **state)
{
    (void)state;
    enum { MAX = 100 };
    struct service small;
    struct hcattn_session sessions[MAX];
    struct hcattn_error error = {0};
    struct hcattn_stats stats;
    uint32_t ids[] = {1, 2, 3}, n = 0;
    struct hcattn_input input = {.ids = ids, .n_ids = 3};
    service_start(&small,
                  (const char *const[]){"--model", service_tiny_model(""), "--stores", "2", "--memory", "600KiB",
                                        "--max-queue", "0", NULL},
                  NULL);
    assert_int_equal(hcattn_stats(small.client, CALL_MS, &stats, NULL), 0);
    uint64_t block_bytes = stats.store_bytes_per_token * 64, total = 0;
    for (size_t i = 0; i < stats.n_processes; i++)
        total += stats.processes[i].bytes_total;
    hcattn_stats_free(&stats);
    assert_true(total / block_bytes > 4 && total / block_bytes < MAX);
    for (int round = 0; round < 2; round++) {
        for (n = 0; n < MAX; n++) {
            assert_int_equal(hcattn_open_session(small.client, NULL, CALL_MS, &sessions[n], NULL), 0);
            if (hcattn_append(small.client, sessions[n].session, &input, 0, NULL, CALL_MS, NULL, &error) < 0)
                break;
        }
        assert_int_equal(n, total / block_bytes);
        assert_int_equal(error.code, HCATTN_NO_MEMORY);
        assert_int_equal(error.bytes_asked, block_bytes);
        assert_int_equal(error.bytes_free, 0);
        assert_int_equal(rows_n_used_blocks(&small, 2), n);
        /* what is given back can be had at once, also by the one that was refused */
        assert_int_equal(hcattn_close_session(small.client, sessions[0].session, CALL_MS, NULL, NULL), 0);
        assert_int_equal(hcattn_close_session(small.client, sessions[n].session, CALL_MS, NULL, NULL), 0);
        assert_int_equal(hcattn_open_session(small.client, NULL, CALL_MS, &sessions[0], NULL), 0);
        assert_int_equal(hcattn_append(small.client, sessions[0].session, &input, 0, NULL, CALL_MS, NULL, NULL), 0);
        for (uint32_t i = 0; i < n; i++)
            assert_int_equal(hcattn_close_session(small.client, sessions[i].session, CALL_MS, NULL, NULL), 0);
        assert_int_equal(rows_n_used_blocks(&small, 2), 0);
    }
    service_stop(&small);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(vanishes),
        cmocka_unit_test(command_is_killed),
        cmocka_unit_test(never_reads),
        cmocka_unit_test(asks_and_never_reads),
        cmocka_unit_test(cancels),
        cmocka_unit_test(closes_while_it_runs),
        cmocka_unit_test(two_at_once),
        cmocka_unit_test(abandoned_sessions),
        cmocka_unit_test(up_to_the_last_block),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
