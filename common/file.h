/*
 * file.h - whole reads and writes on a descriptor.
 *
 * Threads    any, a descriptor belongs to one at a time.
 */
#pragma once

#include <stddef.h>

/* As many bytes as asked for. -EBADMSG: the file ends before; -errno. */
int file_read_all(int fd, void *bytes, size_t n_bytes);
int file_write_all(int fd, const void *bytes, size_t n_bytes);
