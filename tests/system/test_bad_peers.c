/*
 * test_bad_peers.c - garbage and lies on peer.sock, where processes register: nothing of it makes a process of the service
 * suffer, be taken for another, or be kept from coming back.
 */
#include "tests/system/service.h"
#include "tests/system/volley.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/segment.h"
#include "proto/layout.h"

#ifdef HCATTN_SANITIZED
enum { N_FUZZ = 500 };
#else
enum { N_FUZZ = 2000 };
#endif
enum { N_STORES = VOLLEY_STORES };

static struct service service;
static struct volley volley;

static int set_up(void **state)
{
    (void)state;
    volley_start(&volley, &service);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    volley_stop(&volley);
    return 0;
}

static int connect_peer(void)
{
    return volley_connect(&volley, "peer.sock", SOCK_SEQPACKET);
}

/* One that would be let in: the supervisor of a value-store that there is not. */
static Hcattn__Control__Hello sound_hello(void)
{
    static uint64_t incarnation = 0xabcdef0000000000;
    Hcattn__Control__Hello hello = HCATTN__CONTROL__HELLO__INIT;
    hello.layout = LAYOUT_VERSION;
    hello.version = (char *)HCATTN_VERSION;
    hello.role = HCATTN__CONTROL__ROLE__SUPERVISOR;
    hello.supervises = HCATTN__CONTROL__ROLE__VALUE_STORE;
    hello.index = 900;
    hello.incarnation = ++incarnation;
    hello.pid = (uint32_t)getpid();
    hello.data_route = incarnation;
    hello.work_route = incarnation;
    hello.n_ctx = 512;
    hello.model_name = (char *)"tiny";
    return hello;
}

static void say_hello(int fd, Hcattn__Control__Hello *hello, int sent_fd)
{
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
    message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_HELLO;
    message.hello = hello;
    volley_say(fd, &message, sent_fd);
}

/* It is told why in a sentence with that part, and hung up. */
static void refused(Hcattn__Control__Hello *hello, int sent_fd, const char *part)
{
    int fd = connect_peer();
    say_hello(fd, hello, sent_fd);
    Hcattn__Control__Control *reply = volley_hear(fd);
    assert_non_null(reply);
    if (reply->message_case != HCATTN__CONTROL__CONTROL__MESSAGE_REFUSED)
        fail_msg("a message of kind %d instead of Refused (%s)", (int)reply->message_case, part);
    if (strstr(reply->refused->sentence, part) == NULL)
        fail_msg("no '%s' in: %s", part, reply->refused->sentence);
    hcattn__control__control__free_unpacked(reply, NULL);
    volley_assert_hung_up(fd);
}

/* A supervisor that is let in; the caller closes the connection. */
static int join(void)
{
    Hcattn__Control__Hello hello = sound_hello();
    int fd = connect_peer();
    say_hello(fd, &hello, -1);
    Hcattn__Control__Control *reply = volley_hear(fd);
    assert_non_null(reply);
    assert_int_equal(reply->message_case, HCATTN__CONTROL__CONTROL__MESSAGE_WELCOME);
    hcattn__control__control__free_unpacked(reply, NULL);
    return fd;
}

static void garbage_packets(void **state)
{
    (void)state;
    static uint8_t bytes[210000];
    uint64_t seed = 5;
    volley_random_bytes(&seed, bytes, sizeof(bytes));
    for (int i = 0; i < 100; i++) {
        int fd = connect_peer();
        size_t n = i < 8 ? (size_t)i : 1 + volley_random(&seed, 5000);
        volley_send(fd, bytes + volley_random(&seed, 1000), n); /* also an empty one, which looks like a hang-up */
        close(fd);
    }
    int fd = connect_peer();
    volley_send(fd, bytes, sizeof(bytes)); /* larger than any message of ours */
    volley_send(fd, bytes, 100);
    volley_assert_hung_up(fd);
    volley_assert_well(&volley);
}

static void lying_hellos(void **state)
{
    (void)state;
    Hcattn__Control__Hello hello = sound_hello();
    hello.layout = LAYOUT_VERSION + 1;
    refused(&hello, -1, "layout");
    hello = sound_hello();
    hello.version = (char *)"99.9.9\n\x1b[2J";
    refused(&hello, -1, "version");
    hello = sound_hello();
    hello.role = (Hcattn__Control__Role)99;
    refused(&hello, -1, "role");
    hello.role = HCATTN__CONTROL__ROLE__COORDINATOR;
    refused(&hello, -1, "role");
    hello.role = HCATTN__CONTROL__ROLE__SUPERVISOR;
    hello.supervises = HCATTN__CONTROL__ROLE__SUPERVISOR;
    refused(&hello, -1, "role");
    hello = sound_hello();
    hello.index = UINT32_MAX;
    refused(&hello, -1, "index");
    hello = sound_hello();
    hello.incarnation = 0;
    refused(&hello, -1, "incarnation");
    hello = sound_hello(); /* the place of a supervisor that lives */
    hello.index = 0;
    refused(&hello, -1, "alive already");
    volley_assert_well(&volley);
}

static void another_store(void **state)
{
    (void)state;
    Hcattn__Control__Hello hello = sound_hello();
    hello.role = HCATTN__CONTROL__ROLE__VALUE_STORE;
    hello.index = 64; /* any below may join */
    refused(&hello, -1, "their numbers are 0 to 63");
    for (uint32_t i = 0; i < N_STORES; i++) {
        hello.index = i;
        hello.holds_segment = false;
        refused(&hello, -1, "alive already");
        hello.holds_segment = true;
        refused(&hello, -1, "alive already");
        int fd = -1;
        assert_int_equal(segment_create("fake", 4 << 20, &fd), 0);
        refused(&hello, fd, "alive already");
        close(fd);
        uint64_t own = hello.incarnation; /* everybody can read the true one in the status */
        hello.incarnation = volley_process(&volley, "hc-value-store", i)->incarnation;
        refused(&hello, -1, "its incarnation is that of pid");
        hello.incarnation = own;
    }
    hello.data_route = 0;
    refused(&hello, -1, "routes");
    volley_assert_well(&volley);
}

static void another_worker(void **state)
{
    (void)state;
    Hcattn__Control__RowShape shape = HCATTN__CONTROL__ROW_SHAPE__INIT;
    shape.n_layers = 2;
    shape.n_kv_heads = 2;
    shape.head_dim = 16;
    shape.codec = ROW_CODEC_F16;
    Hcattn__Control__Hello hello = sound_hello();
    hello.role = HCATTN__CONTROL__ROLE__GPU_WORKER;
    refused(&hello, -1, "row shape");
    hello.shape = &shape;
    refused(&hello, -1, "one model at a time");
    hello.index = 0;
    refused(&hello, -1, "alive already");
    hello.incarnation = volley_process(&volley, "hc-gpu-worker", 0)->incarnation;
    refused(&hello, -1, "its incarnation is that of pid");
    hello.n_ctx = 0;
    refused(&hello, -1, "row shape");
    hello.n_ctx = 512;
    const uint32_t wrong[] = {0, 1u << 20, UINT32_MAX};
    for (size_t i = 0; i < 3; i++) {
        uint32_t *const fields[] = {&shape.n_layers, &shape.n_kv_heads, &shape.head_dim, &shape.codec};
        for (size_t j = 0; j < 4; j++) {
            uint32_t right = *fields[j];
            *fields[j] = wrong[i];
            refused(&hello, -1, "row shape");
            *fields[j] = right;
        }
    }
    volley_assert_well(&volley);
}

/* Every kind of message, with absurd content and a descriptor, from one who may say none of them. */
static void say_everything(int fd, int sent_fd)
{
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
#define SAY(KIND, field, TYPE, INIT, ...)                                                                              \
    {                                                                                                                  \
        TYPE body = INIT;                                                                                              \
        __VA_ARGS__;                                                                                                   \
        message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_##KIND;                                               \
        message.field = &body;                                                                                         \
        volley_say(fd, &message, sent_fd);                                                                             \
    }
    uint64_t worker = volley_process(&volley, "hc-gpu-worker", 0)->incarnation;
    uint64_t store = volley_process(&volley, "hc-value-store", 0)->incarnation;
    static char text[60001];
    memset(text, '%', sizeof(text) - 1);
    SAY(WELCOME, welcome, Hcattn__Control__Welcome, HCATTN__CONTROL__WELCOME__INIT, body.data_socket = text)
    SAY(REFUSED, refused, Hcattn__Control__Refused, HCATTN__CONTROL__REFUSED__INIT, body.sentence = text)
    SAY(FORMAT, format, Hcattn__Control__Format, HCATTN__CONTROL__FORMAT__INIT, )
    SAY(ADOPT, adopt, Hcattn__Control__Adopt, HCATTN__CONTROL__ADOPT__INIT, body.previous = store)
    SAY(SEGMENT_READY, segment_ready, Hcattn__Control__SegmentReady, HCATTN__CONTROL__SEGMENT_READY__INIT,
        body.n_blocks = UINT32_MAX)
    SAY(STORE_UP, store_up, Hcattn__Control__StoreUp, HCATTN__CONTROL__STORE_UP__INIT, body.incarnation = store)
    SAY(STORE_DOWN, store_down, Hcattn__Control__StoreDown, HCATTN__CONTROL__STORE_DOWN__INIT, body.incarnation = store)
    SAY(EXCHANGE, exchange, Hcattn__Control__Exchange, HCATTN__CONTROL__EXCHANGE__INIT,
        body.worker_incarnation = worker, body.store_incarnation = store)
    SAY(EXCHANGE_READY, exchange_ready, Hcattn__Control__ExchangeReady, HCATTN__CONTROL__EXCHANGE_READY__INIT,
        body.worker_incarnation = worker, body.store_incarnation = store, body.status = -5)
    SAY(WORKER_GONE, worker_gone, Hcattn__Control__WorkerGone, HCATTN__CONTROL__WORKER_GONE__INIT,
        body.worker_incarnation = worker)
    SAY(SESSION_OPEN, session_open, Hcattn__Control__SessionOpen, HCATTN__CONTROL__SESSION_OPEN__INIT, body.session = 1)
    SAY(RESERVE, reserve, Hcattn__Control__Reserve, HCATTN__CONTROL__RESERVE__INIT, body.session = 1)
    SAY(RELEASE, release, Hcattn__Control__Release, HCATTN__CONTROL__RELEASE__INIT, body.session = 1)
    for (uint64_t sequence = 0; sequence < 20; sequence++)
        SAY(DONE, done, Hcattn__Control__Done, HCATTN__CONTROL__DONE__INIT, body.sequence = sequence, body.status = -5)
    SAY(HEARTBEAT, heartbeat, Hcattn__Control__Heartbeat, HCATTN__CONTROL__HEARTBEAT__INIT, body.busy = true,
        body.phase = text, body.progress = UINT64_MAX)
    SAY(CHILD_STARTED, child_started, Hcattn__Control__ChildStarted, HCATTN__CONTROL__CHILD_STARTED__INIT,
        body.incarnation = worker, body.n_starts = UINT32_MAX)
    SAY(CHILD_DEAD, child_dead, Hcattn__Control__ChildDead, HCATTN__CONTROL__CHILD_DEAD__INIT,
        body.incarnation = worker)
    SAY(CHILD_DEAD, child_dead, Hcattn__Control__ChildDead, HCATTN__CONTROL__CHILD_DEAD__INIT, body.incarnation = store)
    SAY(FENCE, fence, Hcattn__Control__Fence, HCATTN__CONTROL__FENCE__INIT, body.incarnation = worker)
    Hcattn__Control__Control empty = HCATTN__CONTROL__CONTROL__INIT;
    volley_send(fd, "", 1);
    volley_say(fd, &empty, -1);
    Hcattn__Control__Hello hello = sound_hello();
    say_hello(fd, &hello, sent_fd); /* once is enough */
}

static void messages_of_others(void **state)
{
    (void)state;
    int segment = -1, null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    assert_int_equal(segment_create("fake", 4 << 20, &segment), 0);
    int fds[] = {join(), -1};
    Hcattn__Control__Hello hello = sound_hello();
    hello.index = 901;
    hello.supervises = HCATTN__CONTROL__ROLE__GPU_WORKER;
    fds[1] = connect_peer();
    say_hello(fds[1], &hello, segment);
    for (int i = 0; i < 2; i++) {
        say_everything(fds[i], -1);
        say_everything(fds[i], null_fd);
        say_everything(fds[i], segment);
    }
    volley_assert_well(&volley); /* the empty message at the end of each is a hang-up: nothing is held of them */
    close(fds[0]);
    close(fds[1]);
    /* before Hello none of it is listened to */
    for (int i = 0; i < 3; i++) {
        int fd = connect_peer();
        say_everything(fd, i == 0 ? -1 : i == 1 ? null_fd : segment);
        close(fd);
    }
    close(segment);
    close(null_fd);
    volley_assert_well(&volley);
}

static void many_descriptors(void **state)
{
    (void)state;
    static const uint32_t numbers[] = {1, 2, 31, 32, 33, 64, 253};
    int null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    int joined = join();
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
        for (int j = 0; j < 20; j++) {
            int fd = connect_peer();
            volley_send_fds(fd, "garbage", 7, null_fd, numbers[i]);
            volley_send_fds(joined, "garbage", 7, null_fd, numbers[i]);
            close(fd);
        }
    close(joined);
    close(null_fd);
    volley_assert_well(&volley);
}

static void damaged_hellos(void **state)
{
    (void)state;
    uint8_t whole[512], bytes[512];
    uint64_t seed = 6;
    for (int i = 0; i < N_FUZZ; i++) {
        Hcattn__Control__RowShape shape = HCATTN__CONTROL__ROW_SHAPE__INIT;
        Hcattn__Control__Hello hello = sound_hello();
        shape.n_layers = shape.n_kv_heads = 2;
        hello.shape = &shape;
        hello.role = i % 2 ? HCATTN__CONTROL__ROLE__SUPERVISOR : HCATTN__CONTROL__ROLE__VALUE_STORE;
        Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
        message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_HELLO;
        message.hello = &hello;
        size_t n = hcattn__control__control__pack(&message, whole);
        memcpy(bytes, whole, n);
        for (uint32_t j = 1 + volley_random(&seed, 4); j > 0; j--)
            bytes[volley_random(&seed, (uint32_t)n)] = (uint8_t)volley_random(&seed, 256);
        int fd = connect_peer();
        volley_send(fd, bytes, i < 200 ? (size_t)i % n : n);
        close(fd);
    }
    volley_assert_well(&volley);
}

/* More supervisors than the coordinator has places for, one after the other: those that left keep no place. */
static void comers_and_goers(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 700; i++) {
        Hcattn__Control__Hello hello = sound_hello();
        hello.index = 100 + i;
        int fd = connect_peer();
        say_hello(fd, &hello, -1);
        Hcattn__Control__Control *reply = volley_hear(fd);
        assert_non_null(reply);
        assert_int_equal(reply->message_case, HCATTN__CONTROL__CONTROL__MESSAGE_WELCOME);
        hcattn__control__control__free_unpacked(reply, NULL);
        close(fd);
    }
    volley_assert_well(&volley);
}

/* More connections than the coordinator has descriptors for: it waits, and serves again when there are some. */
static void out_of_descriptors(void **state)
{
    (void)state;
    enum { N = 200, LIMIT = 100, LOOK_US = 2000000 };
    struct rlimit limit = {.rlim_cur = LIMIT, .rlim_max = LIMIT};
    struct service poor;
    struct volley poor_volley;
    int fds[N];
    service_start(&poor, (const char *const[]){"--model", service_tiny_model(""), "--memory", "64MiB", NULL}, NULL);
    volley_begin(&poor_volley, &poor, 1);
    pid_t coordinator = volley_process(&poor_volley, "hc-coordinator", 0)->pid;
    assert_true(volley_process(&poor_volley, "hc-coordinator", 0)->n_fds < LIMIT / 2);
    assert_int_equal(prlimit(coordinator, RLIMIT_NOFILE, &limit, NULL), 0);
    for (int i = 0; i < N; i++) {
        fds[i] = volley_connect_soon(&poor_volley, i % 2 ? "client.sock" : "peer.sock",
                                     i % 2 ? SOCK_STREAM : SOCK_SEQPACKET);
    }
    uint64_t before_us = volley_cpu_us(coordinator);
    clock_sleep_us(LOOK_US);
    uint64_t used_us = volley_cpu_us(coordinator) - before_us;
    struct answer answer = {0};
    uint32_t ids[] = {1, 2, 3};
    service_generate_ids(poor.client, ids, 3, 4, &answer); /* who was there before is served */
    service_answer_free(&answer);
    for (int i = 0; i < N; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    volley_assert_well(&poor_volley);
    if (used_us > LOOK_US / 2)
        fail_msg("the coordinator was busy for %llu us of %d with having no descriptors", (unsigned long long)used_us,
                 LOOK_US);
    volley_end(&poor_volley);
    service_stop(&poor);
}

/* Connections that say nothing are closed after a while. Then as before a process that dies comes back. */
static void silent_peers(void **state)
{
    (void)state;
    enum { N = 300, PATIENCE_S = 40 };
    struct pollfd items[N];
    for (int i = 0; i < N; i++) {
        int fd = connect_peer(); /* waits when the queue is full */
        items[i] = (struct pollfd){.fd = fd, .events = POLLIN};
        if (i == 60) { /* meanwhile others are served */
            struct answer answer = {0};
            uint32_t ids[] = {1, 2, 3};
            service_generate_ids(service.client, ids, 3, 4, &answer);
            service_answer_free(&answer);
        }
    }
    uint64_t deadline = clock_deadline_us(UINT64_C(1000000) * PATIENCE_S);
    for (int i = 0; i < N; i++) {
        assert_int_equal(poll(&items[i], 1, clock_remaining_ms(deadline)), 1);
        close(items[i].fd);
    }
    volley_assert_well(&volley);
    static const char *const programs[] = {"hc-gpu-worker", "hc-value-store", "hc-coordinator"};
    for (size_t i = 0; i < 3; i++) {
        pid_t pid = volley_process(&volley, programs[i], 0)->pid;
        assert_int_equal(kill(pid, SIGKILL), 0);
        volley_assert_recovered(&volley, pid);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(garbage_packets), cmocka_unit_test(lying_hellos),       cmocka_unit_test(another_store),
        cmocka_unit_test(another_worker),  cmocka_unit_test(messages_of_others), cmocka_unit_test(many_descriptors),
        cmocka_unit_test(damaged_hellos),  cmocka_unit_test(comers_and_goers),   cmocka_unit_test(out_of_descriptors),
        cmocka_unit_test(silent_peers),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
