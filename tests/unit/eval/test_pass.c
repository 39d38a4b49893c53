/* test_pass.c - passes against a naive forward pass, their slices, their tails, and how they end. */
#include "tests/unit/eval/naive.h"

#include <errno.h>

#include "gpu-worker/eval/pass.h"
#include "gpu-worker/eval/pass_private.h"

#define TINY "--layers 3 --heads 6 --kv-heads 2 --embd 96 --context 1024"

enum { MAX_TOKENS = 333 };

static uint32_t ids[MAX_TOKENS];

static struct worker_fixture *open_tiny(const char *backend, enum row_codec codec)
{
    struct worker_fixture *fixture = worker_fixture_new(TINY, backend, codec);
    worker_fixture_ids(fixture, ids, MAX_TOKENS);
    return fixture;
}

static struct pass *start(const struct worker_fixture *fixture, const struct pass_options *options, uint32_t n)
{
    struct pass *pass = NULL;
    assert_int_equal(pass_new(&fixture->tools, options, ids, n, &pass), 0);
    return pass;
}

static struct pass *finished(const struct worker_fixture *fixture, const struct pass_options *options, uint32_t n)
{
    struct pass *pass = start(fixture, options, n);
    double done = pass_done(pass);
    for (int r = 1; r != 0;) {
        r = pass_advance(pass);
        assert_in_range(r, 0, 1);
        assert_true(pass_done(pass) >= done);
        done = pass_done(pass);
        assert_true((r == 0) == (done >= 1));
    }
    return pass;
}

static float *logprobs_of(const struct worker_fixture *fixture, const struct pass *pass, const struct pass_tail *tail,
                          uint32_t first)
{
    uint32_t n = pass_n_tokens(pass) - first;
    size_t n_vocab = fixture->model->shape.n_vocab;
    float *logprobs = malloc(n * n_vocab * sizeof(float));
    assert_non_null(logprobs);
    for (uint32_t i = n; i-- > 0;) /* backwards: nobody promised an order */
        pass_logprobs(pass, tail, first + i, logprobs + i * n_vocab);
    return logprobs;
}

static void decode(const struct worker_fixture *fixture, const struct pass *pass, const uint8_t *row, float *k,
                   float *v)
{
    uint32_t d = pass_shape(pass)->head_dim;
    enum kernels_rows codec = (enum kernels_rows)pass_shape(pass)->codec;
    float q[KERNELS_MAX_HEAD_DIM] = {0}, partial[KERNELS_PARTIAL_FLOATS(KERNELS_MAX_HEAD_DIM)] = {-INFINITY};
    fixture->tools.kernels->decode_keys(row, 1, d, codec, k);
    fixture->tools.kernels->attend_block(q, 1, d, codec, row, &(uint64_t){1}, 1, partial);
    memcpy(v, partial + 2, d * sizeof(float));
}

/* ---- against the truth ---- */

struct looking {
    const struct worker_fixture *fixture;
    const struct naive *naive;
    uint32_t n_layers;
    double worst_q, worst_row;
};

static void look_at_row(struct looking *looking, const struct pass_layer *layer, uint32_t head, uint32_t position)
{
    const struct row_shape *shape = pass_shape(layer->pass);
    size_t d = shape->head_dim, blocks = (layer->n_tokens + 63) / 64;
    const uint8_t *row = layer->rows + (head * blocks * 64 + position) * layout_row_bytes(shape);
    float k[KERNELS_MAX_HEAD_DIM], v[KERNELS_MAX_HEAD_DIM];
    assert_ptr_equal(pass_rows(layer->pass, layer->layer, head) + position * layout_row_bytes(shape), row);
    decode(looking->fixture, layer->pass, row, k, v);
    for (size_t i = 0; i < d; i++) {
        size_t at = (((size_t)layer->layer * layer->n_tokens + position) * shape->n_kv_heads + head) * d + i;
        double truth_k = position < layer->n_tokens ? looking->naive->k[at] : 0;
        double truth_v = position < layer->n_tokens ? looking->naive->v[at] : 0;
        looking->worst_row = fmax(looking->worst_row, fabs((double)k[i] - truth_k));
        looking->worst_row = fmax(looking->worst_row, fabs((double)v[i] - truth_v));
    }
}

static int look(void *context, const struct pass_layer *layer)
{
    struct looking *looking = context;
    const struct model_shape *shape = &looking->fixture->model->shape;
    assert_int_equal(layer->layer, looking->n_layers++);
    size_t n = (size_t)layer->n_tokens * shape->n_heads * shape->head_dim;
    for (size_t i = 0; i < n; i++)
        looking->worst_q = fmax(looking->worst_q, fabs((double)layer->q[i] - looking->naive->q[layer->layer * n + i]));
    for (uint32_t head = 0; head < shape->n_kv_heads; head++)
        for (uint32_t position = 0; position < (layer->n_tokens + 63) / 64 * 64; position++)
            look_at_row(looking, layer, head, position);
    return 0;
}

static void compare(const char *backend, uint32_t n)
{
    struct worker_fixture *fixture = open_tiny(backend, ROW_CODEC_F16);
    struct naive naive = naive_new(fixture, ids, n);
    struct looking looking = {.fixture = fixture, .naive = &naive};
    struct pass *pass =
        finished(fixture, &(struct pass_options){.keep_rows = n % 2, .visit = look, .context = &looking}, n);
    float *logprobs = logprobs_of(fixture, pass, NULL, 0);
    double worst = 0, spread = 0;
    for (size_t i = 0; i < (size_t)n * fixture->model->shape.n_vocab; i++) {
        worst = fmax(worst, fabs((double)logprobs[i] - naive.logprobs[i]));
        spread = fmax(spread, fabs(naive.logprobs[i]));
    }
    print_message("%s, %u tokens: queries %.2g, rows %.2g, log-probabilities %.2g of %.2g\n", backend, n,
                  looking.worst_q, looking.worst_row, worst, spread);
    assert_int_equal(looking.n_layers, 3);
    /* a value next to the middle of two halves may go to either */
    assert_true(looking.worst_q < 2e-3 && looking.worst_row < 4e-3 && worst < 2e-3 && spread > 3);
    free(logprobs);
    pass_free(pass);
    naive_free(&naive);
    worker_fixture_free(fixture);
}

static void test_truth(void **state)
{
    (void)state;
    compare("reference", 1);
    compare("reference", 150);
    compare("cpu", 128);
    compare("cpu", 277);
}

/* ---- slices ---- */

static void test_slices_change_nothing(void **state)
{
    (void)state;
    struct worker_fixture *fixture = open_tiny("cpu", ROW_CODEC_F16);
    const uint32_t sizes[] = {PASS_MAX_ROWS, 64, 1, 37};
    float *expected = NULL;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct pass *pass = start(fixture, &(struct pass_options){.keep_rows = i % 2}, MAX_TOKENS);
        pass->max_rows = sizes[i];
        while (pass_advance(pass) > 0)
            ;
        assert_true(pass_done(pass) >= 1);
        float *logprobs = logprobs_of(fixture, pass, NULL, 0);
        if (expected == NULL)
            expected = logprobs;
        else {
            assert_memory_equal(logprobs, expected, (size_t)MAX_TOKENS * fixture->model->shape.n_vocab * sizeof(float));
            free(logprobs);
        }
        assert_int_equal(pass_advance(pass), 0);
        pass_free(pass);
    }
    free(expected);
    worker_fixture_free(fixture);
}

/* ---- accessors ---- */

static void check_sums(const struct worker_fixture *fixture, const struct pass *pass, const uint8_t *rows,
                       const float *sums)
{
    const struct row_shape *shape = pass_shape(pass);
    float k[KERNELS_MAX_HEAD_DIM], v[KERNELS_MAX_HEAD_DIM];
    double sum_k[KERNELS_MAX_HEAD_DIM] = {0}, sum_v[KERNELS_MAX_HEAD_DIM] = {0};
    for (uint32_t t = 0; t < 64; t++) {
        decode(fixture, pass, rows + t * layout_row_bytes(shape), k, v);
        for (uint32_t i = 0; i < shape->head_dim; i++) {
            sum_k[i] += (double)k[i];
            sum_v[i] += (double)v[i];
        }
    }
    for (uint32_t i = 0; i < shape->head_dim; i++) {
        assert_true(fabs(sum_k[i] - (double)sums[i]) < 1e-4);
        assert_true(fabs(sum_v[i] - (double)sums[shape->head_dim + i]) < 1e-4);
    }
}

static void test_sums_and_accessors(void **state)
{
    (void)state;
    struct worker_fixture *fixture = open_tiny("cpu", ROW_CODEC_Q8_0);
    struct pass *pass = finished(fixture, &(struct pass_options){.keep_rows = true}, 200);
    const struct row_shape *shape = pass_shape(pass);
    assert_int_equal(pass_n_tokens(pass), 200);
    assert_int_equal(pass_n_heads(pass), 6);
    assert_int_equal(shape->n_layers, 3);
    assert_int_equal(shape->n_kv_heads, 2);
    assert_int_equal(shape->head_dim, 16);
    assert_int_equal(shape->codec, ROW_CODEC_Q8_0);
    assert_true(fabs((double)pass_scale(pass) - 0.25) < 1e-7);
    assert_memory_equal(pass_ids(pass), ids, 200 * sizeof(ids[0]));
    assert_ptr_equal(pass_tools(pass)->network, fixture->network);
    for (uint32_t layer = 0; layer < 3; layer++)
        for (uint32_t head = 0; head < 2; head++)
            for (size_t block = 0; block < 3; block++) /* the fourth is not whole */
                check_sums(fixture, pass, pass_rows(pass, layer, head) + block * 64 * layout_row_bytes(shape),
                           pass_sums(pass, layer, head) + block * 2 * shape->head_dim);
    pass_free(pass);
    worker_fixture_free(fixture);
}

/* ---- tails ---- */

struct exact {
    const struct worker_fixture *fixture;
    uint32_t n_layers;
};

/* Exact attention block by block, in the order of a pass. */
static int attend_exactly(void *context, const struct pass_tail_layer *layer)
{
    struct exact *exact = context;
    const struct kernels *kernels = exact->fixture->tools.kernels;
    const struct row_shape *shape = pass_shape(layer->pass);
    size_t d = shape->head_dim, n_heads = pass_n_heads(layer->pass), group = n_heads / shape->n_kv_heads;
    assert_int_equal(layer->layer, exact->n_layers++);
    for (uint32_t i = 0; i < layer->n; i++)
        for (size_t h = 0; h < n_heads; h++) {
            float partial[KERNELS_PARTIAL_FLOATS(KERNELS_MAX_HEAD_DIM)] = {-INFINITY};
            uint32_t own = (layer->first + i) / 64;
            for (uint32_t block = 0; block <= own; block++) {
                uint64_t mask = block < own ? ~(uint64_t)0 : ~(uint64_t)0 >> (63 - (layer->first + i) % 64);
                kernels->attend_block(layer->q + (i * n_heads + h) * d, 1, (uint32_t)d, (enum kernels_rows)shape->codec,
                                      pass_tail_block(layer, (uint32_t)(h / group), block), &mask,
                                      pass_scale(layer->pass), partial);
            }
            kernels->partial_finish(partial, (uint32_t)d, layer->out + (i * n_heads + h) * d);
        }
    /* under exact attention a tail has the rows and sums that the pass has */
    for (uint32_t head = 0; head < shape->n_kv_heads; head++)
        for (uint32_t block = 0; block < (pass_n_tokens(layer->pass) + 63) / 64; block++) {
            size_t bytes = 64 * layout_row_bytes(shape);
            assert_memory_equal(pass_tail_block(layer, head, block),
                                pass_rows(layer->pass, layer->layer, head) + block * bytes, bytes);
            if ((block + 1) * 64 <= pass_n_tokens(layer->pass))
                assert_memory_equal(pass_tail_block_sums(layer, head, block),
                                    pass_sums(layer->pass, layer->layer, head) + block * 2 * d, 2 * d * sizeof(float));
        }
    return 0;
}

static int attend_to_itself(void *context, const struct pass_tail_layer *layer)
{
    (void)context;
    memcpy(layer->out, layer->q,
           (size_t)layer->n * pass_n_heads(layer->pass) * pass_shape(layer->pass)->head_dim * sizeof(float));
    return 0;
}

static struct pass_tail *finished_tail(const struct pass *pass, uint32_t first,
                                       int (*attend)(void *, const struct pass_tail_layer *), void *context)
{
    struct pass_tail *tail = NULL;
    assert_int_equal(pass_tail_new(pass, first, attend, context, &tail), 0);
    assert_true(pass_tail_done(tail) <= 0);
    for (uint32_t i = 1; i <= pass_shape(pass)->n_layers; i++) {
        assert_int_equal(pass_tail_advance(tail), i < pass_shape(pass)->n_layers);
        assert_true(fabs(pass_tail_done(tail) - i / (double)pass_shape(pass)->n_layers) < 1e-9);
    }
    assert_int_equal(pass_tail_advance(tail), 0);
    return tail;
}

static void check_tail(const struct worker_fixture *fixture, const struct pass *pass, uint32_t first)
{
    struct exact exact = {.fixture = fixture};
    struct pass_tail *tail = finished_tail(pass, first, attend_exactly, &exact);
    struct pass_tail *other = finished_tail(pass, first, attend_to_itself, NULL);
    float *expected = logprobs_of(fixture, pass, NULL, first), *got = logprobs_of(fixture, pass, tail, first);
    float *odd = logprobs_of(fixture, pass, other, first);
    size_t n = (size_t)(pass_n_tokens(pass) - first) * fixture->model->shape.n_vocab;
    assert_memory_equal(got, expected, n * sizeof(float));
    assert_memory_not_equal(odd, expected, n * sizeof(float));
    free(expected);
    free(got);
    free(odd);
    pass_tail_free(tail);
    pass_tail_free(other);
}

static void test_tail(void **state)
{
    (void)state;
    for (enum row_codec codec = ROW_CODEC_F16; codec <= ROW_CODEC_Q8_0; codec++) {
        struct worker_fixture *fixture = open_tiny("cpu", codec);
        struct pass *pass = finished(fixture, &(struct pass_options){.keep_rows = true}, MAX_TOKENS);
        check_tail(fixture, pass, 256);
        check_tail(fixture, pass, 320);
        check_tail(fixture, pass, 0); /* nothing before it, and more rows than are worked on at once */
        pass_free(pass);
        worker_fixture_free(fixture);
    }
}

/* ---- how they end ---- */

static int visit_and_fail(void *context, const struct pass_layer *layer)
{
    uint32_t *n_visits = context;
    (*n_visits)++;
    return layer->layer == 1 ? -EDOM : 0;
}

static int attend_and_fail(void *context, const struct pass_tail_layer *layer)
{
    return layer->layer == 1 ? -EDOM : attend_to_itself(context, layer);
}

static void test_errors_end_it(void **state)
{
    (void)state;
    struct worker_fixture *fixture = open_tiny("cpu", ROW_CODEC_F16);
    uint32_t n_visits = 0;
    struct pass *pass = start(fixture, &(struct pass_options){.visit = visit_and_fail, .context = &n_visits}, 100);
    int r = 1;
    while (r > 0)
        r = pass_advance(pass);
    assert_int_equal(r, -EDOM);
    assert_int_equal(pass_advance(pass), -EDOM);
    assert_int_equal(n_visits, 2);
    pass_free(pass);

    pass = finished(fixture, &(struct pass_options){.keep_rows = true}, 100);
    struct pass_tail *tail = NULL;
    assert_int_equal(pass_tail_new(pass, 64, attend_and_fail, NULL, &tail), 0);
    assert_int_equal(pass_tail_advance(tail), 1);
    assert_int_equal(pass_tail_advance(tail), -EDOM);
    assert_int_equal(pass_tail_advance(tail), -EDOM);
    pass_tail_free(tail);
    pass_free(pass);
    worker_fixture_free(fixture);
}

static int count_visit(void *context, const struct pass_layer *layer)
{
    (void)layer;
    ++*(uint32_t *)context;
    return 0;
}

static void test_last_attention_is_skipped(void **state)
{
    (void)state;
    struct worker_fixture *fixture = open_tiny("cpu", ROW_CODEC_F16);
    struct naive naive = naive_new(fixture, ids, 100);
    struct looking looking = {.fixture = fixture, .naive = &naive};
    struct pass_options options = {.visit = look, .context = &looking, .skip_attention_of_last = true};
    pass_free(finished(fixture, &options, 100));
    assert_int_equal(looking.n_layers, 3);
    assert_true(looking.worst_q < 2e-3);
    naive_free(&naive);

    uint32_t n_visits = 0;
    options = (struct pass_options){.visit = count_visit, .context = &n_visits};
    pass_free(finished(fixture, &options, 1));
    assert_int_equal(n_visits, 3);
    worker_fixture_free(fixture);
}

static int n_until_failure;

static void *failing_alloc(struct backend *backend, size_t n_bytes)
{
    return n_until_failure-- == 0 ? NULL : backend_cpu.alloc(backend, n_bytes);
}

static void test_memory_ends(void **state)
{
    (void)state;
    struct worker_fixture *fixture = open_tiny("cpu", ROW_CODEC_F16);
    size_t before = fixture->ops.bytes(fixture->backend);
    fixture->ops.alloc = failing_alloc;
    for (int n = 0;; n++) {
        struct pass *pass = NULL;
        n_until_failure = n;
        int r = pass_new(&fixture->tools, &(struct pass_options){.keep_rows = true}, ids, 70, &pass);
        if (r == 0) {
            assert_true(n > 10);
            n_until_failure = -1;
            while (pass_advance(pass) > 0)
                ;
            size_t of_pass = fixture->ops.bytes(fixture->backend);
            struct pass_tail *tail = NULL;
            for (n_until_failure = n = 0; (r = pass_tail_new(pass, 64, attend_to_itself, NULL, &tail)) != 0;
                 n_until_failure = ++n) {
                assert_int_equal(r, -ENOMEM);
                assert_null(tail);
                assert_int_equal(fixture->ops.bytes(fixture->backend), of_pass);
            }
            assert_true(n > 5);
            pass_tail_free(tail);
            pass_free(pass);
            break;
        }
        assert_int_equal(r, -ENOMEM);
        assert_null(pass);
        assert_int_equal(fixture->ops.bytes(fixture->backend), before);
    }
    assert_int_equal(fixture->ops.bytes(fixture->backend), before);
    assert_null(pass_free(NULL));
    assert_null(pass_tail_free(NULL));
    worker_fixture_free(fixture);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_truth),
        cmocka_unit_test(test_slices_change_nothing),
        cmocka_unit_test(test_sums_and_accessors),
        cmocka_unit_test(test_tail),
        cmocka_unit_test(test_errors_end_it),
        cmocka_unit_test(test_last_attention_is_skipped),
        cmocka_unit_test(test_memory_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
