/*
 * model.c - metadata to shape, names to tensors, and every disagreement between them refused.
 *
 * Owner      the worker.
 * Threads    immutable after model_open(), any thread.
 * Invariant  a model that opened needs no further check of its tensors.
 */
#include "gpu-worker/model/model_private.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Above any real model; keeps products of two shapes well inside 64 bits. */
enum { MAX_DIMENSION = 1 << 24 };

int model_fail(const struct model_reader *reader, int code, const char *format, ...)
{
    char reason[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(reason, sizeof reason, format, arguments);
    va_end(arguments);
    if (reader->error_size)
        snprintf(reader->error, reader->error_size, "%s: %s", reader->path, reason);
    return code;
}

int model_get_u32(const struct model_reader *reader, const char *name, uint32_t *ret_value)
{
    char key[96];
    snprintf(key, sizeof key, "llama.%s", name);
    int r = gguf_get_u32(reader->model->gguf, key, ret_value);
    if (r && r != -ENOENT)
        return model_fail(reader, r, "%s is not one number of 32 bits", key);
    return r;
}

int model_get_f32(const struct model_reader *reader, const char *name, float *ret_value)
{
    char key[96];
    snprintf(key, sizeof key, "llama.%s", name);
    int r = gguf_get_f32(reader->model->gguf, key, ret_value);
    if (r && r != -ENOENT)
        return model_fail(reader, r, "%s is not one finite number", key);
    return r;
}

/* A count that the file must have, or may have (*value is the default then). */
static int get_count(const struct model_reader *reader, const char *name, bool is_required, uint32_t *value)
{
    int r = model_get_u32(reader, name, value);
    if (r == -ENOENT && !is_required)
        r = 0;
    if (r == -ENOENT)
        return model_fail(reader, -EINVAL, "metadata key llama.%s is missing", name);
    if (r)
        return r;
    if (*value == 0 || *value > MAX_DIMENSION)
        return model_fail(reader, -EINVAL, "llama.%s is %u, expected 1 to %d", name, *value, MAX_DIMENSION);
    return 0;
}

static int check_architecture(const struct model_reader *reader)
{
    const struct gguf *gguf = reader->model->gguf;
    struct gguf_string value;
    char text[96];
    uint32_t n_experts = 0, first_split = 0;
    bool is_causal = true;
    if (gguf_get_string(gguf, "general.architecture", &value))
        return model_fail(reader, -EINVAL, "metadata key general.architecture is missing or not a string");
    gguf_printable(value, text, sizeof text);
    if (strcmp(text, "llama") != 0)
        return model_fail(reader, -ENOTSUP, "architecture \"%s\" is not supported, only llama", text);
    if (gguf_get_string(gguf, "general.type", &value) == 0) {
        gguf_printable(value, text, sizeof text);
        if (strcmp(text, "model") != 0)
            return model_fail(reader, -ENOTSUP, "a file of type \"%s\" (general.type), not a model", text);
    }
    int r = model_get_u32(reader, "expert_count", &n_experts);
    if (r && r != -ENOENT)
        return r;
    if (n_experts > 0)
        return model_fail(reader, -ENOTSUP, "mixture of experts is not supported: llama.expert_count is %u", n_experts);
    if (gguf_get_u32(gguf, "split.count", &first_split) == 0 && first_split > 1)
        return model_fail(reader, -ENOTSUP, "one of %u parts of a split model; merge the parts first", first_split);
    if (gguf_get_bool(gguf, "llama.attention.causal", &is_causal) == 0 && !is_causal)
        return model_fail(reader, -ENOTSUP, "llama.attention.causal is false: not a language model that generates");
    return 0;
}

static int read_shape(const struct model_reader *reader)
{
    struct model_shape *shape = &reader->model->shape;
    int r;
    if ((r = get_count(reader, "block_count", true, &shape->n_layers)) ||
        (r = get_count(reader, "context_length", true, &shape->n_ctx_train)) ||
        (r = get_count(reader, "embedding_length", true, &shape->n_embd)) ||
        (r = get_count(reader, "feed_forward_length", true, &shape->n_ff)) ||
        (r = get_count(reader, "attention.head_count", true, &shape->n_heads)))
        return r;
    shape->n_kv_heads = shape->n_heads;
    if ((r = get_count(reader, "attention.head_count_kv", false, &shape->n_kv_heads)))
        return r;
    if (shape->n_heads % shape->n_kv_heads != 0)
        return model_fail(reader, -EINVAL, "%u query heads do not divide among %u KV heads", shape->n_heads,
                          shape->n_kv_heads);

    uint32_t value_length;
    shape->head_dim = shape->n_embd / shape->n_heads;
    if (!gguf_has(reader->model->gguf, "llama.attention.key_length") && shape->n_embd % shape->n_heads != 0)
        return model_fail(reader, -EINVAL, "embeddings of %u numbers do not divide among %u heads", shape->n_embd,
                          shape->n_heads);
    if ((r = get_count(reader, "attention.key_length", false, &shape->head_dim)))
        return r;
    value_length = shape->head_dim;
    if ((r = get_count(reader, "attention.value_length", false, &value_length)))
        return r;
    if (value_length != shape->head_dim)
        return model_fail(reader, -ENOTSUP, "keys of %u and values of %u dimensions; only equal ones are supported",
                          shape->head_dim, value_length);
    if (shape->head_dim == 0 || shape->head_dim % 2 || shape->head_dim > MODEL_MAX_HEAD_DIM)
        return model_fail(reader, -ENOTSUP, "heads of %u dimensions are not supported, only even numbers up to %d",
                          shape->head_dim, MODEL_MAX_HEAD_DIM);
    if ((uint64_t)shape->n_heads * shape->head_dim > MAX_DIMENSION)
        return model_fail(reader, -EINVAL, "%u heads of %u dimensions are too many", shape->n_heads, shape->head_dim);
    r = model_get_f32(reader, "attention.layer_norm_rms_epsilon", &shape->rms_eps);
    if (r == -ENOENT)
        return model_fail(reader, -EINVAL, "metadata key llama.attention.layer_norm_rms_epsilon is missing");
    if (r)
        return r;
    if (!(shape->rms_eps >= 0 && shape->rms_eps < 1))
        return model_fail(reader, -EINVAL, "llama.attention.layer_norm_rms_epsilon is %g", (double)shape->rms_eps);
    return 0;
}

/* n_rows 0: any number (the vocabulary's). Counts what it found, so that left-over tensors are noticed. */
static int find_tensor(const struct model_reader *reader, const char *name, uint64_t n_rows, uint32_t n_columns,
                       const struct tensor **ret_tensor, uint32_t *n_found)
{
    const struct tensor *tensor = gguf_find_tensor(reader->model->gguf, name);
    if (!tensor)
        return model_fail(reader, -EINVAL, "tensor %s is missing", name);
    if ((n_rows && tensor->n_rows != n_rows) || tensor->n_columns != n_columns)
        return model_fail(reader, -EINVAL, "tensor %s is %u x %u, but the metadata asks for %llu x %u", name,
                          tensor->n_rows, tensor->n_columns, (unsigned long long)(n_rows ? n_rows : tensor->n_rows),
                          n_columns);
    *ret_tensor = tensor;
    ++*n_found;
    return 0;
}

static int find_layer(const struct model_reader *reader, uint32_t index, uint32_t *n_found)
{
    const struct model_shape *shape = &reader->model->shape;
    struct model_layer *layer = &reader->model->layers[index];
    uint32_t n_q = shape->n_heads * shape->head_dim, n_kv = shape->n_kv_heads * shape->head_dim;
    const struct {
        const char *name;
        uint32_t n_rows, n_columns;
        const struct tensor **tensor;
    } parts[] = {
        {"attn_norm", 1, shape->n_embd, &layer->attn_norm},
        {"attn_q", n_q, shape->n_embd, &layer->attn_q},
        {"attn_k", n_kv, shape->n_embd, &layer->attn_k},
        {"attn_v", n_kv, shape->n_embd, &layer->attn_v},
        {"attn_output", shape->n_embd, n_q, &layer->attn_output},
        {"ffn_norm", 1, shape->n_embd, &layer->ffn_norm},
        {"ffn_gate", shape->n_ff, shape->n_embd, &layer->ffn_gate},
        {"ffn_up", shape->n_ff, shape->n_embd, &layer->ffn_up},
        {"ffn_down", shape->n_embd, shape->n_ff, &layer->ffn_down},
    };
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%u.%s.weight", index, parts[i].name);
        int r = find_tensor(reader, name, parts[i].n_rows, parts[i].n_columns, parts[i].tensor, n_found);
        if (r)
            return r;
    }
    return 0;
}

static bool is_used(const struct model *model, const struct tensor *tensor)
{
    if (tensor == model->token_embd || tensor == model->output_norm || tensor == model->output ||
        strcmp(tensor->name, "rope_freqs.weight") == 0)
        return true;
    unsigned index;
    if (sscanf(tensor->name, "blk.%u.", &index) != 1 || index >= model->shape.n_layers)
        return false;
    const struct tensor *const *parts = (const struct tensor *const *)&model->layers[index];
    for (size_t i = 0; i < sizeof model->layers[0] / sizeof parts[0]; i++)
        if (parts[i] == tensor)
            return true;
    return false;
}

/* A tensor nobody asked for would change the model's answers silently: name it. */
static int refuse_unused(const struct model_reader *reader)
{
    for (uint32_t i = 0; i < gguf_n_tensors(reader->model->gguf); i++) {
        const struct tensor *tensor = gguf_tensor(reader->model->gguf, i);
        if (is_used(reader->model, tensor))
            continue;
        size_t length = strlen(tensor->name);
        if (length > 5 && strcmp(tensor->name + length - 5, ".bias") == 0)
            return model_fail(reader, -ENOTSUP, "biases are not supported: tensor %s", tensor->name);
        if (strstr(tensor->name, "_exp") || strstr(tensor->name, "ffn_gate_inp"))
            return model_fail(reader, -ENOTSUP, "mixture of experts is not supported: tensor %s", tensor->name);
        if (strncmp(tensor->name, "rope_factors", 12) == 0)
            return model_fail(reader, -ENOTSUP, "RoPE scaling \"longrope\" is not supported: tensor %s", tensor->name);
        return model_fail(reader, -ENOTSUP, "tensor %s is not known for architecture llama", tensor->name);
    }
    return 0;
}

static int find_tensors(const struct model_reader *reader)
{
    struct model *model = reader->model;
    struct model_shape *shape = &model->shape;
    uint32_t n_found = 0;
    int r;
    if (gguf_find_tensor(model->gguf, "rope_freqs.weight"))
        n_found++; /* model_rope_read() checked it */
    if ((r = find_tensor(reader, "token_embd.weight", 0, shape->n_embd, &model->token_embd, &n_found)) ||
        (r = find_tensor(reader, "output_norm.weight", 1, shape->n_embd, &model->output_norm, &n_found)))
        return r;
    shape->n_vocab = model->token_embd->n_rows;
    uint64_t n_tokens = gguf_array_size(model->gguf, "tokenizer.ggml.tokens");
    if (n_tokens && n_tokens != shape->n_vocab)
        return model_fail(reader, -EINVAL, "the tokenizer has %llu tokens, but there are embeddings for %u",
                          (unsigned long long)n_tokens, shape->n_vocab);
    model->is_tied = !gguf_find_tensor(model->gguf, "output.weight");
    if (model->is_tied)
        model->output = model->token_embd;
    else if ((r = find_tensor(reader, "output.weight", shape->n_vocab, shape->n_embd, &model->output, &n_found)))
        return r;

    /* Layers take memory per layer: believe the count only as far as there are tensors. */
    if (shape->n_layers > gguf_n_tensors(model->gguf))
        return model_fail(reader, -EINVAL, "llama.block_count is %u, but the file has only %u tensors", shape->n_layers,
                          gguf_n_tensors(model->gguf));
    model->layers = calloc(shape->n_layers, sizeof *model->layers);
    if (!model->layers)
        return model_fail(reader, -ENOMEM, "no memory");
    for (uint32_t i = 0; i < shape->n_layers; i++)
        if ((r = find_layer(reader, i, &n_found)))
            return r;
    return n_found == gguf_n_tensors(model->gguf) ? 0 : refuse_unused(reader);
}

static void set_name(struct model *model, const char *path)
{
    struct gguf_string name;
    if (gguf_get_string(model->gguf, "general.name", &name) || name.n_bytes == 0) {
        const char *slash = strrchr(path, '/');
        name.data = slash ? slash + 1 : path;
        name.n_bytes = strlen(name.data);
    }
    gguf_printable(name, model->name, sizeof model->name);
}

int model_open(const char *path, struct model **ret_model, char *error, size_t error_size)
{
    struct model_reader reader = {.path = path, .error = error, .error_size = error_size};
    reader.model = calloc(1, sizeof *reader.model);
    if (!reader.model)
        return model_fail(&reader, -ENOMEM, "no memory");
    int r = gguf_open(path, &reader.model->gguf, error, error_size);
    if (r == 0)
        r = check_architecture(&reader);
    if (r == 0)
        r = read_shape(&reader);
    if (r == 0)
        r = model_rope_read(&reader);
    if (r == 0)
        r = find_tensors(&reader);
    if (r) {
        model_close(reader.model);
        return r;
    }
    model_hash(reader.model->gguf, reader.model->hash);
    set_name(reader.model, path);
    *ret_model = reader.model;
    return 0;
}

struct model *model_close(struct model *model)
{
    if (!model)
        return NULL;
    free(model->layers);
    free(model->rope.frequencies);
    gguf_close(model->gguf);
    free(model);
    return NULL;
}
