/* task.c - see task.h: the table, scores. */
#include "client/tasks/task.h"
#include "client/tasks/task_kinds.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const struct {
    struct task task;
    task_kinds_maker make;
} kinds[] = {
    {{"niah_single", "a number in a text about other things", 16, 1}, task_kinds_niah_single},
    {{"niah_multikey_2", "one number of a text of nothing but numbers", 16, 4}, task_kinds_niah_multikey_2},
    {{"niah_multikey_3", "one of many codes that have codes as names", 64, 3}, task_kinds_niah_multikey_3},
    {{"niah_multivalue", "four numbers of one name in a text about other things", 64, 1}, task_kinds_niah_multivalue},
    {{"vt", "the variables of a chain of assignments", 48, 1}, task_kinds_vt},
    {{"cwe", "the ten words that come more often than the others", 64, 50}, task_kinds_cwe},
    {{"fwe", "the three most frequent of many made-up words", 32, 30}, task_kinds_fwe},
    {{"kv", "the value of one key of a list", 8, 4}, task_kinds_kv},
    {{"copy", "a quotation is said again", 48, 1}, task_kinds_copy},
};
#define N_KINDS (sizeof(kinds) / sizeof(kinds[0]))

const struct task *task_at(size_t i)
{
    return i < N_KINDS ? &kinds[i].task : NULL;
}

const struct task *task_find(const char *name)
{
    for (size_t i = 0; i < N_KINDS; i++)
        if (strcmp(kinds[i].task.name, name) == 0)
            return &kinds[i].task;
    return NULL;
}

static task_kinds_maker maker(const struct task *task)
{
    for (size_t i = 0; i < N_KINDS; i++)
        if (task == &kinds[i].task)
            return kinds[i].make;
    return NULL;
}

void task_kinds_expect(struct task_sample *sample, const char *answer)
{
    assert(sample->n_answers < TASK_MAX_ANSWERS);
    snprintf(sample->answers[sample->n_answers++], TASK_ANSWER_SIZE, "%s", answer);
}

int task_make(const struct task *task, uint64_t seed, size_t size, struct task_sample *ret_sample)
{
    struct task_sample sample = {.n_answers = 0};
    struct task_text text = {.n_bytes = 0};
    struct task_text_random random = {.state = seed};
    assert(maker(task) && size >= task->n_min);
    int result = maker(task)(&random, size, &text, &sample);
    if (!result && text.no_memory)
        result = -ENOMEM;
    if (result < 0) {
        free(text.bytes);
        return result;
    }
    sample.prompt = text.bytes;
    *ret_sample = sample;
    return 0;
}

void task_sample_fini(struct task_sample *sample)
{
    free(sample->prompt);
    *sample = (struct task_sample){.n_answers = 0};
}

double task_score(const struct task_sample *sample, const char *text)
{
    size_t n_found = 0;
    for (size_t i = 0; i < sample->n_answers; i++)
        n_found += strcasestr(text, sample->answers[i]) != NULL;
    return sample->n_answers ? (double)n_found / (double)sample->n_answers : 0;
}
