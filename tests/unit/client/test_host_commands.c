/* test_host_commands.c - `hcattn` with several hosts, and keys, as people and programs see them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/key_file.h"
#include "tests/unit/client/fake_coordinator.h"
#include "tests/unit/client/programs.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct bench {
    struct programs programs;
    struct fake_coordinator hosts[2];
    char list[512];
};

static enum fake_coordinator_step serve(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    Hcattn__StatsReply stats = HCATTN__STATS_REPLY__INIT;
    Hcattn__SessionList list = HCATTN__SESSION_LIST__INIT;
    Hcattn__SessionStats session = HCATTN__SESSION_STATS__INIT, *sessions = &session;
    reply.request_id = request->request_id;
    session.session = 0xabc;
    session.state = (char *)"ready";
    if (request->request_case == HCATTN__REQUEST__REQUEST_STATS) {
        stats.model = fake->context;
        reply.reply_case = HCATTN__REPLY__REPLY_STATS;
        reply.stats = &stats;
        fake_coordinator_reply(fake, &reply);
    } else if (request->request_case == HCATTN__REQUEST__REQUEST_LIST_SESSIONS) {
        list.sessions = &sessions;
        list.n_sessions = strcmp(fake->context, "model-b") == 0;
        reply.reply_case = HCATTN__REPLY__REPLY_SESSION_LIST;
        reply.session_list = &list;
        fake_coordinator_reply(fake, &reply);
    } else {
        fake_coordinator_error(fake, request->request_id, HCATTN__ERROR_CODE__NOT_SUPPORTED, "not here");
    }
    return FAKE_KNOWN;
}

static int setup(void **state)
{
    static char model_a[] = "model-a", model_b[] = "model-b";
    struct bench *bench = calloc(1, sizeof(*bench));
    char directory[64];
    assert_non_null(bench);
    programs_setup(&bench->programs, "");
    bench->programs.split = true;
    memcpy(directory, bench->programs.directory, sizeof(directory));
    for (int i = 0; i < 2; i++) {
        struct fake_coordinator *fake = &bench->hosts[i];
        snprintf(fake->endpoint, sizeof(fake->endpoint), "ipc://%.63s/host%d", directory, i);
        fake->handle = serve;
        fake->context = i ? model_b : model_a;
        fake_coordinator_start(fake);
    }
    snprintf(bench->list, sizeof(bench->list), "%.159s,%.159s", bench->hosts[0].endpoint, bench->hosts[1].endpoint);
    *state = bench;
    return 0;
}

static int teardown(void **state)
{
    struct bench *bench = *state;
    for (int i = 0; i < 2; i++)
        fake_coordinator_stop(&bench->hosts[i]);
    programs_cleanup(&bench->programs);
    free(bench);
    return 0;
}

/* words: command and options, cut at spaces. Returns the exit status; its output is left in the files. */
static int run(struct bench *bench, const char *words)
{
    const char *arguments[24];
    char text[1024];
    size_t n = 0;
    snprintf(text, sizeof(text), "%s", words);
    for (char *rest = text, *word; n < 23 && (word = strsep(&rest, " "));)
        arguments[n++] = word;
    arguments[n] = NULL;
    unlink(bench->programs.log);
    return programs_run(&bench->programs, false, arguments);
}

static int run_on(struct bench *bench, const char *command, const char *endpoint)
{
    char words[1024];
    snprintf(words, sizeof(words), "%.40s --endpoint %.900s", command, endpoint);
    return run(bench, words);
}

static void expect_out(const struct bench *bench, const char *part)
{
    char text[8192];
    text[programs_read(bench->programs.out, text, sizeof(text) - 1)] = '\0';
    if (!strstr(text, part))
        fail_msg("\"%s\" is not in:\n%s", part, text);
}

static void expect_line(const struct bench *bench, const char *part)
{
    char text[8192];
    text[programs_read(bench->programs.log, text, sizeof(text) - 1)] = '\0';
    if (!strstr(text, part) || strchr(text, '\n') != strrchr(text, '\n'))
        fail_msg("\"%s\" is not all of:\n%s", part, text);
}

static void test_each_host_is_shown(void **state)
{
    struct bench *bench = *state;
    char heading[600], list[600];
    assert_int_equal(run_on(bench, "status", bench->list), 0);
    for (int i = 0; i < 2; i++) {
        snprintf(heading, sizeof(heading), "host %s\nready\nmodel model-%c", bench->hosts[i].endpoint, "ab"[i]);
        expect_out(bench, heading);
    }
    assert_int_equal(run_on(bench, "sessions", bench->list), 0);
    snprintf(heading, sizeof(heading), "host %s\nno session is open\n\nhost %s\nSESSION", bench->hosts[0].endpoint,
             bench->hosts[1].endpoint);
    expect_out(bench, heading);
    expect_out(bench, "0000000000000abc");
    assert_int_equal(run_on(bench, "sessions", bench->hosts[0].endpoint), 0); /* of one alone no name is shown */
    expect_out(bench, "no session is open");

    /* One that does not answer keeps no other from being shown. */
    snprintf(list, sizeof(list), "ipc://%s/none, %s", bench->programs.directory, bench->hosts[1].endpoint);
    const char *const arguments[] = {"status", "--endpoint", list, NULL};
    unlink(bench->programs.log);
    assert_int_equal(programs_run(&bench->programs, false, arguments), 1);
    expect_out(bench, "model model-b");
    expect_line(bench, "hcattn status: no coordinator answers at ipc://");
}

static void test_each_host_as_json(void **state)
{
    struct bench *bench = *state;
    char list[1024];
    for (int i = 0; i < 2; i++) {
        snprintf(list, sizeof(list), "%s,ipc://%s/none", bench->list, bench->programs.directory);
        assert_int_equal(run_on(bench, i ? "sessions --json" : "status --json", list), 1);
        json_error_t error;
        json_t *all = json_load_file(bench->programs.out, 0, &error);
        if (!all)
            fail_msg("%s", error.text);
        json_t *hosts = json_object_get(all, "hosts");
        assert_int_equal(json_array_size(hosts), 3);
        for (size_t k = 0; k < 3; k++) {
            const json_t *host = json_array_get(hosts, k);
            if (k < 2)
                assert_string_equal(json_string_value(json_object_get(host, "host")), bench->hosts[k].endpoint);
            if (k < 2 && i == 0)
                assert_string_equal(json_string_value(json_object_get(host, "model")), bench->hosts[k].context);
            if (k < 2 && i == 1)
                assert_int_equal(json_array_size(json_object_get(host, "sessions")), k);
            assert_int_equal(json_object_get(host, "error") != NULL, k == 2);
        }
        json_decref(all);
    }
}

static void test_what_is_about_one_host(void **state)
{
    static const char *const commands[] = {"drain",       "drain 1",    "drain --resume", "transport ring",
                                           "policy full", "statistics", "codebook train"};
    struct bench *bench = *state;
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        assert_int_equal(run_on(bench, commands[i], bench->list), 2);
        expect_line(bench, "this is about one host, and --endpoint names several: name one of them");
    }
    assert_int_equal(run_on(bench, "transport ring", bench->hosts[0].endpoint), 1);
    expect_line(bench, "not here");
    assert_int_equal(run_on(bench, "status", "ipc:///tmp/a,,ipc:///tmp/b"), 2);
    expect_line(bench, "hcattn status: an endpoint of the list is empty");
}

static void test_keys(void **state)
{
    struct bench *bench = *state;
    char words[1024], file[200], key[SOCKET_KEY_SIZE], error[KEY_FILE_ERROR_SIZE];
    struct stat status;
    /* programs_run() adds options that this command has not, as every command that talks to a service has them. */
    snprintf(words, sizeof(words), "%s keys %s/alice >%s 2>%s", PROGRAMS_HCATTN, bench->programs.directory,
             bench->programs.out, bench->programs.log);
    assert_int_equal(system(words), 0);
    snprintf(file, sizeof(file), "%s/alice.secret", bench->programs.directory);
    assert_int_equal(stat(file, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0600);
    assert_int_equal(key_file_secret(file, key, error), 0);
    snprintf(file, sizeof(file), "%s/alice.public", bench->programs.directory);
    assert_int_equal(key_file_public(file, key, error), 0);
    expect_out(bench, key);
    assert_int_equal(WEXITSTATUS(system(words)), 1);
    expect_line(bench, "alice.secret exists; a key is never replaced");
    snprintf(words, sizeof(words), "%s keys 2>%s", PROGRAMS_HCATTN, bench->programs.log);
    assert_int_equal(WEXITSTATUS(system(words)), 2);
    expect_line(bench, "a name for the files is needed");

    assert_int_equal(run(bench, "status --endpoint tcp://127.0.0.1:1 --key /none"), 2);
    expect_line(bench, "cannot read /none: No such file or directory");
    snprintf(words, sizeof(words), "status --endpoint tcp://127.0.0.1:1 --key %s/alice.secret",
             bench->programs.directory);
    assert_int_equal(run(bench, words), 2);
    expect_line(bench, "no server key for tcp://127.0.0.1:1, but a key of our own");
    assert_int_equal(run(bench, "status --endpoint tcp://127.0.0.1:1 --server-key /none"), 2);
    expect_line(bench, "a server key for tcp://127.0.0.1:1, but no key of our own");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_each_host_is_shown, setup, teardown),
        cmocka_unit_test_setup_teardown(test_each_host_as_json, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_is_about_one_host, setup, teardown),
        cmocka_unit_test_setup_teardown(test_keys, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
