/*
 * model_hash.c - the identity of a model file: 128 bits over its head and samples of its tensors.
 *
 * Threads    pure function.
 * Invariant  depends on bytes only, not on path, time or machine (little-endian, as the files are).
 */
#include "gpu-worker/model/model_private.h"

#include <string.h>

enum { SAMPLE_BYTES = 4096 };

struct state {
    uint64_t a, b;
};

static uint64_t rotate(uint64_t word, int n)
{
    return word << n | word >> (64 - n);
}

static void mix(struct state *state, uint64_t first, uint64_t second)
{
    state->a = rotate(state->a ^ first * 0x9e3779b97f4a7c15u, 31) * 0xd6e8feb86659fd93u + state->b;
    state->b = rotate(state->b ^ second * 0xc2b2ae3d27d4eb4fu, 27) * 0xa0761d6478bd642fu + state->a;
}

/* Length first, so that runs cannot slide into each other. */
static void add(struct state *state, const void *bytes, size_t n_bytes)
{
    const unsigned char *at = bytes;
    mix(state, n_bytes, 0);
    for (; n_bytes;) {
        uint64_t words[2] = {0, 0};
        size_t n = n_bytes < sizeof words ? n_bytes : sizeof words;
        memcpy(words, at, n);
        mix(state, words[0], words[1]);
        at += n;
        n_bytes -= n;
    }
}

static uint64_t avalanche(uint64_t word)
{
    word = (word ^ word >> 32) * 0xd6e8feb86659fd93u;
    word = (word ^ word >> 32) * 0xd6e8feb86659fd93u;
    return word ^ word >> 32;
}

void model_hash(const struct gguf *gguf, uint8_t hash[MODEL_HASH_BYTES])
{
    struct state state = {0x243f6a8885a308d3u, 0x13198a2e03707344u};
    struct gguf_string head = gguf_head(gguf);
    add(&state, head.data, head.n_bytes);
    mix(&state, gguf_body(gguf).n_bytes, gguf_n_tensors(gguf));
    for (uint32_t i = 0; i < gguf_n_tensors(gguf); i++) {
        const struct tensor *tensor = gguf_tensor(gguf, i);
        const char *data = tensor->data;
        if (tensor->n_bytes <= 3 * SAMPLE_BYTES) {
            add(&state, data, tensor->n_bytes);
            continue;
        }
        size_t middle = (tensor->n_bytes - SAMPLE_BYTES) / 2;
        add(&state, data, SAMPLE_BYTES);
        add(&state, data + middle, SAMPLE_BYTES);
        add(&state, data + tensor->n_bytes - SAMPLE_BYTES, SAMPLE_BYTES);
    }
    uint64_t out[2] = {avalanche(state.a + state.b), avalanche(state.b ^ rotate(state.a, 17))};
    memcpy(hash, out, MODEL_HASH_BYTES);
}
