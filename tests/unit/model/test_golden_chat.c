/* Conversations of tests/golden/chat.json are rendered as llama.cpp renders them, to the byte and to the token. */
#include "tests/unit/model/golden.h"

#include "gpu-worker/model/chat.h"

enum { MAX_MESSAGES = 32 };

static size_t read_messages(const json_t *list, struct chat_message *messages)
{
    size_t n = json_array_size(list);
    assert_in_range(n, 1, MAX_MESSAGES);
    for (size_t i = 0; i < n; i++) {
        const json_t *message = json_array_get(list, i), *content = json_object_get(message, "content");
        messages[i].role = json_string_value(json_object_get(message, "role"));
        messages[i].content = json_string_value(content);
        messages[i].n_content_bytes = json_string_length(content);
    }
    return n;
}

/* llama-server reads special tokens in users' text as such; we do not, so those ids differ by intention. */
static int spells_special(const struct golden *golden, const struct chat_message *messages, size_t n_messages)
{
    int found = 0;
    for (size_t i = 0; i < n_messages; i++) {
        uint32_t *ids;
        size_t n_ids;
        assert_int_equal(tokenizer_encode(golden->tokenizer, messages[i].content, messages[i].n_content_bytes,
                                          TOKENIZER_PARSE_SPECIAL, &ids, &n_ids),
                         0);
        for (size_t k = 0; k < n_ids; k++)
            found |= tokenizer_is_special(golden->tokenizer, ids[k]);
        free(ids);
    }
    return found;
}

static void conversations_render_as_in_llama_cpp(void **state)
{
    struct golden golden = {0};
    struct chat *chat = NULL;
    char error[256] = "";
    int n_wrong = 0, n_compared = 0;
    (void)state;
    golden_open(&golden, "tests/golden/chat.json");
    if (chat_new(golden.model->gguf, golden.tokenizer, &chat, error, sizeof error))
        fail_msg("%s", error);
    assert_string_equal(chat_family(chat), "ChatML");
    const json_t *entries = json_object_get(golden.data, "chats");
    assert_true(json_array_size(entries) > 0);
    for (size_t i = 0; i < json_array_size(entries); i++) {
        const json_t *entry = json_array_get(entries, i);
        struct chat_message messages[MAX_MESSAGES];
        size_t n = read_messages(json_object_get(entry, "messages"), messages), n_bytes, n_ids;
        const char *kind = json_string_value(json_object_get(entry, "kind"));
        const char *expected = json_string_value(json_object_get(entry, "text"));
        char *text;
        uint32_t *ids;
        assert_int_equal(chat_render(chat, messages, n, true, &text, &n_bytes, error, sizeof error), 0);
        if (strcmp(text, expected) != 0) {
            print_error("%s:\n%s\nexpected:\n%s\n", kind, text, expected);
            n_wrong++;
        }
        free(text);
        if (spells_special(&golden, messages, n))
            continue;
        assert_int_equal(chat_encode(chat, messages, n, true, &ids, &n_ids, error, sizeof error), 0);
        n_wrong += golden_differs(kind, ids, n_ids, json_object_get(entry, "ids"));
        n_compared++;
        free(ids);
    }
    chat_free(chat);
    golden_close(&golden);
    assert_int_equal(n_wrong, 0);
    assert_true(n_compared > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(conversations_render_as_in_llama_cpp)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
