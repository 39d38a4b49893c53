/* fake_client.c - see fakes.h. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/random.h"
#include "tests/unit/coordinator/fakes.h"

void fake_client_open(struct fakes *fakes)
{
    char endpoint[128];
    struct fake_client *client = &fakes->client;
    *client = (struct fake_client){.route = random_u64()};
    snprintf(endpoint, sizeof(endpoint), "ipc://%s/client.sock", fakes->dir);
    int result = socket_new_dealer(fakes->context, client->route, 0, &client->socket);
    result |= socket_connect(client->socket, endpoint);
    assert(result == 0);
    (void)result;
}

void fake_client_close(struct fake_client *client)
{
    client->socket = socket_free(client->socket);
    for (uint32_t i = 0; i < client->n_queue; i++)
        hcattn__reply__free_unpacked(client->queue[i], NULL);
    client->n_queue = 0;
}

void fake_client_pump(struct fake_client *client)
{
    struct socket_message *message;
    while (client->socket && client->n_queue < FAKE_QUEUE && socket_receive(client->socket, false, &message) == 0) {
        assert(message->n_frames == 1);
        Hcattn__Reply *reply = hcattn__reply__unpack(NULL, message->frames[0].n_bytes, message->frames[0].data);
        assert(reply);
        client->queue[client->n_queue++] = reply;
        socket_message_free(message);
    }
}

void fake_client_send(struct fakes *fakes, Hcattn__Request *request)
{
    uint8_t *bytes = malloc(hcattn__request__get_packed_size(request));
    assert(bytes);
    struct frame frame = {bytes, hcattn__request__pack(request, bytes)};
    int result = socket_send(fakes->client.socket, &frame, 1, true);
    assert(result == 0);
    (void)result;
    free(bytes);
}

uint64_t fake_client_ask(struct fakes *fakes, Hcattn__Request *request)
{
    request->request_id = ++fakes->next_id;
    fake_client_send(fakes, request);
    return request->request_id;
}

static Hcattn__Reply *next_of(struct fake_client *client, uint64_t request)
{
    for (uint32_t i = 0; i < client->n_queue; i++)
        if (client->queue[i]->request_id == request) {
            Hcattn__Reply *reply = client->queue[i];
            client->n_queue--;
            for (uint32_t j = i; j < client->n_queue; j++)
                client->queue[j] = client->queue[j + 1];
            return reply;
        }
    return NULL;
}

bool fake_client_has(const struct fake_client *client, uint64_t request)
{
    for (uint32_t i = 0; i < client->n_queue; i++)
        if (client->queue[i]->request_id == request)
            return true;
    return false;
}

static Hcattn__Reply *take_any(struct fakes *fakes, uint64_t request)
{
    FAKES_WAIT(fakes, fake_client_has(&fakes->client, request));
    return next_of(&fakes->client, request);
}

Hcattn__Reply *fake_client_take(struct fakes *fakes, uint64_t request, Hcattn__Reply__ReplyCase kind)
{
    Hcattn__Reply *reply = take_any(fakes, request);
    if (reply->reply_case != kind) {
        fprintf(stderr, "reply of kind %d instead of %d%s%s\n", (int)reply->reply_case, (int)kind,
                reply->reply_case == HCATTN__REPLY__REPLY_ERROR ? ": " : "",
                reply->reply_case == HCATTN__REPLY__REPLY_ERROR ? reply->error->sentence : "");
        abort();
    }
    return reply;
}

void fake_client_drop(struct fakes *fakes, uint64_t request, Hcattn__Reply__ReplyCase kind)
{
    hcattn__reply__free_unpacked(fake_client_take(fakes, request, kind), NULL);
}

void fake_client_expect_error(struct fakes *fakes, uint64_t request, Hcattn__ErrorCode code)
{
    Hcattn__Reply *reply = fake_client_take(fakes, request, HCATTN__REPLY__REPLY_ERROR);
    if (reply->error->code != code || reply->error->sentence[0] == 0) {
        fprintf(stderr, "error %d (%s) instead of %d\n", (int)reply->error->code, reply->error->sentence, (int)code);
        abort();
    }
    hcattn__reply__free_unpacked(reply, NULL);
}

uint64_t fake_client_ask_exact(struct fakes *fakes, uint64_t session, const char *policy, int64_t n_exact)
{
    Hcattn__OpenSession open = HCATTN__OPEN_SESSION__INIT;
    Hcattn__ExactTokens exact = HCATTN__EXACT_TOKENS__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    open.session = session;
    open.policy = (char *)(uintptr_t)policy;
    exact.n_tokens = (uint32_t)n_exact;
    open.exact = n_exact >= 0 ? &exact : NULL;
    request.request_case = HCATTN__REQUEST__REQUEST_OPEN_SESSION;
    request.open_session = &open;
    return fake_client_ask(fakes, &request);
}

uint64_t fake_client_ask_open(struct fakes *fakes, uint64_t session, const char *policy)
{
    return fake_client_ask_exact(fakes, session, policy, -1);
}

uint64_t fake_client_fork(struct fakes *fakes, uint64_t session, uint64_t new_session, uint64_t n_tokens)
{
    Hcattn__Fork fork = HCATTN__FORK__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    fork.session = session;
    fork.new_session = new_session;
    fork.n_tokens = n_tokens;
    request.request_case = HCATTN__REQUEST__REQUEST_FORK;
    request.fork = &fork;
    return fake_client_ask(fakes, &request);
}

uint64_t fake_client_fork_as(struct fakes *fakes, uint64_t session, uint64_t new_session, const char *policy)
{
    Hcattn__Fork fork = HCATTN__FORK__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    fork.session = session;
    fork.new_session = new_session;
    fork.policy = (char *)(uintptr_t)policy;
    request.request_case = HCATTN__REQUEST__REQUEST_FORK;
    request.fork = &fork;
    return fake_client_ask(fakes, &request);
}

uint64_t fake_client_evaluate(struct fakes *fakes, const char *text)
{
    static char name[] = "prose", preset[] = "default", baseline[] = "h2o";
    char *presets[] = {preset, baseline};
    Hcattn__NamedText named = HCATTN__NAMED_TEXT__INIT, *texts = &named;
    Hcattn__Evaluate evaluate = HCATTN__EVALUATE__INIT;
    Hcattn__RunJob job = HCATTN__RUN_JOB__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    named.name = name;
    named.text = (char *)(uintptr_t)text;
    evaluate.n_texts = 1;
    evaluate.texts = &texts;
    evaluate.context = 128;
    evaluate.tail = 64;
    evaluate.n_presets = 2;
    evaluate.presets = presets;
    job.job_case = HCATTN__RUN_JOB__JOB_EVALUATE;
    job.evaluate = &evaluate;
    request.request_case = HCATTN__REQUEST__REQUEST_RUN_JOB;
    request.run_job = &job;
    return fake_client_ask(fakes, &request);
}

uint64_t fake_client_set_policy(struct fakes *fakes, uint64_t session, const char *policy)
{
    Hcattn__SetPolicy message = HCATTN__SET_POLICY__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    message.session = session;
    message.policy = (char *)(uintptr_t)policy;
    request.request_case = HCATTN__REQUEST__REQUEST_SET_POLICY;
    request.set_policy = &message;
    return fake_client_ask(fakes, &request);
}

uint64_t fake_client_set_transport(struct fakes *fakes, const char *transport)
{
    Hcattn__SetTransport message = HCATTN__SET_TRANSPORT__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    message.transport = (char *)(uintptr_t)transport;
    request.request_case = HCATTN__REQUEST__REQUEST_SET_TRANSPORT;
    request.set_transport = &message;
    return fake_client_ask(fakes, &request);
}

uint64_t fake_client_drain(struct fakes *fakes, bool resume)
{
    Hcattn__Drain message = HCATTN__DRAIN__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    message.resume = resume;
    request.request_case = HCATTN__REQUEST__REQUEST_DRAIN;
    request.drain = &message;
    return fake_client_ask(fakes, &request);
}

uint64_t fake_client_drain_store(struct fakes *fakes, uint32_t store, bool resume)
{
    Hcattn__DrainStore message = HCATTN__DRAIN_STORE__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    message.store = store;
    message.resume = resume;
    request.request_case = HCATTN__REQUEST__REQUEST_DRAIN_STORE;
    request.drain_store = &message;
    return fake_client_ask(fakes, &request);
}

static void drop_progress(struct fakes *fakes, uint64_t id)
{
    struct fake_client *client = &fakes->client;
    for (uint32_t i = 0; i < client->n_queue; i++)
        if (client->queue[i]->request_id == id &&
            client->queue[i]->reply_case == HCATTN__REPLY__REPLY_STORE_DRAIN_PROGRESS) {
            hcattn__reply__free_unpacked(next_of(client, id), NULL);
            i--;
        }
}

static void await_end(struct fakes *fakes, uint64_t id)
{
    uint64_t deadline = fakes_deadline();
    do {
        FAKES_WAIT(fakes, fake_client_has(&fakes->client, id));
        drop_progress(fakes, id);
        fakes_fail_late("a store is drained", __FILE__, __LINE__, deadline);
    } while (!fake_client_has(&fakes->client, id));
}

uint32_t fake_client_drained(struct fakes *fakes, uint64_t id)
{
    await_end(fakes, id);
    Hcattn__Reply *reply = fake_client_take(fakes, id, HCATTN__REPLY__REPLY_STORE_DRAINED);
    uint32_t n_sessions = reply->store_drained->n_sessions;
    hcattn__reply__free_unpacked(reply, NULL);
    return n_sessions;
}

void fake_client_drain_error(struct fakes *fakes, uint64_t id, Hcattn__ErrorCode code, const char *words)
{
    await_end(fakes, id);
    Hcattn__Reply *reply = fake_client_take(fakes, id, HCATTN__REPLY__REPLY_ERROR);
    if (reply->error->code != code || !strstr(reply->error->sentence, words)) {
        fprintf(stderr, "error %d (%s) instead of %d\n", (int)reply->error->code, reply->error->sentence, (int)code);
        abort();
    }
    hcattn__reply__free_unpacked(reply, NULL);
}

void fake_client_drain_waits(struct fakes *fakes, uint64_t id, const char *words)
{
    uint64_t deadline = fakes_deadline();
    for (bool said = false; !said;) {
        Hcattn__Reply *reply = fake_client_take(fakes, id, HCATTN__REPLY__REPLY_STORE_DRAIN_PROGRESS);
        said = strstr(reply->store_drain_progress->waits, words) != NULL;
        if (!said)
            fakes_fail_late(words, __FILE__, __LINE__, deadline);
        hcattn__reply__free_unpacked(reply, NULL);
    }
}

uint64_t fake_client_describe(struct fakes *fakes, uint64_t session)
{
    Hcattn__DescribeSession message = HCATTN__DESCRIBE_SESSION__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    message.session = session;
    request.request_case = HCATTN__REQUEST__REQUEST_DESCRIBE_SESSION;
    request.describe_session = &message;
    return fake_client_ask(fakes, &request);
}

Hcattn__Reply *fake_client_list(struct fakes *fakes)
{
    Hcattn__ListSessions message = HCATTN__LIST_SESSIONS__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    request.request_case = HCATTN__REQUEST__REQUEST_LIST_SESSIONS;
    request.list_sessions = &message;
    return fake_client_take(fakes, fake_client_ask(fakes, &request), HCATTN__REPLY__REPLY_SESSION_LIST);
}

uint64_t fake_client_open_session(struct fakes *fakes, uint64_t session, bool ephemeral)
{
    Hcattn__OpenSession open = HCATTN__OPEN_SESSION__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    open.session = session;
    open.ephemeral = ephemeral;
    request.request_case = HCATTN__REQUEST__REQUEST_OPEN_SESSION;
    request.open_session = &open;
    Hcattn__Reply *reply =
        fake_client_take(fakes, fake_client_ask(fakes, &request), HCATTN__REPLY__REPLY_SESSION_OPENED);
    session = reply->session_opened->session;
    hcattn__reply__free_unpacked(reply, NULL);
    return session;
}

uint64_t fake_client_close_session(struct fakes *fakes, uint64_t session)
{
    Hcattn__CloseSession message = HCATTN__CLOSE_SESSION__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    message.session = session;
    request.request_case = HCATTN__REQUEST__REQUEST_CLOSE_SESSION;
    request.close_session = &message;
    return fake_client_ask(fakes, &request);
}

static Hcattn__Input text_input(const char *text)
{
    Hcattn__Input input = HCATTN__INPUT__INIT;
    input.input_case = HCATTN__INPUT__INPUT_TEXT;
    input.text = (char *)(uintptr_t)text;
    return input;
}

uint64_t fake_client_resume(struct fakes *fakes, uint64_t id, uint64_t session, const char *text, uint32_t max_tokens,
                            int64_t at, uint32_t resume_from)
{
    Hcattn__Input input = text_input(text);
    Hcattn__Generate generate = HCATTN__GENERATE__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    Hcattn__At at_message = HCATTN__AT__INIT;
    generate.session = session;
    generate.input = text ? &input : NULL;
    generate.max_tokens = max_tokens;
    generate.resume_from = resume_from;
    if (at >= 0) {
        at_message.n_tokens = (uint64_t)at;
        generate.at = &at_message;
    }
    request.request_id = id;
    request.request_case = HCATTN__REQUEST__REQUEST_GENERATE;
    request.generate = &generate;
    fake_client_send(fakes, &request);
    return id;
}

uint64_t fake_client_generate(struct fakes *fakes, uint64_t session, const char *text, uint32_t max_tokens)
{
    return fake_client_resume(fakes, ++fakes->next_id, session, text, max_tokens, -1, 0);
}

uint64_t fake_client_append(struct fakes *fakes, uint64_t session, const char *text)
{
    Hcattn__Input input = text_input(text);
    Hcattn__Append append = HCATTN__APPEND__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    append.session = session;
    append.input = &input;
    request.request_case = HCATTN__REQUEST__REQUEST_APPEND;
    request.append = &append;
    return fake_client_ask(fakes, &request);
}

uint64_t fake_client_score(struct fakes *fakes, uint64_t session, const char *text, uint64_t from)
{
    Hcattn__Input input = text_input(text);
    Hcattn__Score score = HCATTN__SCORE__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    score.session = session;
    score.input = &input;
    score.from = from;
    request.request_case = HCATTN__REQUEST__REQUEST_SCORE;
    request.score = &score;
    return fake_client_ask(fakes, &request);
}

uint64_t fake_client_cancel(struct fakes *fakes, uint64_t id)
{
    Hcattn__Cancel cancel = HCATTN__CANCEL__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    cancel.request = id;
    request.request_case = HCATTN__REQUEST__REQUEST_CANCEL;
    request.cancel = &cancel;
    return fake_client_ask(fakes, &request);
}

Hcattn__Reply *fake_client_health(struct fakes *fakes)
{
    Hcattn__Health health = HCATTN__HEALTH__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    request.request_case = HCATTN__REQUEST__REQUEST_HEALTH;
    request.health = &health;
    return fake_client_take(fakes, fake_client_ask(fakes, &request), HCATTN__REPLY__REPLY_HEALTH);
}

Hcattn__Reply *fake_client_stats(struct fakes *fakes)
{
    Hcattn__Stats stats = HCATTN__STATS__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    request.request_case = HCATTN__REQUEST__REQUEST_STATS;
    request.stats = &stats;
    return fake_client_take(fakes, fake_client_ask(fakes, &request), HCATTN__REPLY__REPLY_STATS);
}
