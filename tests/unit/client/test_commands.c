/* test_commands.c - generate, chat, status, tokenize and score as people and programs see them: output, JSON, exit status. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/clock.h"
#include "tests/unit/client/fake_coordinator.h"
#include "tests/unit/client/programs.h"

#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define LONG_TOKENS 20000u

struct service {
    pthread_mutex_t lock; /* held by the fake's thread while it serves */
    struct programs programs;
    struct fake_coordinator fake;
    char last_input[256]; /* of the last Generate, as "role:content|" or the text */
    bool last_continued;
    int64_t last_at;
    float temperature;
    uint64_t seed;
    unsigned n_opened, n_closed;
    _Atomic unsigned n_cancelled;
    _Atomic unsigned n_hanging;
};

static void note_input(struct service *service, const Hcattn__Generate *generate)
{
    const Hcattn__Input *input = generate->input;
    service->last_input[0] = '\0';
    service->last_continued = false;
    service->last_at = generate->at ? (int64_t)generate->at->n_tokens : -1;
    service->temperature = generate->sampling->temperature;
    service->seed = generate->sampling->seed;
    if (input->input_case == HCATTN__INPUT__INPUT_TEXT)
        snprintf(service->last_input, sizeof(service->last_input), "%s", input->text);
    if (input->input_case != HCATTN__INPUT__INPUT_CHAT)
        return;
    service->last_continued = input->chat->continued;
    size_t n = 0;
    for (size_t i = 0; i < input->chat->n_messages; i++)
        n += (size_t)snprintf(service->last_input + n, sizeof(service->last_input) - n, "%s:%s|",
                              input->chat->messages[i]->role, input->chat->messages[i]->content);
}

/* "long": very many tokens; "hang": none; "full": refused; else "Paris", a euro sign and the end. */
static void generate(struct fake_coordinator *fake, uint64_t id, const Hcattn__Generate *request)
{
    struct service *service = fake->context;
    uint32_t prompt[] = {1, 2, 3}, ids[] = {50, 51};
    note_input(service, request);
    if (strstr(service->last_input, "full")) {
        fake_coordinator_error(fake, id, HCATTN__ERROR_CODE__CONTEXT_EXCEEDED, "the prompt is longer than the context");
        return;
    }
    fake_coordinator_accepted(fake, id, request->at ? request->at->n_tokens : 0, prompt, 3);
    if (strstr(service->last_input, "hang")) {
        service->n_hanging++;
        return;
    }
    if (strstr(service->last_input, "long")) {
        for (uint32_t i = 0; i < LONG_TOKENS; i++)
            fake_coordinator_generated(fake, id, i, ids, 1, "many words and more of them, ", false);
        return; /* the end comes with Cancel */
    }
    fake_coordinator_generated(fake, id, 0, &ids[0], 1, "Paris", request->logprobs);
    fake_coordinator_generated(fake, id, 1, &ids[1], 1, " \xe2\x82\xac", request->logprobs);
    fake_coordinator_done(fake, id, 2, "", (request->at ? request->at->n_tokens : 0) + 5);
}

static enum fake_coordinator_step answer(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    struct service *service = fake->context;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.request_id = request->request_id;
    switch (request->request_case) {
    case HCATTN__REQUEST__REQUEST_OPEN_SESSION: {
        Hcattn__SessionOpened opened = HCATTN__SESSION_OPENED__INIT;
        service->n_opened++;
        opened.session = request->open_session->session;
        reply.reply_case = HCATTN__REPLY__REPLY_SESSION_OPENED;
        reply.session_opened = &opened;
        fake_coordinator_reply(fake, &reply);
        return FAKE_KNOWN;
    }
    case HCATTN__REQUEST__REQUEST_CLOSE_SESSION: {
        Hcattn__SessionClosed closed = HCATTN__SESSION_CLOSED__INIT;
        service->n_closed++;
        reply.reply_case = HCATTN__REPLY__REPLY_SESSION_CLOSED;
        reply.session_closed = &closed;
        fake_coordinator_reply(fake, &reply);
        return FAKE_KNOWN;
    }
    case HCATTN__REQUEST__REQUEST_GENERATE:
        generate(fake, request->request_id, request->generate);
        return FAKE_KNOWN;
    case HCATTN__REQUEST__REQUEST_CANCEL:
        service->n_cancelled++;
        fake_coordinator_error(fake, request->cancel->request, HCATTN__ERROR_CODE__CANCELLED, "cancelled");
        return FAKE_LOST;
    case HCATTN__REQUEST__REQUEST_TOKENIZE: {
        Hcattn__Tokenized tokenized = HCATTN__TOKENIZED__INIT;
        uint32_t ids[] = {5, 60000};
        ProtobufCBinaryData pieces[] = {{.len = 3, .data = (uint8_t *)"a\"\n"}, {.len = 1, .data = (uint8_t *)"\xf0"}};
        tokenized.ids = ids;
        tokenized.n_ids = 2;
        tokenized.pieces = pieces;
        tokenized.n_pieces = 2;
        reply.reply_case = HCATTN__REPLY__REPLY_TOKENIZED;
        reply.tokenized = &tokenized;
        fake_coordinator_reply(fake, &reply);
        return FAKE_KNOWN;
    }
    case HCATTN__REQUEST__REQUEST_DETOKENIZE: {
        Hcattn__Detokenized detokenized = HCATTN__DETOKENIZED__INIT;
        const Hcattn__Detokenize *asked = request->detokenize;
        detokenized.text =
            (char *)(asked->n_ids == 3 && asked->ids[0] == 1 && asked->ids[2] == 30 ? "one two thirty" : "?");
        reply.reply_case = HCATTN__REPLY__REPLY_DETOKENIZED;
        reply.detokenized = &detokenized;
        fake_coordinator_reply(fake, &reply);
        return FAKE_KNOWN;
    }
    case HCATTN__REQUEST__REQUEST_SCORE: {
        uint32_t ids[] = {8, 9, 10};
        fake_coordinator_accepted(fake, request->request_id, 0, ids, 3);
        Hcattn__TokenLogprobs tokens[2], *pointers[] = {&tokens[0], &tokens[1]};
        hcattn__token_logprobs__init(&tokens[0]);
        hcattn__token_logprobs__init(&tokens[1]);
        tokens[0].logprob = -1;
        tokens[1].logprob = -3;
        Hcattn__Scored scored = HCATTN__SCORED__INIT;
        scored.first = 1;
        scored.scores = pointers;
        scored.n_scores = 2;
        reply.reply_case = HCATTN__REPLY__REPLY_SCORED;
        reply.scored = &scored;
        fake_coordinator_reply(fake, &reply);
        Hcattn__ScoreDone done = HCATTN__SCORE_DONE__INIT;
        reply.reply_case = HCATTN__REPLY__REPLY_SCORE_DONE;
        reply.score_done = &done;
        fake_coordinator_reply(fake, &reply);
        return FAKE_KNOWN;
    }
    case HCATTN__REQUEST__REQUEST_STATS: {
        Hcattn__StatsReply stats = HCATTN__STATS_REPLY__INIT;
        Hcattn__ProcessStats store = HCATTN__PROCESS_STATS__INIT, *processes[] = {&store};
        Hcattn__SessionStats session = HCATTN__SESSION_STATS__INIT, *sessions[] = {&session};
        store.program = (char *)"hc-value-store";
        store.index = 1;
        store.pid = 4711;
        store.state = (char *)"ready";
        store.node = -1;
        store.bytes_total = 3 << 20;
        store.achieved = (char *)"broken \xff text";
        session.session = 0xabc;
        session.n_tokens = 17;
        stats.n_ctx = 8192;
        stats.model = (char *)"tiny";
        stats.processes = processes;
        stats.n_processes = 1;
        stats.sessions = sessions;
        stats.n_sessions = 1;
        reply.reply_case = HCATTN__REPLY__REPLY_STATS;
        reply.stats = &stats;
        fake_coordinator_reply(fake, &reply);
        return FAKE_KNOWN;
    }
    default:
        fake_coordinator_error(fake, request->request_id, HCATTN__ERROR_CODE__NOT_SUPPORTED, "not here");
        return FAKE_KNOWN;
    }
}

static enum fake_coordinator_step serve(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    struct service *service = fake->context;
    pthread_mutex_lock(&service->lock);
    enum fake_coordinator_step step = answer(fake, request);
    pthread_mutex_unlock(&service->lock);
    return step;
}

static int setup(void **state)
{
    struct service *service = calloc(1, sizeof(*service));
    assert_non_null(service);
    pthread_mutex_init(&service->lock, NULL);
    programs_setup(&service->programs, "");
    service->programs.split = true;
    service->fake.handle = serve;
    service->fake.context = service;
    snprintf(service->fake.endpoint, sizeof(service->fake.endpoint), "ipc://%s/client.sock",
             service->programs.directory);
    fake_coordinator_start(&service->fake);
    *state = service;
    return 0;
}

static int teardown(void **state)
{
    struct service *service = *state;
    fake_coordinator_stop(&service->fake);
    programs_cleanup(&service->programs);
    free(service);
    return 0;
}

/* Between the test's and the fake's turn: what the one has read or written the other may. */
static void settle(struct service *service)
{
    pthread_mutex_lock(&service->lock);
    pthread_mutex_unlock(&service->lock);
}

static int run(struct service *service, const char *const *arguments)
{
    settle(service);
    int status = programs_run(&service->programs, false, arguments);
    settle(service);
    return status;
}

#define RUN(...) run(service, (const char *[]){__VA_ARGS__, NULL})

static const char *output(const struct service *service)
{
    static char text[1 << 16];
    programs_read(service->programs.out, text, sizeof(text));
    return text;
}

static json_t *output_object(const struct service *service)
{
    json_error_t error;
    json_t *json = json_loads(output(service), 0, &error);
    if (!json)
        fprintf(stderr, "%s in:\n%s\n", error.text, output(service));
    assert_non_null(json);
    return json;
}

static void write_input(const struct service *service, const char *text, size_t n_bytes)
{
    int fd = open(service->programs.in, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_int_equal(write(fd, text, n_bytes), n_bytes);
    close(fd);
}

static void test_generate(void **state)
{
    struct service *service = *state;
    assert_int_equal(RUN("generate", "--system", "be short", "Capital?"), 0);
    assert_string_equal(output(service), "Paris \xe2\x82\xac\n");
    assert_string_equal(service->last_input, "system:be short|user:Capital?|");
    assert_false(service->last_continued);
    assert_int_equal(service->last_at, 0);
    assert_true(service->temperature == 0.0f);
    assert_int_equal(service->n_opened, 1);
    assert_int_equal(service->n_closed, 1);

    assert_int_equal(RUN("generate", "--raw", "-t", "0.75", "--seed=12345678901234567890", "once upon"), 0);
    assert_string_equal(service->last_input, "once upon");
    assert_true(service->temperature == 0.75f);
    assert_true(service->seed == 12345678901234567890u);

    write_input(service, "from a pipe\n", 12);
    assert_int_equal(RUN("generate", "--raw", "-"), 0);
    assert_string_equal(service->last_input, "from a pipe\n");

    assert_int_equal(RUN("generate", "--session", "00000000000000AB", "go on"), 0);
    assert_true(service->last_continued);
    assert_int_equal(service->last_at, -1);
    assert_int_equal(service->n_opened, 3);
    assert_int_equal(service->n_closed, 3);
}

static void test_generate_json(void **state)
{
    struct service *service = *state;
    assert_int_equal(RUN("generate", "--json", "--top-logprobs", "1", "Capital?"), 0);
    json_t *json = output_object(service);
    const char *text = NULL, *reason = NULL;
    json_t *prompt = NULL, *tokens = NULL, *logprobs = NULL, *top = NULL;
    int n_decode = -1;
    double queued, prefill, decode, wait, prefill_speed, decode_speed;
    int n_prefill = -1;
    assert_int_equal(json_unpack(json, "{s:o,s:o,s:o,s:o,s:s,s:s,s:{s:i,s:i,s:F,s:F,s:F,s:F,s:F,s:F}}", "prompt_tokens",
                                 &prompt, "tokens", &tokens, "logprobs", &logprobs, "top_logprobs", &top, "text", &text,
                                 "finish_reason", &reason, "timings", "n_prefill", &n_prefill, "n_decode", &n_decode,
                                 "queued_ms", &queued, "prefill_ms", &prefill, "decode_ms", &decode, "store_wait_ms",
                                 &wait, "prefill_tokens_per_second", &prefill_speed, "decode_tokens_per_second",
                                 &decode_speed),
                     0);
    assert_int_equal(json_array_size(prompt), 3);
    assert_int_equal(json_integer_value(json_array_get(prompt, 2)), 3);
    assert_int_equal(json_array_size(tokens), 2);
    assert_int_equal(json_integer_value(json_array_get(tokens, 1)), 51);
    assert_int_equal(json_array_size(logprobs), 2);
    assert_true(json_real_value(json_array_get(logprobs, 1)) == -1.0);
    json_t *best = json_array_get(json_array_get(top, 0), 0);
    assert_int_equal(json_integer_value(json_object_get(best, "id")), 7);
    assert_true(json_real_value(json_object_get(best, "logprob")) == -0.5);
    assert_string_equal(text, "Paris \xe2\x82\xac");
    assert_string_equal(reason, "length");
    assert_int_equal(n_decode, 2);
    assert_true(decode_speed > 1999 && decode_speed < 2001);
    json_decref(json);
}

static void test_errors(void **state)
{
    struct service *service = *state;
    assert_int_equal(RUN("generate", "full"), 1);
    assert_true(programs_log_has(&service->programs, "hcattn generate: the prompt is longer than the context"));
    assert_int_equal(RUN("generate", ""), 1);
    assert_true(programs_log_has(&service->programs, "the prompt is empty"));
    write_input(service, "a\xff", 2);
    assert_int_equal(RUN("generate", "-"), 1);
    assert_true(programs_log_has(&service->programs, "standard input is not UTF-8 (at byte 1)"));
    write_input(service, "a\0b", 3);
    assert_int_equal(RUN("generate", "-"), 1);
    assert_true(programs_log_has(&service->programs, "holds a NUL character"));
    static const char *const wrong[][3] = {{"generate"},
                                           {"generate", "--temprature=1", "x"},
                                           {"generate", "--temperature=hot", "x"},
                                           {"generate", "--session=xyz", "x"},
                                           {"generate", "a", "b"},
                                           {"tokenize", "--decode", "1 x"},
                                           {"tokenize"},
                                           {"score", "/nonexistent"},
                                           {"status", "extra"},
                                           {"dance"}};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        assert_int_equal(RUN(wrong[i][0], wrong[i][1], wrong[i][2]), 2);
    assert_int_equal(RUN("score", "--endpoint", "nonsense", "/etc/hostname"), 2);
}

static bool wait_for_hanging(struct service *service)
{
    for (int i = 0; i < 1000 && service->n_hanging == 0; i++)
        clock_sleep_us(10000);
    return service->n_hanging > 0;
}

static void test_interrupt(void **state)
{
    struct service *service = *state;
    pid_t pid = programs_start(&service->programs, false, (const char *[]){"generate", "hang", NULL});
    assert_true(wait_for_hanging(service));
    clock_sleep_us(100000);
    kill(pid, SIGINT);
    int status = programs_wait(pid, 10);
    assert_true(status >= 0 && WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 130);
    settle(service);
    assert_int_equal(service->n_cancelled, 1);
    assert_int_equal(service->n_closed, 1);
}

/* The reader takes a few bytes and leaves. */
static void test_reader_gone(void **state)
{
    struct service *service = *state;
    int fds[2];
    char bytes[16], command[512];
    assert_int_equal(pipe(fds), 0);
    snprintf(command, sizeof(command), "exec %s generate --runtime-dir %s long 2>>%s", PROGRAMS_HCATTN,
             service->programs.directory, service->programs.log);
    pid_t pid = fork();
    if (pid == 0) {
        close(fds[0]);
        dup2(fds[1], STDOUT_FILENO);
        close(fds[1]);
        execl("/bin/sh", "sh", "-c", command, NULL);
        _exit(127);
    }
    close(fds[1]);
    assert_int_equal(read(fds[0], bytes, sizeof(bytes)), sizeof(bytes));
    close(fds[0]);
    assert_int_equal(programs_wait(pid, 20), 0);
    settle(service);
    assert_int_equal(service->n_cancelled, 1);
    char log[256];
    assert_int_equal(programs_read(service->programs.log, log, sizeof(log)), 0); /* quietly */
}

static void test_chat(void **state)
{
    struct service *service = *state;
    static const char talk[] = "hello\n\nmore\n/quit\nnever\n";
    write_input(service, talk, sizeof(talk) - 1);
    assert_int_equal(RUN("chat", "--system", "be kind"), 0);
    assert_string_equal(output(service), "Paris \xe2\x82\xac\nParis \xe2\x82\xac\n");
    assert_string_equal(service->last_input, "user:more|");
    assert_true(service->last_continued);
    assert_int_equal(service->last_at, 5); /* what the first answer left behind */
    assert_int_equal(service->n_opened, 1);
    assert_int_equal(service->n_closed, 1);
}

static void test_status(void **state)
{
    struct service *service = *state;
    assert_int_equal(RUN("status", "--json"), 0);
    json_t *json = output_object(service);
    int ready = 0, pid = 0, node = 0, index = 0, tokens = 0;
    const char *program = NULL, *process_state = NULL, *achieved = NULL, *session = NULL;
    assert_int_equal(json_unpack(json, "{s:b,s:[{s:s,s:i,s:s,s:i,s:i,s:s}],s:[{s:s,s:i}]}", "ready", &ready,
                                 "processes", "program", &program, "pid", &pid, "state", &process_state, "node", &node,
                                 "index", &index, "achieved", &achieved, "sessions", "session", &session, "tokens",
                                 &tokens),
                     0);
    assert_true(ready);
    assert_string_equal(program, "hc-value-store");
    assert_int_equal(pid, 4711);
    assert_string_equal(process_state, "ready");
    assert_int_equal(node, -1);
    assert_int_equal(index, 1);
    assert_string_equal(achieved, "broken \xef\xbf\xbd text");
    assert_string_equal(session, "0000000000000abc");
    assert_int_equal(tokens, 17);
    json_decref(json);
    assert_int_equal(RUN("status"), 0);
    assert_non_null(strstr(output(service), "hc-value-store"));
    assert_non_null(strstr(output(service), "0000000000000abc"));
    assert_non_null(strstr(output(service), "3.0 MiB"));
}

static void test_tokenize(void **state)
{
    struct service *service = *state;
    assert_int_equal(RUN("tokenize", "--ids", "text"), 0);
    assert_string_equal(output(service), "5 60000\n");
    assert_int_equal(RUN("tokenize", "text"), 0);
    assert_string_equal(output(service), "     5 \"a\\\"\\n\"\n 60000 \"\\xf0\"\n");
    assert_int_equal(RUN("tokenize", "--json", "text"), 0);
    json_t *json = output_object(service);
    assert_int_equal(json_array_size(json_object_get(json, "ids")), 2);
    assert_string_equal(json_string_value(json_array_get(json_object_get(json, "pieces"), 1)), "\xef\xbf\xbd");
    json_decref(json);
    assert_int_equal(RUN("tokenize", "--decode", "[1, 2 30]"), 0);
    assert_string_equal(output(service), "one two thirty\n");
}

static void test_score(void **state)
{
    struct service *service = *state;
    write_input(service, "some text", 9);
    assert_int_equal(RUN("score", "--json", "-"), 0);
    json_t *json = output_object(service);
    assert_int_equal(json_array_size(json_object_get(json, "tokens")), 3);
    assert_int_equal(json_array_size(json_object_get(json, "logprobs")), 2);
    assert_int_equal(json_integer_value(json_object_get(json, "first")), 1);
    assert_true(json_real_value(json_object_get(json, "sum")) == -4.0);
    double perplexity = json_real_value(json_object_get(json, "perplexity"));
    assert_true(perplexity > 7.389 && perplexity < 7.3891); /* e^2 */
    json_decref(json);
    assert_int_equal(RUN("score", service->programs.in), 0);
    assert_non_null(strstr(output(service), "       1       9   -1.00000\n       2      10   -3.00000\n"));
    assert_non_null(strstr(output(service), "scored 2  sum -4.00000"));
    assert_int_equal(service->n_closed, 2);
}

static void test_help(void **state)
{
    struct service *service = *state;
    static const char *const commands[] = {"up",       "down",  "status",  "sessions",   "generate",  "chat",
                                           "tokenize", "score", "fork",    "policy",     "transport", "drain",
                                           "run",      "eval",  "profile", "statistics", "codebook"};
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        assert_int_equal(RUN(commands[i], "--help"), 0);
        assert_non_null(strstr(output(service), "--runtime-dir"));
    }
    assert_int_equal(RUN("generate", "--version"), 0);
    assert_string_equal(output(service), "hcattn " HCATTN_VERSION "\n");
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {TEST(test_generate),  TEST(test_generate_json), TEST(test_errors),
                                       TEST(test_interrupt), TEST(test_reader_gone),   TEST(test_chat),
                                       TEST(test_status),    TEST(test_tokenize),      TEST(test_score),
                                       TEST(test_help)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
