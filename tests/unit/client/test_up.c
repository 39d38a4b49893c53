/* test_up.c - `hcattn up` and `down` over fake processes: readiness, the lock, the background, failures, order of stopping. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/clock.h"
#include "tests/unit/client/programs.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *const all[] = {"hc-coordinator", "hc-value-store", "hc-gpu-worker"};

static int setup(void **state)
{
    static struct programs programs;
    programs_setup(&programs, "");
    *state = &programs;
    return 0;
}

static int teardown(void **state)
{
    programs_run(*state, false, (const char *[]){"down", NULL}); /* whatever a failed test left */
    programs_cleanup(*state);
    return 0;
}

/* A model that exists: nobody reads it here. */
#define MODEL "/proc/self/exe"

static bool wait_for_log(const struct programs *programs, const char *text)
{
    static char log[1 << 16];
    for (int i = 0; i < 1000; i++) {
        programs_read(programs->log, log, sizeof(log));
        if (strstr(log, text))
            return true;
        clock_sleep_us(10000);
    }
    return programs_log_has(programs, text);
}

static void check_all_gone(const struct programs *programs)
{
    for (size_t i = 0; i < 3; i++) {
        pid_t pid;
        for (unsigned n = 0; (pid = programs_started(programs, all[i], n, 0, NULL, 0)) > 0; n++)
            assert_true(programs_gone(pid, 5));
    }
}

static void test_foreground(void **state)
{
    struct programs *programs = *state;
    char line[1024], expected[64];
    pid_t up = programs_start(
        programs, true,
        (const char *[]){"up", "--model", MODEL, "--stores", "2", "--n-ctx", "512", "--memory", "64MiB", NULL});
    assert_true(wait_for_log(programs, "Ctrl-C stops the service"));
    assert_true(programs_log_has(programs, "fake-model"));
    assert_true(programs_started(programs, "hc-value-store", 1, 1, line, sizeof(line)) > 0);
    assert_non_null(strstr(line, "--memory 64MiB"));
    assert_true(programs_started(programs, "hc-coordinator", 0, 1, line, sizeof(line)) > 0);
    assert_non_null(strstr(line, "--stores 2"));
    assert_non_null(strstr(line, "--workers 1"));
    assert_non_null(strstr(line, "--policy default"));
    assert_non_null(strstr(line, "--transport ring"));
    assert_null(strstr(line, "--exact-tokens"));
    assert_true(programs_started(programs, "hc-gpu-worker", 0, 1, line, sizeof(line)) > 0);
    assert_non_null(strstr(line, "--model " MODEL));
    assert_non_null(strstr(line, "--n-ctx 512"));
    assert_null(strstr(line, "--isa")); /* what was not asked for is the process's own business */

    /* One at a time. */
    assert_int_equal(programs_run(programs, true, (const char *[]){"up", "--model", MODEL, NULL}), 2);
    snprintf(expected, sizeof(expected), "already running as pid %d", (int)up);
    assert_true(programs_log_has(programs, expected));

    assert_int_equal(programs_run(programs, false, (const char *[]){"status", NULL}), 0);
    kill(up, SIGINT);
    int status = programs_wait(up, 20);
    assert_true(status >= 0 && WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    check_all_gone(programs);
    assert_int_equal(programs_run(programs, false, (const char *[]){"status", NULL}), 1);
    assert_true(programs_log_has(programs, "start one with 'hcattn up'"));
}

/* The time until it must be ready begins anew while a percentage grows, and only then. */
static void test_patience(void **state)
{
    struct programs *programs = *state;
    static const char *const arguments[] = {"up", "--model", MODEL, "--start-timeout", "700ms", NULL};
    programs->mode = "formats";
    uint64_t begun_us = clock_now_us();
    pid_t up = programs_start(programs, true, arguments);
    assert_true(wait_for_log(programs, "Ctrl-C stops the service"));
    assert_true(clock_now_us() - begun_us > 800000);
    kill(up, SIGTERM);
    assert_int_equal(programs_wait(up, 20), 0);
    programs->mode = "stuck";
    begun_us = clock_now_us();
    assert_int_equal(programs_run(programs, true, arguments), 1);
    assert_true(clock_now_us() - begun_us < 15000000);
    assert_true(programs_log_has(programs, "not ready and nothing has moved for 0 s: no worker yet"));
    check_all_gone(programs);
}

/* A store that leaves is not missed: the others stay, and it is not started again; stopping does not wait for it. */
static void test_store_leaves(void **state)
{
    struct programs *programs = *state;
    pid_t up = programs_start(programs, true, (const char *[]){"up", "--model", MODEL, "--stores", "2", NULL});
    assert_true(wait_for_log(programs, "Ctrl-C stops the service"));
    pid_t first = programs_started(programs, "hc-value-store", 0, 1, NULL, 0);
    pid_t second = programs_started(programs, "hc-value-store", 1, 1, NULL, 0);
    kill(first, SIGUSR1);
    assert_true(programs_gone(first, 5));
    assert_true(wait_for_log(programs, "has left the service"));
    assert_int_equal(programs_started(programs, "hc-value-store", 2, 1, NULL, 0), 0);
    assert_int_equal(kill(second, 0), 0);
    assert_int_equal(programs_run(programs, false, (const char *[]){"status", NULL}), 0);
    uint64_t begun_us = clock_now_us();
    kill(up, SIGTERM);
    assert_int_equal(programs_wait(up, 20), 0);
    assert_true(clock_now_us() - begun_us < 5000000);
    check_all_gone(programs);
}

/* The n-th start of a program, whose line must hold all of the texts (closed by NULL). */
static pid_t check_started(const struct programs *programs, const char *program, unsigned n, const char *const *texts)
{
    char line[2048];
    pid_t pid = programs_started(programs, program, n, 10, line, sizeof(line));
    assert_true(pid > 0);
    for (; *texts; texts++) {
        if (!strstr(line, *texts))
            fail_msg("no '%s' in: %s", *texts, line);
    }
    return pid;
}

#define CHECK_STARTED(program, n, ...) check_started(programs, program, n, (const char *[]){__VA_ARGS__, NULL})

/* Two workers, each with its supervisor; every option reaches the processes that have it. */
static void test_two_workers(void **state)
{
    struct programs *programs = *state;
    char line[2048];
    assert_int_equal(programs_run(programs, true,
                                  (const char *[]){"up",
                                                   "--detach",
                                                   "--model",
                                                   MODEL,
                                                   "--workers",
                                                   "2",
                                                   "--exact-tokens",
                                                   "0",
                                                   "--rows",
                                                   "q8_0",
                                                   "--max-queue",
                                                   "9",
                                                   "--policy",
                                                   "rot3,mass=0.9",
                                                   "--transport",
                                                   "routed",
                                                   "--queue-timeout",
                                                   "3s",
                                                   "--spin-us",
                                                   "7",
                                                   "--max-step-ms",
                                                   "40",
                                                   "--micro-batches",
                                                   "2",
                                                   "--device-memory",
                                                   "2GiB",
                                                   NULL}),
                     0);
    CHECK_STARTED("hc-coordinator", 0, " --workers 2", " --exact-tokens 0", " --max-queue 9", " --queue-timeout 3s",
                  " --policy rot3,mass=0.9", " --transport routed");
    CHECK_STARTED("hc-value-store", 0, " --spin-us 7");
    programs_started(programs, "hc-value-store", 0, 1, line, sizeof(line));
    assert_null(strstr(line, "--rows"));
    pid_t workers[2];
    unsigned second = 0; /* which of the starts is worker 1 */
    for (unsigned i = 0; i < 2; i++) {
        workers[i] = CHECK_STARTED("hc-gpu-worker", i, " --rows q8_0", " --spin-us 7", " --max-step-ms 40",
                                   " --micro-batches 2", " --device-memory 2GiB", " --policy rot3,mass=0.9");
        programs_started(programs, "hc-gpu-worker", i, 1, line, sizeof(line));
        second = strstr(line, " --index 1 ") ? i : second;
    }
    CHECK_STARTED("hc-gpu-worker", second, " --index 1 ");
    CHECK_STARTED("hc-gpu-worker", 1 - second, " --index 0 ");

    kill(workers[second], SIGKILL);
    CHECK_STARTED("hc-gpu-worker", 2, " --index 1 ");
    assert_int_equal(kill(workers[1 - second], 0), 0); /* the other one does not notice */
    assert_int_equal(programs_run(programs, false, (const char *[]){"down", NULL}), 0);
    check_all_gone(programs);
}

static void test_bad_policy(void **state)
{
    struct programs *programs = *state;
    assert_int_equal(
        programs_run(programs, true, (const char *[]){"up", "--model", MODEL, "--policy", "rot9,mass=1", NULL}), 2);
    assert_true(programs_log_has(programs, "hcattn up: --policy: "));
    assert_true(programs_log_has(programs, "\"rot9\" is not understood"));
    assert_int_equal(programs_started(programs, "hc-coordinator", 0, 0, NULL, 0), 0);
}

static void test_detach_and_down(void **state)
{
    struct programs *programs = *state;
    assert_int_equal(programs_run(programs, false, (const char *[]){"down", NULL}), 0);
    assert_true(programs_log_has(programs, "nothing runs in"));
    assert_int_equal(programs_run(programs, true, (const char *[]){"up", "--detach", "--model", MODEL, NULL}), 0);
    assert_int_equal(programs_run(programs, false, (const char *[]){"status", "--json", NULL}), 0);
    assert_int_equal(programs_run(programs, true, (const char *[]){"up", "--detach", "--model", MODEL, NULL}), 2);
    assert_int_equal(programs_run(programs, false, (const char *[]){"down", NULL}), 0);
    check_all_gone(programs);
    /* Free again. */
    assert_int_equal(programs_run(programs, true, (const char *[]){"up", "--detach", "--model", MODEL, NULL}), 0);
    assert_int_equal(programs_run(programs, false, (const char *[]){"down", NULL}), 0);
}

static void test_worker_refuses(void **state)
{
    struct programs *programs = *state;
    static const char *const modes[][3] = {{"up", "--model", MODEL}, {"up", "--detach", "--model=" MODEL}};
    programs->mode = "exit2-worker";
    for (size_t i = 0; i < 2; i++) {
        const char *arguments[] = {modes[i][0], modes[i][1], modes[i][2], NULL};
        assert_int_equal(programs_run(programs, true, arguments), 2);
        assert_true(programs_log_has(programs, "hc-gpu-worker: no such model"));
        assert_true(programs_log_has(programs, "gpu-worker 0 ended with status 2"));
        check_all_gone(programs);
        unlink(programs->log);
    }
}

static void test_no_model(void **state)
{
    struct programs *programs = *state;
    assert_int_equal(programs_run(programs, true, (const char *[]){"up", "--model", "/nonexistent.gguf", NULL}), 2);
    assert_true(programs_log_has(programs, "/nonexistent.gguf: No such file"));
    assert_int_equal(programs_started(programs, "hc-coordinator", 0, 0, NULL, 0), 0);
}

static void test_up_is_killed(void **state)
{
    struct programs *programs = *state;
    pid_t up = programs_start(programs, true, (const char *[]){"up", "--model", MODEL, NULL});
    assert_true(wait_for_log(programs, "Ctrl-C stops the service"));
    kill(up, SIGKILL);
    assert_true(programs_wait(up, 5) >= 0);
    check_all_gone(programs); /* supervisors and their children notice */
    assert_int_equal(programs_run(programs, false, (const char *[]){"down", NULL}), 0);
}

static void test_supervisor_is_killed(void **state)
{
    struct programs *programs = *state;
    pid_t up = programs_start(programs, true, (const char *[]){"up", "--model", MODEL, NULL});
    assert_true(wait_for_log(programs, "Ctrl-C stops the service"));
    pid_t worker = programs_started(programs, "hc-gpu-worker", 0, 1, NULL, 0);
    char path[64], text[512];
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)worker);
    programs_read(path, text, sizeof(text));
    int supervisor = 0;
    assert_int_equal(sscanf(strrchr(text, ')') + 2, "%*c %d", &supervisor), 1);
    kill(supervisor, SIGKILL);
    pid_t next = programs_started(programs, "hc-gpu-worker", 1, 10, NULL, 0);
    assert_true(next > 0);
    assert_true(programs_gone(worker, 5));
    kill(up, SIGTERM);
    assert_int_equal(programs_wait(up, 20), 0);
    assert_true(programs_gone(next, 5));
}

static void test_stubborn_worker_does_not_hold_up_down(void **state)
{
    struct programs *programs = *state;
    programs->mode = "stubborn-worker";
    assert_int_equal(
        programs_run(programs, true,
                     (const char *[]){"up", "--detach", "--model", MODEL, "--stop-timeout", "500ms", NULL}),
        0);
    assert_int_equal(programs_run(programs, false, (const char *[]){"down", "--timeout", "10s", NULL}), 0);
    check_all_gone(programs);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_foreground, setup, teardown),
        cmocka_unit_test_setup_teardown(test_patience, setup, teardown),
        cmocka_unit_test_setup_teardown(test_store_leaves, setup, teardown),
        cmocka_unit_test_setup_teardown(test_two_workers, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bad_policy, setup, teardown),
        cmocka_unit_test_setup_teardown(test_detach_and_down, setup, teardown),
        cmocka_unit_test_setup_teardown(test_worker_refuses, setup, teardown),
        cmocka_unit_test_setup_teardown(test_no_model, setup, teardown),
        cmocka_unit_test_setup_teardown(test_up_is_killed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_supervisor_is_killed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_stubborn_worker_does_not_hold_up_down, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
