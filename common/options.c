/*
 * options.c - finding values: command line, environment, file, default. Reading text is options_value.c's, the text of
 * --help options_help.c's.
 */
#include "common/options.h"

#include "common/options_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PREFIX            "HCATTN_"
#define CONFIG_LINE_BYTES 4096

extern char **environ;

static int fail(char error[OPTIONS_ERROR_SIZE], const char *format, ...) __attribute__((format(printf, 2, 3)));

static int fail(char error[OPTIONS_ERROR_SIZE], const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error, OPTIONS_ERROR_SIZE, format, arguments);
    va_end(arguments);
    return -EINVAL;
}

static size_t find(const struct options_table *table, const char *name, size_t length)
{
    for (size_t i = 0; i < table->n_specs; i++) {
        if (strlen(table->specs[i].name) == length && memcmp(table->specs[i].name, name, length) == 0)
            return i;
    }
    return SIZE_MAX;
}

static bool is_other(const struct options_table *table, const char *name)
{
    for (const char *const *other = table->other_names; other && *other; other++) {
        if (strcmp(*other, name) == 0)
            return true;
    }
    return false;
}

/* "exact-tokens" -> "HCATTN_EXACT_TOKENS". Names are ours, and short. */
static void environment_name(const char *name, char *ret_text, size_t size)
{
    int length = snprintf(ret_text, size, PREFIX "%s", name);
    assert(length > 0 && (size_t)length < size);
    for (char *c = ret_text; *c; c++)
        *c = *c == '-' ? '_' : *c >= 'a' && *c <= 'z' ? (char)(*c - 'a' + 'A') : *c;
}

static void forget_all(struct option_value *value)
{
    for (size_t i = 0; i < value->n_all; i++)
        free(value->all[i]);
    free(value->all);
    value->all = NULL;
    value->n_all = 0;
}

/* One more of an option that repeats; a source that outranks the one before begins anew. -ENOMEM. */
static int keep(struct option_value *value, const char *text, enum option_source source)
{
    if (value->source != source)
        forget_all(value);
    char **all = realloc(value->all, (value->n_all + 1) * sizeof(*all));
    if (!all)
        return -ENOMEM;
    value->all = all;
    all[value->n_all] = strdup(text);
    if (!all[value->n_all])
        return -ENOMEM;
    value->n_all++;
    return 0;
}

/* Gives option i a value from a source; `shown` is how that source names the option in an error. */
static int set(struct options *options, size_t i, const char *text, enum option_source source, const char *shown,
               char error[OPTIONS_ERROR_SIZE])
{
    struct option_value value;
    char why[OPTIONS_ERROR_SIZE / 2];
    if (options_value_read(&options->table->specs[i], text, &value, why, sizeof(why)) < 0)
        return fail(error, "%.100s: '%.80s' is not valid: %s", shown, text, why);
    if (options->table->specs[i].repeats) {
        int result = keep(&options->values[i], text, source);
        if (result < 0)
            return result;
    }
    value.all = options->values[i].all;
    value.n_all = options->values[i].n_all;
    value.text = strdup(text);
    if (!value.text)
        return -ENOMEM;
    value.source = source;
    free(options->values[i].text);
    options->values[i] = value;
    return 0;
}

static int set_defaults(struct options *options, char error[OPTIONS_ERROR_SIZE])
{
    for (size_t i = 0; i < options->table->n_specs; i++) {
        const struct option_spec *spec = &options->table->specs[i];
        options->values[i].source = OPTION_FROM_DEFAULT;
        if (!spec->default_text)
            continue;
        int result = set(options, i, spec->default_text, OPTION_FROM_DEFAULT, spec->name, error);
        assert(result != -EINVAL); /* a default of ours that we do not accept */
        if (result < 0)
            return result;
    }
    return 0;
}

/* One line of the file, without its newline. */
static int read_config_line(struct options *options, const char *path, unsigned number, char *line,
                            char error[OPTIONS_ERROR_SIZE])
{
    char *name = line + strspn(line, " \t");
    if (*name == '\0' || *name == '#')
        return 0;
    char *equals = strchr(name, '=');
    if (!equals)
        return fail(error, "%.200s:%u: expected 'name = value'", path, number);
    char *text = equals + 1 + strspn(equals + 1, " \t");
    while (equals > name && (equals[-1] == ' ' || equals[-1] == '\t'))
        equals--;
    *equals = '\0';
    size_t length = strlen(text);
    while (length > 0 && (text[length - 1] == ' ' || text[length - 1] == '\t'))
        text[--length] = '\0';

    size_t i = find(options->table, name, strlen(name));
    if (i == SIZE_MAX) {
        if (is_other(options->table, name))
            return 0;
        return fail(error, "%.200s:%u: unknown option '%.80s'", path, number, name);
    }
    if (options->values[i].source == OPTION_FROM_CONFIG && !options->table->specs[i].repeats)
        return fail(error, "%.200s:%u: '%.80s' was given before", path, number, name);
    char shown[300];
    snprintf(shown, sizeof(shown), "%.80s:%u: %.80s", path, number, name);
    return set(options, i, text, OPTION_FROM_CONFIG, shown, error);
}

static int read_config(struct options *options, const char *path, char error[OPTIONS_ERROR_SIZE])
{
    FILE *file = fopen(path, "re");
    if (!file)
        return fail(error, "cannot read the configuration file '%.200s': %s", path, strerror(errno));
    char line[CONFIG_LINE_BYTES];
    int result = 0;
    errno = 0;
    for (unsigned number = 1; result == 0 && fgets(line, sizeof(line), file); number++) {
        size_t length = strcspn(line, "\r\n");
        if (length == sizeof(line) - 1)
            result = fail(error, "%.200s:%u: line longer than %d bytes", path, number, CONFIG_LINE_BYTES - 2);
        line[length] = '\0';
        if (result == 0)
            result = read_config_line(options, path, number, line, error);
    }
    if (result == 0 && ferror(file))
        result = fail(error, "cannot read the configuration file '%.200s': %s", path, strerror(errno));
    fclose(file);
    return result;
}

static int read_environment(struct options *options, char error[OPTIONS_ERROR_SIZE])
{
    for (size_t i = 0; i < options->table->n_specs; i++) {
        char name[128];
        environment_name(options->table->specs[i].name, name, sizeof(name));
        const char *text = options_environment(name);
        if (!text)
            continue;
        int result = set(options, i, text, OPTION_FROM_ENVIRONMENT, name, error);
        if (result < 0)
            return result;
    }
    return 0;
}

/* With the names of all programs at hand, a variable that none of them has is a slip of somebody's pen. */
static int check_environment(const struct options *options, char error[OPTIONS_ERROR_SIZE])
{
    static const char *const always[] = {PREFIX "RUNTIME_DIR", PREFIX "BIN", PREFIX "CONFIG", NULL};
    if (!options->table->other_names)
        return 0;
    for (char **entry = environ; entry && *entry; entry++) {
        size_t length = strcspn(*entry, "=");
        if (strncmp(*entry, PREFIX, strlen(PREFIX)) != 0 || strncmp(*entry, PREFIX "TEST_", 12) == 0)
            continue;
        bool known = false;
        for (size_t i = 0; always[i] && !known; i++)
            known = strlen(always[i]) == length && memcmp(always[i], *entry, length) == 0;
        for (size_t i = 0; !known && i < options->table->n_specs; i++) {
            char name[128];
            environment_name(options->table->specs[i].name, name, sizeof(name));
            known = strlen(name) == length && memcmp(name, *entry, length) == 0;
        }
        for (const char *const *other = options->table->other_names; !known && *other; other++) {
            char name[128];
            environment_name(*other, name, sizeof(name));
            known = strlen(name) == length && memcmp(name, *entry, length) == 0;
        }
        if (!known)
            return fail(error, "unknown environment variable '%.*s'", (int)(length < 100 ? length : 100), *entry);
    }
    return 0;
}

/*
 * Command line. It is walked twice: first for --help, --version and --config, then for values, since those outrank the
 * file that --config names.
 */
struct walk {
    struct options *options;
    int argc, next;
    char *const *argv;
    bool first_pass;
};

/* The value of an option at hand: after '=', or the next argument. */
static int take_value(struct walk *walk, const char *inline_text, const char *shown, const char **ret_text,
                      char error[OPTIONS_ERROR_SIZE])
{
    if (inline_text) {
        *ret_text = inline_text;
        return 0;
    }
    if (walk->next >= walk->argc)
        return fail(error, "%.100s needs a value", shown);
    if (strncmp(walk->argv[walk->next], "--", 2) == 0) /* far more often a forgotten value than one that looks so */
        return fail(error, "%.100s needs a value; if '%.100s' is meant, write it after '='", shown,
                    walk->argv[walk->next]);
    *ret_text = walk->argv[walk->next++];
    return 0;
}

static int take_option(struct walk *walk, size_t i, const char *inline_text, const char *shown, bool negated,
                       char error[OPTIONS_ERROR_SIZE])
{
    const char *text = inline_text;
    if (walk->options->table->specs[i].kind == OPTION_FLAG) {
        if (negated && inline_text)
            return fail(error, "%.100s takes no value", shown);
        text = negated ? "no" : inline_text ? inline_text : "yes";
    } else {
        int result = take_value(walk, inline_text, shown, &text, error);
        if (result < 0)
            return result;
    }
    if (walk->first_pass)
        return 0;
    return set(walk->options, i, text, OPTION_FROM_COMMAND_LINE, shown, error);
}

static int take_config(struct walk *walk, const char *inline_text, char error[OPTIONS_ERROR_SIZE])
{
    const char *path = NULL;
    int result = take_value(walk, inline_text, "--config", &path, error);
    if (result < 0 || !walk->first_pass)
        return result;
    char *copy = strdup(path);
    if (!copy)
        return -ENOMEM;
    free(walk->options->config_file);
    walk->options->config_file = copy;
    return 0;
}

static int take_long(struct walk *walk, const char *argument, char error[OPTIONS_ERROR_SIZE])
{
    const char *name = argument + 2;
    size_t length = strcspn(name, "=");
    const char *inline_text = name[length] == '=' ? name + length + 1 : NULL;
    char shown[100];
    snprintf(shown, sizeof(shown), "--%.*s", (int)(length < 80 ? length : 80), name);

    size_t i = find(walk->options->table, name, length);
    if (i != SIZE_MAX)
        return take_option(walk, i, inline_text, shown, false, error);
    if (strcmp(name, "help") == 0) {
        walk->options->help_wanted = true;
        return 0;
    }
    if (strcmp(name, "version") == 0) {
        walk->options->version_wanted = true;
        return 0;
    }
    if (length == 6 && memcmp(name, "config", 6) == 0)
        return take_config(walk, inline_text, error);
    if (length > 3 && memcmp(name, "no-", 3) == 0) {
        i = find(walk->options->table, name + 3, length - 3);
        if (i != SIZE_MAX && walk->options->table->specs[i].kind == OPTION_FLAG)
            return take_option(walk, i, inline_text, shown, true, error);
    }
    return fail(error, "unknown option '%.100s'", shown);
}

static int take_short(struct walk *walk, const char *argument, char error[OPTIONS_ERROR_SIZE])
{
    char shown[3] = {'-', argument[1], '\0'};
    const struct options_table *table = walk->options->table;
    for (size_t i = 0; i < table->n_specs; i++) {
        if (table->specs[i].short_name != argument[1])
            continue;
        const char *inline_text = argument[2] ? argument + 2 : NULL;
        if (inline_text && *inline_text == '=')
            inline_text++;
        if (inline_text && table->specs[i].kind == OPTION_FLAG)
            break; /* bundles of flags are not supported */
        return take_option(walk, i, inline_text, shown, false, error);
    }
    if (strcmp(argument, "-h") == 0) {
        walk->options->help_wanted = true;
        return 0;
    }
    return fail(error, "unknown option '%.100s'", argument);
}

static int take_positional(struct walk *walk, const char *argument, char error[OPTIONS_ERROR_SIZE])
{
    struct options *options = walk->options;
    if (walk->first_pass)
        return 0;
    if (options->n_positional >= options->table->max_positional)
        return fail(error, "unexpected argument '%.100s'", argument);
    options->positional[options->n_positional] = strdup(argument);
    if (!options->positional[options->n_positional])
        return -ENOMEM;
    options->n_positional++;
    return 0;
}

/* In the first pass errors are left to the second, so that `--help` helps whatever else was typed. */
static int walk_arguments(struct options *options, int argc, char *const argv[], bool first_pass,
                          char error[OPTIONS_ERROR_SIZE])
{
    struct walk walk = {.options = options, .argc = argc, .next = 1, .argv = argv, .first_pass = first_pass};
    bool only_positional = false;
    while (walk.next < argc) {
        const char *argument = argv[walk.next++];
        int result;
        if (only_positional || argument[0] != '-' || argument[1] == '\0')
            result = take_positional(&walk, argument, error);
        else if (strcmp(argument, "--") == 0)
            result = 0, only_positional = true;
        else if (argument[1] == '-')
            result = take_long(&walk, argument, error);
        else
            result = take_short(&walk, argument, error);
        if (result == -ENOMEM || (result < 0 && !first_pass))
            return result;
    }
    return 0;
}

static int fill(struct options *options, int argc, char *const argv[], char error[OPTIONS_ERROR_SIZE])
{
    int result = set_defaults(options, error);
    if (result == 0)
        result = walk_arguments(options, argc, argv, true, error);
    if (result < 0 || options->help_wanted || options->version_wanted)
        return result;
    if (!options->config_file && options_environment(PREFIX "CONFIG")) {
        options->config_file = strdup(options_environment(PREFIX "CONFIG"));
        if (!options->config_file)
            return -ENOMEM;
    }
    if (options->config_file)
        result = read_config(options, options->config_file, error);
    if (result == 0)
        result = read_environment(options, error);
    if (result == 0)
        result = check_environment(options, error);
    if (result == 0)
        result = walk_arguments(options, argc, argv, false, error);
    return result;
}

int options_parse(const struct options_table *table, int argc, char *const argv[], struct options **ret_options,
                  char error[OPTIONS_ERROR_SIZE])
{
    struct options *options = calloc(1, sizeof(*options));
    int result = options ? 0 : -ENOMEM;
    if (options) {
        options->table = table;
        options->values = calloc(table->n_specs + 1, sizeof(*options->values));
        options->positional = calloc((size_t)(argc > 0 ? argc : 0) + 1, sizeof(*options->positional));
        result = options->values && options->positional ? fill(options, argc, argv, error) : -ENOMEM;
    }
    if (result < 0) {
        if (result == -ENOMEM)
            fail(error, "out of memory");
        options_free(options);
        return result;
    }
    *ret_options = options;
    return 0;
}

struct options *options_free(struct options *options)
{
    if (!options)
        return NULL;
    for (size_t i = 0; options->values && i < options->table->n_specs; i++) {
        free(options->values[i].text);
        forget_all(&options->values[i]);
    }
    for (size_t i = 0; i < options->n_positional; i++)
        free(options->positional[i]);
    free(options->values);
    free(options->positional);
    free(options->config_file);
    free(options);
    return NULL;
}

const char *options_environment(const char *name)
{
    const char *text = getenv(name);
    return text && *text ? text : NULL;
}

const char *options_environment_of_others(const char *name)
{
    return getenv(name);
}

/* Is the directory ours alone? Somebody else could have made the one in /tmp before us. */
static int check_runtime_dir(const char *path, char error[OPTIONS_ERROR_SIZE])
{
    struct stat status;
    int result = 0;
    if (lstat(path, &status) < 0)
        result = -errno;
    if (result < 0)
        fail(error, "runtime directory '%s': %s", path, strerror(-result));
    else if (!S_ISDIR(status.st_mode))
        result = -ENOTDIR, fail(error, "runtime directory '%s' is not a directory", path);
    else if (status.st_uid != geteuid())
        result = -EPERM, fail(error, "runtime directory '%s' belongs to uid %u, not to us", path, status.st_uid);
    else if (status.st_mode & 077)
        result = -EPERM, fail(error, "runtime directory '%s' is open to others: chmod 700 it", path);
    return result;
}

int options_runtime_dir(const char *given, char ret_path[OPTIONS_PATH_SIZE], char error[OPTIONS_ERROR_SIZE])
{
    char path[4096];
    const char *ours = given && *given ? given : options_environment(PREFIX "RUNTIME_DIR");
    const char *xdg = options_environment("XDG_RUNTIME_DIR");
    int length;
    if (ours)
        length = snprintf(path, sizeof(path), "%s", ours);
    else if (xdg)
        length = snprintf(path, sizeof(path), "%s/hcattn", xdg);
    else
        length = snprintf(path, sizeof(path), "/tmp/hcattn-%u", geteuid());
    while (length > 1 && length < (int)sizeof(path) && path[length - 1] == '/')
        path[--length] = '\0';
    /* slash, name, closing NUL */
    int longest = OPTIONS_PATH_SIZE - 1 - OPTIONS_SOCKET_NAME_MAX - 1;
    if (length > longest) {
        fail(error,
             "runtime directory '%.300s' is too long: %d bytes, at most %d; choose another with HCATTN_RUNTIME_DIR",
             path, length, longest);
        return -ENAMETOOLONG;
    }
    if (mkdir(path, 0700) < 0 && errno != EEXIST) {
        int result = -errno;
        fail(error, "cannot make the runtime directory '%s': %s", path, strerror(-result));
        return result;
    }
    int result = check_runtime_dir(path, error);
    if (result == 0)
        memcpy(ret_path, path, (size_t)length + 1);
    return result;
}
