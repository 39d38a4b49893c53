/*
 * chat_families.c - how each family of templates is recognised and what it writes.
 *
 * Threads    constant tables and pure functions.
 * Source     the chat templates published with the models the families are named after.
 */
#include "gpu-worker/model/chat_private.h"

#include <string.h>

static bool has_role(const struct chat_message *message, const char *role)
{
    return strcmp(message->role, role) == 0;
}

static bool is_chatml(struct gguf_string jinja)
{
    return chat_find(jinja, "<|im_start|>") && chat_find(jinja, "<|im_end|>") && !chat_find(jinja, "<|im_sep|>");
}

static void write_chatml_turn(struct chat_writer *writer, const char *role)
{
    chat_write(writer, "<|im_start|>");
    chat_write(writer, role);
    chat_write(writer, "\n");
}

static void write_chatml(struct chat_writer *writer, const struct chat_message *messages, size_t n_messages,
                         bool add_generation_prompt)
{
    if (writer->chat->starts_with_bos)
        chat_write_bos(writer);
    if (writer->chat->default_system && !has_role(&messages[0], "system")) {
        write_chatml_turn(writer, "system");
        chat_write(writer, writer->chat->default_system);
        chat_write(writer, "<|im_end|>\n");
    }
    for (size_t i = 0; i < n_messages; i++) {
        write_chatml_turn(writer, messages[i].role);
        chat_write_trimmed(writer, &messages[i], CHAT_BOTH);
        chat_write(writer, "<|im_end|>\n");
    }
    if (add_generation_prompt)
        write_chatml_turn(writer, "assistant");
}

static bool is_llama2(struct gguf_string jinja)
{
    return chat_find(jinja, "[INST]") && chat_find(jinja, "<<SYS>>");
}

static void write_llama2(struct chat_writer *writer, const struct chat_message *messages, size_t n_messages,
                         bool add_generation_prompt)
{
    (void)add_generation_prompt; /* a user's turn ends with [/INST], where the answer starts */
    size_t first = has_role(&messages[0], "system") ? 1 : 0;
    for (size_t i = first; i < n_messages; i++) {
        if (has_role(&messages[i], "user")) {
            if (i == first ? writer->chat->starts_with_bos : writer->chat->repeats_bos)
                chat_write_bos(writer);
            chat_write(writer, "[INST] ");
            if (i == first && first == 1) {
                chat_write(writer, "<<SYS>>\n");
                chat_write_content(writer, messages[0].content, messages[0].n_content_bytes);
                chat_write(writer, "\n<</SYS>>\n\n");
                chat_write_trimmed(writer, &messages[i], CHAT_END); /* the whole is trimmed, not its middle */
            } else {
                chat_write_trimmed(writer, &messages[i], CHAT_BOTH);
            }
            chat_write(writer, " [/INST]");
        } else {
            chat_write(writer, " ");
            chat_write_trimmed(writer, &messages[i], CHAT_BOTH);
            chat_write(writer, " ");
            chat_write_eos(writer);
        }
    }
}

static bool is_llama3(struct gguf_string jinja)
{
    return chat_find(jinja, "<|start_header_id|>") && chat_find(jinja, "<|end_header_id|>") &&
           chat_find(jinja, "<|eot_id|>");
}

static void write_llama3_turn(struct chat_writer *writer, const char *role)
{
    chat_write(writer, "<|start_header_id|>");
    chat_write(writer, role);
    chat_write(writer, "<|end_header_id|>\n\n");
}

static void write_llama3(struct chat_writer *writer, const struct chat_message *messages, size_t n_messages,
                         bool add_generation_prompt)
{
    size_t first = 0;
    if (writer->chat->starts_with_bos)
        chat_write_bos(writer);
    if (writer->chat->system_prefix) { /* 3.1 and later: there is always a system message */
        write_llama3_turn(writer, "system");
        chat_write(writer, writer->chat->system_prefix);
        if (has_role(&messages[0], "system"))
            chat_write_trimmed(writer, &messages[first++], CHAT_BOTH);
        chat_write(writer, "<|eot_id|>");
    }
    for (size_t i = first; i < n_messages; i++) {
        write_llama3_turn(writer, messages[i].role);
        chat_write_trimmed(writer, &messages[i], CHAT_BOTH);
        chat_write(writer, "<|eot_id|>");
    }
    if (add_generation_prompt)
        write_llama3_turn(writer, "assistant");
}

/* '<|user|>\n' + message['content'] + eos_token: others of this look (Phi-3, Falcon 3) end a turn in other ways. */
static bool is_zephyr(struct gguf_string jinja)
{
    enum { WINDOW_BYTES = 64 };
    const char *at = chat_find(jinja, "<|user|>");
    if (!at || !chat_find(jinja, "<|assistant|>"))
        return false;
    size_t n_left = (size_t)(jinja.data + jinja.n_bytes - at);
    return chat_find((struct gguf_string){at, n_left < WINDOW_BYTES ? n_left : WINDOW_BYTES}, "eos_token");
}

static void write_zephyr(struct chat_writer *writer, const struct chat_message *messages, size_t n_messages,
                         bool add_generation_prompt)
{
    if (writer->chat->starts_with_bos)
        chat_write_bos(writer);
    for (size_t i = 0; i < n_messages; i++) {
        chat_write(writer, "<|");
        chat_write(writer, messages[i].role);
        chat_write(writer, "|>\n");
        chat_write_trimmed(writer, &messages[i], CHAT_BOTH);
        chat_write_eos(writer);
        chat_write(writer, "\n");
    }
    if (add_generation_prompt)
        chat_write(writer, "<|assistant|>\n");
}

static bool is_gemma(struct gguf_string jinja)
{
    return chat_find(jinja, "<start_of_turn>") && chat_find(jinja, "<end_of_turn>");
}

static void write_gemma(struct chat_writer *writer, const struct chat_message *messages, size_t n_messages,
                        bool add_generation_prompt)
{
    size_t first = has_role(&messages[0], "system") ? 1 : 0;
    if (writer->chat->starts_with_bos)
        chat_write_bos(writer);
    for (size_t i = first; i < n_messages; i++) {
        chat_write(writer, "<start_of_turn>");
        chat_write(writer, has_role(&messages[i], "assistant") ? "model\n" : "user\n");
        if (i == first && first == 1 && writer->chat->merges_system) {
            chat_write_trimmed(writer, &messages[0], CHAT_START);
            chat_write(writer, "\n");
            chat_write_trimmed(writer, &messages[i], CHAT_END);
        } else {
            if (i == first && first == 1) {
                chat_write_content(writer, messages[0].content, messages[0].n_content_bytes);
                chat_write(writer, "\n\n");
            }
            chat_write_trimmed(writer, &messages[i], CHAT_BOTH);
        }
        chat_write(writer, "<end_of_turn>\n");
    }
    if (add_generation_prompt)
        chat_write(writer, "<start_of_turn>model\n");
}

/* The first that recognises a template has it. */
const struct chat_family chat_families[] = {
    {.name = "ChatML", .recognises = is_chatml, .write = write_chatml, .has_tools = true},
    {.name = "Llama-3", .recognises = is_llama3, .write = write_llama3},
    {.name = "Llama-2", .recognises = is_llama2, .write = write_llama2, .alternates = true},
    {.name = "Gemma", .recognises = is_gemma, .write = write_gemma, .alternates = true},
    {.name = "Zephyr", .recognises = is_zephyr, .write = write_zephyr},
};

const size_t chat_families_n = sizeof chat_families / sizeof chat_families[0];
