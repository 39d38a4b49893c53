/*
 * blocks.h - the blocks and session records of one segment: formatted or adopted, reserved, appended to, sealed, released.
 *
 * Owner      the value-store, only writer of its segment; coordinator and workers map it read-only.
 * Threads    everything that changes: the thread whose turn it is (turn.h). blocks_find() and reading what it returns: any
 *            thread that works for that one (pool).
 * Lifetime   a handle is valid from the reservation to the release of its block; later it is -ESTALE for ever, since the
 *            next life of the block has a greater generation and another session.
 * Invariant  free + open + sealed == n_blocks; n_rows of every layer <= n_ids (blocks_check()).
 *
 * Killed at any instruction, a store leaves a segment that blocks_adopt() takes over, because everything is written before
 * what makes it count:
 *     reserve   whole header, then state OPEN          append   ids, then n_ids; rows (and sums), then n_rows
 *     release   state FREE, nothing else               seal     checksum, then state SEALED
 *     copy, import   as append and seal              move     the other lane table, then the count of moves
 * A reader that sees a count sees what it counts; what is not counted is written again by the repeated append.
 *
 * Zeroes on reuse: a reservation zeroes the header (ids, counts), not the rows and sums. Those are megabytes a block, and a
 * reservation of a thousand blocks would hold up every request for seconds; they cannot be reached: each access names
 * generation and session, and rows from n_rows on (sums below 64 rows) are refused, here and by whoever maps the segment.
 */
#pragma once

#include "kernels/kernels.h"
#include "proto/layout.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BLOCKS_SESSION_CAPACITY 1024u /* records in a new segment */
#define BLOCKS_CHECK_TEXT       128

struct blocks;

struct blocks_plan {
    uint64_t n_bytes; /* of the segment, a multiple of 4096, at most what was asked for */
    uint64_t sessions_offset;
    uint64_t blocks_offset;
    uint64_t block_bytes;
    uint32_t n_blocks;
};

/* How many blocks a segment of at most max_bytes holds. -EINVAL: shape; -ENOSPC: not one. */
int blocks_plan(const struct row_shape *shape, uint64_t max_bytes, struct blocks_plan *ret_plan);

/* Who a segment belongs to from now on, and what is needed to work on it. */
struct blocks_owner {
    uint64_t incarnation; /* != 0 */
    uint32_t store;
    int32_t numa_node;             /* -1: pages are not bound; not used by adoption: pages stay where they are */
    const struct kernels *kernels; /* block_sums */
    _Atomic uint64_t *progress;    /* optional: bumped while a long adoption works */
};

/*
 * Makes a segment of zeroes (n_bytes as planned) one of n_blocks free blocks. The mapping stays the caller's and must
 * outlive the result. -EINVAL, -ENOMEM.
 */
int blocks_format(void *segment, const struct blocks_plan *plan, const struct row_shape *shape,
                  const struct blocks_owner *owner, struct blocks **ret_blocks);

/* What an adoption found and mended. */
struct blocks_adoption {
    uint32_t n_quarantined;     /* headers that contradict themselves: block freed, its rows are lost */
    uint32_t n_orphans;         /* blocks of a session without a record: freed */
    uint32_t n_records_dropped; /* session records that contradict themselves or repeat another */
    uint32_t n_layers_summed;   /* full layers of open blocks whose sums were computed again */
    uint32_t n_sealed;          /* complete blocks that had not been sealed yet */
};

/*
 * Takes over the segment of a store that is known dead. Rows are believed as far as the counts go: checksums of sealed
 * blocks are not read back here, since that would take as long as reading the whole segment (blocks_verify() does).
 * -EPROTO: not a segment of this layout; -EAGAIN: its formatting had not ended; -EXDEV: of another store number; -ENOMEM.
 */
int blocks_adopt(void *segment, uint64_t n_bytes, const struct blocks_owner *owner,
                 struct blocks_adoption *ret_adoption, struct blocks **ret_blocks);

struct blocks *blocks_free(struct blocks *blocks); /* accepts NULL, returns NULL; the segment keeps what it holds */

const struct row_shape *blocks_shape(const struct blocks *blocks);

struct blocks_counts {
    uint32_t n_blocks, n_free, n_open, n_sealed, n_sessions;
};
struct blocks_counts blocks_count(const struct blocks *blocks);

/* ---- sessions ---- */

/*
 * `record`: everything but state; of its lane tables only lane_store[moves % 2]. Opening what is open with the same content is
 * 0. With more moves than the record here, and equal in all but the lanes, it is a move: the record gets lanes and moves.
 * -EINVAL: session 0, policy not terminated, a move by an even number (it would be written over the lanes that hold now);
 * -EEXIST: open with other content; -ESTALE: the record here has more moves; -ENOSPC: no record left.
 */
int blocks_session_open(struct blocks *blocks, const struct session_record *record);

/* NULL: not open here. */
const struct session_record *blocks_session_find(const struct blocks *blocks, uint64_t session);

struct blocks_reservation {
    struct block_handle handle;
    struct block_handle previous; /* generation 0 exactly for number 0 */
    uint32_t previous_store;
    uint32_t number;
};

/*
 * Opens n blocks for a session: all or none. A block that is open for exactly this reservation already (a repeated order)
 * is left as it is. *ret_failed (untouched on success): which one was refused.
 * -ENOENT: session not open; -EINVAL: no such block, the same block twice, number and previous do not agree;
 * -EBUSY: not free; -ESTALE: generation is not greater than the block's.
 */
int blocks_reserve(struct blocks *blocks, uint64_t session, const struct blocks_reservation *reservations, uint32_t n,
                   uint32_t *ret_failed);

/* Frees the session's blocks with number >= from_number, unless lanes is 0 in these lanes only (bit each); from_number 0 and
 * lanes 0 forget the session too. A session that is not here is fine. Returns how many blocks were freed. */
uint32_t blocks_release(struct blocks *blocks, uint64_t session, uint32_t from_number, uint32_t lanes);

/* ---- rows ---- */

/* New tokens of one block, in the caller's memory. */
struct blocks_append {
    uint64_t session;
    struct block_handle handle;
    uint32_t layer; /* of rows */
    uint32_t first_token;
    uint32_t n_tokens;
    const uint32_t *ids; /* [n_tokens]; NULL: none. Read twice: not in memory that others write */
    bool decoded;        /* the ids are of decode steps */
    const void *rows;    /* [n_tokens][kv_head][layout_row_bytes]; NULL: none. Read once */
};

/*
 * Writes what is not there yet; ids that are there must be equal. Computes the layer's sums with its 64th row and seals the
 * block when it is complete. On an error nothing was written.
 * -EINVAL: neither ids nor rows, no tokens, more than the block holds, no such layer; -ESTALE: handle or session;
 * -EEXIST: another id is there; -ENODATA: a gap before first_token, or rows of tokens whose ids are not known.
 */
int blocks_append(struct blocks *blocks, const struct blocks_append *append);

/*
 * Fork: makes the sealed block `from` of one session the same block of another one, in `to`, which was reserved for it with
 * the same number. Idempotent: what is there already (ids must be equal) is skipped, so a repeated order, or one that a store
 * was killed in, ends the same. On an error nothing was written.
 * -EINVAL: one session, or numbers differ; -ESTALE: a handle or session; -ENODATA: `from` is not sealed; -EEXIST: other ids.
 */
struct blocks_copy {
    struct block_handle from, to;
};
int blocks_copy_check(const struct blocks *blocks, uint64_t from_session, uint64_t to_session,
                      const struct blocks_copy *copy);
int blocks_copy(struct blocks *blocks, uint64_t from_session, uint64_t to_session, const struct blocks_copy *copy);

/* ---- blocks of another store ---- */

/* Another store's segment, mapped read-only. All that is needed of its header was copied once and checked. */
struct blocks_source {
    const uint8_t *segment;
    uint64_t blocks_offset;
    uint64_t block_bytes;
    uint32_t n_blocks;
};

/* -EPROTO, -EAGAIN: as layout_check_segment(); -EXDEV: of another store than this number; -EMEDIUMTYPE: other rows than ours. */
int blocks_import_open(const struct blocks *blocks, const void *segment, uint64_t n_bytes, uint32_t store,
                       struct blocks_source *ret_source);

/*
 * Makes the open block `to` what the block `from` of the source is, as far as that is filled; both are of the session and have
 * the same number. A sealed one seals it, with its checksum. Idempotent as blocks_copy(): what is there already (ids must
 * agree) is skipped, and the rest comes with the next import. The source's store may append meanwhile; when it frees the block
 * what was not counted yet is not taken (-ENOENT). *ret_n_bytes: of rows that were copied.
 * -ESTALE: `to`; -ENOENT: the source has no such block of the session now; -EINVAL: numbers differ; -EEXIST: other ids;
 * -EBADMSG: the source's header contradicts itself. Nothing was written then, but for -ENOENT in the middle.
 */
int blocks_import_check(const struct blocks *blocks, const struct blocks_source *source, uint64_t session,
                        const struct blocks_copy *copy);
int blocks_import(struct blocks *blocks, const struct blocks_source *source, uint64_t session,
                  const struct blocks_copy *copy, uint64_t *ret_n_bytes);

/* A block as a reader sees it; valid until the turn ends. */
struct blocks_view {
    const struct block_header *header;
    uint32_t number;
    bool is_sealed;
};

/* Touches nothing of the segment. -ESTALE: no block has this handle and session now. */
int blocks_find(const struct blocks *blocks, uint64_t session, struct block_handle handle,
                struct blocks_view *ret_view);
uint32_t blocks_n_rows(const struct blocks_view *view, uint32_t layer); /* layer < n_layers */
/* [64][layout_row_bytes] of one layer and KV head. */
const void *blocks_head_rows(const struct blocks *blocks, const struct blocks_view *view, uint32_t layer,
                             uint32_t kv_head);
enum kernels_rows blocks_codec(const struct blocks *blocks);

/* Is a sealed block's checksum right? -EBADMSG: no; -EINVAL: not sealed, no such block. */
int blocks_verify(const struct blocks *blocks, uint32_t index);

/* The invariants, for tests and debug builds: 0, or -EUCLEAN with a line in `text`. Reads every header. */
int blocks_check(const struct blocks *blocks, char text[BLOCKS_CHECK_TEXT]);
