/* role.h - the processes that `hcattn run` and `hcattn up` start. */
#pragma once

#include "proto/control.pb-c.h"

#include <stdbool.h>
#include <stddef.h>

struct role {
    const char *name;    /* "gpu-worker" */
    const char *program; /* "hc-gpu-worker" */
    Hcattn__Control__Role number;
    bool has_index; /* several of them may run: takes --index */
    bool is_a_peer; /* of the coordinator: its supervisor reports to it */
};

extern const struct role role_table[]; /* closed by a NULL name */

const struct role *role_find(const char *name); /* NULL: no such role */

/* The options of `up` that a role takes too: closed by NULL. */
const char *const *role_options(const struct role *role);
