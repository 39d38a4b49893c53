#include "gpu-worker/engine_private.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/clock.h"

static void warn(struct engine *engine, const char *what, uint32_t store, int error)
{
    struct engine_event *event = engine_new_event(engine, ENGINE_WARNING, NULL);
    char text[160];
    snprintf(text, sizeof(text), "store %u: %s: %s", store, what, strerror(-error));
    if (event != NULL)
        event->text = strdup(text);
    engine_tell(engine, event);
}

/* ---- the device ---- */

const char *engine_device_sentence(const struct engine *engine, int r)
{
    const struct backend_device_ops *device = engine->network->ops->device;
    bool is_its = device != NULL && (r == -EIO || r == -ENOMEM || r == -ENODEV);
    const char *sentence = is_its ? device->error(engine->network->backend) : "";
    return sentence[0] != '\0' ? sentence : strerror(-r);
}

int engine_device_check(struct engine *engine, int r)
{
    if (r != -ENODEV || engine->has_lost_device || engine->network->ops->device == NULL)
        return r;
    engine->has_lost_device = true;
    struct engine_event *event = engine_new_event(engine, ENGINE_DEVICE_LOST, NULL);
    if (event != NULL)
        event->text = strdup(engine_device_sentence(engine, r));
    engine_tell(engine, event);
    return r;
}

int engine_device_wait(struct engine *engine)
{
    return engine_device_check(engine, backend_wait(engine->network->ops, engine->network->backend));
}

/* ---- runs ---- */

static void remove_run(struct engine *engine, struct run *run)
{
    for (struct run **at = &engine->runs; *at != NULL; at = &(*at)->next)
        if (*at == run) {
            *at = run->next;
            break;
        }
    run_free(run);
}

/* The device memory of a run that failed cannot be trusted. One that was stopped, or lost its coordinator, leaves nothing wrong:
 * what its last step put is put again when it goes on (session_goes_on()). */
static void distrust(struct run *run)
{
    if (run->session == NULL || run->error == 0 || run->error == -ECANCELED)
        return;
    if (session_reset(run->session, &run->policy) < 0)
        run->session->n_rows = UINT32_MAX; /* rebuilt, or refused, by the next run */
}

static void drop_runs(struct engine *engine)
{
    while (engine->runs != NULL) {
        distrust(engine->runs);
        remove_run(engine, engine->runs);
    }
}

static void fail_run(struct engine *engine, struct run *run)
{
    struct engine_event *event = engine_new_event(engine, ENGINE_FAILED, run);
    if (event != NULL) {
        event->error = run->error;
        event->text = strdup(run->sentence);
        event->bytes_asked = run->bytes_asked;
        event->bytes_free = run->bytes_free;
    }
    engine_tell(engine, event);
    distrust(run);
    remove_run(engine, run);
}

static void start_run(struct engine *engine, struct run_request *request)
{
    char sentence[160] = "out of memory";
    uint64_t work = request->work;
    struct run *run = NULL;
    int r = run_new(request, engine->options.quantizers, engine->tokenizer, &run, sentence, sizeof(sentence));
    if (r < 0) {
        struct engine_event *event = engine_new_event(engine, ENGINE_FAILED, NULL);
        if (event != NULL) {
            event->work = work;
            event->error = r;
            event->text = strdup(sentence);
        }
        engine_tell(engine, event);
        return;
    }
    run->started_us = clock_now_us();
    struct run **at = &engine->runs;
    while (*at != NULL)
        at = &(*at)->next;
    *at = run;
    for (struct run *other = engine->runs; other != run; other = other->next)
        if (other->request->session == run->request->session)
            run_fail(run, -EBUSY, "the session runs another request");
    if (engine_open_session(engine, run) < 0)
        run_fail(run, -ENOMEM, "no memory on the device for another session");
}

/* ---- commands ---- */

static int control_command(struct engine *engine, struct engine_command *command)
{
    int exchange_fd, r;
    switch (command->kind) {
    case ENGINE_COORDINATOR_UP:
        engine->epoch = command->epoch;
        r = link_open(&engine->link, command->route, command->endpoint);
        if (r < 0)
            warn(engine, "data socket", 0, r);
        return 0;
    case ENGINE_COORDINATOR_DOWN:
        link_close(&engine->link);
        stores_all_down(&engine->stores);
        return -ECONNRESET;
    case ENGINE_STORE_UP:
        r = stores_up(&engine->stores, command->store, command->incarnation, command->route, command->fd, &exchange_fd);
        if (r < 0) {
            warn(engine, "its segment cannot be used", command->store, r);
            return 0;
        }
        engine_exchange_made(engine, command->store);
        struct engine_event *event = engine_new_event(engine, ENGINE_EXCHANGE, NULL);
        if (event == NULL) {
            close(exchange_fd);
            return 0;
        }
        event->store = command->store;
        event->incarnation = command->incarnation;
        event->fd = exchange_fd;
        engine_tell(engine, event);
        return 0;
    case ENGINE_STORE_READY:
        stores_ready(&engine->stores, command->store, command->incarnation);
        return 0;
    case ENGINE_STORE_DOWN:
        stores_down(&engine->stores, command->store, command->incarnation);
        return 0;
    case ENGINE_STORE_LEFT:
        stores_remove(&engine->stores, command->store, command->incarnation);
        return 0;
    case ENGINE_RING_USE: {
        bool known = stores_use_ring(&engine->stores, command->store, command->incarnation, command->ring);
        struct engine_event *used = engine_new_event(engine, ENGINE_RING_USED, NULL);
        if (used != NULL) {
            used->work = command->work;
            used->error = known ? 0 : -ESTALE;
        }
        engine_tell(engine, used);
        return 0;
    }
    default:
        return 0;
    }
}

static int control(void *context)
{
    struct engine *engine = context;
    struct engine_command *command;
    int result = 0;
    atomic_store_explicit(&engine->has_control, false, memory_order_relaxed);
    atomic_fetch_add_explicit(&engine->progress, 1, memory_order_relaxed);
    while ((command = engine_pop(engine, &engine->control)) != NULL) {
        int r = control_command(engine, command);
        if (r < 0)
            result = r;
        engine_command_free(command);
    }
    return result;
}

static int copy_profile(const struct fastgen_profile *profile, const struct row_shape *shape,
                        struct engine_counts *counts)
{
    size_t n = (size_t)shape->n_layers * shape->n_kv_heads;
    counts->classes = calloc(n, sizeof(*counts->classes));
    counts->kept_mass = calloc(n, sizeof(*counts->kept_mass));
    if (counts->classes == NULL || counts->kept_mass == NULL)
        return -ENOMEM;
    counts->profile_tokens = fastgen_profile_n_tokens(profile);
    counts->recovery = fastgen_profile_recovery(profile);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t layer = i / shape->n_kv_heads, head = i % shape->n_kv_heads;
        counts->classes[i] = (uint8_t)fastgen_profile_class(profile, layer, head);
        counts->kept_mass[i] = fastgen_profile_kept(profile, layer, head);
    }
    return 0;
}

/* What the session's steps have cost so far. */
static void tell_counts(struct engine *engine, const struct engine_command *command)
{
    const struct session *session = engine_find_session(engine, command->session);
    const struct row_shape *shape = &engine->stores.shape;
    size_t n_kept = (size_t)shape->n_layers * shape->n_kv_heads;
    struct engine_event *event = engine_new_event(engine, session == NULL ? ENGINE_FAILED : ENGINE_COUNTED, NULL);
    if (event == NULL)
        return;
    event->work = command->work;
    if (session == NULL) {
        event->error = -ESRCH;
        event->text = strdup("this worker does not hold the session");
        engine_tell(engine, event);
        return;
    }
    struct engine_counts *counts = calloc(1, sizeof(*counts));
    event->counts = counts;
    uint64_t *kept = calloc(n_kept, sizeof(*kept));
    if (counts == NULL || kept == NULL) {
        free(kept);
        engine_event_free(event);
        return;
    }
    if (session->profile != NULL && copy_profile(session->profile, shape, counts) < 0) {
        free(kept);
        engine_event_free(event);
        return;
    }
    memcpy(kept, session->counts.n_kept, n_kept * sizeof(*kept));
    counts->counts = session->counts;
    counts->counts.n_kept = kept;
    counts->n_kept = (uint32_t)n_kept;
    counts->exact_bytes = session_exact_bytes(session);
    counts->key_bytes = key_cache_bytes(session->keys);
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++) {
        uint32_t i = 0;
        while (i < counts->n_stores && counts->store[i] != session->lane_store[lane])
            i++;
        if (i == counts->n_stores)
            counts->store[counts->n_stores++] = session->lane_store[lane];
        counts->bytes_read[i] += session->counts.bytes_read[lane];
    }
    engine_tell(engine, event);
}

static void work(struct engine *engine)
{
    struct engine_command *command;
    while ((command = engine_pop(engine, &engine->work)) != NULL) {
        switch (command->kind) {
        case ENGINE_RUN:
            if (command->epoch == engine->epoch) {
                start_run(engine, command->request);
                command->request = NULL;
            }
            break;
        case ENGINE_STOP:
            for (struct run *run = engine->runs; run != NULL; run = run->next)
                if (run->request->work == command->work)
                    run_fail(run, -ECANCELED, "cancelled");
            engine_job_stop(engine, command->work);
            break;
        case ENGINE_JOB:
            if (command->epoch == engine->epoch)
                engine_job_start(engine, command);
            break;
        case ENGINE_FORGET:
            for (struct run *run = engine->runs, *next; run != NULL; run = next) {
                next = run->next;
                if (run->request->session == command->session)
                    fail_run(engine, run);
            }
            engine_forget_session(engine, command->session);
            break;
        case ENGINE_COUNT:
            tell_counts(engine, command);
            break;
        case ENGINE_QUIT:
            engine->quit = true;
            break;
        default:
            break;
        }
        engine_command_free(command);
    }
}

/* Ends what has ended and prepares what is new. Returns whether a step can do something; -ECONNRESET. */
static int attend_to_runs(struct engine *engine)
{
    int can_step = 0;
    bool is_full = false; /* a run waits for device memory: those behind it wait too */
    for (struct run *run = engine->runs, *next; run != NULL; run = next) {
        next = run->next;
        if (run->error == 0 && !run->is_prepared && !is_full) {
            int r = engine_prepare(engine, run);
            is_full = r == -EDQUOT;
            if (r == -ECONNRESET || r == -ENODEV)
                return r;
            if (r == 0)
                run->is_prepared = true;
            else if (r == -EAGAIN && clock_now_us() - run->started_us > engine->options.recovery_timeout_us)
                run_fail(run, -ETIMEDOUT, "a value-store of the session is not there");
        }
        if (run->error != 0)
            fail_run(engine, run);
        else if (run->is_prepared && engine_is_finished(run)) {
            engine_finish(engine, run);
            remove_run(engine, run);
        } else if (run->is_prepared)
            can_step = 1;
    }
    return can_step;
}

static void *engine_main(void *context)
{
    struct engine *engine = context;
    enum { WAIT_FOR_STORE_US = 20000 };
    if (engine->options.thread_setup != NULL)
        engine->options.thread_setup(engine->options.thread_context);
    kernels_thread_setup();
    if (engine->network->ops->device != NULL)
        engine_device_check(engine, engine->network->ops->device->use(engine->network->backend));
    /* without its device there is nothing that it can do; clients' requests are carried out by who comes after it */
    while (!engine->quit && !engine->has_lost_device) {
        int r = control(engine);
        if (r == 0) {
            work(engine);
            r = attend_to_runs(engine);
            atomic_store_explicit(&engine->device_bytes, engine->network->ops->bytes(engine->network->backend),
                                  memory_order_relaxed);
        }
        if (r > 0) {
            uint64_t start = clock_now_us();
            atomic_store_explicit(&engine->phase, "step", memory_order_relaxed);
            r = engine_step(engine);
            engine->job.owed_us += clock_now_us() - start;
            if (r == 0 && engine_job_is_due(engine))
                engine_job_advance(engine);
        } else if (r == 0 && engine->job.job.ops != NULL) {
            atomic_store_explicit(&engine->busy, true, memory_order_relaxed);
            atomic_store_explicit(&engine->phase, engine->job.job.ops->name, memory_order_relaxed);
            engine_job_advance(engine);
        } else if (r == 0) {
            struct descriptor late; /* an answer nobody waits for any more: its slot shows it */
            bool waits = engine->runs != NULL;
            atomic_store_explicit(&engine->busy, waits, memory_order_relaxed);
            atomic_store_explicit(&engine->phase, waits ? "waiting for a store" : "idle", memory_order_relaxed);
            pthread_mutex_lock(&engine->lock);
            bool queued = engine->work.first != NULL || engine->control.first != NULL;
            pthread_mutex_unlock(&engine->lock);
            if (!queued && !engine->quit) /* control() above may have taken the order to quit */
                r = link_wait(&engine->link, waits ? clock_deadline_us(WAIT_FOR_STORE_US) : CLOCK_NEVER, &late);
            atomic_store_explicit(&engine->busy, true, memory_order_relaxed);
        }
        if (r == -ECONNRESET) {
            drop_runs(engine);
            engine_job_drop(engine);
        }
    }
    drop_runs(engine);
    engine_job_drop(engine);
    link_close(&engine->link);
    return NULL;
}

/* ---- life ---- */

int engine_new(const struct engine_options *options, struct network *network, const struct kernels *kernels,
               struct pool *pool, const struct tokenizer *tokenizer, struct socket_context *sockets,
               struct engine **ret_engine)
{
    struct engine *engine = calloc(1, sizeof(*engine));
    if (engine == NULL)
        return -ENOMEM;
    const struct model_shape *shape = &network->shape;
    struct row_shape rows = {.n_layers = shape->n_layers,
                             .n_kv_heads = shape->n_kv_heads,
                             .head_dim = shape->head_dim,
                             .codec = options->row_codec};
    struct step_limits limits = {.max_rows = options->prefill_chunk + options->max_batch,
                                 .max_decode = options->max_batch,
                                 .n_ctx = options->n_ctx,
                                 .max_halves = options->max_halves,
                                 .max_weights = 4 * shape->n_heads * (options->n_ctx + 2 * LAYOUT_BLOCK_TOKENS)};
    engine->options = *options;
    engine->network = network;
    engine->kernels = kernels;
    engine->tokenizer = tokenizer;
    engine->tools = (struct job_tools){.network = network,
                                       .kernels = kernels,
                                       .pool = pool,
                                       .tokenizer = tokenizer,
                                       .quantizers = options->quantizers,
                                       .row_codec = options->row_codec,
                                       .n_ctx = options->n_ctx,
                                       .slice_us = JOB_SLICE_US};
    uint64_t request_bytes = step_request_bytes(&rows, shape->n_heads, &limits);
    uint64_t reply_bytes = step_reply_bytes(&rows, shape->n_heads, &limits);
    if (request_bytes > UINT32_MAX || reply_bytes > UINT32_MAX) {
        free(engine);
        return -E2BIG;
    }
    stores_init(&engine->stores, &rows, options->incarnation, (uint32_t)request_bytes, (uint32_t)reply_bytes);
    engine_exchange_init(engine);
    pthread_mutex_init(&engine->lock, NULL);
    atomic_store(&engine->phase, "idle");
    engine->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    engine->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    engine->link = (struct link){
        .context = sockets,
        .worker = options->incarnation,
        .next_request = 1,
        .wake_fd = engine->wake_fd,
        .has_control = &engine->has_control,
        .spin_us = options->spin_us,
        .request_timeout_us = options->request_timeout_us,
        .recovery_timeout_us = options->recovery_timeout_us,
        .control = control,
        .engine = engine,
    };
    size_t block_bytes = (size_t)rows.n_layers * rows.n_kv_heads * layout_head_rows_bytes(&rows);
    if (network->ops->device != NULL)
        engine->device_rows = network->ops->alloc(network->backend, block_bytes);
    engine->candidates = calloc(shape->n_vocab, sizeof(*engine->candidates));
    engine->raw_logits = calloc(shape->n_vocab, sizeof(*engine->raw_logits));
    int r = engine->wake_fd < 0 || engine->event_fd < 0 ? -EMFILE : 0;
    if (r == 0 && ((network->ops->device != NULL && engine->device_rows == NULL) || engine->candidates == NULL ||
                   engine->raw_logits == NULL))
        r = -ENOMEM;
    if (r == 0)
        r = step_new(network, kernels, &engine->stores, &engine->link, pool, options->transport, &limits,
                     &engine->step);
    if (r == 0) {
        engine->step->progress = &engine->progress;
        engine->step->between_layers = engine_between_layers;
        engine->step->engine = engine;
        atomic_store(&engine->device_bytes, network->ops->bytes(network->backend));
    }
    if (r == 0)
        r = -pthread_create(&engine->thread, NULL, engine_main, engine);
    if (r < 0) {
        engine_free(engine);
        return r;
    }
    engine->thread_started = true;
    *ret_engine = engine;
    return 0;
}

struct engine *engine_free(struct engine *engine)
{
    if (engine == NULL)
        return NULL;
    if (engine->thread_started) {
        struct engine_command *quit = calloc(1, sizeof(*quit));
        if (quit != NULL) {
            quit->kind = ENGINE_QUIT;
            engine_command(engine, quit);
            pthread_join(engine->thread, NULL);
        }
    }
    struct engine_command *command;
    while ((command = engine_pop(engine, &engine->control)) != NULL ||
           (command = engine_pop(engine, &engine->work)) != NULL)
        engine_command_free(command);
    struct engine_event *event;
    while ((event = engine_event(engine)) != NULL)
        engine_event_free(event);
    while (engine->sessions != NULL)
        engine_forget_session(engine, engine->sessions->id);
    step_free(engine->step);
    stores_fini(&engine->stores);
    if (engine->wake_fd >= 0)
        close(engine->wake_fd);
    if (engine->event_fd >= 0)
        close(engine->event_fd);
    pthread_mutex_destroy(&engine->lock);
    if (engine->device_rows != NULL)
        engine->network->ops->free(engine->network->backend, engine->device_rows);
    free(engine->candidates);
    free(engine->raw_logits);
    free(engine);
    return NULL;
}

int engine_event_fd(const struct engine *engine)
{
    return engine->event_fd;
}

uint64_t engine_progress(const struct engine *engine)
{
    return atomic_load_explicit(&engine->progress, memory_order_relaxed);
}

bool engine_busy(const struct engine *engine)
{
    return atomic_load_explicit(&engine->busy, memory_order_relaxed);
}

uint64_t engine_n_tokens(const struct engine *engine)
{
    return atomic_load_explicit(&engine->n_tokens, memory_order_relaxed);
}

uint64_t engine_device_bytes(const struct engine *engine)
{
    return atomic_load_explicit(&engine->device_bytes, memory_order_relaxed);
}

const char *engine_phase(const struct engine *engine)
{
    return atomic_load_explicit(&engine->phase, memory_order_relaxed);
}
