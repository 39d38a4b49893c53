/* link.c - see link.h. */
#include "client/command/link.h"
#include "common/clock.h"
#include "common/peer.h"
#include "common/random.h"
#include "proto/layout.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define RETRY_US         200000u
#define REFUSED_RETRY_US 5000000u
#define MESSAGE_BYTES    1024u

void link_init(struct link *link, const char *path, Hcattn__Control__Role supervises, uint32_t index)
{
    *link = (struct link){.fd = -1, .supervises = supervises, .index = index, .incarnation = random_u64()};
    snprintf(link->path, sizeof(link->path), "%s", path);
}

static void hang_up(struct link *link, uint64_t retry_us)
{
    if (link->fd >= 0)
        close(link->fd);
    link->fd = -1;
    link->registered = false;
    link->retry_us = clock_deadline_us(retry_us);
}

void link_fini(struct link *link)
{
    hang_up(link, 0);
}

/* A message that cannot be sent at once ends the connection: after the next registration everything is told. */
static void send_message(struct link *link, const Hcattn__Control__Control *message)
{
    uint8_t bytes[MESSAGE_BYTES];
    size_t n_bytes = hcattn__control__control__get_packed_size(message);
    if (link->fd < 0 || n_bytes > sizeof(bytes))
        return;
    hcattn__control__control__pack(message, bytes);
    if (peer_try_send(link->fd, bytes, n_bytes, NULL, 0) < 0)
        hang_up(link, RETRY_US);
}

static void send_hello(struct link *link)
{
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
    Hcattn__Control__Hello hello = HCATTN__CONTROL__HELLO__INIT;
    hello.layout = LAYOUT_VERSION;
    hello.version = (char *)HCATTN_VERSION;
    hello.role = HCATTN__CONTROL__ROLE__SUPERVISOR;
    hello.index = link->index;
    hello.incarnation = link->incarnation;
    hello.pid = (uint32_t)getpid();
    hello.supervises = link->supervises;
    hello.numa_node = -1;
    message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_HELLO;
    message.hello = &hello;
    send_message(link, &message);
}

static void send_started(struct link *link)
{
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
    Hcattn__Control__ChildStarted started = HCATTN__CONTROL__CHILD_STARTED__INIT;
    started.incarnation = link->child;
    started.pid = (uint32_t)link->child_pid;
    started.n_starts = link->n_starts;
    message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_CHILD_STARTED;
    message.child_started = &started;
    send_message(link, &message);
}

static void send_dead(struct link *link, uint64_t incarnation, int status)
{
    Hcattn__Control__Control message = HCATTN__CONTROL__CONTROL__INIT;
    Hcattn__Control__ChildDead dead = HCATTN__CONTROL__CHILD_DEAD__INIT;
    dead.incarnation = incarnation;
    dead.exit_status = status;
    message.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_CHILD_DEAD;
    message.child_dead = &dead;
    send_message(link, &message);
}

static uint32_t first_death(const struct link *link)
{
    return link->n_deaths > LINK_MAX_DEATHS ? link->n_deaths - LINK_MAX_DEATHS : 0;
}

static void tell_everything(struct link *link)
{
    for (uint32_t i = first_death(link); i < link->n_deaths && link->fd >= 0; i++)
        send_dead(link, link->deaths[i % LINK_MAX_DEATHS].incarnation, link->deaths[i % LINK_MAX_DEATHS].status);
    if (link->child)
        send_started(link);
}

void link_child_started(struct link *link, uint64_t incarnation, pid_t pid, uint32_t n_starts)
{
    link->child = incarnation;
    link->child_pid = pid;
    link->n_starts = n_starts;
    if (link->registered)
        send_started(link);
}

void link_child_dead(struct link *link, uint64_t incarnation, int wait_status)
{
    uint32_t slot = link->n_deaths++ % LINK_MAX_DEATHS;
    link->deaths[slot].incarnation = incarnation;
    link->deaths[slot].status = wait_status;
    if (link->child == incarnation)
        link->child = 0;
    if (link->registered)
        send_dead(link, incarnation, wait_status);
}

bool link_knows_dead(const struct link *link, uint64_t incarnation)
{
    for (uint32_t i = first_death(link); i < link->n_deaths; i++) {
        if (link->deaths[i % LINK_MAX_DEATHS].incarnation == incarnation)
            return true;
    }
    return false;
}

void link_tell_dead_again(struct link *link, uint64_t incarnation)
{
    for (uint32_t i = first_death(link); i < link->n_deaths; i++) {
        if (link->deaths[i % LINK_MAX_DEATHS].incarnation == incarnation)
            send_dead(link, incarnation, link->deaths[i % LINK_MAX_DEATHS].status);
    }
}

/* 1: an order. */
static int take(struct link *link, const Hcattn__Control__Control *message, struct link_order *ret_order)
{
    switch (message->message_case) {
    case HCATTN__CONTROL__CONTROL__MESSAGE_WELCOME:
        link->registered = true;
        tell_everything(link);
        return 0;
    case HCATTN__CONTROL__CONTROL__MESSAGE_REFUSED:
        hang_up(link, REFUSED_RETRY_US); /* another version, say: the child will hear the same and tell it */
        return 0;
    case HCATTN__CONTROL__CONTROL__MESSAGE_FENCE:
        ret_order->kind = LINK_FENCE;
        ret_order->incarnation = message->fence->incarnation;
        snprintf(ret_order->reason, sizeof(ret_order->reason), "%s", message->fence->reason);
        return 1;
    case HCATTN__CONTROL__CONTROL__MESSAGE_LEAVE:
        *ret_order = (struct link_order){.kind = LINK_LEAVE};
        return 1;
    case HCATTN__CONTROL__CONTROL__MESSAGE_START:
        *ret_order = (struct link_order){.kind = LINK_START};
        return 1;
    default:
        return 0; /* not for supervisors */
    }
}

int link_step(struct link *link, struct link_order *ret_order)
{
    if (link->fd < 0) {
        if (clock_now_us() < link->retry_us)
            return 0;
        if (peer_connect(link->path, 0, &link->fd) < 0) {
            hang_up(link, RETRY_US);
            return 0;
        }
        send_hello(link);
    }
    while (link->fd >= 0) {
        uint8_t bytes[MESSAGE_BYTES];
        size_t n_bytes = 0;
        int error = peer_try_receive(link->fd, bytes, sizeof(bytes), &n_bytes, NULL, 0, NULL);
        if (error == -EAGAIN || error == -EINTR)
            return 0;
        if (error == -EMSGSIZE)
            continue;
        if (error < 0) {
            hang_up(link, RETRY_US);
            return 0;
        }
        Hcattn__Control__Control *message = hcattn__control__control__unpack(NULL, n_bytes, bytes);
        if (!message)
            continue;
        int ordered = take(link, message, ret_order);
        hcattn__control__control__free_unpacked(message, NULL);
        if (ordered)
            return 1;
    }
    return 0;
}
