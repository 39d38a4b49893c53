/* eval_presets.c - see eval_presets.h. */
#include "client/command/eval_presets.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

void eval_presets_fini(struct eval_presets *presets)
{
    for (size_t i = 0; i < presets->n_names; i++)
        free(presets->names[i]);
    free(presets->names);
    *presets = (struct eval_presets){.n_names = 0};
}

/* Does a word go on with the policy before it? */
static bool goes_on(const char *word)
{
    static const char *const starts[] = {"deviation=", "mass=", "l2=", "fastgen="};
    static const char *const words[] = {"weights", "notail"};
    for (size_t i = 0; i < sizeof(starts) / sizeof(starts[0]); i++)
        if (strncmp(word, starts[i], strlen(starts[i])) == 0)
            return true;
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
        if (strcspn(word, ",") == strlen(words[i]) && strncmp(word, words[i], strlen(words[i])) == 0)
            return true;
    return false;
}

static int add(struct eval_presets *presets, const char *name, size_t n_bytes)
{
    for (size_t i = 0; i < presets->n_names; i++)
        if (strlen(presets->names[i]) == n_bytes && memcmp(presets->names[i], name, n_bytes) == 0)
            return 0;
    char **names = realloc(presets->names, (presets->n_names + 1) * sizeof(*names));
    if (!names)
        return -ENOMEM;
    presets->names = names;
    names[presets->n_names] = strndup(name, n_bytes);
    if (!names[presets->n_names])
        return -ENOMEM;
    presets->n_names++;
    return 0;
}

int eval_presets_add(struct eval_presets *presets, const char *list)
{
    for (const char *name = list;;) {
        size_t n = strcspn(name, ",");
        while (name[n] == ',' && goes_on(name + n + 1))
            n += 1 + strcspn(name + n + 1, ",");
        int result = n ? add(presets, name, n) : -EINVAL;
        if (result < 0)
            return result;
        if (!name[n])
            return 0;
        name += n + 1;
    }
}
