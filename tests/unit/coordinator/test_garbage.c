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
    fakes_quiet(&fakes);
    fake_client_close(&fakes.client);
    fake_client_open(&fakes);
    expect_service();
}

/* Every prefix, and a bit of every byte changed, of a packed request. */
static void send_variants(Hcattn__Request *request)
{
    uint8_t bytes[300];
    assert_true(hcattn__request__get_packed_size(request) <= sizeof(bytes));
    size_t n = hcattn__request__pack(request, bytes);
    for (size_t i = 0; i < n; i++) {
        send_raw(fakes.client.socket, bytes, i, 1);
        uint8_t kept = bytes[i];
        bytes[i] ^= (uint8_t)(1u << next_random() % 8);
        send_raw(fakes.client.socket, bytes, n, 1);
        bytes[i] = kept;
    }
    hcattn__reply__free_unpacked(fake_client_health(&fakes), NULL); /* all of it has been read */
    fake_client_close(&fakes.client);
    fake_client_open(&fakes);
}

static void variants_of_every_request(void **state)
{
    (void)state;
    static char policy[] = "rot4,mass=0.9,weights", transport[] = "routed";
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    Hcattn__OpenSession open = HCATTN__OPEN_SESSION__INIT;
    Hcattn__ExactTokens exact = HCATTN__EXACT_TOKENS__INIT;
    Hcattn__Fork fork_message = HCATTN__FORK__INIT;
    Hcattn__SetPolicy set_policy = HCATTN__SET_POLICY__INIT;
    Hcattn__ListSessions list = HCATTN__LIST_SESSIONS__INIT;
    Hcattn__DescribeSession describe = HCATTN__DESCRIBE_SESSION__INIT;
    Hcattn__SetTransport set_transport = HCATTN__SET_TRANSPORT__INIT;
    Hcattn__Drain drain = HCATTN__DRAIN__INIT;
    Hcattn__NamedText text = HCATTN__NAMED_TEXT__INIT, *texts = &text;
    Hcattn__Evaluate evaluate = HCATTN__EVALUATE__INIT;
    Hcattn__TrainCodebook train = HCATTN__TRAIN_CODEBOOK__INIT;
    Hcattn__RunJob job = HCATTN__RUN_JOB__INIT;
    char *presets = policy;
    fake_client_open_session(&fakes, 4711, false);
    request.request_id = 9;
    exact.n_tokens = 300;
    open.session = 0x0102030405060708;
    open.policy = policy;
    open.exact = &exact;
    request.request_case = HCATTN__REQUEST__REQUEST_OPEN_SESSION;
    request.open_session = &open;
    send_variants(&request);
    fork_message.session = 4711;
    fork_message.new_session = 0x0102030405060709;
    fork_message.n_tokens = 64;
    fork_message.idle_timeout_s = 1;
    fork_message.policy = policy;
    request.request_case = HCATTN__REQUEST__REQUEST_FORK;
    request.fork = &fork_message;
    send_variants(&request);
    set_policy.session = 4711;
    set_policy.policy = policy;
    request.request_case = HCATTN__REQUEST__REQUEST_SET_POLICY;
    request.set_policy = &set_policy;
    send_variants(&request);
    request.request_case = HCATTN__REQUEST__REQUEST_LIST_SESSIONS;
    request.list_sessions = &list;
    send_variants(&request);
    describe.session = 4711;
    request.request_case = HCATTN__REQUEST__REQUEST_DESCRIBE_SESSION;
    request.describe_session = &describe;
    send_variants(&request);
    set_transport.transport = transport;
    request.request_case = HCATTN__REQUEST__REQUEST_SET_TRANSPORT;
    request.set_transport = &set_transport;
    send_variants(&request);
    drain.resume = true;
    request.request_case = HCATTN__REQUEST__REQUEST_DRAIN;
    request.drain = &drain;
    send_variants(&request);
    text.name = transport;
    text.text = policy;
    evaluate.n_texts = evaluate.n_presets = 1;
    evaluate.texts = &texts;
    evaluate.presets = &presets;
    evaluate.context = 128;
    evaluate.tail = 64;
    job.job_case = HCATTN__RUN_JOB__JOB_EVALUATE;
    job.evaluate = &evaluate;
    request.request_case = HCATTN__REQUEST__REQUEST_RUN_JOB;
    request.run_job = &job;
    send_variants(&request);
    train.n_dims = 2;
    train.n_centroids = 256;
    train.n_texts = 1;
    train.texts = &texts;
    job.job_case = HCATTN__RUN_JOB__JOB_TRAIN_CODEBOOK;
    job.train_codebook = &train;
    send_variants(&request);
    hcattn__reply__free_unpacked(fake_client_take(&fakes, fake_client_drain(&fakes, true), REPLY(DRAINED)), NULL);
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
    fakes_quiet(&fakes);
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
    fakes_quiet(&fakes);
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
    fakes_quiet(&fakes);
    expect_service();
}

/* Answers to nothing, and messages that only the coordinator sends. */
static void say_all(struct fakes *all, int fd)
{
    Hcattn__Control__Control control = HCATTN__CONTROL__CONTROL__INIT;
    Hcattn__Control__Done done = HCATTN__CONTROL__DONE__INIT;
    Hcattn__Control__RingGrant grant = HCATTN__CONTROL__RING_GRANT__INIT;
    Hcattn__Control__RingRevoke revoke = HCATTN__CONTROL__RING_REVOKE__INIT;
    Hcattn__Control__RingUse use = HCATTN__CONTROL__RING_USE__INIT;
    Hcattn__Control__Copy copy = HCATTN__CONTROL__COPY__INIT;
    Hcattn__Control__Heartbeat heartbeat = HCATTN__CONTROL__HEARTBEAT__INIT;
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_DONE;
    control.done = &done;
    for (uint64_t sequence = 0; sequence < 40;
         sequence++) { /* also those of steps and orders that are done, or another's */
        done.sequence = sequence;
        done.status = (int32_t)(next_random() % 3) - 1;
        fakes_say(fd, &control, -1);
    }
    done.sequence = UINT64_MAX;
    done.status = INT32_MIN;
    fakes_say(fd, &control, -1);
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_RING_GRANT;
    control.ring_grant = &grant;
    grant.worker_incarnation = all->workers[0].incarnation;
    fakes_say(fd, &control, -1);
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_RING_REVOKE;
    control.ring_revoke = &revoke;
    fakes_say(fd, &control, -1);
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_RING_USE;
    control.ring_use = &use;
    use.store = UINT32_MAX;
    fakes_say(fd, &control, -1);
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_COPY;
    control.copy = &copy;
    fakes_say(fd, &control, -1);
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_HEARTBEAT;
    control.heartbeat = &heartbeat;
    heartbeat.device_bytes = UINT64_MAX;
    fakes_say(fd, &control, -1);
}

static void rings_and_copies_that_nobody_asked_for(void **state)
{
    (void)state;
    FAKES_WAIT(&fakes, fakes.workers[0].ring[0] && fakes.workers[0].ring[1]);
    say_all(&fakes, fakes.stores[0].fd);
    say_all(&fakes, fakes.workers[0].fd);
    say_all(&fakes, fakes.store_supervisor[0].fd);
    fakes_quiet(&fakes);
    hcattn__reply__free_unpacked(
        fake_client_take(&fakes, fake_client_set_transport(&fakes, "routed"), REPLY(TRANSPORT_SET)), NULL);
    assert_false(fakes.workers[0].ring[0] || fakes.workers[0].ring[1]);
    expect_service();
}

static void counts_that_nobody_asked_for(void **state)
{
    (void)state;
    fake_client_open_session(&fakes, 1, false);
    uint64_t id = fake_client_append(&fakes, 1, "abc");
    fake_client_drop(&fakes, id, REPLY(ACCEPTED));
    Hcattn__Work__WorkRequest *run = fake_worker_take(&fakes, &fakes.workers[0], WORK(RUN));
    fake_worker_counts(&fakes.workers[0], run->work, 3, true); /* to a Run */
    uint64_t describe = fake_client_describe(&fakes, 1);
    Hcattn__Work__WorkRequest *count = fake_worker_take(&fakes, &fakes.workers[0], WORK(COUNT));
    fake_worker_finished(&fakes.workers[0], count->work, 0, 3); /* to a Count */
    fake_worker_generated(&fakes.workers[0], count->work, 0, 3);
    fake_worker_progress(&fakes.workers[0], count->work, 3);
    fakes_quiet(&fakes);
    assert_false(fake_client_has(&fakes.client, describe) || fake_client_has(&fakes.client, id));
    fake_worker_error(&fakes.workers[0], count->work, ERROR_CODE(INTERNAL)); /* goes on as it is */
    fake_client_expect_error(&fakes, describe, ERROR_CODE(INTERNAL));
    fake_worker_finished(&fakes.workers[0], run->work, 0, 3);
    fake_client_drop(&fakes, id, REPLY(APPENDED));
    hcattn__work__work_request__free_unpacked(run, NULL);
    hcattn__work__work_request__free_unpacked(count, NULL);
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
    fakes_quiet(&fakes);
    request = request_to(fakes.stores[0].route);
    send_raw(worker->data, &request, sizeof(request), 1);
    fakes_pump(&fakes);
    assert_int_equal(socket_new_dealer(fakes.context, fakes.stores[0].route, 0, &fakes.stores[0].data), 0);
    assert_int_equal(socket_connect(fakes.stores[0].data, endpoint), 0);
    FAKES_WAIT(&fakes, fakes.stores[0].n_descriptors == 1);
    /* and when it does not come back in time, the sender knows */
    fakes.stores[0].data = socket_free(fakes.stores[0].data);
    fakes_quiet(&fakes);
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
    fakes_quiet(&fakes);
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
        TEST(variants_of_every_request),
        TEST(rings_and_copies_that_nobody_asked_for),
        TEST(counts_that_nobody_asked_for),
        TEST(garbage_from_clients),
        TEST(a_malformed_request_with_an_id_is_answered),
        TEST(a_text_with_a_nul_is_refused),
        TEST(garbage_on_the_work_socket),
        TEST(garbage_on_the_peer_socket),
        TEST(hellos_that_make_no_sense_are_refused),
        TEST(descriptors_travel_both_ways),
        TEST(garbage_on_the_data_socket),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
