/*
 * codec_pair_klt.c - the tables of klt for all heads of a model: axes, groups of them, and codewords.
 *
 * Axes       a residual r costs E[(q . r)^2] = |C' r|^2, where E[q q'] = C C' (Cholesky). C' r is turned to its principal axes
 *            (Karhunen-Loeve), so that coordinates y are uncorrelated with variances L, and an error anywhere costs its square.
 * Groups     reverse water-filling says how many bits a coordinate deserves (Cover and Thomas, Elements of Information Theory,
 *            10.3.3); coordinates, the largest first, go to the group of 4 bits that has the fewest yet.
 * Heads      pairs of groups go one by one to the head that gains most by them, until the tiles are as large as asked for.
 * Codewords  k-means over the statistics' samples, each divided by its size as keys will be: attention looks at the unusual keys,
 *            which normal numbers of the same variances have too few of. These stand in where samples are missing.
 */
#include "gpu-worker/keys/codec_pair.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "gpu-worker/keys/key_statistics.h"

#define RIDGE          1e-5 /* of the largest E[q_i^2], on its diagonal: what queries never asked for may be asked for yet */
#define LEAST_VARIANCE 1e-20 /* less is none */
#define LEAST_NUMBER   0x1p-40
#define SLIGHTLY_BELOW (-0.35) /* water: such coordinates share a group with larger ones at little cost */
#define MAX_SWEEPS     60

#define N_SAMPLES    KEY_STATISTICS_MOST_SAMPLES
#define ENOUGH       256u /* samples */
#define N_ITERATIONS 12
#define MAX_TOGETHER 8u /* coordinates of a group */

/* What k-means learns from, of one head. */
struct samples {
    uint32_t n;
    float residuals[N_SAMPLES * KERNELS_MAX_HEAD_DIM]; /* [n][head_dim] */
    float scaled[KERNELS_MAX_HEAD_DIM][N_SAMPLES];     /* coded coordinates, divided by their key's size */
    float sizes[N_SAMPLES];
};

/* ---- axes ---- */

struct axes {
    float *analysis;  /* [d][d]: row i gives y_i, the largest variance first */
    float *synthesis; /* [d][d]: row i gives q'_i */
    double variances[KERNELS_MAX_HEAD_DIM];
    double cost; /* of |error of y|^2 = 1, in scores: E[q_i^2] was divided by it */
    uint32_t n_groups;
};

/* C [n][n] lower, C C' = a + ridge; whatever a is. */
static void cholesky(const double *a, uint32_t n, double *c)
{
    memset(c, 0, (size_t)n * n * sizeof *c);
    for (uint32_t j = 0; j < n; j++)
        for (uint32_t i = j; i < n; i++) {
            double sum = a[i * n + j] + (i == j ? RIDGE : 0);
            for (uint32_t k = 0; k < j; k++)
                sum -= c[i * n + k] * c[j * n + k];
            c[i * n + j] = i == j ? sqrt(fmax(sum, RIDGE)) : sum / c[j * n + j];
        }
}

/* a (symmetric, destroyed) = z' t z by Householder's reflections; t: diagonal and, from 0 on, what is beside it. */
static void tridiagonalize(double *a, uint32_t n, double *z, double *diagonal, double *beside)
{
    double v[KERNELS_MAX_HEAD_DIM], w[KERNELS_MAX_HEAD_DIM];
    memset(z, 0, (size_t)n * n * sizeof *z);
    for (uint32_t i = 0; i < n; i++)
        z[i * n + i] = 1;
    for (uint32_t k = 0; k + 2 < n; k++) {
        double square = 0;
        for (uint32_t i = k + 1; i < n; i++)
            square += a[i * n + k] * a[i * n + k];
        const double head = a[(k + 1) * n + k], target = head > 0 ? -sqrt(square) : sqrt(square);
        square = 2 * (square - head * target); /* |v|^2 */
        if (!(square > 0))
            continue;
        for (uint32_t i = k + 1; i < n; i++)
            v[i] = (a[i * n + k] - (i == k + 1 ? target : 0)) / sqrt(square);
        double both = 0;
        for (uint32_t i = k + 1; i < n; i++) {
            w[i] = 0;
            for (uint32_t j = k + 1; j < n; j++)
                w[i] += a[i * n + j] * v[j];
            both += w[i] * v[i];
        }
        for (uint32_t i = k + 1; i < n; i++)
            w[i] -= both * v[i];
        for (uint32_t i = k + 1; i < n; i++)
            for (uint32_t j = k + 1; j < n; j++)
                a[i * n + j] -= 2 * (v[i] * w[j] + w[i] * v[j]);
        a[(k + 1) * n + k] = target;
        memset(w, 0, sizeof w);
        for (uint32_t i = k + 1; i < n; i++)
            for (uint32_t j = 0; j < n; j++)
                w[j] += v[i] * z[i * n + j];
        for (uint32_t i = k + 1; i < n; i++)
            for (uint32_t j = 0; j < n; j++)
                z[i * n + j] -= 2 * v[i] * w[j];
    }
    for (uint32_t i = 0; i < n; i++) {
        diagonal[i] = a[i * n + i];
        beside[i] = i + 1 < n ? a[(i + 1) * n + i] : 0;
    }
}

/* QL with implicit shifts (Golub and Van Loan, Matrix Computations, 8.3): eigenvalues into diagonal, vectors are z's rows. */
static void diagonalize(uint32_t n, double *diagonal, double *beside, double *z)
{
    for (uint32_t first = 0; first < n; first++)
        for (int sweep = 0; sweep < MAX_SWEEPS; sweep++) {
            uint32_t last = first;
            for (; last + 1 < n; last++)
                if (fabs(beside[last]) <= 1e-15 * (fabs(diagonal[last]) + fabs(diagonal[last + 1])))
                    break;
            if (last == first)
                break;
            const double slope = (diagonal[first + 1] - diagonal[first]) / (2 * beside[first]);
            const double root = sqrt(slope * slope + 1);
            double bulge = diagonal[last] - diagonal[first] + beside[first] / (slope + (slope < 0 ? -root : root));
            double sine = 1, cosine = 1, shift = 0;
            bool fell_apart = false;
            for (uint32_t i = last; i-- > first && !fell_apart;) {
                const double f = sine * beside[i], b = cosine * beside[i], length = sqrt(f * f + bulge * bulge);
                beside[i + 1] = length;
                if (!(length > 0)) {
                    diagonal[i + 1] -= shift;
                    beside[last] = 0;
                    fell_apart = true;
                    continue;
                }
                sine = f / length;
                cosine = bulge / length;
                const double before = diagonal[i + 1] - shift;
                const double r = (diagonal[i] - before) * sine + 2 * cosine * b;
                shift = sine * r;
                diagonal[i + 1] = before + shift;
                bulge = cosine * r - b;
                double *upper = z + (size_t)i * n, *lower = upper + n;
                for (uint32_t j = 0; j < n; j++) {
                    const double x = upper[j], y = lower[j];
                    lower[j] = sine * x + cosine * y;
                    upper[j] = cosine * x - sine * y;
                }
            }
            if (fell_apart)
                continue;
            diagonal[first] -= shift;
            beside[first] = bulge;
            beside[last] = 0;
        }
}

static float number_of(double x)
{
    return fabs(x) < LEAST_NUMBER ? 0 : (float)x;
}

/* memory: 4 n n doubles */
static void find_axes(const struct key_statistics_head *head, uint32_t n, double *memory, struct axes *axes)
{
    const size_t square = (size_t)n * n;
    double *c = memory, *m = memory + square, *z = m + square, *other = z + square;
    double diagonal[KERNELS_MAX_HEAD_DIM], beside[KERNELS_MAX_HEAD_DIM];
    uint32_t order[KERNELS_MAX_HEAD_DIM];
    axes->cost = 0;
    for (uint32_t i = 0; i < n; i++)
        axes->cost = fmax(axes->cost, (double)head->q_square[(size_t)i * n + i]);
    axes->cost = axes->cost > LEAST_VARIANCE ? axes->cost : 1; /* nothing known: all alike */
    for (size_t i = 0; i < square; i++)
        m[i] = (double)head->q_square[i] / axes->cost;
    cholesky(m, n, c);
    for (uint32_t i = 0; i < n; i++) /* other = spread C */
        for (uint32_t j = 0; j < n; j++) {
            double sum = 0;
            for (uint32_t k = j; k < n; k++)
                sum += (double)head->k_spread[(size_t)i * n + k] * c[k * n + j];
            other[i * n + j] = sum;
        }
    for (uint32_t i = 0; i < n; i++) /* m = C' spread C */
        for (uint32_t j = 0; j <= i; j++) {
            double sum = 0;
            for (uint32_t k = i; k < n; k++)
                sum += c[k * n + i] * other[k * n + j];
            m[i * n + j] = m[j * n + i] = sum;
        }
    tridiagonalize(m, n, z, diagonal, beside);
    diagonalize(n, diagonal, beside, z);

    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = i;
        for (; at > 0 && diagonal[order[at - 1]] < diagonal[i]; at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    for (uint32_t i = 0; i < n; i++) {
        const double *u = z + (size_t)order[i] * n;
        double solved[KERNELS_MAX_HEAD_DIM];
        axes->variances[i] = diagonal[order[i]] > LEAST_VARIANCE ? diagonal[order[i]] : 0;
        for (uint32_t j = 0; j < n; j++) { /* u' C' */
            double sum = 0;
            for (uint32_t k = 0; k <= j; k++)
                sum += u[k] * c[j * n + k];
            axes->analysis[(size_t)i * n + j] = number_of(sum);
        }
        for (uint32_t j = n; j-- > 0;) { /* C'^-1 u, so that its product with q is u' C^-1 q */
            double sum = u[j];
            for (uint32_t k = j + 1; k < n; k++)
                sum -= c[k * n + j] * solved[k];
            solved[j] = sum / c[j * n + j];
            axes->synthesis[(size_t)i * n + j] = number_of(solved[j]);
        }
    }
}

/* ---- how many groups ---- */

/* What n_groups more or fewer are worth: errors[g] is the head's error with g groups, up to most. */
static void errors_of(const struct axes *axes, uint32_t n, uint32_t most, double *errors)
{
    uint32_t bits[KERNELS_MAX_HEAD_DIM] = {0};
    double error = 0;
    for (uint32_t i = 0; i < n; i++)
        error += axes->variances[i];
    for (uint32_t g = 0; g <= most; g++) {
        errors[g] = axes->cost * error;
        for (uint32_t bit = 0; bit < 4; bit++) {
            uint32_t best = 0;
            double gain = 0;
            for (uint32_t i = 0; i < n; i++) {
                const double it = bits[i] == 4 ? 0
                                               : axes->variances[i] * (codec_pair_table_distortion(bits[i]) -
                                                                       codec_pair_table_distortion(bits[i] + 1));
                best = it > gain ? i : best;
                gain = it > gain ? it : gain;
            }
            if (gain > 0)
                bits[best]++;
            error -= gain;
        }
    }
}

static int share_groups(struct axes *axes, size_t n_heads, uint32_t n, double tile_bytes)
{
    const uint32_t most = (n < PAIR_MAX_GROUPS ? n - 1 : PAIR_MAX_GROUPS - 1) | 1u;
    double *errors = malloc(n_heads * (most + 1) * sizeof *errors), left = tile_bytes * (double)n_heads;
    if (!errors)
        return -ENOMEM;
    for (size_t h = 0; h < n_heads; h++) {
        errors_of(&axes[h], n, most, errors + h * (most + 1));
        axes[h].n_groups = 1;
        const struct pair_layout layout = {n, 1, true};
        left -= (double)pair_tile_bytes(&layout);
    }
    for (; left >= PAIR_KEYS; left -= PAIR_KEYS) {
        size_t best = n_heads;
        double most_gained = 0;
        for (size_t h = 0; h < n_heads; h++) {
            const double *of_head = errors + h * (most + 1);
            const uint32_t g = axes[h].n_groups;
            if (g + 2 <= most && of_head[g] - of_head[g + 2] > most_gained) {
                best = h;
                most_gained = of_head[g] - of_head[g + 2];
            }
        }
        if (best == n_heads)
            break;
        axes[best].n_groups += 2;
    }
    free(errors);
    return 0;
}

/* ---- groups and codewords ---- */

/* group [n]: of each coordinate, n_groups: none. */
static void form_groups(const struct axes *axes, uint32_t n, uint32_t n_groups, uint32_t *group)
{
    double low = -100, high = 130, filled[PAIR_MAX_GROUPS] = {0}; /* log2 of the water's level */
    uint32_t counts[PAIR_MAX_GROUPS] = {0};
    for (int round = 0; round < 60; round++) {
        const double level = (low + high) / 2;
        double sum = 0;
        for (uint32_t i = 0; i < n; i++)
            if (axes->variances[i] > 0)
                sum += fmin(fmax(0.5 * (log2(axes->variances[i]) - level), 0), 4);
        *(sum > 4 * n_groups ? &low : &high) = level;
    }
    for (uint32_t i = 0; i < n; i++) {
        const double deserved = axes->variances[i] > 0 ? 0.5 * (log2(axes->variances[i]) - high) : -INFINITY;
        uint32_t best = n_groups;
        for (uint32_t g = 0; g < n_groups && deserved > SLIGHTLY_BELOW; g++)
            if (counts[g] < MAX_TOGETHER && (best == n_groups || filled[g] < filled[best]))
                best = g;
        group[i] = best;
        if (best < n_groups) {
            filled[best] += fmin(fmax(deserved, 0), 4) + 0.05;
            counts[best]++;
        }
    }
}

/* Nearly normal, and the same everywhere: the sum of 12 uniform numbers. */
static float normal(uint64_t *state)
{
    int64_t sum = 0;
    for (int k = 0; k < 12; k++) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        sum += (int64_t)(*state >> 40);
    }
    return (float)(sum - ((int64_t)6 << 24)) * 0x1p-24f;
}

/* samples->scaled of the coordinates coded [n_coded], from the head's residuals or made up. */
static void scale_samples(const struct key_statistics *statistics, size_t head, const struct axes *axes,
                          const uint32_t *coded, uint32_t n_coded, struct samples *samples)
{
    const uint32_t n = statistics->head_dim;
    const bool real = statistics->n_samples >= ENOUGH;
    uint64_t state = 1;
    samples->n = real ? statistics->n_samples : N_SAMPLES;
    if (real)
        kernels_get(KERNELS_ISA_PLAIN)
            ->f16_decode(statistics->samples + head * samples->n * n, (size_t)samples->n * n, samples->residuals);
    memset(samples->sizes, 0, sizeof samples->sizes);
    for (uint32_t c = 0; c < n_coded; c++) {
        const float *row = axes->analysis + (size_t)coded[c] * n;
        const double variance = axes->variances[coded[c]];
        for (uint32_t s = 0; s < samples->n; s++) {
            float lanes[8] = {0}; /* so that a compiler may use vectors */
            for (uint32_t i = 0; real && i < n / 8 * 8; i += 8)
                for (uint32_t lane = 0; lane < 8; lane++)
                    lanes[lane] += row[i + lane] * samples->residuals[s * n + i + lane];
            for (uint32_t i = n / 8 * 8; real && i < n; i++)
                lanes[i % 8] += row[i] * samples->residuals[s * n + i];
            const float y =
                real ? ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]))
                     : (float)sqrt(variance) * normal(&state);
            samples->scaled[c][s] = isfinite(y) ? y : 0; /* rows of a broken model */
            samples->sizes[s] += samples->scaled[c][s] * samples->scaled[c][s] / (float)(variance * n_coded);
        }
    }
    for (uint32_t s = 0; s < samples->n; s++)
        samples->sizes[s] = samples->sizes[s] > 0 ? 1 / sqrtf(samples->sizes[s]) : 0;
    for (uint32_t c = 0; c < n_coded; c++)
        for (uint32_t s = 0; s < samples->n; s++)
            samples->scaled[c][s] *= samples->sizes[s];
}

/* The product of scalar levels, bits given greedily: where k-means starts. */
static void first_codewords(const double *deviations, uint32_t n, float *codewords)
{
    uint32_t bits[MAX_TOGETHER] = {0};
    for (int bit = 0; bit < 4 && n > 0; bit++) {
        uint32_t best = 0;
        double most = -1;
        for (uint32_t i = 0; i < n; i++) {
            const double gain =
                bits[i] == 4 ? 0
                             : deviations[i] * deviations[i] *
                                   (codec_pair_table_distortion(bits[i]) - codec_pair_table_distortion(bits[i] + 1));
            best = gain > most ? i : best;
            most = gain > most ? gain : most;
        }
        bits[best]++;
    }
    for (uint32_t c = 0; c < PAIR_CODEWORDS; c++)
        for (uint32_t i = 0, shift = 0; i < n; shift += bits[i++])
            codewords[c * n + i] = bits[i] ? (float)(deviations[i] * (double)codec_pair_table_level(
                                                                         bits[i], c >> shift & ((1u << bits[i]) - 1)))
                                           : 0;
}

static void k_means(const float (*scaled)[N_SAMPLES], uint32_t n_samples, const double *deviations, uint32_t n,
                    float *codewords)
{
    first_codewords(deviations, n, codewords);
    for (int iteration = 0; iteration < N_ITERATIONS; iteration++) {
        float nearest[N_SAMPLES];
        int32_t chosen[N_SAMPLES];
        for (uint32_t c = 0; c < PAIR_CODEWORDS; c++) {
            float distances[N_SAMPLES] = {0};
            for (uint32_t i = 0; i < n; i++)
                for (uint32_t s = 0; s < n_samples; s++) {
                    const float difference = scaled[i][s] - codewords[c * n + i];
                    distances[s] += difference * difference;
                }
            for (uint32_t s = 0; s < n_samples; s++) {
                const int nearer = c == 0 || distances[s] < nearest[s];
                nearest[s] = nearer ? distances[s] : nearest[s];
                chosen[s] = nearer ? (int32_t)c : chosen[s];
            }
        }
        double sums[PAIR_CODEWORDS][MAX_TOGETHER] = {0};
        uint32_t counts[PAIR_CODEWORDS] = {0};
        for (uint32_t s = 0; s < n_samples; s++) {
            counts[chosen[s]]++;
            for (uint32_t i = 0; i < n; i++)
                sums[chosen[s]][i] += (double)scaled[i][s];
        }
        for (uint32_t c = 0; c < PAIR_CODEWORDS; c++)
            for (uint32_t i = 0; i < n && counts[c] > 0; i++)
                codewords[c * n + i] = (float)(sums[c][i] / counts[c]);
    }
}

static struct pair_table *make_table(const struct key_statistics *statistics, size_t head, const struct axes *axes,
                                     struct samples *samples)
{
    const uint32_t n = statistics->head_dim;
    const struct pair_layout layout = {n, axes->n_groups, true};
    uint32_t group[KERNELS_MAX_HEAD_DIM], coded[KERNELS_MAX_HEAD_DIM], n_coded = 0;
    form_groups(axes, n, axes->n_groups, group);
    for (uint32_t g = 0; g < axes->n_groups; g++)
        for (uint32_t i = 0; i < n; i++)
            if (group[i] == g)
                coded[n_coded++] = i;
    struct pair_table *table = codec_pair_table_alloc(&layout, n_coded, true);
    if (!table)
        return NULL;
    scale_samples(statistics, head, axes, coded, n_coded, samples);
    for (uint32_t c = 0; c < n_coded; c++) {
        memcpy(table->analysis + (size_t)c * n, axes->analysis + (size_t)coded[c] * n, n * sizeof(float));
        for (uint32_t k = 0; k < n; k++)
            table->synthesis[(size_t)k * n_coded + c] = axes->synthesis[(size_t)coded[c] * n + k];
        table->inverse_spread[c] = (float)(1 / (axes->variances[coded[c]] * n_coded));
    }
    for (uint32_t g = 0, first = 0; g < axes->n_groups; first += table->groups[g++].n) {
        double deviations[MAX_TOGETHER];
        struct pair_group *it = &table->groups[g];
        *it = (struct pair_group){.first = (uint16_t)first, .codewords = first * PAIR_CODEWORDS};
        for (uint32_t c = first; c < n_coded && group[coded[c]] == g; c++)
            deviations[it->n++] = sqrt(axes->variances[coded[c]]);
        float *codewords = table->codewords + it->codewords;
        k_means(samples->scaled + first, samples->n, deviations, it->n, codewords);
        for (uint32_t c = 0; c < PAIR_CODEWORDS; c++) {
            double square = 0;
            for (uint32_t i = 0; i < it->n; i++)
                square += (double)codewords[c * it->n + i] * (double)codewords[c * it->n + i];
            table->half_squares[g * PAIR_CODEWORDS + c] = (float)(0.5 * square);
        }
    }
    return table;
}

int codec_pair_klt_tables(const struct key_statistics *statistics, double tile_bytes, struct pair_table **tables)
{
    const uint32_t n = statistics->head_dim;
    const size_t n_heads = (size_t)statistics->n_layers * statistics->n_kv_heads, square = (size_t)n * n;
    struct axes *axes = calloc(n_heads, sizeof *axes);
    float *matrices = malloc(n_heads * 2 * square * sizeof *matrices);
    struct samples *samples = malloc(sizeof *samples);
    double *memory = malloc(4 * square * sizeof *memory);
    int r = axes && matrices && samples && memory ? 0 : -ENOMEM;
    for (size_t h = 0; h < n_heads && r == 0; h++) {
        const struct key_statistics_head head = key_statistics_head(statistics, (uint32_t)(h / statistics->n_kv_heads),
                                                                    (uint32_t)(h % statistics->n_kv_heads));
        axes[h].analysis = matrices + h * 2 * square;
        axes[h].synthesis = axes[h].analysis + square;
        find_axes(&head, n, memory, &axes[h]);
    }
    if (r == 0)
        r = share_groups(axes, n_heads, n, tile_bytes);
    for (size_t h = 0; h < n_heads && r == 0; h++)
        r = (tables[h] = make_table(statistics, h, &axes[h], samples)) ? 0 : -ENOMEM;
    free(memory);
    free(samples);
    free(matrices);
    free(axes);
    return r;
}
