/* test_socket.c - frames, routes, full queues and endpoints, over ipc and tcp. */
#include "common/socket.h"

#include "common/clock.h"
#include "tests/unit/common/helpers.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

struct ends {
    struct socket_context *context;
    struct socket *router, *dealer;
    char endpoint[200];
};

static void open_ends(struct ends *ends, const char *endpoint, uint64_t id, uint32_t high_water)
{
    memset(ends, 0, sizeof(*ends));
    assert_int_equal(socket_context_new(&ends->context), 0);
    assert_int_equal(socket_new_router(ends->context, high_water, &ends->router), 0);
    assert_int_equal(socket_bind(ends->router, endpoint), 0);
    assert_int_equal(socket_endpoint(ends->router, ends->endpoint, sizeof(ends->endpoint)), 0);
    assert_int_equal(socket_new_dealer(ends->context, id, high_water, &ends->dealer), 0);
    assert_int_equal(socket_connect(ends->dealer, ends->endpoint), 0);
}

static void close_ends(struct ends *ends)
{
    assert_null(socket_free(ends->dealer));
    assert_null(socket_free(ends->router));
    assert_null(socket_context_free(ends->context));
}

static const char *ipc(void **state)
{
    static char endpoint[300];
    snprintf(endpoint, sizeof(endpoint), "ipc://%s", helpers_path(state, "zmq"));
    return endpoint;
}

/* There and back; ids with zero bytes in every place are ids too. */
static void exchange(const char *endpoint, uint64_t id)
{
    struct ends ends;
    open_ends(&ends, endpoint, id, 0);
    char large[100000];
    memset(large, 'L', sizeof(large));
    const struct frame request[] = {{"", 0}, {"hello", 5}, {large, sizeof(large)}};
    assert_int_equal(socket_send(ends.dealer, request, 3, true), 0);
    struct socket_message *message = NULL;
    assert_int_equal(socket_receive(ends.router, true, &message), 0);
    assert_int_equal(message->n_frames, 4);
    uint64_t from = 0;
    assert_int_equal(socket_id(&message->frames[0], &from), 0);
    assert_true(from == id);
    assert_int_equal(message->frames[1].n_bytes, 0);
    assert_int_equal(message->frames[2].n_bytes, 5);
    assert_memory_equal(message->frames[2].data, "hello", 5);
    assert_int_equal(message->frames[3].n_bytes, sizeof(large));
    assert_memory_equal(message->frames[3].data, large, sizeof(large));
    assert_null(socket_message_free(message));

    const struct frame answer[] = {socket_id_frame(&from), {"world", 5}};
    assert_int_equal(socket_send(ends.router, answer, 2, false), 0);
    assert_int_equal(socket_receive(ends.dealer, true, &message), 0);
    assert_int_equal(message->n_frames, 1);
    assert_memory_equal(message->frames[0].data, "world", 5);
    socket_message_free(message);

    message = NULL;
    assert_int_equal(socket_receive(ends.dealer, false, &message), -EAGAIN);
    assert_null(message);
    close_ends(&ends);
}

static void messages_go_there_and_back(void **state)
{
    exchange(ipc(state), 0x1122334455667788);
    exchange(ipc(state), 1); /* the same path again */
    exchange(ipc(state), (uint64_t)1 << 63);
    exchange("tcp://127.0.0.1:*", 0xFF00000000000001);
}

static void an_unknown_peer_is_told_from_a_full_one(void **state)
{
    struct ends ends;
    open_ends(&ends, ipc(state), 77, 4);
    uint64_t nobody = 78, somebody = 77;
    const struct frame to_nobody[] = {socket_id_frame(&nobody), {"x", 1}};
    assert_int_equal(socket_send(ends.router, to_nobody, 2, false), -EHOSTUNREACH);
    assert_int_equal(socket_send(ends.router, to_nobody, 2, true), -EHOSTUNREACH);

    const struct frame greeting = {"hello", 5};
    struct socket_message *message = NULL;
    assert_int_equal(socket_send(ends.dealer, &greeting, 1, true), 0);
    assert_int_equal(socket_receive(ends.router, true, &message), 0);
    socket_message_free(message);

    char large[65536];
    memset(large, 0, sizeof(large));
    const struct frame to_somebody[] = {socket_id_frame(&somebody), {large, sizeof(large)}};
    int result = 0, n_sent = 0;
    while (n_sent < 10000 && (result = socket_send(ends.router, to_somebody, 2, false)) == 0)
        n_sent++;
    assert_int_equal(result, -EAGAIN);
    assert_true(n_sent >= 4);
    /* nothing of the refused message was taken: what arrives is whole */
    for (int i = 0; i < n_sent; i++) {
        assert_int_equal(socket_receive(ends.dealer, true, &message), 0);
        assert_int_equal(message->n_frames, 1);
        assert_int_equal(message->frames[0].n_bytes, sizeof(large));
        socket_message_free(message);
    }
    close_ends(&ends);
}

static void a_dealer_without_a_peer_has_no_room(void **state)
{
    struct socket_context *context = NULL;
    struct socket *dealer = NULL;
    const struct frame frame = {"x", 1};
    assert_int_equal(socket_context_new(&context), 0);
    assert_int_equal(socket_new_dealer(context, 0, 0, &dealer), -EINVAL);
    assert_int_equal(socket_new_dealer(context, 5, 0, &dealer), 0);
    assert_int_equal(socket_send(dealer, &frame, 1, false), -EAGAIN);
    assert_int_equal(socket_connect(dealer, ipc(state)), 0); /* nobody there yet: queued for later */
    assert_int_equal(socket_send(dealer, &frame, 1, false), 0);
    assert_int_equal(socket_send(dealer, &frame, 0, false), -EINVAL);
    const struct frame large = {"x", SOCKET_MAX_FRAME_BYTES + 1}; /* refused before a byte of it is looked at */
    assert_int_equal(socket_send(dealer, &large, 1, false), -EMSGSIZE);
    socket_free(dealer);
    uint64_t before = clock_now_us();
    socket_context_free(context); /* does not wait for what was not delivered */
    assert_true(clock_now_us() - before < 5000000);
    assert_null(socket_free(NULL));
    assert_null(socket_context_free(NULL));
    assert_null(socket_message_free(NULL));
}

static void too_many_frames_are_dropped_whole(void **state)
{
    struct ends ends;
    open_ends(&ends, ipc(state), 9, 0);
    struct frame frames[SOCKET_MAX_FRAMES + 1];
    for (size_t i = 0; i <= SOCKET_MAX_FRAMES; i++)
        frames[i] = (struct frame){"f", 1};
    assert_int_equal(socket_send(ends.dealer, frames, SOCKET_MAX_FRAMES + 1, true), -EINVAL);
    /* 16 frames and the id in front are one too many */
    assert_int_equal(socket_send(ends.dealer, frames, SOCKET_MAX_FRAMES, true), 0);
    assert_int_equal(socket_send(ends.dealer, frames, SOCKET_MAX_FRAMES - 1, true), 0);
    struct socket_message *message = NULL;
    assert_int_equal(socket_receive(ends.router, true, &message), -EMSGSIZE);
    assert_null(message);
    assert_int_equal(socket_receive(ends.router, true, &message), 0);
    assert_int_equal(message->n_frames, SOCKET_MAX_FRAMES);
    socket_message_free(message);
    close_ends(&ends);
}

static void a_live_endpoint_is_not_taken_over(void **state)
{
    struct ends ends;
    open_ends(&ends, ipc(state), 9, 0);
    struct stat status;
    assert_int_equal(stat(helpers_path(state, "zmq"), &status), 0);
    assert_int_equal(status.st_mode & 0777, 0600);
    struct socket *second = NULL;
    assert_int_equal(socket_new_router(ends.context, 0, &second), 0);
    assert_int_equal(socket_bind(second, ipc(state)), -EADDRINUSE);
    const struct frame frame = {"still here", 10};
    struct socket_message *message = NULL;
    assert_int_equal(socket_send(ends.dealer, &frame, 1, true), 0);
    assert_int_equal(socket_receive(ends.router, true, &message), 0);
    socket_message_free(message);

    /* a socket that its process left behind */
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", helpers_path(state, "dead"));
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    close(fd);
    char endpoint[200];
    snprintf(endpoint, sizeof(endpoint), "ipc://%s", address.sun_path);
    assert_int_equal(socket_bind(second, endpoint), 0);
    socket_free(second);
    close_ends(&ends);
}

static void bad_endpoints_are_refused(void **state)
{
    struct ends ends;
    open_ends(&ends, ipc(state), 9, 0);
    char endpoint[300] = "ipc:///";
    memset(endpoint + 7, 'x', 200);
    assert_int_equal(socket_bind(ends.router, endpoint), -ENAMETOOLONG);
    assert_int_equal(socket_connect(ends.dealer, endpoint), -ENAMETOOLONG);
    close(open(helpers_path(state, "file"), O_CREAT | O_WRONLY, 0600));
    snprintf(endpoint, sizeof(endpoint), "ipc://%s", helpers_path(state, "file"));
    assert_int_equal(socket_bind(ends.router, endpoint), -EEXIST);
    assert_int_equal(socket_bind(ends.router, "nonsense"), -EINVAL);
    assert_int_equal(socket_bind(ends.router, "tcp://127.0.0.1:notaport"), -EINVAL);
    assert_true(socket_bind(ends.router, "carrier://pigeon") < 0);
    char small[4];
    assert_int_equal(socket_endpoint(ends.router, small, sizeof(small)), -ENAMETOOLONG);
    close_ends(&ends);
}

static void ids_are_eight_bytes_and_not_zero(void **state)
{
    (void)state;
    uint64_t id = 0x0102030405060708, got = 1, zero = 0;
    struct frame frame = socket_id_frame(&id);
    assert_int_equal(socket_id(&frame, &got), 0);
    assert_true(got == id);
    const struct frame bad[] = {{"1234567", 7}, {"123456789", 9}, {"", 0}, {&zero, 8}};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(socket_id(&bad[i], &got), -EBADMSG);
    assert_true(got == id);
}

static void poll_mixes_sockets_and_descriptors(void **state)
{
    struct ends ends;
    int pipe_ends[2];
    assert_int_equal(pipe(pipe_ends), 0);
    open_ends(&ends, ipc(state), 9, 0);
    struct socket_item items[] = {
        {.socket = ends.router, .events = SOCKET_READABLE},
        {.fd = -1, .events = SOCKET_READABLE, .ready = 99}, /* skipped, and cleared */
        {.fd = pipe_ends[0], .events = SOCKET_READABLE},
        {.socket = ends.dealer, .events = SOCKET_READABLE},
    };
    uint64_t before = clock_now_us();
    assert_int_equal(socket_poll(items, 4, 50), 0);
    assert_true(clock_now_us() - before >= 40000);
    assert_int_equal(items[1].ready, 0);

    const struct frame frame = {"x", 1};
    assert_int_equal(socket_send(ends.dealer, &frame, 1, true), 0);
    assert_int_equal(socket_poll(items, 4, 10000), 1);
    assert_int_equal(items[0].ready, SOCKET_READABLE);
    assert_int_equal(items[2].ready, 0);
    int events = 0, fd = -1;
    assert_int_equal(socket_events(ends.router, &events), 0);
    assert_true(events & SOCKET_READABLE);
    assert_int_equal(socket_fd(ends.router, &fd), 0);
    assert_true(fcntl(fd, F_GETFD) >= 0);

    assert_int_equal(write(pipe_ends[1], "y", 1), 1);
    assert_int_equal(socket_poll(items, 4, 10000), 2);
    assert_int_equal(items[2].ready & SOCKET_READABLE, SOCKET_READABLE);
    char byte;
    assert_int_equal(read(pipe_ends[0], &byte, 1), 1);
    close(pipe_ends[1]);
    items[2].events = 0; /* a hang-up is told unasked */
    assert_int_equal(socket_poll(items + 2, 1, 10000), 1);
    assert_int_equal(items[2].ready, SOCKET_ERROR);
    assert_int_equal(socket_poll(NULL, 0, 0), 0);
    close(pipe_ends[0]);
    close_ends(&ends);
}

/* The rest of what comes in until the good message does: garbage may look like messages of a stranger. */
static void assert_good_message_arrives(struct ends *ends)
{
    for (int i = 0; i < 1000; i++) {
        struct socket_message *message = NULL;
        uint64_t from = 0;
        int result = socket_receive(ends->router, true, &message);
        assert_true(result == 0 || result == -EMSGSIZE);
        bool good = result == 0 && socket_id(&message->frames[0], &from) == 0 && from == 9 && message->n_frames == 2 &&
                    message->frames[1].n_bytes == 4 && memcmp(message->frames[1].data, "good", 4) == 0;
        socket_message_free(message);
        if (good)
            return;
    }
    fail_msg("the good message did not arrive");
}

static void garbage_does_not_disturb_the_others(void **state)
{
    struct ends ends;
    open_ends(&ends, ipc(state), 9, 0);
    static const struct {
        const char *bytes;
        size_t n_bytes;
    } garbage[] = {
        {"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 36},
        {"\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 11},
        {"\xFF\0\0\0\0\0\0\0\x01\x7F\x03\0NULL", 16}, /* half a greeting */
        {"\0\0\0\0\0\0\0\0", 8},
        {"\x01\0\x01\0", 4},
    };
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", helpers_path(state, "zmq"));
    for (size_t i = 0; i < sizeof(garbage) / sizeof(garbage[0]); i++) {
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
        for (int k = 0; k < 20 && send(fd, garbage[i].bytes, garbage[i].n_bytes, MSG_NOSIGNAL) >= 0; k++)
            ;
        const struct frame frame = {"good", 4};
        assert_int_equal(socket_send(ends.dealer, &frame, 1, true), 0);
        assert_good_message_arrives(&ends);
        close(fd);
    }
    close_ends(&ends);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(messages_go_there_and_back, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(an_unknown_peer_is_told_from_a_full_one, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(a_dealer_without_a_peer_has_no_room, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(too_many_frames_are_dropped_whole, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(a_live_endpoint_is_not_taken_over, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(bad_endpoints_are_refused, helpers_folder, helpers_remove_folder),
        cmocka_unit_test(ids_are_eight_bytes_and_not_zero),
        cmocka_unit_test_setup_teardown(poll_mixes_sockets_and_descriptors, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(garbage_does_not_disturb_the_others, helpers_folder, helpers_remove_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
