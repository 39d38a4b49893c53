/* eval_tasks_report.c - see eval_tasks.h: scores as a table and as JSON. */
#include "client/command/eval_tasks.h"
#include "client/command/output.h"
#include "client/command/report.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CELL 13 /* "0.750 -0.250" */

static double full(const struct eval_tasks_row *row)
{
    return row->full / row->n_samples;
}

static double score(const struct eval_tasks_row *row)
{
    return row->score / row->n_samples;
}

/* ---- the summary ---- */

/* Of one preset over the tasks and lengths that full attention can do. */
struct mean {
    const char *preset;
    size_t n_rows;
    double full, score, worst; /* worst: the lowest delta */
};

static struct mean *find(struct mean *means, size_t *n_means, const char *preset)
{
    for (size_t i = 0; i < *n_means; i++)
        if (strcmp(means[i].preset, preset) == 0)
            return &means[i];
    means[*n_means] = (struct mean){.preset = preset};
    return &means[(*n_means)++];
}

/* In the order in which the presets came: malloc'd; NULL: no memory, or no rows. */
static struct mean *make_means(const struct eval_tasks *tasks, size_t *ret_n_means)
{
    struct mean *means = tasks->n_rows ? calloc(tasks->n_rows, sizeof(*means)) : NULL;
    size_t n_means = 0;
    for (size_t i = 0; means && i < tasks->n_rows; i++) {
        const struct eval_tasks_row *row = &tasks->rows[i];
        struct mean *mean = find(means, &n_means, row->preset);
        if (!eval_tasks_judged(row))
            continue;
        double delta = score(row) - full(row);
        mean->worst = mean->n_rows == 0 || delta < mean->worst ? delta : mean->worst;
        mean->n_rows++;
        mean->full += full(row);
        mean->score += score(row);
    }
    for (size_t i = 0; i < n_means; i++) {
        if (means[i].n_rows) {
            means[i].full /= (double)means[i].n_rows;
            means[i].score /= (double)means[i].n_rows;
        }
    }
    *ret_n_means = n_means;
    return means;
}

/* ---- the table ---- */

static int width_of(const char *preset)
{
    size_t n = strlen(preset);
    return n < CELL ? CELL : (int)n;
}

static void show_cell(const char *preset, double of_full, double of_preset)
{
    char text[32];
    double delta = of_preset - of_full;
    if (delta > -0.0005 && delta < 0.0005)
        snprintf(text, sizeof(text), "%.3f", of_preset);
    else
        snprintf(text, sizeof(text), "%.3f %+.3f", of_preset, delta);
    output_format("  %-*s", width_of(preset), text);
}

static bool is_same(const struct eval_tasks_row *a, const struct eval_tasks_row *b)
{
    return a->task == b->task && a->length == b->length;
}

/* The rows of a task at a length are one line; returns how many they are. */
static size_t show_line(const struct eval_tasks *tasks, size_t first)
{
    const struct eval_tasks_row *rows = &tasks->rows[first], *any = rows;
    size_t n = 0, n_left = tasks->n_rows - first;
    for (; n < n_left && is_same(&rows[n], rows); n++)
        any = rows[n].n_samples > any->n_samples ? &rows[n] : any;
    if (!any->n_samples)
        return n;
    output_format("%-16s %7" PRIu32 " %7" PRIu32 "  %.3f", any->task->name, any->length, any->n_samples, full(any));
    for (size_t i = 0; eval_tasks_judged(any) && i < n; i++) {
        if (rows[i].n_samples)
            show_cell(rows[i].preset, full(&rows[i]), score(&rows[i]));
        else
            output_format("  %-*s", width_of(rows[i].preset), "-");
    }
    output_text(eval_tasks_judged(any) ? "\n" : "  full attention cannot do it\n");
    return n;
}

void eval_tasks_table(const struct eval_tasks *tasks)
{
    size_t n_means = 0;
    struct mean *means = make_means(tasks, &n_means);
    if (!means)
        return;
    output_format("tasks: share of the expected answers that were given, and what it differs from full attention's\n"
                  "%-16s %7s %7s  %-5s",
                  "TASK", "TOKENS", "SAMPLES", "FULL");
    for (size_t i = 0; i < n_means; i++)
        output_format("  %-*s", width_of(means[i].preset), means[i].preset);
    output_text("\n");
    for (size_t i = 0; i < tasks->n_rows;)
        i += show_line(tasks, i);
    bool any = false;
    for (size_t i = 0; i < n_means; i++)
        any |= means[i].n_rows > 0;
    if (!any) {
        free(means);
        return;
    }
    output_format("%-32s  %.3f", "mean of what full attention can", means[0].full);
    for (size_t i = 0; i < n_means; i++)
        show_cell(means[i].preset, means[i].full, means[i].score);
    output_text("\n");
    free(means);
}

/* ---- JSON ---- */

json_t *eval_tasks_json(const struct eval_tasks *tasks)
{
    json_t *list = json_array();
    for (size_t i = 0; list && i < tasks->n_rows; i++) {
        const struct eval_tasks_row *row = &tasks->rows[i];
        if (!row->n_samples)
            continue;
        json_array_append_new(list, json_pack("{s:s,s:I,s:f,s:I,s:o,s:f,s:f,s:f,s:b}",                 //
                                              "task", row->task->name,                                 //
                                              "length", (json_int_t)row->length,                       //
                                              "prompt_tokens", (double)row->n_tokens / row->n_samples, //
                                              "samples", (json_int_t)row->n_samples,                   //
                                              "preset", report_text(row->preset),                      //
                                              "full", full(row),                                       //
                                              "score", score(row),                                     //
                                              "delta", score(row) - full(row),                         //
                                              "full_can", eval_tasks_judged(row)));
    }
    return list;
}
