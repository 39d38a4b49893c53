/*
 * task_kinds.h - the makers behind the table of tasks; task.c calls them, nobody else.
 *
 * A maker writes the prompt into `text` and the expected answers into the sample; size is as its task counts. What does not fit
 * into memory shows in text->no_memory, or in -ENOMEM.
 */
#pragma once

#include "client/tasks/task.h"
#include "client/tasks/task_text.h"

typedef int (*task_kinds_maker)(struct task_text_random *random, size_t size, struct task_text *text,
                                struct task_sample *sample);

/* task_kinds_find.c: something that was said once is asked for. */
int task_kinds_niah_single(struct task_text_random *random, size_t size, struct task_text *text,
                           struct task_sample *sample);
int task_kinds_niah_multikey_2(struct task_text_random *random, size_t size, struct task_text *text,
                               struct task_sample *sample);
int task_kinds_niah_multikey_3(struct task_text_random *random, size_t size, struct task_text *text,
                               struct task_sample *sample);
int task_kinds_niah_multivalue(struct task_text_random *random, size_t size, struct task_text *text,
                               struct task_sample *sample);
int task_kinds_kv(struct task_text_random *random, size_t size, struct task_text *text, struct task_sample *sample);
int task_kinds_copy(struct task_text_random *random, size_t size, struct task_text *text, struct task_sample *sample);

/* task_kinds_gather.c: what is asked for stands at many places. */
int task_kinds_vt(struct task_text_random *random, size_t size, struct task_text *text, struct task_sample *sample);
int task_kinds_cwe(struct task_text_random *random, size_t size, struct task_text *text, struct task_sample *sample);
int task_kinds_fwe(struct task_text_random *random, size_t size, struct task_text *text, struct task_sample *sample);

/* One more expected answer; at most TASK_MAX_ANSWERS. */
void task_kinds_expect(struct task_sample *sample, const char *answer);
