/* options_help.c - the text of --help, made from the table. */
#include "common/options_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HELP_COLUMN 30  /* where the help of an option begins */
#define HELP_WIDTH  110 /* where its lines end */

static const char *metavar_of(const struct option_spec *spec)
{
    static const char *const by_kind[] = {
        [OPTION_STRING] = "TEXT",   [OPTION_U32] = "N",       [OPTION_U64] = "N",
        [OPTION_BYTES] = "SIZE",    [OPTION_FLOAT] = "X",     [OPTION_FLAG] = "",
        [OPTION_DURATION] = "TIME", [OPTION_CHOICE] = "WORD", [OPTION_MEMORY] = "SIZE|PERCENT",
    };
    return spec->metavar ? spec->metavar : by_kind[spec->kind];
}

/* Words of `text` from the help column on, broken at HELP_WIDTH. `column`: where the line stands now. */
static void print_words(FILE *out, const char *text, size_t column)
{
    if (column + 2 > HELP_COLUMN) {
        fputc('\n', out);
        column = 0;
    }
    fprintf(out, "%*s", (int)(HELP_COLUMN - column), "");
    column = HELP_COLUMN;
    while (*text) {
        size_t length = strcspn(text, " ");
        if (column > HELP_COLUMN && column + 1 + length > HELP_WIDTH) {
            fprintf(out, "\n%*s", HELP_COLUMN, "");
            column = HELP_COLUMN;
        } else if (column > HELP_COLUMN) {
            fputc(' ', out);
            column++;
        }
        fprintf(out, "%.*s", (int)length, text);
        column += length;
        text += length + strspn(text + length, " ");
    }
    fputc('\n', out);
}

/* Help, choices, default, and where the present value comes from, as one paragraph. */
static char *describe(const struct option_spec *spec, const struct option_value *value)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    if (!out)
        return NULL;
    fprintf(out, "%s", spec->help ? spec->help : "");
    if (spec->kind == OPTION_CHOICE) {
        for (size_t i = 0; spec->choices[i]; i++)
            fprintf(out, "%s%s", i ? ", " : " (", spec->choices[i]);
        fprintf(out, ")");
    }
    if (spec->default_text && *spec->default_text)
        fprintf(out, " [%s]", spec->default_text);
    if (value && value->source != OPTION_FROM_DEFAULT)
        fprintf(out, " {now %s, from the %s}", value->text, options_source_name(value->source));
    if (fclose(out) != 0) {
        free(text);
        return NULL;
    }
    return text;
}

static int print_option(FILE *out, const struct option_spec *spec, const struct option_value *value)
{
    char *help = describe(spec, value);
    if (!help)
        return -1;
    int n = spec->short_name ? fprintf(out, "  -%c, ", spec->short_name) : fprintf(out, "      ");
    if (spec->kind == OPTION_FLAG)
        n += fprintf(out, "--[no-]%s", spec->name);
    else
        n += fprintf(out, "--%s %s", spec->name, metavar_of(spec));
    print_words(out, help, (size_t)n);
    free(help);
    return 0;
}

char *options_help(const struct options_table *table, const struct options *options)
{
    static const struct option_spec standard[] = {
        {.name = "config",
         .kind = OPTION_STRING,
         .metavar = "FILE",
         .help = "file of lines 'name = value', '#' starts a comment line"},
    };
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    if (!out)
        return NULL;
    fprintf(out, "Usage: %s [OPTION]...%s%s\n", table->program, table->usage ? " " : "",
            table->usage ? table->usage : "");
    if (table->summary)
        fprintf(out, "\n%s\n", table->summary);
    fprintf(out, "\nOptions:\n");
    int error = 0;
    for (size_t i = 0; i < table->n_specs && error == 0; i++)
        error = print_option(out, &table->specs[i], options ? &options->values[i] : NULL);
    if (error == 0)
        error = print_option(out, &standard[0], NULL);
    print_words(out, "this text", (size_t)fprintf(out, "  -h, --help"));
    print_words(out, "version of the program", (size_t)fprintf(out, "      --version"));
    fprintf(out, "\nA value comes from the command line, else from the environment (HCATTN_NAME, '-' written as '_'),\n"
                 "else from the file of --config, else it is the default in brackets.\n");
    if (fclose(out) != 0 || error != 0) {
        free(text);
        return NULL;
    }
    return text;
}
