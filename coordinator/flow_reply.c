/* flow_reply.c - a request at its worker: what is sent there, what comes back and goes on to the client. */
#include <stdlib.h>
#include <string.h>

#include "common/log.h"
#include "coordinator/state.h"

const Hcattn__Input *flow_input(const struct request *request)
{
    const Hcattn__Request *message = request->message;
    switch (message->request_case) {
    case HCATTN__REQUEST__REQUEST_APPEND:
        return message->append->input;
    case HCATTN__REQUEST__REQUEST_GENERATE:
        return message->generate->input;
    case HCATTN__REQUEST__REQUEST_SCORE:
        return message->score->input;
    case HCATTN__REQUEST__REQUEST_TOKENIZE:
        return message->tokenize->input;
    default:
        return NULL;
    }
}

/* ---- to the worker ---- */

void flow_at_worker(struct server *server, struct request *request, const struct process *worker,
                    Hcattn__Work__WorkRequest *message)
{
    request->worker = worker->incarnation;
    request->work = message->work = ++server->next_work;
    request->heard_us = server->now_us;
}

void flow_prepare(struct server *server, struct request *request, struct process *worker)
{
    const Hcattn__Request *message = request->message;
    Hcattn__Work__WorkRequest work = HCATTN__WORK__WORK_REQUEST__INIT;
    Hcattn__Work__Prepare prepare = HCATTN__WORK__PREPARE__INIT;
    Hcattn__Work__Detokenize detokenize = HCATTN__WORK__DETOKENIZE__INIT;
    flow_at_worker(server, request, worker, &work);
    if (request->kind == REQUEST_DETOKENIZE) {
        detokenize.n_ids = message->detokenize->n_ids;
        detokenize.ids = message->detokenize->ids;
        detokenize.special = message->detokenize->special;
        work.request_case = HCATTN__WORK__WORK_REQUEST__REQUEST_DETOKENIZE;
        work.detokenize = &detokenize;
    } else {
        const Hcattn__Input *input = flow_input(request);
        prepare.input = (Hcattn__Input *)(uintptr_t)input;
        prepare.start = request->kind == REQUEST_TOKENIZE || request->at == 0;
        prepare.pieces = request->kind == REQUEST_TOKENIZE;
        prepare.parse_special = input->parse_special;
        work.request_case = HCATTN__WORK__WORK_REQUEST__REQUEST_PREPARE;
        work.prepare = &prepare;
    }
    workers_send(server, worker, &work);
}

static void fill_run(const struct request *request, Hcattn__Work__Run *run)
{
    const Hcattn__Request *message = request->message;
    run->resume_from = (uint32_t)request->forwarded;
    if (request->kind == REQUEST_GENERATE) {
        const Hcattn__Generate *generate = message->generate;
        run->max_tokens = request->max_tokens;
        run->sampling = generate->sampling;
        run->logprobs = generate->logprobs;
        run->top_logprobs = generate->top_logprobs;
        run->ignore_end = generate->ignore_end;
        run->n_stop = generate->n_stop;
        run->stop = generate->stop;
    } else if (request->kind == REQUEST_SCORE) {
        run->score = true;
        run->score_from = message->score->from;
        run->all_logprobs = message->score->all_logprobs;
        run->top_logprobs = message->score->top_logprobs;
    }
}

void flow_run(struct server *server, struct request *request, struct process *worker)
{
    struct session *session = request->session;
    Hcattn__Work__WorkRequest work = HCATTN__WORK__WORK_REQUEST__INIT;
    Hcattn__Work__Run run = HCATTN__WORK__RUN__INIT;
    Hcattn__Work__BlockHandle *handles = calloc(session->n_blocks + 1u, sizeof(*handles));
    Hcattn__Work__BlockHandle **pointers = calloc(session->n_blocks + 1u, sizeof(*pointers));
    if (!handles || !pointers) {
        free(handles);
        free(pointers);
        flow_fail(server, request, HCATTN__ERROR_CODE__INTERNAL, NULL, "out of memory");
        return;
    }
    for (uint32_t i = 0; i < session->n_blocks; i++) {
        hcattn__work__block_handle__init(&handles[i]);
        handles[i].index = session->blocks[i].handle.index;
        handles[i].generation = session->blocks[i].handle.generation;
        pointers[i] = &handles[i];
    }
    run.session = session->id;
    run.policy = session->terms.policy;
    run.exact_tokens = session->terms.exact_tokens;
    run.lane_store = (ProtobufCBinaryData){LAYOUT_N_LANES, session->terms.lane_store};
    run.n_blocks = session->n_blocks;
    run.blocks = pointers;
    run.at = request->at;
    run.n_input_ids = request->n_ids;
    run.input_ids = request->ids;
    fill_run(request, &run);
    work.request_case = HCATTN__WORK__WORK_REQUEST__REQUEST_RUN;
    work.run = &run;
    flow_at_worker(server, request, worker, &work);
    if (request->dispatched_us == 0)
        request->dispatched_us = server->now_us;
    (void)requests_move(request, REQUEST_RUNNING, server->now_us);
    workers_send(server, worker, &work);
    free(handles);
    free(pointers);
}

/* ---- lost workers ---- */

void flow_redispatch(struct server *server, struct request *request, bool died)
{
    if (request->kind == REQUEST_JOB && request->state == REQUEST_RUNNING) {
        jobs_lost(server, request);
        return;
    }
    request->worker = request->work = 0;
    if (request->state == REQUEST_CANCELLING) {
        flow_stopped(server, request);
        return;
    }
    if (died && ++request->n_deaths > MAX_DEATHS) {
        LOG_ERROR("request %016llx (%s) ended %u workers without progress: given up", (unsigned long long)request->id,
                  requests_kind_name(request->kind), request->n_deaths);
        flow_fail(server, request, HCATTN__ERROR_CODE__INTERNAL, NULL,
                  "%u workers were lost while they ran this request, without progress in between", request->n_deaths);
        return;
    }
    if (request->state == REQUEST_RUNNING)
        (void)requests_move(request, REQUEST_QUEUED, server->now_us);
    request->waiting_us = server->now_us;
    server->dirty = true;
}

void flow_worker_hung_up(struct server *server, uint64_t worker)
{
    uint32_t cursor = 0;
    for (struct request *request; (request = requests_next(server->requests, &cursor));)
        if (request->worker == worker && request->state == REQUEST_PREPARING)
            flow_redispatch(server, request, false);
}

void flow_worker_lost(struct server *server, uint64_t worker, bool died)
{
    uint32_t cursor = 0;
    for (struct request *request; (request = requests_next(server->requests, &cursor));)
        if (request->worker == worker && request->state != REQUEST_DONE)
            flow_redispatch(server, request, died);
}

void flow_stopped(struct server *server, struct request *request)
{
    bool goes_on = request->parking && !request->cancelled && !request->mute;
    request->worker = request->work = 0;
    request->parking = false;
    if (goes_on && !request->restart) { /* once its session has moved, from the next token on */
        (void)requests_move(request, REQUEST_QUEUED, server->now_us);
        server->dirty = true;
        return;
    }
    if (request->restart && !(request->session && request->session->close_wanted)) {
        request->restart = false;
        request->forwarded = request->resume_from;
        (void)requests_move(request, REQUEST_QUEUED, server->now_us);
        flow_accepted(server, request);
        server->dirty = true;
        return;
    }
    flow_fail(server, request, request->restart ? HCATTN__ERROR_CODE__NOT_FOUND : HCATTN__ERROR_CODE__CANCELLED, NULL,
              request->restart ? "the session is closed" : "cancelled");
}

/* ---- from the worker ---- */

void flow_prepared(struct server *server, struct request *request, const uint32_t *ids, size_t n_ids)
{
    struct numbers numbers = {.n_prompt_tokens = n_ids,
                              .n_tokens = request->at,
                              .max_tokens = request->max_tokens,
                              .n_ctx = server->model.n_ctx};
    request->worker = request->work = 0;
    if (n_ids == 0 && request->at == 0) {
        flow_fail(server, request, HCATTN__ERROR_CODE__INVALID_ARGUMENT, NULL, "the prompt is empty");
        return;
    }
    enum admission admission =
        requests_admit(server->model.n_ctx, request->at, n_ids, request->kind == REQUEST_GENERATE,
                       request->default_max_tokens, &request->max_tokens);
    if (admission == ADMISSION_INPUT_TOO_LONG) {
        flow_fail(server, request, HCATTN__ERROR_CODE__CONTEXT_EXCEEDED, &numbers,
                  "%llu tokens of input after the %llu the session holds do not fit the context of %llu",
                  (unsigned long long)n_ids, (unsigned long long)request->at, (unsigned long long)server->model.n_ctx);
        return;
    }
    if (admission != ADMISSION_OK) {
        flow_fail(server, request, HCATTN__ERROR_CODE__CONTEXT_EXCEEDED, &numbers,
                  "%llu tokens of input after the %llu the session holds, and %u to generate, do not fit the context "
                  "of %llu",
                  (unsigned long long)n_ids, (unsigned long long)request->at, request->max_tokens,
                  (unsigned long long)server->model.n_ctx);
        return;
    }
    if (request->kind == REQUEST_SCORE &&
        ((const Hcattn__Request *)request->message)->score->from >= request->at + n_ids) {
        flow_fail(server, request, HCATTN__ERROR_CODE__INVALID_ARGUMENT, &numbers,
                  "from %llu: the session ends before it, at %llu tokens",
                  (unsigned long long)((const Hcattn__Request *)request->message)->score->from,
                  (unsigned long long)(request->at + n_ids));
        return;
    }
    request->ids = malloc((n_ids + 1) * sizeof(uint32_t));
    if (!request->ids) {
        flow_fail(server, request, HCATTN__ERROR_CODE__INTERNAL, NULL, "out of memory");
        return;
    }
    if (n_ids > 0)
        memcpy(request->ids, ids, n_ids * sizeof(uint32_t));
    request->n_ids = n_ids;
    request->prepared = true;
    (void)requests_move(request, REQUEST_RESERVING, server->now_us);
    server->dirty = true;
}

static void tokenized(struct server *server, struct request *request, const Hcattn__Work__Prepared *prepared)
{
    Hcattn__Tokenized message = HCATTN__TOKENIZED__INIT;
    message.n_ids = prepared->n_ids;
    message.ids = prepared->ids;
    message.n_pieces = prepared->n_pieces;
    message.pieces = prepared->pieces;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.reply_case = HCATTN__REPLY__REPLY_TOKENIZED;
    reply.tokenized = &message;
    flow_answer(server, request, &reply);
}

static void detokenized(struct server *server, struct request *request, const Hcattn__Work__Detokenized *detokenized)
{
    Hcattn__Detokenized message = HCATTN__DETOKENIZED__INIT;
    message.text = detokenized->text;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.reply_case = HCATTN__REPLY__REPLY_DETOKENIZED;
    reply.detokenized = &message;
    flow_answer(server, request, &reply);
}

/* A worker that breaks the order of tokens: the stream cannot go on truthfully. */
static void out_of_order(struct server *server, struct request *request, uint64_t first)
{
    LOG_ERROR("request %016llx: its worker sent token %llu where %llu was next", (unsigned long long)request->id,
              (unsigned long long)first, (unsigned long long)request->forwarded);
    flow_session_lost(server, request, "the worker left tokens out");
}

/* How many of the first `n` are known to the client already; false: there is a gap before them. */
static bool skip_known(const struct request *request, uint64_t first, size_t n, size_t *ret_known)
{
    if (n > 0 && first > request->forwarded)
        return false;
    uint64_t known = request->forwarded > first ? request->forwarded - first : 0;
    *ret_known = known < n ? (size_t)known : n;
    return true;
}

static void progressed(struct request *request)
{
    request->n_deaths = 0;
}

static void generated(struct server *server, struct request *request, Hcattn__Generated *message)
{
    size_t known;
    uint32_t n_all = (uint32_t)message->n_ids;
    if (!skip_known(request, message->first, message->n_ids, &known)) {
        out_of_order(server, request, message->first);
        return;
    }
    if (n_all > 0 && known == n_all)
        return; /* all of it was sent before */
    Hcattn__Generated copy = *message;
    copy.first += (uint32_t)known;
    copy.ids += known;
    copy.n_ids -= known;
    if (copy.n_logprobs == n_all) {
        copy.logprobs += known;
        copy.n_logprobs -= known;
    }
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.reply_case = HCATTN__REPLY__REPLY_GENERATED;
    reply.generated = &copy;
    request->forwarded += copy.n_ids;
    if (copy.n_ids > 0)
        progressed(request);
    rpc_reply(server, request, &reply);
}

static void scored(struct server *server, struct request *request, Hcattn__Scored *message)
{
    /* Positions are counted from the session's start; those that are sent begin at `from` or the first new one. */
    if (request->forwarded == 0)
        request->score_base = message->first;
    size_t known;
    size_t n_all = message->n_scores;
    if (message->first < request->score_base ||
        !skip_known(request, message->first - request->score_base, n_all, &known)) {
        out_of_order(server, request, message->first);
        return;
    }
    if (known == n_all)
        return;
    Hcattn__Scored copy = *message;
    copy.first += known;
    copy.scores += known;
    copy.n_scores -= known;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.reply_case = HCATTN__REPLY__REPLY_SCORED;
    reply.scored = &copy;
    request->forwarded += copy.n_scores;
    progressed(request);
    rpc_reply(server, request, &reply);
}

static void progress(struct server *server, struct request *request, Hcattn__Progress *message)
{
    if (message->n_done > request->n_done) {
        request->n_done = message->n_done;
        progressed(request);
    }
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.reply_case = HCATTN__REPLY__REPLY_PROGRESS;
    reply.progress = message;
    rpc_reply(server, request, &reply);
}

static void finished(struct server *server, struct request *request, const Hcattn__Work__Finished *message)
{
    Hcattn__Timings timings = HCATTN__TIMINGS__INIT;
    if (message->timings)
        timings = *message->timings;
    timings.queued_us = request->dispatched_us - request->entered_us;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    Hcattn__Appended appended = HCATTN__APPENDED__INIT;
    Hcattn__GenerateDone generate_done = HCATTN__GENERATE_DONE__INIT;
    Hcattn__ScoreDone score_done = HCATTN__SCORE_DONE__INIT;
    if (request->kind == REQUEST_APPEND) {
        appended.n_input_tokens = request->n_ids;
        appended.n_tokens = message->n_tokens;
        appended.timings = &timings;
        reply.reply_case = HCATTN__REPLY__REPLY_APPENDED;
        reply.appended = &appended;
    } else if (request->kind == REQUEST_GENERATE) {
        generate_done.reason = message->reason;
        generate_done.n_generated = message->n_generated;
        generate_done.text = message->text;
        generate_done.n_tokens = message->n_tokens;
        generate_done.end_id = message->end_id;
        generate_done.timings = &timings;
        reply.reply_case = HCATTN__REPLY__REPLY_GENERATE_DONE;
        reply.generate_done = &generate_done;
    } else {
        score_done.n_tokens = message->n_tokens;
        score_done.timings = &timings;
        reply.reply_case = HCATTN__REPLY__REPLY_SCORE_DONE;
        reply.score_done = &score_done;
    }
    flow_answer(server, request, &reply);
}

static void failed(struct server *server, struct request *request, Hcattn__Error *error)
{
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.reply_case = HCATTN__REPLY__REPLY_ERROR;
    reply.error = error;
    LOG_DEBUG("request %016llx (%s): the worker says: %s", (unsigned long long)request->id,
              requests_kind_name(request->kind), error->sentence);
    flow_answer(server, request, &reply);
}

static void reply_to_prepare(struct server *server, struct request *request, Hcattn__Work__WorkReply *reply)
{
    switch (reply->reply_case) {
    case HCATTN__WORK__WORK_REPLY__REPLY_PREPARED:
        if (request->kind == REQUEST_TOKENIZE)
            tokenized(server, request, reply->prepared);
        else if (request->kind != REQUEST_DETOKENIZE)
            flow_prepared(server, request, reply->prepared->ids, reply->prepared->n_ids);
        break;
    case HCATTN__WORK__WORK_REPLY__REPLY_DETOKENIZED:
        if (request->kind == REQUEST_DETOKENIZE)
            detokenized(server, request, reply->detokenized);
        break;
    case HCATTN__WORK__WORK_REPLY__REPLY_COUNTS:
        if (request->kind == REQUEST_DESCRIBE)
            operate_counted(server, request, reply->counts);
        break;
    case HCATTN__WORK__WORK_REPLY__REPLY_ERROR:
        if (request->kind == REQUEST_DESCRIBE && reply->error->code == HCATTN__ERROR_CODE__NOT_FOUND)
            operate_counted(server, request, NULL);
        else
            failed(server, request, reply->error);
        break;
    default:
        break;
    }
}

void flow_work_reply(struct server *server, struct request *request, Hcattn__Work__WorkReply *reply)
{
    request->heard_us = server->now_us;
    if (request->state == REQUEST_PREPARING) {
        reply_to_prepare(server, request, reply);
        return;
    }
    if (request->state != REQUEST_RUNNING && request->state != REQUEST_CANCELLING)
        return;
    if (request->kind == REQUEST_JOB) {
        jobs_reply(server, request, reply);
        return;
    }
    bool last = reply->reply_case == HCATTN__WORK__WORK_REPLY__REPLY_FINISHED ||
                reply->reply_case == HCATTN__WORK__WORK_REPLY__REPLY_ERROR;
    if (request->restart) { /* what was under way is sent again from resume_from */
        if (last)
            flow_stopped(server, request);
        return;
    }
    switch (reply->reply_case) {
    case HCATTN__WORK__WORK_REPLY__REPLY_PROGRESS:
        progress(server, request, reply->progress);
        break;
    case HCATTN__WORK__WORK_REPLY__REPLY_GENERATED:
        if (request->kind == REQUEST_GENERATE)
            generated(server, request, reply->generated);
        break;
    case HCATTN__WORK__WORK_REPLY__REPLY_SCORED:
        if (request->kind == REQUEST_SCORE)
            scored(server, request, reply->scored);
        break;
    case HCATTN__WORK__WORK_REPLY__REPLY_FINISHED:
        finished(server, request, reply->finished);
        break;
    case HCATTN__WORK__WORK_REPLY__REPLY_ERROR:
        if (request->parking && reply->error->code == HCATTN__ERROR_CODE__CANCELLED)
            flow_stopped(server, request);
        else
            failed(server, request, reply->error);
        break;
    default:
        break;
    }
}
