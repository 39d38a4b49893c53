/*
 * sampler.h - from logits to a token id.
 *
 * Nothing about sampling is state: randomness is a hash of (seed, position), penalties are computed from the ids before it.
 * Threads: any; scratch is the caller's.
 */
#pragma once

#include <stdbool.h>
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

/* What biases and penalties do to a logit: l + add, then l > 0 ? l / divide : l * divide (0: not at all), then l - subtract. */
struct sampler_change {
    uint32_t id;
    uint32_t order; /* of two that change the same id the lower one comes first */
    float add, divide, subtract;
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
 * subtract), then greedy, or temperature, top-k, top-p (nucleus), min-p and a draw. Ties go to the smaller id. What is not a
 * number is chosen only where nothing else is there.
 */
uint32_t sampler_choose(const struct sampling *sampling, const uint32_t *ids, uint32_t position, float *logits,
                        uint32_t n_vocab, struct sampler_candidate *scratch);

/* For who chooses elsewhere: whether the largest logit is taken (greedy), and what is done to logits before. */
bool sampler_is_greedy(const struct sampling *sampling);
/*
 * ret_changes [sampler_max_changes()], by id, those of an id in their order; ids beyond n_vocab are left out. Returns how many.
 */
uint32_t sampler_changes(const struct sampling *sampling, const uint32_t *ids, uint32_t position, uint32_t n_vocab,
                         struct sampler_change *ret_changes);
uint32_t sampler_max_changes(const struct sampling *sampling, uint32_t position);

/* log(sum(exp(logits))): the log-probability of i is logits[i] minus this. */
double sampler_log_sum_exp(const float *logits, uint32_t n_vocab);

/* The n most likely ids, most likely first, ties to the smaller id; returns how many (<= n, <= n_vocab). */
uint32_t sampler_top(const float *logits, uint32_t n_vocab, uint32_t n, struct sampler_candidate *ret_top);

/* Uniform in [0, 1) from (seed, position). */
double sampler_uniform(uint64_t seed, uint64_t position);
