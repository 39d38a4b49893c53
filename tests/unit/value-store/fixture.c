/* fixture.c - see fixture.h. */
#include "tests/unit/value-store/fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

const struct row_shape fixture_shape = {.n_layers = 3, .n_kv_heads = 2, .head_dim = 8, .codec = ROW_CODEC_F16};

struct blocks_owner fixture_owner(const struct fixture *fixture, uint64_t incarnation)
{
    return (struct blocks_owner){
        .incarnation = incarnation,
        .store = FIXTURE_STORE,
        .numa_node = -1,
        .kernels = fixture->kernels,
    };
}

void fixture_open(struct fixture *fixture, const struct row_shape *shape, uint32_t n_blocks)
{
    struct blocks_plan smallest;
    memset(fixture, 0, sizeof(*fixture));
    fixture->shape = *shape;
    fixture->kernels = kernels_get(KERNELS_ISA_PLAIN);
    assert_int_equal(blocks_plan(shape, (uint64_t)1 << 40, &smallest), 0);
    assert_int_equal(blocks_plan(shape, smallest.blocks_offset + n_blocks * smallest.block_bytes, &fixture->plan), 0);
    assert_int_equal(fixture->plan.n_blocks, n_blocks);
    fixture->segment = aligned_alloc(LAYOUT_PAGE_BYTES, fixture->plan.n_bytes);
    assert_non_null(fixture->segment);
    memset(fixture->segment, 0, fixture->plan.n_bytes);
    struct blocks_owner owner = fixture_owner(fixture, 1);
    assert_int_equal(blocks_format(fixture->segment, &fixture->plan, shape, &owner, &fixture->blocks), 0);
}

void fixture_close(struct fixture *fixture)
{
    fixture->blocks = blocks_free(fixture->blocks);
    free(fixture->segment);
}

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

uint32_t fixture_id(uint64_t session, uint32_t position)
{
    return (uint32_t)mix(session * 1000003 + position) % 50000;
}

void fixture_row(const struct fixture *fixture, uint64_t session, uint32_t position, uint32_t layer, uint32_t kv_head,
                 void *row)
{
    float kv[2 * KERNELS_MAX_HEAD_DIM];
    uint32_t n = fixture->shape.head_dim;
    uint64_t seed = mix(session ^ mix(position ^ mix(layer * 1000 + kv_head)));
    for (uint32_t i = 0; i < 2 * n; i++)
        kv[i] = (float)(mix(seed + i) % 4001) * 0x1p-11f - 0.97f;
    kernels_get(KERNELS_ISA_PLAIN)->encode_row(kv, kv + n, n, (enum kernels_rows)fixture->shape.codec, row);
}

void fixture_decode(const struct row_shape *shape, const void *row, float *kv)
{
    const struct kernels *kernels = kernels_get(KERNELS_ISA_PLAIN);
    uint32_t n = shape->head_dim, n_groups = (n + LAYOUT_Q8_GROUP - 1) / LAYOUT_Q8_GROUP;
    if (shape->codec == ROW_CODEC_F16) {
        kernels->f16_decode(row, 2 * (size_t)n, kv);
        return;
    }
    const int8_t *numbers = row;
    for (uint32_t i = 0; i < 2 * n; i++) {
        uint16_t bits;
        float scale;
        uint32_t group = i / n * n_groups + i % n / LAYOUT_Q8_GROUP;
        memcpy(&bits, numbers + 2 * n + 2 * group, sizeof(bits));
        kernels->f16_decode(&bits, 1, &scale);
        kv[i] = (float)numbers[i] * scale;
    }
}

void *fixture_rows(const struct fixture *fixture, uint64_t session, uint32_t position, uint32_t n_tokens,
                   uint32_t layer)
{
    size_t row = layout_row_bytes(&fixture->shape), n_heads = fixture->shape.n_kv_heads;
    uint8_t *rows = malloc(n_tokens * n_heads * row);
    assert_non_null(rows);
    for (uint32_t token = 0; token < n_tokens; token++) {
        for (uint32_t head = 0; head < n_heads; head++)
            fixture_row(fixture, session, position + token, layer, head, rows + ((size_t)token * n_heads + head) * row);
    }
    return rows;
}

void fixture_session(struct blocks *blocks, uint64_t session)
{
    struct session_record record = {.session = session, .model = {7, 8}, .policy = "full"};
    assert_int_equal(blocks_session_open(blocks, &record), 0);
}

struct blocks_reservation fixture_reservation(uint32_t index, uint32_t generation, uint32_t number)
{
    return (struct blocks_reservation){
        .handle = {.index = index, .generation = generation},
        .previous = {.index = 0, .generation = number == 0 ? 0 : 1},
        .number = number,
    };
}

void fixture_reserve(struct blocks *blocks, uint64_t session, uint32_t index, uint32_t generation, uint32_t number)
{
    struct blocks_reservation reservation = fixture_reservation(index, generation, number);
    uint32_t failed;
    assert_int_equal(blocks_reserve(blocks, session, &reservation, 1, &failed), 0);
}

int fixture_append(const struct fixture *fixture, struct blocks *blocks, uint64_t session, struct block_handle handle,
                   uint32_t number, uint32_t first, uint32_t n, uint32_t layer)
{
    uint32_t ids[LAYOUT_BLOCK_TOKENS];
    uint32_t position = number * LAYOUT_BLOCK_TOKENS + first;
    for (uint32_t i = 0; i < n; i++)
        ids[i] = fixture_id(session, position + i);
    uint32_t begin = layer == UINT32_MAX ? 0 : layer;
    uint32_t end = layer == UINT32_MAX ? fixture->shape.n_layers : layer + 1;
    for (uint32_t l = begin; l < end; l++) {
        void *rows = fixture_rows(fixture, session, position, n, l);
        struct blocks_append append = {
            .session = session,
            .handle = handle,
            .layer = l,
            .first_token = first,
            .n_tokens = n,
            .ids = l == 0 ? ids : NULL,
            .rows = rows,
        };
        int result = blocks_append(blocks, &append);
        free(rows);
        if (result < 0)
            return result;
    }
    return 0;
}

static bool sums_are_right(const struct fixture *fixture, const struct block_header *header, uint32_t layer,
                           uint32_t head)
{
    float sums[2 * KERNELS_MAX_HEAD_DIM];
    const uint8_t *block = (const uint8_t *)header;
    const void *rows = block + layout_head_rows_offset(&fixture->shape, layer, head);
    fixture->kernels->block_sums(rows, LAYOUT_BLOCK_TOKENS, fixture->shape.head_dim,
                                 (enum kernels_rows)fixture->shape.codec, sums);
    return memcmp(sums, block + layout_head_sums_offset(&fixture->shape, layer, head),
                  fixture->shape.head_dim * 2 * sizeof(float)) == 0;
}

bool fixture_copy_is_right(const struct fixture *fixture, const struct blocks *blocks, uint64_t session,
                           struct block_handle handle, uint64_t tokens_of)
{
    struct blocks_view view;
    uint8_t row[FIXTURE_ROW];
    uint64_t row_bytes = layout_row_bytes(&fixture->shape);
    if (blocks_find(blocks, session, handle, &view) != 0)
        return false;
    uint32_t n_ids = atomic_load(&view.header->n_ids);
    for (uint32_t i = 0; i < n_ids; i++) {
        if (view.header->ids[i] != fixture_id(tokens_of, view.number * LAYOUT_BLOCK_TOKENS + i))
            return false;
    }
    for (uint32_t layer = 0; layer < fixture->shape.n_layers; layer++) {
        uint32_t n_rows = blocks_n_rows(&view, layer);
        for (uint32_t head = 0; head < fixture->shape.n_kv_heads; head++) {
            const uint8_t *rows = blocks_head_rows(blocks, &view, layer, head);
            for (uint32_t i = 0; i < n_rows; i++) {
                fixture_row(fixture, tokens_of, view.number * LAYOUT_BLOCK_TOKENS + i, layer, head, row);
                if (memcmp(row, rows + i * row_bytes, row_bytes) != 0)
                    return false;
            }
            if (n_rows == LAYOUT_BLOCK_TOKENS && !sums_are_right(fixture, view.header, layer, head))
                return false;
        }
    }
    return atomic_load(&view.header->state) != BLOCK_SEALED || blocks_verify(blocks, handle.index) == 0;
}

bool fixture_block_is_right(const struct fixture *fixture, const struct blocks *blocks, uint64_t session,
                            struct block_handle handle)
{
    return fixture_copy_is_right(fixture, blocks, session, handle, session);
}
