/*
 * train_rotate.c - see train_rotate.h. A pair of dimensions is a complex number z, turned by exp(i offset frequency). A 2 x 2 block
 * between two pairs is z -> a z + b conj(z); turned on both sides, a turns by the difference of the two frequencies and b by their
 * sum, and the average over offsets is a geometric sum.
 */
#include "gpu-worker/train/train_rotate.h"

#include <complex.h>
#include <math.h>

static double frequency_of(const struct backend_rope *rope, uint32_t pair)
{
    return pair < rope->n_rotated / 2 ? (double)rope->frequencies[pair] : 0;
}

/* Mean of exp(i n frequency) for n = 0 .. n_offsets - 1. */
static double complex mean_turn(double frequency, uint32_t n_offsets)
{
    double half = sin(frequency / 2);
    if (fabs(half) < 1e-12)
        return 1;
    double length = sin(frequency / 2 * n_offsets) / (n_offsets * half), angle = frequency / 2 * (n_offsets - 1);
    return length * cos(angle) + length * sin(angle) * I;
}

uint32_t train_rotate_offset(uint64_t number, uint32_t n_offsets)
{
    const double golden = 0.61803398874989484820, place = golden * (double)number;
    return (uint32_t)((place - floor(place)) * n_offsets);
}

void train_rotate(const struct backend_rope *rope, uint32_t offset, uint32_t first_pair, uint32_t n_pairs, float *x)
{
    for (uint32_t i = 0; i < n_pairs && first_pair + i < rope->n_rotated / 2; i++, x += 2) {
        const double angle = offset * frequency_of(rope, first_pair + i), c = cos(angle), s = sin(angle);
        const double even = (double)x[0], odd = (double)x[1];
        x[0] = (float)(even * c - odd * s);
        x[1] = (float)(even * s + odd * c);
    }
}

void train_rotate_mean(const struct backend_rope *rope, uint32_t n_offsets, uint32_t head_dim, double *mean)
{
    for (uint32_t pair = 0; pair < head_dim / 2; pair++) {
        double complex turned =
            (mean[2 * pair] + mean[2 * pair + 1] * I) * mean_turn(frequency_of(rope, pair), n_offsets);
        mean[2 * pair] = creal(turned);
        mean[2 * pair + 1] = cimag(turned);
    }
}

static void turn_block(double complex by_difference, double complex by_sum, double *upper, double *lower)
{
    double complex a = ((upper[0] + lower[1]) + (lower[0] - upper[1]) * I) / 2 * by_difference;
    double complex b = ((upper[0] - lower[1]) + (lower[0] + upper[1]) * I) / 2 * by_sum;
    upper[0] = creal(a) + creal(b);
    lower[1] = creal(a) - creal(b);
    lower[0] = cimag(a) + cimag(b);
    upper[1] = cimag(b) - cimag(a);
}

void train_rotate_square(const struct backend_rope *rope, uint32_t n_offsets, uint32_t head_dim, double *square)
{
    for (uint32_t i = 0; i < head_dim / 2; i++)
        for (uint32_t j = 0; j < head_dim / 2; j++) {
            double first = frequency_of(rope, i), second = frequency_of(rope, j);
            turn_block(mean_turn(first - second, n_offsets), mean_turn(first + second, n_offsets),
                       square + (size_t)(2 * i) * head_dim + 2 * j, square + (size_t)(2 * i + 1) * head_dim + 2 * j);
        }
}
