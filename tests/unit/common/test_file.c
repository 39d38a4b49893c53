/* test_file.c - whole reads and writes: through a pipe, which takes and gives less at a time than is asked for. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/file.h"

enum { N_BYTES = 300000 };

static uint8_t sent[N_BYTES], got[N_BYTES + 1];

static void *send_all(void *fd)
{
    int r = file_write_all(*(const int *)fd, sent, N_BYTES);
    close(*(const int *)fd);
    return (void *)(intptr_t)r;
}

static void all_of_it(void **state)
{
    int ends[2];
    pthread_t thread;
    void *result;
    (void)state;
    for (size_t i = 0; i < N_BYTES; i++)
        sent[i] = (uint8_t)(i * 31 + i / 251);
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(pthread_create(&thread, NULL, send_all, &ends[1]), 0);
    assert_int_equal(file_read_all(ends[0], got, N_BYTES), 0);
    assert_memory_equal(got, sent, N_BYTES);
    assert_int_equal(pthread_join(thread, &result), 0);
    assert_int_equal((intptr_t)result, 0);
    assert_int_equal(file_read_all(ends[0], got, 1), -EBADMSG); /* it ends before */
    assert_int_equal(file_read_all(ends[0], got, 0), 0);
    close(ends[0]);
}

static void what_fails_says_why(void **state)
{
    (void)state;
    uint8_t byte = 0;
    assert_int_equal(file_read_all(-1, &byte, 1), -EBADF);
    assert_int_equal(file_write_all(-1, &byte, 1), -EBADF);
    int full = open("/dev/full", O_WRONLY);
    assert_true(full >= 0);
    assert_int_equal(file_write_all(full, &byte, 1), -ENOSPC);
    close(full);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_of_it),
        cmocka_unit_test(what_fails_says_why),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
