/*
 * options_internal.h - what options.c, options_value.c and options_help.c share. Nobody else includes it.
 */
#pragma once

#include "common/options.h"

struct option_value {
    char *text; /* as written; NULL: no value */
    enum option_source source;
    char **all; /* [n_all] of an option that repeats; the last one is `text` again */
    size_t n_all;
    uint64_t number; /* u32, u64, bytes, flag, duration in ms, index of the choice */
    double real;
    uint32_t percent; /* of a memory; its number is 0 then */
};

struct options {
    const struct options_table *table;
    struct option_value *values; /* like table->specs */
    char **positional;
    size_t n_positional;
    char *config_file;
    bool help_wanted, version_wanted;
};

/* Reads text as the kind of `spec`. -EINVAL with the reason in `why` ("a whole number is expected"). Leaves text and source
 * of the result zero. */
int options_value_read(const struct option_spec *spec, const char *text, struct option_value *ret_value, char *why,
                       size_t why_size);
