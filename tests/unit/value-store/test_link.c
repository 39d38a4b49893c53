/* test_link.c - what the heartbeat says of a long phase: how far it is, or how much it has brought over. */
#include "value-store/link.h"
#include "common/peer.h"
#include "value-store/progress.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

static void expect_phase(int fd, const char *phase)
{
    uint8_t bytes[1024];
    size_t n_bytes = 0;
    struct pollfd item = {.fd = fd, .events = POLLIN};
    assert_int_equal(poll(&item, 1, 10000), 1);
    assert_int_equal(peer_try_receive(fd, bytes, sizeof(bytes), &n_bytes, NULL, 0, NULL), 0);
    Hcattn__Control__Control *message = hcattn__control__control__unpack(NULL, n_bytes, bytes);
    assert_non_null(message);
    assert_int_equal(message->message_case, HCATTN__CONTROL__CONTROL__MESSAGE_HEARTBEAT);
    assert_string_equal(message->heartbeat->phase, phase);
    hcattn__control__control__free_unpacked(message, NULL);
}

static void phases_are_told(void **state)
{
    (void)state;
    struct progress progress = {.phase = "idle"};
    struct link *link;
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
    assert_int_equal(link_open(&progress, &link), 0);
    link_attach(link, fds[0]);
    link_registered(link);
    progress_begin(&progress, "formatting");
    atomic_store(&progress.percent, 42);
    expect_phase(fds[1], "formatting 42 %");
    progress_end(&progress);
    progress_begin(&progress, PROGRESS_IMPORTING);
    atomic_store(&progress.bytes_imported, UINT64_C(3) << 31);
    expect_phase(fds[1], "importing, 6144 MiB so far");
    progress_end(&progress);
    expect_phase(fds[1], "idle");
    link_close(link);
    close(fds[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(phases_are_told)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
