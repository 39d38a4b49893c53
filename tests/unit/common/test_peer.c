/* test_peer.c - messages, descriptors, hang-ups, and sockets left behind by the dead. */
#include "common/peer.h"

#include "common/clock.h"
#include "tests/unit/common/helpers.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char big[PEER_MAX_MESSAGE + 1], received[PEER_MAX_MESSAGE + 1];

static void connected(void **state, int ret_fds[2])
{
    int listener = -1;
    const char *path = helpers_path(state, "socket");
    assert_int_equal(peer_listen(path, &listener), 0);
    assert_int_equal(peer_accept(listener, &ret_fds[1]), -EAGAIN);
    assert_int_equal(peer_connect(path, clock_deadline_us(1000000), &ret_fds[0]), 0);
    assert_int_equal(peer_accept(listener, &ret_fds[1]), 0);
    assert_int_equal(peer_unlisten(listener, path), -1);
    assert_true(access(path, F_OK) < 0);
}

static void messages_keep_their_borders(void **state)
{
    int fds[2];
    size_t n = 0, n_fds = 99;
    connected(state, fds);
    assert_int_equal(peer_try_receive(fds[1], received, sizeof(received), &n, NULL, 0, NULL), -EAGAIN);
    assert_int_equal(peer_send(fds[0], "one", 3, NULL, 0), 0);
    for (size_t i = 0; i < sizeof(big); i++)
        big[i] = (char)(i * 7);
    assert_int_equal(peer_try_send(fds[0], big, PEER_MAX_MESSAGE, NULL, 0), 0);
    assert_int_equal(peer_receive(fds[1], received, sizeof(received), &n, NULL, 0, &n_fds), 0);
    assert_int_equal(n, 3);
    assert_int_equal(n_fds, 0);
    assert_memory_equal(received, "one", 3);
    assert_int_equal(peer_receive(fds[1], received, PEER_MAX_MESSAGE, &n, NULL, 0, NULL), 0);
    assert_int_equal(n, PEER_MAX_MESSAGE);
    assert_memory_equal(received, big, PEER_MAX_MESSAGE);
    assert_int_equal(peer_send(fds[0], big, PEER_MAX_MESSAGE + 1, NULL, 0), -EMSGSIZE);
    assert_int_equal(peer_send(fds[0], big, 0, NULL, 0), -EINVAL);
    close(fds[0]);
    close(fds[1]);
}

static void a_hang_up_is_epipe_after_what_was_sent(void **state)
{
    int fds[2];
    size_t n = 0;
    connected(state, fds);
    assert_int_equal(peer_send(fds[0], "last", 4, NULL, 0), 0);
    close(fds[0]);
    assert_int_equal(peer_receive(fds[1], received, sizeof(received), &n, NULL, 0, NULL), 0);
    assert_int_equal(n, 4);
    assert_int_equal(peer_receive(fds[1], received, sizeof(received), &n, NULL, 0, NULL), -EPIPE);
    assert_int_equal(peer_try_receive(fds[1], received, sizeof(received), &n, NULL, 0, NULL), -EPIPE);
    assert_int_equal(peer_send(fds[1], "x", 1, NULL, 0), -EPIPE);
    close(fds[1]);
    /* Unread messages turn the hang-up into a reset for the other side: still the same answer. */
    assert_int_equal(peer_pair(fds), 0);
    assert_int_equal(peer_send(fds[1], "unread", 6, NULL, 0), 0);
    close(fds[0]);
    assert_int_equal(peer_receive(fds[1], received, sizeof(received), &n, NULL, 0, NULL), -EPIPE);
    close(fds[1]);
}

static void a_peer_that_does_not_read_cannot_block_us(void **state)
{
    (void)state;
    int fds[2], n_sent = 0, result;
    assert_int_equal(peer_pair(fds), 0);
    while ((result = peer_try_send(fds[0], big, PEER_MAX_MESSAGE, NULL, 0)) == 0 && n_sent < 1000)
        n_sent++;
    assert_int_equal(result, -EAGAIN);
    assert_in_range(n_sent, 1, 100);
    close(fds[0]);
    close(fds[1]);
}

static void descriptors_travel(void **state)
{
    (void)state;
    int fds[2], ends[2], got[PEER_MAX_FDS];
    size_t n = 0, n_fds = 0;
    assert_int_equal(peer_pair(fds), 0);
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(peer_send(fds[0], "two", 3, ends, 2), 0);
    assert_int_equal(peer_receive(fds[1], received, sizeof(received), &n, got, PEER_MAX_FDS, &n_fds), 0);
    assert_int_equal(n_fds, 2);
    assert_true(fcntl(got[0], F_GETFD) & FD_CLOEXEC);
    close(ends[0]);
    close(ends[1]);
    assert_int_equal(write(got[1], "hello", 5), 5);
    assert_int_equal(read(got[0], received, 5), 5);
    close(got[0]);
    close(got[1]);
    close(fds[0]);
    close(fds[1]);
}

static void what_is_too_much_is_dropped_whole(void **state)
{
    (void)state;
    int fds[2], many[200], got[PEER_MAX_FDS];
    size_t n = 42, n_fds = 42;
    int n_before = helpers_n_descriptors();
    assert_int_equal(peer_pair(fds), 0);
    for (size_t i = 0; i < 200; i++)
        many[i] = fds[0];
    /* a message that is too long, with a descriptor */
    assert_int_equal(peer_send(fds[0], big, 100, many, 1), 0);
    assert_int_equal(peer_receive(fds[1], received, 99, &n, got, PEER_MAX_FDS, &n_fds), -EMSGSIZE);
    /* more descriptors than asked for: one more, some more, and where none was expected */
    for (size_t i = 2; i <= PEER_MAX_FDS; i++) {
        assert_int_equal(peer_send(fds[0], "x", 1, many, i), 0);
        assert_int_equal(peer_receive(fds[1], received, 9, &n, got, i - 1, &n_fds), -EMSGSIZE);
    }
    assert_int_equal(peer_send(fds[0], "x", 1, many, 1), 0);
    assert_int_equal(peer_receive(fds[1], received, 9, &n, NULL, 0, NULL), -EMSGSIZE);
    assert_int_equal(peer_send(fds[0], "x", 1, many, PEER_MAX_FDS + 1), -EINVAL);
    /* more than our own sender ever sends */
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(many))];
    } control = {.header = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(many))}};
    memcpy(CMSG_DATA(&control.header), many, sizeof(many));
    struct iovec part = {.iov_base = big, .iov_len = 1};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control.bytes)};
    assert_int_equal(sendmsg(fds[0], &message, 0), 1);
    assert_int_equal(peer_receive(fds[1], received, 9, &n, got, PEER_MAX_FDS, &n_fds), -EMSGSIZE);
    /* an empty message with a descriptor is taken for a hang-up, and leaks nothing */
    message.msg_iovlen = 0;
    message.msg_controllen = CMSG_SPACE(sizeof(int));
    control.header.cmsg_len = CMSG_LEN(sizeof(int));
    assert_int_equal(sendmsg(fds[0], &message, 0), 0);
    assert_int_equal(peer_receive(fds[1], received, 9, &n, got, PEER_MAX_FDS, &n_fds), -EPIPE);
    assert_int_equal(n, 42);
    assert_int_equal(n_fds, 42);
    /* the next message is a good one */
    assert_int_equal(peer_send(fds[0], "good", 4, NULL, 0), 0);
    assert_int_equal(peer_receive(fds[1], received, 9, &n, NULL, 0, NULL), 0);
    assert_int_equal(n, 4);
    close(fds[0]);
    close(fds[1]);
    assert_int_equal(helpers_n_descriptors(), n_before);
}

static void a_live_socket_is_not_taken_over(void **state)
{
    int first = -1, second = -1, fd = -1;
    const char *path = helpers_path(state, "socket");
    assert_int_equal(peer_listen(path, &first), 0);
    struct stat status;
    assert_int_equal(stat(path, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0600);
    assert_int_equal(peer_listen(path, &second), -EADDRINUSE);
    assert_int_equal(second, -1);
    assert_int_equal(peer_connect(path, 0, &fd), 0); /* it is still there */
    close(fd);
    close(first); /* as if its process had died: the file stays */
    assert_int_equal(access(path, F_OK), 0);
    assert_int_equal(peer_connect(path, 0, &fd), -ECONNREFUSED);
    assert_int_equal(peer_listen(path, &second), 0);
    assert_int_equal(peer_connect(path, 0, &fd), 0);
    close(fd);
    peer_unlisten(second, path);
    assert_int_equal(peer_unlisten(-1, path), -1);
}

static void what_is_no_socket_is_not_removed(void **state)
{
    int fd = -1;
    const char *path = helpers_path(state, "file");
    close(open(path, O_CREAT | O_WRONLY, 0600));
    assert_int_equal(peer_listen(path, &fd), -EEXIST);
    assert_int_equal(access(path, F_OK), 0);
    assert_int_equal(peer_listen(helpers_path(state, "no/such/folder"), &fd), -ENOENT);
    char long_path[200];
    memset(long_path, 'x', sizeof(long_path));
    long_path[0] = '/';
    long_path[108] = '\0';
    assert_int_equal(peer_listen(long_path, &fd), -ENAMETOOLONG);
    assert_int_equal(peer_connect(long_path, 0, &fd), -ENAMETOOLONG);
    assert_int_equal(fd, -1);
}

struct late {
    const char *path;
    int fd, result;
};

static void *listen_later(void *argument)
{
    struct late *late = argument;
    clock_sleep_us(100000);
    late->result = peer_listen(late->path, &late->fd);
    return NULL;
}

static void connecting_waits_until_the_deadline(void **state)
{
    int fd = -1;
    struct late late = {.path = helpers_path(state, "socket"), .fd = -1};
    assert_int_equal(peer_connect(late.path, 0, &fd), -ENOENT);
    uint64_t before = clock_now_us();
    assert_int_equal(peer_connect(late.path, clock_deadline_us(60000), &fd), -ETIMEDOUT);
    assert_true(clock_now_us() - before >= 60000);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, listen_later, &late), 0);
    assert_int_equal(peer_connect(late.path, clock_deadline_us(20000000), &fd), 0);
    pthread_join(thread, NULL);
    assert_int_equal(late.result, 0);
    close(fd);
    peer_unlisten(late.fd, late.path);
}

static void the_kernel_says_who_is_there(void **state)
{
    int fds[2];
    pid_t pid = 0;
    uid_t uid = 12345;
    connected(state, fds);
    assert_int_equal(peer_credentials(fds[1], &pid, &uid), 0);
    assert_int_equal(pid, getpid());
    assert_int_equal(uid, geteuid());
    close(fds[0]);
    close(fds[1]);
    assert_int_equal(peer_credentials(-1, &pid, &uid), -EBADF);
}

/* Who hangs up without reading all has still said what it said: a refusal must arrive. */
static void what_was_sent_before_a_reset_arrives(void **state)
{
    int fds[2];
    size_t n = 0;
    connected(state, fds);
    assert_int_equal(peer_send(fds[0], "never read", 10, NULL, 0), 0);
    assert_int_equal(peer_send(fds[1], "no", 2, NULL, 0), 0);
    close(fds[1]);
    assert_int_equal(peer_try_receive(fds[0], received, sizeof(received), &n, NULL, 0, NULL), 0);
    assert_int_equal(n, 2);
    assert_memory_equal(received, "no", 2);
    assert_int_equal(peer_try_receive(fds[0], received, sizeof(received), &n, NULL, 0, NULL), -EPIPE);
    close(fds[0]);
}

static void a_pidfd_tells_of_an_end(void **state)
{
    (void)state;
    pid_t child = fork();
    if (child == 0) {
        pause();
        _exit(0);
    }
    int fd = -1;
    assert_int_equal(peer_pidfd(child, &fd), 0);
    struct pollfd item = {.fd = fd, .events = POLLIN};
    assert_int_equal(poll(&item, 1, 0), 0);
    kill(child, SIGKILL);
    assert_int_equal(poll(&item, 1, 10000), 1);
    waitpid(child, NULL, 0);
    close(fd);
    assert_int_equal(peer_pidfd(child, &fd), -ESRCH);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(messages_keep_their_borders, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(a_hang_up_is_epipe_after_what_was_sent, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(what_was_sent_before_a_reset_arrives, helpers_folder, helpers_remove_folder),
        cmocka_unit_test(a_peer_that_does_not_read_cannot_block_us),
        cmocka_unit_test(descriptors_travel),
        cmocka_unit_test(what_is_too_much_is_dropped_whole),
        cmocka_unit_test_setup_teardown(a_live_socket_is_not_taken_over, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(what_is_no_socket_is_not_removed, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(connecting_waits_until_the_deadline, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(the_kernel_says_who_is_there, helpers_folder, helpers_remove_folder),
        cmocka_unit_test(a_pidfd_tells_of_an_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
