/* fake_coordinator.c - see fake_coordinator.h. */
#include "tests/unit/client/fake_coordinator.h"
#include "common/clock.h"
#include "common/random.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check(int result, const char *what)
{
    if (result < 0) {
        fprintf(stderr, "fake coordinator: %s: %s\n", what, strerror(-result));
        abort();
    }
}

static void open_socket(struct fake_coordinator *fake)
{
    check(socket_new_router(fake->sockets, 0, &fake->socket), "router");
    int result = -EADDRINUSE;
    for (int i = 0; i < 200 && result == -EADDRINUSE; i++) {
        result = socket_bind(fake->socket, fake->endpoint);
        if (result == -EADDRINUSE)
            clock_sleep_us(10000); /* of the life before */
    }
    check(result, fake->endpoint);
    fake->incarnation = random_u64();
}

void fake_coordinator_bytes(struct fake_coordinator *fake, const void *bytes, size_t n_bytes)
{
    struct frame frames[] = {socket_id_frame(&fake->route), {.data = bytes, .n_bytes = n_bytes}};
    int result = socket_send(fake->socket, frames, 2, true);
    if (result != -EHOSTUNREACH)
        check(result, "send");
}

static bool is_last(const Hcattn__Reply *reply)
{
    return reply->reply_case != HCATTN__REPLY__REPLY_ACCEPTED && reply->reply_case != HCATTN__REPLY__REPLY_PROGRESS &&
           reply->reply_case != HCATTN__REPLY__REPLY_GENERATED && reply->reply_case != HCATTN__REPLY__REPLY_SCORED &&
           reply->reply_case != HCATTN__REPLY__REPLY_JOB_PROGRESS &&
           reply->reply_case != HCATTN__REPLY__REPLY_JOB_ROW &&
           reply->reply_case != HCATTN__REPLY__REPLY_STORE_DRAIN_PROGRESS;
}

static void forget(struct fake_coordinator *fake, uint64_t request)
{
    for (size_t i = 0; i < fake->n_running; i++) {
        if (fake->running[i] == request)
            fake->running[i] = fake->running[--fake->n_running];
    }
}

void fake_coordinator_reply(struct fake_coordinator *fake, const Hcattn__Reply *reply)
{
    size_t n_bytes = hcattn__reply__get_packed_size(reply);
    uint8_t *bytes = malloc(n_bytes);
    hcattn__reply__pack(reply, bytes);
    fake_coordinator_bytes(fake, bytes, n_bytes);
    free(bytes);
    if (is_last(reply))
        forget(fake, reply->request_id);
}

static void answer_health(struct fake_coordinator *fake, uint64_t request)
{
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    Hcattn__HealthReply health = HCATTN__HEALTH_REPLY__INIT;
    health.live = true;
    health.ready = fake->ready;
    health.coordinator = fake->incarnation;
    health.sentence = (char *)(fake->ready ? "" : "no worker yet");
    health.running = fake->running;
    health.n_running = fake->n_running;
    reply.request_id = request;
    reply.reply_case = HCATTN__REPLY__REPLY_HEALTH;
    reply.health = &health;
    fake->n_health++;
    fake_coordinator_reply(fake, &reply);
}

static void restart(struct fake_coordinator *fake)
{
    fake->socket = socket_free(fake->socket);
    fake->n_running = 0;
    fake->n_restarts++;
    fake->ready = !fake->not_ready_after_restart;
    clock_sleep_us(50000);
    open_socket(fake);
}

static void take(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    if (request->request_case == HCATTN__REQUEST__REQUEST_HEALTH) {
        answer_health(fake, request->request_id);
        return;
    }
    bool listed = false;
    for (size_t i = 0; i < fake->n_running; i++)
        listed |= fake->running[i] == request->request_id;
    if (!listed && fake->n_running < 16)
        fake->running[fake->n_running++] = request->request_id; /* before the handler: it may send the last reply */
    switch (fake->handle(fake, request)) {
    case FAKE_KNOWN:
        break;
    case FAKE_LOST:
        forget(fake, request->request_id);
        break;
    case FAKE_RESTART:
        restart(fake);
        break;
    }
}

static void note_route(struct fake_coordinator *fake)
{
    for (size_t i = 0; i < fake->n_routes; i++) {
        if (fake->routes[i] == fake->route)
            return;
    }
    if (fake->n_routes < 64)
        fake->routes[fake->n_routes++] = fake->route;
}

static void *serve(void *context)
{
    struct fake_coordinator *fake = context;
    while (!fake->stop) {
        struct socket_item item = {.socket = fake->socket, .fd = -1, .events = SOCKET_READABLE};
        if (socket_poll(&item, 1, 20) <= 0)
            continue;
        struct socket_message *message = NULL;
        if (socket_receive(fake->socket, false, &message) < 0)
            continue;
        if (message->n_frames == 2 && socket_id(&message->frames[0], &fake->route) == 0) {
            note_route(fake);
            Hcattn__Request *request =
                hcattn__request__unpack(NULL, message->frames[1].n_bytes, message->frames[1].data);
            if (request)
                take(fake, request);
            hcattn__request__free_unpacked(request, NULL);
        }
        socket_message_free(message);
    }
    return NULL;
}

void fake_coordinator_start(struct fake_coordinator *fake)
{
    fake->ready = !fake->not_ready;
    check(socket_context_new(&fake->sockets), "context");
    open_socket(fake);
    if (pthread_create(&fake->thread, NULL, serve, fake) != 0)
        abort();
}

void fake_coordinator_stop(struct fake_coordinator *fake)
{
    fake->stop = true;
    pthread_join(fake->thread, NULL);
    socket_free(fake->socket);
    socket_context_free(fake->sockets);
}

void fake_coordinator_error(struct fake_coordinator *fake, uint64_t request, Hcattn__ErrorCode code,
                            const char *sentence)
{
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    Hcattn__Error error = HCATTN__ERROR__INIT;
    error.code = code;
    error.sentence = (char *)sentence;
    error.n_prompt_tokens = 5000;
    error.n_ctx = 4096;
    error.bytes_asked = 77;
    error.bytes_free = 33;
    error.n_queued = 3;
    error.max_queued = 8;
    reply.request_id = request;
    reply.reply_case = HCATTN__REPLY__REPLY_ERROR;
    reply.error = &error;
    fake_coordinator_reply(fake, &reply);
}

void fake_coordinator_accepted(struct fake_coordinator *fake, uint64_t request, uint64_t at, uint32_t *ids, size_t n)
{
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    Hcattn__Accepted accepted = HCATTN__ACCEPTED__INIT;
    accepted.at = at;
    accepted.prompt_ids = ids;
    accepted.n_prompt_ids = n;
    reply.request_id = request;
    reply.reply_case = HCATTN__REPLY__REPLY_ACCEPTED;
    reply.accepted = &accepted;
    fake_coordinator_reply(fake, &reply);
}

void fake_coordinator_generated(struct fake_coordinator *fake, uint64_t request, uint32_t first, uint32_t *ids,
                                size_t n, const char *text, bool logprobs)
{
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    Hcattn__Generated generated = HCATTN__GENERATED__INIT;
    Hcattn__TokenLogprobs tokens[16], *pointers[16];
    Hcattn__TopLogprob top = HCATTN__TOP_LOGPROB__INIT, *top_pointer = &top;
    top.id = 7;
    top.logprob = -0.5f;
    for (size_t i = 0; i < n && i < 16; i++) {
        hcattn__token_logprobs__init(&tokens[i]);
        tokens[i].logprob = -(float)(first + i);
        tokens[i].top = &top_pointer;
        tokens[i].n_top = 1;
        pointers[i] = &tokens[i];
    }
    generated.first = first;
    generated.ids = ids;
    generated.n_ids = n;
    generated.text = (char *)text;
    generated.logprobs = pointers;
    generated.n_logprobs = logprobs ? n : 0;
    reply.request_id = request;
    reply.reply_case = HCATTN__REPLY__REPLY_GENERATED;
    reply.generated = &generated;
    fake_coordinator_reply(fake, &reply);
}

void fake_coordinator_done(struct fake_coordinator *fake, uint64_t request, uint32_t n_generated, const char *text,
                           uint64_t n_tokens)
{
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    Hcattn__GenerateDone done = HCATTN__GENERATE_DONE__INIT;
    Hcattn__Timings timings = HCATTN__TIMINGS__INIT;
    timings.n_decode = n_generated;
    timings.decode_us = 1000;
    done.reason = HCATTN__FINISH_REASON__FINISH_LENGTH;
    done.n_generated = n_generated;
    done.text = (char *)text;
    done.n_tokens = n_tokens;
    done.timings = &timings;
    reply.request_id = request;
    reply.reply_case = HCATTN__REPLY__REPLY_GENERATE_DONE;
    reply.generate_done = &done;
    fake_coordinator_reply(fake, &reply);
}
