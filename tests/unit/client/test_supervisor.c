/* test_supervisor.c - `hcattn run` with a fake process: deaths, statuses, fences, signals. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/clock.h"
#include "common/exit_status.h"
#include "common/peer.h"
#include "proto/control.pb-c.h"
#include "proto/layout.h"
#include "tests/unit/client/programs.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define WORKER "hc-gpu-worker"

static int setup(void **state)
{
    static struct programs programs;
    programs_setup(&programs, "");
    *state = &programs;
    return 0;
}

static int teardown(void **state)
{
    programs_cleanup(*state);
    return 0;
}

static pid_t start_worker(struct programs *programs, const char *mode)
{
    programs->mode = mode;
    return programs_start(
        programs, true,
        (const char *[]){"run", "gpu-worker", "--index", "3", "--stop-timeout", "1s", "--", "--threads", "2", NULL});
}

static void test_arguments_and_stop(void **state)
{
    char line[1024];
    pid_t supervisor = start_worker(*state, "");
    pid_t child = programs_started(*state, WORKER, 0, 10, line, sizeof(line));
    assert_true(child > 0);
    assert_non_null(strstr(line, " --index 3 "));
    assert_non_null(strstr(line, " --incarnation "));
    assert_non_null(strstr(line, " --runtime-dir /tmp/hcattn-test-"));
    assert_string_equal(line + strlen(line) - strlen(" --threads 2"), " --threads 2");
    kill(supervisor, SIGTERM);
    int status = programs_wait(supervisor, 10);
    assert_true(status >= 0 && WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_true(programs_gone(child, 5));
}

static void test_killed_child_is_restarted(void **state)
{
    char first[1024], second[1024];
    pid_t supervisor = start_worker(*state, "");
    pid_t child = programs_started(*state, WORKER, 0, 10, first, sizeof(first));
    kill(child, SIGKILL);
    pid_t next = programs_started(*state, WORKER, 1, 10, second, sizeof(second));
    assert_true(next > 0 && next != child);
    /* Another life, another incarnation. */
    char *a = strstr(first, "--incarnation "), *b = strstr(second, "--incarnation ");
    assert_true(a && b && strncmp(a, b, strlen("--incarnation ") + 16) != 0);
    kill(supervisor, SIGTERM);
    assert_true(programs_wait(supervisor, 10) == 0);
}

static void test_status_2_is_not_restarted(void **state)
{
    pid_t supervisor = start_worker(*state, "exit2");
    int status = programs_wait(supervisor, 10);
    assert_true(status >= 0 && WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 2);
    assert_true(programs_started(*state, WORKER, 0, 1, NULL, 0) > 0);
    assert_int_equal(programs_started(*state, WORKER, 1, 1, NULL, 0), 0);
}

static void test_gives_up(void **state)
{
    struct programs *programs = *state;
    programs->mode = "crash";
    assert_int_equal(programs_run(programs, true, (const char *[]){"run", "value-store", "--max-restarts", "2", NULL}),
                     1);
    assert_true(programs_started(programs, "hc-value-store", 2, 1, NULL, 0) > 0);
    assert_int_equal(programs_started(programs, "hc-value-store", 3, 1, NULL, 0), 0);
    assert_true(programs_log_has(programs, "3 times in a row"));
}

static void test_stubborn_child_is_killed(void **state)
{
    pid_t supervisor = start_worker(*state, "stubborn");
    pid_t child = programs_started(*state, WORKER, 0, 10, NULL, 0);
    uint64_t begun = clock_now_us();
    kill(supervisor, SIGTERM);
    assert_true(programs_wait(supervisor, 10) >= 0);
    assert_true(clock_now_us() - begun >= 900000);
    assert_true(programs_gone(child, 5));
}

static void test_child_dies_with_its_supervisor(void **state)
{
    pid_t supervisor = start_worker(*state, "stubborn");
    pid_t child = programs_started(*state, WORKER, 0, 10, NULL, 0);
    assert_true(child > 0);
    kill(supervisor, SIGKILL);
    assert_true(programs_wait(supervisor, 10) >= 0);
    assert_true(programs_gone(child, 5));
}

static void test_wrong_use(void **state)
{
    struct programs *programs = *state;
    assert_int_equal(programs_run(programs, true, (const char *[]){"run", NULL}), 2);
    assert_int_equal(programs_run(programs, true, (const char *[]){"run", "cook", NULL}), 2);
    assert_true(programs_log_has(programs, "unknown role 'cook'"));
    assert_int_equal(
        programs_run(programs, false, (const char *[]){"run", "gpu-worker", "--bin-dir", "/nonexistent", NULL}), 2);
    assert_true(programs_log_has(programs, "no program hc-gpu-worker in /nonexistent"));
}

/* ---- the coordinator's side ---- */

static Hcattn__Control__Control *receive(int fd)
{
    static uint8_t bytes[PEER_MAX_MESSAGE];
    size_t n = 0;
    struct pollfd item = {.fd = fd, .events = POLLIN};
    assert_int_equal(poll(&item, 1, 10000), 1);
    assert_int_equal(peer_try_receive(fd, bytes, sizeof(bytes), &n, NULL, 0, NULL), 0);
    Hcattn__Control__Control *message = hcattn__control__control__unpack(NULL, n, bytes);
    assert_non_null(message);
    return message;
}

static void send_control(int fd, const Hcattn__Control__Control *message)
{
    uint8_t bytes[1024];
    size_t n = hcattn__control__control__pack(message, bytes);
    assert_int_equal(peer_send(fd, bytes, n, NULL, 0), 0);
}

static int accept_supervisor_of(int listen_fd, Hcattn__Control__Role supervised)
{
    int fd = -1;
    struct pollfd item = {.fd = listen_fd, .events = POLLIN};
    assert_int_equal(poll(&item, 1, 10000), 1);
    assert_int_equal(peer_accept(listen_fd, &fd), 0);
    Hcattn__Control__Control *message = receive(fd);
    assert_int_equal(message->message_case, HCATTN__CONTROL__CONTROL__MESSAGE_HELLO);
    assert_int_equal(message->hello->role, HCATTN__CONTROL__ROLE__SUPERVISOR);
    assert_int_equal(message->hello->supervises, supervised);
    assert_int_equal(message->hello->layout, LAYOUT_VERSION);
    assert_int_equal(message->hello->index, 3);
    assert_true(message->hello->incarnation != 0);
    hcattn__control__control__free_unpacked(message, NULL);
    Hcattn__Control__Control answer = HCATTN__CONTROL__CONTROL__INIT;
    Hcattn__Control__Welcome welcome = HCATTN__CONTROL__WELCOME__INIT;
    answer.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_WELCOME;
    answer.welcome = &welcome;
    send_control(fd, &answer);
    return fd;
}

static int accept_supervisor(int listen_fd)
{
    return accept_supervisor_of(listen_fd, HCATTN__CONTROL__ROLE__GPU_WORKER);
}

/* The next message is ChildStarted: its incarnation. */
static uint64_t expect_started(int fd, pid_t pid, uint32_t n_starts)
{
    Hcattn__Control__Control *message = receive(fd);
    assert_int_equal(message->message_case, HCATTN__CONTROL__CONTROL__MESSAGE_CHILD_STARTED);
    assert_int_equal(message->child_started->pid, pid);
    assert_int_equal(message->child_started->n_starts, n_starts);
    uint64_t incarnation = message->child_started->incarnation;
    hcattn__control__control__free_unpacked(message, NULL);
    return incarnation;
}

static void expect_dead(int fd, uint64_t incarnation, int wait_status)
{
    Hcattn__Control__Control *message = receive(fd);
    assert_int_equal(message->message_case, HCATTN__CONTROL__CONTROL__MESSAGE_CHILD_DEAD);
    assert_true(message->child_dead->incarnation == incarnation);
    assert_int_equal(message->child_dead->exit_status, wait_status);
    hcattn__control__control__free_unpacked(message, NULL);
}

static void send_fence(int fd, uint64_t incarnation)
{
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
    Hcattn__Control__Fence fence = HCATTN__CONTROL__FENCE__INIT;
    fence.incarnation = incarnation;
    fence.reason = (char *)"a test";
    message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_FENCE;
    message.fence = &fence;
    send_control(fd, &message);
}

static void send_start(int fd)
{
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
    Hcattn__Control__Start start = HCATTN__CONTROL__START__INIT;
    message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_START;
    message.start = &start;
    send_control(fd, &message);
}

static void send_leave(int fd)
{
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
    Hcattn__Control__Leave leave = HCATTN__CONTROL__LEAVE__INIT;
    message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_LEAVE;
    message.leave = &leave;
    send_control(fd, &message);
}

/* A child that left is told dead, and is started again when the coordinator, or the next one, says so. */
static void test_left_child_waits_for_start(void **state)
{
    struct programs *programs = *state;
    const Hcattn__Control__Role role = HCATTN__CONTROL__ROLE__VALUE_STORE;
    const char *store = "hc-value-store";
    const int left = EXIT_STATUS_LEFT << 8;
    char path[96], first[1024], second[1024];
    int listen_fd = -1;
    snprintf(path, sizeof(path), "%s/peer.sock", programs->directory);
    assert_int_equal(peer_listen(path, &listen_fd), 0);
    pid_t supervisor = programs_start(
        programs, true, (const char *[]){"run", "value-store", "--index", "3", "--", "--node", "0", NULL});
    pid_t child = programs_started(programs, store, 0, 10, first, sizeof(first));
    int fd = accept_supervisor_of(listen_fd, role);
    uint64_t incarnation = expect_started(fd, child, 1);
    kill(child, SIGUSR1);
    expect_dead(fd, incarnation, left);
    assert_int_equal(programs_started(programs, store, 1, 1, NULL, 0), 0);
    assert_true(programs_log_has(programs, "hcattn drain --resume 3"));

    send_start(fd);
    send_start(fd);
    pid_t next = programs_started(programs, store, 1, 10, second, sizeof(second));
    uint64_t again = expect_started(fd, next, 2);
    assert_true(next > 0 && again != incarnation && strstr(second, " --node 0"));
    send_start(fd); /* of one that lives: nothing */
    send_fence(fd, incarnation);
    expect_dead(fd, incarnation, left);
    /* One that is killed is started again, as ever. */
    kill(next, SIGKILL);
    expect_dead(fd, again, SIGKILL);
    pid_t third = programs_started(programs, store, 2, 10, NULL, 0);
    uint64_t last = expect_started(fd, third, 3);

    /* It leaves while no coordinator is there: the next one hears of it, and can ask for it. */
    close(fd);
    listen_fd = peer_unlisten(listen_fd, path);
    kill(third, SIGUSR1);
    assert_true(programs_gone(third, 5));
    assert_int_equal(peer_listen(path, &listen_fd), 0);
    fd = accept_supervisor_of(listen_fd, role);
    expect_dead(fd, incarnation, left);
    expect_dead(fd, again, SIGKILL);
    expect_dead(fd, last, left);
    assert_int_equal(programs_started(programs, store, 3, 1, NULL, 0), 0);
    send_start(fd);
    pid_t fourth = programs_started(programs, store, 3, 10, NULL, 0);
    last = expect_started(fd, fourth, 4);
    /* One that was let go and is killed on its way has left, too. */
    send_leave(fd);
    send_fence(fd, last); /* a message later: the order was taken before the death */
    expect_dead(fd, last, SIGKILL);
    assert_int_equal(programs_started(programs, store, 4, 1, NULL, 0), 0);
    send_start(fd);
    pid_t fifth = programs_started(programs, store, 4, 10, NULL, 0);
    last = expect_started(fd, fifth, 5);
    kill(fifth, SIGUSR1);
    expect_dead(fd, last, left);
    kill(supervisor, SIGTERM); /* idle */
    assert_int_equal(programs_wait(supervisor, 5), 0);
    close(fd);
    peer_unlisten(listen_fd, path);
}

static void test_fence(void **state)
{
    struct programs *programs = *state;
    char path[96], line[1024];
    int listen_fd = -1;
    snprintf(path, sizeof(path), "%s/peer.sock", programs->directory);
    pid_t supervisor = start_worker(programs, "stubborn");
    pid_t child = programs_started(programs, WORKER, 0, 10, line, sizeof(line));
    /* It waits for no coordinator: the child lives already. */
    assert_true(child > 0);
    assert_int_equal(peer_listen(path, &listen_fd), 0);
    int fd = accept_supervisor(listen_fd);
    uint64_t incarnation = expect_started(fd, child, 1);
    char text[32];
    snprintf(text, sizeof(text), "--incarnation %016llx", (unsigned long long)incarnation);
    assert_non_null(strstr(line, text)); /* what it told is what the child was given */

    send_fence(fd, incarnation + 1); /* not a life of this process: nobody is killed */
    send_fence(fd, incarnation);
    expect_dead(fd, incarnation, SIGKILL);
    assert_int_equal(kill(child, 0), -1);
    pid_t next = programs_started(programs, WORKER, 1, 10, NULL, 0);
    uint64_t second = expect_started(fd, next, 2);
    assert_true(second != incarnation);

    send_fence(fd, incarnation); /* asked twice, told twice; the new life is not touched */
    expect_dead(fd, incarnation, SIGKILL);
    assert_int_equal(kill(next, 0), 0);

    /* The coordinator is lost; a death meanwhile is told to the next one. */
    close(fd);
    listen_fd = peer_unlisten(listen_fd, path);
    kill(next, SIGKILL);
    pid_t third = programs_started(programs, WORKER, 2, 10, NULL, 0);
    assert_true(third > 0);
    assert_int_equal(peer_listen(path, &listen_fd), 0);
    fd = accept_supervisor(listen_fd);
    expect_dead(fd, incarnation, SIGKILL);
    expect_dead(fd, second, SIGKILL);
    expect_started(fd, third, 3);

    kill(supervisor, SIGTERM);
    assert_true(programs_wait(supervisor, 10) >= 0);
    close(fd);
    peer_unlisten(listen_fd, path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_arguments_and_stop, setup, teardown),
        cmocka_unit_test_setup_teardown(test_killed_child_is_restarted, setup, teardown),
        cmocka_unit_test_setup_teardown(test_status_2_is_not_restarted, setup, teardown),
        cmocka_unit_test_setup_teardown(test_gives_up, setup, teardown),
        cmocka_unit_test_setup_teardown(test_stubborn_child_is_killed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_child_dies_with_its_supervisor, setup, teardown),
        cmocka_unit_test_setup_teardown(test_wrong_use, setup, teardown),
        cmocka_unit_test_setup_teardown(test_fence, setup, teardown),
        cmocka_unit_test_setup_teardown(test_left_child_waits_for_start, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
