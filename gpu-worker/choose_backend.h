/*
 * choose_backend.h - which back end a worker takes: the one that --backend names, or for "auto" cuda where this build has it and
 * a device is there, otherwise cpu.
 *
 * Threads    main's, before it starts others.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "gpu-worker/backend/backend.h"

struct choose_backend {
    const struct backend_ops *ops;
    bool is_automatic;          /* cpu may be taken instead where it cannot be opened */
    char pci[BACKEND_PCI_SIZE]; /* where its device is; "": it has none, or does not say */
    /* Of auto, else "": "cuda: a device is there", "cpu: this build has no CUDA (-DHCATTN_CUDA=ON)". */
    char sentence[320];
    bool is_second_best; /* auto took cpu although there is a driver or device: worth a warning */
};

/*
 * `find`: backend_find(), or another for tests. `name` "auto", or one of find's. Errors as `locate` of backend.h, with a sentence
 * that does not repeat the name; -EINVAL: this build has no such back end.
 */
int choose_backend(const char *name, const struct backend_options *options,
                   const struct backend_ops *(*find)(const char *name), struct choose_backend *ret_choice, char *error,
                   size_t error_size);
