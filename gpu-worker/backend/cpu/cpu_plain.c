/* cpu_plain.c - the table in plain C: what the vector tables are tested against; its packed products have their bits. */
#include "gpu-worker/backend/cpu/cpu_kernels.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/kernels.h"

#define PLAIN_TILE_ROWS 8u

static void quantize(const float *x, uint32_t n_columns, struct cpu_activation *out)
{
    for (uint32_t b = 0; b < n_columns / CPU_BLOCK; b++, x += CPU_BLOCK, out++) {
        float largest = 0;
        int finite = 1;
        memset(out, 0, sizeof *out);
        for (uint32_t i = 0; i < CPU_BLOCK; i++) {
            largest = fmaxf(largest, fabsf(x[i]));
            finite = finite && isfinite(x[i]);
        }
        if (!finite) {
            out->scale = out->sum = out->half_sums[0] = out->half_sums[1] = NAN;
            continue;
        }
        if (largest < CPU_SMALLEST)
            continue;
        float inverse = CPU_LARGEST / largest;
        int32_t totals[2] = {0, 0};
        for (uint32_t i = 0; i < CPU_BLOCK; i++) {
            out->q[i] = (int16_t)lrintf(x[i] * inverse);
            totals[i / 16] += out->q[i];
        }
        out->scale = largest / CPU_LARGEST;
        out->sum = out->scale * (float)(totals[0] + totals[1]);
        for (int half = 0; half < 2; half++)
            out->half_sums[half] = out->scale * (float)totals[half];
    }
}

static float f16_at(const uint8_t *at)
{
    uint16_t bits;
    float value;
    memcpy(&bits, at, sizeof bits);
    kernels_get(KERNELS_ISA_PLAIN)->f16_decode(&bits, 1, &value);
    return value;
}

static float f32_at(const uint8_t *at)
{
    float value;
    memcpy(&value, at, sizeof value);
    return value;
}

static int quant_at(enum cpu_packing packing, const uint8_t *quants, size_t tile_rows, uint32_t r, uint32_t column)
{
    if (cpu_packed_quant_bytes(packing) == 16) {
        int byte = quants[(column % 16 / 4 * tile_rows + r) * 4 + cpu_packed_position(column)];
        return column < 16 ? byte & 15 : byte >> 4;
    }
    uint8_t byte = quants[(column / 4 * tile_rows + r) * 4 + cpu_packed_position(column)];
    return packing == CPU_S8 ? (int8_t)byte : byte;
}

static float add_block(const struct cpu_packed *weight, const uint8_t *block, uint32_t r,
                       const struct cpu_activation *x, float y)
{
    const size_t n = weight->tile_rows;
    const uint8_t *quants = block + n * cpu_packed_scale_bytes(weight->packing);
    int32_t halves[2] = {0, 0};
    for (uint32_t c = 0; c < CPU_BLOCK; c++)
        halves[c / 16] += quant_at(weight->packing, quants, n, r, c) * x->q[c];
    float scale, minimum;
    switch (weight->packing) {
    case CPU_U6:
        for (uint32_t half = 0; half < 2; half++) {
            scale = f32_at(block + 4 * (n * half + r));
            y = fmaf((float)halves[half], scale * x->scale, y);
            y = fmaf(scale * -32.0f, x->half_sums[half], y);
        }
        return y;
    case CPU_U4_K:
    case CPU_U5_K:
        scale = f32_at(block + 4 * r);
        minimum = f32_at(block + 4 * (n + r));
        break;
    case CPU_U4_MIN:
    case CPU_U5_MIN:
        scale = f16_at(block + 2 * r);
        minimum = f16_at(block + 2 * (n + r));
        break;
    default:
        scale = f16_at(block + 2 * r);
        minimum = scale * (weight->packing == CPU_U4 ? -8.0f : -16.0f);
        break;
    }
    y = fmaf((float)(halves[0] + halves[1]), scale * x->scale, y);
    return weight->packing == CPU_S8 ? y : fmaf(minimum, x->sum, y);
}

static void matmul_packed(const struct cpu_packed *weight, uint32_t first_tile, uint32_t n_tiles,
                          const struct cpu_activation *x, uint32_t n_tokens, float *y, size_t y_stride)
{
    const uint32_t n = weight->tile_rows;
    for (uint32_t row = first_tile * n; row < (first_tile + n_tiles) * n && row < weight->n_rows; row++) {
        const uint8_t *tile = weight->data + row / n * weight->tile_bytes;
        for (uint32_t t = 0; t < n_tokens; t++) {
            float sum = 0;
            for (uint32_t b = 0; b < weight->n_blocks; b++)
                sum = add_block(weight, tile + b * weight->block_bytes, row % n, &x[(size_t)t * weight->n_blocks + b],
                                sum);
            y[t * y_stride + row] = sum;
        }
    }
}

static float float_at(enum tensor_type type, const uint8_t *row, uint32_t column)
{
    switch (type) {
    case TENSOR_F16:
        return f16_at(row + (size_t)column * 2);
    case TENSOR_BF16: {
        uint16_t high;
        memcpy(&high, row + (size_t)column * 2, sizeof high);
        uint32_t word = (uint32_t)high << 16;
        float value;
        memcpy(&value, &word, sizeof value);
        return value;
    }
    default:
        return f32_at(row + (size_t)column * 4);
    }
}

static void matmul_float(enum tensor_type type, const void *weight, uint32_t n_columns, uint32_t first_row,
                         uint32_t n_rows, const float *x, uint32_t n_tokens, float *y, size_t y_stride)
{
    const size_t row_bytes = (size_t)n_columns * (type == TENSOR_F32 ? 4 : 2);
    for (uint32_t row = first_row; row < first_row + n_rows; row++) {
        const uint8_t *in = (const uint8_t *)weight + row * row_bytes;
        for (uint32_t t = 0; t < n_tokens; t++) {
            double sum = 0;
            for (uint32_t c = 0; c < n_columns; c++)
                sum += (double)float_at(type, in, c) * (double)x[(size_t)t * n_columns + c];
            y[t * y_stride + row] = (float)sum;
        }
    }
}

static void rms_norm(const float *x, uint32_t n, const float *factors, float eps, float *out)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    float scale = (float)(1.0 / sqrt(sum / n + (double)eps));
    for (uint32_t i = 0; i < n; i++)
        out[i] = x[i] * scale * factors[i];
}

static void swiglu(float *gate, const float *up, size_t n)
{
    for (size_t i = 0; i < n; i++)
        gate[i] = (float)((double)gate[i] / (1.0 + exp(-(double)gate[i]))) * up[i];
}

static void add(float *x, const float *y, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] += y[i];
}

const struct cpu_kernels cpu_plain_kernels = {
    .name = "plain",
    .tile_rows = PLAIN_TILE_ROWS,
    .quantize = quantize,
    .matmul_packed = matmul_packed,
    .matmul_float = matmul_float,
    .rms_norm = rms_norm,
    .swiglu = swiglu,
    .add = add,
};
