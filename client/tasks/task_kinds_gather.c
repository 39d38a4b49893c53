/* task_kinds_gather.c - see task_kinds.h: tasks whose answer stands at many places of the text. */
#include "client/tasks/task_kinds.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME_SIZE  8u
#define N_CHAIN    5u /* variables: one value, four hops, as in the paper */
#define N_COMMON   10u
#define N_FREQUENT 3u

/* ---- variable tracking ---- */

/* Consonants: a name is in no word of the text. */
static void name(struct task_text_random *random, char ret_name[NAME_SIZE])
{
    static const char letters[] = "BCDFGHJKLMNPQRSTVWXZ";
    for (size_t i = 0; i < 3; i++)
        ret_name[i] = letters[task_text_below(random, sizeof(letters) - 1)];
    ret_name[3] = '\0';
}

static void make_names(struct task_text_random *random, char names[N_CHAIN][NAME_SIZE])
{
    for (size_t i = 0; i < N_CHAIN;) {
        bool known = false;
        name(random, names[i]);
        for (size_t k = 0; k < i; k++)
            known |= strcmp(names[k], names[i]) == 0;
        i += !known;
    }
}

int task_kinds_vt(struct task_text_random *random, size_t size, struct task_text *text, struct task_sample *sample)
{
    char names[N_CHAIN][NAME_SIZE];
    size_t places[N_CHAIN], k = 0;
    const char *space = ""; /* before all but the first sentence */
    unsigned value = 10000 + (unsigned)task_text_below(random, 90000);
    make_names(random, names);
    task_text_places(random, size, N_CHAIN, places);
    task_text_add(text, "Variables are assigned in the following text. Remember them.\n\n");
    for (size_t i = 0; i <= size; i++) {
        for (; k < N_CHAIN && places[k] == i; k++, space = " ") {
            if (k == 0)
                task_text_add(text, "%sVAR %s = %u.", space, names[0], value);
            else
                task_text_add(text, "%sVAR %s = VAR %s.", space, names[k], names[k - 1]);
        }
        if (i < size)
            task_text_add(text, "%s%s", space, task_text_filler(i));
        space = " ";
    }
    /* The first of the chain is given: it shows a small model what kind of thing is asked for. */
    task_text_add(
        text,
        "\n\nQuestion: Which five variables have the value %u in the text above, directly or through others?\n"
        "Answer: The five variables are VAR %s, VAR",
        value, names[0]);
    for (size_t i = 1; i < N_CHAIN; i++)
        task_kinds_expect(sample, names[i]);
    return 0;
}

/* ---- words that are more common than others ---- */

/* The words of a list, each written `times` times, in a random order. */
struct entry {
    const char *word;
    size_t times;
};

static int write_shuffled(struct task_text_random *random, const struct entry *entries, size_t n, const char *between,
                          struct task_text *text)
{
    size_t n_all = 0, at = 0;
    for (size_t i = 0; i < n; i++)
        n_all += entries[i].times;
    const char **all = calloc(n_all + 1, sizeof(*all));
    size_t *order = task_text_order(random, n_all);
    for (size_t i = 0; all && i < n; i++)
        for (size_t k = 0; k < entries[i].times; k++)
            all[at++] = entries[i].word;
    for (size_t i = 0; all && order && i < n_all; i++)
        task_text_add(text, "%s%s", i ? between : "", all[order[i]]);
    bool no_memory = !all || !order;
    free(all);
    free(order);
    return no_memory ? -ENOMEM : 0;
}

/* One list: N_COMMON words that come `often` times, n_rare others that come `seldom`; words from the order given. */
static int common_list(struct task_text_random *random, const size_t *order, size_t n_rare, size_t often, size_t seldom,
                       struct task_text *text)
{
    struct entry *entries = calloc(N_COMMON + n_rare, sizeof(*entries));
    if (!entries)
        return -ENOMEM;
    for (size_t i = 0; i < N_COMMON + n_rare; i++)
        entries[i] = (struct entry){task_text_word(order[i]), i < N_COMMON ? often : seldom};
    task_text_add(text, "Words: ");
    int result = write_shuffled(random, entries, N_COMMON + n_rare, " ", text);
    task_text_add(text, "\n\nThe ten words that are most common in the list above are:");
    free(entries);
    return result;
}

/* As the paper has it, common words come ten times as often as others; they are a third of the list whatever its length. */
static int common_list_of(struct task_text_random *random, size_t size, struct task_text *text,
                          const char *ret_common[N_COMMON])
{
    size_t often = size / 30 > 3 ? size / 30 : 3, seldom = often >= 20 ? often / 10 : 1;
    size_t n_rare = size > N_COMMON * often ? (size - N_COMMON * often) / seldom : 0;
    size_t *order = task_text_order(random, task_text_n_words());
    if (!order)
        return -ENOMEM;
    if (n_rare > task_text_n_words() - N_COMMON)
        n_rare = task_text_n_words() - N_COMMON;
    int result = common_list(random, order, n_rare, often, seldom, text);
    for (size_t i = 0; i < N_COMMON; i++)
        ret_common[i] = task_text_word(order[i]);
    free(order);
    return result;
}

int task_kinds_cwe(struct task_text_random *random, size_t size, struct task_text *text, struct task_sample *sample)
{
    enum { EXAMPLE_WORDS = 50 };
    const char *common[N_COMMON];
    int result = common_list_of(random, EXAMPLE_WORDS, text, common);
    for (size_t i = 0; !result && i < N_COMMON; i++)
        task_text_add(text, " %s%s", common[i], i + 1 < N_COMMON ? "," : ".\n\n");
    if (!result)
        result = common_list_of(random, size, text, common);
    for (size_t i = 0; !result && i < N_COMMON; i++)
        task_kinds_expect(sample, common[i]);
    return result;
}

/* ---- made-up words ---- */

static void made_up(struct task_text_random *random, char ret_word[NAME_SIZE])
{
    static const char consonants[] = "bcdfghjklmnpqrstvwxyz", vowels[] = "aeiou";
    for (size_t i = 0; i < 6; i++)
        ret_word[i] = i % 2 ? vowels[task_text_below(random, sizeof(vowels) - 1)]
                            : consonants[task_text_below(random, sizeof(consonants) - 1)];
    ret_word[6] = '\0';
}

/* The k-th of them comes size / (zeta(2) k^2) times: the paper's zeta distribution with alpha 2, without its chance. */
static int frequent_words(struct task_text_random *random, size_t size, struct task_text *text,
                          char ret_frequent[N_FREQUENT][NAME_SIZE])
{
    enum { MAX_WORDS = 256 };
    char(*made)[NAME_SIZE] = calloc(MAX_WORDS, sizeof(*made));
    struct entry entries[MAX_WORDS];
    size_t n = 0;
    if (!made)
        return -ENOMEM;
    for (; n < MAX_WORDS; n++) {
        size_t times = (size_t)(0.6079 * (double)size / (double)((n + 1) * (n + 1)));
        if (!times && n >= N_FREQUENT)
            break;
        made_up(random, made[n]);
        entries[n] = (struct entry){made[n], times ? times : 1};
    }
    task_text_add(text, "Text: ");
    int result = write_shuffled(random, entries, n, " ", text);
    task_text_add(text, "\nThe three most frequent words of the text are");
    memcpy(ret_frequent, made, N_FREQUENT * NAME_SIZE);
    free(made);
    return result;
}

int task_kinds_fwe(struct task_text_random *random, size_t size, struct task_text *text, struct task_sample *sample)
{
    enum { N_SHOWN = 2, SHOWN_WORDS = 30 };
    char frequent[N_FREQUENT][NAME_SIZE];
    int result = 0;
    for (size_t i = 0; !result && i < N_SHOWN; i++) {
        result = frequent_words(random, SHOWN_WORDS, text, frequent);
        if (!result)
            task_text_add(text, " %s, %s, %s.\n\n", frequent[0], frequent[1], frequent[2]);
    }
    if (!result)
        result = frequent_words(random, size, text, frequent);
    for (size_t i = 0; !result && i < N_FREQUENT; i++)
        task_kinds_expect(sample, frequent[i]);
    return result;
}
