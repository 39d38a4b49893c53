/* link.c - see link.h. */
#include "value-store/link.h"
#include "common/clock.h"
#include "common/peer.h"
#include "common/signals.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SEND_TIMEOUT_US    (10 * UINT64_C(1000000))
#define SMALL_MESSAGE_SIZE 512

struct link {
    struct progress *progress;
    pthread_t thread;
    pthread_mutex_t lock; /* fd, registered, stop; sending */
    pthread_cond_t wake;
    int fd;
    bool registered;
    bool stop;
};

/* The caller holds the lock. */
static void send_heartbeat(struct link *link)
{
    uint8_t buffer[SMALL_MESSAGE_SIZE];
    const struct progress *progress = link->progress;
    Hcattn__Control__Heartbeat heartbeat = HCATTN__CONTROL__HEARTBEAT__INIT;
    heartbeat.progress = atomic_load_explicit(&progress->value, memory_order_relaxed);
    heartbeat.busy = atomic_load_explicit(&progress->busy, memory_order_relaxed);
    heartbeat.bytes_served = atomic_load_explicit(&progress->bytes_served, memory_order_relaxed);
    heartbeat.requests = atomic_load_explicit(&progress->n_requests, memory_order_relaxed);
    heartbeat.bytes_resident = atomic_load_explicit(&progress->bytes_resident, memory_order_relaxed);
    heartbeat.bytes_local = atomic_load_explicit(&progress->bytes_local, memory_order_relaxed);
    heartbeat.phase = (char *)(uintptr_t)atomic_load_explicit(&progress->phase, memory_order_relaxed);
    uint32_t percent = atomic_load_explicit(&progress->percent, memory_order_relaxed);
    char phase[64];
    if (percent > 0) {
        snprintf(phase, sizeof(phase), "%s %u %%", heartbeat.phase, percent);
        heartbeat.phase = phase;
    } else if (strcmp(heartbeat.phase, PROGRESS_IMPORTING) == 0) {
        uint64_t n_bytes = atomic_load_explicit(&progress->bytes_imported, memory_order_relaxed);
        snprintf(phase, sizeof(phase), "%s, %.0f MiB so far", heartbeat.phase, (double)n_bytes / (1024.0 * 1024.0));
        heartbeat.phase = phase;
    }
    Hcattn__Control__Control control = HCATTN__CONTROL__CONTROL__INIT;
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_HEARTBEAT;
    control.heartbeat = &heartbeat;
    if (hcattn__control__control__get_packed_size(&control) > sizeof(buffer))
        return;
    size_t n_bytes = hcattn__control__control__pack(&control, buffer);
    (void)peer_try_send(link->fd, buffer, n_bytes, NULL, 0); /* a hang-up is noticed by the working thread */
}

static void *io_main(void *argument)
{
    struct link *link = argument;
    struct timespec next;
    clock_gettime(CLOCK_MONOTONIC, &next);
    pthread_setname_np(pthread_self(), "heartbeat");
    pthread_mutex_lock(&link->lock);
    while (!link->stop) {
        next.tv_sec++;
        while (!link->stop && pthread_cond_timedwait(&link->wake, &link->lock, &next) != ETIMEDOUT)
            ;
        if (!link->stop && link->registered)
            send_heartbeat(link);
    }
    pthread_mutex_unlock(&link->lock);
    return NULL;
}

int link_open(struct progress *progress, struct link **ret_link)
{
    struct link *link = calloc(1, sizeof(*link));
    if (!link)
        return -ENOMEM;
    link->progress = progress;
    link->fd = -1;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&link->wake, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&link->lock, NULL);
    int error = signals_start_thread(&link->thread, io_main, link);
    if (error) {
        pthread_cond_destroy(&link->wake);
        pthread_mutex_destroy(&link->lock);
        free(link);
        return error;
    }
    *ret_link = link;
    return 0;
}

struct link *link_close(struct link *link)
{
    if (!link)
        return NULL;
    pthread_mutex_lock(&link->lock);
    link->stop = true;
    pthread_cond_signal(&link->wake);
    pthread_mutex_unlock(&link->lock);
    pthread_join(link->thread, NULL);
    link_detach(link);
    pthread_cond_destroy(&link->wake);
    pthread_mutex_destroy(&link->lock);
    free(link);
    return NULL;
}

void link_attach(struct link *link, int fd)
{
    link_detach(link);
    pthread_mutex_lock(&link->lock);
    link->fd = fd;
    pthread_mutex_unlock(&link->lock);
}

void link_detach(struct link *link)
{
    pthread_mutex_lock(&link->lock);
    if (link->fd >= 0)
        close(link->fd);
    link->fd = -1;
    link->registered = false;
    pthread_mutex_unlock(&link->lock);
}

void link_registered(struct link *link)
{
    pthread_mutex_lock(&link->lock);
    link->registered = true;
    pthread_mutex_unlock(&link->lock);
}

int link_fd(const struct link *link)
{
    return link->fd; /* only this thread changes it */
}

int link_send(struct link *link, const Hcattn__Control__Control *message, int fd)
{
    size_t n_bytes = hcattn__control__control__get_packed_size(message);
    if (link->fd < 0)
        return -ENOTCONN;
    if (n_bytes > PEER_MAX_MESSAGE)
        return -EMSGSIZE;
    uint8_t *buffer = malloc(n_bytes);
    if (!buffer)
        return -ENOMEM;
    hcattn__control__control__pack(message, buffer);
    uint64_t deadline_us = clock_deadline_us(SEND_TIMEOUT_US);
    int result;
    for (;;) {
        pthread_mutex_lock(&link->lock);
        result = peer_try_send(link->fd, buffer, n_bytes, &fd, fd >= 0 ? 1 : 0);
        pthread_mutex_unlock(&link->lock);
        if (result != -EAGAIN)
            break;
        if (clock_remaining_us(deadline_us) == 0) {
            result = -ETIMEDOUT;
            break;
        }
        struct pollfd item = {.fd = link->fd, .events = POLLOUT};
        (void)poll(&item, 1, clock_remaining_ms(deadline_us));
    }
    free(buffer);
    return result;
}

int link_receive(struct link *link, void *buffer, size_t size, size_t *ret_n_bytes, int ret_fds[LINK_MAX_FDS],
                 size_t *ret_n_fds)
{
    if (link->fd < 0)
        return -ENOTCONN;
    return peer_try_receive(link->fd, buffer, size, ret_n_bytes, ret_fds, LINK_MAX_FDS, ret_n_fds);
}
