/* fixture.c - see fixture.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/policy/fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define N_LAYERS 2u
#define N_HEADS  3u
#define LAYER    1u /* the ones whose tiles hold the fixture's scores */
#define HEAD     2u

double fixture_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(*state >> 11) * 0x1p-53;
}

double fixture_normal(uint64_t *state)
{
    double u = fixture_random(state), v = fixture_random(state);
    return sqrt(-2 * log(u + 1e-300)) * cos(6.283185307179586 * v);
}

/* ---- a codec whose tiles are scores: [query][64] f32 ---- */

static const struct fixture *source; /* of the tiles that are made now; NULL: rubbish */
static uint32_t source_block;

static size_t scores_tile_bytes(const struct key_head *head)
{
    return head->head_dim * 64 * sizeof(float);
}

static void scores_quantize(const struct kernels *kernels, const struct key_head *head, const float *keys, void *tile,
                            float *ret_side)
{
    (void)kernels, (void)keys;
    memset(tile, 0x7e, scores_tile_bytes(head)); /* 8e37: what must not be looked at would win */
    for (uint32_t i = 0; source != NULL && i < source->group; i++)
        memcpy((float *)tile + i * 64, source->scores + ((size_t)i * source->n_blocks + source_block) * 64,
               64 * sizeof(float));
    *ret_side = source != NULL ? 2.0f : 0.0f;
}

static size_t scores_query_bytes(const struct key_head *head, uint32_t n_queries)
{
    return (size_t)head->head_dim * n_queries * sizeof(float);
}

static void scores_prepare(const struct kernels *kernels, const struct key_head *head, const float *q,
                           uint32_t n_queries, float scale, void *query)
{
    (void)kernels;
    for (uint32_t i = 0; i < n_queries * head->head_dim; i++)
        ((float *)query)[i] = q[i] * scale;
}

static void scores_score(const struct kernels *kernels, const struct key_head *head, const void *query,
                         uint32_t n_queries, const void *tiles, const float *sides, uint32_t n_tiles, float *scores,
                         size_t stride)
{
    const size_t d = head->head_dim;
    (void)kernels;
    for (uint32_t i = 0; i < n_queries; i++)
        for (uint32_t j = 0; j < n_tiles * 64; j++) /* the query's number times the side's is 1 */
            scores[i * stride + j] = ((const float *)tiles)[((size_t)(j / 64) * d + i) * 64 + j % 64] *
                                     (((const float *)query)[i * d] * sides[j / 64]);
}

static const struct key_codec scores_codec = {"scores",           scores_tile_bytes, scores_quantize,
                                              scores_query_bytes, scores_prepare,    scores_score};

const struct key_quantizer *fixture_quantizer(void)
{
    static struct key_head heads[N_LAYERS * N_HEADS];
    static const struct key_quantizer quantizer = {
        .codec = &scores_codec, .n_layers = N_LAYERS, .n_kv_heads = N_HEADS, .heads = heads};
    for (uint32_t i = 0; i < N_LAYERS * N_HEADS; i++)
        heads[i].head_dim = FIXTURE_HEAD_DIM;
    return &quantizer;
}

static const void *rows_of(void *context, uint32_t layer, uint32_t kv_head)
{
    static const uint16_t rows[64 * 2 * FIXTURE_HEAD_DIM];
    source = layer == LAYER && kv_head == HEAD ? context : NULL;
    return rows;
}

static void *cache_alloc(void *context, size_t n_bytes)
{
    (void)context;
    return aligned_alloc(64, (n_bytes + 63) / 64 * 64);
}

static void cache_free(void *context, void *memory, size_t n_bytes)
{
    (void)context, (void)n_bytes;
    free(memory);
}

static void fill_cache(struct fixture *fixture)
{
    const struct row_shape shape = {
        .n_layers = N_LAYERS, .n_kv_heads = N_HEADS, .head_dim = FIXTURE_HEAD_DIM, .codec = ROW_CODEC_F16};
    const struct key_cache_memory memory = {.alloc = cache_alloc, .free = cache_free};
    fixture->keys = key_cache_free(fixture->keys);
    assert_int_equal(key_cache_new(fixture_quantizer(), &shape, NULL, &memory, &fixture->keys), 0);
    /* One block more than there are old ones: a session's cache may hold it already. */
    for (uint32_t block = 0; block <= fixture->n_blocks; block++) {
        source_block = block < fixture->n_blocks ? block : 0;
        assert_int_equal(key_cache_add(fixture->keys, kernels_get(KERNELS_ISA_PLAIN), rows_of, fixture), 0);
    }
}

/* ---- cases ---- */

static float score_of(enum fixture_scores kind, uint64_t *state, double level)
{
    static const float huge[] = {1e30f, -1e30f, 9.999e29f, 0.0f, 5.0f};
    static const float ties[] = {0.0f, 1.5f, 3.0f, -4.0f};
    double x = fixture_random(state), normal = fixture_normal(state);
    switch (kind) {
    case SCORES_PEAKED:
        return (float)(1.5 * level + 3 * normal);
    case SCORES_EQUAL:
        return 1.25f;
    case SCORES_TIES:
        return ties[(int)(x * x * x * 4)];
    case SCORES_WIDE:
        return (float)(45 * normal);
    case SCORES_HUGE:
        return huge[(int)(x * 5)];
    case SCORES_HOLES:
        return x < 0.2 ? NAN : x < 0.4 ? -INFINITY : (float)(2 * normal);
    case SCORES_EXACT:
        return (float)(-25 + 2 * normal);
    case SCORES_LAST:
        return -INFINITY;
    default:
        return (float)normal;
    }
}

static void *memory_of(size_t n_bytes)
{
    void *memory = malloc(n_bytes);
    assert_non_null(memory);
    return memory;
}

void fixture_init(struct fixture *fixture, enum fixture_scores kind, uint32_t group, uint32_t n_blocks, uint32_t seed)
{
    const size_t n = (size_t)n_blocks * 64;
    uint64_t state = seed * 7919u + (uint64_t)kind * 104729u + group * 31u + n_blocks;
    *fixture = (struct fixture){.group = group, .n_blocks = n_blocks, .n_exact = 68 + seed % 65};
    fixture->scores = memory_of(group * n * sizeof(float));
    fixture->exact_scores = memory_of(group * FIXTURE_MAX_EXACT * sizeof(float));
    fixture->exact = memory_of(group * (2 + FIXTURE_HEAD_DIM) * sizeof(float));
    fixture->q = memory_of(group * FIXTURE_HEAD_DIM * sizeof(float));
    fixture->masks = memory_of(n_blocks * sizeof(uint64_t));
    fixture->masses = memory_of(group * n_blocks * sizeof(float));
    fixture->references = memory_of(group * sizeof(float));
    fixture->weights = memory_of(group * n * sizeof(float));
    fixture->scratch = aligned_alloc(64, selection_scratch_bytes(fixture_quantizer(), group, n_blocks));
    assert_non_null(fixture->scratch);
    for (uint32_t i = 0; i < group * FIXTURE_HEAD_DIM; i++)
        fixture->q[i] = 2.0f;
    for (uint32_t head = 0; head < group; head++) {
        for (size_t j = 0; j < n; j++) {
            double level = fixture_normal(&(uint64_t){state + 977 * (j / 64)});
            fixture->scores[head * n + j] = score_of(kind, &state, level);
        }
        for (uint32_t j = 0; j < FIXTURE_MAX_EXACT; j++)
            fixture->exact_scores[head * FIXTURE_MAX_EXACT + j] =
                kind == SCORES_EQUAL ? 1.25f : (float)(fixture_normal(&state) * (kind == SCORES_HUGE ? 1e29 : 1.0));
        if (kind == SCORES_DOMINANT)
            fixture->scores[head * n + n * 2 / 3 + 7] = 30;
        if (kind == SCORES_LAST)
            fixture->scores[head * n + n - 1] = -2;
        for (uint32_t j = 0; j < LAYOUT_N_SINKS; j++) /* would be selected first */
            fixture->scores[head * n + j] = j == 1 ? NAN : 1e37f;
    }
    fixture_update(fixture);
}

void fixture_update(struct fixture *fixture)
{
    fill_cache(fixture);
    for (uint32_t head = 0; head < fixture->group; head++) {
        float *partial = fixture->exact + head * (2 + FIXTURE_HEAD_DIM);
        const float *scores = fixture->exact_scores + head * FIXTURE_MAX_EXACT;
        partial[0] = -INFINITY;
        for (uint32_t j = 0; j < fixture->n_exact; j++)
            partial[0] = fmaxf(partial[0], scores[j]);
        double sum = 0;
        for (uint32_t j = 0; j < fixture->n_exact && partial[0] > -INFINITY; j++)
            sum += isnan(scores[j]) ? 0 : exp((double)scores[j] - (double)partial[0]);
        partial[1] = (float)sum;
        for (uint32_t i = 0; i < FIXTURE_HEAD_DIM; i++)
            partial[2 + i] = NAN; /* is of no concern */
    }
}

void fixture_fini(struct fixture *fixture)
{
    key_cache_free(fixture->keys);
    free(fixture->scores);
    free(fixture->exact_scores);
    free(fixture->exact);
    free(fixture->q);
    free(fixture->masks);
    free(fixture->masses);
    free(fixture->references);
    free(fixture->weights);
    free(fixture->scratch);
}

void fixture_run(struct fixture *fixture, const struct kernels *kernels, enum policy_selector selector, float parameter,
                 bool tail)
{
    const size_t n = (size_t)fixture->n_blocks * 64;
    memset(fixture->masks, 0x5a, fixture->n_blocks * sizeof(uint64_t));
    memset(fixture->masses, 0x5a, fixture->group * fixture->n_blocks * sizeof(float));
    memset(fixture->references, 0x5a, fixture->group * sizeof(float));
    memset(fixture->weights, 0x5a, fixture->group * n * sizeof(float));
    fixture->policy = (struct policy){
        .terms = {.selector = selector, .parameter = parameter, .tail = tail, .weights = true},
        .quantizer = selector == POLICY_SELECTOR_FULL ? NULL : fixture_quantizer(),
        .mode = AGGREGATE_WEIGHTS,
    };
    fixture->item = (struct selection_item){
        .policy = &fixture->policy,
        .q = fixture->q,
        .group = fixture->group,
        .head_dim = FIXTURE_HEAD_DIM,
        .scale = 0.25f, /* x 2 of the query x 2 of the side */
        .exact = fixture->exact,
        .exact_scores = selector == POLICY_SELECTOR_MASS ? fixture->exact_scores : NULL,
        .exact_stride = FIXTURE_MAX_EXACT,
        .n_exact = selector == POLICY_SELECTOR_MASS ? fixture->n_exact : 0,
        .keys = selector == POLICY_SELECTOR_FULL ? NULL : fixture->keys,
        .layer = LAYER,
        .kv_head = HEAD,
        .n_blocks = fixture->n_blocks,
        .masks = fixture->masks,
        .masses = fixture->masses,
        .references = fixture->references,
        .weights = selector == POLICY_SELECTOR_FULL ? NULL : fixture->weights,
        .weights_stride = n,
        .n_kept = UINT32_MAX,
    };
    selection_run(kernels, &fixture->item, selector == POLICY_SELECTOR_FULL ? NULL : fixture->scratch);
}

const struct kernels *const *fixture_tables(void)
{
    static const struct kernels *tables[KERNELS_N_ISA];
    int n = 0;
    for (int isa = KERNELS_ISA_PLAIN; isa < KERNELS_N_ISA; isa++)
        if (kernels_get((enum kernels_isa)isa) != NULL)
            tables[n++] = kernels_get((enum kernels_isa)isa);
    tables[n] = NULL;
    return tables;
}
