/* test_names.c - common/option_names.c against what every program says in its --help. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/option_names.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const programs[] = {
    "hcattn up",       "hcattn down",    "hcattn status",     "hcattn sessions", "hcattn generate",  "hcattn chat",
    "hcattn tokenize", "hcattn score",   "hcattn fork",       "hcattn policy",   "hcattn transport", "hcattn drain",
    "hcattn eval",     "hcattn profile", "hcattn statistics", "hcattn codebook", "hcattn keys",      "hcattn run",
    "hc-coordinator",  "hc-value-store", "hc-gpu-worker"};

/* Calls visit() for every option named in the lines of a --help: "  -m, --model FILE", "      --[no-]json". */
static unsigned for_each_name(const char *program, void (*visit)(const char *name, void *context), void *context)
{
    char command[512], line[512];
    unsigned n = 0;
    snprintf(command, sizeof(command), "%s/%s --help", PROGRAMS_DIRECTORY, program);
    FILE *help = popen(command, "r");
    assert_non_null(help);
    while (fgets(line, sizeof(line), help)) {
        char *name = line + strspn(line, " ");
        if (name == line || *name != '-')
            continue;
        name = strstr(name, "--");
        if (!name)
            continue;
        name += 2;
        if (strncmp(name, "[no-]", 5) == 0)
            name += 5;
        name[strcspn(name, " \n")] = '\0';
        visit(name, context);
        n++;
    }
    assert_int_equal(pclose(help), 0);
    return n;
}

static bool in_every_table(const char *name)
{
    return strcmp(name, "help") == 0 || strcmp(name, "version") == 0 || strcmp(name, "config") == 0;
}

static void check_listed(const char *name, void *context)
{
    bool listed = in_every_table(name);
    for (size_t i = 0; option_names_all[i]; i++)
        listed |= strcmp(option_names_all[i], name) == 0;
    if (!listed)
        fail_msg("%s has --%s, which is not in common/option_names.c", (const char *)context, name);
}

static void test_every_option_is_listed(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(programs) / sizeof(programs[0]); i++)
        assert_true(for_each_name(programs[i], check_listed, (void *)programs[i]) >= 4);
}

static void note(const char *name, void *context)
{
    bool *seen = context;
    for (size_t i = 0; option_names_all[i]; i++)
        seen[i] |= strcmp(option_names_all[i], name) == 0;
}

static void test_nothing_else_is_listed(void **state)
{
    (void)state;
    bool seen[256] = {false};
    for (size_t i = 0; i < sizeof(programs) / sizeof(programs[0]); i++)
        for_each_name(programs[i], note, seen);
    for (size_t i = 0; option_names_all[i]; i++) {
        if (!seen[i])
            fail_msg("no program has --%s", option_names_all[i]);
    }
}

/* One file for all of them, and one environment; a name that nobody has is refused by each. */
static void test_one_file_serves_all(void **state)
{
    (void)state;
    char path[] = "/tmp/hcattn-test-XXXXXX", command[512];
    int fd = mkstemp(path);
    static const char good[] = "# everything\nstores = 2\nmemory = 1GiB\ntemperature = 0.5\nmodel = /m.gguf\n";
    static const char bad[] = "storse = 3\n";
    assert_int_equal(write(fd, good, sizeof(good) - 1), sizeof(good) - 1);
    for (size_t i = 0; i < sizeof(programs) / sizeof(programs[0]); i++) {
        snprintf(command, sizeof(command), "%s/%s --config %s --no-such-option 2>&1 | grep -q no-such-option",
                 PROGRAMS_DIRECTORY, programs[i], path);
        assert_int_equal(system(command), 0); /* the file was fine: what is told is the next mistake */
    }
    assert_int_equal(write(fd, bad, sizeof(bad) - 1), sizeof(bad) - 1);
    for (size_t i = 0; i < sizeof(programs) / sizeof(programs[0]); i++) {
        snprintf(command, sizeof(command), "%s/%s --config %s 2>&1 | grep -q storse", PROGRAMS_DIRECTORY, programs[i],
                 path);
        assert_int_equal(system(command), 0);
        snprintf(command, sizeof(command), "HCATTN_STORSE=3 %s/%s 2>&1 | grep -q HCATTN_STORSE", PROGRAMS_DIRECTORY,
                 programs[i]);
        assert_int_equal(system(command), 0);
    }
    close(fd);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_option_is_listed),
        cmocka_unit_test(test_nothing_else_is_listed),
        cmocka_unit_test(test_one_file_serves_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
