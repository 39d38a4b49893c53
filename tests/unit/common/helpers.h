/*
 * helpers.h - what several tests of common need.
 */
#pragma once

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>

#include <cmocka.h>

int helpers_folder(void **state); /* cmocka set-up: *state becomes the path of a new directory */
int helpers_remove_folder(void **state);

/* "FOLDER/NAME", valid until the fourth next call. */
const char *helpers_path(void **state, const char *name);

/* Open descriptors of this process: to see that nothing leaked. */
int helpers_n_descriptors(void);

/* Runs body() in a child process with quiet stderr; returns its wait status. */
int helpers_in_child(void (*body)(void));
