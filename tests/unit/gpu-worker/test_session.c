/* test_session.c - exact set and key cache of one session. */
#include "tests/unit/gpu-worker/cmocka_all.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/policy/exact_set.h"
#include "gpu-worker/policy/policy.h"
#include "gpu-worker/session.h"

static const struct row_shape shape = {.n_layers = 2, .n_kv_heads = 3, .head_dim = 4, .codec = ROW_CODEC_F16};

struct fixture {
    const struct kernels *kernels;
    struct backend *backend;
    struct session *session;
};

static int set_up(void **state)
{
    struct fixture *fixture = calloc(1, sizeof(*fixture));
    char error[128];
    struct backend_options options = {.isa = KERNELS_ISA_PLAIN};
    fixture->kernels = kernels_get(KERNELS_ISA_PLAIN);
    assert_int_equal(backend_reference.open(&options, &fixture->backend, error, sizeof(error)), 0);
    assert_int_equal(session_new(9, &shape, &codec_f16, &backend_reference, fixture->backend, &fixture->session), 0);
    *state = fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    session_free(fixture->session);
    backend_reference.close(fixture->backend);
    free(fixture);
    return 0;
}

/* A value that names its place. */
static uint16_t mark(uint32_t layer, uint32_t head, uint32_t position, uint32_t element)
{
    return (uint16_t)(position * 64 + layer * 32 + head * 8 + element);
}

static void put(struct session *session, uint32_t position)
{
    uint16_t rows[3 * 8];
    for (uint32_t layer = 0; layer < shape.n_layers; layer++) {
        for (uint32_t head = 0; head < 3; head++)
            for (uint32_t i = 0; i < 8; i++)
                rows[head * 8 + i] = mark(layer, head, position, i);
        session_put_rows(session, layer, position, rows);
    }
}

/* Every token is either in a piece of the exact set, once, with its own row, or old: never both, never neither. */
static void exact_set_and_old_tokens_are_a_partition(void **state)
{
    struct fixture *fixture = *state;
    for (uint32_t position = 0; position < 400; position++) {
        put(fixture->session, position);
        uint8_t seen[400] = {0};
        struct backend_piece pieces[SESSION_MAX_PIECES];
        uint32_t n = session_pieces(fixture->session, 1, 2, position, pieces);
        assert_in_range(n, 1, SESSION_MAX_PIECES);
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t j = 0; j < 64; j++) {
                if ((pieces[i].mask >> j & 1) == 0)
                    continue;
                uint32_t token = pieces[i].rows[j * 8] / 64; /* as mark() made it */
                assert_in_range(token, 0, position);
                assert_int_equal(pieces[i].rows[j * 8 + 3], mark(1, 2, token, 3));
                seen[token]++;
            }
        uint64_t masks[8] = {0};
        uint32_t n_old = exact_set_n_old_blocks(position);
        policy_find("full")->selector->select(n_old, masks);
        uint32_t n_old_tokens = 0;
        for (uint32_t block = 0; block < n_old; block++)
            for (uint32_t j = 0; j < 64; j++)
                if ((masks[block] >> j & 1) != 0) {
                    seen[block * 64 + j]++;
                    n_old_tokens++;
                }
        assert_int_equal(n_old_tokens, exact_set_n_old_tokens(position));
        for (uint32_t token = 0; token <= position; token++)
            assert_int_equal(seen[token], 1);
    }
}

static void what_a_later_query_needs_is_kept(void **state)
{
    (void)state;
    for (uint32_t last = 0; last < 300; last++)
        for (uint32_t position = 0; position <= last; position++) {
            bool old = position / 64 < exact_set_n_old_blocks(last) && position >= LAYOUT_N_SINKS;
            assert_int_equal(session_keeps(position, last), !old);
        }
}

static const uint16_t *block_rows(void *context, uint32_t layer, uint32_t kv_head)
{
    static uint16_t rows[64 * 8];
    uint32_t block = *(const uint32_t *)context;
    for (uint32_t j = 0; j < 64; j++)
        for (uint32_t i = 0; i < 8; i++)
            rows[j * 8 + i] = mark(layer, kv_head, block * 64 + j, i);
    return rows;
}

static void key_cache_is_a_pure_function_of_sealed_blocks(void **state)
{
    struct fixture *fixture = *state;
    struct key_cache *caches[2];
    for (int c = 0; c < 2; c++) {
        assert_int_equal(key_cache_new(&codec_f16, &shape, &caches[c]), 0);
        for (uint32_t block = 0; block < 40; block++)
            assert_int_equal(key_cache_add(caches[c], fixture->kernels, block_rows, &block), 0);
    }
    size_t head_bytes = codec_f16.block_bytes(shape.head_dim);
    assert_int_equal(key_cache_bytes(caches[0]), 40 * 2 * 3 * head_bytes);
    assert_int_equal(key_cache_bytes_per_token(&codec_f16, &shape), 2 * 3 * 4 * 2);
    for (uint32_t block = 0; block < 40; block++)
        for (uint32_t layer = 0; layer < 2; layer++)
            for (uint32_t head = 0; head < 3; head++) {
                const uint16_t *keys = key_cache_keys(caches[0], block, layer, head);
                assert_memory_equal(keys, key_cache_keys(caches[1], block, layer, head), head_bytes);
                assert_int_equal(keys[63 * 4 + 2], mark(layer, head, block * 64 + 63, 2)); /* K, not V */
            }
    for (int c = 0; c < 2; c++)
        key_cache_free(caches[c]);
}

static void scores_are_scaled_dots(void **state)
{
    struct fixture *fixture = *state;
    float values[64 * 8], scores[64];
    uint16_t rows[64 * 8], keys[64 * 4];
    const float q[4] = {1, -2, 0.5f, 3};
    for (int i = 0; i < 64 * 8; i++)
        values[i] = (float)(i % 13) * 0.25f - 1;
    fixture->kernels->f16_encode(values, 64 * 8, rows);
    codec_f16.quantize(fixture->kernels, rows, 4, keys);
    codec_f16.score(fixture->kernels, q, 4, keys, 0.5f, scores);
    for (int j = 0; j < 64; j++) {
        float dot = 0;
        for (int i = 0; i < 4; i++)
            dot += q[i] * values[j * 8 + i];
        assert_true(scores[j] - 0.5f * dot < 1e-5f && 0.5f * dot - scores[j] < 1e-5f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(exact_set_and_old_tokens_are_a_partition, set_up, tear_down),
        cmocka_unit_test(what_a_later_query_needs_is_kept),
        cmocka_unit_test_setup_teardown(key_cache_is_a_pure_function_of_sealed_blocks, set_up, tear_down),
        cmocka_unit_test_setup_teardown(scores_are_scaled_dots, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
