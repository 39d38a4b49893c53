/* fixture.c - see fixture.h. */
#include "tests/backend/fixture.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/pool.h"

const enum tensor_type fixture_types[FIXTURE_N_TYPES] = {
    TENSOR_F32,  TENSOR_F16,  TENSOR_BF16, TENSOR_Q4_0, TENSOR_Q4_1, TENSOR_Q5_0,
    TENSOR_Q5_1, TENSOR_Q8_0, TENSOR_Q4_K, TENSOR_Q5_K, TENSOR_Q6_K,
};

static void thread_setup(void *context, uint32_t thread)
{
    (void)context;
    (void)thread;
    kernels_thread_setup();
}

static void open_one(struct fixture *fixture, const struct backend_ops *ops, enum kernels_isa isa, struct pool *pool)
{
    struct backend_options options = {.isa = isa, .pool = pool};
    struct fixture_instance *instance = &fixture->instances[fixture->n_instances++];
    char error[128] = "";
    instance->ops = ops;
    if (ops->open(&options, &instance->backend, error, sizeof error) != 0)
        fail_msg("%s: %s", ops->name, error);
    instance->name = ops->describe(instance->backend);
}

int fixture_open(void **state)
{
    struct fixture *fixture = calloc(1, sizeof *fixture);
    assert_non_null(fixture);
    kernels_thread_setup();
    assert_int_equal(pool_new(2, thread_setup, NULL, &fixture->pool), 0);
    open_one(fixture, &backend_reference, KERNELS_ISA_AUTO, NULL);
    for (int isa = KERNELS_ISA_PLAIN; isa < KERNELS_N_ISA; isa++) {
        if (!kernels_get((enum kernels_isa)isa))
            continue;
        open_one(fixture, &backend_cpu, (enum kernels_isa)isa, NULL);
        open_one(fixture, &backend_cpu, (enum kernels_isa)isa, fixture->pool);
    }
    *state = fixture;
    return 0;
}

int fixture_close(void **state)
{
    struct fixture *fixture = *state;
    for (uint32_t i = 0; i < fixture->n_instances; i++)
        fixture->instances[i].ops->close(fixture->instances[i].backend);
    pool_free(fixture->pool);
    free(fixture);
    return 0;
}

uint32_t fixture_random(void)
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)((state * 2685821657736338717u) >> 32);
}

float fixture_uniform(float limit)
{
    return ((float)(fixture_random() >> 8) * 0x1p-23f - 1.0f) * limit;
}

void fixture_fill(float *to, size_t n, float limit)
{
    for (size_t i = 0; i < n; i++)
        to[i] = fixture_uniform(limit);
}

static void put_f16(uint8_t *at, float value)
{
    uint16_t bits;
    kernels_get(KERNELS_ISA_PLAIN)->f16_encode(&value, 1, &bits);
    memcpy(at, &bits, sizeof bits);
}

/* Random bytes are valid quants; only the numbers in floating point must be chosen. */
static void fill_block(enum tensor_type type, uint8_t *block, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++)
        block[i] = (uint8_t)fixture_random();
    float value = fixture_uniform(1.0f);
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    switch (type) {
    case TENSOR_F32:
        memcpy(block, &value, sizeof value);
        break;
    case TENSOR_F16:
        put_f16(block, value);
        break;
    case TENSOR_BF16:
        word >>= 16;
        memcpy(block, &word, 2);
        break;
    case TENSOR_Q4_0:
        put_f16(block, value / 8);
        break;
    case TENSOR_Q4_1:
        put_f16(block, value / 8);
        put_f16(block + 2, fixture_uniform(1.0f));
        break;
    case TENSOR_Q5_0:
        put_f16(block, value / 16);
        break;
    case TENSOR_Q5_1:
        put_f16(block, value / 16);
        put_f16(block + 2, fixture_uniform(1.0f));
        break;
    case TENSOR_Q8_0:
        put_f16(block, value / 127);
        break;
    case TENSOR_Q4_K:
        put_f16(block, value / 500);
        put_f16(block + 2, fixture_uniform(0.03f));
        break;
    case TENSOR_Q5_K:
        put_f16(block, value / 1000);
        put_f16(block + 2, fixture_uniform(0.03f));
        break;
    case TENSOR_Q6_K:
        put_f16(block + 208, value / 2000);
        break;
    }
}

struct tensor fixture_tensor(enum tensor_type type, uint32_t n_rows, uint32_t n_columns)
{
    struct tensor tensor = {.name = "test", .type = type, .n_rows = n_rows, .n_columns = n_columns};
    const struct tensor_block *shape = tensor_block((uint32_t)type);
    size_t row_bytes = tensor_row_bytes(type, n_columns);
    assert_true(row_bytes > 0);
    tensor.n_bytes = row_bytes * n_rows;
    uint8_t *data = malloc(tensor.n_bytes);
    assert_non_null(data);
    for (size_t at = 0; at < tensor.n_bytes; at += shape->n_bytes)
        fill_block(type, data + at, shape->n_bytes);
    tensor.data = data;
    return tensor;
}

void fixture_tensor_free(struct tensor *tensor)
{
    free((void *)(uintptr_t)tensor->data);
    tensor->data = NULL;
}

void fixture_near(const char *what, const char *name, const float *got, const float *expected, size_t n,
                  double absolute, double relative)
{
    for (size_t i = 0; i < n; i++) {
        double bound = absolute + relative * fabs((double)expected[i]);
        if (!(fabs((double)got[i] - (double)expected[i]) <= bound))
            fail_msg("%s on %s: [%zu] is %.9g, not %.9g", what, name, i, (double)got[i], (double)expected[i]);
    }
}
