/*
 * cuda_graphs.h - parts of a step that are asked for alike, step after step, as graphs: one launch instead of many.
 *
 * Place      where in a step a list of commands is played: the part's number, the how manyth play of that part, and which of the
 *            two stages has what was staged for it. Each place remembers what was played there last.
 * Life       a list that equals the last one of its place (functions, arguments, bytes of what is staged: byte by byte) is
 *            captured into a graph, which plays it from then on. Another list is launched command by command, and takes the
 *            place of the graph when it comes twice in a row. What cannot be captured is launched plainly, and not tried again.
 * Commands   launch on the back end's stream, depend on their arguments alone and have no other effect (others are written down by
 *            CUDA_COMMAND_PLAIN); what they read of host memory is pinned. Memory that a
 *            graph names and that was freed is harmless: a list with its address comes again only if the address is given out
 *            again. Weights are read when a command runs, so cuda_graphs_forget() comes before one is freed.
 *
 * Owner      the back end. Threads: its own.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

struct backend;

enum {
    CUDA_GRAPHS_N_PARTS = 1024, /* numbers of parts below it can have graphs */
    CUDA_GRAPHS_N_PLAYS = 4,    /* of one part */
    CUDA_GRAPHS_N_STAGES = 2,
    CUDA_GRAPHS_MAX_GRAPHS = 2048,      /* that live; other lists are launched plainly */
    CUDA_GRAPHS_MAX_BYTES = 128u << 10, /* of a list: longer ones (prefill) are launched plainly */
};

struct cuda_graphs_place {
    uint32_t part, play, stage; /* part 0: none, no graphs */
};

struct cuda_graphs_counts {
    uint32_t n_graphs;     /* that live */
    uint64_t n_captures;   /* in all */
    uint64_t n_recaptures; /* those in the place of another graph */
    uint64_t n_replays;    /* launches of a graph that was there */
    uint64_t n_plain;      /* plays, of parts, command by command */
    uint64_t n_refused;    /* captures that failed */
    char note[160];        /* the last one of these: the call and CUDA's words; empty: none failed */
};

/* backend->graphs. -ENOMEM. */
int cuda_graphs_new(struct backend *backend);
void cuda_graphs_free(struct backend *backend); /* accepts that there are none */

/* None lives any more; places begin anew. */
void cuda_graphs_forget(struct backend *backend);
/* With false: all is launched plainly, as if nothing could be captured. At start: true. */
void cuda_graphs_allow(struct backend *backend, bool allow);
const struct cuda_graphs_counts *cuda_graphs_counts(const struct backend *backend);

/*
 * Plays a list by a graph; launch() launches it command by command and names the one that fails. Returns false if the caller has
 * to launch it. A failure of the graph's launch is the back end's (cuda_commands_failed()), and true.
 */
typedef cudaError_t cuda_graphs_launch(struct backend *backend, const char **ret_name);
bool cuda_graphs_play(struct backend *backend, const struct cuda_graphs_place *place, const void *list, size_t n_bytes,
                      cuda_graphs_launch *launch);
