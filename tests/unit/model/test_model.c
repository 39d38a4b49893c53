/* Shapes, RoPE and identity of tiny models; everything that would change answers silently is refused by name. */
#include "tests/unit/model/tiny.h"

#include <math.h>

#include "gpu-worker/model/dequantize.h"
#include "gpu-worker/model/model.h"

static struct model *open_model(const char *options)
{
    struct tiny_file file = tiny_model(options);
    struct model *model = NULL;
    char error[256] = "";
    if (model_open(file.path, &model, error, sizeof error))
        fail_msg("%s: %s", options, error);
    close(file.fd);
    return model;
}

struct refusal {
    const char *options;
    int code;
    const char *words; /* in the error */
};

static void refuse(const struct refusal *refusals, size_t n)
{
    const char **options = calloc(n, sizeof *options);
    struct tiny_file *files = calloc(n, sizeof *files);
    for (size_t i = 0; i < n; i++)
        options[i] = refusals[i].options;
    tiny_models(options, n, files);
    for (size_t i = 0; i < n; i++) {
        struct model *model = NULL;
        char error[256] = "";
        int r = model_open(files[i].path, &model, error, sizeof error);
        if (r != refusals[i].code || !strstr(error, refusals[i].words))
            fail_msg("%s: %d \"%s\", expected %d and \"%s\"", options[i], r, error, refusals[i].code,
                     refusals[i].words);
        tiny_check_message(error);
        assert_null(model);
        close(files[i].fd);
    }
    free(files);
    free(options);
}

static void shapes_and_tensors_are_found(void **state)
{
    (void)state;
    struct model *model = open_model("--layers 3 --embd 96 --heads 6 --kv-heads 2 --ff 160 --context 777 --vocab 500");
    const struct model_shape *shape = &model->shape;
    assert_int_equal(shape->n_layers, 3);
    assert_int_equal(shape->n_embd, 96);
    assert_int_equal(shape->n_heads, 6);
    assert_int_equal(shape->n_kv_heads, 2);
    assert_int_equal(shape->head_dim, 16);
    assert_int_equal(shape->n_ff, 160);
    assert_int_equal(shape->n_vocab, 500);
    assert_int_equal(shape->n_ctx_train, 777);
    assert_true(shape->rms_eps == 1e-5f);
    assert_string_equal(model->name, "tiny");
    assert_false(model->is_tied);
    assert_ptr_equal(model->output, gguf_find_tensor(model->gguf, "output.weight"));
    assert_ptr_equal(model->layers[2].ffn_down, gguf_find_tensor(model->gguf, "blk.2.ffn_down.weight"));
    assert_ptr_equal(model->layers[0].attn_k, gguf_find_tensor(model->gguf, "blk.0.attn_k.weight"));
    assert_int_equal(model->layers[1].attn_k->n_rows, 32);
    assert_int_equal(model->rope.n_rotated, 16);
    assert_true(model->rope.magnitude == 1);
    assert_null(model_close(model));
    assert_null(model_close(NULL));
}

static void other_shapes_open(void **state)
{
    (void)state;
    struct model *model = open_model("--tied --heads 9 --kv-heads 3 --embd 144");
    assert_true(model->is_tied);
    assert_ptr_equal(model->output, model->token_embd);
    model_close(model);
    model = open_model("--heads 2 --kv-heads 1 --head-dim 256 --rotated 64"); /* heads wider than the embedding */
    assert_int_equal(model->shape.head_dim, 256);
    assert_int_equal(model->rope.n_rotated, 64);
    assert_int_equal(model->layers[0].attn_output->n_columns, 512);
    model_close(model);
    model_close(open_model("--heads 1 --kv-heads 1 --embd 32 --alignment 64"));
    model_close(open_model("--drop llama.attention.head_count_kv --kv-heads 4"));
    model_close(open_model("--tokenizer none"));
}

/* Values near their scale: a wrong layout of scales or bits gives others. */
static void every_tensor_type_opens_and_holds_sane_weights(void **state)
{
    static const char *const types[] = {"F32",  "F16",  "BF16", "Q4_0", "Q4_1", "Q5_0",
                                        "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"};
    (void)state;
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        char options[128];
        snprintf(options, sizeof options, "--layers 1 --embd 256 --ff 256 --type %s", types[i]);
        struct model *model = open_model(options);
        const struct tensor *tensor = model->layers[0].ffn_up;
        float row[256];
        double sum = 0, squares = 0;
        assert_string_equal(tensor_type_name(tensor->type), types[i]);
        for (uint32_t r = 0; r < tensor->n_rows; r++) {
            const char *data = (const char *)tensor->data + r * tensor_row_bytes(tensor->type, tensor->n_columns);
            assert_int_equal(dequantize_row(tensor->type, data, tensor->n_columns, row), 0);
            for (uint32_t c = 0; c < tensor->n_columns; c++) {
                sum += (double)row[c];
                squares += (double)row[c] * (double)row[c];
            }
        }
        double n = (double)tensor->n_rows * tensor->n_columns, deviation = sqrt(squares / n);
        assert_true(deviation > 0.9 / 16 && deviation < 1.2 / 16); /* asked for: 1 / sqrt(256) */
        assert_true(fabs(sum / n) < 0.2 / 16);
        model_close(model);
    }
}

static void frequencies(const char *options, uint32_t n, const double *expected, double magnitude)
{
    struct model *model = open_model(options);
    assert_int_equal(model->rope.n_rotated, 2 * n);
    for (uint32_t i = 0; i < n; i++)
        if (fabs((double)model->rope.frequencies[i] - expected[i]) > 1e-6 * expected[i])
            fail_msg("%s: frequency %u is %.9g, expected %.9g", options, i, (double)model->rope.frequencies[i],
                     expected[i]);
    assert_true(fabs((double)model->rope.magnitude - magnitude) < 1e-6);
    model_close(model);
}

static void rope_scalings_change_the_frequencies(void **state)
{
    double plain[8], expected[8];
    (void)state;
    for (int i = 0; i < 8; i++)
        plain[i] = pow(10000, -i / 8.0);
    frequencies("", 8, plain, 1);
    frequencies("--rope-scaling none --rope-factor 4", 8, plain, 1);
    frequencies("--rope-scaling yarn", 8, plain, 1);
    for (int i = 0; i < 8; i++)
        expected[i] = plain[i] / 4;
    frequencies("--rope-scaling linear --rope-factor 4", 8, expected, 1);
    frequencies("--rope-factor 4", 8, expected, 1);
    frequencies("--set llama.rope.scale_linear=f32:4", 8, expected, 1);
    for (int i = 0; i < 8; i++)
        expected[i] = plain[i] / (1 + 7 * i / 16.0);
    frequencies("--rope-freqs", 8, expected, 1);
    for (int i = 0; i < 4; i++)
        expected[i] = pow(500, -i / 4.0);
    frequencies("--rotated 8 --rope-base 500", 4, expected, 1);

    /*
     * YaRN by hand, 8 pairs, base 10000, context 512: pair = 8 ln(512 / (2 pi turns)) / ln(10000), so
     * 32 turns -> 0.81 -> 0 and 1 turn -> 3.82 -> 4: pair 0 is kept, pairs 4.. are interpolated, a ramp between.
     */
    for (int i = 0; i < 8; i++) {
        double keep = i < 4 ? 1 - i / 4.0 : 0;
        expected[i] = plain[i] / 8 * (1 - keep) + plain[i] * keep;
    }
    frequencies("--rope-scaling yarn --rope-factor 8 --rope-original-context 512 --context 4096", 8, expected,
                1 + 0.1 * log(8));
    frequencies("--rope-scaling yarn --rope-factor 8 --rope-original-context 512 "
                "--set llama.rope.scaling.attn_factor=f32:0.5",
                8, expected, 0.5 * (1 + 0.1 * log(8)));
    frequencies("--rope-scaling yarn --rope-factor 8 --rope-original-context 512 "
                "--set llama.rope.scaling.yarn_attn_factor=f32:0.5",
                8, expected, 1 + 0.1 * log(8));
    /* 8 turns -> 2.52 -> 2: a later start of the ramp */
    for (int i = 0; i < 8; i++) {
        double keep = i <= 2 ? 1 : i < 4 ? 1 - (i - 2) / 2.0 : 0;
        expected[i] = plain[i] / 8 * (1 - keep) + plain[i] * keep;
    }
    frequencies("--rope-scaling yarn --rope-factor 8 --rope-original-context 512 "
                "--set llama.rope.scaling.yarn_beta_fast=f32:8",
                8, expected, 1 + 0.1 * log(8));
}

static void identity_follows_the_content(void **state)
{
    (void)state;
    struct model *a = open_model("--seed 1"), *same = open_model("--seed 1"), *weights = open_model("--seed 2"),
                 *metadata = open_model("--seed 1 --set general.name=str:other");
    assert_memory_equal(a->hash, same->hash, MODEL_HASH_BYTES);
    assert_memory_not_equal(a->hash, weights->hash, MODEL_HASH_BYTES);
    assert_memory_not_equal(a->hash, metadata->hash, MODEL_HASH_BYTES);
    assert_string_equal(metadata->name, "other");
    model_close(a);
    model_close(same);
    model_close(weights);
    model_close(metadata);
}

static void what_is_not_supported_is_named(void **state)
{
    static const struct refusal refusals[] = {
        {"--set general.architecture=str:qwen3", -ENOTSUP, "\"qwen3\""},
        {"--set general.type=str:adapter", -ENOTSUP, "\"adapter\""},
        {"--set llama.expert_count=u32:8", -ENOTSUP, "mixture of experts"},
        {"--set split.count=u32:2", -ENOTSUP, "one of 2 parts"},
        {"--add-tensor blk.0.attn_q.bias:1x64", -ENOTSUP, "biases are not supported: tensor blk.0.attn_q.bias"},
        {"--add-tensor blk.0.ffn_gate_exps.weight:4x64", -ENOTSUP, "mixture of experts"},
        {"--add-tensor blk.0.surprise.weight:1x64", -ENOTSUP, "blk.0.surprise.weight"},
        {"--add-tensor blk.2.attn_norm.weight:1x64", -ENOTSUP, "blk.2.attn_norm.weight"},
        {"--add-tensor blk.00.attn_norm.weight:1x64", -ENOTSUP, "blk.00.attn_norm.weight"},
        {"--add-tensor rope_factors_long.weight:1x8", -ENOTSUP, "longrope"},
        {"--rope-scaling longrope", -ENOTSUP, "\"longrope\""},
        {"--set llama.rope.scaling.yarn_log_multiplier=f32:0.1", -ENOTSUP, "yarn_log_multiplier"},
        {"--set llama.attention.value_length=u32:8", -ENOTSUP, "keys of 16 and values of 8"},
        {"--heads 2 --kv-heads 1 --head-dim 258", -ENOTSUP, "258"},
        {"--heads 2 --kv-heads 1 --head-dim 15", -ENOTSUP, "15"},
        {"--set llama.attention.causal=bool:false", -ENOTSUP, "causal"},
    };
    (void)state;
    refuse(refusals, sizeof refusals / sizeof refusals[0]);
}

static void contradictions_are_refused(void **state)
{
    static const struct refusal refusals[] = {
        {"--heads 4 --kv-heads 3", -EINVAL, "4 query heads do not divide among 3"},
        {"--set llama.attention.head_count_kv=u32:4", -EINVAL, "blk.0.attn_k.weight"},
        {"--set llama.embedding_length=u32:128", -EINVAL, "token_embd.weight"},
        {"--set llama.embedding_length=u32:65", -EINVAL, "do not divide"},
        {"--set llama.feed_forward_length=u32:127", -EINVAL, "ffn_gate"},
        {"--set llama.block_count=u32:3", -EINVAL, "blk.2.attn_norm.weight is missing"},
        {"--set llama.block_count=u32:1", -ENOTSUP, "blk.1."},
        {"--set llama.block_count=u32:10000000", -EINVAL, "llama.block_count is 10000000"},
        {"--set llama.block_count=u32:0", -EINVAL, "llama.block_count is 0"},
        {"--set llama.block_count=str:two", -EINVAL, "llama.block_count"},
        {"--set llama.block_count=u64:99999999999", -ERANGE, "llama.block_count"},
        {"--set llama.attention.head_count=u32:4294967295", -EINVAL, "head_count"},
        {"--set llama.rope.dimension_count=u32:18", -EINVAL, "dimension_count is 18"},
        {"--set llama.rope.dimension_count=u32:15", -EINVAL, "dimension_count is 15"},
        {"--set llama.rope.freq_base=f32:0", -EINVAL, "freq_base"},
        {"--set llama.rope.freq_base=f32:nan", -ERANGE, "freq_base"},
        {"--set llama.rope.scaling.factor=f32:-1", -EINVAL, "RoPE scaling"},
        {"--rope-freqs --set llama.rope.dimension_count=u32:8", -EINVAL, "rope_freqs.weight"},
        {"--add-tensor rope_freqs.weight:1x8", -EINVAL, "not above zero"},
        {"--drop llama.context_length", -EINVAL, "llama.context_length is missing"},
        {"--drop llama.attention.layer_norm_rms_epsilon", -EINVAL, "rms_epsilon is missing"},
        {"--drop general.architecture", -EINVAL, "general.architecture"},
        {"--drop-tensor output_norm.weight", -EINVAL, "output_norm.weight is missing"},
        {"--drop-tensor blk.1.ffn_up.weight", -EINVAL, "blk.1.ffn_up.weight is missing"},
        {"--drop-tensor token_embd.weight --add-tensor token_embd.weight:5x64", -EINVAL, "303 tokens"},
    };
    (void)state;
    refuse(refusals, sizeof refusals / sizeof refusals[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes_and_tensors_are_found),
        cmocka_unit_test(other_shapes_open),
        cmocka_unit_test(every_tensor_type_opens_and_holds_sane_weights),
        cmocka_unit_test(rope_scalings_change_the_frequencies),
        cmocka_unit_test(identity_follows_the_content),
        cmocka_unit_test(what_is_not_supported_is_named),
        cmocka_unit_test(contradictions_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
