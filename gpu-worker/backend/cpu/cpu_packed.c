/* cpu_packed.c - from the file's blocks to interleaved tiles, once at load. */
#include "gpu-worker/backend/cpu/cpu_packed.h"

#include <errno.h>
#include <string.h>

#include "kernels/kernels.h"

/* Up to 256 columns of one row in the canonical form: w = scale * q + minimum. */
struct columns {
    uint8_t q[256]; /* two's complement for S8 */
    float scales[16];
    float minima[8];
};

static float f16_at(const uint8_t *bytes)
{
    uint16_t bits;
    float value;
    memcpy(&bits, bytes, sizeof bits);
    kernels_get(KERNELS_ISA_PLAIN)->f16_decode(&bits, 1, &value);
    return value;
}

static void nibbles(const uint8_t *in, uint8_t *q)
{
    for (int j = 0; j < 16; j++) {
        q[j] = in[j] & 15;
        q[j + 16] = in[j] >> 4;
    }
}

static void fifth_bits(const uint8_t *in, uint8_t *q)
{
    for (int j = 0; j < 32; j++)
        q[j] = (uint8_t)(q[j] | (in[j / 8] >> (j % 8) & 1) << 4);
}

static void read_q4_0(const uint8_t *in, struct columns *out)
{
    out->scales[0] = f16_at(in);
    nibbles(in + 2, out->q);
}

static void read_q4_1(const uint8_t *in, struct columns *out)
{
    out->scales[0] = f16_at(in);
    out->minima[0] = f16_at(in + 2);
    nibbles(in + 4, out->q);
}

static void read_q5_0(const uint8_t *in, struct columns *out)
{
    out->scales[0] = f16_at(in);
    nibbles(in + 6, out->q);
    fifth_bits(in + 2, out->q);
}

static void read_q5_1(const uint8_t *in, struct columns *out)
{
    out->scales[0] = f16_at(in);
    out->minima[0] = f16_at(in + 2);
    nibbles(in + 8, out->q);
    fifth_bits(in + 4, out->q);
}

static void read_q8_0(const uint8_t *in, struct columns *out)
{
    out->scales[0] = f16_at(in);
    memcpy(out->q, in + 2, 32);
}

/* 6-bit scales and minima of 8 sub-blocks in 12 bytes. */
static void read_k_scales(const uint8_t *in, struct columns *out)
{
    float scale = f16_at(in), minimum = f16_at(in + 2);
    const uint8_t *packed = in + 4;
    for (int i = 0; i < 8; i++) {
        int sub_scale, sub_minimum;
        if (i < 4) {
            sub_scale = packed[i] & 63;
            sub_minimum = packed[i + 4] & 63;
        } else {
            sub_scale = (packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4;
            sub_minimum = packed[i + 4] >> 4 | (packed[i] >> 6) << 4;
        }
        out->scales[i] = scale * (float)sub_scale;
        out->minima[i] = -(minimum * (float)sub_minimum);
    }
}

static void read_k_nibbles(const uint8_t *in, struct columns *out)
{
    for (int i = 0; i < 256; i++) {
        int byte = in[i / 64 * 32 + i % 32];
        out->q[i] = (uint8_t)(i / 32 % 2 ? byte >> 4 : byte & 15);
    }
}

static void read_q4_k(const uint8_t *in, struct columns *out)
{
    read_k_scales(in, out);
    read_k_nibbles(in + 16, out);
}

static void read_q5_k(const uint8_t *in, struct columns *out)
{
    read_k_scales(in, out);
    read_k_nibbles(in + 48, out);
    for (int i = 0; i < 256; i++)
        out->q[i] = (uint8_t)(out->q[i] | (in[16 + i % 32] >> (i / 32) & 1) << 4);
}

static void read_q6_k(const uint8_t *in, struct columns *out)
{
    float scale = f16_at(in + 208);
    for (int i = 0; i < 16; i++)
        out->scales[i] = scale * (float)(int8_t)in[192 + i];
    for (int i = 0; i < 256; i++) {
        int half = i / 128, group = i / 32 % 4, l = i % 32;
        int byte = in[64 * half + 32 * (group % 2) + l];
        int high = in[128 + 32 * half + l] >> (2 * group) & 3;
        out->q[i] = (uint8_t)((group < 2 ? byte & 15 : byte >> 4) | high << 4);
    }
}

static const struct packing {
    enum tensor_type type;
    enum cpu_packing packing;
    void (*read)(const uint8_t *in, struct columns *out);
} packings[] = {
    {TENSOR_Q4_0, CPU_U4, read_q4_0},     {TENSOR_Q4_1, CPU_U4_MIN, read_q4_1}, {TENSOR_Q5_0, CPU_U5, read_q5_0},
    {TENSOR_Q5_1, CPU_U5_MIN, read_q5_1}, {TENSOR_Q8_0, CPU_S8, read_q8_0},     {TENSOR_Q4_K, CPU_U4_K, read_q4_k},
    {TENSOR_Q5_K, CPU_U5_K, read_q5_k},   {TENSOR_Q6_K, CPU_U6, read_q6_k},
};

static const struct packing *find_packing(enum tensor_type type)
{
    for (size_t i = 0; i < sizeof packings / sizeof *packings; i++)
        if (packings[i].type == type)
            return &packings[i];
    return NULL;
}

int cpu_packed_init(struct cpu_packed *packed, const struct tensor *tensor, uint32_t tile_rows,
                    struct memory_arena *arena)
{
    const struct packing *packing = find_packing(tensor->type);
    if (!packing || tensor->n_rows == 0 || tensor_row_bytes(tensor->type, tensor->n_columns) == 0)
        return -ENOTSUP;
    struct cpu_packed new = {
        .packing = packing->packing,
        .n_rows = tensor->n_rows,
        .n_tiles = (tensor->n_rows - 1) / tile_rows + 1,
        .n_blocks = tensor->n_columns / 32,
        .tile_rows = tile_rows,
        .block_bytes =
            tile_rows * (cpu_packed_scale_bytes(packing->packing) + cpu_packed_quant_bytes(packing->packing)),
    };
    new.tile_bytes = new.block_bytes *new.n_blocks;
    new.n_bytes = (new.tile_bytes *new.n_tiles + 63) / 64 * 64;
    new.data = memory_alloc_in(arena, new.n_bytes);
    if (!new.data)
        return -ENOMEM;
    *packed = new;
    return 0;
}

void cpu_packed_fini(struct cpu_packed *packed)
{
    memory_free(packed->data);
    packed->data = NULL;
}

static void put_f16(uint8_t *at, float value)
{
    uint16_t bits; /* exact: the value came from an f16 */
    kernels_get(KERNELS_ISA_PLAIN)->f16_encode(&value, 1, &bits);
    memcpy(at, &bits, sizeof bits);
}

/* Row r of a tile, block b of 32 columns: columns [32 * i, 32 * i + 32) of `in`. */
static void put_block(const struct cpu_packed *packed, uint8_t *block, uint32_t r, const struct columns *in, uint32_t i)
{
    const size_t n = packed->tile_rows;
    const uint8_t *q = in->q + (size_t)i * 32;
    switch (packed->packing) {
    case CPU_U4_MIN:
    case CPU_U5_MIN:
        put_f16(block + 2 * (n + r), in->minima[i]);
        put_f16(block + 2 * r, in->scales[i]);
        break;
    case CPU_U4_K:
    case CPU_U5_K:
        memcpy(block + 4 * (n + r), &in->minima[i], sizeof(float));
        memcpy(block + 4 * r, &in->scales[i], sizeof(float));
        break;
    case CPU_U6:
        memcpy(block + 4 * (n + r), &in->scales[2 * i + 1], sizeof(float));
        memcpy(block + 4 * r, &in->scales[2 * i], sizeof(float));
        break;
    default:
        put_f16(block + 2 * r, in->scales[i]);
        break;
    }
    uint8_t *quants = block + n * cpu_packed_scale_bytes(packed->packing);
    if (cpu_packed_quant_bytes(packed->packing) == 16) {
        for (size_t c = 0; c < 16; c++)
            quants[(c / 4 * n + r) * 4 + cpu_packed_position(c)] = (uint8_t)(q[c] | q[c + 16] << 4);
    } else {
        for (size_t c = 0; c < 32; c++)
            quants[(c / 4 * n + r) * 4 + cpu_packed_position(c)] = q[c];
    }
}

void cpu_packed_fill(struct cpu_packed *packed, const struct tensor *tensor, uint32_t tile)
{
    const struct packing *packing = find_packing(tensor->type);
    const struct tensor_block *shape = tensor_block((uint32_t)tensor->type);
    const size_t row_bytes = tensor_row_bytes(tensor->type, tensor->n_columns);
    const uint32_t blocks_at_once = shape->n_columns / 32;
    uint8_t *at = packed->data + tile * packed->tile_bytes;
    struct columns columns;
    memset(at, 0, packed->tile_bytes);
    for (uint32_t r = 0; r < packed->tile_rows; r++) {
        uint32_t row = tile * packed->tile_rows + r;
        if (row >= packed->n_rows)
            break;
        const uint8_t *in = (const uint8_t *)tensor->data + row * row_bytes;
        for (uint32_t b = 0; b < packed->n_blocks; b += blocks_at_once, in += shape->n_bytes) {
            packing->read(in, &columns);
            for (uint32_t i = 0; i < blocks_at_once; i++)
                put_block(packed, at + (b + i) * packed->block_bytes, r, &columns, i);
        }
    }
}
