/* sampling.h - options of `generate` and `chat` that say how tokens are chosen. */
#pragma once

#include "client/hcattn.h"
#include "common/options.h"

#define SAMPLING_OPTIONS                                                                                               \
    {.name = "max-tokens",                                                                                             \
     .short_name = 'n',                                                                                                \
     .kind = OPTION_U32,                                                                                               \
     .help = "longest answer; 0: the server's default (see 'hcattn status')"},                                         \
        {.name = "temperature",                                                                                        \
         .short_name = 't',                                                                                            \
         .kind = OPTION_FLOAT,                                                                                         \
         .default_text = "0",                                                                                          \
         .minimum = 0,                                                                                                 \
         .maximum = 1000,                                                                                              \
         .help = "0 is greedy: always the most likely token, so that the same prompt has the same answer"},            \
        {.name = "top-k", .kind = OPTION_U32, .help = "choose among the K most likely tokens; 0: among all"},          \
        {.name = "top-p",                                                                                              \
         .kind = OPTION_FLOAT,                                                                                         \
         .default_text = "1",                                                                                          \
         .minimum = 0,                                                                                                 \
         .maximum = 1,                                                                                                 \
         .help = "choose among the most likely tokens whose probabilities reach P together"},                          \
        {.name = "min-p",                                                                                              \
         .kind = OPTION_FLOAT,                                                                                         \
         .default_text = "0",                                                                                          \
         .minimum = 0,                                                                                                 \
         .maximum = 1,                                                                                                 \
         .help = "leave out tokens less likely than P times the most likely one"},                                     \
        {.name = "repeat-penalty",                                                                                     \
         .kind = OPTION_FLOAT,                                                                                         \
         .default_text = "1",                                                                                          \
         .minimum = 0,                                                                                                 \
         .maximum = 1000,                                                                                              \
         .help = "make tokens of the last 64 less likely; 1: off"},                                                    \
        {.name = "presence-penalty",                                                                                   \
         .kind = OPTION_FLOAT,                                                                                         \
         .default_text = "0",                                                                                          \
         .help = "taken off the logit of a "                                                                           \
                 "token that came before"},                                                                            \
        {.name = "frequency-penalty",                                                                                  \
         .kind = OPTION_FLOAT,                                                                                         \
         .default_text = "0",                                                                                          \
         .help = "the same for each time "                                                                             \
                 "that it came"},                                                                                      \
    {                                                                                                                  \
        .name = "seed", .kind = OPTION_U64, .default_text = "0",                                                       \
        .help = "of the random choice; the same seed "                                                                 \
                "makes the same choices"                                                                               \
    }

struct hcattn_sampling sampling_from(const struct options *options);
