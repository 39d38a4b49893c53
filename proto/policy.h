/*
 * policy.h - what the name of a policy says: the one grammar that coordinator, worker and clients share.
 *
 *     full                                    every old token is read: full attention
 *     PRESET[,fastgen=RECOVERY]               default, quality, small, tiny, hcattention-25, hcattention-12.5
 *     CODEC,SELECTOR=NUMBER[,weights][,notail][,fastgen=RECOVERY]
 *                                             e.g. "rot2,deviation=0.02", "pq2/4096,mass=0.9,weights,notail"
 *
 * CODEC       how old keys are kept on the device: f16; rot4, rot3, rot2; pair3, pair2, pair1, klt2, klt1, klt0 (need the model's
 *             statistics);
 *             pqD/C, product quantization with sub-spaces of D = 2, 4 or 8 dimensions and C = 256 .. 4096 centroids, a power
 *             of two (needs a codebook); pqD alone is pqD/4096
 * SELECTOR    deviation (at most this much absolute deviation of weights from their block's mean stays unread, 0 .. 2),
 *             mass (the smallest set of tokens with this much of the attention mass, 0 .. 1) or
 *             l2 (of weights that are root mean squares over a KV head's query heads, at most this Euclidean length of the
 *             deviations from block means stays unread, 0 .. 2; 0.00085 reads as much as deviation 0.02 of 3000 tokens)
 * weights     sum with the approximate weights instead of exact re-scoring
 * notail      drop what is not selected instead of estimating it by block means
 * fastgen     FastGen residency: a head whose cheapest fixed set of tokens holds this much of its attention mass (0 .. 1, above
 *             0) keeps no keys on the device and reads that set; behind a preset: instead of what the preset says
 *
 * A name is shorter than LAYOUT_POLICY_BYTES. Numbers are digits with or without a point, 12 characters at most.
 * Pure functions. Threads: any.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum policy_codec {
    POLICY_CODEC_NONE,
    POLICY_CODEC_F16,
    POLICY_CODEC_ROT4,
    POLICY_CODEC_ROT3,
    POLICY_CODEC_ROT2,
    POLICY_CODEC_PAIR3,
    POLICY_CODEC_PAIR2,
    POLICY_CODEC_PAIR1,
    POLICY_CODEC_KLT2,
    POLICY_CODEC_KLT1,
    POLICY_CODEC_KLT0,
    POLICY_CODEC_PQ,
    POLICY_N_CODECS,
};
/* Is it made from the model's statistics (gpu-worker/keys/key_statistics.h)? */
static inline bool policy_codec_needs_statistics(enum policy_codec codec)
{
    return codec >= POLICY_CODEC_PAIR3 && codec <= POLICY_CODEC_KLT0;
}
enum policy_selector { POLICY_SELECTOR_FULL, POLICY_SELECTOR_MASS, POLICY_SELECTOR_DEVIATION, POLICY_SELECTOR_L2 };

struct policy_terms {
    enum policy_codec codec;      /* full: none, no keys are kept */
    uint32_t n_dims, n_centroids; /* pq: of a sub-space */
    enum policy_selector selector;
    float parameter;
    bool weights; /* approximate weights instead of re-scoring */
    bool tail;
    float fastgen; /* recovery; 0: every head keeps its keys */
};

/* -EINVAL with a sentence (up to sentence_size bytes) that names what is wrong and what there is. */
int policy_parse(const char *name, struct policy_terms *ret_terms, char *sentence, size_t sentence_size);

/* The i-th preset's name and what it stands for; NULL after the last. */
const char *policy_preset(uint32_t i, const char **ret_meaning);
