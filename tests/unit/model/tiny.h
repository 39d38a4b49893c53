/* tiny.h - models of tests/models/make-tiny, and files made of bytes, for the tests of this folder. */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

/* A file in memory; its path opens it again. Close fd to free it. */
struct tiny_file {
    int fd;
    char path[64];
};

static inline struct tiny_file tiny_file(const void *bytes, size_t n_bytes)
{
    struct tiny_file file = {.fd = memfd_create("tiny", 0)};
    assert_true(file.fd >= 0);
    if (n_bytes)
        assert_int_equal(write(file.fd, bytes, n_bytes), (ssize_t)n_bytes);
    snprintf(file.path, sizeof file.path, "/proc/self/fd/%d", file.fd);
    return file;
}

/* make-tiny once for many models (starting Python is what takes time): options[i] -> files[i], to be closed. */
static inline void tiny_models(const char *const *options, size_t n, struct tiny_file *files)
{
    FILE *batch = popen("tests/models/make-tiny --batch", "w");
    assert_non_null(batch);
    for (size_t i = 0; i < n; i++) {
        files[i] = tiny_file(NULL, 0);
        fprintf(batch, "%s /proc/%d/fd/%d\n", options[i], (int)getpid(), files[i].fd);
    }
    assert_int_equal(pclose(batch), 0);
}

static inline struct tiny_file tiny_model(const char *options)
{
    struct tiny_file file;
    tiny_models(&options, 1, &file);
    return file;
}

/* All bytes of a file; the caller frees them. */
static inline uint8_t *tiny_bytes(const struct tiny_file *file, size_t *ret_n)
{
    off_t n = lseek(file->fd, 0, SEEK_END);
    assert_true(n > 0);
    uint8_t *bytes = malloc((size_t)n);
    assert_non_null(bytes);
    assert_int_equal(pread(file->fd, bytes, (size_t)n, 0), n);
    *ret_n = (size_t)n;
    return bytes;
}

/* Reproducible numbers for fuzz loops. */
static inline uint32_t tiny_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (uint32_t)(*state >> 32);
}

/* One line, with something in it. */
static inline void tiny_check_message(const char *error)
{
    assert_true(error[0] != 0);
    assert_null(strchr(error, '\n'));
}
