/*
 * jobs.c - RunJob: work on the model that is no session's, sent to one worker; what that says goes on to the client.
 *
 * A job holds nothing here but its message. It is never run a second time unless its client asks for it: when its worker
 * dies the answer is UNAVAILABLE, and who asks again is told all rows anew (an interrupted training goes on at the worker).
 * Stopped like any other request: by Cancel, and when its client is gone or does not read. How many run at once is the
 * worker's to say (BUSY); those that wait here for a worker to become ready are few, because their texts may be large.
 */
#include "common/log.h"
#include "coordinator/state.h"

#define MAX_WAITING 4u
#define LOAD_OF_JOB (1u << 20) /* more than any number of requests: a worker without a job is better */

static const char *name_of(const struct request *request)
{
    switch (((const Hcattn__Request *)request->message)->run_job->job_case) {
    case HCATTN__RUN_JOB__JOB_EVALUATE:
        return "evaluation";
    case HCATTN__RUN_JOB__JOB_TRAIN_CODEBOOK:
        return "training of a codebook";
    default:
        return "gathering of statistics";
    }
}

/* ---- to the worker ---- */

void jobs_enter(struct server *server, struct request *request)
{
    uint32_t n_waiting = 0, cursor = 0;
    for (const struct request *other; (other = requests_next(server->requests, &cursor));)
        n_waiting += other->kind == REQUEST_JOB && other->state == REQUEST_QUEUED;
    if (n_waiting >= MAX_WAITING)
        flow_fail(server, request, HCATTN__ERROR_CODE__BUSY, NULL, "%u jobs wait for a gpu-worker to become ready",
                  n_waiting);
    else
        (void)requests_move(request, REQUEST_QUEUED, server->now_us);
}

static uint32_t load_of(const struct server *server, const struct process *worker)
{
    uint32_t load = requests_count_at(server->requests, worker->incarnation), cursor = 0;
    for (const struct request *request; (request = requests_next(server->requests, &cursor));)
        if (request->kind == REQUEST_JOB && request->worker == worker->incarnation)
            load += LOAD_OF_JOB;
    return load;
}

static struct process *pick(const struct server *server)
{
    struct process *best = NULL;
    uint32_t best_load = 0, cursor = 0;
    for (struct process *worker; (worker = registry_next(server->registry, &cursor));) {
        uint32_t load = workers_serves(worker) ? load_of(server, worker) : 0;
        if (!workers_serves(worker) || (best && load >= best_load))
            continue;
        best = worker;
        best_load = load;
    }
    return best;
}

void jobs_advance(struct server *server, struct request *request)
{
    struct process *worker = pick(server);
    if (!worker)
        return;
    Hcattn__Work__WorkRequest message = HCATTN__WORK__WORK_REQUEST__INIT;
    flow_at_worker(server, request, worker, &message);
    message.request_case = HCATTN__WORK__WORK_REQUEST__REQUEST_RUN_JOB;
    message.run_job = ((const Hcattn__Request *)request->message)->run_job;
    (void)requests_move(request, REQUEST_RUNNING, server->now_us);
    LOG_INFO("request %016llx: %s at gpu-worker %u", (unsigned long long)request->id, name_of(request), worker->index);
    workers_send(server, worker, &message);
}

/* ---- from the worker ---- */

void jobs_reply(struct server *server, struct request *request, Hcattn__Work__WorkReply *from)
{
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    bool last = from->reply_case == HCATTN__WORK__WORK_REPLY__REPLY_JOB_DONE ||
                from->reply_case == HCATTN__WORK__WORK_REPLY__REPLY_ERROR;
    if (request->restart) { /* what was under way is told again from row 0 */
        if (last)
            flow_stopped(server, request);
        return;
    }
    request->probed_us = server->now_us;
    switch (from->reply_case) {
    case HCATTN__WORK__WORK_REPLY__REPLY_JOB_PROGRESS:
        reply.reply_case = HCATTN__REPLY__REPLY_JOB_PROGRESS;
        reply.job_progress = from->job_progress;
        rpc_reply(server, request, &reply);
        break;
    case HCATTN__WORK__WORK_REPLY__REPLY_JOB_ROW:
        reply.reply_case = HCATTN__REPLY__REPLY_JOB_ROW;
        reply.job_row = from->job_row;
        request->forwarded++;
        rpc_reply(server, request, &reply);
        break;
    case HCATTN__WORK__WORK_REPLY__REPLY_JOB_DONE:
        reply.reply_case = HCATTN__REPLY__REPLY_JOB_DONE;
        reply.job_done = from->job_done;
        flow_answer(server, request, &reply);
        break;
    case HCATTN__WORK__WORK_REPLY__REPLY_ERROR:
        reply.reply_case = HCATTN__REPLY__REPLY_ERROR;
        reply.error = from->error;
        flow_answer(server, request, &reply);
        break;
    default:
        break;
    }
}

void jobs_lost(struct server *server, struct request *request)
{
    const struct process *worker = registry_find_incarnation(server->registry, PROCESS_WORKER, request->worker);
    bool died = !worker || worker->state == PROCESS_DEAD;
    request->worker = request->work = 0;
    flow_fail(server, request, HCATTN__ERROR_CODE__UNAVAILABLE, NULL,
              "the gpu-worker %s during the %s; asked for again, a training goes on where it was and an evaluation "
              "begins anew",
              died ? "died" : "was lost", name_of(request));
}

void jobs_tick(struct server *server, struct request *request)
{
    if (request->state == REQUEST_QUEUED || request->state == REQUEST_RUNNING)
        queue_probe(server, request); /* a phase may be long: its progress is not enough to notice that nobody waits */
}
