/*
 * cuda_host.h - memory of the host that the device reaches over the link: pinned for it, or shown by who has it (exchanges).
 *
 * Pieces     shown memory is registered with the driver as a whole, or where that is refused in halves of it, down to some MiB.
 *            What no piece has whole is not reachable: a copy of a range that two pieces share is refused by the driver.
 * Owner      the back end. Threads: its own.
 * Invariant  pieces are in order of address and do not overlap. Memory is given back, and unregistered, when nothing that was asked
 *            for can still be reading it.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "gpu-worker/backend/backend_device.h"

/* backend->host. -ENOMEM. */
int cuda_host_new(struct backend *backend);
void cuda_host_free(struct backend *backend); /* and all memory; accepts that there is none */

/* host_alloc, host_free, show and hide of backend_device.h. */
void *cuda_host_take(struct backend *backend, size_t n_bytes);
void cuda_host_give_back(struct backend *backend, void *memory);
size_t cuda_host_show(struct backend *backend, void *memory, size_t n_bytes);
void cuda_host_hide(struct backend *backend, void *memory, size_t n_bytes);

/*
 * Where commands of this play find these bytes: in the host's memory if the device reaches them there, else a staged copy of what
 * they are now. NULL: no memory, the back end has failed.
 */
const void *cuda_host_reach(struct backend *backend, const void *host, size_t n_bytes);
/* The first of the two alone; NULL: not reachable. */
const void *cuda_host_find(const struct backend *backend, const void *host, size_t n_bytes);

/* merge of backend_device.h. */
void cuda_host_merge(struct backend *backend, const struct backend_merge *items, uint32_t n_items, uint32_t group,
                     uint32_t head_dim);
