/* eval_tasks.c - see eval_tasks.h: what was asked for, and running it. */
#include "client/command/eval_tasks.h"
#include "client/command/command.h"
#include "client/command/job.h"
#include "client/command/output.h"
#include "common/clock.h"
#include "proto/policy.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define CALL_MS      600000u
#define CLOSE_MS     5000u
#define IDLE_S       600u /* of a session that we could not close */
#define BLOCK_TOKENS 64u
#define MIN_REST     16u /* tokens of the prompt that are decoded under the preset, at least */
#define MIN_LENGTH   256u
#define MAX_LENGTH   4194304u

/* ---- what was asked for ---- */

void eval_tasks_fini(struct eval_tasks *tasks)
{
    for (size_t i = 0; i < tasks->n_rows; i++)
        free(tasks->rows[i].preset);
    free(tasks->rows);
    free(tasks->tasks);
    free(tasks->lengths);
    *tasks = (struct eval_tasks){.n_rows = 0};
}

static int add_task(struct eval_tasks *tasks, const struct task *task)
{
    for (size_t i = 0; i < tasks->n_tasks; i++)
        if (tasks->tasks[i] == task)
            return 0;
    const struct task **grown = realloc(tasks->tasks, (tasks->n_tasks + 1) * sizeof(*grown));
    if (!grown)
        return -ENOMEM;
    tasks->tasks = grown;
    grown[tasks->n_tasks++] = task;
    return 0;
}

int eval_tasks_add(struct eval_tasks *tasks, const char *list, const char **ret_wrong)
{
    int result = 0;
    if (strcmp(list, "all") == 0) {
        for (size_t i = 0; !result && task_at(i); i++)
            result = add_task(tasks, task_at(i));
        return result;
    }
    for (const char *at = list;; at++) {
        char name[32] = "";
        size_t n = strcspn(at, ",");
        if (n < sizeof(name))
            memcpy(name, at, n);
        const struct task *task = task_find(name);
        if (!task) {
            *ret_wrong = at;
            return -EINVAL;
        }
        result = add_task(tasks, task);
        at += n;
        if (result < 0 || !*at)
            return result;
    }
}

int eval_tasks_add_lengths(struct eval_tasks *tasks, const char *list)
{
    for (const char *at = list;; at++) {
        char *end;
        if (*at < '0' || *at > '9')
            return -EINVAL;
        errno = 0;
        unsigned long long length = strtoull(at, &end, 10);
        if (errno || length > MAX_LENGTH)
            return -EINVAL;
        if (*end == 'k' || *end == 'K') {
            length *= 1024;
            end++;
        }
        if ((*end && *end != ',') || length < MIN_LENGTH || length > MAX_LENGTH)
            return -EINVAL;
        uint32_t *grown = realloc(tasks->lengths, (tasks->n_lengths + 1) * sizeof(*grown));
        if (!grown)
            return -ENOMEM;
        tasks->lengths = grown;
        grown[tasks->n_lengths++] = (uint32_t)length;
        if (!*end)
            return 0;
        at = end;
    }
}

static int add_row(struct eval_tasks *tasks, const struct task *task, uint32_t length, const char *preset)
{
    struct eval_tasks_row *grown = realloc(tasks->rows, (tasks->n_rows + 1) * sizeof(*grown));
    if (!grown)
        return -ENOMEM;
    tasks->rows = grown;
    grown[tasks->n_rows] = (struct eval_tasks_row){.task = task, .length = length, .preset = strdup(preset)};
    if (!grown[tasks->n_rows].preset)
        return -ENOMEM;
    tasks->n_rows++;
    return 0;
}

static bool is_policy(const char *preset)
{
    struct policy_terms terms;
    char sentence[256];
    return policy_parse(preset, &terms, sentence, sizeof(sentence)) == 0 && terms.selector != POLICY_SELECTOR_FULL;
}

bool eval_tasks_has_policy(const char *const *presets, size_t n_presets)
{
    for (size_t i = 0; i < n_presets; i++)
        if (strcmp(presets[i], "all") == 0 || is_policy(presets[i]))
            return true;
    return false;
}

/* Rows of a task at a length, one for each preset that a session can have; "all" may be among them. */
static int add_rows(struct eval_tasks *tasks, const struct task *task, uint32_t length, const char *const *presets,
                    size_t n_presets)
{
    const char *meaning, *name;
    int result = 0;
    for (size_t i = 0; !result && i < n_presets; i++) {
        bool all = strcmp(presets[i], "all") == 0;
        for (uint32_t k = 0; !result && all && (name = policy_preset(k, &meaning)) != NULL; k++)
            if (is_policy(name))
                result = add_row(tasks, task, length, name);
        if (!result && !all && is_policy(presets[i]))
            result = add_row(tasks, task, length, presets[i]);
    }
    return result;
}

bool eval_tasks_judged(const struct eval_tasks_row *row)
{
    return row->n_samples && row->full >= EVAL_TASKS_MIN_FULL * row->n_samples;
}

/* ---- running ---- */

struct context {
    struct hcattn *client;
    const char *name; /* of the subcommand */
    struct hcattn_error *error;
    struct job_progress progress;
    char phase[64];
    double done, share; /* of all; of this sample */
    uint64_t start_us;
    const struct hcattn_tokens *prompt;
    const struct task_sample *sample;
    uint64_t n_shared; /* first tokens of the prompt that the session took */
    struct {
        char text[4096];
        size_t n_bytes;
    } answer;
};

/* `part` of this sample is done. */
static void show(struct context *run, double part)
{
    double done = run->done + run->share * part;
    double left_us = done > 0.01 ? (double)(clock_now_us() - run->start_us) * (1 - done) / done : 0;
    job_show(&run->progress, run->phase, done, left_us > 0 ? (uint64_t)left_us : 0);
}

static int count_tokens(void *context, const char *text, size_t *ret_n_tokens)
{
    struct context *run = context;
    struct hcattn_tokens tokens;
    struct hcattn_input input = {.text = text};
    int result = hcattn_tokenize(run->client, &input, CALL_MS, &tokens, run->error);
    if (result < 0)
        return result;
    *ret_n_tokens = tokens.n_ids;
    hcattn_tokens_free(&tokens);
    return 0;
}

static int on_prefill(void *context, uint64_t n_done, uint64_t n_total)
{
    struct context *run = context;
    show(run, n_total ? (double)n_done / (double)n_total / 2 : 0);
    return 0;
}

static int on_generated(void *context, const struct hcattn_generated *generated)
{
    struct context *run = context;
    size_t room = sizeof(run->answer.text) - 1 - run->answer.n_bytes;
    size_t n = generated->text_bytes < room ? generated->text_bytes : room;
    if (n)
        memcpy(run->answer.text + run->answer.n_bytes, generated->text, n);
    run->answer.n_bytes += n;
    run->answer.text[run->answer.n_bytes] = '\0';
    return 0;
}

/* Answers in a session that holds n_shared tokens of the prompt; in a fork (`decode`) the rest of them is decoded. */
static int answer(struct context *run, const struct task *task, uint64_t session, bool decode, double *ret_score)
{
    static const char *const line_end[] = {"\n"}; /* every answer is one line; what comes then is not asked for */
    struct hcattn_input rest = {
        .ids = run->prompt->ids + run->n_shared, .n_ids = run->prompt->n_ids - run->n_shared, .no_bos = true};
    int result = 0;
    run->answer.n_bytes = 0;
    run->answer.text[0] = '\0';
    if (decode) {
        struct hcattn_score score = {.session = session, .at = run->n_shared, .from = run->n_shared, .input = rest};
        result = hcattn_score(run->client, &score, NULL, CALL_MS, NULL, run->error);
        if (result < 0)
            return result;
    }
    struct hcattn_generate generate = {.session = session,
                                       .at = decode ? run->prompt->n_ids : run->n_shared,
                                       .max_tokens = task->max_tokens,
                                       .stop = line_end,
                                       .n_stop = 1};
    if (!decode)
        generate.input = rest;
    struct hcattn_events events = {.context = run, .generated = on_generated};
    struct hcattn_finished finished;
    result = hcattn_generate(run->client, &generate, &events, CALL_MS, &finished, run->error);
    if (!result)
        *ret_score = task_score(run->sample, run->answer.text);
    return result;
}

static int answer_in_fork(struct context *run, const struct task *task, uint64_t source, const char *policy,
                          double *ret_score)
{
    struct hcattn_fork fork = {
        .session = source, .n_tokens = run->n_shared, .ephemeral = true, .idle_timeout_s = IDLE_S, .policy = policy};
    struct hcattn_forked forked;
    int result = hcattn_fork(run->client, &fork, CALL_MS, &forked, run->error);
    if (result < 0)
        return result;
    result = answer(run, task, forked.session, true, ret_score);
    struct hcattn_error ignored;
    hcattn_close_session(run->client, forked.session, CLOSE_MS, NULL, &ignored);
    return result;
}

/* Whatever else comes is of one policy. */
static bool ends_all(int result)
{
    return result == -ECANCELED || result == -ENOTCONN || result == -ETIMEDOUT || result == -EPROTO;
}

static int answer_all(struct context *run, uint64_t session, struct eval_tasks_row *rows, size_t n_rows)
{
    double full = 0, score = 0;
    int result = answer(run, rows[0].task, session, false, &full);
    for (size_t i = 0; !result && i < n_rows; i++) {
        struct eval_tasks_row *row = &rows[i];
        show(run, 0.5 + 0.5 * (double)(i + 1) / (double)(n_rows + 1));
        int of_policy = answer_in_fork(run, row->task, session, row->preset, &score);
        if (of_policy < 0 && ends_all(of_policy))
            return of_policy;
        if (of_policy < 0) {
            output_progress(false, "%s", "");
            command_fail(0, run->name, "%s of %" PRIu32 " tokens with %s: %s", row->task->name, row->length,
                         row->preset, run->error->sentence);
            continue;
        }
        row->n_samples++;
        row->n_tokens += run->prompt->n_ids;
        row->full += full;
        row->score += score;
    }
    return result;
}

static int run_prompt(struct context *run, struct eval_tasks_row *rows, size_t n_rows)
{
    /* Exact tokens would hide what is measured in a short context. */
    struct hcattn_session_config config = {
        .policy = "full", .exact_tokens = HCATTN_EXACT_NONE, .ephemeral = true, .idle_timeout_s = IDLE_S};
    struct hcattn_session session;
    int result = hcattn_open_session(run->client, &config, CALL_MS, &session, run->error);
    if (result < 0)
        return result;
    struct hcattn_input input = {.ids = run->prompt->ids, .n_ids = (size_t)run->n_shared, .no_bos = true};
    struct hcattn_events events = {.context = run, .progress = on_prefill};
    result = hcattn_append(run->client, session.session, &input, 0, &events, CALL_MS, NULL, run->error);
    if (!result)
        result = answer_all(run, session.session, rows, n_rows);
    struct hcattn_error ignored;
    hcattn_close_session(run->client, session.session, CLOSE_MS, NULL, &ignored);
    return result;
}

/* Every task, length and sample has a seed of its own, whatever else is asked for. */
static uint64_t seed_of(const struct eval_tasks_row *row, uint32_t sample)
{
    uint64_t seed = UINT64_C(0xcbf29ce484222325); /* FNV-1a */
    for (const char *c = row->task->name; *c; c++)
        seed = (seed ^ (uint8_t)*c) * UINT64_C(0x100000001b3);
    return (seed ^ row->length) * UINT64_C(0x100000001b3) + sample;
}

/* 1: no prompt of this length. */
static int run_sample(struct context *run, struct eval_tasks_row *rows, size_t n_rows, uint32_t i_sample)
{
    const struct task *task = rows[0].task;
    struct task_sample sample;
    struct hcattn_tokens tokens;
    size_t n_tokens;
    run->error->code = HCATTN_OK;
    int result = task_fit(task, seed_of(&rows[0], i_sample), rows[0].length - task->max_tokens, count_tokens, run,
                          &sample, &n_tokens);
    if (result == -E2BIG && run->error->code == HCATTN_OK) {
        output_progress(false, "%s", "");
        command_fail(0, run->name, "%s does not fit into %" PRIu32 " tokens", task->name, rows[0].length);
        return 1;
    }
    if (result == -ENOMEM && run->error->code == HCATTN_OK)
        snprintf(run->error->sentence, sizeof(run->error->sentence), "no memory for a task");
    if (result < 0)
        return result;
    struct hcattn_input input = {.text = sample.prompt};
    result = hcattn_tokenize(run->client, &input, CALL_MS, &tokens, run->error);
    if (!result) {
        run->prompt = &tokens;
        run->sample = &sample;
        run->n_shared = tokens.n_ids > MIN_REST ? (tokens.n_ids - MIN_REST) / BLOCK_TOKENS * BLOCK_TOKENS : 0;
        if (run->n_shared)
            result = run_prompt(run, rows, n_rows);
        hcattn_tokens_free(&tokens);
    }
    task_sample_fini(&sample);
    return result;
}

/* Can full attention still come to be judged with n_left more samples? */
static bool has_chance(const struct eval_tasks_row *rows, size_t n_rows, uint32_t n_left)
{
    for (size_t i = 0; i < n_rows; i++)
        if (rows[i].full + n_left >= EVAL_TASKS_MIN_FULL * (rows[i].n_samples + n_left))
            return true;
    return false;
}

/* All samples of a task at a length; fewer where full attention has no chance. */
static int run_rows(struct context *run, struct eval_tasks_row *rows, size_t n_rows, uint32_t n_samples)
{
    double end = run->done + run->share;
    int result = 0;
    run->share /= n_samples;
    for (uint32_t i = 0; result == 0 && i < n_samples && has_chance(rows, n_rows, n_samples - i); i++) {
        snprintf(run->phase, sizeof(run->phase), "%s, %" PRIu32 " tokens", rows[0].task->name, rows[0].length);
        show(run, 0);
        result = run_sample(run, rows, n_rows, i);
        run->done += run->share;
    }
    run->done = end;
    return result < 0 ? result : 0;
}

int eval_tasks_run(struct eval_tasks *tasks, struct hcattn *client, const char *name, const char *const *presets,
                   size_t n_presets, uint32_t n_samples, struct hcattn_error *ret_error)
{
    struct context run = {.client = client, .name = name, .error = ret_error, .start_us = clock_now_us()};
    double n_tokens = 0;
    int result = 0;
    *ret_error = (struct hcattn_error){.code = HCATTN_OK};
    job_events(&run.progress, "tasks");
    for (size_t i = 0; i < tasks->n_lengths; i++)
        n_tokens += (double)tasks->n_tasks * tasks->lengths[i];
    for (size_t i = 0; !result && i < tasks->n_lengths; i++)
        for (size_t k = 0; !result && k < tasks->n_tasks; k++) {
            size_t first = tasks->n_rows;
            result = add_rows(tasks, tasks->tasks[k], tasks->lengths[i], presets, n_presets);
            if (result < 0)
                snprintf(ret_error->sentence, sizeof(ret_error->sentence), "no memory for the tasks");
            run.share = tasks->lengths[i] / n_tokens;
            if (!result && tasks->n_rows > first)
                result = run_rows(&run, &tasks->rows[first], tasks->n_rows - first, n_samples);
        }
    output_progress(false, "%s", "");
    return result;
}
