/* opening.h - options of the commands that open a session: how much of it is kept on the device, and how. */
#pragma once

#include "client/hcattn.h"
#include "common/options.h"

/* What --policy takes; a test holds it against proto/policy.h. */
#define OPENING_PRESETS                                                                                                \
    "default (klt1,l2=0.0006), quality (rot4,deviation=0.01), small (klt0,l2=0.0008), tiny "                           \
    "(klt0,l2=0.00125), hcattention-25 (pq2/4096,mass=0.9,weights,notail), hcattention-12.5 "                          \
    "(pq4/4096,mass=0.9,weights,notail), full (every old token is read)"
#define OPENING_GRAMMAR                                                                                                \
    "f16|rot4|rot3|rot2|pair3|pair2|pair1|klt2|klt1|klt0|pqD/C,"                                                       \
    "deviation=0..2|mass=0..1|l2=0..2[,weights][,notail][,fastgen=0..1]"
#define OPENING_POLICIES OPENING_PRESETS ", or " OPENING_GRAMMAR

#define OPENING_RESIDENCY_OPTIONS                                                                                      \
    {.name = "residency",                                                                                              \
     .kind = OPTION_CHOICE,                                                                                            \
     .choices = opening_residencies,                                                                                   \
     .help = "which heads keep keys of old tokens on the device: all, or with fastgen those for which no fixed set "   \
             "of tokens is enough; as the policy says if not given"},                                                  \
    {                                                                                                                  \
        .name = "fastgen-recovery", .kind = OPTION_FLOAT, .default_text = "0.98", .minimum = 0, .maximum = 1,          \
        .help = "with fastgen: the share of a head's attention mass that a fixed set must keep"                        \
    }

#define OPENING_OPTIONS                                                                                                \
    {.name = "policy",                                                                                                 \
     .kind = OPTION_STRING,                                                                                            \
     .metavar = "POLICY",                                                                                              \
     .help = "of a new session: " OPENING_POLICIES "; the server's default if not given"},                             \
        {.name = "exact-tokens",                                                                                       \
         .kind = OPTION_U32,                                                                                           \
         .metavar = "N",                                                                                               \
         .maximum = OPENING_MAX_EXACT,                                                                                 \
         .help = "a new session of at most N tokens is kept exactly on the device; 0: only sinks and window are; "     \
                 "the server's default if not given"},                                                                 \
        OPENING_RESIDENCY_OPTIONS
#define OPENING_MAX_EXACT 4294967294.0 /* the next one is HCATTN_EXACT_NONE */

extern const char *const opening_residencies[];

/*
 * `base` with the residency that the options ask for; is understood by policy_parse(). -EINVAL with a sentence: the two do not
 * go together, or base is no policy.
 */
int opening_policy(const struct options *options, const char *base, char ret_policy[HCATTN_POLICY_SIZE], char *sentence,
                   size_t sentence_size);

/*
 * policy and exact_tokens as the options say; the rest is zero. A residency without a policy is of the service's default, which
 * is asked for. `policy` is the storage of ret_config->policy. Errors as hcattn_stats(); -EINVAL as opening_policy().
 */
int opening_config(const struct options *options, struct hcattn *client, char policy[HCATTN_POLICY_SIZE],
                   struct hcattn_session_config *ret_config, struct hcattn_error *ret_error);
