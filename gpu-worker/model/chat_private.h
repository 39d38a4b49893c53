/*
 * chat_private.h - a recognised template, and a conversation being written by its rules.
 */
#pragma once

#include "gpu-worker/model/chat.h"

struct chat_writer;

struct chat_family {
    const char *name;
    /* Whether a template is of this family. */
    bool (*recognises)(struct gguf_string jinja);
    /* Writes a conversation that chat.c has checked. */
    void (*write)(struct chat_writer *writer, const struct chat_message *messages, size_t n_messages,
                  bool add_generation_prompt);
    bool alternates; /* user and assistant take turns, after at most one system message */
    bool has_tools;  /* the role "tool" exists */
};

struct chat {
    const struct chat_family *family;
    const struct tokenizer *tokenizer;
    struct gguf_string jinja;
    struct gguf_string bos, eos; /* spellings; empty where the tokenizer has none */
    bool trims;                  /* white space around contents is cut off */
    bool starts_with_bos;        /* the template writes BOS itself */
    bool repeats_bos;            /* Llama-2: before every user turn */
    bool merges_system;          /* Gemma without a system role: one line break before the user's text, else two */
    char *default_system;        /* what stands for a missing system message; NULL: nothing */
    char *system_prefix;         /* Llama 3.1: goes before every system message; NULL: nothing */
};

/* Text so far, in parts; errors stick until the end. */
struct chat_writer {
    const struct chat *chat;
    char *text;
    size_t n_bytes, capacity;
    struct chat_span {
        size_t n_bytes;
        bool is_template;
    } * spans;
    size_t n_spans, spans_capacity;
    int error;
};

void chat_write(struct chat_writer *writer, const char *words);                         /* the template's */
void chat_write_content(struct chat_writer *writer, const char *bytes, size_t n_bytes); /* a user's */

/* A user's text without the white space at these ends, where the template cuts it off. */
enum chat_ends { CHAT_START = 1, CHAT_END = 2, CHAT_BOTH = 3 };
void chat_write_trimmed(struct chat_writer *writer, const struct chat_message *message, enum chat_ends ends);

void chat_write_bos(struct chat_writer *writer); /* not at the beginning where the tokenizer adds it */
void chat_write_eos(struct chat_writer *writer);

/* chat_families.c */
extern const struct chat_family chat_families[];
extern const size_t chat_families_n;

/* Finds a string in a template; NULL: not there. */
const char *chat_find(struct gguf_string jinja, const char *words);

/*
 * A literal of the template from `start` on, up to `end` (NULL: up to the quote that closes it), its escapes resolved.
 * NULL: the literal closes before `end`, or no memory. The caller frees it.
 */
char *chat_literal(struct gguf_string jinja, const char *start, const char *end);
