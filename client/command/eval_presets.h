/* eval_presets.h - the list of --presets, taken apart. Threads: any. */
#pragma once

#include <stddef.h>

struct eval_presets {
    char **names;
    size_t n_names;
};

/*
 * Adds the presets of a list "a,b,rot2,deviation=0.02,c". Commas are in policies too: what can only stand behind a codec and its
 * selector (deviation=, mass=, l2=, fastgen=, weights, notail) belongs to the name before it. One that is there already is left
 * out. -EINVAL: an empty name; -ENOMEM.
 */
int eval_presets_add(struct eval_presets *presets, const char *list);
void eval_presets_fini(struct eval_presets *presets);
