/*
 * test_kmeans.c - codebooks by mini-batch k-means: clusters that lie apart are found, the result follows from samples and seed
 * alone, training stops when nothing improves, and samples with little in them do no harm.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu-worker/train/kmeans.h"

static uint64_t state;

static double uniform(void) /* 0 .. 1 */
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (double)(state >> 11) * 0x1p-53;
}
static float normal(double size)
{
    return (float)(size * sqrt(-2.0 * log(uniform() + 1e-300)) * cos(6.28318530717958648 * uniform()));
}

static struct kmeans *made(enum kernels_isa isa, uint32_t n_dims, uint32_t n_centroids, uint32_t max_samples)
{
    struct kmeans *kmeans = NULL;
    assert_int_equal(kmeans_new(codec_pq_kernels(kernels_get(isa)), n_dims, n_centroids, max_samples, &kmeans), 0);
    return kmeans;
}

static struct kmeans_result trained(struct kmeans *kmeans, uint32_t n, uint64_t seed, uint32_t max_iterations)
{
    struct kmeans_result result;
    kmeans_begin(kmeans, n, seed, max_iterations);
    while (kmeans_advance(kmeans))
        ;
    assert_int_equal(kmeans_advance(kmeans), 0); /* and stays so */
    kmeans_centroids(kmeans, &result);
    return result;
}

static void fill(struct kmeans *kmeans, uint32_t n_dims, uint32_t n, uint64_t seed)
{
    state = 88172645463325252u + seed;
    for (uint32_t i = 0; i < n * n_dims; i++)
        kmeans_samples(kmeans)[i] = normal(1 + i % n_dims);
}

/* 64 clusters on a lattice, far apart: every one has centroids, and no centroid lies between them. */
static void test_clusters_are_found(void **unused)
{
    (void)unused;
    for (uint32_t n_dims = 2; n_dims <= 8; n_dims *= 2) {
        enum { N = 6000 };
        struct kmeans *kmeans = made(KERNELS_ISA_AUTO, n_dims, 256, N);
        struct kmeans_result result;
        state = 88172645463325252u;
        for (uint32_t i = 0; i < N; i++)
            for (uint32_t d = 0; d < n_dims; d++)
                kmeans_samples(kmeans)[i * n_dims + d] = 10 * (float)(d == 0   ? i % 8
                                                                      : d == 1 ? i / 8 % 8
                                                                               : 3) +
                                                         normal(0.1);
        result = trained(kmeans, N, 5, 200);
        const float *centroids = kmeans_centroids(kmeans, &result);
        uint32_t seen[64] = {0}, n_seen = 0;
        for (uint32_t c = 0; c < 256; c++) {
            const float *at = centroids + (size_t)c * n_dims;
            const long x = lroundf(at[0] / 10), y = lroundf(at[1] / 10);
            assert_true(x >= 0 && x < 8 && y >= 0 && y < 8);
            for (uint32_t d = 0; d < n_dims; d++)
                assert_true(fabsf(at[d] - 10 * (float)(d == 0 ? x : d == 1 ? y : 3)) < 0.6f);
            n_seen += seen[x * 8 + y]++ == 0;
        }
        assert_int_equal(n_seen, 64);
        assert_true(result.error < N * n_dims * 0.01); /* less than the clusters' own width: they are split */
        kmeans_free(kmeans);
    }
}

/* Better than a start alone, about as good as the known density of centroids allows (Zador: 1 / n in two dimensions). */
static void test_it_is_near_the_optimum(void **unused)
{
    (void)unused;
    enum { N = 30000 };
    struct kmeans *kmeans = made(KERNELS_ISA_AUTO, 2, 256, N);
    fill(kmeans, 2, N, 1);
    const struct kmeans_result one = trained(kmeans, N, 3, 1);
    fill(kmeans, 2, N, 1);
    const struct kmeans_result many = trained(kmeans, N, 3, 200);
    assert_true(many.n_iterations > 10 && many.n_iterations < 200); /* it saw that it was done */
    assert_int_equal(one.n_iterations, 1);
    assert_true(many.error < 0.95 * one.error);
    assert_true(many.variance / N > 4.7 && many.variance / N < 5.3); /* 1 + 4 */
    /* hexagons: 5 / (36 sqrt 3) (integral of sqrt of the density)^2 / n, twice for two dimensions; that is 8 pi s1 s2 */
    const double zador = 2 * 5 / (36 * sqrt(3.0)) * 8 * 3.14159265 * 2 / 256;
    assert_true(many.error / N > 0.85 * zador && many.error / N < 1.1 * zador);
    kmeans_free(kmeans);
}

static void test_the_seed_decides(void **unused)
{
    (void)unused;
    enum { N = 12000, N_CENTROIDS = 512, N_DIMS = 4 };
    static float first[N_CENTROIDS * N_DIMS];
    struct kmeans_result result, again;
    for (enum kernels_isa isa = KERNELS_ISA_PLAIN; isa < KERNELS_N_ISA; isa++) {
        if (kernels_get(isa) == NULL)
            continue;
        struct kmeans *kmeans = made(isa, N_DIMS, N_CENTROIDS, N);
        fill(kmeans, N_DIMS, N, 2);
        trained(kmeans, N, 99, 3); /* what was before does not matter */
        fill(kmeans, N_DIMS, N, 1);
        result = trained(kmeans, N, 7, 6);
        if (isa == KERNELS_ISA_PLAIN) {
            memcpy(first, kmeans_centroids(kmeans, &again), sizeof first);
            fill(kmeans, N_DIMS, N, 1);
            trained(kmeans, N, 8, 6);
            assert_memory_not_equal(first, kmeans_centroids(kmeans, &again), sizeof first);
        } else {
            assert_memory_equal(first, kmeans_centroids(kmeans, &again), sizeof first);
        }
        assert_int_equal(result.n_iterations, 6);
        kmeans_free(kmeans);
    }
}

static void test_little_to_learn(void **unused)
{
    (void)unused;
    enum { N = 5000 };
    struct kmeans *kmeans = made(KERNELS_ISA_AUTO, 2, 4096, N);
    struct kmeans_result result;
    float *samples = kmeans_samples(kmeans);
    for (uint32_t i = 0; i < 2 * N; i++) /* all equal */
        samples[i] = 1.25f;
    result = trained(kmeans, N, 1, 200);
    assert_true(result.error == 0 && result.variance < 1e-12 && result.n_iterations < 20);
    for (uint32_t i = 0; i < 2 * 4096; i++)
        assert_true(kmeans_centroids(kmeans, &result)[i] == 1.25f);

    for (uint32_t i = 0; i < 2 * N; i++) /* nothing but zeros */
        samples[i] = 0;
    assert_true(trained(kmeans, N, 1, 200).error == 0);

    for (uint32_t i = 0; i < N; i++) { /* 1,000 points, fewer than centroids, some of them rare */
        const uint32_t point = i < 4000 ? i % 20 : i - 4000;
        samples[2 * i] = (float)(point % 40);
        samples[2 * i + 1] = (float)(point / 40);
    }
    result = trained(kmeans, N, 1, 200);
    assert_true(result.error == 0);

    samples[0] = 3; /* a single sample */
    samples[1] = -4;
    result = trained(kmeans, 1, 1, 200);
    assert_true(result.error == 0 && result.variance == 0);
    assert_true(kmeans_centroids(kmeans, &result)[8191] == -4);

    for (uint32_t i = 0; i < 2 * 300; i++) /* fewer samples than centroids */
        samples[i] = (float)i;
    assert_true(trained(kmeans, 300, 1, 200).error == 0);
    kmeans_free(kmeans);
    assert_null(kmeans_free(NULL));
}

/* Outliers far away, of which the start sees few: their centroids come from those that had nothing. */
static void test_the_empty_begin_again(void **unused)
{
    (void)unused;
    enum { N = 20000 };
    struct kmeans *kmeans = made(KERNELS_ISA_AUTO, 2, 512, N);
    float *samples = kmeans_samples(kmeans);
    state = 88172645463325252u;
    for (uint32_t i = 0; i < N; i++) { /* 100 points that are there again and again, 100 groups of a few */
        const uint32_t point = i < 19000 ? i % 100 : 100 + i % 100;
        samples[2 * i] = 100 * (float)(point % 20) + (point < 100 ? 0 : normal(0.01));
        samples[2 * i + 1] = 100 * (float)(point / 20);
    }
    const struct kmeans_result result = trained(kmeans, N, 1, 200);
    assert_true(result.error < 1000 * 0.0001); /* less than the groups' own width: they were split */
    kmeans_free(kmeans);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_clusters_are_found),    cmocka_unit_test(test_it_is_near_the_optimum),
        cmocka_unit_test(test_the_seed_decides),      cmocka_unit_test(test_little_to_learn),
        cmocka_unit_test(test_the_empty_begin_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
