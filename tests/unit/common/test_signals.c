/* test_signals.c - signals arrive as messages; a child gets them back as signals. */
#include "common/signals.h"
#include "tests/unit/common/helpers.h"

#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void signals_become_readable(void **state)
{
    (void)state;
    int fd = -1, signal_number = 0;
    assert_int_equal(signals_open(true, &fd), 0);
    assert_int_equal(signals_read(fd, &signal_number), -EAGAIN);
    assert_int_equal(signal_number, 0);
    raise(SIGTERM);
    assert_int_equal(signals_read(fd, &signal_number), 0);
    assert_int_equal(signal_number, SIGTERM);
    raise(SIGINT);
    assert_int_equal(signals_read(fd, &signal_number), 0);
    assert_int_equal(signal_number, SIGINT);
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    waitpid(child, NULL, 0);
    assert_int_equal(signals_read(fd, &signal_number), 0);
    assert_int_equal(signal_number, SIGCHLD);
    assert_int_equal(signals_close(fd), -1);
    assert_int_equal(signals_close(-1), -1);
}

static void a_broken_pipe_is_only_an_error(void **state)
{
    (void)state;
    int fd = -1, ends[2];
    assert_int_equal(signals_open(false, &fd), 0);
    assert_int_equal(pipe(ends), 0);
    close(ends[0]);
    assert_int_equal(write(ends[1], "x", 1), -1);
    assert_int_equal(errno, EPIPE);
    close(ends[1]);
    signals_close(fd);
}

static void restored_body(void)
{
    int fd;
    if (signals_open(true, &fd) < 0)
        _exit(9);
    signal(SIGTERM, SIG_DFL);
    signals_restore();
    raise(SIGTERM);
}

static void a_child_can_be_ended_again(void **state)
{
    (void)state;
    int status = helpers_in_child(restored_body);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
}

static void *take_mask(void *context)
{
    sigset_t *mask = context;
    pthread_sigmask(SIG_SETMASK, NULL, mask);
    return mask;
}

static void a_thread_takes_no_signals(void **state)
{
    (void)state;
    sigset_t before, in_thread, after;
    pthread_t thread;
    assert_int_equal(pthread_sigmask(SIG_SETMASK, NULL, &before), 0);
    assert_int_equal(signals_start_thread(&thread, take_mask, &in_thread), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(sigismember(&in_thread, SIGTERM), 1);
    assert_int_equal(sigismember(&in_thread, SIGUSR1), 1);
    assert_int_equal(pthread_sigmask(SIG_SETMASK, NULL, &after), 0);
    for (int signal = 1; signal < SIGRTMIN; signal++)
        assert_int_equal(sigismember(&after, signal), sigismember(&before, signal));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(signals_become_readable),
        cmocka_unit_test(a_broken_pipe_is_only_an_error),
        cmocka_unit_test(a_child_can_be_ended_again),
        cmocka_unit_test(a_thread_takes_no_signals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
