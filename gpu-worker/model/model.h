/*
 * model.h - a model file of architecture `llama`: its shape, its rotary embedding, its weights, its identity.
 *
 * Owner      the worker; the file stays mapped until model_close(), tensors point into it.
 * Threads    immutable after model_open(), any thread.
 * Invariant  every tensor's shape agrees with `shape`; n_heads is a multiple of n_kv_heads; head_dim is even, <= 256.
 * Refuses    by name, in one line: other architectures, experts, biases, tensors this code would ignore, RoPE scalings
 *            it does not know.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu-worker/model/gguf.h"
#include "gpu-worker/model/tensor.h"

enum { MODEL_HASH_BYTES = 16, MODEL_MAX_HEAD_DIM = 256 };

struct model_shape {
    uint32_t n_layers;
    uint32_t n_embd;
    uint32_t n_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim; /* of K and of V */
    uint32_t n_ff;
    uint32_t n_vocab;
    uint32_t n_ctx_train; /* context length of the training, in tokens */
    float rms_eps;
};

/* What struct backend_rope wants: pairs (2i, 2i + 1) turn by position x frequencies[i]. */
struct model_rope {
    uint32_t n_rotated; /* rotated dimensions of a head: even, <= head_dim */
    float *frequencies; /* [n_rotated / 2] radians per position, after every scaling of the file */
    float magnitude;    /* multiplies cos and sin */
};

/* Matrices are [outputs][inputs]. */
struct model_layer {
    const struct tensor *attn_norm;   /* [n_embd] */
    const struct tensor *attn_q;      /* [n_heads x head_dim][n_embd] */
    const struct tensor *attn_k;      /* [n_kv_heads x head_dim][n_embd] */
    const struct tensor *attn_v;      /* [n_kv_heads x head_dim][n_embd] */
    const struct tensor *attn_output; /* [n_embd][n_heads x head_dim] */
    const struct tensor *ffn_norm;    /* [n_embd] */
    const struct tensor *ffn_gate;    /* [n_ff][n_embd] */
    const struct tensor *ffn_up;      /* [n_ff][n_embd] */
    const struct tensor *ffn_down;    /* [n_embd][n_ff] */
};

struct model {
    char name[128]; /* general.name, else the file's name; printable ASCII */
    uint8_t hash[MODEL_HASH_BYTES];
    struct model_shape shape;
    struct model_rope rope;
    const struct tensor *token_embd;  /* [n_vocab][n_embd] */
    const struct tensor *output_norm; /* [n_embd] */
    const struct tensor *output;      /* [n_vocab][n_embd]; token_embd when tied */
    bool is_tied;
    struct model_layer *layers; /* [n_layers] */
    struct gguf *gguf;          /* the tokenizer's and the chat template's metadata */
};

/*
 * The hash identifies the content, quickly also for files of many GB: all bytes of header, metadata and tensor list, the
 * file's size, and of every tensor the first, middle and last 4 KiB. Not a protection against forgery.
 *
 * On failure `error` holds one line. -ENOENT ...: gguf_open(); -EINVAL: damaged or contradictory; -ENOTSUP: not for us.
 */
int model_open(const char *path, struct model **ret_model, char *error, size_t error_size);
struct model *model_close(struct model *model); /* accepts NULL, returns NULL */
