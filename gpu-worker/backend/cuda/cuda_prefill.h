/*
 * cuda_prefill.h - prefill_begin, prefill_rows and prefill_end of backend_device.h: exact attention of consecutive positions.
 *
 * Rows       spans are brought together in pieces of up to 2048 tokens, over as many calls as it takes; a piece that is whole is
 *            attended to. Spans of the host come through two buffers of 512 tokens, copied on a stream of their own beside what
 *            the device computes; host memory that the device does not reach is staged as a whole. Gaps between rows are not read.
 * cuBLAS     keys and values of a piece as halves by KV head; queries as halves with a power of two each (cuda_halves.h); scores,
 *            weights and their sums as cuda_prefill_softmax.cu says, some positions at a time so that scores take 32 MiB.
 *            A NaN or an infinity in V shows in all positions of the call, whether they see the token or not.
 * Without    the rows of a piece as they are, in pieces of 64 for cuda_attend, 64 positions an item.
 * Invariant  the same calls have the same bits. Other spans, or other positions beside one, may be added up in another order.
 *
 * Owner      the back end (backend->prefill). Threads: its own.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "gpu-worker/backend/backend_device.h"

/* Errors as finish(). */
int cuda_prefill_new(struct backend *backend);
void cuda_prefill_free(struct backend *backend); /* accepts that there is none */

void cuda_prefill_begin(struct backend *backend, const struct backend_prefill *prefill);
uint64_t cuda_prefill_take(struct backend *backend, const struct backend_span *spans, uint32_t n_spans, bool on_host,
                           bool is_causal);
void cuda_prefill_end(struct backend *backend);
