/*
 * eval_tasks.h - tasks with known answers (client/tasks) on the real service: full attention and each preset answer greedily.
 *
 * A session with policy full takes the prompt but for its last tokens, once. It answers itself; then a fork of it for each
 * preset does, which decodes the rest of the prompt one step each: the question too is read as the preset reads.
 *
 * Owner      `hcattn eval`; eval_tasks_fini() frees all. Threads: the main thread.
 */
#pragma once

#include "client/hcattn.h"
#include "client/tasks/task.h"

#include <jansson.h>
#include <stdbool.h>

#define EVAL_TASKS_MIN_FULL 0.5 /* where full attention scores less, its score is luck: no preset is judged by it */

/* A task at a length with a preset: sums over its samples. */
struct eval_tasks_row {
    const struct task *task;
    uint32_t length;
    char *preset;
    uint32_t n_samples; /* that were done */
    uint64_t n_tokens;  /* of their prompts */
    double full, score; /* sums of shares */
};

struct eval_tasks {
    const struct task **tasks;
    size_t n_tasks;
    uint32_t *lengths;
    size_t n_lengths;
    struct eval_tasks_row *rows; /* by length, task, preset */
    size_t n_rows;
};

/* "all", or names with commas between them. -EINVAL: *ret_wrong says which name is none (up to the next comma); -ENOMEM. */
int eval_tasks_add(struct eval_tasks *tasks, const char *list, const char **ret_wrong);
/* "512,1k,4096" tokens; k is 1024. -EINVAL: no such list, or a length that is not 256 .. 4194304; -ENOMEM. */
int eval_tasks_add_lengths(struct eval_tasks *tasks, const char *list);
/* Is there a preset that a session can have, beside full? */
bool eval_tasks_has_policy(const char *const *presets, size_t n_presets);
void eval_tasks_fini(struct eval_tasks *tasks);

/*
 * Runs all: n_samples of each task and length. Presets that no session can have (baselines) are left out, and "all" are the presets
 * that policy_preset() lists. A task that does not fit into a length is left out, which is told on stderr, as is a preset that
 * does not work. Errors of the calls that all need: rows stay with the samples that were done.
 */
int eval_tasks_run(struct eval_tasks *tasks, struct hcattn *client, const char *name, const char *const *presets,
                   size_t n_presets, uint32_t n_samples, struct hcattn_error *ret_error);

/* Whether full attention can do what the row is about. */
bool eval_tasks_judged(const struct eval_tasks_row *row);

/* eval_tasks_report.c: a table to standard output; for JSON an array, a new reference, NULL: no memory. */
void eval_tasks_table(const struct eval_tasks *tasks);
json_t *eval_tasks_json(const struct eval_tasks *tasks);
