/*
 * main_backend.h - the part of main.c that brings up the back end: chosen, its threads placed, opened; and what became of it.
 *
 * Owner      main. Threads: main's; setup functions run in the threads that they set up.
 * Order      the device is found before threads are started, so that all of them are near it.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "common/options.h"
#include "common/pool.h"
#include "common/topology.h"
#include "gpu-worker/backend/backend.h"
#include "gpu-worker/backend/nodes.h"

struct main_backend {
    const struct backend_ops *ops;
    struct backend *backend;
    struct topology *topology; /* NULL: could not be read */
    struct nodes *nodes;       /* NULL: weights are not split */
    int percent_local;         /* of split weights; -1: not known */
    struct pool *pool;
    uint32_t n_cpus; /* that our threads may run on */
    char near[96];   /* "near its device: node 1, 16 cpus", "device's node unknown: not bound"; "": it has no device */
};

/* Of the options backend, gpu, index, threads, weights-by-node. What goes wrong is logged: negative errno. `with`: zeroed. */
int main_backend_open(struct main_backend *with, const struct options *options, const struct kernels *kernels);
void main_backend_close(struct main_backend *with); /* zeroed, half open, open */

/* The engine's thread is thread 0 of the pool; the context is a struct main_backend. */
void main_backend_setup_engine_thread(void *context);
/* Threads that are started from now on are no threads of the pool. */
void main_backend_release_thread(const struct main_backend *with);

/* When all weights are there: logs where they lie, if they are split. */
void main_backend_tell_split(struct main_backend *with);

/* Bytes that may be used of the device: `asked` (0: all that it has for us), at most what it has, which is logged; 0: no limit
 * is known. */
uint64_t main_backend_budget(const struct main_backend *with, uint64_t asked);
/* Bytes that the device had for us when it was opened; 0: not known. */
uint64_t main_backend_capacity(const struct main_backend *with);

/* " split over 2 nodes (100 % local)"; "": they are not. Returns text. */
const char *main_backend_split(const struct main_backend *with, char *text, size_t text_size);
/* Where threads are: near, or "threads bound to nodes", "not bound". */
const char *main_backend_place(const struct main_backend *with);
