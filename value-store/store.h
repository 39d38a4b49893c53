/*
 * store.h - one store's means: its node, its threads, its segment and the blocks in it.
 *
 * Owner      the working thread, which is the one that called store_open() (binding is a thread's own).
 * Threads    blocks, aggregate, pool and progress.busy belong to whose turn it is: store_serve() takes the turn itself, the
 *            coordinator's orders are carried out in a turn (control.c). Changing the segment needs all rings stopped.
 * Errors     come with a sentence for people: it travels to the coordinator and is logged by the server.
 */
#pragma once

#include "common/pool.h"
#include "common/segment.h"
#include "common/topology.h"
#include "kernels/kernels.h"
#include "value-store/aggregate.h"
#include "value-store/blocks.h"
#include "value-store/placement.h"
#include "value-store/progress.h"
#include "value-store/request.h"
#include "value-store/turn.h"

#define STORE_SENTENCE 256

enum store_huge { STORE_HUGE_TRY, STORE_HUGE_REQUIRE, STORE_HUGE_OFF };

struct store_config {
    uint64_t incarnation;
    uint32_t index;
    uint64_t memory_bytes;   /* largest segment; 0: by the percentage */
    uint32_t memory_percent; /* of the control group's limit or the node's memory (budget.h) */
    bool memory_fits;        /* less than that is fine when less is free */
    bool has_node;
    uint32_t node; /* the kernel's number; without has_node one of those with memory and cpus, by the store's index */
    uint32_t n_threads; /* 0: as many as the node has cpus for us */
    enum kernels_isa isa;
    enum store_huge huge_pages;
    bool strict_numa; /* threads and memory are bound, or the store does not start */
    bool has_spin;
    uint32_t spin_us; /* of rings that wait; without has_spin: by the number of cpus */
};

struct store {
    struct store_config config;
    struct topology *topology;
    const struct kernels *kernels;
    struct pool *pool;
    struct aggregate *aggregate;
    struct turn turn;
    struct progress progress;
    uint32_t node; /* index in the topology */
    uint32_t n_threads;
    uint32_t spin_us;
    int threads_bound; /* result of binding */
    int memory_right;  /* result of binding a page for trial */
    int memory_bound;  /* -EALREADY: no segment yet */
    uint64_t huge_bytes;
    int stop_fd; /* readable: formatting is given up; -1: nobody will ask for that */

    int segment_fd; /* -1: no segment; kept to show it to a new coordinator */
    struct segment_mapping mapping;
    struct placement *placement;
    struct blocks *blocks; /* NULL: no segment */
};

/* Binds the calling thread, starts the pool. -ENOENT: no such node; -ENOTSUP: this CPU lacks the instruction set; -EPERM:
 * strict, and something could not be bound; -ENOSPC: no memory that a percentage could be of; -ENOMEM, -EAGAIN, -EIO. Not
 * strict, that binding was not permitted is no error: store_describe() says it. */
int store_open(const struct store_config *config, struct store **ret_store, char sentence[STORE_SENTENCE]);
struct store *store_close(struct store *store); /* accepts NULL, returns NULL */

/* Around work on blocks and segment. Answers are sent after the turn, since the coordinator may be slow to read. */
void store_begin_turn(struct store *store, const char *phase); /* a literal */
void store_end_turn(struct store *store);

/* A new segment in place of what there was: as many blocks of this shape as fit into memory_bytes.
 * -EINVAL: shape; -ENOSPC: not one block fits; -ENOMEM: also huge pages that are required and not there; -ECANCELED: by
 * stop_fd. */
int store_format(struct store *store, const struct row_shape *shape, char sentence[STORE_SENTENCE]);

/* Takes over a dead store's segment; the descriptor becomes the store's own on success only. Errors of segment_map() and
 * blocks_adopt(); what there was is kept then. */
int store_adopt(struct store *store, int fd, struct blocks_adoption *ret_adoption, char sentence[STORE_SENTENCE]);

/* The number of the node it belongs to, bound or not. */
uint32_t store_home_node(const struct store *store);
uint32_t store_node_cores(const struct store *store); /* of them, as far as we may use them */

/* The node's number if the memory (without a segment: the threads) could be bound to it, else -1. */
int32_t store_numa_node(const struct store *store);

/* Serves one slot in a turn, counted and shown in the progress. The store has a segment. */
void store_serve(struct store *store, const struct request_slot *slot, struct request_result *ret_result);

/* "node 0, 2 cpus, threads bound, memory bound; 2 threads, kernels avx2, rings do not spin; segment 1.0 GiB, 723 blocks of 1.4 MiB, no huge pages" */
const char *store_describe(const struct store *store, char *text, size_t size);
