/* test_log.c - the form of a line, what is cut and cleaned, and lines of many threads that stay whole. */
#include "common/log.h"
#include "tests/unit/common/helpers.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int saved_stderr;

static void capture(void **state)
{
    int fd = open(helpers_path(state, "log"), O_CREAT | O_TRUNC | O_WRONLY | O_APPEND, 0600);
    assert_true(fd >= 0);
    fflush(stderr);
    saved_stderr = dup(2);
    dup2(fd, 2);
    close(fd);
}

/* Ends the capture; the text is to be freed. */
static char *captured(void **state)
{
    dup2(saved_stderr, 2);
    close(saved_stderr);
    FILE *file = fopen(helpers_path(state, "log"), "re");
    assert_non_null(file);
    char *text = NULL;
    size_t size = 0;
    if (getdelim(&text, &size, '\0', file) < 0)
        text[0] = '\0';
    fclose(file);
    return text;
}

static void assert_matches(const char *text, const char *pattern)
{
    regex_t regex;
    assert_int_equal(regcomp(&regex, pattern, REG_EXTENDED | REG_NOSUB), 0);
    int result = regexec(&regex, text, 0, NULL, 0);
    regfree(&regex);
    if (result != 0)
        fail_msg("'%s' does not match %s", text, pattern);
}

#define TIME "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\\.[0-9]{3}Z"

static void a_line_has_time_level_program_and_id(void **state)
{
    capture(state);
    log_open("hc-test", LOG_LEVEL_INFO);
    log_set_id("3");
    errno = ENOENT;
    LOG_INFO("%d rows: %m", 12);
    assert_int_equal(errno, ENOENT);
    char *text = captured(state);
    assert_matches(text, "^" TIME " info    hc-test\\[[0-9]+/3\\] 12 rows: No such file or directory\n$");
    free(text);
    capture(state);
    log_set_id(NULL);
    LOG_ERROR("x");
    text = captured(state);
    assert_matches(text, "^" TIME " error   hc-test\\[[0-9]+\\] x\n$");
    free(text);
}

static int evaluations;

static int evaluate(void)
{
    return ++evaluations;
}

static void lower_levels_are_silent(void **state)
{
    capture(state);
    log_open("hc-test", LOG_LEVEL_WARNING);
    LOG_INFO("not this");
    LOG_DEBUG("nor this %d", evaluate());
    LOG_WARNING("but this");
    char *text = captured(state);
    assert_matches(text, "^[^\n]* but this\n$");
    assert_int_equal(evaluations, 0); /* debug lines in hot code cost a comparison */
    assert_false(log_enabled(LOG_LEVEL_INFO));
    assert_true(log_enabled(LOG_LEVEL_ERROR));
    free(text);
}

static void a_message_cannot_forge_a_line(void **state)
{
    capture(state);
    log_open("hc-test", LOG_LEVEL_INFO);
    LOG_INFO("a\nb\x1b[31m\x7f na\xC3\xAFve");
    char *text = captured(state);
    assert_matches(text, "^[^\n]*\\] a\\?b\\?\\[31m\\? na\xC3\xAFve\n$");
    free(text);
}

static void a_long_line_is_cut_between_characters(void **state)
{
    log_open("a-program-with-a-name-that-is-longer-than-sixty-three-characters-by-far", LOG_LEVEL_INFO);
    for (int shift = 0; shift < 4; shift++) {
        capture(state);
        char message[4001];
        memset(message, 'x', 4);
        for (int i = shift; i + 4 <= 4000; i += 4)
            memcpy(message + i, "\xF0\x9F\x98\x80", 4);
        message[4000] = '\0';
        memset(message + 4000 - (4000 - shift) % 4, 'x', (size_t)((4000 - shift) % 4));
        LOG_INFO("%s", message);
        char *text = captured(state);
        size_t length = strlen(text);
        assert_in_range(length, LOG_LINE_BYTES - 8, LOG_LINE_BYTES);
        assert_string_equal(text + length - 8, "\xF0\x9F\x98\x80...\n");
        free(text);
    }
}

#define N_THREADS 4
#define N_LINES   500

static void *write_lines(void *argument)
{
    for (int i = 0; i < N_LINES; i++)
        LOG_INFO("thread %c line %d %0*d end", *(const char *)argument, i, 1 + i % 300, 0);
    return NULL;
}

static void lines_of_threads_stay_whole(void **state)
{
    capture(state);
    log_open("hc-test", LOG_LEVEL_INFO);
    pthread_t threads[N_THREADS];
    const char *const names[] = {"a", "b", "c", "d"};
    for (int i = 0; i < N_THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, write_lines, (void *)(uintptr_t)names[i]), 0);
    for (int i = 0; i < N_THREADS; i++)
        pthread_join(threads[i], NULL);
    char *text = captured(state);
    int n_lines = 0, next[N_THREADS] = {0};
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"), n_lines++) {
        const char *message = strstr(line, "] thread ");
        char thread = 0;
        int number = -1, zeros = -1;
        assert_non_null(message);
        assert_int_equal(sscanf(message, "] thread %c line %d %*d e%n", &thread, &number, &zeros), 2);
        assert_true(zeros > 0 && strcmp(message + zeros, "nd") == 0);
        assert_int_equal(number, next[thread - 'a']++); /* in order within a thread */
    }
    assert_int_equal(n_lines, N_THREADS * N_LINES);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_line_has_time_level_program_and_id, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(lower_levels_are_silent, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(a_message_cannot_forge_a_line, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(a_long_line_is_cut_between_characters, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(lines_of_threads_stay_whole, helpers_folder, helpers_remove_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
