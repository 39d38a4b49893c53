/*
 * policy.h - what the name of a policy says: the one grammar that coordinator, worker and clients share.
 *
 *     full                                    every old token is read: full attention
 *     default | quality                       presets
 *     CODEC,SELECTOR=NUMBER[,weights][,notail]    e.g. "rot2,deviation=0.02", "rot4,mass=0.9,weights,notail"
 *
 * CODEC       f16, rot4, rot3, rot2: how old keys are kept on the device
 * SELECTOR    deviation (at most this much absolute deviation of weights from their block's mean stays unread, 0 .. 2) or
 *             mass (the smallest set of tokens with this much of the attention mass, 0 .. 1)
 * weights     sum with the approximate weights instead of exact re-scoring
 * notail      drop what is not selected instead of estimating it by block means
 *
 * Pure functions. Threads: any.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum policy_codec { POLICY_CODEC_NONE, POLICY_CODEC_F16, POLICY_CODEC_ROT4, POLICY_CODEC_ROT3, POLICY_CODEC_ROT2 };
enum policy_selector { POLICY_SELECTOR_FULL, POLICY_SELECTOR_MASS, POLICY_SELECTOR_DEVIATION };

struct policy_terms {
    enum policy_codec codec; /* full: none, no keys are kept */
    enum policy_selector selector;
    float parameter;
    bool weights; /* approximate weights instead of re-scoring */
    bool tail;
};

/* -EINVAL with a sentence (up to sentence_size bytes) that names what is wrong and what there is. */
int policy_parse(const char *name, struct policy_terms *ret_terms, char *sentence, size_t sentence_size);

/* The i-th preset's name and what it stands for; NULL after the last. */
const char *policy_preset(uint32_t i, const char **ret_meaning);
