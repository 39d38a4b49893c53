/* test_options.c - where values come from, what is refused and in which words, and the runtime directory. */
#include "common/options.h"
#include "tests/unit/common/helpers.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const policies[] = {"full", "mass", "deviation", NULL};
static const char *const other_names[] = {"http-port", NULL};

static const struct option_spec specs[] = {
    {.name = "model", .short_name = 'm', .kind = OPTION_STRING, .metavar = "FILE", .help = "model to serve"},
    {.name = "stores", .short_name = 'n', .kind = OPTION_U32, .default_text = "1", .minimum = 1, .maximum = 12},
    {.name = "seed", .kind = OPTION_U64, .default_text = "0"},
    {.name = "value-memory", .kind = OPTION_BYTES, .default_text = "512MiB", .help = "memory of one store"},
    {.name = "temperature", .kind = OPTION_FLOAT, .default_text = "0.8", .minimum = 0, .maximum = 10},
    {.name = "bias", .kind = OPTION_FLOAT},
    {.name = "detach", .short_name = 'd', .kind = OPTION_FLAG},
    {.name = "strict", .kind = OPTION_FLAG, .default_text = "yes"},
    {.name = "timeout", .kind = OPTION_DURATION, .default_text = "2s"},
    {.name = "policy", .kind = OPTION_CHOICE, .default_text = "mass", .choices = policies},
    {.name = "text", .kind = OPTION_STRING, .repeats = true},
    {.name = "memory", .kind = OPTION_MEMORY, .default_text = "75%"},
};

static struct options_table table = {
    .program = "hcattn test",
    .usage = "PROMPT|-",
    .summary = "Tests.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .max_positional = 2,
};

static char error[OPTIONS_ERROR_SIZE];

#define MAX_ARGUMENTS 16

/* Parses the words of `line`, which are split at '|'. */
static int parse(const char *line, struct options **ret_options)
{
    static char copy[1024];
    char *argv[MAX_ARGUMENTS + 1] = {"program"};
    int argc = 1;
    snprintf(copy, sizeof(copy), "%s", line);
    for (char *rest = copy, *word; *line && (word = strsep(&rest, "|"));)
        argv[argc++] = word;
    error[0] = '\0';
    return options_parse(&table, argc, argv, ret_options, error);
}

static struct options *parsed(const char *line)
{
    struct options *options = NULL;
    int result = parse(line, &options);
    if (result != 0)
        fail_msg("%s: %s", line, error);
    return options;
}

static void assert_refused(const char *line, const char *expected)
{
    struct options *untouched = (struct options *)&table, *options = untouched;
    assert_int_equal(parse(line, &options), -EINVAL);
    assert_ptr_equal(options, untouched);
    if (!strstr(error, expected))
        fail_msg("'%s' was refused with: %s", line, error);
    assert_null(strchr(error, '\n'));
}

static const char *write_config(void **state, const char *text)
{
    const char *path = helpers_path(state, "config");
    FILE *file = fopen(path, "we");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
    return path;
}

static void defaults_are_values(void **state)
{
    (void)state;
    struct options *options = parsed("");
    assert_null(options_string(options, "model"));
    assert_int_equal(options_u32(options, "stores"), 1);
    assert_int_equal(options_bytes(options, "value-memory"), 512 << 20);
    assert_true(options_float(options, "temperature") == 0.8);
    assert_true(options_float(options, "bias") == 0);
    assert_false(options_flag(options, "detach"));
    assert_true(options_flag(options, "strict"));
    assert_int_equal(options_duration_ms(options, "timeout"), 2000);
    assert_int_equal(options_choice(options, "policy"), 1);
    assert_int_equal(options_source(options, "stores"), OPTION_FROM_DEFAULT);
    assert_false(options_given(options, "stores"));
    assert_int_equal(options_n_positional(options), 0);
    assert_null(options_config_file(options));
    assert_null(options_free(options));
    assert_null(options_free(NULL));
}

static void a_memory_is_a_size_or_a_percentage(void **state)
{
    (void)state;
    struct options *options = parsed("");
    assert_int_equal(options_percent(options, "memory"), 75);
    assert_int_equal(options_bytes(options, "memory"), 0);
    options_free(options);
    options = parsed("--memory|100%");
    assert_int_equal(options_percent(options, "memory"), 100);
    options_free(options);
    options = parsed("--memory|1.5GiB");
    assert_int_equal(options_percent(options, "memory"), 0);
    assert_int_equal(options_bytes(options, "memory"), (uint64_t)3 << 29);
    options_free(options);
    static const char *const bad[] = {"0%", "101%", "%", "-1%", "5 %", "5%%", "1.5%", "much", ""};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        char line[64];
        snprintf(line, sizeof(line), "--memory=%s", bad[i]);
        assert_refused(line, "1% to 100% is expected");
    }
}

static void every_form_of_the_command_line_is_read(void **state)
{
    (void)state;
    struct options *options =
        parsed("--model=a=b|-n|3|first|--seed|18446744073709551615|-d|--no-strict|--policy=full|--|--second");
    assert_string_equal(options_string(options, "model"), "a=b");
    assert_int_equal(options_u32(options, "stores"), 3);
    assert_true(options_u64(options, "seed") == UINT64_MAX);
    assert_true(options_flag(options, "detach"));
    assert_false(options_flag(options, "strict"));
    assert_int_equal(options_choice(options, "policy"), 0);
    assert_string_equal(options_text(options, "policy"), "full");
    assert_int_equal(options_n_positional(options), 2);
    assert_string_equal(options_positional(options, 0), "first");
    assert_string_equal(options_positional(options, 1), "--second");
    options_free(options);

    options = parsed("-n4|-m=x|-|--detach=no|--bias|-1.5e1|--model=|--timeout|1.5s|-n|5");
    assert_int_equal(options_u32(options, "stores"), 5); /* the last one counts */
    assert_string_equal(options_string(options, "model"), "");
    assert_string_equal(options_positional(options, 0), "-");
    assert_false(options_flag(options, "detach"));
    assert_true(options_given(options, "detach"));
    assert_true(options_float(options, "bias") == -15);
    assert_int_equal(options_duration_ms(options, "timeout"), 1500);
    options_free(options);
}

static void units_are_read(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint64_t bytes;
    } sizes[] = {{"0", 0},
                 {"4096", 4096},
                 {"17B", 17},
                 {"1K", 1024},
                 {"512MiB", 512 << 20},
                 {"4GiB", (uint64_t)4 << 30},
                 {"1 GiB", 1 << 30},
                 {"1.5GiB", (uint64_t)3 << 29},
                 {"2TB", 2000000000000},
                 {"0.5kB", 500},
                 {"16777215TiB", (uint64_t)16777215 << 40}};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        char line[64];
        snprintf(line, sizeof(line), "--value-memory=%s", sizes[i].text);
        struct options *options = parsed(line);
        assert_true(options_bytes(options, "value-memory") == sizes[i].bytes);
        options_free(options);
    }
    static const struct {
        const char *text;
        uint64_t ms;
    } times[] = {{"250", 250}, {"250ms", 250}, {"2s", 2000}, {"3m", 180000}, {"1h", 3600000}, {"0.25s", 250}};
    for (size_t i = 0; i < sizeof(times) / sizeof(times[0]); i++) {
        char line[64];
        snprintf(line, sizeof(line), "--timeout=%s", times[i].text);
        struct options *options = parsed(line);
        assert_true(options_duration_ms(options, "timeout") == times[i].ms);
        options_free(options);
    }
}

static void bad_values_are_refused_in_one_line(void **state)
{
    (void)state;
    static const char *const lines[][2] = {
        {"--stores=", "a whole number"},
        {"--stores=x", "--stores: 'x' is not valid: a whole number is expected"},
        {"--stores=-1", "a whole number"},
        {"--stores=+1", "a whole number"},
        {"--stores= 1", "a whole number"},
        {"--stores=0x1", "a whole number"},
        {"--stores=1.0", "a whole number"},
        {"--stores=4294967297", "too large"},
        {"--stores=0", "between 1 and 12"},
        {"--stores=13", "between 1 and 12"},
        {"--seed=18446744073709551616", "too large"},
        {"--seed=99999999999999999999999", "too large"},
        {"--value-memory=", "a size such as"},
        {"--value-memory=1XB", "a size such as"},
        {"--value-memory=-1", "a size such as"},
        {"--value-memory=1.GiB", "a size such as"},
        {"--value-memory=1.5", "a size such as"},
        {"--value-memory=1GiBs", "a size such as"},
        {"--value-memory=16777216TiB", "too large"},
        {"--temperature=nan", "a number"},
        {"--temperature=inf", "a number"},
        {"--temperature=1e999", "a number"},
        {"--temperature=0x10", "a number"},
        {"--temperature=1,5", "a number"},
        {"--temperature=", "a number"},
        {"--temperature=-0.1", "between 0 and 10"},
        {"--detach=maybe", "yes or no"},
        {"--timeout=2days", "a duration"},
        {"--timeout=0.5ms", "a duration"},
        {"--policy=none", "one of full, mass, deviation"},
        {"--policy=", "one of"},
    };
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++)
        assert_refused(lines[i][0], lines[i][1]);
}

static void a_bad_command_line_is_refused_in_one_line(void **state)
{
    (void)state;
    assert_refused("--storse=2", "unknown option '--storse'");
    assert_refused("--sto", "unknown option '--sto'"); /* no abbreviations: they break when options are added */
    assert_refused("--no-stores", "unknown option '--no-stores'");
    assert_refused("--no-detach=yes", "takes no value");
    assert_refused("-x", "unknown option '-x'");
    assert_refused("-dx", "unknown option '-dx'");
    assert_refused("--help=x", "unknown option");
    assert_refused("---", "unknown option");
    assert_refused("--=", "unknown option");
    assert_refused("--stores", "--stores needs a value");
    assert_refused("-n", "-n needs a value");
    assert_refused("--model|--stores|2", "--model needs a value");
    assert_refused("--config", "--config needs a value");
    assert_refused("a|b|c", "unexpected argument 'c'");
    char line[900] = "--stores=";
    memset(line + 9, 'y', sizeof(line) - 10);
    assert_refused(line, "--stores: 'yyy");
}

static void the_order_is_line_environment_file_default(void **state)
{
    const char *path = write_config(state, "# stores of this host\n"
                                           "stores = 2\n"
                                           "\n"
                                           "  seed=5  \n"
                                           "timeout = 9s\r\n"
                                           "model = /a file/with = and # in it\n"
                                           "detach = on");
    char line[300];
    snprintf(line, sizeof(line), "--config|%s|--stores=4", path);
    setenv("HCATTN_STORES", "3", 1);
    setenv("HCATTN_SEED", "6", 1);
    setenv("HCATTN_VALUE_MEMORY", "1MiB", 1);
    setenv("HCATTN_POLICY", "", 1); /* as good as unset */
    struct options *options = parsed(line);
    assert_int_equal(options_u32(options, "stores"), 4);
    assert_int_equal(options_source(options, "stores"), OPTION_FROM_COMMAND_LINE);
    assert_int_equal(options_u64(options, "seed"), 6);
    assert_int_equal(options_source(options, "seed"), OPTION_FROM_ENVIRONMENT);
    assert_int_equal(options_bytes(options, "value-memory"), 1 << 20);
    assert_int_equal(options_duration_ms(options, "timeout"), 9000);
    assert_int_equal(options_source(options, "timeout"), OPTION_FROM_CONFIG);
    assert_string_equal(options_string(options, "model"), "/a file/with = and # in it");
    assert_true(options_flag(options, "detach"));
    assert_int_equal(options_choice(options, "policy"), 1);
    assert_string_equal(options_config_file(options), path);

    char *help = options_help(&table, options);
    assert_non_null(strstr(help, "{now 4, from the command line}"));
    assert_non_null(strstr(help, "{now 9s, from the configuration file}"));
    free(help);
    options_free(options);

    setenv("HCATTN_STORES", "many", 1);
    assert_refused("", "HCATTN_STORES: 'many' is not valid");
    unsetenv("HCATTN_STORES");
    unsetenv("HCATTN_SEED");
    unsetenv("HCATTN_VALUE_MEMORY");
    unsetenv("HCATTN_POLICY");

    setenv("HCATTN_CONFIG", path, 1);
    options = parsed("");
    assert_int_equal(options_u32(options, "stores"), 2);
    options_free(options);
    unsetenv("HCATTN_CONFIG");
}

static void what_repeats_is_kept_in_order(void **state)
{
    const char *path = write_config(state, "text = one\ntext = two\n");
    char line[300];
    struct options *options = parsed("");
    assert_int_equal(options_n_strings(options, "text"), 0);
    options_free(options);
    snprintf(line, sizeof(line), "--config|%s", path);
    options = parsed(line);
    assert_int_equal(options_n_strings(options, "text"), 2);
    assert_string_equal(options_string_at(options, "text", 0), "one");
    assert_string_equal(options_string_at(options, "text", 1), "two");
    assert_string_equal(options_string(options, "text"), "two");
    options_free(options);
    snprintf(line, sizeof(line), "--config|%s|--text|three|--text=|--text|five", path);
    options = parsed(line); /* the command line outranks the file */
    assert_int_equal(options_n_strings(options, "text"), 3);
    assert_string_equal(options_string_at(options, "text", 0), "three");
    assert_string_equal(options_string_at(options, "text", 1), "");
    assert_string_equal(options_string_at(options, "text", 2), "five");
    options_free(options);
}

static void a_bad_file_is_refused_with_its_line(void **state)
{
    static const char *const files[][2] = {
        {"stores = 2\nstroes = 3\n", "config:2: unknown option 'stroes'"},
        {"stores = x\n", "config:1: stores: 'x' is not valid"},
        {"\n\nstores\n", "config:3: expected 'name = value'"},
        {"stores = 2\nstores = 3\n", "config:2: 'stores' was given before"},
        {"= 3\n", "unknown option ''"},
        {"http-port = 80\n", "unknown option 'http-port'"},
    };
    char line[300];
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        snprintf(line, sizeof(line), "--config=%s", write_config(state, files[i][0]));
        assert_refused(line, files[i][1]);
    }
    char text[6000];
    memset(text, 'x', sizeof(text));
    text[sizeof(text) - 1] = '\0';
    snprintf(line, sizeof(line), "--config=%s", write_config(state, text));
    assert_refused(line, "config:1: line longer than");
    snprintf(line, sizeof(line), "--config=%s", helpers_path(state, "missing"));
    assert_refused(line, "No such file or directory");
    snprintf(line, sizeof(line), "--config=%s", (const char *)*state);
    assert_refused(line, "Is a directory");
}

static void one_file_and_environment_serve_all_programs(void **state)
{
    char line[300];
    snprintf(line, sizeof(line), "--config=%s", write_config(state, "http-port = 80\nstores = 2\n"));
    table.other_names = other_names;
    setenv("HCATTN_HTTP_PORT", "not even a number", 1);
    setenv("HCATTN_RUNTIME_DIR", "/x", 1);
    setenv("HCATTN_TEST_MODEL", "/x", 1);
    struct options *options = parsed(line);
    assert_int_equal(options_u32(options, "stores"), 2);
    options_free(options);
    setenv("HCATTN_STROES", "2", 1);
    assert_refused("", "unknown environment variable 'HCATTN_STROES'");
    table.other_names = NULL;
    options_free(parsed("")); /* without the names of the others nobody can tell */
    unsetenv("HCATTN_STROES");
    unsetenv("HCATTN_HTTP_PORT");
    unsetenv("HCATTN_RUNTIME_DIR");
    unsetenv("HCATTN_TEST_MODEL");
}

static void help_is_made_from_the_table(void **state)
{
    (void)state;
    struct options *options = parsed("--storse=2|--model|--help");
    assert_true(options_help_wanted(options));
    assert_false(options_version_wanted(options));
    options_free(options);
    options = parsed("--version");
    assert_true(options_version_wanted(options));
    options_free(options);
    options = parsed("--|--help"); /* no option any more */
    assert_false(options_help_wanted(options));
    options_free(options);

    char *help = options_help(&table, NULL);
    static const char *const parts[] = {"Usage: hcattn test [OPTION]... PROMPT|-\n",
                                        "\nTests.\n",
                                        "-m, --model FILE",
                                        "--value-memory SIZE",
                                        "memory of one store [512MiB]\n",
                                        "-d, --[no-]detach",
                                        "(full, mass, deviation) [mass]",
                                        "--config FILE",
                                        "-h, --help",
                                        "--version"};
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        if (!strstr(help, parts[i]))
            fail_msg("'%s' is not in\n%s", parts[i], help);
    }
    free(help);
}

static void the_runtime_directory_is_ours_alone(void **state)
{
    char path[OPTIONS_PATH_SIZE] = "untouched";
    struct stat status;
    setenv("HCATTN_RUNTIME_DIR", helpers_path(state, "from-variable"), 1);
    assert_int_equal(options_runtime_dir(helpers_path(state, "given//"), path, error), 0);
    assert_string_equal(path, helpers_path(state, "given"));
    assert_int_equal(stat(path, &status), 0);
    assert_int_equal(status.st_mode & 07777, 0700);
    assert_int_equal(options_runtime_dir(NULL, path, error), 0);
    assert_string_equal(path, helpers_path(state, "from-variable"));
    assert_int_equal(options_runtime_dir(NULL, path, error), 0); /* and again */
    unsetenv("HCATTN_RUNTIME_DIR");
    setenv("XDG_RUNTIME_DIR", *state, 1);
    assert_int_equal(options_runtime_dir(NULL, path, error), 0);
    assert_string_equal(path, helpers_path(state, "hcattn"));
    unsetenv("XDG_RUNTIME_DIR");

    strcpy(path, "untouched");
    assert_int_equal(chmod(helpers_path(state, "given"), 0750), 0);
    assert_int_equal(options_runtime_dir(helpers_path(state, "given"), path, error), -EPERM);
    assert_non_null(strstr(error, "open to others"));
    assert_int_equal(symlink(helpers_path(state, "hcattn"), helpers_path(state, "link")), 0);
    assert_int_equal(options_runtime_dir(helpers_path(state, "link"), path, error), -ENOTDIR);
    assert_int_equal(options_runtime_dir("/proc/self/exe", path, error), -ENOTDIR);
    assert_int_equal(options_runtime_dir(helpers_path(state, "no/parent"), path, error), -ENOENT);
    assert_non_null(strstr(error, "No such file"));
    char other[] = "/proc";
    if (geteuid() != 0)
        assert_int_equal(options_runtime_dir(other, path, error), -EPERM);
    assert_string_equal(path, "untouched");
}

static void a_long_runtime_directory_is_refused_before_a_socket_is(void **state)
{
    /* the longest that leaves room for "/", 24 characters and the closing NUL */
    char given[200], path[OPTIONS_PATH_SIZE];
    size_t longest = 108 - 1 - OPTIONS_SOCKET_NAME_MAX - 1;
    size_t length = (size_t)snprintf(given, sizeof(given), "%s/", (const char *)*state);
    memset(given + length, 'd', sizeof(given) - length);
    given[longest + 1] = '\0';
    assert_int_equal(options_runtime_dir(given, path, error), -ENAMETOOLONG);
    assert_non_null(strstr(error, "too long"));
    given[longest] = '\0';
    assert_int_equal(options_runtime_dir(given, path, error), 0);
    assert_string_equal(path, given);
}

#define WITH_FOLDER(test) cmocka_unit_test_setup_teardown(test, helpers_folder, helpers_remove_folder)

static void an_empty_variable_of_others_says_something(void **state)
{
    (void)state;
    unsetenv("OF_OTHERS");
    assert_null(options_environment_of_others("OF_OTHERS"));
    setenv("OF_OTHERS", "", 1);
    assert_string_equal(options_environment_of_others("OF_OTHERS"), "");
    assert_null(options_environment("OF_OTHERS"));
    setenv("OF_OTHERS", "0,1", 1);
    assert_string_equal(options_environment_of_others("OF_OTHERS"), "0,1");
    unsetenv("OF_OTHERS");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_are_values),
        cmocka_unit_test(every_form_of_the_command_line_is_read),
        cmocka_unit_test(units_are_read),
        cmocka_unit_test(a_memory_is_a_size_or_a_percentage),
        cmocka_unit_test(bad_values_are_refused_in_one_line),
        cmocka_unit_test(a_bad_command_line_is_refused_in_one_line),
        WITH_FOLDER(the_order_is_line_environment_file_default),
        WITH_FOLDER(what_repeats_is_kept_in_order),
        WITH_FOLDER(a_bad_file_is_refused_with_its_line),
        WITH_FOLDER(one_file_and_environment_serve_all_programs),
        cmocka_unit_test(help_is_made_from_the_table),
        cmocka_unit_test(an_empty_variable_of_others_says_something),
        WITH_FOLDER(the_runtime_directory_is_ours_alone),
        WITH_FOLDER(a_long_runtime_directory_is_refused_before_a_socket_is),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
