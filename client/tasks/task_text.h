/*
 * task_text.h - what the tasks are made of: a text that grows, random choices, words, sentences.
 *
 * Threads    one text or choice belongs to one thread; words are constant.
 */
#pragma once

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TASK_TEXT_KEY_SIZE 48u

/* ---- choices ---- */

struct task_text_random {
    uint64_t state;
};

uint64_t task_text_random(struct task_text_random *random);        /* uniform over 64 bits */
size_t task_text_below(struct task_text_random *random, size_t n); /* 0 .. n - 1; n at least 1 */
/* The numbers 0 .. n - 1 in a random order: malloc'd. NULL: no memory. */
size_t *task_text_order(struct task_text_random *random, size_t n);
/* k of 0 .. n, ascending; equal ones may come. */
void task_text_places(struct task_text_random *random, size_t n, size_t k, size_t *ret_places);

/* ---- a text ---- */

struct task_text {
    char *bytes; /* ends with NUL unless NULL */
    size_t n_bytes, size;
    bool no_memory; /* what was added since is lost */
};

void task_text_add(struct task_text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- words ---- */

size_t task_text_n_words(void);
const char *task_text_word(size_t i); /* common nouns, all different; i below task_text_n_words() */

/* The i-th of many keys, all different: a word, or two with a hyphen once there are no more. */
void task_text_key(size_t i, char ret_key[TASK_TEXT_KEY_SIZE]);

/* The i-th sentence of an even text about nothing that is ever asked for; they come again. */
const char *task_text_filler(size_t i);
