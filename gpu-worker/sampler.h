/*
 * sampler.h - from logits to a token id.
 *
 * Nothing about sampling is state: randomness is a hash of (seed, position), penalties are computed from the ids before it.
 * Threads: any; scratch is the caller's.
 */
#pragma once

#include <stdint.h>

struct sampler_bias {
    uint32_t id;
    float bias;
};

struct sampling {
    float temperature;    /* 0: greedy */
    uint32_t top_k;       /* 0: off */
    float top_p;          /* 0 or 1: off */
    float min_p;          /* 0: off */
    float repeat_penalty; /* 0 or 1: off */
    float presence_penalty;
    float frequency_penalty;
    uint32_t penalty_window; /* last tokens that penalties look at */
    uint64_t seed;
    uint32_t n_biases;
    struct sampler_bias *biases;
};

struct sampler_candidate {
    float logit;
    uint32_t id;
};

/*
 * The token at `position` given ids [0, position).
 *   logits   [n_vocab]; biases and penalties are applied in place
 *   scratch  [n_vocab]
 * Order: logit bias, penalties (repeat: divides positive and multiplies negative logits, CTRL; presence and frequency:
 * subtract), then greedy, or temperature, top-k, top-p (nucleus), min-p and a draw. Ties go to the smaller id.
 */
uint32_t sampler_choose(const struct sampling *sampling, const uint32_t *ids, uint32_t position, float *logits,
                        uint32_t n_vocab, struct sampler_candidate *scratch);

/* log(sum(exp(logits))): the log-probability of i is logits[i] minus this. */
double sampler_log_sum_exp(const float *logits, uint32_t n_vocab);

/* The n most likely ids, most likely first, ties to the smaller id; returns how many (<= n, <= n_vocab). */
uint32_t sampler_top(const float *logits, uint32_t n_vocab, uint32_t n, struct sampler_candidate *ret_top);

/* Uniform in [0, 1) from (seed, position). */
double sampler_uniform(uint64_t seed, uint64_t position);
