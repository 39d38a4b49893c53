/*
 * stores.h - the value-stores as a worker sees them: mapped segments, exchanges, slots.
 *
 * Owner      the engine. Threads: the engine thread only.
 * Invariant  what a segment's header says is checked once, at mapping, and copied: later reads use the copy. A block is
 *            reached only through a handle whose index is inside the segment.
 *            A slot is free, busy (a request waits for its answer) or quarantined (its deadline passed); a quarantined one is
 *            free again when the store's `answered` shows its request, or with the exchange when the store registers anew.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/segment.h"
#include "proto/layout.h"

enum { STORES_MAX = 256 /* whatever 8 bits of a lane table can name */, STORES_N_SLOTS = 6 };

enum slot_state { SLOT_FREE, SLOT_BUSY, SLOT_QUARANTINED };

struct store_slot {
    enum slot_state state;
    uint64_t request;
};

struct store {
    uint32_t number;
    bool is_up;    /* segment mapped */
    bool is_ready; /* exchange acknowledged: requests may be sent */
    bool has_ring; /* the coordinator has granted the exchange's ring */
    uint64_t incarnation;
    uint64_t route;
    struct segment_mapping segment; /* read-only */
    uint32_t n_blocks;
    uint64_t block_bytes;
    uint64_t blocks_offset;
    struct segment_mapping exchange;
    uint64_t shown_bytes;                /* of the exchange, which the device reaches by itself */
    uint32_t request_bytes, reply_bytes; /* of a slot */
    struct store_slot slots[STORES_N_SLOTS];
};

/* A device whose memory is not the host's, and which reads the exchanges: told of each, and again before it is unmapped. */
struct stores_device {
    size_t (*show)(void *context, void *memory,
                   size_t n_bytes); /* how many bytes it reaches; NULL: there is no such device */
    void (*hide)(void *context, void *memory, size_t n_bytes); /* it reads them no more when this returns */
    void *context;
};

struct stores {
    struct stores_device device; /* set behind stores_init(), before the first store */
    struct row_shape shape;
    uint64_t worker; /* incarnation */
    uint32_t request_bytes, reply_bytes;
    struct store *stores[STORES_MAX];
};

void stores_init(struct stores *stores, const struct row_shape *shape, uint64_t worker, uint32_t request_bytes,
                 uint32_t reply_bytes);
void stores_fini(struct stores *stores);

/*
 * A store serves under (incarnation, route): maps its segment (segment_fd stays the caller's) and makes a new exchange,
 * whose descriptor the caller sends to the store and closes. An earlier life of the store is unmapped.
 * -EPROTO: no segment of this layout; -EINVAL: rows of another shape, or number too large; -ENOMEM ...
 */
int stores_up(struct stores *stores, uint32_t number, uint64_t incarnation, uint64_t route, int segment_fd,
              int *ret_exchange_fd);
/* The store has mapped the exchange. False: of another life, ignored. */
bool stores_ready(struct stores *stores, uint32_t number, uint64_t incarnation);
/* Requests for it go by its ring from now on, or by descriptors. False: of another life, ignored. */
bool stores_use_ring(struct stores *stores, uint32_t number, uint64_t incarnation, bool ring);
/* Gone; its segment stays mapped for reading until the next life. */
void stores_down(struct stores *stores, uint32_t number, uint64_t incarnation);
/* Gone for good: unmapped as well. No run may read from it any more. */
void stores_remove(struct stores *stores, uint32_t number, uint64_t incarnation);
void stores_all_down(struct stores *stores);

/* NULL: unknown number. */
struct store *stores_get(struct stores *stores, uint32_t number);

/* A slot for `request`; -EAGAIN: none is free (quarantined ones that were answered meanwhile are taken back first). */
int stores_take_slot(struct store *store, uint64_t request, uint32_t *ret_slot);
void stores_free_slot(struct store *store, uint32_t slot);
void stores_quarantine_slot(struct store *store, uint32_t slot);
uint8_t *stores_request(const struct store *store, uint32_t slot);
struct reply_header *stores_reply(const struct store *store, uint32_t slot);
struct exchange_ring *stores_ring(const struct store *store);
/* Has the store answered `request` in this slot? What the reply says may then be read. */
bool stores_is_answered(const struct store *store, uint32_t slot, uint64_t request);
/* Puts a request on the ring and rings. */
void stores_post(struct store *store, uint32_t slot, uint64_t request, uint32_t n_bytes);

/* Header of a block; NULL: no such store or index, or the block does not belong to (generation, session, number). */
const struct block_header *stores_block(struct stores *stores, uint32_t number, struct block_handle handle,
                                        uint64_t session, uint32_t block_number);
/* Rows [64] of a block that stores_block() gave, and the sums of V over them (valid once they are all there). */
const float *stores_v_sums(const struct stores *stores, const struct block_header *block, uint32_t layer,
                           uint32_t kv_head);
const void *stores_rows(const struct stores *stores, const struct block_header *block, uint32_t layer,
                        uint32_t kv_head);
