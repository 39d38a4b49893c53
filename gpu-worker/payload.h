/*
 * payload.h - writes one request into the request area of an exchange slot.
 *
 * Owner      the engine. Threads: one at a time.
 * Invariant  never writes past the area: what does not fit is -ENOSPC, and the caller sends in parts.
 */
#pragma once

#include <stdint.h>

#include "proto/layout.h"

struct payload {
    uint8_t *area;
    uint32_t n_bytes; /* of the area */
    uint32_t used;
    uint32_t result_used; /* of the reply area, reply header included */
};

void payload_begin(struct payload *payload, void *area, uint32_t n_bytes);
/* Offset of n_bytes more, 16-byte aligned; -ENOSPC. */
int64_t payload_take(struct payload *payload, uint64_t n_bytes);
void *payload_at(const struct payload *payload, uint32_t offset);
/* Offset in the reply area of a result of n_bytes. */
uint32_t payload_result(struct payload *payload, uint64_t n_bytes);
/* Writes the header, whose n_bytes and magic it sets. */
void payload_finish(struct payload *payload, const struct request_header *header);
