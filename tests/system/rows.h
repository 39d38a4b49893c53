/*
 * rows.h - looks into the segments of a running service's stores: what a session's rows are, bit by bit.
 *
 * Opens the stores' memfds through /proc (same user). Asserts (cmocka).
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "tests/system/service.h"

/*
 * Rows of the first n_tokens tokens of a session, of all layers and KV heads, in order of block and place in the block;
 * tokens that are not there fail the test. The caller frees.
 */
uint8_t *rows_of_session(struct service *service, uint32_t n_stores, uint64_t session, uint32_t n_tokens,
                         size_t *ret_n_bytes);
/* Blocks in all stores that are not free. */
uint32_t rows_n_used_blocks(struct service *service, uint32_t n_stores);
