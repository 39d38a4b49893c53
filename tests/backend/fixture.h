/* fixture.h - what tests of back ends share: back ends to test, random numbers, random tensors of every type. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu-worker/backend/backend.h"

#define FIXTURE_MAX_INSTANCES 8
#define FIXTURE_N_TYPES       11

/* One opened back end; [0] is the reference. */
struct fixture_instance {
    const struct backend_ops *ops;
    struct backend *backend;
    const char *name;
};

struct fixture {
    struct pool *pool; /* 2 threads */
    uint32_t n_instances;
    struct fixture_instance instances[FIXTURE_MAX_INSTANCES];
};

extern const enum tensor_type fixture_types[FIXTURE_N_TYPES];

/* Every back end, the cpu one on every instruction set this machine has, alone and with 2 threads. For cmocka. */
int fixture_open(void **state);
int fixture_close(void **state);

uint32_t fixture_random(void);
float fixture_uniform(float limit); /* (-limit, limit) */
void fixture_fill(float *to, size_t n, float limit);

/* A tensor of random blocks whose weights are about 1 in size. Data on the heap; fixture_tensor_free() frees it. */
struct tensor fixture_tensor(enum tensor_type type, uint32_t n_rows, uint32_t n_columns);
void fixture_tensor_free(struct tensor *tensor);

/* Fails the test unless |got - expected| <= absolute + relative * |expected| for all n. */
void fixture_near(const char *what, const char *name, const float *got, const float *expected, size_t n,
                  double absolute, double relative);
