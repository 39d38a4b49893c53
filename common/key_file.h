/*
 * key_file.h - CURVE keys in files: made, read, listed.
 *
 * Files      lines "KEY comment", KEY being 40 characters of Z85; empty lines and those that begin with '#' are comments. A pair is
 *            BASE.secret (mode 0600, one key) and BASE.public; .public files put together make a list.
 * Errors     negative errno, with one sentence that names the file.
 * Threads    any.
 */
#pragma once

#include "common/socket_keys.h"

#define KEY_FILE_ERROR_SIZE 512
#define KEY_FILE_MAX_KEYS   65536

/* Both files appear whole or not at all. -EEXIST: one of them is there; it is never replaced. */
int key_file_make(const char *base, char ret_public[SOCKET_KEY_SIZE], char error[KEY_FILE_ERROR_SIZE]);

/* The only key of a file. -EINVAL: it holds none, or more, or one of the other kind; -EPERM: a secret one that others may read. */
int key_file_secret(const char *path, char ret_key[SOCKET_KEY_SIZE], char error[KEY_FILE_ERROR_SIZE]);
int key_file_public(const char *path, char ret_key[SOCKET_KEY_SIZE], char error[KEY_FILE_ERROR_SIZE]);

struct key_list {
    size_t n_keys;
    char (*keys)[SOCKET_KEY_SIZE]; /* malloc'd */
};

/* Public keys. -EINVAL: a line that is none, or no key at all. */
int key_file_list(const char *path, struct key_list *ret_list, char error[KEY_FILE_ERROR_SIZE]);
