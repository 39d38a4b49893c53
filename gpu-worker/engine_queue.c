/* engine_queue.c - what crosses between the server's thread and the engine's: commands in, events out. */
#include <stdlib.h>
#include <unistd.h>

#include "gpu-worker/engine_private.h"

static void push(struct command_queue *queue, struct engine_command *command)
{
    command->next = NULL;
    if (queue->last == NULL)
        queue->first = command;
    else
        queue->last->next = command;
    queue->last = command;
}

struct engine_command *engine_pop(struct engine *engine, struct command_queue *queue)
{
    pthread_mutex_lock(&engine->lock);
    struct engine_command *command = queue->first;
    if (command != NULL) {
        queue->first = command->next;
        if (queue->first == NULL)
            queue->last = NULL;
    }
    pthread_mutex_unlock(&engine->lock);
    return command;
}

static void ring(int fd)
{
    uint64_t one = 1;
    if (write(fd, &one, sizeof(one)) < 0)
        return; /* full: it is readable already */
}

void engine_command_free(struct engine_command *command)
{
    if (command->kind == ENGINE_STORE_UP && command->fd >= 0)
        close(command->fd);
    run_request_free(command->request);
    engine_job_free(&command->job);
    free(command);
}

void engine_command(struct engine *engine, struct engine_command *command)
{
    bool is_control = command->kind < ENGINE_RUN,
         is_stop = command->kind == ENGINE_STOP || command->kind == ENGINE_FORGET;
    pthread_mutex_lock(&engine->lock);
    push(command->kind < ENGINE_RUN ? &engine->control : &engine->work, command);
    pthread_mutex_unlock(&engine->lock);
    if (is_stop)
        atomic_fetch_add_explicit(&engine->n_stops, 1, memory_order_release);
    if (is_control)
        atomic_store_explicit(&engine->has_control, true, memory_order_release);
    ring(engine->wake_fd);
}

struct engine_event *engine_event_free(struct engine_event *event)
{
    if (event == NULL)
        return NULL;
    if (event->fd >= 0)
        close(event->fd);
    run_logprobs_fini(&event->logprobs);
    if (event->counts != NULL) {
        free(event->counts->counts.n_kept);
        free(event->counts->classes);
        free(event->counts->kept_mass);
    }
    free(event->counts);
    free(event->row);
    free(event->text);
    free(event->path);
    free(event);
    return NULL;
}

struct engine_event *engine_event(struct engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    struct engine_event *event = engine->first_event;
    if (event != NULL) {
        engine->first_event = event->next;
        if (engine->first_event == NULL)
            engine->last_event = NULL;
    }
    pthread_mutex_unlock(&engine->lock);
    return event;
}

struct engine_event *engine_new_event(struct engine *engine, enum engine_event_kind kind, const struct run *run)
{
    struct engine_event *event = calloc(1, sizeof(*event));
    if (event == NULL)
        return NULL;
    event->kind = kind;
    event->epoch = engine->epoch;
    event->work = run == NULL ? 0 : run->request->work;
    event->fd = -1;
    return event;
}

void engine_tell(struct engine *engine, struct engine_event *event)
{
    if (event == NULL)
        return;
    pthread_mutex_lock(&engine->lock);
    event->next = NULL;
    if (engine->last_event == NULL)
        engine->first_event = event;
    else
        engine->last_event->next = event;
    engine->last_event = event;
    pthread_mutex_unlock(&engine->lock);
    ring(engine->event_fd);
}
