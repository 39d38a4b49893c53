/*
 * chat.c - recognises a template, checks a conversation, writes it in parts and hands them to the tokenizer.
 *
 * Owner      the worker.
 * Threads    immutable after chat_new(); a writer lives in one call.
 * Invariant  is_template is true only for words of the template or of this program.
 */
#include "gpu-worker/model/chat_private.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__attribute__((format(printf, 4, 5))) static int explain(char *error, size_t error_size, int code, const char *format,
                                                         ...)
{
    va_list arguments;
    va_start(arguments, format);
    if (error_size)
        vsnprintf(error, error_size, format, arguments);
    va_end(arguments);
    return code;
}

const char *chat_find(struct gguf_string jinja, const char *words)
{
    return memmem(jinja.data, jinja.n_bytes, words, strlen(words));
}

char *chat_literal(struct gguf_string jinja, const char *start, const char *end)
{
    const char *limit = jinja.data + jinja.n_bytes;
    char *text = malloc((size_t)(limit - start) + 1);
    size_t n = 0, n_end = end ? strlen(end) : 0;
    if (!text)
        return NULL;
    for (const char *at = start; at < limit; at++) {
        bool is_quote = *at == '\'' || *at == '"';
        if (end ? (size_t)(limit - at) >= n_end && memcmp(at, end, n_end) == 0 : is_quote) {
            text[n] = 0;
            return text;
        }
        /* An apostrophe inside a literal is escaped, or the quotes are double ones: then a letter stands on each side. */
        if (is_quote && !(at > start && at + 1 < limit && at[-1] > ' ' && at[1] >= 'a' && at[1] <= 'z'))
            break;
        if (*at == '\\' && at + 1 < limit) {
            at++;
            text[n++] = *at == 'n' ? '\n' : *at == 't' ? '\t' : *at == 'r' ? '\r' : *at;
        } else {
            text[n++] = *at;
        }
    }
    free(text);
    return NULL;
}

/* ChatML templates that answer as somebody: '<|im_start|>system\nYou are ...<|im_end|>\n' in one literal. */
static char *find_default_system(struct gguf_string jinja)
{
    static const char *const starts[] = {"<|im_start|>system\n", "<|im_start|>system\\n"};
    for (size_t i = 0; i < 2; i++) {
        struct gguf_string rest = jinja;
        const char *at;
        while ((at = chat_find(rest, starts[i]))) {
            at += strlen(starts[i]);
            char *text = chat_literal(jinja, at, "<|im_end|>");
            if (text)
                return text;
            rest.data = at;
            rest.n_bytes = (size_t)(jinja.data + jinja.n_bytes - at);
        }
    }
    return NULL;
}

/*
 * Llama 3.1 and later: "Cutting Knowledge Date: ...\nToday Date: ...\n\n". The date is the one written in the template,
 * not today's: the same conversation gives the same tokens every day.
 */
static char *find_system_prefix(struct gguf_string jinja)
{
    static const char date_mark[] = "date_string = \"";
    const char *at = chat_find(jinja, "Cutting Knowledge Date: "), *date_at = chat_find(jinja, date_mark);
    if (!at)
        return NULL;
    char *knowledge = chat_literal(jinja, at, NULL);
    char *date = date_at ? chat_literal(jinja, date_at + strlen(date_mark), NULL) : NULL;
    char *prefix = NULL;
    if (!knowledge || asprintf(&prefix, "%sToday Date: %s\n\n", knowledge, date ? date : "26 Jul 2024") < 0)
        prefix = NULL;
    free(knowledge);
    free(date);
    return prefix;
}

static struct gguf_string spelling(const struct tokenizer *tokenizer, uint32_t id)
{
    struct gguf_string text = {"", 0};
    if (id != TOKENIZER_NO_TOKEN)
        tokenizer_piece(tokenizer, id, TOKENIZER_SHOW_SPECIAL, &text.data, &text.n_bytes);
    return text;
}

int chat_new(const struct gguf *gguf, const struct tokenizer *tokenizer, struct chat **ret_chat, char *error,
             size_t error_size)
{
    struct gguf_string jinja;
    const struct chat_family *family = NULL;
    if (gguf_get_string(gguf, "tokenizer.chat_template", &jinja))
        return explain(error, error_size, -ENOENT, "the model has no chat template (tokenizer.chat_template)");
    for (size_t i = 0; i < chat_families_n && !family; i++)
        if (chat_families[i].recognises(jinja))
            family = &chat_families[i];
    if (!family) {
        char start[64];
        return explain(error, error_size, -ENOTSUP,
                       "the model's chat template is none of ChatML, Llama-2, Llama-3, Zephyr, Gemma; it starts: %s",
                       gguf_printable(jinja, start, sizeof start));
    }
    struct chat *chat = calloc(1, sizeof *chat);
    if (!chat)
        return explain(error, error_size, -ENOMEM, "no memory");
    *chat = (struct chat){
        .family = family,
        .tokenizer = tokenizer,
        .jinja = jinja,
        .bos = spelling(tokenizer, tokenizer_bos(tokenizer)),
        .eos = spelling(tokenizer, tokenizer_eos(tokenizer)),
        .trims = chat_find(jinja, "| trim") || chat_find(jinja, "|trim") || chat_find(jinja, "strip()"),
        .starts_with_bos = chat_find(jinja, "bos_token") || chat_find(jinja, "<|begin_of_text|>"),
        .repeats_bos = chat_find(jinja, "bos_token + '[INST]") || chat_find(jinja, "bos_token ~ '[INST]"),
        .merges_system = chat_find(jinja, "System role not supported"),
    };
    if (strcmp(family->name, "ChatML") == 0)
        chat->default_system = find_default_system(jinja);
    if (strcmp(family->name, "Llama-3") == 0)
        chat->system_prefix = find_system_prefix(jinja);
    *ret_chat = chat;
    return 0;
}

struct chat *chat_free(struct chat *chat)
{
    if (!chat)
        return NULL;
    free(chat->default_system);
    free(chat->system_prefix);
    free(chat);
    return NULL;
}

const char *chat_family(const struct chat *chat)
{
    return chat->family->name;
}

static bool grow(void **memory, size_t *capacity, size_t n_needed, size_t element_bytes)
{
    if (n_needed <= *capacity)
        return true;
    size_t larger = n_needed + n_needed / 2 + 64;
    void *moved = reallocarray(*memory, larger, element_bytes);
    if (!moved)
        return false;
    *memory = moved;
    *capacity = larger;
    return true;
}

static void append(struct chat_writer *writer, const char *bytes, size_t n_bytes, bool is_template)
{
    if (writer->error || n_bytes == 0)
        return;
    if (n_bytes > TOKENIZER_MAX_TEXT_BYTES || writer->n_bytes + n_bytes > TOKENIZER_MAX_TEXT_BYTES) {
        writer->error = -E2BIG;
        return;
    }
    bool is_new_span = writer->n_spans == 0 || writer->spans[writer->n_spans - 1].is_template != is_template;
    if (!grow((void **)&writer->text, &writer->capacity, writer->n_bytes + n_bytes + 1, 1) ||
        (is_new_span &&
         !grow((void **)&writer->spans, &writer->spans_capacity, writer->n_spans + 1, sizeof *writer->spans))) {
        writer->error = -ENOMEM;
        return;
    }
    if (is_new_span)
        writer->spans[writer->n_spans++] = (struct chat_span){0, is_template};
    memcpy(writer->text + writer->n_bytes, bytes, n_bytes);
    writer->n_bytes += n_bytes;
    writer->spans[writer->n_spans - 1].n_bytes += n_bytes;
}

void chat_write(struct chat_writer *writer, const char *words)
{
    append(writer, words, strlen(words), true);
}

void chat_write_content(struct chat_writer *writer, const char *bytes, size_t n_bytes)
{
    append(writer, bytes, n_bytes, false);
}

static bool is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

void chat_write_trimmed(struct chat_writer *writer, const struct chat_message *message, enum chat_ends ends)
{
    const char *start = message->content, *end = start + message->n_content_bytes;
    if (message->n_content_bytes == 0)
        return;
    if (writer->chat->trims) {
        while ((ends & CHAT_START) && start < end && is_space(*start))
            start++;
        while ((ends & CHAT_END) && start < end && is_space(end[-1]))
            end--;
    }
    chat_write_content(writer, start, (size_t)(end - start));
}

void chat_write_bos(struct chat_writer *writer)
{
    if (writer->n_bytes == 0 && tokenizer_adds_bos(writer->chat->tokenizer))
        return;
    append(writer, writer->chat->bos.data, writer->chat->bos.n_bytes, true);
}

void chat_write_eos(struct chat_writer *writer)
{
    append(writer, writer->chat->eos.data, writer->chat->eos.n_bytes, true);
}

static bool is_role(const struct chat *chat, const char *role)
{
    return strcmp(role, "system") == 0 || strcmp(role, "user") == 0 || strcmp(role, "assistant") == 0 ||
           (chat->family->has_tools && strcmp(role, "tool") == 0);
}

static int check_messages(const struct chat *chat, const struct chat_message *messages, size_t n_messages, char *error,
                          size_t error_size)
{
    if (n_messages == 0)
        return explain(error, error_size, -EINVAL, "a conversation needs at least one message");
    for (size_t i = 0; i < n_messages; i++) {
        char role[32];
        if (!is_role(chat, messages[i].role))
            return explain(
                error, error_size, -EINVAL, "message %zu has the unknown role \"%s\"", i + 1,
                gguf_printable((struct gguf_string){messages[i].role, strlen(messages[i].role)}, role, sizeof role));
    }
    if (!chat->family->alternates)
        return 0;
    size_t first = strcmp(messages[0].role, "system") == 0;
    if (first == n_messages)
        return explain(error, error_size, -EINVAL, "%s conversations need a user's message", chat->family->name);
    for (size_t i = first; i < n_messages; i++) {
        const char *expected = (i - first) % 2 == 0 ? "user" : "assistant";
        if (strcmp(messages[i].role, expected) != 0)
            return explain(error, error_size, -EINVAL,
                           "message %zu is the %s's, but in %s conversations it is the %s's", i + 1, messages[i].role,
                           chat->family->name, expected);
    }
    return 0;
}

static void writer_fini(struct chat_writer *writer)
{
    free(writer->text);
    free(writer->spans);
}

static int write_all(const struct chat *chat, const struct chat_message *messages, size_t n_messages,
                     bool add_generation_prompt, struct chat_writer *writer, char *error, size_t error_size)
{
    *writer = (struct chat_writer){.chat = chat};
    int r = check_messages(chat, messages, n_messages, error, error_size);
    if (r)
        return r;
    chat->family->write(writer, messages, n_messages, add_generation_prompt);
    if (writer->error == -E2BIG)
        return explain(error, error_size, -E2BIG, "the conversation is longer than %d bytes", TOKENIZER_MAX_TEXT_BYTES);
    return writer->error ? explain(error, error_size, writer->error, "no memory") : 0;
}

int chat_render(const struct chat *chat, const struct chat_message *messages, size_t n_messages,
                bool add_generation_prompt, char **ret_text, size_t *ret_n_bytes, char *error, size_t error_size)
{
    struct chat_writer writer;
    int r = write_all(chat, messages, n_messages, add_generation_prompt, &writer, error, error_size);
    if (r == 0 && !grow((void **)&writer.text, &writer.capacity, writer.n_bytes + 1, 1))
        r = explain(error, error_size, -ENOMEM, "no memory");
    if (r) {
        writer_fini(&writer);
        return r;
    }
    writer.text[writer.n_bytes] = 0;
    *ret_text = writer.text;
    *ret_n_bytes = writer.n_bytes;
    free(writer.spans);
    return 0;
}

int chat_encode(const struct chat *chat, const struct chat_message *messages, size_t n_messages,
                bool add_generation_prompt, uint32_t **ret_ids, size_t *ret_n_ids, char *error, size_t error_size)
{
    struct chat_writer writer;
    struct tokenizer_part *parts = NULL;
    int r = write_all(chat, messages, n_messages, add_generation_prompt, &writer, error, error_size);
    if (r == 0) {
        parts = calloc(writer.n_spans + 1, sizeof *parts);
        r = parts ? 0 : explain(error, error_size, -ENOMEM, "no memory");
    }
    if (r == 0) {
        const char *at = writer.text;
        for (size_t i = 0; i < writer.n_spans; i++) {
            parts[i] = (struct tokenizer_part){at, writer.spans[i].n_bytes, writer.spans[i].is_template};
            at += writer.spans[i].n_bytes;
        }
        r = tokenizer_encode_parts(chat->tokenizer, parts, writer.n_spans, TOKENIZER_ADD_BOS, ret_ids, ret_n_ids);
        if (r)
            explain(error, error_size, r, r == -EILSEQ ? "the conversation is not valid UTF-8" : "no memory");
    }
    free(parts);
    writer_fini(&writer);
    return r;
}
