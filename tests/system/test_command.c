/*
 * test_command.c - every subcommand of `hcattn` against a running service: what it shows when all is well, and the one line
 * and exit status when it is used wrongly. After each refusal the service still answers as before.
 */
#include "tests/system/programs.h"
#include "tests/system/rows.h"
#include "tests/system/service.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/clock.h"

enum { N_CTX = 512 };

static struct service service;

static int set_up(void **state)
{
    (void)state;
    service_start(&service, ARGUMENTS("--model", service_tiny_model(""), "--memory", "64MiB"), NULL);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    service_stop(&service);
    return 0;
}

static struct outcome run_with(const char *input, size_t input_bytes, const char *const *environment,
                               const char *const *arguments)
{
    struct program program = {
        .runtime_dir = service.directory, .environment = environment, .input = input, .input_bytes = input_bytes};
    return programs_run(&program, arguments);
}

static struct outcome run(const char *const *arguments)
{
    return run_with(NULL, 0, NULL, arguments);
}

/* Its standard output; the caller frees. */
static char *output_of(const char *const *arguments)
{
    struct outcome outcome = run(arguments);
    programs_assert_done(&outcome);
    char *text = strdup(outcome.out);
    programs_free(&outcome);
    return text;
}

static json_t *parse(const struct outcome *outcome)
{
    json_error_t error;
    programs_assert_done(outcome);
    json_t *json = json_loads(outcome->out, 0, &error);
    if (json == NULL)
        fail_msg("%s in %s", error.text, outcome->out);
    return json;
}

static json_t *json_of(const char *const *arguments)
{
    struct outcome outcome = run(arguments);
    json_t *json = parse(&outcome);
    programs_free(&outcome);
    return json;
}

static void refused_with(const char *input, size_t input_bytes, const char *const *environment, int status,
                         const char *const *parts, const char *const *arguments)
{
    struct outcome outcome = run_with(input, input_bytes, environment, arguments);
    programs_assert_refused(&outcome, status, parts);
    programs_free(&outcome);
}

static void refused(int status, const char *const *parts, const char *const *arguments)
{
    refused_with(NULL, 0, NULL, status, parts, arguments);
}

static const char *const good[] = {"generate", "--raw", "--ignore-end", "-n", "8", "the world of words", NULL};

/* The service answers as it did in the beginning, and no session is left behind. */
static void assert_well(void)
{
    static char *before;
    char *text = output_of(good);
    if (before == NULL)
        before = strdup(text);
    assert_string_equal(text, before);
    free(text);
    uint64_t deadline = clock_deadline_us(20000000);
    while (rows_n_used_blocks(&service, 1) != 0 && clock_now_us() < deadline)
        clock_sleep_us(20000);
    assert_int_equal(rows_n_used_blocks(&service, 1), 0);
}

static void write_file(const char *path, const char *text, size_t n_bytes)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, n_bytes, file), n_bytes);
    assert_int_equal(fclose(file), 0);
}

static char *path_in(char path[96], const char *name)
{
    snprintf(path, 96, "%s/%s", service.directory, name);
    return path;
}

/* ---- what works ---- */

static void generate_streams_text(void **state)
{
    (void)state;
    char *text = output_of(good);
    assert_true(strlen(text) > 1);
    assert_int_equal(text[strlen(text) - 1], '\n');
    struct outcome piped =
        run_with("the world of words", 0, NULL, ARGUMENTS("generate", "--raw", "--ignore-end", "-n", "8", "-"));
    programs_assert_done(&piped);
    assert_string_equal(piped.out, text);
    programs_free(&piped);
    free(text);
    assert_well();
}

static void generate_json(void **state)
{
    (void)state;
    json_t *json = json_of(ARGUMENTS("generate", "--json", "--raw", "--ignore-end", "-n", "8", "the world of words"));
    struct answer answer = {0};
    struct hcattn_error error;
    struct hcattn_session session;
    assert_int_equal(hcattn_open_session(service.client, NULL, 60000, &session, &error), 0);
    struct hcattn_generate generate = {.session = session.session,
                                       .input = {.text = "the world of words"},
                                       .max_tokens = 8,
                                       .logprobs = true,
                                       .ignore_end = true};
    assert_int_equal(service_generate(service.client, &generate, &answer, &error), 0);
    json_t *prompt = json_object_get(json, "prompt_tokens"), *tokens = json_object_get(json, "tokens"),
           *logprobs = json_object_get(json, "logprobs");
    assert_int_equal(json_array_size(prompt), answer.n_prompt);
    assert_int_equal(json_array_size(tokens), 8);
    assert_int_equal(json_array_size(logprobs), 8);
    for (size_t i = 0; i < answer.n_prompt; i++)
        assert_int_equal(json_integer_value(json_array_get(prompt, i)), answer.prompt_ids[i]);
    for (size_t i = 0; i < 8; i++) {
        assert_int_equal(json_integer_value(json_array_get(tokens, i)), answer.ids[i]);
        double logprob = json_real_value(json_array_get(logprobs, i));
        assert_true(logprob < 0 && logprob - (double)answer.logprobs[i] < 1e-6 &&
                    logprob - (double)answer.logprobs[i] > -1e-6);
    }
    assert_string_equal(json_string_value(json_object_get(json, "text")), answer.text);
    assert_string_equal(json_string_value(json_object_get(json, "finish_reason")), "length");
    const json_t *timings = json_object_get(json, "timings");
    assert_int_equal(json_integer_value(json_object_get(timings, "n_prefill")), answer.n_prompt);
    assert_true(json_number_value(json_object_get(timings, "decode_ms")) > 0);
    assert_true(json_number_value(json_object_get(timings, "prefill_ms")) > 0);
    service_answer_free(&answer);
    json_decref(json);
    assert_int_equal(hcattn_close_session(service.client, session.session, 60000, NULL, &error), 0);
}

static void generate_shows_logprobs(void **state)
{
    (void)state;
    json_t *json =
        json_of(ARGUMENTS("generate", "--json", "--top-logprobs", "3", "--raw", "--ignore-end", "-n", "4", "words"));
    json_t *tops = json_object_get(json, "top_logprobs");
    assert_int_equal(json_array_size(tops), 4);
    for (size_t i = 0; i < 4; i++) { /* greedy: the first of the most likely ones is the token */
        json_t *top = json_array_get(tops, i);
        assert_int_equal(json_array_size(top), 3);
        assert_int_equal(json_integer_value(json_object_get(json_array_get(top, 0), "id")),
                         json_integer_value(json_array_get(json_object_get(json, "tokens"), i)));
    }
    json_decref(json);
}

/* A random choice is the same for the same seed and, at this temperature, another one for another seed. */
static void seeds(void **state)
{
    (void)state;
    char *texts[3];
    const char *const given[] = {"7", "7", "8"};
    for (int i = 0; i < 3; i++)
        texts[i] = output_of(
            ARGUMENTS("generate", "--raw", "--ignore-end", "-n", "24", "-t", "1.5", "--seed", given[i], "words"));
    assert_string_equal(texts[0], texts[1]);
    assert_string_not_equal(texts[0], texts[2]);
    for (int i = 0; i < 3; i++)
        free(texts[i]);
}

static void stop_strings(void **state)
{
    (void)state;
    json_t *whole = json_of(ARGUMENTS("generate", "--json", "--raw", "--ignore-end", "-n", "24", "words"));
    const char *text = json_string_value(json_object_get(whole, "text"));
    size_t n = strlen(text), from = n / 2;
    while (from < n && (text[from] < 0x21 || text[from + 1] < 0x21)) /* two letters, as they are on a command line */
        from++;
    assert_true(from < n);
    char stop[3] = {text[from], text[from + 1], '\0'};
    json_t *json =
        json_of(ARGUMENTS("generate", "--json", "--raw", "--ignore-end", "-n", "24", "--stop", stop, "words"));
    const char *stopped = json_string_value(json_object_get(json, "text"));
    const char *first = strstr(text, stop);
    assert_string_equal(json_string_value(json_object_get(json, "finish_reason")), "stop");
    assert_int_equal(strlen(stopped), first - text);
    assert_memory_equal(stopped, text, strlen(stopped));
    json_decref(json);
    json_decref(whole);
    assert_well();
}

static void a_session_goes_on(void **state)
{
    (void)state;
    struct outcome first = run(ARGUMENTS("generate", "--raw", "--ignore-end", "-n", "4", "--session", "new", "words"));
    char id[17] = "";
    assert_int_equal(first.status, 0);
    assert_int_equal(sscanf(first.err, "session %16[0-9a-f]", id), 1);
    programs_free(&first);
    /* an empty prompt means something here: go on */
    json_t *json = json_of(ARGUMENTS("generate", "--json", "--raw", "--ignore-end", "-n", "4", "--session", id, ""));
    json_t *tokens = json_object_get(json, "tokens");
    json_t *whole = json_of(ARGUMENTS("generate", "--json", "--raw", "--ignore-end", "-n", "8", "words"));
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(json_integer_value(json_array_get(tokens, i)),
                         json_integer_value(json_array_get(json_object_get(whole, "tokens"), 4 + i)));
    json_decref(json);
    json_decref(whole);
    assert_int_equal(hcattn_close_session(service.client, strtoull(id, NULL, 16), 60000, NULL, NULL), 0);
    assert_well();
}

static void chat_by_pipe(void **state)
{
    (void)state;
    struct outcome one = run_with("hello\n", 0, NULL, ARGUMENTS("chat", "-n", "6", "--system", "be brief"));
    struct outcome two = run_with("hello\n\nand again\n/quit\nnever read\n", 0, NULL,
                                  ARGUMENTS("chat", "-n", "6", "--system", "be brief"));
    programs_assert_done(&one);
    programs_assert_done(&two);
    assert_true(two.out_bytes >= one.out_bytes);
    assert_memory_equal(two.out, one.out, one.out_bytes);
    programs_free(&one);
    programs_free(&two);
    assert_well();
}

static void status(void **state)
{
    (void)state;
    json_t *json = json_of(ARGUMENTS("status", "--json"));
    json_t *processes = json_object_get(json, "processes"), *process;
    size_t i;
    bool coordinator = false, store = false, worker = false;
    assert_true(json_is_true(json_object_get(json, "ready")));
    assert_int_equal(json_integer_value(json_object_get(json, "n_ctx")), N_CTX);
    json_array_foreach(processes, i, process)
    {
        const char *program = json_string_value(json_object_get(process, "program"));
        json_int_t pid = json_integer_value(json_object_get(process, "pid"));
        char comm[64], name[32] = "";
        snprintf(comm, sizeof(comm), "/proc/%d/comm", (int)pid);
        FILE *file = fopen(comm, "r");
        assert_non_null(file);
        assert_int_equal(fscanf(file, "%31s", name), 1);
        fclose(file);
        assert_string_equal(name, program);
        assert_string_equal(json_string_value(json_object_get(process, "state")), "ready");
        assert_true(json_is_integer(json_object_get(process, "node")));
        coordinator |= strcmp(program, "hc-coordinator") == 0;
        store |= strcmp(program, "hc-value-store") == 0;
        worker |= strcmp(program, "hc-gpu-worker") == 0;
    }
    assert_true(coordinator && store && worker);
    json_decref(json);
    char *table = output_of(ARGUMENTS("status"));
    assert_int_equal(strncmp(table, "ready\n", 6), 0);
    assert_non_null(strstr(table, "hc-gpu-worker"));
    free(table);
}

static void tokenize(void **state)
{
    (void)state;
    static const char text[] = "the world\tof \xc3\xa9t\xc3\xa9 \xf0\x9f\x8c\x8d";
    char *ids = output_of(ARGUMENTS("tokenize", "--ids", text));
    ids[strcspn(ids, "\n")] = '\0';
    char *back = output_of(ARGUMENTS("tokenize", "--decode", ids));
    back[strlen(back) - 1] = '\0';
    assert_string_equal(back, text);
    json_t *json = json_of(ARGUMENTS("tokenize", "--json", text)), *list = json_object_get(json, "ids");
    assert_true(json_array_size(list) > 3);
    assert_int_equal(json_array_size(json_object_get(json, "pieces")), json_array_size(list));
    assert_int_equal(json_integer_value(json_array_get(list, 0)), strtol(ids, NULL, 10));
    char *table = output_of(ARGUMENTS("tokenize", text));
    assert_int_equal(programs_n_lines(table), json_array_size(list));
    json_t *chat = json_of(ARGUMENTS("tokenize", "--json", "--chat", "hello"));
    assert_true(json_array_size(json_object_get(chat, "ids")) > 5);
    json_decref(chat);
    json_decref(json);
    free(table);
    free(back);
    free(ids);
}

static void score(void **state)
{
    (void)state;
    char path[96];
    write_file(path_in(path, "text"), "the world of words", 18);
    json_t *json = json_of(ARGUMENTS("score", "--json", path));
    size_t n = json_array_size(json_object_get(json, "tokens"));
    assert_true(n > 3);
    assert_int_equal(json_integer_value(json_object_get(json, "first")), 1);
    assert_int_equal(json_array_size(json_object_get(json, "logprobs")), n - 1);
    json_t *late = json_of(ARGUMENTS("score", "--json", "--from", "3", path));
    assert_int_equal(json_array_size(json_object_get(late, "logprobs")), n - 3);
    for (size_t i = 0; i < n - 3; i++) /* decode steps say the same as before */
        assert_true(json_real_value(json_array_get(json_object_get(late, "logprobs"), i)) ==
                    json_real_value(json_array_get(json_object_get(json, "logprobs"), i + 2)));
    struct outcome piped = run_with("the world of words", 0, NULL, ARGUMENTS("score", "-"));
    programs_assert_done(&piped);
    assert_int_equal(programs_n_lines(piped.out), n); /* n - 1 tokens and the sum */
    assert_non_null(strstr(piped.out, "perplexity"));
    programs_free(&piped);
    json_decref(late);
    json_decref(json);
    unlink(path);
    assert_well();
}

static void help(void **state)
{
    (void)state;
    static const char *const names[] = {"up", "down", "run", "generate", "chat", "status", "tokenize", "score"};
    char *all = output_of(ARGUMENTS("--help"));
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char usage[64], row[32];
        snprintf(usage, sizeof(usage), "Usage: hcattn %s ", names[i]);
        snprintf(row, sizeof(row), "\n  %s ", names[i]);
        assert_non_null(strstr(all, row));
        char *text = output_of(ARGUMENTS(names[i], "--help"));
        assert_int_equal(strncmp(text, usage, strlen(usage)), 0);
        assert_non_null(strstr(text, "--config"));
        char *same = output_of(ARGUMENTS(names[i], "--no-such-option", "-h")); /* help helps whatever else was typed */
        assert_string_equal(same, text);
        free(same);
        free(text);
        text = output_of(ARGUMENTS(names[i], "--version"));
        assert_int_equal(strncmp(text, "hcattn ", 7), 0);
        free(text);
    }
    free(all);
    all = output_of(ARGUMENTS("--version"));
    assert_int_equal(strncmp(all, "hcattn ", 7), 0);
    free(all);
}

/* ---- where a value comes from ---- */

static size_t n_tokens_with(const char *const *environment, const char *const *arguments)
{
    struct outcome outcome = run_with(NULL, 0, environment, arguments);
    json_t *json = parse(&outcome);
    size_t n = json_array_size(json_object_get(json, "tokens"));
    json_decref(json);
    programs_free(&outcome);
    return n;
}

static void precedence(void **state)
{
    (void)state;
    char path[96];
    static const char text[] = "# a comment\n\nmax-tokens = 3\nignore-end = yes\n raw=yes\nstores = 5\n";
    write_file(path_in(path, "config"), text, strlen(text));
    const char *const *none = NULL, *const *environment = ARGUMENTS("HCATTN_MAX_TOKENS=4");
    assert_int_equal(n_tokens_with(none, ARGUMENTS("generate", "--config", path, "--json", "words")), 3);
    assert_int_equal(n_tokens_with(environment, ARGUMENTS("generate", "--config", path, "--json", "words")), 4);
    assert_int_equal(n_tokens_with(environment, ARGUMENTS("generate", "--config", path, "--json", "-n", "5", "words")),
                     5);
    assert_int_equal(n_tokens_with(none, ARGUMENTS("generate", "--json", "--raw", "--ignore-end", "words")), 256);
    char setting[128];
    snprintf(setting, sizeof(setting), "HCATTN_CONFIG=%s", path);
    assert_int_equal(n_tokens_with(ARGUMENTS(setting), ARGUMENTS("generate", "--json", "words")), 3);
    unlink(path);
}

static void bad_configuration(void **state)
{
    (void)state;
    char path[96];
    static const struct {
        const char *text, *part;
    } files[] = {
        {"max-tokns = 3\n", "unknown option 'max-tokns'"},
        {"max-tokens\n", "name = value"},
        {"max-tokens = many\n", "max-tokens"},
        {"raw = yes\nraw = no\n", "given before"},
        {"= 3\n", "unknown option ''"},
        {"\x7f\x45LF\x01\x01\n", "name = value"},
    };
    path_in(path, "config");
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        write_file(path, files[i].text, strlen(files[i].text));
        refused(2, ARGUMENTS("hcattn generate: ", path, files[i].part),
                ARGUMENTS("generate", "--config", path, "words"));
    }
    unlink(path);
    refused(2, ARGUMENTS("no-such-file"), ARGUMENTS("generate", "--config", "/no-such-file", "words"));
    refused(2, ARGUMENTS("/tmp"), ARGUMENTS("generate", "--config", "/tmp", "words"));
    refused_with(NULL, 0, ARGUMENTS("HCATTN_MAX_TOKENS=many"), 2, ARGUMENTS("HCATTN_MAX_TOKENS"), good);
    refused_with(NULL, 0, ARGUMENTS("HCATTN_NO_SUCH_OPTION=1"), 2, ARGUMENTS("HCATTN_NO_SUCH_OPTION"), good);
    assert_well();
}

/* ---- used wrongly: status 2 ---- */

static void bad_arguments(void **state)
{
    (void)state;
    refused(2, ARGUMENTS("hcattn: ", "no command"), (const char *const[]){NULL});
    refused(2, ARGUMENTS("hcattn: ", "'explain'"), ARGUMENTS("explain"));
    refused(2, ARGUMENTS("hcattn: ", "'--detach'"), ARGUMENTS("--detach"));
    refused(2, ARGUMENTS("--frobnicate"), ARGUMENTS("generate", "--frobnicate", "words"));
    refused(2, ARGUMENTS("-x"), ARGUMENTS("status", "-x"));
    refused(2, ARGUMENTS("unexpected argument 'more'"), ARGUMENTS("generate", "words", "more"));
    refused(2, ARGUMENTS("a prompt is needed"), ARGUMENTS("generate"));
    refused(2, ARGUMENTS("a text is needed"), ARGUMENTS("tokenize"));
    refused(2, ARGUMENTS("a file is needed"), ARGUMENTS("score"));
    refused(2, ARGUMENTS("no-such-file"), ARGUMENTS("score", "/no-such-file"));
    refused(2, ARGUMENTS("--decode"), ARGUMENTS("tokenize", "--decode", "1", "text"));
    refused(2, ARGUMENTS("--decode", "1,x"), ARGUMENTS("tokenize", "--decode", "1,x"));
    refused(2, ARGUMENTS("--decode"), ARGUMENTS("tokenize", "--decode", "4294967296"));
    refused(2, ARGUMENTS("--session", "'xyz'"), ARGUMENTS("generate", "--session", "xyz", "words"));
    refused(2, ARGUMENTS("--session"), ARGUMENTS("generate", "--session", "0", "words"));
    refused(2, ARGUMENTS("--system"), ARGUMENTS("generate", "--raw", "--system", "x", "words"));
    refused(2, ARGUMENTS("endpoint"), ARGUMENTS("status", "--endpoint", "nonsense"));
    static const char *const values[][2] = {
        {"--max-tokens", "x"},
        {"--max-tokens", "-1"},
        {"--max-tokens", "4294967296"},
        {"--max-tokens", ""},
        {"--max-tokens", "1.5"},
        {"--temperature", "nan"},
        {"--temperature", "inf"},
        {"--temperature", "-1"},
        {"--temperature", "1e9"},
        {"--top-p", "2"},
        {"--min-p", "-0.1"},
        {"--top-logprobs", "21"},
        {"--seed", "-1"},
        {"--seed", "18446744073709551616"},
        {"--top-k", "0x10"},
        {"--connect-timeout", "0"},
        {"--connect-timeout", "soon"},
    };
    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
        char option[64];
        snprintf(option, sizeof(option), "%s=%s", values[i][0], values[i][1]);
        refused(2, ARGUMENTS("hcattn generate: ", values[i][0]), ARGUMENTS("generate", option, "words"));
    }
    refused(2, ARGUMENTS("--max-tokens needs a value"), ARGUMENTS("generate", "words", "--max-tokens"));
    refused(2, ARGUMENTS("--json"), ARGUMENTS("generate", "words", "--json=perhaps"));
    assert_well();
}

/* ---- what the service refuses: status 1 ---- */

static void bad_prompts(void **state)
{
    (void)state;
    static const char broken[] = "caf\xe9 here", overlong[] = "\xc0\xaf", half[] = "\xf0\x9f\x8c",
                      surrogate[] = "\xed\xa0\x80";
    const char *const texts[] = {broken, overlong, half, surrogate};
    for (size_t i = 0; i < 4; i++) {
        refused(1, ARGUMENTS("not UTF-8"), ARGUMENTS("generate", texts[i]));
        refused(1, ARGUMENTS("not UTF-8"), ARGUMENTS("generate", "--raw", "--stop", texts[i], "words"));
        refused(1, ARGUMENTS("not UTF-8"), ARGUMENTS("generate", "--system", texts[i], "words"));
        refused(1, ARGUMENTS("not UTF-8"), ARGUMENTS("tokenize", texts[i]));
        refused_with(texts[i], 0, NULL, 1, ARGUMENTS("standard input is not UTF-8"), ARGUMENTS("generate", "-"));
        refused_with(texts[i], 0, NULL, 1, ARGUMENTS("standard input is not UTF-8"), ARGUMENTS("score", "-"));
        refused_with(texts[i], 0, NULL, 1, ARGUMENTS("not UTF-8"), ARGUMENTS("chat"));
    }
    refused_with("two\0words", 9, NULL, 1, ARGUMENTS("NUL"), ARGUMENTS("generate", "-"));
    refused_with("two\0words", 9, NULL, 1, ARGUMENTS("NUL"), ARGUMENTS("tokenize", "-"));
    refused(1, ARGUMENTS("prompt is empty"), ARGUMENTS("generate", ""));
    refused(1, ARGUMENTS("prompt is empty"), ARGUMENTS("generate", "--raw", ""));
    refused_with("", 0, NULL, 1, ARGUMENTS("prompt is empty"), ARGUMENTS("generate", "-"));
    refused_with("", 0, NULL, 1, ARGUMENTS("empty"), ARGUMENTS("score", "-"));
    refused_with("x", 0, NULL, 1, ARGUMENTS("from 1"), ARGUMENTS("score", "--no-bos", "-")); /* nothing before it */
    refused(1, ARGUMENTS("policy", "clever"), ARGUMENTS("generate", "--policy", "clever", "words"));
    refused(1, ARGUMENTS("no session 00000000000000ab"), ARGUMENTS("generate", "--session", "ab", "words"));
    refused(1, ARGUMENTS("vocabulary"), ARGUMENTS("tokenize", "--decode", "1 2 4000000000"));
    refused(1, ARGUMENTS("stop string"), ARGUMENTS("generate", "--stop", "", "words"));
    assert_well();
}

static void too_long(void **state)
{
    (void)state;
    static char text[8001];
    for (size_t i = 0; i < 2000; i++)
        memcpy(text + 4 * i, "9z#\n", 4);
    json_t *json = json_of(ARGUMENTS("tokenize", "--json", text));
    char n_prompt[32];
    snprintf(n_prompt, sizeof(n_prompt), "%zu tokens of input", json_array_size(json_object_get(json, "ids")));
    json_decref(json);
    refused(1, ARGUMENTS(n_prompt, "context of 512"), ARGUMENTS("generate", "--raw", text));
    refused_with(text, 0, NULL, 1, ARGUMENTS(n_prompt, "context of 512"), ARGUMENTS("generate", "--raw", "-"));
    refused_with(text, 0, NULL, 1, ARGUMENTS(n_prompt, "context of 512"), ARGUMENTS("score", "-"));
    refused(1, ARGUMENTS("600 to generate", "context of 512"), ARGUMENTS("generate", "--raw", "-n", "600", "words"));
    refused(1, ARGUMENTS("4294967295 to generate", "context of 512"),
            ARGUMENTS("generate", "--raw", "-n", "4294967295", "words"));
    assert_well();
}

/* A message that is refused does not end the conversation; one that does not fit does. */
static void chat_goes_on_after_a_bad_message(void **state)
{
    (void)state;
    struct outcome outcome = run_with("caf\xe9\nhello\n", 0, NULL, ARGUMENTS("chat", "-n", "4"));
    assert_int_equal(outcome.status, 1);
    assert_int_equal(programs_n_lines(outcome.err), 1);
    struct outcome clean = run_with("hello\n", 0, NULL, ARGUMENTS("chat", "-n", "4"));
    assert_string_equal(outcome.out, clean.out);
    programs_free(&outcome);
    programs_free(&clean);
    assert_well();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(generate_streams_text),
        cmocka_unit_test(generate_json),
        cmocka_unit_test(generate_shows_logprobs),
        cmocka_unit_test(seeds),
        cmocka_unit_test(stop_strings),
        cmocka_unit_test(a_session_goes_on),
        cmocka_unit_test(chat_by_pipe),
        cmocka_unit_test(status),
        cmocka_unit_test(tokenize),
        cmocka_unit_test(score),
        cmocka_unit_test(help),
        cmocka_unit_test(precedence),
        cmocka_unit_test(bad_configuration),
        cmocka_unit_test(bad_arguments),
        cmocka_unit_test(bad_prompts),
        cmocka_unit_test(too_long),
        cmocka_unit_test(chat_goes_on_after_a_bad_message),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
