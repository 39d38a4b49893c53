/*
 * copying.h - an order to copy blocks, of another session or out of another store's segment, carried out block by block.
 *
 * Owner      the working thread, not in its turn: every block is a turn of its own, and between two of them the server looks
 *            at its sockets. No other order is carried out meanwhile, so blocks and segment are the same until the end.
 * Errors     come with a sentence that names the blocks; all blocks are checked before the first is copied.
 */
#pragma once

#include "value-store/store.h"

struct copying;

struct copying_order {
    uint64_t sequence; /* of the order, for the answer */
    bool imports;
    uint64_t from_session; /* of a copy */
    uint32_t from_store;   /* of an import */
    int segment_fd;        /* the same; -1: none came. Stays the caller's */
    uint64_t session;      /* that gets the blocks */
    const struct blocks_copy *blocks;
    size_t n_blocks;
};

/* -EINVAL: one session ...: errors of blocks_copy_check(), blocks_import_open(), blocks_import_check(), segment_map();
 * -EBADF: no descriptor; -ELOOP: out of this store itself; -ENOMEM. */
int copying_begin(struct store *store, const struct copying_order *order, struct copying **ret_copying,
                  char sentence[STORE_SENTENCE]);

/* The next block. 1: there are more; 0: that was the last one, and `sentence` is a line for the log, or empty; or an error. */
int copying_step(struct copying *copying, char sentence[STORE_SENTENCE]);

uint64_t copying_sequence(const struct copying *copying);
struct copying *copying_end(struct copying *copying); /* accepts NULL, returns NULL; what was copied stays */
