/* tokenize.c - see tokenize.h. */
#include "client/command/tokenize.h"
#include "client/command/command.h"
#include "client/command/output.h"
#include "common/utf8.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME "hcattn tokenize"

static const struct option_spec specs[] = {
    {.name = "ids", .kind = OPTION_FLAG, .help = "only the ids, in one line"},
    {.name = "json", .kind = OPTION_FLAG, .help = "one JSON object with ids and pieces"},
    {.name = "chat", .kind = OPTION_FLAG, .help = "the text as a user's message, through the model's chat template"},
    {.name = "parse-special", .kind = OPTION_FLAG, .help = "special tokens written in the text are tokens"},
    {.name = "bos",
     .kind = OPTION_FLAG,
     .default_text = "yes",
     .help = "start with the begin-of-sequence token if the model asks for it"},
    {.name = "decode",
     .kind = OPTION_STRING,
     .metavar = "IDS",
     .help = "the other way round: the text of these ids (separated by spaces or commas)"},
    COMMAND_CLIENT_OPTIONS,
};

static const struct options_table table = {
    .program = NAME,
    .usage = "TEXT|-",
    .summary = "Shows the token ids of a text ('-': read from standard input).",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
    .max_positional = 1,
};

/* "1, 2 3" -> ids; malloc'd. -EINVAL, -ENOMEM. */
static int parse_ids(const char *text, uint32_t **ret_ids, size_t *ret_n)
{
    uint32_t *ids = malloc((strlen(text) / 2 + 1) * sizeof(*ids));
    size_t n = 0;
    if (!ids)
        return -ENOMEM;
    for (text += strspn(text, " ,\t\n[]"); *text; text += strspn(text, " ,\t\n[]")) {
        char *end = NULL;
        errno = 0;
        unsigned long long id = *text >= '0' && *text <= '9' ? strtoull(text, &end, 10) : UINT64_MAX;
        if (errno || id > UINT32_MAX || (*end && !strchr(" ,\t\n[]", *end))) {
            free(ids);
            return -EINVAL;
        }
        ids[n++] = (uint32_t)id;
        text = end;
    }
    *ret_ids = ids;
    *ret_n = n;
    return 0;
}

static int decode(struct hcattn *client, const struct options *options)
{
    uint32_t *ids = NULL;
    size_t n_ids = 0;
    struct hcattn_error error;
    if (parse_ids(options_string(options, "decode"), &ids, &n_ids) < 0)
        return command_fail(COMMAND_USAGE, NAME, "--decode takes token ids, not '%s'",
                            options_string(options, "decode"));
    char *text = NULL;
    int result = hcattn_detokenize(client, ids, n_ids, options_flag(options, "parse-special"), 0, &text, &error);
    free(ids);
    if (result < 0)
        return command_call_failed(NAME, result, &error);
    if (options_flag(options, "json")) {
        json_t *json = json_object();
        json_object_set_new(json, "text", output_json_text(text, strlen(text)));
        output_json(json);
    } else {
        output_text(text);
        output_text("\n");
    }
    free(text);
    return output_status();
}

/* A piece so that it fits into a line: quotes, escapes, bytes that are no whole characters in hex. */
static void show_piece(const struct hcattn_piece *piece)
{
    bool is_text = utf8_check(piece->bytes, piece->n_bytes, NULL) == 0;
    output_text("\"");
    for (size_t i = 0; i < piece->n_bytes; i++) {
        unsigned char c = piece->bytes[i];
        if (c == '\n')
            output_text("\\n");
        else if (c == '\t')
            output_text("\\t");
        else if (c == '"' || c == '\\')
            output_format("\\%c", c);
        else if (c < 0x20 || c == 0x7f || (c > 0x7f && !is_text))
            output_format("\\x%02x", c);
        else
            output_bytes(&c, 1);
    }
    output_text("\"");
}

static void show_json(const struct hcattn_tokens *tokens)
{
    json_t *ids = json_array(), *pieces = json_array();
    for (size_t i = 0; i < tokens->n_ids; i++)
        json_array_append_new(ids, json_integer(tokens->ids[i]));
    for (size_t i = 0; i < tokens->n_pieces; i++)
        json_array_append_new(pieces, output_json_text(tokens->pieces[i].bytes, tokens->pieces[i].n_bytes));
    output_json(json_pack("{s:o,s:o}", "ids", ids, "pieces", pieces));
}

static int encode(struct hcattn *client, const struct options *options, const char *text)
{
    struct hcattn_message message = {"user", text};
    struct hcattn_input input = {.parse_special = options_flag(options, "parse-special"),
                                 .no_bos = !options_flag(options, "bos")};
    if (options_flag(options, "chat")) {
        input.messages = &message;
        input.n_messages = 1;
    } else {
        input.text = text;
    }
    struct hcattn_tokens tokens;
    struct hcattn_error error;
    int result = hcattn_tokenize(client, &input, 0, &tokens, &error);
    if (result < 0)
        return command_call_failed(NAME, result, &error);
    if (options_flag(options, "json")) {
        show_json(&tokens);
    } else if (options_flag(options, "ids")) {
        for (size_t i = 0; i < tokens.n_ids; i++)
            output_format("%s%u", i ? " " : "", tokens.ids[i]);
        output_text("\n");
    } else {
        for (size_t i = 0; i < tokens.n_ids; i++) {
            output_format("%6u ", tokens.ids[i]);
            if (tokens.n_pieces)
                show_piece(&tokens.pieces[i]);
            output_text("\n");
        }
    }
    hcattn_tokens_free(&tokens);
    return output_status();
}

int tokenize_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    bool decodes = options_string(options, "decode") != NULL;
    char *text = NULL;
    if (!decodes && options_n_positional(options) != 1)
        status = command_fail(COMMAND_USAGE, NAME, "a text is needed (one argument, or '-' for standard input)");
    else if (decodes && options_n_positional(options) != 0)
        status = command_fail(COMMAND_USAGE, NAME, "either a text or --decode");
    else if (!decodes)
        text = command_text(NAME, options_positional(options, 0), false, &status);
    if (text || (decodes && !status)) {
        struct hcattn *client = command_connect(NAME, options, &status);
        if (client)
            status = decodes ? decode(client, options) : encode(client, options, text);
        command_disconnect(client);
    }
    free(text);
    options_free(options);
    return status;
}
