/*
 * cuda_visible.h - why no device can be seen: what CUDA_VISIBLE_DEVICES and the machine say. The runtime interprets the variable;
 * this only explains what came of it.
 *
 * Of the variable (as the runtime reads it): numbers of devices, UUIDs ("GPU-8932f937", as much of one as tells it from others)
 * and MIG instances ("MIG-..."), separated by commas. The list ends at the first entry that names none; one that names a device
 * twice, or that is empty, names none at all.
 *
 * Threads    any.
 */
#pragma once

#include <stddef.h>

/* Devices of which the driver has a folder in `folder` (/proc/driver/nvidia/gpus); -1: it is not there. */
int cuda_visible_count(const char *folder);

/* Entries of the variable's list, 0 for an empty one; NULL: unset, -1. */
int cuda_visible_n_named(const char *visible);

/* One sentence without an end: why the runtime shows no device. visible: the variable, NULL if it is not set; n_devices: as
 * cuda_visible_count(). Returns text. */
const char *cuda_visible_explain(const char *visible, int n_devices, char *text, size_t text_size);
