/*
 * test_methods_naive.c - baselines against plain readings of their papers and formats, in double precision: which old tokens are
 * kept or read, the output that comes of it, and what a format gives back.
 */
#include "tests/unit/eval/methods_fixture.h"

#include "gpu-worker/eval/methods_private.h"

/* ---- which tokens, and the output ---- */

static struct {
    enum { STREAMING, H2O, SNAPKV, QUEST, FORMAT } kind;
    double share;
    double sums[N_LAYERS][N_KV_HEADS][CONTEXT]; /* attention, as the kind sums it */
    double k[CONTEXT][HEAD_DIM], v[CONTEXT][HEAD_DIM];
    bool kept[CONTEXT], read[CONTEXT];
    double worst;
    uint64_t n_read;
} naive;

static void take_row(const struct kernels *kernels, const uint8_t *row, uint32_t token)
{
    uint16_t halves[2 * HEAD_DIM];
    float numbers[2 * HEAD_DIM];
    memcpy(halves, row, sizeof(halves));
    kernels->f16_decode(halves, 2 * HEAD_DIM, numbers);
    for (uint32_t i = 0; i < HEAD_DIM; i++) {
        naive.k[token][i] = (double)numbers[i];
        naive.v[token][i] = (double)numbers[HEAD_DIM + i];
    }
}

/* Softmax of one query over tokens up to its position; read NULL: all of them. */
static void weigh(const float *q, uint32_t position, const bool *read, double weights[CONTEXT])
{
    double largest = -INFINITY, sum = 0;
    for (uint32_t t = 0; t <= position; t++) {
        weights[t] = 0;
        for (uint32_t i = 0; i < HEAD_DIM; i++)
            weights[t] += (double)q[i] * naive.k[t][i] / sqrt(HEAD_DIM);
        if (read == NULL || read[t])
            largest = fmax(largest, weights[t]);
    }
    for (uint32_t t = 0; t <= position; t++) {
        weights[t] = read == NULL || read[t] ? exp(weights[t] - largest) : 0;
        sum += weights[t];
    }
    for (uint32_t t = 0; t <= position; t++)
        weights[t] /= sum;
}

static void watch_prompt(struct methods_fixture *fixture, struct pass_layer *layer)
{
    for (uint32_t kv_head = 0; kv_head < N_KV_HEADS; kv_head++) {
        for (uint32_t t = 0; t < PROMPT; t++)
            take_row(fixture->worker->tools.kernels, layer->rows + ((size_t)kv_head * CONTEXT + t) * 4 * HEAD_DIM, t);
        for (uint32_t p = 0; p < PROMPT; p++)
            for (uint32_t head = kv_head * GROUP; head < (kv_head + 1) * GROUP; head++) {
                double weights[CONTEXT];
                if (naive.kind == H2O ? p % 8 != 7 : p < PROMPT - 32)
                    continue;
                weigh(layer->q + ((size_t)p * N_KV_HEADS * GROUP + head) * HEAD_DIM, p, NULL, weights);
                for (uint32_t t = 0; t <= p; t++)
                    naive.sums[layer->layer][kv_head][t] += weights[t] / GROUP * (naive.kind == H2O ? 8 : 1);
            }
    }
}

/* Of what is kept, all but the n with the largest sums go. */
static void evict(const double sums[CONTEXT], uint32_t n)
{
    uint32_t n_kept = 0;
    for (uint32_t t = 0; t < CONTEXT; t++)
        n_kept += naive.kept[t];
    for (; n_kept > n; n_kept--) {
        uint32_t least = CONTEXT;
        for (uint32_t t = 0; t < CONTEXT; t++)
            if (naive.kept[t] && (least == CONTEXT || sums[t] <= sums[least]))
                least = t;
        naive.kept[least] = false;
    }
}

static void keep_pages(const float *q, uint32_t n_old)
{
    double bounds[CONTEXT / 16];
    const uint32_t n_pages = n_old / 16;
    for (uint32_t page = 0; page < n_pages; page++) {
        bounds[page] = 0;
        for (uint32_t i = 0; i < GROUP * HEAD_DIM; i++) {
            double most = -INFINITY; /* a key's channel at its largest or smallest, whatever helps more */
            for (uint32_t t = page == 0 ? 4 : page * 16; t < (page + 1) * 16; t++)
                most = fmax(most, (double)q[i] * naive.k[t][i % HEAD_DIM]);
            bounds[page] += most;
        }
    }
    memset(naive.kept, 0, sizeof(naive.kept));
    for (uint32_t n = (uint32_t)(naive.share * n_pages); n > 0; n--) {
        uint32_t best = 0;
        for (uint32_t page = 1; page < n_pages; page++)
            best = bounds[page] > bounds[best] ? page : best;
        bounds[best] = -INFINITY;
        for (uint32_t t = best == 0 ? 4 : best * 16; t < (best + 1) * 16; t++)
            naive.kept[t] = true;
    }
}

/* K and V of a block that has become old, as the format (tested below) gives them back. */
static void round_block(const struct methods_fixture *fixture, uint32_t block)
{
    const struct methods_baseline *baseline = fixture->at_work->state;
    const uint32_t first = block == 0 ? 4 : 0;
    float k[64 * HEAD_DIM], v[64 * HEAD_DIM];
    for (uint32_t j = 0; j < 64 * HEAD_DIM; j++) {
        k[j] = (float)naive.k[block * 64 + j / HEAD_DIM][j % HEAD_DIM];
        v[j] = (float)naive.v[block * 64 + j / HEAD_DIM][j % HEAD_DIM];
    }
    baseline->kind->round(baseline, first, k, v);
    for (uint32_t j = 0; j < 64 * HEAD_DIM; j++) {
        naive.k[block * 64 + j / HEAD_DIM][j % HEAD_DIM] = (double)k[j];
        naive.v[block * 64 + j / HEAD_DIM][j % HEAD_DIM] = (double)v[j];
    }
}

/* naive.kept for the first position of a block. */
static void begin_block(const struct methods_fixture *fixture, const struct pass_tail_layer *layer, uint32_t kv_head,
                        uint32_t position)
{
    double *sums = naive.sums[layer->layer][kv_head], pooled[CONTEXT];
    const uint32_t n_old = (position / 64 - 1) * 64, n_new = position == PROMPT ? n_old - 4 : 64;
    if (naive.kind == STREAMING || naive.kind == QUEST)
        return;
    for (uint32_t t = n_old - n_new; t < n_old; t++)
        naive.kept[t] = true;
    for (uint32_t block = (n_old - n_new) / 64; naive.kind == FORMAT && block < n_old / 64; block++)
        round_block(fixture, block);
    if (naive.kind == H2O)
        evict(sums, (uint32_t)(naive.share * (n_old - 4) + 0.5));
    if (naive.kind != SNAPKV || position > PROMPT)
        return;
    for (int t = 0; t < (int)n_old; t++) {
        pooled[t] = 0;
        for (int j = t - 3; j <= t + 3; j++)
            if (j >= 0 && j < PROMPT - 32)
                pooled[t] = fmax(pooled[t], sums[j]);
    }
    evict(pooled, (uint32_t)(naive.share * (n_old - 4) + 0.5));
}

static void compare_position(const struct pass_tail_layer *layer, uint32_t kv_head, uint32_t i)
{
    const uint32_t position = layer->first + i, n_old = (position / 64 - 1) * 64;
    const size_t first_head = (size_t)i * N_KV_HEADS * GROUP + (size_t)kv_head * GROUP;
    double sums[CONTEXT] = {0};
    if (naive.kind == QUEST)
        keep_pages(layer->q + first_head * HEAD_DIM, n_old);
    for (uint32_t t = 0; t <= position; t++) {
        naive.read[t] = naive.kept[t] || t < 4 || t >= n_old;
        naive.n_read += naive.read[t] && t >= 4 && t < n_old;
    }
    double error = 0, size = 0;
    for (uint32_t head = 0; head < GROUP; head++) {
        double weights[CONTEXT], out[HEAD_DIM] = {0};
        weigh(layer->q + (first_head + head) * HEAD_DIM, position, naive.read, weights);
        for (uint32_t t = 0; t <= position; t++) {
            sums[t] += weights[t] / GROUP;
            for (uint32_t d = 0; d < HEAD_DIM; d++)
                out[d] += weights[t] * naive.v[t][d];
        }
        for (uint32_t d = 0; d < HEAD_DIM; d++) {
            error += pow(out[d] - (double)layer->out[(first_head + head) * HEAD_DIM + d], 2);
            size += out[d] * out[d];
        }
    }
    naive.worst = fmax(naive.worst, sqrt(error / size));
    for (uint32_t t = 0; t <= position && naive.kind == H2O; t++)
        naive.sums[layer->layer][kv_head][t] += sums[t];
}

static void compare(struct methods_fixture *fixture, const struct pass_tail_layer *layer)
{
    for (uint32_t kv_head = 0; kv_head < N_KV_HEADS; kv_head++) {
        memset(naive.kept, 0, sizeof(naive.kept));
        for (uint32_t t = 0; t < CONTEXT; t++)
            take_row(fixture->worker->tools.kernels,
                     pass_tail_block(layer, kv_head, t / 64) + (size_t)(t % 64) * 4 * HEAD_DIM, t);
        for (uint32_t i = 0; i < layer->n; i++) {
            if (i % 64 == 0)
                begin_block(fixture, layer, kv_head, layer->first + i);
            compare_position(layer, kv_head, i);
        }
    }
}

static void test_against_naive(void **state)
{
    (void)state;
    const char *const names[] = {"streaming", "h2o=0.3",    "h2o=0.05", "snapkv=0.3",
                                 "quest=0.3", "quest=0.05", "q4_0",     "kivi2"};
    const double shares[] = {0, 0.3, 0.05, 0.3, 0.3, 0.05, 1, 1};
    const uint32_t kinds[] = {STREAMING, H2O, H2O, SNAPKV, QUEST, QUEST, FORMAT, FORMAT};
    struct methods_fixture *fixture = methods_fixture_new(ROW_CODEC_F16);
    fixture->after_tail = compare;
    for (uint32_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        memset(&naive, 0, sizeof(naive));
        naive.kind = kinds[i];
        naive.share = shares[i];
        fixture->at_prompt = naive.kind == H2O || naive.kind == SNAPKV ? watch_prompt : NULL;
        methods_fixture_begin(fixture, (const char *const[]){names[i], NULL}, false);
        assert_true(fabs((double)pass_scale(fixture->pass) * sqrt(HEAD_DIM) - 1) < 1e-6);
        methods_fixture_tail(fixture, 0);
        uint64_t n_kept = 0;
        for (uint32_t head = 0; head < N_HEADS; head++)
            n_kept += fixture->methods[0]->n_kept[head];
        print_message("%-12s reads %.4f of what is old; worst output %.2g\n", names[i],
                      methods_fixture_kept(fixture, 0), naive.worst);
        assert_int_equal(n_kept, naive.n_read);
        assert_true(naive.worst < 1e-5); /* one other token is a hundred times that */
        methods_fixture_end(fixture);
    }
    methods_fixture_free(fixture);
}

/* ---- formats ---- */

static double half_of(double x) /* to nearest, ties to even, of normal halves */
{
    int exponent;
    if (fabs(x) < 0x1p-14)
        return nearbyint(x * 0x1p24) * 0x1p-24;
    const double mantissa = frexp(x, &exponent);
    return ldexp(nearbyint(ldexp(mantissa, 11)), exponent - 11);
}

static double naive_q8_0(const double *x, uint32_t n, uint32_t i)
{
    double most = 0;
    for (uint32_t j = 0; j < n; j++)
        most = fmax(most, fabs(x[j]));
    return most > 0 ? round(x[i] / (most / 127)) * half_of(most / 127) : 0;
}

static double naive_q4_0(const double *x, uint32_t n, uint32_t i)
{
    double most = 0;
    for (uint32_t j = 0; j < n; j++)
        most = fabs(x[j]) > fabs(most) ? x[j] : most;
    const double scale = most / -8;
    if (fabs(scale) <= 0)
        return 0;
    int number = (int)(x[i] / scale + 8.5);
    number = number < 0 ? 0 : number > 15 ? 15 : number;
    return (number - 8) * half_of(scale);
}

static double naive_kivi(const double *x, uint32_t n, uint32_t i, uint32_t bits)
{
    double least = x[0], most = x[0], steps = (1 << bits) - 1;
    for (uint32_t j = 1; j < n; j++) {
        least = fmin(least, x[j]);
        most = fmax(most, x[j]);
    }
    const double scale = half_of((most - least) / steps), zero = half_of(least);
    return zero + scale * (scale > 0 ? fmin(fmax(nearbyint((x[i] - zero) / scale), 0), steps) : 0);
}

enum { MAX_DIM = 96 };

/* Number i of row j as a format has it: x [64][d], groups by row or (keys of KIVI) by column. */
static double naive_number(const struct methods_kind *kind, bool is_key, const float *x, uint32_t d, uint32_t first,
                           uint32_t j, uint32_t i)
{
    const bool is_kivi = strncmp(kind->name, "kivi", 4) == 0;
    const uint32_t group = is_kivi ? 64 : 32, from = i / group * group;
    double numbers[64];
    uint32_t n = 0;
    if (is_kivi && is_key) {
        for (uint32_t row = first; row < 64; row++)
            numbers[n++] = (double)x[row * d + i];
        return naive_kivi(numbers, n, j - first, kind->bits);
    }
    for (; n < group && from + n < d; n++)
        numbers[n] = (double)x[j * d + from + n];
    if (is_kivi)
        return naive_kivi(numbers, n, i - from, kind->bits);
    return kind->bits == 8 ? naive_q8_0(numbers, n, i - from) : naive_q4_0(numbers, n, i - from);
}

static void check_format(const struct methods_kind *kind, uint32_t d, uint32_t first, uint32_t seed)
{
    static float k[64 * MAX_DIM], v[64 * MAX_DIM], k_kept[64 * MAX_DIM], v_kept[64 * MAX_DIM];
    struct methods_baseline baseline = {.kind = kind, .shape = {1, 1, d, ROW_CODEC_F16}};
    baseline.tools.kernels = kernels_get(KERNELS_ISA_AUTO);
    for (uint32_t j = 0; j < 64 * d; j++) { /* some channels that stand out, some rows that are all alike */
        seed = seed * 1664525 + 1013904223;
        k[j] = ((float)(seed >> 8) / 0x1p23f - 1) * (j % d == 3 ? 30 : 1);
        v[j] = j / d == 7 ? 0 : (float)(seed >> 12) / 0x1p19f - 1;
        k[j] = j % d == 5 ? 0.25f : k[j];
    }
    memcpy(k_kept, k, sizeof(k));
    memcpy(v_kept, v, sizeof(v));
    kind->round(&baseline, first, k_kept, v_kept);
    uint32_t n_other = 0;
    for (uint32_t j = 0; j < 64; j++)
        for (uint32_t i = 0; i < d; i++) {
            const double of_k = j < first ? (double)k[j * d + i] : naive_number(kind, true, k, d, first, j, i);
            const double of_v = j < first ? (double)v[j * d + i] : naive_number(kind, false, v, d, first, j, i);
            n_other += fabs(of_k - (double)k_kept[j * d + i]) > 1e-5 * fmax(1, fabs(of_k));
            n_other += fabs(of_v - (double)v_kept[j * d + i]) > 1e-5 * fmax(1, fabs(of_v));
        }
    /* a quotient just between two numbers may fall the other way in single precision */
    print_message("%-6s head_dim %u from token %u: %u numbers differ\n", kind->name, d, first, n_other);
    assert_true(n_other <= 64 * d / 1000);
}

static void test_formats_against_naive(void **state)
{
    (void)state;
    const struct methods_kind *const kinds[] = {&methods_formats_q8_0, &methods_formats_q4_0, &methods_formats_kivi4,
                                                &methods_formats_kivi2};
    const uint32_t dims[] = {32, 64, 80, 96};
    for (uint32_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
        for (uint32_t j = 0; j < sizeof(dims) / sizeof(dims[0]); j++)
            check_format(kinds[i], dims[j], j % 2 == 0 ? 0 : 4, i * 7 + j);
}

/* ---- the n-th largest ---- */

static void test_nth_largest(void **state)
{
    (void)state;
    uint32_t seed = 1;
    for (uint32_t n = 1; n < 60; n++)
        for (uint32_t wanted = 1; wanted <= n; wanted++) {
            float values[60], sorted[60];
            for (uint32_t i = 0; i < n; i++) {
                seed = seed * 1664525 + 1013904223;
                values[i] = (float)((seed >> 16) % (n % 3 == 0 ? 5 : 1000)); /* many that are equal, or few */
                uint32_t at = i;
                for (; at > 0 && sorted[at - 1] < values[i]; at--)
                    sorted[at] = sorted[at - 1];
                sorted[at] = values[i];
            }
            const float got = methods_looks_nth_largest(values, n, wanted);
            assert_memory_equal(&got, &sorted[wanted - 1], sizeof(float));
        }
}

int main(void)
{
    kernels_thread_setup();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_naive),
        cmocka_unit_test(test_formats_against_naive),
        cmocka_unit_test(test_nth_largest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
