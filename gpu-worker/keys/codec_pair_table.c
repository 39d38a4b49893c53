/*
 * codec_pair_table.c - the table of pair from the statistics of a head: which coordinates get how many bits, in which groups.
 *
 * Bits go where they lower the error of scores most: coordinate i of b bits costs E[q_i^2] E[r_i^2] D(b), D the distortion of
 * N(0, 1) at b bits by Lloyd and Max (reverse water-filling with a table for its logarithm). The two dimensions of a RoPE pair
 * share their averages, as position turns one into the other.
 */
#include "gpu-worker/keys/codec_pair.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "gpu-worker/keys/key_statistics.h"

#define MAX_BITS      4u
#define LEAST_SQUARE  1e-12 /* spreads and moments below this share of the largest count as this */
#define LEAST_LARGEST 1e-20 /* less says nothing */
#define LEAST_NUMBER  0x1p-40f

/* Positive halves of the levels of N(0, 1) by Lloyd and Max, and what is lost. */
static const float levels[MAX_BITS + 1][8] = {
    {0},
    {0.79788456f},
    {0.45278004f, 1.51041762f},
    {0.24509409f, 0.75600532f, 1.34390920f, 2.15194570f},
    {0.12839501f, 0.38804823f, 0.65675907f, 0.94234042f, 1.25623117f, 1.61804637f, 2.06901729f, 2.73263627f},
};
static const double distortion[MAX_BITS + 1] = {1.0, 0.36338, 0.11748, 0.034548, 0.0095007};

double codec_pair_table_distortion(uint32_t bits)
{
    return distortion[bits];
}

float codec_pair_table_level(uint32_t bits, uint32_t code)
{
    const uint32_t half = 1u << (bits - 1);
    return code < half ? -levels[bits][half - 1 - code] : levels[bits][code - half];
}

uint32_t codec_pair_table_groups(uint32_t head_dim, uint32_t bits)
{
    const uint32_t n_bits = head_dim * (8 * bits - 1) / 8;
    const uint32_t n_groups = (n_bits + 4) / 8 * 2;
    return n_groups < 2 ? 2 : n_groups > PAIR_MAX_GROUPS ? PAIR_MAX_GROUPS : n_groups;
}

/* A coordinate of the key, before it has a place. */
struct coordinate {
    uint32_t dimension;
    uint32_t bits;
    double weight, spread; /* E[q^2], E[r^2] */
};

/* Squares on the diagonal of a matrix, averaged over RoPE pairs, none less than a small share of the largest. */
static void diagonal(const float *matrix, uint32_t head_dim, double *squares)
{
    double largest = 0;
    for (uint32_t i = 0; i < head_dim; i++) {
        const uint32_t other = i + 1 - i % 2 * 2 < head_dim ? i + 1 - i % 2 * 2 : i;
        const double a = (double)matrix[(size_t)i * head_dim + i], b = (double)matrix[(size_t)other * head_dim + other];
        squares[i] = 0.5 * (a > 0 ? a : 0) + 0.5 * (b > 0 ? b : 0);
        largest = squares[i] > largest ? squares[i] : largest;
    }
    for (uint32_t i = 0; i < head_dim; i++)
        squares[i] =
            largest > LEAST_LARGEST ? fmax(squares[i], largest * LEAST_SQUARE) : 1; /* nothing known: all alike */
}

static void give_bits(struct coordinate *coordinates, uint32_t n, uint32_t n_bits)
{
    for (; n_bits > 0; n_bits--) {
        uint32_t best = n;
        double most = 0;
        for (uint32_t i = 0; i < n; i++) {
            const struct coordinate *it = &coordinates[i];
            if (it->bits == MAX_BITS)
                continue;
            const double gain = it->weight * it->spread * (distortion[it->bits] - distortion[it->bits + 1]);
            if (best == n || gain > most) {
                best = i;
                most = gain;
            }
        }
        if (best == n)
            return;
        coordinates[best].bits++;
    }
}

/* The next coordinate of so many bits that has no place yet; n: none. */
static uint32_t next_of(const struct coordinate *coordinates, const bool *placed, uint32_t n, uint32_t bits)
{
    for (uint32_t i = 0; i < n; i++)
        if (!placed[i] && coordinates[i].bits == bits)
            return i;
    return n;
}

static uint32_t count_of(const struct coordinate *coordinates, uint32_t n, uint32_t bits)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i++)
        count += coordinates[i].bits == bits;
    return count;
}

/* A group holds 4, 3 + 1, 2 + 2, 2 + 1 + 1 or 1 + 1 + 1 + 1 bits: where 3s find no 1s, two of them become 4 and 2. */
static void even_out(struct coordinate *coordinates, uint32_t n)
{
    uint32_t threes = count_of(coordinates, n, 3);
    for (uint32_t ones = count_of(coordinates, n, 1); threes > ones + 1; threes -= 2) {
        uint32_t most = n, least = n;
        for (uint32_t i = 0; i < n; i++) {
            if (coordinates[i].bits != 3)
                continue;
            const double square = coordinates[i].weight * coordinates[i].spread;
            if (most == n || square > coordinates[most].weight * coordinates[most].spread)
                most = i;
            if (least == n || square <= coordinates[least].weight * coordinates[least].spread)
                least = i;
        }
        coordinates[most].bits = 4;
        coordinates[least].bits = 2;
    }
}

/* order [n]: coordinates as groups hold them; ends [n_groups]: where each ends. Returns the number of coded coordinates. */
static uint32_t pack(const struct coordinate *coordinates, uint32_t n, uint32_t n_groups, uint32_t *order,
                     uint32_t *ends)
{
    bool placed[KERNELS_MAX_HEAD_DIM] = {0};
    uint32_t n_placed = 0;
    for (uint32_t g = 0; g < n_groups; g++) {
        for (uint32_t left = MAX_BITS; left > 0;) {
            uint32_t bits = left, next = n;
            for (; bits > 0 && (next = next_of(coordinates, placed, n, bits)) == n;)
                bits--;
            if (next == n)
                break;
            placed[next] = true;
            order[n_placed++] = next;
            left -= bits;
        }
        ends[g] = n_placed;
    }
    return n_placed;
}

static void *take(uint8_t **next, size_t n_bytes)
{
    void *taken = *next;
    *next += (n_bytes + 63) / 64 * 64;
    return taken;
}

struct pair_table *codec_pair_table_alloc(const struct pair_layout *layout, uint32_t n_coordinates, bool dense)
{
    const uint32_t head_dim = layout->head_dim, n_groups = layout->n_groups;
    const size_t n = n_coordinates, matrix = dense ? n * head_dim : n, header = sizeof(struct pair_table);
    const size_t sizes[] = {header,
                            n * sizeof(uint16_t),
                            matrix * sizeof(float),
                            matrix * sizeof(float),
                            n * sizeof(float),
                            n * sizeof(float),
                            head_dim * sizeof(float),
                            n_groups * sizeof(struct pair_group),
                            n * PAIR_CODEWORDS * sizeof(float),
                            (size_t)n_groups * PAIR_CODEWORDS * sizeof(float)};
    size_t total = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        total += (sizes[i] + 63) / 64 * 64;
    uint8_t *memory = aligned_alloc(64, total), *next = memory;
    if (!memory)
        return NULL;
    memset(memory, 0, total);
    struct pair_table *table = take(&next, sizes[0]);
    table->layout = *layout;
    table->n_coordinates = n_coordinates;
    table->dense = dense;
    table->dimension = take(&next, sizes[1]);
    table->analysis = take(&next, sizes[2]);
    table->synthesis = take(&next, sizes[3]);
    table->inverse_spread = take(&next, sizes[4]);
    table->along = take(&next, sizes[5]);
    table->direction = take(&next, sizes[6]);
    table->groups = take(&next, sizes[7]);
    table->codewords = take(&next, sizes[8]);
    table->half_squares = take(&next, sizes[9]);
    table->n_bytes = total;
    return table;
}

/* The product of the levels of the group's coordinates. */
static void fill_group(const struct pair_table *table, uint32_t g, const struct coordinate *coordinates,
                       const uint32_t *order)
{
    const struct pair_group *group = &table->groups[g];
    float *codewords = table->codewords + group->codewords;
    for (uint32_t c = 0; c < PAIR_CODEWORDS; c++) {
        double square = 0;
        for (uint32_t i = 0, shift = 0; i < group->n; i++) {
            const struct coordinate *it = &coordinates[order[group->first + i]];
            const double size = sqrt(it->weight * it->spread);
            const float value =
                (float)((double)codec_pair_table_level(it->bits, c >> shift & ((1u << it->bits) - 1)) * size);
            codewords[c * group->n + i] = value;
            square += (double)value * (double)value;
            shift += it->bits;
        }
        table->half_squares[g * PAIR_CODEWORDS + c] = (float)(0.5 * square);
    }
}

static void fill_direction(const struct pair_table *table, const float *q_mean)
{
    double square = 0;
    for (uint32_t i = 0; i < table->layout.head_dim; i++)
        square += (double)q_mean[i] * (double)q_mean[i];
    for (uint32_t i = 0; i < table->layout.head_dim && square > 0; i++) {
        const float share = (float)((double)q_mean[i] / sqrt(square));
        table->direction[i] = fabsf(share) < LEAST_NUMBER ? 0 : share;
    }
}

int codec_pair_table_new(const struct key_statistics *statistics, uint32_t layer, uint32_t kv_head, uint32_t n_groups,
                         struct pair_table **ret_table)
{
    const struct key_statistics_head head = key_statistics_head(statistics, layer, kv_head);
    const uint32_t n = statistics->head_dim;
    struct coordinate coordinates[KERNELS_MAX_HEAD_DIM];
    double weights[KERNELS_MAX_HEAD_DIM], spreads[KERNELS_MAX_HEAD_DIM];
    uint32_t order[KERNELS_MAX_HEAD_DIM], ends[PAIR_MAX_GROUPS];
    diagonal(head.q_square, n, weights);
    diagonal(head.k_spread, n, spreads);
    double largest = 0;
    for (uint32_t i = 0; i < n; i++)
        largest = fmax(largest, weights[i]);
    for (uint32_t i = 0; i < n; i++)
        coordinates[i] = (struct coordinate){i, 0, weights[i] / largest, spreads[i]};
    give_bits(coordinates, n, n_groups * MAX_BITS);
    even_out(coordinates, n);
    const uint32_t n_coded = pack(coordinates, n, n_groups, order, ends);

    const struct pair_layout layout = {n, n_groups, false};
    struct pair_table *table = codec_pair_table_alloc(&layout, n_coded, false);
    if (!table)
        return -ENOMEM;
    fill_direction(table, head.q_mean);
    for (uint32_t c = 0; c < n_coded; c++) {
        const struct coordinate *it = &coordinates[order[c]];
        const float factor = (float)sqrt(it->weight);
        table->dimension[c] = (uint16_t)it->dimension;
        table->analysis[c] = factor;
        table->synthesis[c] = 1.0f / factor;
        table->inverse_spread[c] = (float)(1.0 / (it->weight * it->spread * n_coded));
        table->along[c] = table->direction[it->dimension] / factor;
    }
    for (uint32_t g = 0, first = 0; g < n_groups; first = ends[g++]) {
        (table->groups)[g] = (struct pair_group){(uint16_t)first, (uint16_t)(ends[g] - first), first * PAIR_CODEWORDS};
        fill_group(table, g, coordinates, order);
    }
    *ret_table = table;
    return 0;
}
