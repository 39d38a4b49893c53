/* fixture_pair.c - see fixture_pair.h. Reads tiles by the description in codec_pair.h. */
#include "tests/unit/keys/fixture_pair.h"

#include <math.h>

uint32_t fixture_pair_code(const uint8_t *tile, uint32_t group, uint32_t key)
{
    return (uint32_t)tile[group / 2 * 64 + key] >> (group % 2 ? 4 : 0) & 15u;
}
const uint8_t *fixture_pair_tail(const struct pair_table *table, const uint8_t *tile)
{
    return tile + table->layout.n_groups / 2 * 64;
}
double fixture_pair_scale(const struct pair_table *table, const uint8_t *tile, uint32_t key)
{
    const int code = fixture_pair_tail(table, tile)[key];
    if (table->layout.is_klt)
        return code >> 4 ? exp2(((code >> 4) - 8) / 4.0) : 0;
    return code ? exp2((code - 128) / 8.0) : 0;
}
double fixture_pair_along_step(float side)
{
    uint32_t bits;
    memcpy(&bits, &side, sizeof bits);
    return bits & 255u ? exp2(((int)(bits & 255u) - 128) / 8.0) : 0;
}
const int8_t *fixture_pair_means(const struct pair_table *table, const uint8_t *tile)
{
    return (const int8_t *)fixture_pair_tail(table, tile) + (table->layout.is_klt ? 64 : 128);
}
double fixture_pair_mean(const struct pair_table *table, const uint8_t *tile, float side, uint32_t i)
{
    return (double)pair_mean_step(side) * fixture_pair_means(table, tile)[i];
}
double fixture_pair_along(const struct pair_table *table, const uint8_t *tile, float side, uint32_t key)
{
    return table->layout.is_klt ? 0 : fixture_pair_along_step(side) * (int8_t)fixture_pair_tail(table, tile)[64 + key];
}

/* Coordinate c of a residual, and what one of it is in dimension i. */
double fixture_pair_coordinate(const struct pair_table *table, const double *r, uint32_t c)
{
    const uint32_t n = table->layout.head_dim;
    double y = 0;
    if (!table->dense)
        return r[table->dimension[c]] * (double)table->analysis[c];
    for (uint32_t i = 0; i < n; i++)
        y += r[i] * (double)table->analysis[c * n + i];
    return y;
}
double fixture_pair_synthesis(const struct pair_table *table, uint32_t i, uint32_t c)
{
    if (table->dense)
        return (double)table->synthesis[i * table->n_coordinates + c];
    return table->dimension[c] == i ? (double)table->synthesis[c] : 0;
}

/* B' codewords, without a, [head_dim]. */
void fixture_pair_codewords(const struct pair_table *table, const uint8_t *tile, uint32_t key, double *sum)
{
    memset(sum, 0, table->layout.head_dim * sizeof *sum);
    for (uint32_t g = 0; g < table->layout.n_groups; g++) {
        const struct pair_group *group = &table->groups[g];
        const float *codeword = table->codewords + group->codewords + fixture_pair_code(tile, g, key) * group->n;
        for (uint32_t c = 0; c < group->n; c++)
            for (uint32_t i = 0; i < table->layout.head_dim; i++)
                sum[i] += fixture_pair_synthesis(table, i, group->first + c) * (double)codeword[c];
    }
}

/* k^ [64][head_dim] */
void fixture_pair_decode(const struct pair_table *table, const uint8_t *tile, float side, double *decoded)
{
    for (uint32_t j = 0; j < 64; j++, decoded += table->layout.head_dim) {
        fixture_pair_codewords(table, tile, j, decoded);
        for (uint32_t i = 0; i < table->layout.head_dim; i++)
            decoded[i] = fixture_pair_mean(table, tile, side, i) + fixture_pair_scale(table, tile, j) * decoded[i] +
                         fixture_pair_along(table, tile, side, j) * (double)table->direction[i];
    }
}
