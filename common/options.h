/*
 * options.h - the options of a program, and the only place that reads the environment.
 *
 * A value comes from the first of: command line (`--name value`, `--name=value`, `-n value`, `--name` / `--no-name` of
 * a flag), environment (`HCATTN_NAME`, '-' becomes '_'), file of `--config FILE` (lines `name = value`, '#' starts a
 * comment line), default. Every value knows where it came from. `--help`, `--version` and `--config` exist in every table
 * without being listed; `--` ends options; what is no option is kept as positional, in order.
 *
 * What is wrong - unknown option, unknown key, bad or missing value - is one line in the error buffer and -EINVAL; a
 * program prints it and exits with status 2.
 *
 * Names of other programs' options (table.other_names) are accepted and ignored in the configuration file and in the
 * environment, so that one file serves all roles. With other_names given an unknown HCATTN_ variable is an error; without
 * it unknown variables are ignored. An empty variable counts as unset. HCATTN_RUNTIME_DIR, HCATTN_BIN and HCATTN_TEST_... are always accepted.
 *
 * Threads: parse in the main thread; a parsed `struct options` never changes and may be read from any thread.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define OPTIONS_ERROR_SIZE      512
#define OPTIONS_PATH_SIZE       108 /* sun_path */
#define OPTIONS_SOCKET_NAME_MAX 24  /* longest file name put into the runtime directory */

enum option_kind {
    OPTION_STRING, /* any text; the empty text is a value */
    OPTION_U32,
    OPTION_U64,
    OPTION_BYTES,    /* "4096", "512MiB", "4GiB", "1.5GiB"; KiB MiB GiB TiB and kB MB GB TB; "K M G T" are KiB ... */
    OPTION_FLOAT,    /* finite */
    OPTION_FLAG,     /* --name, --no-name, --name=yes|no|true|false|on|off|1|0 */
    OPTION_DURATION, /* "250", "250ms", "2s", "1.5s", "3m", "1h"; kept in milliseconds */
    OPTION_CHOICE,   /* one of `choices` */
    OPTION_MEMORY,   /* as OPTION_BYTES, or "1%" to "100%" of what the program can have */
};

enum option_source {
    OPTION_FROM_DEFAULT,
    OPTION_FROM_CONFIG,
    OPTION_FROM_ENVIRONMENT,
    OPTION_FROM_COMMAND_LINE,
};

struct option_spec {
    const char *name; /* "exact-tokens" */
    char short_name;  /* 'n', or 0 */
    enum option_kind kind;
    const char
        *default_text;   /* parsed like a given value; NULL: a string is NULL, a number 0, a flag false, a choice 0 */
    const char *help;    /* one sentence, with the reason of the default where it needs one */
    const char *metavar; /* "FILE"; NULL: chosen by kind */
    const char *const *choices; /* OPTION_CHOICE: allowed values, closed by NULL */
    double minimum, maximum;    /* numbers only, inclusive; both 0: whatever the type holds */
    bool
        repeats; /* OPTION_STRING: may be given several times (options_string_at()); the source that counts gives all */
};

struct options_table {
    const char *program; /* "hcattn generate", for usage and errors */
    const char *usage;   /* what follows the options in the usage line ("PROMPT|-"), or NULL */
    const char *summary; /* what the program does, one or more lines, or NULL */
    const struct option_spec *specs;
    size_t n_specs;
    const char *const *other_names; /* see above; closed by NULL, or NULL */
    size_t max_positional;          /* more are refused: "unexpected argument" */
};

struct options;

/* argv[0] is skipped. 0 also when --help or --version was asked for (then nothing else was checked). The result keeps
 * pointers to the table, and copies of everything else. -EINVAL: see `error`; -ENOMEM. */
int options_parse(const struct options_table *table, int argc, char *const argv[], struct options **ret_options,
                  char error[OPTIONS_ERROR_SIZE]);
struct options *options_free(struct options *options); /* accepts NULL, returns NULL */

bool options_help_wanted(const struct options *options);
bool options_version_wanted(const struct options *options);

/* The text of --help: malloc'd, NULL when out of memory. Shows for every option its kind, default and help and, when
 * `options` is not NULL, the value it has now and its source where that is not the default. */
char *options_help(const struct options_table *table, const struct options *options);

/* Values. A name that is not in the table or is of another kind is our own bug: assert. */
const char *options_string(const struct options *options, const char *name); /* owned by options */
size_t options_n_strings(const struct options *options, const char *name);   /* of an option that repeats */
const char *options_string_at(const struct options *options, const char *name, size_t index); /* in order */
uint32_t options_u32(const struct options *options, const char *name);
uint64_t options_u64(const struct options *options, const char *name);
uint64_t options_bytes(const struct options *options, const char *name);   /* of OPTION_MEMORY too; 0: a percentage */
uint32_t options_percent(const struct options *options, const char *name); /* of OPTION_MEMORY; 0: a size */
double options_float(const struct options *options, const char *name);
bool options_flag(const struct options *options, const char *name);
uint64_t options_duration_ms(const struct options *options, const char *name);
uint32_t options_choice(const struct options *options, const char *name); /* index into choices */

enum option_source options_source(const struct options *options, const char *name);
const char *options_source_name(enum option_source source);          /* "default", "configuration file", ... */
bool options_given(const struct options *options, const char *name); /* not from the default */
const char *options_text(const struct options *options,
                         const char *name); /* any kind, as it was written; may be NULL */

size_t options_n_positional(const struct options *options);
const char *options_positional(const struct options *options, size_t index); /* owned by options */

/* Path given by --config (or HCATTN_CONFIG), for starting other programs with it; NULL: none. */
const char *options_config_file(const struct options *options);

/* The few other needs (HOME, XDG_DATA_HOME): NULL when unset or empty. Valid until the environment changes. */
const char *options_environment(const char *name);
/* The same for a variable of others, to whom an empty text says something: NULL when unset only. */
const char *options_environment_of_others(const char *name);

/* Directory of this user's sockets: `given` (an option --runtime-dir, may be NULL), else HCATTN_RUNTIME_DIR, else
 * $XDG_RUNTIME_DIR/hcattn, else /tmp/hcattn-UID. Made with mode 0700 if missing (its parent must exist). All errors come
 * with a line in `error`: -ENAMETOOLONG a socket of OPTIONS_SOCKET_NAME_MAX characters would not fit into sun_path;
 * -EPERM not owned by us or open to others; -ENOTDIR a symbolic link or no directory; others from mkdir. */
int options_runtime_dir(const char *given, char ret_path[OPTIONS_PATH_SIZE], char error[OPTIONS_ERROR_SIZE]);
