/* ring.c - see ring.h. */
#include "value-store/ring.h"
#include "common/clock.h"
#include "common/signals.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

struct ring {
    struct store *store;
    struct ring_place place;
    struct exchange_ring *shared;
    pthread_t thread;
    atomic_bool stop;
};

static uint64_t posted(const struct ring *ring, uint32_t slot)
{
    return atomic_load_explicit(&ring->shared->posts[slot].request, memory_order_acquire);
}

static bool is_new(const struct ring *ring, uint32_t slot, uint64_t request)
{
    return request != 0 && request != ring->place.served[slot];
}

static void serve(struct ring *ring, uint32_t slot, uint64_t request)
{
    const struct exchange_header *header = ring->place.header;
    uint8_t *exchange = ring->place.exchange;
    const struct request_slot order = {
        .request = request,
        .n_bytes = *(volatile const uint32_t *)&ring->shared->posts[slot].n_bytes,
        .request_area = exchange + layout_request_offset(header, slot),
        .request_bytes = header->request_bytes,
        .reply_area = exchange + layout_reply_offset(header, slot),
        .reply_bytes = header->reply_bytes,
    };
    struct request_result result;
    ring->place.served[slot] = request;
    store_serve(ring->store, &order, &result);
    bell_ring(&ring->shared->replies);
}

/* One post that was not served yet, the oldest first. False: there is none. */
static bool serve_oldest(struct ring *ring)
{
    uint32_t oldest_slot = 0;
    uint64_t oldest = 0;
    for (uint32_t slot = 0; slot < ring->place.header->n_slots; slot++) {
        uint64_t request = posted(ring, slot);
        if (is_new(ring, slot, request) && (oldest == 0 || request < oldest)) {
            oldest = request;
            oldest_slot = slot;
        }
    }
    if (oldest != 0)
        serve(ring, oldest_slot, oldest);
    return oldest != 0;
}

static void *ring_main(void *argument)
{
    struct ring *ring = argument;
    pthread_setname_np(pthread_self(), "ring");
    kernels_thread_setup();
    while (!atomic_load_explicit(&ring->stop, memory_order_acquire)) {
        uint32_t seen = bell_count(&ring->shared->requests);
        if (!serve_oldest(ring) && !atomic_load_explicit(&ring->stop, memory_order_acquire))
            (void)bell_wait(&ring->shared->requests, seen, clock_deadline_us(RING_LOOK_US), ring->store->spin_us);
    }
    /* First the word, then a last look: whoever posted and still saw the word is served. A worker that posts on and on does
     * not keep the store from stopping. */
    atomic_store_explicit(&ring->shared->serving, 0, memory_order_seq_cst);
    for (uint32_t i = 0; i < ring->place.header->n_slots && serve_oldest(ring); i++)
        ;
    return NULL;
}

int ring_start(struct store *store, const struct ring_place *place, struct ring **ret_ring)
{
    struct ring *ring = calloc(1, sizeof(*ring));
    if (!ring)
        return -ENOMEM;
    ring->store = store;
    ring->place = *place;
    ring->shared = layout_ring(place->exchange);
    int error = signals_start_thread(&ring->thread, ring_main, ring);
    if (error) {
        free(ring);
        return error;
    }
    atomic_store_explicit(&ring->shared->serving, 1, memory_order_seq_cst);
    *ret_ring = ring;
    return 0;
}

struct ring *ring_stop(struct ring *ring)
{
    if (!ring)
        return NULL;
    atomic_store_explicit(&ring->stop, true, memory_order_release);
    bell_ring(&ring->shared->requests);
    pthread_join(ring->thread, NULL);
    free(ring);
    return NULL;
}
