#include "gpu-worker/stores.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void stores_init(struct stores *stores, const struct row_shape *shape, uint64_t worker, uint32_t request_bytes,
                 uint32_t reply_bytes)
{
    *stores =
        (struct stores){.shape = *shape, .worker = worker, .request_bytes = request_bytes, .reply_bytes = reply_bytes};
}

/* Accepts NULL, returns NULL. */
static struct store *unmap(const struct stores *stores, struct store *store)
{
    if (store == NULL)
        return NULL;
    if (store->exchange.address != NULL && stores->device.hide != NULL)
        stores->device.hide(stores->device.context, store->exchange.address, store->exchange.n_bytes);
    segment_unmap(&store->segment);
    segment_unmap(&store->exchange);
    free(store);
    return NULL;
}

void stores_fini(struct stores *stores)
{
    for (uint32_t i = 0; i < STORES_MAX; i++)
        stores->stores[i] = unmap(stores, stores->stores[i]);
}

static int make_exchange(const struct stores *stores, uint64_t store_incarnation, struct segment_mapping *ret_mapping,
                         int *ret_fd)
{
    uint64_t n_bytes = LAYOUT_PAGE_BYTES + STORES_N_SLOTS * ((uint64_t)stores->request_bytes + stores->reply_bytes);
    int fd;
    int r = segment_create("hcattn-exchange", n_bytes, &fd);
    if (r < 0)
        return r;
    struct segment_mapping mapping;
    r = segment_map(fd, n_bytes, true, &mapping);
    if (r < 0) {
        close(fd);
        return r;
    }
    struct exchange_header *header = mapping.address;
    header->magic = EXCHANGE_MAGIC;
    header->layout = LAYOUT_VERSION;
    header->n_bytes = n_bytes;
    header->worker = stores->worker;
    header->store = store_incarnation;
    header->n_slots = STORES_N_SLOTS;
    header->request_bytes = stores->request_bytes;
    header->reply_bytes = stores->reply_bytes;
    atomic_store_explicit(&header->ready, 1, memory_order_release);
    *ret_mapping = mapping;
    *ret_fd = fd;
    return 0;
}

static int map_segment(const struct stores *stores, int fd, struct store *store)
{
    uint64_t n_bytes;
    int r = segment_check(fd, 0, &n_bytes);
    if (r < 0)
        return r;
    r = segment_map(fd, n_bytes, false, &store->segment);
    if (r < 0)
        return r;
    r = layout_check_segment(store->segment.address, n_bytes);
    const struct segment_header *header = store->segment.address;
    if (r == 0 && memcmp(&header->shape, &stores->shape, sizeof(stores->shape)) != 0)
        r = -EINVAL;
    if (r < 0) {
        segment_unmap(&store->segment);
        return r;
    }
    store->n_blocks = header->n_blocks;
    store->block_bytes = header->block_bytes;
    store->blocks_offset = header->blocks_offset;
    return 0;
}

int stores_up(struct stores *stores, uint32_t number, uint64_t incarnation, uint64_t route, int segment_fd,
              int *ret_exchange_fd)
{
    if (number >= STORES_MAX)
        return -EINVAL;
    struct store *store = calloc(1, sizeof(*store));
    if (store == NULL)
        return -ENOMEM;
    store->number = number;
    store->incarnation = incarnation;
    store->route = route;
    store->request_bytes = stores->request_bytes;
    store->reply_bytes = stores->reply_bytes;
    int r = map_segment(stores, segment_fd, store);
    if (r == 0)
        r = make_exchange(stores, incarnation, &store->exchange, ret_exchange_fd);
    if (r < 0) {
        unmap(stores, store);
        return r;
    }
    store->is_up = true;
    unmap(stores, stores->stores[number]); /* first: what a device takes is not without end */
    if (stores->device.show != NULL)
        store->shown_bytes =
            stores->device.show(stores->device.context, store->exchange.address, store->exchange.n_bytes);
    stores->stores[number] = store;
    return 0;
}

bool stores_ready(struct stores *stores, uint32_t number, uint64_t incarnation)
{
    struct store *store = stores_get(stores, number);
    if (store == NULL || store->incarnation != incarnation || !store->is_up)
        return false;
    store->is_ready = true;
    return true;
}

void stores_down(struct stores *stores, uint32_t number, uint64_t incarnation)
{
    struct store *store = stores_get(stores, number);
    if (store == NULL || store->incarnation != incarnation)
        return;
    store->is_up = false;
    store->is_ready = false;
    store->has_ring = false;
}

void stores_remove(struct stores *stores, uint32_t number, uint64_t incarnation)
{
    struct store *store = stores_get(stores, number);
    if (store == NULL || store->incarnation != incarnation)
        return;
    stores->stores[number] = unmap(stores, store);
}

bool stores_use_ring(struct stores *stores, uint32_t number, uint64_t incarnation, bool ring)
{
    struct store *store = stores_get(stores, number);
    if (store == NULL || store->incarnation != incarnation || !store->is_ready)
        return false;
    store->has_ring = ring;
    return true;
}

void stores_all_down(struct stores *stores)
{
    for (uint32_t i = 0; i < STORES_MAX; i++)
        if (stores->stores[i] != NULL)
            stores_down(stores, i, stores->stores[i]->incarnation);
}

struct store *stores_get(struct stores *stores, uint32_t number)
{
    return number < STORES_MAX ? stores->stores[number] : NULL;
}

int stores_take_slot(struct store *store, uint64_t request, uint32_t *ret_slot)
{
    for (uint32_t i = 0; i < STORES_N_SLOTS; i++) {
        struct store_slot *slot = &store->slots[i];
        if (slot->state == SLOT_QUARANTINED && stores_is_answered(store, i, slot->request))
            slot->state = SLOT_FREE;
        if (slot->state != SLOT_FREE)
            continue;
        *slot = (struct store_slot){.state = SLOT_BUSY, .request = request};
        *ret_slot = i;
        return 0;
    }
    return -EAGAIN;
}

void stores_free_slot(struct store *store, uint32_t slot)
{
    store->slots[slot].state = SLOT_FREE;
}

void stores_quarantine_slot(struct store *store, uint32_t slot)
{
    store->slots[slot].state = SLOT_QUARANTINED;
}

uint8_t *stores_request(const struct store *store, uint32_t slot)
{
    return (uint8_t *)store->exchange.address + layout_request_offset(store->exchange.address, slot);
}

struct reply_header *stores_reply(const struct store *store, uint32_t slot)
{
    uint8_t *address = (uint8_t *)store->exchange.address + layout_reply_offset(store->exchange.address, slot);
    return (struct reply_header *)(void *)address;
}

struct exchange_ring *stores_ring(const struct store *store)
{
    return layout_ring(store->exchange.address);
}

bool stores_is_answered(const struct store *store, uint32_t slot, uint64_t request)
{
    return atomic_load_explicit(&stores_reply(store, slot)->answered, memory_order_acquire) == request;
}

void stores_post(struct store *store, uint32_t slot, uint64_t request, uint32_t n_bytes)
{
    struct exchange_ring *ring = stores_ring(store);
    ring->posts[slot].n_bytes = n_bytes;
    atomic_store_explicit(&ring->posts[slot].request, request, memory_order_release);
    bell_ring(&ring->requests);
}

const struct block_header *stores_block(struct stores *stores, uint32_t number, struct block_handle handle,
                                        uint64_t session, uint32_t block_number)
{
    struct store *store = stores_get(stores, number);
    if (store == NULL || handle.index >= store->n_blocks)
        return NULL;
    const uint8_t *address = (const uint8_t *)store->segment.address;
    const struct block_header *block =
        (const void *)(address + store->blocks_offset + (uint64_t)handle.index * store->block_bytes);
    if (block->magic != BLOCK_MAGIC || block->handle.generation != handle.generation || block->session != session ||
        block->number != block_number || atomic_load_explicit(&block->state, memory_order_acquire) == BLOCK_FREE)
        return NULL;
    return block;
}

const void *stores_rows(const struct stores *stores, const struct block_header *block, uint32_t layer, uint32_t kv_head)
{
    return (const uint8_t *)block + layout_head_rows_offset(&stores->shape, layer, kv_head);
}

const float *stores_v_sums(const struct stores *stores, const struct block_header *block, uint32_t layer,
                           uint32_t kv_head)
{
    const uint8_t *sums = (const uint8_t *)block + layout_head_sums_offset(&stores->shape, layer, kv_head);
    return (const float *)(const void *)sums + stores->shape.head_dim;
}
