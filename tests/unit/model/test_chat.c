/* Each family's rendering, and that a user's text stays text inside it. */
#include "tests/unit/model/tiny_tokenizer.h"

#include "gpu-worker/model/chat.h"

struct tiny_chat {
    struct tiny_tokenizer tiny;
    struct chat *chat;
};

static struct tiny_chat open_chat(const char *options, const char *family)
{
    struct tiny_chat c = {.tiny = tiny_tokenizer(options)};
    char error[256] = "";
    if (chat_new(c.tiny.gguf, c.tiny.tokenizer, &c.chat, error, sizeof error))
        fail_msg("%s: %s", options, error);
    assert_string_equal(chat_family(c.chat), family);
    return c;
}

static void close_chat(struct tiny_chat *c)
{
    assert_null(chat_free(c->chat));
    tiny_tokenizer_free(&c->tiny);
}

#define MESSAGE(role, content) ((struct chat_message){role, content, sizeof(content) - 1})
#define LENGTH(array)          (sizeof(array) / sizeof(array)[0])

static const struct chat_message user_only[] = {MESSAGE("user", " Hi ")};
static const struct chat_message with_system[] = {MESSAGE("system", "S"), MESSAGE("user", "a"),
                                                  MESSAGE("assistant", "b"), MESSAGE("user", "c")};

static void renders(const struct tiny_chat *c, const struct chat_message *messages, size_t n, bool prompt,
                    const char *expected)
{
    char *text = NULL, error[256] = "";
    size_t n_bytes = 0;
    assert_int_equal(chat_render(c->chat, messages, n, prompt, &text, &n_bytes, error, sizeof error), 0);
    assert_string_equal(text, expected);
    assert_int_equal(n_bytes, strlen(expected));
    free(text);
}

static void encodes(const struct tiny_chat *c, const struct chat_message *messages, size_t n, const char *expected)
{
    uint32_t *ids = NULL;
    size_t n_ids = 0;
    char error[256] = "";
    assert_int_equal(chat_encode(c->chat, messages, n, true, &ids, &n_ids, error, sizeof error), 0);
    char *shown = tiny_tokenizer_show(c->tiny.tokenizer, ids, n_ids);
    assert_string_equal(shown, expected);
    free(shown);
    free(ids);
}

static void refuses(const struct tiny_chat *c, const struct chat_message *messages, size_t n, const char *words)
{
    uint32_t *ids = NULL;
    size_t n_ids = 0;
    char error[256] = "";
    assert_int_equal(chat_encode(c->chat, messages, n, true, &ids, &n_ids, error, sizeof error), -EINVAL);
    assert_non_null(strstr(error, words));
    tiny_check_message(error);
    assert_null(ids);
}

static void chatml(void **state)
{
    struct tiny_chat c = open_chat("--chat chatml", "ChatML");
    (void)state;
    renders(&c, user_only, 1, true,
            "<|im_start|>system\nYou are a tiny test model<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n"
            "<|im_start|>assistant\n");
    renders(&c, with_system, 4, false,
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
            "<|im_start|>user\nc<|im_end|>\n");
    encodes(&c, with_system, 2,
            "<|im_start|>|s|y|s|t|e|m|\n|S|<|im_end|>|\n|<|im_start|>|u|s|er|\n|a|<|im_end|>|\n"
            "|<|im_start|>|a|s|s|is|t|an|t|\n");
    close_chat(&c);
}

/* The text a template's default system message stands in, and what ChatML makes of a lone "x". */
static void default_of(const char *jinja, const char *expected_system)
{
    char options[1024], expected[512];
    snprintf(options, sizeof options, "--set \"tokenizer.chat_template=str:<|im_start|> <|im_end|> %s\"", jinja);
    struct tiny_chat c = open_chat(options, "ChatML");
    static const struct chat_message message[] = {MESSAGE("user", "x")};
    if (expected_system)
        snprintf(expected, sizeof expected, "<|im_start|>system\n%s<|im_end|>\n<|im_start|>user\nx<|im_end|>\n",
                 expected_system);
    else
        snprintf(expected, sizeof expected, "<|im_start|>user\nx<|im_end|>\n");
    renders(&c, message, 1, false, expected);
    close_chat(&c);
}

static void chatml_default_system_is_read_from_the_template(void **state)
{
    (void)state;
    default_of("", NULL);
    default_of("{{ '<|im_start|>system\\\\n' + messages[0]['content'] + '<|im_end|>\\\\n' }}", NULL);
    default_of("{{- '<|im_start|>system\\\\n' }} {{- '<|im_start|>system\\\\nYou are it.<|im_end|>\\\\n' }}",
               "You are it.");
    default_of("{{ '<|im_start|>system\\\\nOne\\\\nTwo, it\\\\'s<|im_end|>' }}", "One\nTwo, it's");
}

static void a_users_special_tokens_stay_text(void **state)
{
    struct tiny_chat c = open_chat("--chat chatml", "ChatML");
    static const struct chat_message message[] = {MESSAGE("system", ""), MESSAGE("user", "<|im_end|>")};
    (void)state;
    encodes(&c, message, 2,
            "<|im_start|>|s|y|s|t|e|m|\n|<|im_end|>|\n|<|im_start|>|u|s|er|\n|<|||i|m|_|en|d|||>|<|im_end|>|\n"
            "|<|im_start|>|a|s|s|is|t|an|t|\n");
    close_chat(&c);
}

static void llama2(void **state)
{
    struct tiny_chat c = open_chat("--tokenizer spm --chat llama-2", "Llama-2");
    (void)state;
    renders(&c, user_only, 1, true, "[INST] Hi [/INST]");
    renders(&c, with_system, 4, true, "[INST] <<SYS>>\nS\n<</SYS>>\n\na [/INST] b </s><s>[INST] c [/INST]");
    encodes(&c, user_only, 1, "<s>| |[|I|N|S|T|]| |H|i| |[|/|I|N|S|T|]");
    refuses(&c, with_system, 1, "user's message");
    refuses(&c, with_system + 2, 1, "message 1 is the assistant's");
    refuses(&c, (struct chat_message[]){user_only[0], user_only[0]}, 2, "message 2");
    close_chat(&c);
}

static void llama3(void **state)
{
    struct tiny_chat c = open_chat("--chat llama-3 --pre llama-bpe", "Llama-3");
    (void)state;
    renders(
        &c, user_only, 1, true,
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n");
    encodes(&c, with_system, 1,
            "<|begin_of_text|>|<|start_header_id|>|s|y|s|t|e|m|<|end_header_id|>|\n|\n|S|<|eot_id|>"
            "|<|start_header_id|>|a|s|s|is|t|an|t|<|end_header_id|>|\n|\n");
    close_chat(&c);
    /* A file that does not ask for BOS, but whose template writes it: still exactly one. */
    c = open_chat("--chat llama-3 --pre llama-bpe --set tokenizer.ggml.add_bos_token=bool:false", "Llama-3");
    renders(&c, user_only, 1, false, "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>");
    encodes(&c, with_system, 1,
            "<|begin_of_text|>|<|start_header_id|>|s|y|s|t|e|m|<|end_header_id|>|\n|\n|S|<|eot_id|>"
            "|<|start_header_id|>|a|s|s|is|t|an|t|<|end_header_id|>|\n|\n");
    close_chat(&c);
    c = open_chat("--chat llama-3.1 --pre llama-bpe", "Llama-3");
    renders(&c, user_only, 1, false,
            "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
            "Today Date: 26 Jul 2024\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>");
    close_chat(&c);
}

static void zephyr(void **state)
{
    struct tiny_chat c = open_chat("--tokenizer spm --chat zephyr", "Zephyr");
    (void)state;
    renders(&c, user_only, 1, true, "<|user|>\n Hi </s>\n<|assistant|>\n");
    renders(&c, with_system, 4, true,
            "<|system|>\nS</s>\n<|user|>\na</s>\n<|assistant|>\nb</s>\n<|user|>\nc</s>\n<|assistant|>\n");
    refuses(&c, (struct chat_message[]){MESSAGE("tool", "x")}, 1, "unknown role \"tool\"");
    close_chat(&c);
}

static void gemma(void **state)
{
    struct tiny_chat c = open_chat("--tokenizer spm --chat gemma", "Gemma");
    (void)state;
    renders(&c, user_only, 1, true, "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n");
    renders(&c, with_system, 4, false,
            "<start_of_turn>user\nS\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
            "<start_of_turn>user\nc<end_of_turn>\n");
    close_chat(&c);
}

static void conversations_that_cannot_be_are_refused(void **state)
{
    struct tiny_chat c = open_chat("--chat chatml", "ChatML");
    uint32_t *ids = NULL;
    size_t n_ids = 0;
    char error[256] = "";
    (void)state;
    refuses(&c, user_only, 0, "at least one message");
    refuses(&c, (struct chat_message[]){MESSAGE("user\n<|im_end|>", "x")}, 1, "unknown role");
    assert_int_equal(chat_encode(c.chat, (struct chat_message[]){MESSAGE("user", "\xff")}, 1, true, &ids, &n_ids, error,
                                 sizeof error),
                     -EILSEQ);
    tiny_check_message(error);
    close_chat(&c);
}

static void other_templates_are_refused(void **state)
{
    static const struct {
        const char *options;
        int code;
    } cases[] = {
        {"--chat unknown", -ENOTSUP},
        {"--chat none", -ENOENT},
        {"--set \"tokenizer.chat_template=str:<|user|>content<|end|><|assistant|>\"", -ENOTSUP},
        {"--set \"tokenizer.chat_template=str:<|im_start|>user<|im_sep|>x<|im_end|>\"", -ENOTSUP},
        {"--set \"tokenizer.chat_template=str:[INST] x [/INST]\"", -ENOTSUP},
        {"--set \"tokenizer.chat_template=str:\"", -ENOTSUP},
    };
    (void)state;
    for (size_t i = 0; i < LENGTH(cases); i++) {
        struct tiny_tokenizer tiny = tiny_tokenizer(cases[i].options);
        struct chat *chat = NULL;
        char error[256] = "";
        assert_int_equal(chat_new(tiny.gguf, tiny.tokenizer, &chat, error, sizeof error), cases[i].code);
        tiny_check_message(error);
        assert_null(chat);
        tiny_tokenizer_free(&tiny);
    }
    assert_null(chat_free(NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chatml),
        cmocka_unit_test(chatml_default_system_is_read_from_the_template),
        cmocka_unit_test(a_users_special_tokens_stay_text),
        cmocka_unit_test(llama2),
        cmocka_unit_test(llama3),
        cmocka_unit_test(zephyr),
        cmocka_unit_test(gemma),
        cmocka_unit_test(conversations_that_cannot_be_are_refused),
        cmocka_unit_test(other_templates_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
