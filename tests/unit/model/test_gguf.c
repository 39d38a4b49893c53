/* Good files are read, and no damaged one passes or crashes: cuts at every length, flipped bytes, and lies by name. */
#include "tests/unit/model/tiny.h"

#include "gpu-worker/model/dequantize.h"
#include "gpu-worker/model/gguf.h"
#include "gpu-worker/model/model.h"
#include "gpu-worker/model/tokenizer.h"

/* A file written field by field. */
struct builder {
    uint8_t bytes[4096];
    size_t n;
};

static void put(struct builder *b, const void *bytes, size_t n)
{
    assert_true(b->n + n <= sizeof b->bytes);
    memcpy(b->bytes + b->n, bytes, n);
    b->n += n;
}

static void put_u32(struct builder *b, uint32_t value)
{
    put(b, &value, sizeof value);
}

static void put_u64(struct builder *b, uint64_t value)
{
    put(b, &value, sizeof value);
}

static void put_string(struct builder *b, const char *text)
{
    put_u64(b, strlen(text));
    put(b, text, strlen(text));
}

static void put_header(struct builder *b, uint64_t n_tensors, uint64_t n_keys)
{
    put(b, "GGUF", 4);
    put_u32(b, 3);
    put_u64(b, n_tensors);
    put_u64(b, n_keys);
}

static void put_key_u32(struct builder *b, const char *key, uint32_t value)
{
    put_string(b, key);
    put_u32(b, 4);
    put_u32(b, value);
}

static void put_tensor(struct builder *b, const char *name, uint64_t n_columns, uint64_t n_rows, uint32_t type,
                       uint64_t offset)
{
    put_string(b, name);
    put_u32(b, 2);
    put_u64(b, n_columns);
    put_u64(b, n_rows);
    put_u32(b, type);
    put_u64(b, offset);
}

static void put_padding(struct builder *b)
{
    while (b->n % 32)
        put(b, "", 1);
}

/* One key of every kind and two tensors. */
static void put_good_file(struct builder *b)
{
    static const float values[] = {1, 2, 3, 4, 5, 6};
    put_header(b, 2, 8);
    put_key_u32(b, "a.u32", 4000000000u);
    put_string(b, "a.i8");
    put_u32(b, 1);
    put(b, "\xff", 1);
    put_string(b, "a.u64");
    put_u32(b, 10);
    put_u64(b, 1ull << 40);
    put_string(b, "a.f32");
    put_u32(b, 6);
    put(b, &(float){0.5f}, 4);
    put_string(b, "a.bool");
    put_u32(b, 7);
    put(b, "\x01", 1);
    put_string(b, "a.string");
    put_u32(b, 8);
    put_string(b, "hello");
    put_string(b, "a.strings");
    put_u32(b, 9);
    put_u32(b, 8);
    put_u64(b, 3);
    put_string(b, "x");
    put_string(b, "");
    put_string(b, "yz");
    put_string(b, "a.i16s");
    put_u32(b, 9);
    put_u32(b, 3);
    put_u64(b, 2);
    put(b, "\xfe\xff\x05\x00", 4);
    put_tensor(b, "first", 3, 2, TENSOR_F32, 0);
    put_tensor(b, "second", 1, 1, TENSOR_F16, 32);
    put_padding(b);
    put(b, values, sizeof values);
    put_padding(b);
    put(b, "\x00\x3c", 2);
}

static int open_bytes(const void *bytes, size_t n_bytes, struct gguf **ret_gguf, char *error, size_t error_size)
{
    struct tiny_file file = tiny_file(bytes, n_bytes);
    int r = gguf_open(file.path, ret_gguf, error, error_size);
    close(file.fd);
    return r;
}

static void values_are_read(void **state)
{
    struct builder b = {0};
    struct gguf *gguf = NULL;
    struct gguf_string string, *strings = NULL;
    char error[256] = "";
    int32_t *integers = NULL;
    float *floats = NULL;
    uint32_t u32 = 7;
    float f32 = 7;
    bool truth = false;
    size_t n = 0;
    (void)state;
    put_good_file(&b);
    assert_int_equal(open_bytes(b.bytes, b.n, &gguf, error, sizeof error), 0);

    assert_int_equal(gguf_get_u32(gguf, "a.u32", &u32), 0);
    assert_int_equal(u32, 4000000000u);
    u32 = 7;
    assert_int_equal(gguf_get_u32(gguf, "a.i8", &u32), -ERANGE);
    assert_int_equal(gguf_get_u32(gguf, "a.u64", &u32), -ERANGE);
    assert_int_equal(gguf_get_u32(gguf, "a.f32", &u32), -EINVAL);
    assert_int_equal(gguf_get_u32(gguf, "a.i16s", &u32), -EINVAL);
    assert_int_equal(gguf_get_u32(gguf, "absent", &u32), -ENOENT);
    assert_int_equal(u32, 7);
    assert_int_equal(gguf_get_f32(gguf, "a.i8", &f32), 0);
    assert_true(f32 == -1);
    assert_int_equal(gguf_get_f32(gguf, "a.f32", &f32), 0);
    assert_true(f32 == 0.5f);
    assert_int_equal(gguf_get_f32(gguf, "a.string", &f32), -EINVAL);
    assert_int_equal(gguf_get_bool(gguf, "a.bool", &truth), 0);
    assert_true(truth);
    assert_int_equal(gguf_get_bool(gguf, "a.u32", &truth), -EINVAL);
    assert_int_equal(gguf_get_string(gguf, "a.string", &string), 0);
    assert_int_equal(string.n_bytes, 5);
    assert_memory_equal(string.data, "hello", 5);
    assert_int_equal(gguf_get_string(gguf, "a.strings", &string), -EINVAL);
    assert_int_equal(gguf_get_strings(gguf, "a.strings", &strings, &n), 0);
    assert_int_equal(n, 3);
    assert_int_equal(strings[1].n_bytes, 0);
    assert_memory_equal(strings[2].data, "yz", 2);
    assert_int_equal(gguf_get_i32s(gguf, "a.i16s", &integers, &n), 0);
    assert_int_equal(n, 2);
    assert_int_equal(integers[0], -2);
    assert_int_equal(integers[1], 5);
    assert_int_equal(gguf_get_f32s(gguf, "a.i16s", &floats, &n), 0);
    assert_true(floats[0] == -2 && floats[1] == 5);
    assert_int_equal(gguf_array_size(gguf, "a.strings"), 3);
    assert_int_equal(gguf_array_size(gguf, "a.u32"), 0);
    assert_true(gguf_has(gguf, "a.bool") && !gguf_has(gguf, "a.boo"));

    const struct tensor *tensor = gguf_find_tensor(gguf, "first");
    assert_int_equal(gguf_n_tensors(gguf), 2);
    assert_ptr_equal(tensor, gguf_tensor(gguf, 0));
    assert_int_equal(tensor->n_columns, 3);
    assert_int_equal(tensor->n_rows, 2);
    assert_int_equal(tensor->n_bytes, 24);
    assert_true(((const float *)tensor->data)[5] == 6);
    assert_memory_equal(gguf_find_tensor(gguf, "second")->data, "\x00\x3c", 2);
    assert_null(gguf_find_tensor(gguf, "third"));

    free(strings);
    free(integers);
    free(floats);
    assert_null(gguf_close(gguf));
    assert_null(gguf_close(NULL));
}

static void no_cut_passes(void **state)
{
    struct builder b = {0};
    (void)state;
    put_good_file(&b);
    for (size_t n = 0; n < b.n; n++) {
        char error[256] = "";
        struct gguf *gguf = NULL;
        assert_int_equal(open_bytes(b.bytes, n, &gguf, error, sizeof error), -EINVAL);
        assert_null(gguf);
        tiny_check_message(error);
    }
}

/* Expects an error that contains `words`. */
static void refuse(const struct builder *b, int code, const char *words)
{
    char error[256] = "";
    struct gguf *gguf = NULL;
    int r = open_bytes(b->bytes, b->n, &gguf, error, sizeof error);
    tiny_check_message(error);
    if (r != code || !strstr(error, words))
        fail_msg("%d \"%s\", expected %d and \"%s\"", r, error, code, words);
}

static void versions_and_magic_are_refused_by_name(void **state)
{
    struct builder good = {0}, b;
    (void)state;
    put_good_file(&good);
    b = good;
    b.bytes[0] = 'X';
    refuse(&b, -EINVAL, "not a GGUF file");
    b = good;
    b.bytes[4] = 2;
    refuse(&b, -ENOTSUP, "version 2");
    memcpy(b.bytes + 4, "\0\0\0\3", 4);
    refuse(&b, -ENOTSUP, "big-endian");
    refuse(&(struct builder){.n = 0}, -EINVAL, "empty");

    char error[256] = "";
    struct gguf *gguf = NULL;
    assert_int_equal(gguf_open("/nonexistent/model.gguf", &gguf, error, sizeof error), -ENOENT);
    tiny_check_message(error);
    assert_int_equal(gguf_open("/tmp", &gguf, error, sizeof error), -EINVAL);
    assert_non_null(strstr(error, "not a regular file"));
    assert_int_equal(gguf_open("/nonexistent", &gguf, NULL, 0), -ENOENT); /* no room for a message */
}

static void counts_and_names_that_lie_are_refused(void **state)
{
    struct builder b = {0};
    (void)state;
    put_header(&b, 0, UINT64_MAX);
    refuse(&b, -EINVAL, "metadata keys");
    b.n = 0;
    put_header(&b, 1ull << 61, 0);
    refuse(&b, -EINVAL, "tensors");
    b.n = 0;
    put_header(&b, 0, 2);
    put_key_u32(&b, "same", 1);
    put_key_u32(&b, "same", 1);
    refuse(&b, -EINVAL, "same appears twice");
    b.n = 0;
    put_header(&b, 0, 1);
    put_key_u32(&b, "bad\nkey", 1);
    refuse(&b, -EINVAL, "not printable");
    b.n = 0;
    put_header(&b, 0, 1);
    put_string(&b, "key");
    put_u32(&b, 13);
    put_u64(&b, 0);
    refuse(&b, -EINVAL, "unknown type 13");
    b.n = 0;
    put_header(&b, 0, 1);
    put_string(&b, "key");
    put_u32(&b, 9);
    put_u32(&b, 9);
    put_u64(&b, 1);
    refuse(&b, -ENOTSUP, "array of arrays");
    for (uint32_t type = 0; type < 13; type++) {
        b.n = 0;
        put_header(&b, 0, 1);
        put_string(&b, "key");
        put_u32(&b, 9);
        put_u32(&b, type);
        put_u64(&b, UINT64_MAX / 2);
        put_u64(&b, UINT64_MAX);
        refuse(&b, type == 9 ? -ENOTSUP : -EINVAL, "key");
    }
    b.n = 0;
    put_header(&b, 0, 1);
    put_string(&b, "key");
    put_u32(&b, 7);
    put(&b, "\x02", 1);
    refuse(&b, -EINVAL, "truth value");
}

static void tensors_that_lie_are_refused(void **state)
{
    static const struct {
        uint64_t n_columns, n_rows;
        uint32_t type;
        uint64_t offset;
        int code;
        const char *words;
    } cases[] = {
        {4, 4, 23, 0, -ENOTSUP, "IQ4_XS"},
        {4, 4, 77, 0, -ENOTSUP, "unknown (77)"},
        {0, 4, 0, 0, -EINVAL, "dimension of 0"},
        {4, 0, 0, 0, -EINVAL, "dimension of 0"},
        {1ull << 40, 4, 0, 0, -EINVAL, "dimension of"},
        {1ull << 31, 1ull << 31, 0, 0, -EINVAL, "dimension of"},
        {31, 1, TENSOR_Q8_0, 0, -EINVAL, "whole blocks"},
        {4, 5, 0, 0, -EINVAL, "passes the end"},
        {4, 4, 0, 32, -EINVAL, "passes the end"},
        {4, 4, 0, UINT64_MAX - 31, -EINVAL, "passes the end"},
        {4, 4, 0, 16, -EINVAL, "not aligned"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct builder b = {0};
        put_header(&b, 1, 0);
        put_tensor(&b, "weight", cases[i].n_columns, cases[i].n_rows, cases[i].type, cases[i].offset);
        put_padding(&b);
        put(&b, (uint8_t[64]){0}, 64);
        refuse(&b, cases[i].code, cases[i].words);
    }
    struct builder b = {0};
    put_header(&b, 2, 0);
    put_tensor(&b, "weight", 4, 4, 0, 0);
    put_tensor(&b, "weight", 4, 4, 0, 0);
    put_padding(&b);
    put(&b, (uint8_t[64]){0}, 64);
    refuse(&b, -EINVAL, "weight appears twice");
    b = (struct builder){0};
    put_header(&b, 0, 1);
    put_key_u32(&b, "general.alignment", 48);
    refuse(&b, -ENOTSUP, "general.alignment 48");
}

/* Whatever opens can be used: every row of every tensor is there, the model and its tokenizer open or refuse. */
static void use(const uint8_t *bytes, size_t n_bytes, int *n_opened)
{
    struct tiny_file file = tiny_file(bytes, n_bytes);
    struct model *model = NULL;
    struct tokenizer *tokenizer = NULL;
    struct gguf *gguf = NULL;
    char error[256] = "";
    float out[512];
    if (gguf_open(file.path, &gguf, error, sizeof error) == 0) {
        for (uint32_t i = 0; i < gguf_n_tensors(gguf); i++) {
            const struct tensor *tensor = gguf_tensor(gguf, i);
            size_t n_row_bytes = tensor_row_bytes(tensor->type, tensor->n_columns);
            if (tensor->n_columns <= 512)
                dequantize_row(tensor->type, (const char *)tensor->data + (tensor->n_rows - 1) * n_row_bytes,
                               tensor->n_columns, out);
        }
        if (tokenizer_new(gguf, &tokenizer, error, sizeof error) == 0) {
            uint32_t *ids = NULL;
            size_t n_ids, n_text;
            char *text = NULL;
            assert_int_equal(tokenizer_encode(tokenizer, "the <|im_end|> world\n 12", 24, 3, &ids, &n_ids), 0);
            for (size_t i = 0; i < n_ids; i++)
                assert_true(ids[i] < tokenizer_n_vocab(tokenizer));
            assert_int_equal(tokenizer_decode(tokenizer, ids, n_ids, 0, &text, &n_text), 0);
            free(text);
            free(ids);
            tokenizer_free(tokenizer);
        } else {
            tiny_check_message(error);
        }
        gguf_close(gguf);
    } else {
        tiny_check_message(error);
    }
    if (model_open(file.path, &model, error, sizeof error) == 0)
        ++*n_opened;
    model_close(model);
    close(file.fd);
}

static void cut_and_flipped_models_never_crash(void **state)
{
    static const char *const options[] = {"--layers 1 --embd 32 --ff 32 --type Q4_0 --embd-type F16",
                                          "--layers 1 --embd 32 --ff 32 --type Q8_0 --tokenizer spm --rope-freqs"};
    uint64_t random = 11;
    (void)state;
    for (size_t k = 0; k < 2; k++) {
        size_t n_bytes, n_head;
        int n_opened = 0, n_whole = 0;
        struct tiny_file file = tiny_model(options[k]);
        struct gguf *gguf = NULL;
        char error[256];
        uint8_t *bytes = tiny_bytes(&file, &n_bytes);
        assert_int_equal(gguf_open(file.path, &gguf, error, sizeof error), 0);
        n_head = gguf_head(gguf).n_bytes;
        gguf_close(gguf);
        use(bytes, n_bytes, &n_whole);
        assert_int_equal(n_whole, 1);
        for (int i = 0; i < 300; i++)
            use(bytes, tiny_random(&random) % (i % 2 ? n_head : n_bytes), &n_opened);
        assert_int_equal(n_opened, 0);
        for (int i = 0; i < 1500; i++) {
            size_t at[3];
            uint8_t old[3];
            int n_flips = 1 + i % 3;
            for (int f = 0; f < n_flips; f++) {
                at[f] = tiny_random(&random) % n_head;
                if (i % 4 == 0)
                    at[f] %= 1024; /* where the keys of the model are */
                old[f] = bytes[at[f]];
                bytes[at[f]] = (uint8_t)(i % 5 ? bytes[at[f]] ^ 1u << tiny_random(&random) % 8 : tiny_random(&random));
            }
            use(bytes, n_bytes, &n_opened);
            for (int f = n_flips; f-- > 0;)
                bytes[at[f]] = old[f];
        }
        assert_true(n_opened > 0); /* some flips only touch a token's spelling */
        free(bytes);
        close(file.fd);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_are_read),
        cmocka_unit_test(no_cut_passes),
        cmocka_unit_test(versions_and_magic_are_refused_by_name),
        cmocka_unit_test(counts_and_names_that_lie_are_refused),
        cmocka_unit_test(tensors_that_lie_are_refused),
        cmocka_unit_test(cut_and_flipped_models_never_crash),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
