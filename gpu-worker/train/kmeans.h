/*
 * kmeans.h - codebooks of small vectors by mini-batch k-means (Sculley, Web-scale k-means clustering, WWW 2010).
 *
 * Start      k-means++ (Arthur and Vassilvitskii 2007) for the first 256 centroids, then as many more again and again, drawn by
 *            their square distance from what is there (in the way of k-means||, Bahmani et al. 2012).
 * Iteration  the next 10,000 samples of a shuffled order are assigned to their nearest centroids, exactly (codec_pq.h searches:
 *            as the codec will); each centroid goes to the mean of what it has got, its past weighing less from pass to pass.
 *            Centroids that have got nothing during a pass over the samples start again at samples that are far from all others.
 * End        after max_iterations, or when the smoothed error of the batches does not improve any more.
 *
 * Owner      whoever made it. Threads: one at a time; several objects side by side.
 * Invariant  the result follows from samples, their number, sizes and seed: not from threads, time or instruction set.
 */
#pragma once

#include <stdint.h>

#include "gpu-worker/keys/codec_pq.h"

enum { KMEANS_BATCH = 10000, KMEANS_MIN_CENTROIDS = PQ_MIN_CENTROIDS };

struct kmeans;

struct kmeans_result {
    uint32_t n_iterations;
    double error;    /* sum of square distances of all samples from their centroids in half precision */
    double variance; /* sum of square distances from their mean */
};

/* n_dims 2, 4 or 8; n_centroids a power of two, 256 .. 4096. -ENOMEM. */
int kmeans_new(const struct pq_kernels *kernels, uint32_t n_dims, uint32_t n_centroids, uint32_t max_samples,
               struct kmeans **ret_kmeans);
struct kmeans *kmeans_free(struct kmeans *kmeans); /* accepts NULL, returns NULL */

/* Where the samples go: [max_samples][n_dims], finite, of the size of keys (codec_pq_cleaned()). */
float *kmeans_samples(struct kmeans *kmeans);
/* Forgets what was before; n samples (1 .. max_samples) are there, and lie in another order from now on. */
void kmeans_begin(struct kmeans *kmeans, uint32_t n, uint64_t seed, uint32_t max_iterations);
/* One iteration, or the start; some milliseconds. 1: there is more to do; 0: done. */
int kmeans_advance(struct kmeans *kmeans);
/* After it is done: [n_centroids][n_dims]. */
const float *kmeans_centroids(const struct kmeans *kmeans, struct kmeans_result *ret_result);
