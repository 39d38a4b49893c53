/* placement.c - see placement.h. */
#include "value-store/placement.h"
#include "common/clock.h"
#include "common/signals.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14; older ones tell of pages once they are used */
#endif

#define PIECE_BYTES ((uint64_t)64 << 20) /* mapped at once: how long a stop may wait */
#define LOOK_US     UINT64_C(10000000)
#define COST_FACTOR 100u

struct placement {
    const struct topology *topology;
    uint32_t node;
    struct segment_mapping mapping;
    struct progress *progress;
    pthread_t thread;
    pthread_mutex_t lock; /* stop */
    pthread_cond_t wake;
    bool stop;
};

/* True: it is to stop, now or within the time. */
static bool stop_within(struct placement *placement, uint64_t timeout_us)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)(timeout_us / 1000000);
    until.tv_nsec += (long)(timeout_us % 1000000) * 1000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    pthread_mutex_lock(&placement->lock);
    while (timeout_us > 0 && !placement->stop &&
           pthread_cond_timedwait(&placement->wake, &placement->lock, &until) != ETIMEDOUT)
        ;
    bool stop = placement->stop;
    pthread_mutex_unlock(&placement->lock);
    return stop;
}

static bool map_all(struct placement *placement)
{
    const struct segment_mapping *mapping = &placement->mapping;
    for (uint64_t offset = 0; offset < mapping->n_bytes; offset += PIECE_BYTES) {
        uint64_t rest = mapping->n_bytes - offset;
        if (stop_within(placement, 0))
            return false;
        if (madvise((char *)mapping->address + offset, rest < PIECE_BYTES ? rest : PIECE_BYTES, MADV_POPULATE_READ) < 0)
            break;
    }
    return true;
}

static void *look_again_and_again(void *argument)
{
    struct placement *placement = argument;
    pthread_setname_np(pthread_self(), "placement");
    if (!map_all(placement))
        return NULL;
    uint64_t pause_us;
    do {
        uint64_t begin_us = clock_now_us(), local = 0, resident = 0;
        if (topology_resident_bytes(placement->topology, placement->node, placement->mapping.address,
                                    placement->mapping.n_bytes, &local, &resident) == 0) {
            atomic_store_explicit(&placement->progress->bytes_local, local, memory_order_relaxed);
            atomic_store_explicit(&placement->progress->bytes_resident, resident, memory_order_relaxed);
        }
        pause_us = COST_FACTOR * (clock_now_us() - begin_us);
    } while (!stop_within(placement, pause_us > LOOK_US ? pause_us : LOOK_US));
    return NULL;
}

static void release(struct placement *placement)
{
    pthread_cond_destroy(&placement->wake);
    pthread_mutex_destroy(&placement->lock);
    free(placement);
}

int placement_start(const struct topology *topology, uint32_t node, const struct segment_mapping *mapping,
                    struct progress *progress, struct placement **ret_placement)
{
    struct placement *placement = calloc(1, sizeof(*placement));
    if (!placement)
        return -ENOMEM;
    placement->topology = topology;
    placement->node = node;
    placement->mapping = *mapping;
    placement->progress = progress;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&placement->wake, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&placement->lock, NULL);
    int error = signals_start_thread(&placement->thread, look_again_and_again, placement);
    if (error) {
        release(placement);
        return error;
    }
    *ret_placement = placement;
    return 0;
}

struct placement *placement_stop(struct placement *placement)
{
    if (!placement)
        return NULL;
    pthread_mutex_lock(&placement->lock);
    placement->stop = true;
    pthread_cond_signal(&placement->wake);
    pthread_mutex_unlock(&placement->lock);
    pthread_join(placement->thread, NULL);
    atomic_store_explicit(&placement->progress->bytes_local, 0, memory_order_relaxed);
    atomic_store_explicit(&placement->progress->bytes_resident, 0, memory_order_relaxed);
    release(placement);
    return NULL;
}
