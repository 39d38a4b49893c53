/* exchanges.c - a small table, searched from its start. */
#include "value-store/exchanges.h"
#include "value-store/shared_copy.h"

#include <errno.h>

static struct exchange *find(struct exchanges *exchanges, uint64_t worker)
{
    for (uint32_t i = 0; i < EXCHANGES_MAX; i++) {
        if (exchanges->entries[i].worker == worker)
            return &exchanges->entries[i];
    }
    return NULL;
}

static void drop(struct exchange *entry)
{
    entry->ring = ring_stop(entry->ring);
    segment_unmap(&entry->mapping);
    entry->worker = 0;
}

int exchanges_add(struct exchanges *exchanges, uint64_t worker, uint64_t store, int fd)
{
    struct exchange exchange = {.worker = worker};
    if (worker == 0)
        return -EINVAL;
    struct exchange *entry = find(exchanges, worker);
    if (!entry)
        entry = find(exchanges, 0);
    if (!entry)
        return -ENOSPC;
    int result = segment_map(fd, 0, true, &exchange.mapping);
    if (result < 0)
        return result;
    result = -EPROTO;
    if (exchange.mapping.n_bytes >= sizeof(exchange.header)) {
        shared_copy(&exchange.header, exchange.mapping.address, sizeof(exchange.header));
        result = layout_check_exchange(&exchange.header, exchange.mapping.n_bytes);
    }
    if (result == 0 && (exchange.header.worker != worker || exchange.header.store != store))
        result = -EPROTO;
    if (result < 0) {
        segment_unmap(&exchange.mapping);
        return result;
    }
    /* Posts of an earlier life of this memory were sent on an earlier route: never served any more. */
    const struct exchange_ring *ring = layout_ring(exchange.mapping.address);
    for (uint32_t slot = 0; slot < EXCHANGE_MAX_SLOTS; slot++)
        exchange.served[slot] = atomic_load_explicit(&ring->posts[slot].request, memory_order_acquire);
    drop(entry);
    *entry = exchange;
    return 0;
}

void exchanges_remove(struct exchanges *exchanges, uint64_t worker)
{
    struct exchange *entry = worker ? find(exchanges, worker) : NULL;
    if (entry)
        drop(entry);
}

void exchanges_clear(struct exchanges *exchanges)
{
    for (uint32_t i = 0; i < EXCHANGES_MAX; i++)
        exchanges_remove(exchanges, exchanges->entries[i].worker);
}

int exchanges_grant(struct exchanges *exchanges, uint64_t worker, struct store *store)
{
    struct exchange *entry = worker ? find(exchanges, worker) : NULL;
    if (!entry)
        return -ENOENT;
    if (entry->ring)
        return 0;
    const struct ring_place place = {
        .exchange = entry->mapping.address,
        .header = &entry->header,
        .served = entry->served,
    };
    return ring_start(store, &place, &entry->ring);
}

void exchanges_revoke(struct exchanges *exchanges, uint64_t worker)
{
    struct exchange *entry = worker ? find(exchanges, worker) : NULL;
    if (entry)
        entry->ring = ring_stop(entry->ring);
}

void exchanges_revoke_all(struct exchanges *exchanges)
{
    for (uint32_t i = 0; i < EXCHANGES_MAX; i++)
        exchanges->entries[i].ring = ring_stop(exchanges->entries[i].ring);
}

const struct exchange *exchanges_find(const struct exchanges *exchanges, uint64_t worker)
{
    return worker ? find((struct exchanges *)(uintptr_t)exchanges, worker) : NULL;
}

void *exchanges_request_area(const struct exchange *exchange, uint32_t slot)
{
    return (uint8_t *)exchange->mapping.address + layout_request_offset(&exchange->header, slot);
}

void *exchanges_reply_area(const struct exchange *exchange, uint32_t slot)
{
    return (uint8_t *)exchange->mapping.address + layout_reply_offset(&exchange->header, slot);
}
