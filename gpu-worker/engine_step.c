/* engine_step.c - one batch over all runs: what each can do in it, and what came of it. */
#include <errno.h>
#include <string.h>

#include "common/clock.h"
#include "gpu-worker/engine_private.h"
#include "gpu-worker/policy/exact_set.h"

enum { MIN_PREFILL_ROWS = 16 /* of a step that also decodes: a prefill must come to its end */ };

/* ---- what a step takes on ---- */

struct budget {
    uint32_t prefill_rows;
    uint64_t weights; /* floats */
};

static struct budget step_budget(const struct engine *engine)
{
    struct budget budget = {.prefill_rows = engine->options.prefill_chunk, .weights = engine->step->limits.max_weights};
    bool decodes = false;
    for (const struct run *run = engine->runs; run != NULL; run = run->next)
        if (run->is_prepared && run->error == 0 && run->end == RUN_END_NONE && run->position >= run->first_decode)
            decodes = true;
    if (!decodes || engine->options.max_step_us == 0 || engine->prefill_row_us <= 0)
        return budget;
    double left = (double)engine->options.max_step_us - engine->decode_step_us;
    double rows = left > 0 ? left / engine->prefill_row_us : 0;
    uint32_t n = rows > (double)budget.prefill_rows ? budget.prefill_rows : (uint32_t)rows;
    uint32_t least = MIN_PREFILL_ROWS < budget.prefill_rows ? MIN_PREFILL_ROWS : budget.prefill_rows;
    budget.prefill_rows = n > least ? n : least;
    return budget;
}

static bool wants_logits(const struct run *run, uint32_t position)
{
    if (run->request->score)
        return position + 1 >= run->request->score_from + run->request->resume_from && position + 1 < run->goal;
    return run->request->max_tokens > 0 && position + 1 == run->n_known;
}

static bool add_row(struct engine *engine, struct run *run, uint32_t position, bool is_decode)
{
    if (!step_add_row(engine->step, run, position, is_decode, wants_logits(run, position)))
        return false;
    if (run->session->n_touched <= position)
        run->session->n_touched = position + 1;
    return true;
}

static void add_decode(struct engine *engine, struct run *run, struct budget *budget)
{
    int r = engine_profile(engine, run);
    if (r == 0)
        r = engine_add_keys(engine, run, run->position);
    if (r == -ENODEV)
        return;
    if (r < 0) {
        run_fail(run, r,
                 r == -ENOMEM ? "no memory on the device for the session's keys"
                              : "a block of the session is not in its store any more");
        return;
    }
    uint64_t weights = 0;
    if (run->policy.terms.weights)
        weights = (uint64_t)engine->network->shape.n_heads * LAYOUT_BLOCK_TOKENS *
                  exact_set_n_old_blocks(run->position, run->session->exact_tokens);
    if (weights > budget->weights)
        return; /* in a later step */
    if (add_row(engine, run, run->position, true))
        budget->weights -= weights;
}

/* Adds what a run can do in this step. */
static void add_to_step(struct engine *engine, struct run *run, struct budget *budget)
{
    struct step *step = engine->step;
    if (run->end != RUN_END_NONE) {
        step_add_commit(step, run);
        return;
    }
    uint32_t prefill_end = run->first_decode < run->goal ? run->first_decode : run->goal;
    if (run->position >= prefill_end) {
        add_decode(engine, run, budget);
        return;
    }
    for (uint32_t p = run->position; p < prefill_end && budget->prefill_rows > 0; p++, budget->prefill_rows--)
        if (!add_row(engine, run, p, false))
            return;
}

/* ---- during a step ---- */

static void on_journaled(void *context, uint32_t first, uint32_t end)
{
    struct engine *engine = context;
    struct step *step = engine->step;
    for (uint32_t i = first; i < end; i++) {
        struct run *run = step->rows[i].run;
        if (run->error == 0 && run->has_pending && step->rows[i].position + 1 == run->n_known)
            engine_tell_pending(engine, run);
    }
    for (uint32_t i = 0; first == 0 && i < step->n_commits; i++)
        if (step->commits[i]->error == 0)
            engine_tell_pending(engine, step->commits[i]);
    atomic_fetch_add_explicit(&engine->progress, 1, memory_order_relaxed);
}

/* Runs that are to stop do so before the next layer; the commands stay queued for what is left to do between steps. */
void engine_between_layers(void *context)
{
    struct engine *engine = context;
    uint32_t n_stops = atomic_load_explicit(&engine->n_stops, memory_order_acquire);
    if (n_stops == engine->n_stops_seen)
        return;
    engine->n_stops_seen = n_stops;
    pthread_mutex_lock(&engine->lock);
    for (const struct engine_command *command = engine->work.first; command != NULL; command = command->next)
        for (struct run *run = engine->runs; run != NULL; run = run->next)
            if ((command->kind == ENGINE_STOP && run->request->work == command->work) ||
                (command->kind == ENGINE_FORGET && run->request->session == command->session))
                run_fail(run, -ECANCELED, "cancelled");
    pthread_mutex_unlock(&engine->lock);
}

/* ---- after it ---- */

static void count_time(struct session *session, const struct step *step, uint64_t step_us)
{
    struct session_counts *counts = &session->counts;
    uint64_t parts = step->select_us + step->attention_us + step->wait_us;
    counts->select_us += step->select_us;
    counts->attention_us += step->attention_us;
    counts->store_wait_us += step->wait_us;
    counts->step_us += step_us;
    counts->matmul_us += step_us > parts ? step_us - parts : 0;
}

static void take_row(struct engine *engine, uint32_t i, uint64_t step_us)
{
    struct step *step = engine->step;
    const struct step_row *row = &step->rows[i];
    struct run *run = row->run;
    bool is_last = i + 1 == step->n_rows || step->rows[i + 1].run != run;
    if (run->error != 0)
        return;
    run->position = row->position + 1;
    run->session->n_rows = run->position;
    if (row->is_decode)
        run->n_decode++;
    else
        run->n_prefill++;
    if (is_last && row->is_decode) {
        run->decode_us += step_us;
        run->store_wait_us += step->wait_us;
        count_time(run->session, step, step_us);
    } else if (is_last) {
        run->prefill_us += step_us;
        struct engine_event *event = engine_new_event(engine, ENGINE_PROGRESS, run);
        if (event != NULL) {
            event->n_done = run->position;
            event->n_total = run->first_decode < run->goal ? run->first_decode : run->goal;
        }
        engine_tell(engine, event);
    }
    uint32_t id;
    if (row->wants_logits && step_chose(step, i, &id))
        engine_take_token(engine, run, id);
    else if (row->wants_logits)
        engine_take_logits(engine, run, row->position, step_logits(step, i));
}

/* Smoothed, so that one disturbed step does not count for much. */
static void learn(struct engine *engine, uint64_t step_us)
{
    const struct step *step = engine->step;
    uint32_t n_prefill = step->n_rows - step->n_decode;
    double share = 0.25, us = (double)step_us;
    if (n_prefill == 0 && step->n_decode > 0)
        engine->decode_step_us += share * (us - engine->decode_step_us);
    if (n_prefill < MIN_PREFILL_ROWS)
        return;
    double row_us = (us - (step->n_decode > 0 ? engine->decode_step_us : 0)) / n_prefill;
    if (row_us > 0)
        engine->prefill_row_us += engine->prefill_row_us > 0 ? share * (row_us - engine->prefill_row_us) : row_us;
}

int engine_step(struct engine *engine)
{
    struct step *step = engine->step;
    struct budget budget = step_budget(engine);
    step_clear(step);
    for (struct run *run = engine->runs; run != NULL; run = run->next)
        if (run->is_prepared && run->error == 0)
            add_to_step(engine, run, &budget);
    if (step->n_rows == 0 && step->n_commits == 0)
        return 0;
    uint64_t start = clock_now_us();
    int r = step_run(step, on_journaled, engine);
    if (r == -ECONNRESET || engine_device_check(engine, r) == -ENODEV)
        return r;
    uint64_t step_us = clock_now_us() - start;
    if (r == 0)
        learn(engine, step_us);
    for (uint32_t i = 0; i < step->n_rows; i++) {
        if (r < 0)
            run_fail(step->rows[i].run, r, "%s",
                     r == -ETIMEDOUT ? "a value-store did not come back in time" : engine_device_sentence(engine, r));
        take_row(engine, i, step_us);
    }
    for (uint32_t i = 0; i < step->n_commits && r < 0; i++)
        run_fail(step->commits[i], r, "the last token could not be committed: %s", strerror(-r));
    for (uint32_t i = 0; i < step->n_commits; i++)
        if (step->commits[i]->error == 0)
            step->commits[i]->is_finished = true;
    atomic_fetch_add_explicit(&engine->n_tokens, step->n_rows, memory_order_relaxed);
    atomic_fetch_add_explicit(&engine->progress, 1, memory_order_relaxed);
    return 0;
}
