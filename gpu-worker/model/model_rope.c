/*
 * model_rope.c - the frequencies of the rotary embedding with every scaling a file can ask for.
 *
 * Source     RoPE: Su et al. 2021; linear scaling: position interpolation, Chen et al. 2023; YaRN: Peng et al. 2023,
 *            section 3.2 (NTK-by-parts) and 3.4 (attention factor); `rope_freqs.weight`: factors a converter computed
 *            (Llama 3.1) that divide the frequencies.
 * Invariant  frequencies are finite and computed in double, so that long contexts do not add up rounding errors.
 */
#include "gpu-worker/model/model_private.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/model/dequantize.h"

struct scaling {
    double factor; /* positions are divided by it */
    bool is_yarn;
    float extrapolation; /* YaRN: weight of the unscaled frequencies in the fast dimensions, 1 in its paper */
    float beta_fast, beta_slow;
    uint32_t n_ctx_original;
    double magnitude;
};

static int get_optional_f32(const struct model_reader *reader, const char *name, float *value)
{
    int r = model_get_f32(reader, name, value);
    return r == -ENOENT ? 0 : r;
}

static int read_type(const struct model_reader *reader, bool *ret_is_none, bool *ret_is_yarn)
{
    struct gguf_string type;
    char name[64];
    int r = gguf_get_string(reader->model->gguf, "llama.rope.scaling.type", &type);
    if (r == -ENOENT)
        return 0; /* linear, by whatever factor the file has */
    if (r)
        return model_fail(reader, -EINVAL, "llama.rope.scaling.type is not a string");
    gguf_printable(type, name, sizeof name);
    *ret_is_none = strcmp(name, "none") == 0;
    *ret_is_yarn = strcmp(name, "yarn") == 0;
    if (!*ret_is_none && !*ret_is_yarn && strcmp(name, "linear") != 0)
        return model_fail(reader, -ENOTSUP, "RoPE scaling \"%s\" is not supported, only none, linear and yarn", name);
    return 0;
}

static int read_scaling(const struct model_reader *reader, struct scaling *scaling)
{
    bool is_none = false;
    float factor = 0, attention_factor = 1, yarn_attention_factor = 1, log_multiplier = 0;
    int r = read_type(reader, &is_none, &scaling->is_yarn);
    if (r)
        return r;
    r = model_get_f32(reader, "rope.scaling.factor", &factor);
    if (r == -ENOENT)
        r = get_optional_f32(reader, "rope.scale_linear", &factor); /* the key's name before GGUF v3 */
    if (r)
        return r;
    if ((r = get_optional_f32(reader, "rope.scaling.attn_factor", &attention_factor)) ||
        (r = get_optional_f32(reader, "rope.scaling.yarn_attn_factor", &yarn_attention_factor)) ||
        (r = get_optional_f32(reader, "rope.scaling.yarn_ext_factor", &scaling->extrapolation)) ||
        (r = get_optional_f32(reader, "rope.scaling.yarn_beta_fast", &scaling->beta_fast)) ||
        (r = get_optional_f32(reader, "rope.scaling.yarn_beta_slow", &scaling->beta_slow)) ||
        (r = get_optional_f32(reader, "rope.scaling.yarn_log_multiplier", &log_multiplier)))
        return r;
    r = model_get_u32(reader, "rope.scaling.original_context_length", &scaling->n_ctx_original);
    if (r == -ENOENT)
        scaling->n_ctx_original = reader->model->shape.n_ctx_train;
    else if (r)
        return r;

    if (is_none || factor == 0)
        factor = 1;
    if (!(factor > 0) || !(scaling->beta_fast > 0) || !(scaling->beta_slow > 0) || scaling->n_ctx_original == 0 ||
        !(attention_factor > 0) || !(yarn_attention_factor > 0))
        return model_fail(reader, -EINVAL, "a RoPE scaling key is zero or negative");
    if (log_multiplier != 0)
        return model_fail(reader, -ENOTSUP, "RoPE scaling key llama.rope.scaling.yarn_log_multiplier is not supported");
    scaling->factor = (double)factor;
    /* llama.cpp takes YaRN's own factor from its formula wherever YaRN acts, and the key only elsewhere. */
    if (scaling->extrapolation < 0)
        scaling->extrapolation = 1;
    scaling->magnitude = (double)attention_factor;
    if (scaling->is_yarn && scaling->extrapolation != 0)
        scaling->magnitude *= fmax(1, 1 + 0.1 * log(scaling->factor));
    else
        scaling->magnitude *= (double)yarn_attention_factor;
    if (!(scaling->magnitude > 0) || !isfinite(scaling->magnitude))
        return model_fail(reader, -EINVAL, "llama.rope.scaling.factor %g is out of range", (double)factor);
    return 0;
}

/* The (fractional) pair that turns n_turns times over the original context. */
static double yarn_pair(const struct scaling *scaling, double n_turns, uint32_t n_rotated, double base)
{
    return n_rotated * log(scaling->n_ctx_original / (n_turns * 2 * M_PI)) / (2 * log(base));
}

static double scaled(const struct scaling *scaling, double frequency, uint32_t pair, double low, double high)
{
    double interpolated = frequency / scaling->factor;
    if (!scaling->is_yarn)
        return interpolated;
    double ramp = (pair - low) / fmax(0.001, high - low);
    double keep = (1 - fmin(1, fmax(0, ramp))) * (double)scaling->extrapolation;
    return interpolated * (1 - keep) + frequency * keep;
}

/* *ret_factors: [n_rotated / 2], NULL when the file has none. */
static int read_factors(const struct model_reader *reader, uint32_t n_rotated, float **ret_factors)
{
    const struct tensor *tensor = gguf_find_tensor(reader->model->gguf, "rope_freqs.weight");
    if (!tensor)
        return 0;
    if (tensor->n_rows != 1 || tensor->n_columns != n_rotated / 2)
        return model_fail(reader, -EINVAL, "tensor rope_freqs.weight has %u x %u numbers, expected %u", tensor->n_rows,
                          tensor->n_columns, n_rotated / 2);
    float *factors = calloc(n_rotated / 2, sizeof *factors);
    if (!factors)
        return model_fail(reader, -ENOMEM, "no memory");
    dequantize_row(tensor->type, tensor->data, tensor->n_columns, factors);
    for (uint32_t i = 0; i < n_rotated / 2; i++) {
        if (!(factors[i] > 0) || !isfinite(factors[i])) {
            free(factors);
            return model_fail(reader, -EINVAL, "tensor rope_freqs.weight holds a factor that is not above zero");
        }
    }
    *ret_factors = factors;
    return 0;
}

int model_rope_read(const struct model_reader *reader)
{
    struct model *model = reader->model;
    struct scaling scaling = {.extrapolation = 1, .beta_fast = 32, .beta_slow = 1};
    uint32_t n_rotated = model->shape.head_dim;
    float base = 10000;
    int r = model_get_u32(reader, "rope.dimension_count", &n_rotated);
    if (r && r != -ENOENT)
        return r;
    if (n_rotated == 0 || n_rotated % 2 || n_rotated > model->shape.head_dim)
        return model_fail(reader, -EINVAL, "llama.rope.dimension_count is %u; heads have %u dimensions", n_rotated,
                          model->shape.head_dim);
    if ((r = get_optional_f32(reader, "rope.freq_base", &base)) || (r = read_scaling(reader, &scaling)))
        return r;
    if (!(base > 1))
        return model_fail(reader, -EINVAL, "llama.rope.freq_base is %g", (double)base);

    float *factors = NULL;
    r = read_factors(reader, n_rotated, &factors);
    if (r)
        return r;
    model->rope.frequencies = calloc(n_rotated / 2, sizeof *model->rope.frequencies);
    if (!model->rope.frequencies) {
        free(factors);
        return model_fail(reader, -ENOMEM, "no memory");
    }
    double low = fmax(0, floor(yarn_pair(&scaling, (double)scaling.beta_fast, n_rotated, (double)base)));
    double high = fmin(n_rotated - 1, ceil(yarn_pair(&scaling, (double)scaling.beta_slow, n_rotated, (double)base)));
    for (uint32_t i = 0; i < n_rotated / 2; i++) {
        double frequency = pow((double)base, -2.0 * i / n_rotated);
        if (factors)
            frequency /= (double)factors[i];
        model->rope.frequencies[i] = (float)scaled(&scaling, frequency, i, low, high);
    }
    free(factors);
    model->rope.n_rotated = n_rotated;
    model->rope.magnitude = (float)scaling.magnitude;
    return 0;
}
