/* fixture.c - see fixture.h. Decodes tiles by the description in codec_rot.h, word by word. */
#include "tests/unit/keys/fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef HCATTN_SANITIZED /* memory is what these builds look at */
const uint32_t fixture_head_dims[] = {2, 20, 64, 80, 0};
#else
const uint32_t fixture_head_dims[] = {2, 8, 16, 20, 48, 64, 80, 96, 128, 200, 256, 0};
#endif

const struct fixture_table *fixture_tables(void)
{
    static struct fixture_table tables[5];
    int n = 0;
    tables[n++] = (struct fixture_table){"plain", &codec_rot_plain};
    if (kernels_get(KERNELS_ISA_AVX2)) {
        tables[n++] = (struct fixture_table){"avx2", &codec_rot_avx2};
        tables[n++] = (struct fixture_table){"halves", &halves_rot};
    }
    if (kernels_get(KERNELS_ISA_AVX512))
        tables[n++] = (struct fixture_table){"avx512", &codec_rot_avx512};
    tables[n].name = NULL;
    return tables;
}

const struct key_codec *fixture_rot(uint32_t bits)
{
    return key_codec_find(bits == 2 ? POLICY_CODEC_ROT2 : bits == 3 ? POLICY_CODEC_ROT3 : POLICY_CODEC_ROT4);
}

const struct key_head *fixture_head(uint32_t head_dim)
{
    static struct key_head heads[2 * KERNELS_MAX_HEAD_DIM]; /* also of what is too wide */
    heads[head_dim].head_dim = head_dim;
    return &heads[head_dim];
}

const struct key_quantizer *fixture_quantizer(const struct key_codec *codec, uint32_t n_layers, uint32_t n_kv_heads,
                                              uint32_t head_dim)
{
    enum { MAX_POOLS = 64 };
    static struct key_head heads[MAX_POOLS];
    static struct key_quantizer quantizer;
    if (n_layers * n_kv_heads > MAX_POOLS)
        abort();
    for (uint32_t i = 0; i < n_layers * n_kv_heads; i++)
        heads[i] = *fixture_head(head_dim);
    quantizer = (struct key_quantizer){.codec = codec, .n_layers = n_layers, .n_kv_heads = n_kv_heads, .heads = heads};
    return &quantizer;
}

static uint64_t state = 1;

void fixture_seed(uint64_t seed)
{
    state = 88172645463325252u + seed * 0x9e3779b97f4a7c15u;
}

double fixture_uniform(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (double)(state * 2685821657736338717u >> 11) * 0x1p-52 - 1.0;
}

double fixture_normal(void)
{
    return sqrt(-2.0 * log(0.5 + 0.49999999 * fixture_uniform())) * cos(3.14159265358979323846 * fixture_uniform());
}

void fixture_normals(float *x, size_t n, double size)
{
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(size * fixture_normal());
}

void fixture_rotation(uint32_t head_dim, double *matrix)
{
    for (uint32_t column = 0; column < head_dim; column++) {
        float unit[KERNELS_MAX_HEAD_DIM] = {0}, given[KERNELS_MAX_HEAD_DIM], rotated[KERNELS_MAX_HEAD_DIM];
        unit[column] = 1;
        codec_rot_rotate(unit, head_dim, given, rotated);
        for (uint32_t row = 0; row < head_dim; row++)
            matrix[row * head_dim + column] = rotated[row];
    }
}

static uint32_t bits_at(const uint8_t *tile, uint32_t word, uint32_t key, uint32_t byte, uint32_t shift, uint32_t mask)
{
    return (uint32_t)tile[(size_t)word * 256 + key * 4 + byte] >> shift & mask;
}

uint32_t fixture_code(uint32_t bits, uint32_t head_dim, const void *tile, uint32_t key, uint32_t i)
{
    static const uint32_t upper[4] = {2, 0, 3, 1};
    const uint32_t n_groups = (head_dim + 15) / 16, g = i / 16, s = i % 16 / 4, b = i % 4;
    if (bits == 4)
        return bits_at(tile, 2 * g + s / 2, key, b, s % 2 * 4, 15);
    uint32_t code = bits_at(tile, g, key, b, 2 * s, 3);
    if (bits == 3)
        code += 4 * bits_at(tile, n_groups + g / 2, key, b, 4 * (g % 2) + upper[s], 1);
    return code;
}

double fixture_level(uint32_t bits, uint32_t code)
{
    const struct rot_format *format = &codec_rot_formats[bits];
    return (double)format->unit * (format->levels[code] - 0.5 * format->top);
}

static const uint8_t *after_words(uint32_t bits, uint32_t head_dim, const void *tile)
{
    const uint32_t n_groups = (head_dim + 15) / 16;
    const uint32_t words[5] = {[2] = n_groups, [3] = n_groups + (n_groups + 1) / 2, [4] = 2 * n_groups};
    return (const uint8_t *)tile + (size_t)words[bits] * 256;
}

double fixture_scale(uint32_t bits, uint32_t head_dim, const void *tile, uint32_t key)
{
    const int code = after_words(bits, head_dim, tile)[key];
    return code ? exp2((code - 128) / 8.0) : 0;
}

double fixture_mean(uint32_t bits, uint32_t head_dim, const void *tile, float side, uint32_t i)
{
    return (double)side * (int8_t)after_words(bits, head_dim, tile)[64 + i];
}

void fixture_decode(uint32_t bits, uint32_t head_dim, const void *tile, float side, double *keys)
{
    double *matrix = malloc((size_t)head_dim * head_dim * sizeof *matrix), level[KERNELS_MAX_HEAD_DIM];
    if (!matrix)
        abort();
    fixture_rotation(head_dim, matrix);
    for (uint32_t j = 0; j < 64; j++) {
        const double scale = fixture_scale(bits, head_dim, tile, j);
        for (uint32_t i = 0; i < head_dim; i++)
            level[i] = scale * fixture_level(bits, fixture_code(bits, head_dim, tile, j, i));
        for (uint32_t i = 0; i < head_dim; i++) {
            double sum = fixture_mean(bits, head_dim, tile, side, i);
            for (uint32_t row = 0; row < head_dim; row++)
                sum += matrix[row * head_dim + i] * level[row];
            keys[j * head_dim + i] = sum;
        }
    }
    free(matrix);
}
