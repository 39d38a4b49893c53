/*
 * slow_selection.h - what selection_run() should find, in doubles and without a trick: every threshold of the grid is tried
 * (deviation, l2), the tokens are sorted (mass).
 */
#pragma once

#include "tests/unit/policy/fixture.h"

struct slow {
    uint32_t group, n_blocks, n_exact;
    double *e;  /* [group][n_blocks * 64]: exp(score - reference); 0 for sinks */
    bool is_l2; /* w: root mean square over heads, deviation: Euclidean; otherwise mean, and sum of distances */
    double *w, *exact_w; /* [n_blocks * 64], [n_exact] */
    double *reference, *total;
    double top;        /* largest w of an old token */
    double *deviation; /* at step i - 1 */
};

/* What the selector orders by. */
void slow_init(struct slow *slow, const struct fixture *fixture, enum policy_selector selector);
void slow_fini(struct slow *slow);

/* Step -1 is just above the largest weight, the last one takes whatever has a weight. */
#define SLOW_LAST_STEP ((int)(SELECTION_GRID_PER_OCTAVE * SELECTION_GRID_OCTAVES) + 1)
double slow_threshold(const struct slow *slow, int step);

/* What is left unread at a threshold: deviation of old tokens; mass of all tokens below it. */
double slow_deviation(const struct slow *slow, double threshold);
double slow_unread_mass(const struct slow *slow, double threshold);

int slow_step_by_mass(const struct slow *slow, double p);
int slow_step_by_deviation(const struct slow *slow, double epsilon);
