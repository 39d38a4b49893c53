/* test_profile_rows.c - rows computed anew over stored keys and values, against a forward pass in doubles. */
#include "tests/unit/eval/naive.h"

#include <errno.h>

#include "gpu-worker/profile_rows.h"

#define TINY "--layers 3 --heads 6 --kv-heads 2 --embd 96 --context 1024"

enum { N_TOKENS = 333, N_LAYERS = 3, N_KV_HEADS = 2, BLOCK = 64 };

/* What the profile is given: fastgen_profile_add_row() is wrapped by the linker. */
static struct {
    float weights[N_LAYERS][N_KV_HEADS][FASTGEN_MAX_ROWS][N_TOKENS];
    uint32_t positions[N_LAYERS][N_KV_HEADS][FASTGEN_MAX_ROWS], n[N_LAYERS][N_KV_HEADS];
} given;

void __real_fastgen_profile_add_row(struct fastgen_profile *profile, uint32_t layer, uint32_t kv_head,
                                    uint32_t position, const float *weights);
void __wrap_fastgen_profile_add_row(struct fastgen_profile *profile, uint32_t layer, uint32_t kv_head,
                                    uint32_t position, const float *weights);

void __wrap_fastgen_profile_add_row(struct fastgen_profile *profile, uint32_t layer, uint32_t kv_head,
                                    uint32_t position, const float *weights)
{
    uint32_t i = given.n[layer][kv_head]++;
    assert_true(i < FASTGEN_MAX_ROWS && position < N_TOKENS);
    given.positions[layer][kv_head][i] = position;
    memcpy(given.weights[layer][kv_head][i], weights, (position + 1) * sizeof(float));
    __real_fastgen_profile_add_row(profile, layer, kv_head, position, weights);
}

/* ---- a store ---- */

struct store {
    const struct worker_fixture *fixture;
    uint32_t ids[N_TOKENS];
    struct naive naive;
    enum kernels_rows codec;
    size_t row_bytes;
    uint8_t *rows;          /* [layer][kv_head][blocks x 64] */
    uint32_t missing_layer; /* whose block 1 is not there */
    uint32_t n_between, end_after;
};

static struct store *store_new(const struct worker_fixture *fixture)
{
    struct store *store = calloc(1, sizeof(*store));
    assert_non_null(store);
    *store = (struct store){.fixture = fixture, .missing_layer = UINT32_MAX, .end_after = UINT32_MAX};
    worker_fixture_ids(fixture, store->ids, N_TOKENS);
    store->naive = naive_new(fixture, store->ids, N_TOKENS);
    uint32_t d = fixture->model->shape.head_dim, n_rows = (N_TOKENS / BLOCK + 1) * BLOCK;
    store->codec = (enum kernels_rows)fixture->tools.row_codec;
    store->row_bytes = kernels_row_bytes(d, store->codec);
    store->rows = calloc((size_t)N_LAYERS * N_KV_HEADS * n_rows, store->row_bytes);
    assert_non_null(store->rows);
    for (uint32_t layer = 0; layer < N_LAYERS; layer++)
        for (uint32_t head = 0; head < N_KV_HEADS; head++)
            for (uint32_t t = 0; t < N_TOKENS; t++) {
                float k[KERNELS_MAX_HEAD_DIM], v[KERNELS_MAX_HEAD_DIM];
                size_t from = (((size_t)layer * N_TOKENS + t) * N_KV_HEADS + head) * d;
                for (uint32_t i = 0; i < d; i++) {
                    k[i] = (float)store->naive.k[from + i];
                    v[i] = (float)store->naive.v[from + i];
                }
                fixture->tools.kernels->encode_row(k, v, d, store->codec,
                                                   store->rows + (((size_t)layer * N_KV_HEADS + head) * n_rows + t) *
                                                                     store->row_bytes);
            }
    return store;
}

static void store_free(struct store *store)
{
    naive_free(&store->naive);
    free(store->rows);
    free(store);
}

static const void *rows_of(void *context, uint32_t layer, uint32_t kv_head, uint32_t block)
{
    const struct store *store = context;
    assert(layer < N_LAYERS && kv_head < N_KV_HEADS && block <= (N_TOKENS - 1) / BLOCK);
    if (layer == store->missing_layer && block == 1)
        return NULL;
    size_t n_rows = (N_TOKENS / BLOCK + 1) * BLOCK;
    return store->rows + (((size_t)layer * N_KV_HEADS + kv_head) * n_rows + (size_t)block * BLOCK) * store->row_bytes;
}

static int between(void *context)
{
    struct store *store = context;
    return ++store->n_between > store->end_after ? -ECANCELED : 0;
}

static int run(struct store *store, struct pool *pool, uint32_t n_tokens, float recovery,
               struct fastgen_profile **ret_profile)
{
    const struct worker_fixture *fixture = store->fixture;
    memset(&given, 0, sizeof(given));
    store->n_between = 0;
    assert_int_equal(
        fastgen_profile_new(fixture->tokenizer, store->ids, n_tokens, N_LAYERS, N_KV_HEADS, recovery, ret_profile), 0);
    const struct profile_rows rows = {
        .network = fixture->network,
        .kernels = fixture->tools.kernels,
        .pool = pool,
        .codec = store->codec,
        .ids = store->ids,
        .n_tokens = n_tokens,
        .rows = rows_of,
        .context = store,
        .between = between,
        .between_context = store,
    };
    return profile_rows_run(&rows, *ret_profile);
}

/* ---- the truth ---- */

/* weights [position + 1] of one KV head. */
static void naive_weights_of(const struct store *store, uint32_t layer, uint32_t head, uint32_t position,
                             double *weights)
{
    const struct model_shape *shape = &store->fixture->model->shape;
    uint32_t d = shape->head_dim, group = shape->n_heads / shape->n_kv_heads;
    memset(weights, 0, N_TOKENS * sizeof(*weights));
    for (uint32_t g = 0; g < group; g++) {
        const double *q =
            store->naive.q + (((size_t)layer * N_TOKENS + position) * shape->n_heads + head * group + g) * d;
        double scores[N_TOKENS], sum = 0;
        for (uint32_t j = 0; j <= position; j++) {
            const double *k = store->naive.k + (((size_t)layer * N_TOKENS + j) * N_KV_HEADS + head) * d;
            double dot = 0;
            for (uint32_t i = 0; i < d; i++)
                dot += q[i] * k[i];
            sum += scores[j] = exp(dot / sqrt(d));
        }
        for (uint32_t j = 0; j <= position; j++)
            weights[j] += scores[j] / sum / group;
    }
}

/* Largest error of a weight, as a part of it. */
static double worst_weight(const struct store *store, uint32_t n_tokens)
{
    uint32_t positions[FASTGEN_MAX_ROWS], n = fastgen_sample(n_tokens, positions);
    double worst = 0;
    for (uint32_t layer = 0; layer < N_LAYERS; layer++)
        for (uint32_t head = 0; head < N_KV_HEADS; head++) {
            assert_int_equal(given.n[layer][head], n);
            for (uint32_t i = 0; i < n; i++) {
                double weights[N_TOKENS];
                assert_int_equal(given.positions[layer][head][i], positions[i]);
                naive_weights_of(store, layer, head, positions[i], weights);
                for (uint32_t j = 0; j <= positions[i]; j++)
                    worst = fmax(worst, fabs((double)given.weights[layer][head][i][j] / weights[j] - 1));
            }
        }
    return worst;
}

static void test_weights(void **state)
{
    (void)state;
    static const struct {
        const char *backend;
        enum row_codec codec;
        double bound; /* q8_0: the truth has rows that are not rounded to 8 bits */
    } cases[] = {{"reference", ROW_CODEC_F16, 1e-4}, {"cpu", ROW_CODEC_F16, 1e-4}, {"cpu", ROW_CODEC_Q8_0, 0.3}};
    for (uint32_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        struct worker_fixture *fixture = worker_fixture_new(TINY, cases[c].backend, cases[c].codec);
        struct store *store = store_new(fixture);
        static const uint32_t lengths[] = {1, 2, 64, 65, N_TOKENS};
        for (uint32_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
            struct fastgen_profile *profile;
            assert_int_equal(run(store, fixture->pool, lengths[i], 0.9f, &profile), 0);
            assert_int_equal(store->n_between, N_LAYERS);
            double worst = worst_weight(store, lengths[i]);
            if (!(worst <= cases[c].bound))
                fail_msg("%s, codec %d, %u tokens: a weight is wrong by %g of it", cases[c].backend,
                         (int)cases[c].codec, lengths[i], worst);
            fastgen_profile_free(profile);
        }
        store_free(store);
        worker_fixture_free(fixture);
    }
}

/* The pool, or none, cannot change a bit; and a finished profile comes out. */
static void test_threads(void **state)
{
    (void)state;
    struct worker_fixture *fixture = worker_fixture_new(TINY, "cpu", ROW_CODEC_F16);
    struct store *store = store_new(fixture);
    struct fastgen_profile *profile;
    struct pool *pool;
    size_t n_bytes = sizeof(given);
    void *first = malloc(n_bytes);
    assert_non_null(first);
    assert_int_equal(pool_new(5, NULL, NULL, &pool), 0);
    assert_int_equal(run(store, NULL, N_TOKENS, 1e-6f, &profile), 0);
    memcpy(first, &given, n_bytes);
    fastgen_profile_free(profile);
    assert_int_equal(run(store, pool, N_TOKENS, 1e-6f, &profile), 0);
    assert_memory_equal(first, &given, n_bytes);
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) /* the ids have special tokens, and the weights are spread */
        for (uint32_t head = 0; head < N_KV_HEADS; head++) {
            assert_int_equal(fastgen_profile_class(profile, layer, head), FASTGEN_SPECIAL);
            assert_true(fastgen_profile_absent(profile)[layer * N_KV_HEADS + head]);
        }
    fastgen_profile_free(profile);
    pool_free(pool);
    free(first);
    store_free(store);
    worker_fixture_free(fixture);
}

static void test_ends(void **state)
{
    (void)state;
    struct worker_fixture *fixture = worker_fixture_new(TINY, "cpu", ROW_CODEC_F16);
    struct store *store = store_new(fixture);
    struct fastgen_profile *profile;
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        store->end_after = layer;
        assert_int_equal(run(store, fixture->pool, N_TOKENS, 0.9f, &profile), -ECANCELED);
        assert_int_equal(store->n_between, layer + 1);
        fastgen_profile_free(profile);
    }
    store->end_after = UINT32_MAX;
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        store->missing_layer = layer;
        assert_int_equal(run(store, fixture->pool, N_TOKENS, 0.9f, &profile), -ESTALE);
        assert_int_equal(store->n_between, layer);
        fastgen_profile_free(profile);
    }
    store_free(store);
    worker_fixture_free(fixture);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_weights),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_ends),
    };
    kernels_thread_setup();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
