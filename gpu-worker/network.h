/*
 * network.h - the weights of one model on a device, in the order a forward pass reads them.
 *
 * Owner      the engine. Threads: loaded by the main thread, read by the engine thread.
 * Lifetime   the model file stays mapped: a back end may keep references into it.
 */
#pragma once

#include "gpu-worker/backend/backend.h"
#include "gpu-worker/model/model.h"

struct network_layer {
    struct weight *attn_norm, *attn_q, *attn_k, *attn_v, *attn_output;
    struct weight *ffn_norm, *ffn_gate, *ffn_up, *ffn_down;
};

struct network {
    const struct backend_ops *ops;
    struct backend *backend; /* not owned */
    struct model_shape shape;
    struct backend_rope rope;
    struct weight *token_embd, *output_norm;
    struct weight *output; /* the same object as token_embd where the model ties them */
    struct network_layer *layers;
    size_t weight_bytes; /* on the device, mapped ones included */
};

/* progress(context, done, total) is called after each layer. -ENOMEM; -ENOTSUP with the tensor named in `error`. */
int network_load(const struct backend_ops *ops, struct backend *backend, const struct model *model,
                 void (*progress)(void *context, uint32_t n_done, uint32_t n_total), void *context,
                 struct network **ret_network, char *error, size_t error_size);
struct network *network_free(struct network *network); /* accepts NULL, returns NULL */

/*
 * A layer from its attention on, for T rows: x [T][n_embd] += W_output attention [T][n_heads][head_dim], then += FFN(x). Device
 * memory to work in: h [T][n_embd], gate and up [T][n_ff].
 */
void network_after_attention(const struct network *network, uint32_t layer, const float *attention, uint32_t T,
                             float *x, float *h, float *gate, float *up);
