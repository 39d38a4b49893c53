/* eval_progress.c - see eval_progress.h. */
#include "gpu-worker/eval/eval_progress.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

enum { PASS, DISTRIBUTIONS, PRESET_TAIL, PRESET_DISTRIBUTIONS };

static uint32_t kind_of(uint32_t part)
{
    return part < PRESET_TAIL ? part : PRESET_TAIL + part % 2;
}

int eval_progress_init(struct eval_progress *progress, uint32_t n_texts, uint32_t n_presets)
{
    *progress = (struct eval_progress){.n_texts = n_texts, .n_parts = PRESET_TAIL + 2 * n_presets};
    progress->part_us = calloc(progress->n_parts, sizeof *progress->part_us);
    return progress->part_us == NULL ? -ENOMEM : 0;
}

void eval_progress_fini(struct eval_progress *progress)
{
    free(progress->part_us);
    progress->part_us = NULL;
}

void eval_progress_work(struct eval_progress *progress, uint64_t us)
{
    progress->at_hand_us += us;
}

void eval_progress_next(struct eval_progress *progress)
{
    progress->part_us[progress->part] = progress->at_hand_us + 1; /* 0 means never */
    progress->spent_us += progress->at_hand_us;
    progress->at_hand_us = 0;
    if (++progress->part == progress->n_parts) {
        progress->part = 0;
        progress->text++;
    }
}

/* Microseconds of a whole part; pass_us: what a pass takes. */
static double estimate(const struct eval_progress *progress, uint32_t part, double pass_us)
{
    /* before anything of a kind was measured, in passes: what a small model at a few thousand tokens has */
    static const double guesses[] = {
        [PASS] = 1, [DISTRIBUTIONS] = 0.05, [PRESET_TAIL] = 0.3, [PRESET_DISTRIBUTIONS] = 0.05};
    double sum = 0;
    uint32_t n = 0;
    if (progress->part_us[part] > 0)
        return (double)progress->part_us[part];
    for (uint32_t i = 0; i < progress->n_parts; i++)
        if (kind_of(i) == kind_of(part) && progress->part_us[i] > 0) {
            sum += (double)progress->part_us[i];
            n++;
        }
    return n > 0 ? sum / n : guesses[kind_of(part)] * pass_us;
}

double eval_progress_done(struct eval_progress *progress, double fraction)
{
    const double at_hand = (double)progress->at_hand_us;
    double whole = fraction > 0 ? at_hand / fraction : 0; /* of the part at hand */
    double pass_us = progress->part_us[PASS] > 0 ? (double)progress->part_us[PASS] : whole;
    if (progress->text >= progress->n_texts)
        return progress->done = 1;
    if (pass_us <= 0)
        return progress->done;
    if (fraction <= 0)
        whole = fmax(estimate(progress, progress->part, pass_us), at_hand);
    double left = whole - at_hand;
    for (uint32_t part = 0; part < progress->n_parts; part++) {
        const uint32_t n_left = progress->n_texts - progress->text - (part <= progress->part ? 1 : 0);
        left += n_left * estimate(progress, part, pass_us);
    }
    const double spent = (double)progress->spent_us + at_hand;
    if (spent + left > 0)
        progress->done = fmax(progress->done, spent / (spent + left));
    return progress->done;
}
