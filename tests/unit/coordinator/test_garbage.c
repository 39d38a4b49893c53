/* Garbage on every socket of the real coordinator, and the data plane: the service goes on. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/peer.h"
#include "common/random.h"
#include "tests/unit/coordinator/fakes.h"

#define ERROR_CODE(name) HCATTN__ERROR_CODE__##name
#define REPLY(name)      HCATTN__REPLY__REPLY_##name
#define WORK(name)       HCATTN__WORK__WORK_REQUEST__REQUEST_##name

static struct fakes fakes;
static uint32_t seed = 1;

static uint32_t next_random(void) /* the same garbage in every run */
{
    seed = seed * 1664525u + 1013904223u;
    return seed >> 8;
}

static void fill(uint8_t *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        bytes[i] = (uint8_t)next_random();
}

static int setup(void **state)
{
    (void)state;
    fakes_start(&fakes, 2, NULL);
    fakes_all_ready(&fakes);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    fakes_finish(&fakes);
    return 0;
}

static void quiet(void)
{
    for (int i = 0; i < FAKES_QUIET_ROUNDS; i++)
        fakes_pump(&fakes);
}

/* One generation from end to end. */
static void expect_service(void)
{
    static uint64_t session = 100;
    fake_client_open_session(&fakes, ++session, false);
    uint64_t id = fake_client_generate(&fakes, session, "abc", 5);
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    fake_worker_finished(&fakes.workers[0], run->work, 0, 3);
    fake_client_drop(&fakes, id, REPLY(GENERATE_DONE));
    hcattn__work__work_request__free_unpacked(run, NULL);
    fake_client_drop(&fakes, fake_client_close_session(&fakes, session), REPLY(SESSION_CLOSED));
}

static void send_raw(struct socket *socket, const void *bytes, size_t n, size_t n_frames)
{
    struct frame frames[4];
    for (size_t i = 0; i < n_frames; i++)
        frames[i] = (struct frame){bytes, n};
    assert_int_equal(socket_send(socket, frames, n_frames, true), 0);
}

static void garbage_from_clients(void **state)
{
    (void)state;
    uint8_t bytes[600];
    for (int i = 0; i < 500; i++) {
        size_t n = next_random() % sizeof(bytes);
        fill(bytes, n);
        send_raw(fakes.client.socket, bytes, n, 1 + (size_t)(i % 7 == 0));
        if (i % 50 == 0)
            fakes_pump(&fakes);
    }
    /* every prefix of a request, and every byte of it changed */
    Hcattn__Input input = HCATTN__INPUT__INIT;
    Hcattn__Generate generate = HCATTN__GENERATE__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    static char text[] = "abc";
    input.input_case = HCATTN__INPUT__INPUT_TEXT;
    input.text = text;
    generate.session = 4711;
    generate.input = &input;
    request.request_id = 9;
    request.request_case = HCATTN__REQUEST__REQUEST_GENERATE;
    request.generate = &generate;
    size_t n = hcattn__request__pack(&request, bytes);
    for (size_t i = 0; i < n; i++) {
        send_raw(fakes.client.socket, bytes, i, 1);
        uint8_t kept = bytes[i];
        bytes[i] ^= (uint8_t)(1u << next_random() % 8);
        send_raw(fakes.client.socket, bytes, n, 1);
        bytes[i] = kept;
    }
    quiet();
    fake_client_close(&fakes.client);
    fake_client_open(&fakes);
    expect_service();
}

static void a_malformed_request_with_an_id_is_answered(void **state)
{
    (void)state;
    uint8_t bytes[] = {0x09, 42, 0, 0, 0, 0, 0, 0, 0, 0x2a, 0x7f, 1, 2, 3}; /* a Generate that ends too early */
    send_raw(fakes.client.socket, bytes, sizeof(bytes), 1);
    fake_client_expect_error(&fakes, 42, ERROR_CODE(INVALID_ARGUMENT));
    uint8_t empty[] = {0x09, 43, 0, 0, 0, 0, 0, 0, 0};
    send_raw(fakes.client.socket, empty, sizeof(empty), 1);
    fake_client_expect_error(&fakes, 43, ERROR_CODE(INVALID_ARGUMENT));
}

static void a_text_with_a_nul_is_refused(void **state)
{
    (void)state;
    uint8_t bytes[64];
    Hcattn__Input input = HCATTN__INPUT__INIT;
    Hcattn__Append append = HCATTN__APPEND__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    static char text[] = "abc";
    input.input_case = HCATTN__INPUT__INPUT_TEXT;
    input.text = text;
    append.session = fake_client_open_session(&fakes, 1, false);
    append.input = &input;
    request.request_id = 44;
    request.request_case = HCATTN__REQUEST__REQUEST_APPEND;
    request.append = &append;
    size_t n = hcattn__request__pack(&request, bytes);
    uint8_t *b = memmem(bytes, n, "abc", 3);
    assert_non_null(b);
    b[1] = 0; /* half of the text would be used in silence */
    send_raw(fakes.client.socket, bytes, n, 1);
    fake_client_expect_error(&fakes, 44, ERROR_CODE(INVALID_ARGUMENT));
    expect_service();
}

static void garbage_on_the_work_socket(void **state)
{
    (void)state;
    char endpoint[128];
    uint8_t bytes[300];
    struct socket *stranger;
    snprintf(endpoint, sizeof(endpoint), "ipc://%s/work.sock", fakes.dir);
    assert_int_equal(socket_new_dealer(fakes.context, random_u64(), 0, &stranger), 0);
    assert_int_equal(socket_connect(stranger, endpoint), 0);
    for (int i = 0; i < 200; i++) {
        size_t n = next_random() % sizeof(bytes);
        fill(bytes, n);
        send_raw(stranger, bytes, n, 1 + (size_t)(i % 3));
        send_raw(fakes.workers[0].work, bytes, n, 1 + (size_t)(i % 3 == 0));
    }
    quiet();
    socket_free(stranger);
    expect_service();
    /* replies that do not belong to the state of their request */
    fake_client_open_session(&fakes, 1, false);
    uint64_t id = fake_client_append(&fakes, 1, "abc");
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    fake_worker_generated(&fakes.workers[0], run->work, 0, 3); /* to an Append */
    fake_worker_scored(&fakes.workers[0], run->work, 0, 3);
    fake_worker_finished(&fakes.workers[0], run->work + 1000, 0, 3); /* of no work */
    fake_worker_finished(&fakes.workers[0], run->work, 0, 3);
    fake_worker_finished(&fakes.workers[0], run->work, 0, 3); /* twice */
    fake_client_drop(&fakes, id, REPLY(APPENDED));
    quiet();
    assert_false(fake_client_has(&fakes.client, id));
    hcattn__work__work_request__free_unpacked(run, NULL);
    expect_service();
}

static void garbage_on_the_peer_socket(void **state)
{
    (void)state;
    uint8_t bytes[2000];
    for (int i = 0; i < 60; i++) {
        int fd = fakes_connect(&fakes);
        size_t n = 1 + next_random() % (sizeof(bytes) - 1);
        fill(bytes, n);
        int with[3] = {STDERR_FILENO, STDERR_FILENO, STDERR_FILENO};
        (void)peer_send(fd, bytes, n, with, (size_t)(i % 4));
        (void)peer_send(fd, bytes, n, NULL, 0);
        close(fd);
        if (i % 10 == 0)
            fakes_pump(&fakes);
    }
    /* registered peers, too, and messages of the wrong role */
    for (int i = 0; i < 60; i++) {
        size_t n = 1 + next_random() % (sizeof(bytes) - 1);
        int with = STDERR_FILENO;
        fill(bytes, n);
        assert_int_equal(peer_send(fakes.stores[0].fd, bytes, n, &with, (size_t)(i % 2)), 0);
        assert_int_equal(peer_send(fakes.workers[0].fd, bytes, n, &with, (size_t)(i % 2)), 0);
    }
    Hcattn__Control__Done done = HCATTN__CONTROL__DONE__INIT;
    Hcattn__Control__SegmentReady ready = HCATTN__CONTROL__SEGMENT_READY__INIT;
    Hcattn__Control__Control control = HCATTN__CONTROL__CONTROL__INIT;
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_DONE;
    control.done = &done;
    done.sequence = 1;
    fakes_say(fakes.workers[0].fd, &control, -1);
    fakes_say(fakes.stores[0].fd, &control, -1);
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_SEGMENT_READY;
    control.segment_ready = &ready;
    fakes_say(fakes.stores[0].fd, &control, fakes.stores[0].segment.fd); /* nobody asked */
    fakes_say(fakes.workers[0].fd, &control, STDERR_FILENO);
    quiet();
    expect_service();
}

static void hellos_that_make_no_sense_are_refused(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++) {
        static char version[] = HCATTN_VERSION, other[] = "99.9";
        Hcattn__Control__Hello hello = HCATTN__CONTROL__HELLO__INIT;
        Hcattn__Control__Control control = HCATTN__CONTROL__CONTROL__INIT;
        hello.layout = LAYOUT_VERSION + (i == 0);
        hello.version = i == 1 ? other : version;
        hello.role = i == 2 ? HCATTN__CONTROL__ROLE__COORDINATOR : HCATTN__CONTROL__ROLE__GPU_WORKER;
        hello.incarnation = 5;
        hello.data_route = i == 3 ? 0 : 8;
        hello.work_route = 9;
        hello.n_ctx = 100;
        Hcattn__Control__RowShape shape = HCATTN__CONTROL__ROW_SHAPE__INIT;
        hello.shape = i == 4 ? NULL : &shape; /* 5: a shape of zeroes */
        control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_HELLO;
        control.hello = &hello;
        int fd = fakes_connect(&fakes), attached;
        fakes_say(fd, &control, -1);
        Hcattn__Control__Control *answer = NULL;
        FAKES_WAIT(&fakes, (answer = fakes_hear(fd, &attached)) || attached == -2);
        assert_non_null(answer);
        assert_int_equal(answer->message_case, HCATTN__CONTROL__CONTROL__MESSAGE_REFUSED);
        assert_true(strlen(answer->refused->sentence) > 10);
        hcattn__control__control__free_unpacked(answer, NULL);
        FAKES_WAIT(&fakes, !fakes_hear(fd, &attached) && attached == -2); /* and it hangs up */
        close(fd);
    }
    /* a store that brings what is no segment */
    struct fakes *all = &fakes;
    fake_store_hang_up(&all->stores[1]);
    struct hand_segment kept = all->stores[1].segment;
    all->stores[1].segment = (struct hand_segment){.fd = STDERR_FILENO};
    fake_store_register(all, 1, true);
    FAKES_WAIT(all, all->stores[1].refused[0]);
    assert_non_null(strstr(all->stores[1].refused, "segment"));
    all->stores[1].segment = kept;
}

static struct descriptor request_to(uint64_t store_route)
{
    return (struct descriptor){.magic = DESCRIPTOR_MAGIC,
                               .version = DESCRIPTOR_VERSION,
                               .kind = DESCRIPTOR_REQUEST,
                               .to = store_route,
                               .from = fakes.workers[0].data_route,
                               .request = 7,
                               .worker = fakes.workers[0].incarnation,
                               .slot = 1,
                               .n_bytes = 128,
                               .remaining_us = 1000000};
}

static void descriptors_travel_both_ways(void **state)
{
    (void)state;
    struct fake_worker *worker = &fakes.workers[0];
    struct descriptor request = request_to(fakes.stores[1].route);
    send_raw(worker->data, &request, sizeof(request), 1);
    FAKES_WAIT(&fakes, fakes.stores[1].n_descriptors == 1);
    assert_memory_equal(&fakes.stores[1].last, &request, sizeof(request));
    struct descriptor reply = request;
    reply.kind = DESCRIPTOR_REPLY;
    reply.to = request.from;
    reply.from = request.to;
    send_raw(fakes.stores[1].data, &reply, sizeof(reply), 1);
    FAKES_WAIT(&fakes, worker->n_descriptors == 1);
    assert_memory_equal(&worker->last, &reply, sizeof(reply));
    /* to nobody: back to the sender */
    request.to = 4711;
    send_raw(worker->data, &request, sizeof(request), 1);
    FAKES_WAIT(&fakes, worker->n_descriptors == 2);
    assert_int_equal(worker->last.kind, DESCRIPTOR_REPLY);
    assert_int_equal(worker->last.status, -EHOSTUNREACH);
    assert_int_equal(worker->last.slot, 1);
    /* to a store that is registered and whose data socket is away for a moment: it arrives when it is back */
    char endpoint[128];
    snprintf(endpoint, sizeof(endpoint), "ipc://%s/data.sock", fakes.dir);
    fakes.stores[0].data = socket_free(fakes.stores[0].data);
    quiet();
    request = request_to(fakes.stores[0].route);
    send_raw(worker->data, &request, sizeof(request), 1);
    fakes_pump(&fakes);
    assert_int_equal(socket_new_dealer(fakes.context, fakes.stores[0].route, 0, &fakes.stores[0].data), 0);
    assert_int_equal(socket_connect(fakes.stores[0].data, endpoint), 0);
    FAKES_WAIT(&fakes, fakes.stores[0].n_descriptors == 1);
    /* and when it does not come back in time, the sender knows */
    fakes.stores[0].data = socket_free(fakes.stores[0].data);
    quiet();
    request.remaining_us = 100000;
    send_raw(worker->data, &request, sizeof(request), 1);
    FAKES_WAIT(&fakes, worker->n_descriptors == 3);
    assert_int_equal(worker->last.status, -EHOSTUNREACH);
}

static void garbage_on_the_data_socket(void **state)
{
    (void)state;
    uint8_t bytes[200];
    char endpoint[128];
    struct socket *stranger;
    snprintf(endpoint, sizeof(endpoint), "ipc://%s/data.sock", fakes.dir);
    assert_int_equal(socket_new_dealer(fakes.context, random_u64(), 0, &stranger), 0);
    assert_int_equal(socket_connect(stranger, endpoint), 0);
    struct descriptor request = request_to(fakes.stores[0].route);
    for (int i = 0; i < 200; i++) {
        size_t n = next_random() % sizeof(bytes);
        fill(bytes, n);
        send_raw(fakes.workers[0].data, bytes, n, 1 + (size_t)(i % 3 == 0));
        send_raw(fakes.stores[0].data, bytes, n, 1);
        send_raw(stranger, &request, sizeof(request), 1); /* in somebody else's name */
    }
    quiet();
    assert_int_equal(fakes.stores[0].n_descriptors, 0);
    assert_int_equal(fakes.workers[0].n_descriptors, 0);
    send_raw(fakes.workers[0].data, &request, sizeof(request), 1);
    FAKES_WAIT(&fakes, fakes.stores[0].n_descriptors == 1);
    socket_free(stranger);
    expect_service();
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(garbage_from_clients),         TEST(a_malformed_request_with_an_id_is_answered),
        TEST(a_text_with_a_nul_is_refused), TEST(garbage_on_the_work_socket),
        TEST(garbage_on_the_peer_socket),   TEST(hellos_that_make_no_sense_are_refused),
        TEST(descriptors_travel_both_ways), TEST(garbage_on_the_data_socket),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
