/* fake_worker.c - see fakes.h. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/random.h"
#include "tests/unit/coordinator/fake_peers.h"

void fake_worker_register(struct fakes *fakes, uint32_t index)
{
    struct fake_worker *worker = &fakes->workers[index];
    static char name[] = "tiny";
    worker->fd = fakes_connect(fakes);
    worker->data_route = random_u64();
    worker->work_route = random_u64();
    worker->n_exchange_ready = worker->n_store_up = worker->n_store_down = 0;
    worker->hung_up = false;
    worker->refused[0] = 0;
    memset(worker->ring, 0, sizeof(worker->ring));
    Hcattn__Control__Hello hello = fake_peers_greeting(HCATTN__CONTROL__ROLE__GPU_WORKER, index, worker->incarnation);
    Hcattn__Control__RowShape shape = HCATTN__CONTROL__ROW_SHAPE__INIT;
    shape.n_layers = worker->shape.n_layers;
    shape.n_kv_heads = worker->shape.n_kv_heads;
    shape.head_dim = worker->shape.head_dim;
    shape.codec = worker->shape.codec;
    hello.shape = &shape;
    hello.data_route = worker->data_route;
    hello.work_route = worker->work_route;
    hello.model_name = name;
    hello.model_hash_low = hello.model_hash_high = worker->model;
    hello.n_ctx = worker->n_ctx;
    hello.device_budget_bytes = worker->device_budget_bytes;
    hello.device_base_bytes = worker->device_base_bytes;
    CONTROL(HELLO, hello, &hello);
    fakes_say(worker->fd, &control, -1);
}

void fake_worker_hang_up(struct fake_worker *worker)
{
    worker->data = socket_free(worker->data);
    worker->work = socket_free(worker->work);
    for (uint32_t i = 0; i < worker->n_queue; i++)
        hcattn__work__work_request__free_unpacked(worker->queue[i], NULL);
    worker->n_queue = 0;
    if (worker->fd >= 0)
        close(worker->fd);
    worker->fd = -1;
}

void fake_worker_rebirth(struct fake_worker *worker)
{
    fake_worker_hang_up(worker);
    worker->incarnation = random_u64();
}

static void store_up(struct fake_worker *worker, const Hcattn__Control__StoreUp *message, int fd)
{
    struct segment_mapping mapping = {0};
    worker->segment_writable = segment_map(fd, 0, true, &mapping) == 0;
    segment_unmap(&mapping);
    int result = segment_map(fd, 0, false, &mapping);
    assert(result == 0);
    segment_unmap(&mapping);
    close(fd);
    worker->n_store_up++;
    worker->unmapped &= ~(1u << message->store);
    worker->ring[message->store] = false; /* the exchange is made anew */
    worker->store_route[message->store] = message->route;
    worker->store_incarnation[message->store] = message->incarnation;
    if (worker->without >> message->store & 1u)
        return;
    int memory;
    result = segment_create("exchange", 4096, &memory);
    assert(result == 0);
    (void)result;
    Hcattn__Control__Exchange exchange = HCATTN__CONTROL__EXCHANGE__INIT;
    exchange.store = message->store;
    exchange.worker_incarnation = worker->incarnation;
    exchange.store_incarnation = message->incarnation;
    CONTROL(EXCHANGE, exchange, &exchange);
    fakes_say(worker->fd, &control, memory);
    close(memory);
}

void fake_worker_say_done(struct fake_worker *worker, uint64_t sequence, int32_t status)
{
    Hcattn__Control__Done done = HCATTN__CONTROL__DONE__INIT;
    done.sequence = sequence;
    done.status = status;
    CONTROL(DONE, done, &done);
    fakes_say(worker->fd, &control, -1);
}

static void ring_use(struct fakes *fakes, struct fake_worker *worker, const Hcattn__Control__RingUse *message)
{
    const struct fake_store *store = &fakes->stores[message->store];
    worker->n_ring_uses++;
    worker->ring_sequence[message->store] = message->sequence;
    assert(worker->ring[message->store] != message->ring);
    assert(store->incarnation != message->store_incarnation || fake_store_granted(store, worker->incarnation));
    if (worker->ring_status == 0)
        worker->ring[message->store] = message->ring;
    if (!worker->ring_silent)
        fake_worker_say_done(worker, message->sequence, worker->ring_status);
}

static void worker_hears(struct fakes *fakes, struct fake_worker *worker, Hcattn__Control__Control *message, int fd)
{
    switch (message->message_case) {
    case HCATTN__CONTROL__CONTROL__MESSAGE_WELCOME:
        worker->data = socket_free(worker->data);
        worker->work = socket_free(worker->work);
        worker->data = fake_peers_dealer(fakes, message->welcome->data_socket, worker->data_route);
        worker->work = fake_peers_dealer(fakes, message->welcome->work_socket, worker->work_route);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_REFUSED:
        fake_peers_copy(worker->refused, message->refused->sentence);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_STORE_UP:
        store_up(worker, message->store_up, fd);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_STORE_DOWN:
        worker->n_store_down++;
        worker->ring[message->store_down->store] = false;
        if (message->store_down->for_good)
            worker->unmapped |= 1u << message->store_down->store;
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_RING_USE:
        ring_use(fakes, worker, message->ring_use);
        break;
    case HCATTN__CONTROL__CONTROL__MESSAGE_EXCHANGE_READY:
        worker->n_exchange_ready += message->exchange_ready->status == 0;
        break;
    default:
        assert(!"a message that no worker should get");
    }
}

void fake_worker_answer(struct fake_worker *worker, Hcattn__Work__WorkReply *reply)
{
    size_t n = hcattn__work__work_reply__get_packed_size(reply);
    uint8_t *bytes = malloc(n + 1);
    assert(bytes);
    struct frame frame = {bytes, hcattn__work__work_reply__pack(reply, bytes)};
    int result = socket_send(worker->work, &frame, 1, true);
    assert(result == 0);
    (void)result;
    free(bytes);
}

static void prepare(struct fake_worker *worker, const Hcattn__Work__WorkRequest *request)
{
    Hcattn__Work__Prepared prepared = HCATTN__WORK__PREPARED__INIT;
    Hcattn__Work__WorkReply reply = HCATTN__WORK__WORK_REPLY__INIT;
    const Hcattn__Input *input = request->prepare->input;
    uint32_t ids[4096];
    prepared.ids = ids;
    if (input->input_case == HCATTN__INPUT__INPUT_TEXT)
        for (const char *at = input->text; *at; at++)
            ids[prepared.n_ids++] = (uint8_t)*at;
    reply.work = request->work;
    reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_PREPARED;
    reply.prepared = &prepared;
    fake_worker_answer(worker, &reply);
}

void fake_worker_pump(struct fakes *fakes, struct fake_worker *worker)
{
    Hcattn__Control__Control *message;
    struct socket_message *work;
    int fd;
    while ((message = fakes_hear(worker->fd, &fd))) {
        worker_hears(fakes, worker, message, fd);
        hcattn__control__control__free_unpacked(message, NULL);
    }
    if (fd == -2) {
        worker->hung_up = true;
        fake_worker_hang_up(worker);
    }
    while (worker->work && worker->n_queue < FAKE_QUEUE && socket_receive(worker->work, false, &work) == 0) {
        Hcattn__Work__WorkRequest *request =
            hcattn__work__work_request__unpack(NULL, work->frames[0].n_bytes, work->frames[0].data);
        assert(request && work->n_frames == 1);
        if (request->request_case == HCATTN__WORK__WORK_REQUEST__REQUEST_PREPARE && !worker->mute) {
            prepare(worker, request);
            hcattn__work__work_request__free_unpacked(request, NULL);
        } else {
            worker->queue[worker->n_queue++] = request;
        }
        socket_message_free(work);
    }
    fake_peers_beat(worker->fd, &worker->beat_us, worker->progress, worker->busy, worker->phase, worker->device_bytes);
    fake_peers_take_descriptors(worker->data, &worker->last, &worker->n_descriptors);
}

static Hcattn__Work__WorkRequest *shift(struct fake_worker *worker)
{
    Hcattn__Work__WorkRequest *first = worker->queue[0];
    worker->n_queue--;
    memmove(&worker->queue[0], &worker->queue[1], worker->n_queue * sizeof(worker->queue[0]));
    return first;
}

Hcattn__Work__WorkRequest *fake_worker_take(struct fakes *fakes, struct fake_worker *worker,
                                            Hcattn__Work__WorkRequest__RequestCase kind)
{
    for (;;) {
        FAKES_WAIT(fakes, worker->n_queue > 0);
        Hcattn__Work__WorkRequest *request = shift(worker);
        if (request->request_case == kind)
            return request;
        hcattn__work__work_request__free_unpacked(request, NULL);
    }
}

void fake_worker_generated(struct fake_worker *worker, uint64_t work, uint32_t first, uint32_t n)
{
    Hcattn__Generated generated = HCATTN__GENERATED__INIT;
    Hcattn__Work__WorkReply reply = HCATTN__WORK__WORK_REPLY__INIT;
    uint32_t ids[64];
    assert(n <= 64);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = 500 + first + i;
    generated.first = first;
    generated.n_ids = n;
    generated.ids = ids;
    reply.work = work;
    reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_GENERATED;
    reply.generated = &generated;
    fake_worker_answer(worker, &reply);
}

void fake_worker_scored(struct fake_worker *worker, uint64_t work, uint64_t first, size_t n)
{
    Hcattn__Scored scored = HCATTN__SCORED__INIT;
    Hcattn__Work__WorkReply reply = HCATTN__WORK__WORK_REPLY__INIT;
    Hcattn__TokenLogprobs values[64], *pointers[64];
    assert(n <= 64);
    for (size_t i = 0; i < n; i++) {
        hcattn__token_logprobs__init(&values[i]);
        values[i].logprob = -(float)(first + i);
        pointers[i] = &values[i];
    }
    scored.first = first;
    scored.n_scores = n;
    scored.scores = pointers;
    reply.work = work;
    reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_SCORED;
    reply.scored = &scored;
    fake_worker_answer(worker, &reply);
}

void fake_worker_finished(struct fake_worker *worker, uint64_t work, uint32_t n_generated, uint64_t n_tokens)
{
    Hcattn__Work__Finished finished = HCATTN__WORK__FINISHED__INIT;
    Hcattn__Work__WorkReply reply = HCATTN__WORK__WORK_REPLY__INIT;
    finished.reason = HCATTN__FINISH_REASON__FINISH_LENGTH;
    finished.n_generated = n_generated;
    finished.n_tokens = n_tokens;
    reply.work = work;
    reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_FINISHED;
    reply.finished = &finished;
    fake_worker_answer(worker, &reply);
}

void fake_worker_counts(struct fake_worker *worker, uint64_t work, uint64_t n_steps, bool profile)
{
    Hcattn__SessionCounts counts = HCATTN__SESSION_COUNTS__INIT;
    Hcattn__Work__WorkReply reply = HCATTN__WORK__WORK_REPLY__INIT;
    uint64_t kept[2] = {3, 4};
    Hcattn__Work__Counted counted = HCATTN__WORK__COUNTED__INIT;
    Hcattn__HeadProfile heads = HCATTN__HEAD_PROFILE__INIT;
    Hcattn__HeadClass classes[2] = {HCATTN__HEAD_CLASS__HEAD_FULL, HCATTN__HEAD_CLASS__HEAD_LOCAL};
    float masses[2] = {1, 0.97f};
    counts.n_steps = n_steps;
    counts.n_n_kept = 2;
    counts.n_kept = kept;
    reply.work = work;
    reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_COUNTS;
    heads.recovery = 0.95f;
    heads.n_tokens = 64;
    heads.n_classes = heads.n_kept_mass = 2;
    heads.classes = classes;
    heads.kept_mass = masses;
    counted.counts = &counts;
    counted.profile = profile ? &heads : NULL;
    reply.counts = &counted;
    fake_worker_answer(worker, &reply);
}

void fake_worker_error(struct fake_worker *worker, uint64_t work, Hcattn__ErrorCode code)
{
    Hcattn__Error error = HCATTN__ERROR__INIT;
    Hcattn__Work__WorkReply reply = HCATTN__WORK__WORK_REPLY__INIT;
    static char sentence[] = "the worker says so";
    error.code = code;
    error.sentence = sentence;
    reply.work = work;
    reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_ERROR;
    reply.error = &error;
    fake_worker_answer(worker, &reply);
}

void fake_worker_progress(struct fake_worker *worker, uint64_t work, uint64_t n_done)
{
    Hcattn__Progress progress = HCATTN__PROGRESS__INIT;
    Hcattn__Work__WorkReply reply = HCATTN__WORK__WORK_REPLY__INIT;
    progress.n_done = n_done;
    progress.n_total = 1000;
    reply.work = work;
    reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_PROGRESS;
    reply.progress = &progress;
    fake_worker_answer(worker, &reply);
}

void fake_worker_job_progress(struct fake_worker *worker, uint64_t work, double done)
{
    static char phase[] = "prose";
    Hcattn__JobProgress progress = HCATTN__JOB_PROGRESS__INIT;
    Hcattn__Work__WorkReply reply = HCATTN__WORK__WORK_REPLY__INIT;
    progress.phase = phase;
    progress.done = done;
    progress.left_us = 7000000;
    reply.work = work;
    reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_JOB_PROGRESS;
    reply.job_progress = &progress;
    fake_worker_answer(worker, &reply);
}

void fake_worker_job_row(struct fake_worker *worker, uint64_t work, uint32_t index)
{
    Hcattn__EvalRow eval = HCATTN__EVAL_ROW__INIT;
    Hcattn__JobRow row = HCATTN__JOB_ROW__INIT;
    Hcattn__Work__WorkReply reply = HCATTN__WORK__WORK_REPLY__INIT;
    eval.index = index;
    eval.kld_mean = 0.25 * (index + 1);
    row.eval = &eval;
    reply.work = work;
    reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_JOB_ROW;
    reply.job_row = &row;
    fake_worker_answer(worker, &reply);
}

void fake_worker_job_done(struct fake_worker *worker, uint64_t work)
{
    static char sentence[] = "that came of it", path[] = "/there/it.is";
    Hcattn__JobDone done = HCATTN__JOB_DONE__INIT;
    Hcattn__Work__WorkReply reply = HCATTN__WORK__WORK_REPLY__INIT;
    done.sentence = sentence;
    done.path = path;
    reply.work = work;
    reply.reply_case = HCATTN__WORK__WORK_REPLY__REPLY_JOB_DONE;
    reply.job_done = &done;
    fake_worker_answer(worker, &reply);
}
