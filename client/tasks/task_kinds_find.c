/* task_kinds_find.c - see task_kinds.h: tasks that ask for something that was said once. */
#include "client/tasks/task_kinds.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_EXAMPLES 3u /* solved questions before the one that counts */
#define N_VALUES     4u /* of niah_multivalue: as in the paper */
#define CODE_SIZE    40u

static unsigned digits(struct task_text_random *random, unsigned smallest)
{
    return smallest + (unsigned)task_text_below(random, 9u * smallest); /* always as many digits as the smallest */
}

/* Needles that a haystack hides. */
struct needles {
    char text[N_VALUES][TASK_ANSWER_SIZE * 2];
    size_t n;
};

/* n filler sentences with the needles at random places, in their order. */
static void haystack(struct task_text_random *random, struct task_text *text, size_t n, const struct needles *needles)
{
    size_t places[N_VALUES], k = 0;
    const char *space = ""; /* before all but the first */
    task_text_places(random, n, needles->n, places);
    for (size_t i = 0; i <= n; i++) {
        for (; k < needles->n && places[k] == i; k++, space = " ")
            task_text_add(text, "%s%s", space, needles->text[k]);
        if (i < n)
            task_text_add(text, "%s%s", space, task_text_filler(i));
        space = " ";
    }
}

int task_kinds_niah_single(struct task_text_random *random, size_t size, struct task_text *text,
                           struct task_sample *sample)
{
    const char *key = task_text_word(task_text_below(random, task_text_n_words()));
    char number[TASK_ANSWER_SIZE];
    struct needles needles = {.n = 1};
    snprintf(number, sizeof(number), "%u", digits(random, 1000000));
    snprintf(needles.text[0], sizeof(needles.text[0]), "The secret number for %s is %s.", key, number);
    task_text_add(text, "A secret number is hidden in the following text. Remember it.\n\n");
    haystack(random, text, size, &needles);
    task_text_add(text,
                  "\n\nQuestion: What is the secret number for %s in the text above?\n"
                  "Answer: The secret number for %s is",
                  key, key);
    task_kinds_expect(sample, number);
    return 0;
}

int task_kinds_niah_multivalue(struct task_text_random *random, size_t size, struct task_text *text,
                               struct task_sample *sample)
{
    const char *key = task_text_word(task_text_below(random, task_text_n_words()));
    struct needles needles = {.n = N_VALUES};
    for (size_t i = 0; i < N_VALUES; i++) {
        char number[TASK_ANSWER_SIZE];
        snprintf(number, sizeof(number), "%u", digits(random, 1000000));
        snprintf(needles.text[i], sizeof(needles.text[i]), "One of the secret numbers for %s is %s.", key, number);
        task_kinds_expect(sample, number);
    }
    task_text_add(text, "Four secret numbers are hidden in the following text. Remember them.\n\n");
    haystack(random, text, size, &needles);
    task_text_add(text,
                  "\n\nQuestion: What are the four secret numbers for %s in the text above?\n"
                  "Answer: The four secret numbers for %s are",
                  key, key);
    return 0;
}

/* ---- lists ---- */

struct pair {
    char key[TASK_TEXT_KEY_SIZE];
    char value[CODE_SIZE];
};

/* In the form of a version 4 UUID (RFC 9562, section 5.4). */
static void code(struct task_text_random *random, char ret_code[CODE_SIZE])
{
    uint64_t a = task_text_random(random), b = task_text_random(random);
    snprintf(ret_code, CODE_SIZE, "%08x-%04x-4%03x-%04x-%012llx", (unsigned)(a >> 32), (unsigned)(a >> 16) & 0xffff,
             (unsigned)a & 0xfff, 0x8000u | ((unsigned)(b >> 48) & 0x3fff),
             (unsigned long long)(b & UINT64_C(0xffffffffffff)));
}

/* n pairs with different keys; smallest: of the numbers, 0: keys and values are codes. NULL: no memory. */
static struct pair *make_pairs(struct task_text_random *random, size_t n, unsigned smallest)
{
    size_t n_keys = n > task_text_n_words() ? n : task_text_n_words();
    size_t *keys = task_text_order(random, n_keys);
    struct pair *pairs = calloc(n, sizeof(*pairs));
    for (size_t i = 0; keys && pairs && i < n; i++) {
        if (smallest) {
            task_text_key(keys[i], pairs[i].key);
            snprintf(pairs[i].value, CODE_SIZE, "%u", digits(random, smallest));
            continue;
        }
        code(random, pairs[i].key);
        code(random, pairs[i].value);
    }
    free(keys);
    if (keys)
        return pairs;
    free(pairs);
    return NULL;
}

/* Different pairs to ask for: n_examples and then the one that counts. */
static void choose(struct task_text_random *random, size_t n, size_t n_examples, size_t ret_asked[MAX_EXAMPLES + 1])
{
    for (size_t i = 0; i <= n_examples;) {
        size_t k = task_text_below(random, n), known = 0;
        for (size_t j = 0; j < i; j++)
            known += ret_asked[j] == k;
        if (!known)
            ret_asked[i++] = k;
    }
}

/* How a list is written: a line is `before` KEY `between` VALUE `after`, and so is an answer. */
struct list_form {
    unsigned smallest; /* as in make_pairs() */
    size_t n_examples;
    const char *heading, *before, *between, *after;
    const char *questions;             /* between the list and what is asked */
    const char *question, *answer_end; /* before a KEY that is asked for, or NULL: it is only begun; behind a VALUE */
};

static void ask(struct task_text *text, const struct list_form *form, const struct pair *pair, bool answered)
{
    if (form->question)
        task_text_add(text, "%s%s in the text above?\nAnswer: ", form->question, pair->key);
    task_text_add(text, "%s%s%s", form->before, pair->key, form->between);
    if (answered)
        task_text_add(text, " %s%s", pair->value, form->answer_end);
}

static int make_list(struct task_text_random *random, size_t n, const struct list_form *form, struct task_text *text,
                     struct task_sample *sample)
{
    size_t asked[MAX_EXAMPLES + 1] = {0};
    struct pair *pairs = make_pairs(random, n, form->smallest);
    if (!pairs)
        return -ENOMEM;
    choose(random, n, form->n_examples, asked);
    task_text_add(text, "%s", form->heading);
    for (size_t i = 0; i < n; i++)
        task_text_add(text, "%s%s%s %s%s", form->before, pairs[i].key, form->between, pairs[i].value, form->after);
    task_text_add(text, "%s", form->questions);
    for (size_t i = 0; i <= form->n_examples; i++)
        ask(text, form, &pairs[asked[i]], i < form->n_examples);
    task_kinds_expect(sample, pairs[asked[form->n_examples]].value);
    free(pairs);
    return 0;
}

int task_kinds_niah_multikey_2(struct task_text_random *random, size_t size, struct task_text *text,
                               struct task_sample *sample)
{
    static const struct list_form form = {
        .smallest = 1000000,
        .n_examples = 3,
        .heading = "Secret numbers are listed in the following text. Remember them.\n\n",
        .before = "The secret number for ",
        .between = " is",
        .after = ".\n",
        .questions = "\n",
        .question = "Question: What is the secret number for ",
        .answer_end = ".\n\n",
    };
    return make_list(random, size, &form, text, sample);
}

int task_kinds_niah_multikey_3(struct task_text_random *random, size_t size, struct task_text *text,
                               struct task_sample *sample)
{
    static const struct list_form form = {
        .n_examples = 2,
        .heading = "A list of codes and what they stand for:\n",
        .before = "",
        .between = ":",
        .after = "\n",
        .questions = "\nSome of them again:\n",
        .answer_end = "\n",
    };
    return make_list(random, size, &form, text, sample);
}

int task_kinds_kv(struct task_text_random *random, size_t size, struct task_text *text, struct task_sample *sample)
{
    static const struct list_form form = {
        .smallest = 1000,
        .n_examples = 3,
        .heading = "A list of words and their numbers:\n",
        .before = "",
        .between = ":",
        .after = "\n",
        .questions = "\nSome of them again:\n",
        .answer_end = "\n",
    };
    return make_list(random, size, &form, text, sample);
}

int task_kinds_copy(struct task_text_random *random, size_t size, struct task_text *text, struct task_sample *sample)
{
    enum { N_GIVEN = 3, N_COPIED = TASK_MAX_ANSWERS };
    const char *quoted[N_GIVEN + N_COPIED];
    struct task_text quotation = {.n_bytes = 0};
    struct needles needles = {.n = 1};
    size_t *order = task_text_order(random, task_text_n_words());
    if (!order)
        return -ENOMEM;
    for (size_t i = 0; i < N_GIVEN + N_COPIED; i++) {
        quoted[i] = task_text_word(order[i]);
        task_text_add(&quotation, "%s%s", i ? " " : "", quoted[i]);
        if (i >= N_GIVEN)
            task_kinds_expect(sample, quoted[i]);
    }
    free(order);
    if (quotation.no_memory) {
        free(quotation.bytes);
        return -ENOMEM;
    }
    snprintf(needles.text[0], sizeof(needles.text[0]), "\"%s.\"", quotation.bytes);
    free(quotation.bytes);
    haystack(random, text, size, &needles);
    task_text_add(text, "\n\nThe words that were said, once more:\n\n\"%s %s %s", quoted[0], quoted[1], quoted[2]);
    return 0;
}
