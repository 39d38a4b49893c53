/* opening.h - options of the commands that open a session: how much of it is kept on the device, and how. */
#pragma once

#include "client/hcattn.h"
#include "common/options.h"

/* What --policy takes; a test holds it against proto/policy.h. */
#define OPENING_PRESETS  "default (rot2,deviation=0.02), quality (rot4,deviation=0.01), full (every old token is read)"
#define OPENING_GRAMMAR  "f16|rot4|rot3|rot2,deviation=0..2|mass=0..1[,weights][,notail]"
#define OPENING_POLICIES OPENING_PRESETS ", or " OPENING_GRAMMAR

#define OPENING_OPTIONS                                                                                                \
    {.name = "policy",                                                                                                 \
     .kind = OPTION_STRING,                                                                                            \
     .metavar = "POLICY",                                                                                              \
     .help = "of a new session: " OPENING_POLICIES "; the server's default if not given"},                             \
    {                                                                                                                  \
        .name = "exact-tokens", .kind = OPTION_U32, .metavar = "N", .maximum = OPENING_MAX_EXACT,                      \
        .help = "a new session of at most N tokens is kept exactly on the device; 0: only sinks and window are; the "  \
                "server's default if not given"                                                                        \
    }
#define OPENING_MAX_EXACT 4294967294.0 /* the next one is HCATTN_EXACT_NONE */

/* policy and exact_tokens as the options say; the rest is zero. */
struct hcattn_session_config opening_config(const struct options *options);
