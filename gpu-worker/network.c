#include "gpu-worker/network.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int take(struct network *network, const struct tensor *tensor, struct weight **ret_weight, char *error,
                size_t error_size)
{
    int r = network->ops->weight_new(network->backend, tensor, ret_weight);
    if (r < 0)
        snprintf(error, error_size, "tensor %s cannot be loaded by the %s back end: %s", tensor->name,
                 network->ops->name, strerror(-r));
    else
        network->weight_bytes += network->ops->weight_bytes(*ret_weight);
    return r;
}

static int take_layer(struct network *network, const struct model_layer *from, struct network_layer *to, char *error,
                      size_t error_size)
{
    const struct {
        const struct tensor *tensor;
        struct weight **weight;
    } parts[] = {
        {from->attn_norm, &to->attn_norm}, {from->attn_q, &to->attn_q},           {from->attn_k, &to->attn_k},
        {from->attn_v, &to->attn_v},       {from->attn_output, &to->attn_output}, {from->ffn_norm, &to->ffn_norm},
        {from->ffn_gate, &to->ffn_gate},   {from->ffn_up, &to->ffn_up},           {from->ffn_down, &to->ffn_down},
    };
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        int r = take(network, parts[i].tensor, parts[i].weight, error, error_size);
        if (r < 0)
            return r;
    }
    return 0;
}

int network_load(const struct backend_ops *ops, struct backend *backend, const struct model *model,
                 void (*progress)(void *context, uint32_t n_done, uint32_t n_total), void *context,
                 struct network **ret_network, char *error, size_t error_size)
{
    struct network *network = calloc(1, sizeof(*network));
    if (network == NULL)
        return -ENOMEM;
    network->ops = ops;
    network->backend = backend;
    network->shape = model->shape;
    network->rope = (struct backend_rope){
        .n_rotated = model->rope.n_rotated,
        .frequencies = model->rope.frequencies,
        .magnitude = model->rope.magnitude,
    };
    network->layers = calloc(model->shape.n_layers, sizeof(*network->layers));
    int r = network->layers == NULL ? -ENOMEM : 0;
    if (r == 0)
        r = take(network, model->token_embd, &network->token_embd, error, error_size);
    if (r == 0)
        r = take(network, model->output_norm, &network->output_norm, error, error_size);
    if (r == 0 && model->is_tied)
        network->output = network->token_embd;
    else if (r == 0)
        r = take(network, model->output, &network->output, error, error_size);
    for (uint32_t layer = 0; r == 0 && layer < model->shape.n_layers; layer++) {
        r = take_layer(network, &model->layers[layer], &network->layers[layer], error, error_size);
        if (progress != NULL)
            progress(context, layer + 1, model->shape.n_layers);
    }
    if (r < 0) {
        network_free(network);
        return r;
    }
    *ret_network = network;
    return 0;
}

struct network *network_free(struct network *network)
{
    if (network == NULL)
        return NULL;
    const struct backend_ops *ops = network->ops;
    for (uint32_t i = 0; network->layers != NULL && i < network->shape.n_layers; i++) {
        struct network_layer *layer = &network->layers[i];
        struct weight *const weights[] = {layer->attn_norm, layer->attn_q,      layer->attn_k,
                                          layer->attn_v,    layer->attn_output, layer->ffn_norm,
                                          layer->ffn_gate,  layer->ffn_up,      layer->ffn_down};
        for (size_t k = 0; k < sizeof(weights) / sizeof(weights[0]); k++)
            ops->weight_free(network->backend, weights[k]);
    }
    if (network->output != network->token_embd)
        ops->weight_free(network->backend, network->output);
    ops->weight_free(network->backend, network->output_norm);
    ops->weight_free(network->backend, network->token_embd);
    free(network->layers);
    free(network);
    return NULL;
}

void network_after_attention(const struct network *network, uint32_t layer, const float *attention, uint32_t T,
                             float *x, float *h, float *gate, float *up)
{
    const struct network_layer *weights = &network->layers[layer];
    const struct backend_ops *ops = network->ops;
    struct backend *backend = network->backend;
    const struct model_shape *shape = &network->shape;
    const struct weight *output = weights->attn_output, *down = weights->ffn_down;
    const struct weight *const gate_up[] = {weights->ffn_gate, weights->ffn_up};
    ops->matmul(backend, &output, 1, attention, T, &h);
    ops->add(backend, x, h, (size_t)T * shape->n_embd);
    ops->rms_norm(backend, x, T, shape->n_embd, weights->ffn_norm, shape->rms_eps, h);
    ops->matmul(backend, gate_up, 2, h, T, (float *const[]){gate, up});
    ops->swiglu(backend, gate, up, T, shape->n_ff);
    ops->matmul(backend, &down, 1, gate, T, &h);
    ops->add(backend, x, h, (size_t)T * shape->n_embd);
}
