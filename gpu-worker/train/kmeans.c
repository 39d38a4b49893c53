/* kmeans.c - see kmeans.h. */
#include "gpu-worker/train/kmeans.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define N_FIRST_SAMPLES 4096u  /* that k-means++ looks at */
#define N_START_SAMPLES 16384u /* that the rest of the start looks at */
#define SORT_EVERY      4u     /* iterations; the order of leaves only decides how fast a search is */
#define PATIENCE        10u    /* iterations without IMPROVEMENT after which it stops */
#define IMPROVEMENT     1e-3   /* of the smoothed error, relative */
#define FORGET          0.5    /* what a centroid's past weighs after a pass over the samples */

struct kmeans {
    const struct pq_kernels *kernels;
    uint32_t n_dims, n_centroids, max_samples;
    uint32_t n, max_iterations;
    bool started, done;
    uint64_t random;
    uint32_t n_passes;      /* over the samples */
    uint32_t at;            /* the next batch begins here */
    uint32_t without;       /* iterations without improvement */
    double smoothed, least; /* error of a sample */
    struct kmeans_result result;
    float *samples;    /* [max_samples][n_dims] */
    float *distances;  /* [max_samples] */
    uint16_t *numbers; /* [max_samples] */
    float *centroids;  /* [n_centroids][n_dims] */
    double *weights;   /* [n_centroids]: samples that a centroid is the mean of */
    double *sums;      /* [n_centroids][1 + n_dims]: of a batch */
    uint32_t *got;     /* [n_centroids]: samples of this pass */
    uint16_t *order;   /* of the search, like the following */
    uint16_t *halves;
    float *boxes;
};

/* Steele, Lea and Flood's SplitMix. */
static uint64_t random_bits(struct kmeans *kmeans)
{
    uint64_t z = kmeans->random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
static uint32_t random_below(struct kmeans *kmeans, uint32_t n)
{
    return (uint32_t)((random_bits(kmeans) >> 32) * n >> 32);
}
static double random_unit(struct kmeans *kmeans)
{
    return (double)(random_bits(kmeans) >> 11) * 0x1p-53;
}

int kmeans_new(const struct pq_kernels *kernels, uint32_t n_dims, uint32_t n_centroids, uint32_t max_samples,
               struct kmeans **ret_kmeans)
{
    struct kmeans *kmeans = calloc(1, sizeof *kmeans);
    if (kmeans == NULL)
        return -ENOMEM;
    *kmeans = (struct kmeans){.kernels = kernels,
                              .n_dims = n_dims,
                              .n_centroids = n_centroids,
                              .max_samples = max_samples,
                              .done = true,
                              .samples = calloc((size_t)max_samples * n_dims, sizeof(float)),
                              .distances = calloc(max_samples, sizeof(float)),
                              .numbers = calloc(max_samples, sizeof(uint16_t)),
                              .centroids = calloc((size_t)n_centroids * n_dims, sizeof(float)),
                              .weights = calloc(n_centroids, sizeof(double)),
                              .sums = calloc((size_t)n_centroids * (1 + n_dims), sizeof(double)),
                              .got = calloc(n_centroids, sizeof(uint32_t)),
                              .order = calloc(n_centroids, sizeof(uint16_t)),
                              .halves = calloc((size_t)n_centroids * n_dims, sizeof(uint16_t)),
                              .boxes = calloc(pq_box_floats(n_dims, n_centroids), sizeof(float))};
    if (!kmeans->samples || !kmeans->distances || !kmeans->numbers || !kmeans->centroids || !kmeans->weights ||
        !kmeans->sums || !kmeans->got || !kmeans->order || !kmeans->halves || !kmeans->boxes) {
        kmeans_free(kmeans);
        return -ENOMEM;
    }
    *ret_kmeans = kmeans;
    return 0;
}

struct kmeans *kmeans_free(struct kmeans *kmeans)
{
    if (kmeans != NULL) {
        free(kmeans->samples);
        free(kmeans->distances);
        free(kmeans->numbers);
        free(kmeans->centroids);
        free(kmeans->weights);
        free(kmeans->sums);
        free(kmeans->got);
        free(kmeans->order);
        free(kmeans->halves);
        free(kmeans->boxes);
    }
    free(kmeans);
    return NULL;
}

float *kmeans_samples(struct kmeans *kmeans)
{
    return kmeans->samples;
}

void kmeans_begin(struct kmeans *kmeans, uint32_t n, uint64_t seed, uint32_t max_iterations)
{
    const uint32_t n_dims = kmeans->n_dims;
    kmeans->n = n;
    kmeans->max_iterations = max_iterations;
    kmeans->random = seed;
    kmeans->started = kmeans->done = false;
    kmeans->at = kmeans->n_passes = kmeans->without = 0;
    kmeans->smoothed = kmeans->least = 0;
    kmeans->result = (struct kmeans_result){0};
    for (uint32_t i = n; i > 1; i--) { /* Fisher and Yates */
        float *a = kmeans->samples + (size_t)(i - 1) * n_dims;
        float *b = kmeans->samples + (size_t)random_below(kmeans, i) * n_dims;
        for (uint32_t d = 0; d < n_dims; d++) {
            const float kept = a[d];
            a[d] = b[d];
            b[d] = kept;
        }
    }
}

static const float *sample(const struct kmeans *kmeans, uint32_t i)
{
    return kmeans->samples + (size_t)i * kmeans->n_dims;
}

static void put_centroid(struct kmeans *kmeans, uint32_t number, uint32_t from)
{
    memcpy(kmeans->centroids + (size_t)number * kmeans->n_dims, sample(kmeans, from), kmeans->n_dims * sizeof(float));
}

/* Assigns samples [first, first + n) to the first n_centroids: numbers[] in the order of the search, distances[]. */
static void assign(struct kmeans *kmeans, uint32_t n_centroids, bool sort, uint32_t first, uint32_t n)
{
    if (sort)
        codec_pq_sort(kmeans->n_dims, n_centroids, kmeans->centroids, kmeans->order);
    codec_pq_fill(kmeans->n_dims, n_centroids, kmeans->centroids, kmeans->order, kmeans->halves, kmeans->boxes);
    const struct pq_space space = {kmeans->n_dims, n_centroids, kmeans->halves, kmeans->boxes};
    kmeans->kernels->nearest(&space, sample(kmeans, first), n, kmeans->numbers + first, kmeans->distances + first);
}

/* ---- start ---- */

static void plus_plus(struct kmeans *kmeans)
{
    const uint32_t n = kmeans->n < N_FIRST_SAMPLES ? kmeans->n : N_FIRST_SAMPLES, n_dims = kmeans->n_dims;
    uint32_t chosen = random_below(kmeans, n);
    for (uint32_t i = 0; i < n; i++)
        kmeans->distances[i] = INFINITY;
    for (uint32_t c = 0; c < KMEANS_MIN_CENTROIDS; c++) {
        double total = 0;
        put_centroid(kmeans, c, chosen);
        for (uint32_t i = 0; i < n; i++) {
            float distance = 0;
            for (uint32_t d = 0; d < n_dims; d++) {
                const float difference = sample(kmeans, i)[d] - sample(kmeans, chosen)[d];
                distance += difference * difference;
            }
            if (distance < kmeans->distances[i])
                kmeans->distances[i] = distance;
            total += (double)kmeans->distances[i];
        }
        double mark = random_unit(kmeans) * total;
        chosen = random_below(kmeans, n); /* where all lie on centroids */
        for (uint32_t i = 0; i < n && total > 0; i++) {
            mark -= (double)kmeans->distances[i];
            if (kmeans->distances[i] > 0) {
                chosen = i;
                if (mark < 0)
                    break;
            }
        }
    }
}

/*
 * Up to n_wanted samples of [first, first + n), each at most once, each by its square distance (systematic sampling; the samples
 * are shuffled). Returns how many.
 */
static uint32_t draw(struct kmeans *kmeans, uint32_t first, uint32_t n, uint32_t n_wanted, uint32_t *drawn)
{
    double total = 0, reached = 0;
    uint32_t n_drawn = 0;
    for (uint32_t i = first; i < first + n; i++)
        total += (double)kmeans->distances[i];
    const double step = total / n_wanted;
    double mark = random_unit(kmeans) * step;
    if (!(step > 0))
        return 0;
    for (uint32_t i = first; i < first + n && n_drawn < n_wanted; i++) {
        reached += (double)kmeans->distances[i];
        if (reached <= mark || !(kmeans->distances[i] > 0))
            continue;
        drawn[n_drawn++] = i;
        mark += step * (floor((reached - mark) / step) + 1);
    }
    return n_drawn;
}

static void start(struct kmeans *kmeans)
{
    const uint32_t n = kmeans->n < N_START_SAMPLES ? kmeans->n : N_START_SAMPLES;
    uint32_t drawn[PQ_MAX_CENTROIDS];
    plus_plus(kmeans);
    for (uint32_t n_there = KMEANS_MIN_CENTROIDS; n_there < kmeans->n_centroids; n_there *= 2) {
        assign(kmeans, n_there, true, 0, n);
        const uint32_t n_drawn = draw(kmeans, 0, n, n_there, drawn);
        for (uint32_t i = 0; i < n_there; i++)
            put_centroid(kmeans, n_there + i, i < n_drawn ? drawn[i] : random_below(kmeans, n));
    }
    memset(kmeans->weights, 0, kmeans->n_centroids * sizeof *kmeans->weights);
    memset(kmeans->got, 0, kmeans->n_centroids * sizeof *kmeans->got);
    kmeans->started = true;
}

/* ---- iterations ---- */

static void move_centroids(struct kmeans *kmeans, uint32_t first, uint32_t n)
{
    const uint32_t n_dims = kmeans->n_dims, width = 1 + n_dims;
    memset(kmeans->sums, 0, (size_t)kmeans->n_centroids * width * sizeof *kmeans->sums);
    for (uint32_t i = first; i < first + n; i++) {
        double *sums = kmeans->sums + (size_t)kmeans->order[kmeans->numbers[i]] * width;
        sums[0] += 1;
        for (uint32_t d = 0; d < n_dims; d++)
            sums[1 + d] += (double)sample(kmeans, i)[d];
    }
    for (uint32_t c = 0; c < kmeans->n_centroids; c++) {
        const double *sums = kmeans->sums + (size_t)c * width;
        const double weight = kmeans->weights[c] + sums[0];
        float *centroid = kmeans->centroids + (size_t)c * n_dims;
        if (!(sums[0] > 0))
            continue;
        /* the mean of all so far: what Sculley's steps of 1 / weight, sample by sample, come to */
        for (uint32_t d = 0; d < n_dims; d++)
            centroid[d] = (float)(((double)centroid[d] * kmeans->weights[c] + sums[1 + d]) / weight);
        kmeans->weights[c] = weight;
        kmeans->got[c] += (uint32_t)sums[0];
    }
}

/* After a pass over the samples: empty centroids begin again at samples of the last batch, the past of all others fades. */
static void end_pass(struct kmeans *kmeans, uint32_t first, uint32_t n)
{
    uint32_t n_empty = 0, drawn[PQ_MAX_CENTROIDS];
    for (uint32_t c = 0; c < kmeans->n_centroids; c++)
        n_empty += kmeans->got[c] == 0;
    const uint32_t n_drawn = n_empty ? draw(kmeans, first, n, n_empty, drawn) : 0;
    for (uint32_t c = 0, i = 0; c < kmeans->n_centroids; c++) {
        kmeans->weights[c] *= FORGET;
        if (kmeans->got[c] == 0 && i < n_drawn) {
            put_centroid(kmeans, c, drawn[i++]);
            kmeans->weights[c] = 0;
        }
        kmeans->got[c] = 0;
    }
    kmeans->n_passes++;
}

/* Is it worth going on? Batches of the first pass hold samples that centroids started at: their errors say too little. */
static bool improves(struct kmeans *kmeans, double error, uint32_t n_batch)
{
    const double pull = n_batch * 2 >= kmeans->n ? 1 : 2.0 * n_batch / kmeans->n;
    kmeans->smoothed = kmeans->n_passes == 0 ? error : kmeans->smoothed + pull * (error - kmeans->smoothed);
    if (kmeans->n_passes == 0 || kmeans->smoothed < kmeans->least * (1 - IMPROVEMENT)) {
        kmeans->least = kmeans->n_passes == 0 ? INFINITY : kmeans->smoothed;
        kmeans->without = 0;
    } else {
        kmeans->without++;
    }
    return (error > 0 || kmeans->n_passes == 0) && kmeans->without < PATIENCE;
}

static void finish(struct kmeans *kmeans)
{
    double mean[PQ_MAX_DIMS] = {0};
    assign(kmeans, kmeans->n_centroids, true, 0, kmeans->n);
    for (uint32_t i = 0; i < kmeans->n; i++)
        for (uint32_t d = 0; d < kmeans->n_dims; d++)
            mean[d] += (double)sample(kmeans, i)[d] / kmeans->n;
    for (uint32_t i = 0; i < kmeans->n; i++) {
        kmeans->result.error += (double)kmeans->distances[i];
        for (uint32_t d = 0; d < kmeans->n_dims; d++)
            kmeans->result.variance +=
                ((double)sample(kmeans, i)[d] - mean[d]) * ((double)sample(kmeans, i)[d] - mean[d]);
    }
    kmeans->done = true;
}

int kmeans_advance(struct kmeans *kmeans)
{
    if (kmeans->done)
        return 0;
    if (!kmeans->started) {
        start(kmeans);
        return 1;
    }
    /* batches of about one size that end where the order ends: a pass sees every sample once */
    const uint32_t n_batches = (kmeans->n + KMEANS_BATCH - 1) / KMEANS_BATCH;
    const uint32_t most = (kmeans->n + n_batches - 1) / n_batches;
    const uint32_t first = kmeans->at, left = kmeans->n - first, n = left < most ? left : most;
    double error = 0;
    assign(kmeans, kmeans->n_centroids, kmeans->result.n_iterations % SORT_EVERY == 0, first, n);
    for (uint32_t i = first; i < first + n; i++)
        error += (double)kmeans->distances[i];
    move_centroids(kmeans, first, n);
    kmeans->result.n_iterations++;
    kmeans->at = first + n < kmeans->n ? first + n : 0;
    if (!improves(kmeans, error / n, n) || kmeans->result.n_iterations >= kmeans->max_iterations)
        finish(kmeans);
    else if (kmeans->at == 0)
        end_pass(kmeans, first, n);
    return !kmeans->done;
}

const float *kmeans_centroids(const struct kmeans *kmeans, struct kmeans_result *ret_result)
{
    *ret_result = kmeans->result;
    return kmeans->centroids;
}
