/* key_file.c - see key_file.h. */
#include "common/key_file.h"
#include "common/file.h"
#include "common/random.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_BYTES ((size_t)16 << 20)
#define PATH_SIZE 4096

static const char secret_mark[] = "secret", public_mark[] = "public"; /* first word of the comment that we write */

__attribute__((format(printf, 3, 4))) static int fail(int result, char error[KEY_FILE_ERROR_SIZE], const char *format,
                                                      ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error, KEY_FILE_ERROR_SIZE, format, arguments);
    va_end(arguments);
    return result;
}

/* ---- reading ---- */

/* The whole file and a NUL. */
static int read_text(const char *path, char **ret_text, mode_t *ret_mode, char error[KEY_FILE_ERROR_SIZE])
{
    struct stat status;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* nothing to wait for in a file; a fifo would */
    if (fd < 0)
        return fail(-errno, error, "cannot read %s: %s", path, strerror(errno));
    int result = 0;
    char *text = NULL;
    if (fstat(fd, &status) < 0)
        result = fail(-errno, error, "cannot read %s: %s", path, strerror(errno));
    else if (!S_ISREG(status.st_mode))
        result = fail(-EINVAL, error, "%s is no file", path);
    else if ((size_t)status.st_size > MAX_BYTES)
        result = fail(-EFBIG, error, "%s is too large for a file of keys", path);
    else if (!(text = calloc(1, (size_t)status.st_size + 1)))
        result = fail(-ENOMEM, error, "%s: out of memory", path);
    else if ((result = file_read_all(fd, text, (size_t)status.st_size)) < 0)
        fail(result, error, "cannot read %s: %s", path, strerror(-result));
    else if (strlen(text) != (size_t)status.st_size)
        result = fail(-EINVAL, error, "%s is no text", path);
    close(fd);
    if (result) {
        free(text);
        return result;
    }
    *ret_text = text;
    *ret_mode = status.st_mode;
    return 0;
}

struct line {
    const char *key; /* NULL: a comment, or empty */
    const char *mark;
};

/* Cuts a line in its words. -EINVAL: no key. */
static int split(char *text, struct line *ret_line)
{
    static const char blanks[] = " \t\r";
    char *key = text + strspn(text, blanks);
    char *end = key + strcspn(key, blanks);
    char *mark = end + strspn(end, blanks);
    bool comment = *key == '#' || *key == '\0';
    *end = '\0';
    mark[strcspn(mark, blanks)] = '\0';
    if (!comment && !socket_is_key(key)) /* of which none begins with '#': its first word would be beyond 32 bits */
        return -EINVAL;
    *ret_line = (struct line){.key = comment ? NULL : key, .mark = mark};
    return 0;
}

static int read_list(const char *path, bool secret, struct key_list *ret_list, char error[KEY_FILE_ERROR_SIZE])
{
    char *text = NULL;
    mode_t mode = 0;
    int result = read_text(path, &text, &mode, error);
    if (result)
        return result;
    const char *kind = secret ? secret_mark : public_mark, *other = secret ? public_mark : secret_mark;
    struct key_list list = {.n_keys = 0};
    unsigned number = 0;
    for (char *rest = text, *at; !result && (at = strsep(&rest, "\n"));) {
        struct line line = {.key = NULL};
        number++;
        if (split(at, &line) < 0) {
            result = fail(-EINVAL, error, "%s, line %u: this is no key (40 characters of Z85)", path, number);
        } else if (line.key && strcmp(line.mark, other) == 0) {
            result =
                fail(-EINVAL, error, "%s, line %u: this is a %s key; a %s one is needed", path, number, other, kind);
        } else if (line.key && list.n_keys == KEY_FILE_MAX_KEYS) {
            result = fail(-E2BIG, error, "%s holds more than %u keys", path, KEY_FILE_MAX_KEYS);
        } else if (line.key) {
            /* Doubles: 1, 2, 4, ... */
            bool full = (list.n_keys & (list.n_keys - 1)) == 0;
            void *keys =
                full ? realloc(list.keys, (list.n_keys ? 2 * list.n_keys : 1) * sizeof(*list.keys)) : list.keys;
            if (!keys) {
                result = fail(-ENOMEM, error, "%s: out of memory", path);
                break;
            }
            list.keys = keys;
            memcpy(list.keys[list.n_keys++], line.key, SOCKET_KEY_SIZE);
        }
    }
    free(text);
    if (!result && list.n_keys == 0)
        result = fail(-EINVAL, error, "%s holds no key", path);
    if (!result && secret && (mode & (S_IWGRP | S_IRWXO)))
        result = fail(-EPERM, error, "%s holds a secret key and is open to others: chmod 600 %s", path, path);
    if (result) {
        free(list.keys);
        return result;
    }
    *ret_list = list;
    return 0;
}

static int read_one(const char *path, bool secret, char ret_key[SOCKET_KEY_SIZE], char error[KEY_FILE_ERROR_SIZE])
{
    struct key_list list;
    int result = read_list(path, secret, &list, error);
    if (result)
        return result;
    if (list.n_keys == 1)
        memcpy(ret_key, list.keys[0], SOCKET_KEY_SIZE);
    else
        result = fail(-EINVAL, error, "%s holds %zu keys; one is needed", path, list.n_keys);
    free(list.keys);
    return result;
}

int key_file_secret(const char *path, char ret_key[SOCKET_KEY_SIZE], char error[KEY_FILE_ERROR_SIZE])
{
    return read_one(path, true, ret_key, error);
}

int key_file_public(const char *path, char ret_key[SOCKET_KEY_SIZE], char error[KEY_FILE_ERROR_SIZE])
{
    return read_one(path, false, ret_key, error);
}

int key_file_list(const char *path, struct key_list *ret_list, char error[KEY_FILE_ERROR_SIZE])
{
    return read_list(path, false, ret_list, error);
}

/* ---- making ---- */

/* Whole, or not there: written beside it, then given its name, which fails where that is taken. */
static int write_key(const char *path, const char *key, const char *mark, const char *name, mode_t mode,
                     char error[KEY_FILE_ERROR_SIZE])
{
    char beside[PATH_SIZE + 32], line[SOCKET_KEY_SIZE + PATH_SIZE];
    snprintf(beside, sizeof(beside), "%s.%016llx", path, (unsigned long long)random_u64());
    int n = snprintf(line, sizeof(line), "%s %s key %s\n", key, mark, name);
    int fd = open(beside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return fail(-errno, error, "cannot write %s: %s", path, strerror(errno));
    int result = file_write_all(fd, line, (size_t)n);
    if (!result && (fchmod(fd, mode) < 0 || fsync(fd) < 0))
        result = -errno;
    close(fd);
    if (!result && link(beside, path) < 0)
        result = -errno;
    unlink(beside);
    if (result == -EEXIST)
        return fail(result, error, "%s exists; a key is never replaced: remove it, or choose another name", path);
    return result ? fail(result, error, "cannot write %s: %s", path, strerror(-result)) : 0;
}

int key_file_make(const char *base, char ret_public[SOCKET_KEY_SIZE], char error[KEY_FILE_ERROR_SIZE])
{
    char public_path[PATH_SIZE], secret_path[PATH_SIZE], public[SOCKET_KEY_SIZE], secret[SOCKET_KEY_SIZE];
    const char *slash = strrchr(base, '/');
    const char *name = slash ? slash + 1 : base;
    if (*name == '\0' || strpbrk(name, "\n\r"))
        return fail(-EINVAL, error, "'%s' is no name for a pair of keys", base);
    int n = snprintf(public_path, sizeof(public_path), "%s.public", base);
    int m = snprintf(secret_path, sizeof(secret_path), "%s.secret", base);
    if (n < 0 || m < 0 || (size_t)n >= sizeof(public_path) || (size_t)m >= sizeof(secret_path))
        return fail(-ENAMETOOLONG, error, "the name of the keys is too long");
    int result = socket_make_keys(public, secret);
    if (result == -EOPNOTSUPP)
        return fail(result, error, "this libzmq was built without CURVE: there can be no keys");
    if (result)
        return fail(result, error, "cannot make keys: %s", strerror(-result));
    result = write_key(secret_path, secret, secret_mark, name, 0600, error);
    if (result)
        return result;
    result = write_key(public_path, public, public_mark, name, 0644, error);
    if (result) {
        unlink(secret_path); /* ours: there was none before */
        return result;
    }
    memcpy(ret_public, public, sizeof(public));
    return 0;
}
