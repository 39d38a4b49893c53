/* fake_peers.c - see fake_peers.h; and the supervisor. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/random.h"
#include "tests/unit/coordinator/fake_peers.h"

#define BEAT_US 200000u

Hcattn__Control__Hello fake_peers_greeting(Hcattn__Control__Role role, uint32_t index, uint64_t incarnation)
{
    static char version[] = HCATTN_VERSION, achieved[] = "a fake";
    Hcattn__Control__Hello hello = HCATTN__CONTROL__HELLO__INIT;
    hello.layout = LAYOUT_VERSION;
    hello.version = version;
    hello.role = role;
    hello.index = index;
    hello.incarnation = incarnation;
    hello.pid = (uint32_t)getpid();
    hello.achieved = achieved;
    return hello;
}

struct socket *fake_peers_dealer(struct fakes *fakes, const char *path, uint64_t route)
{
    char endpoint[160];
    struct socket *socket;
    int result = socket_new_dealer(fakes->context, route, 0, &socket);
    assert(result == 0);
    snprintf(endpoint, sizeof(endpoint), "ipc://%s", path);
    result = socket_connect(socket, endpoint);
    assert(result == 0);
    (void)result;
    return socket;
}

void fake_peers_copy(char target[512], const char *sentence)
{
    snprintf(target, 512, "%s", sentence);
}

void fake_peers_beat(int fd, uint64_t *last_us, uint64_t progress, bool busy, const char *phase, uint64_t device_bytes)
{
    if (fd < 0 || clock_now_us() - *last_us < BEAT_US)
        return;
    *last_us = clock_now_us();
    Hcattn__Control__Heartbeat heartbeat = HCATTN__CONTROL__HEARTBEAT__INIT;
    heartbeat.progress = progress;
    heartbeat.busy = busy;
    heartbeat.device_bytes = device_bytes;
    heartbeat.phase = (char *)(uintptr_t)(phase ? phase : "idle");
    CONTROL(HEARTBEAT, heartbeat, &heartbeat);
    fakes_say(fd, &control, -1);
}

void fake_peers_take_descriptors(struct socket *socket, struct descriptor *last, uint32_t *n)
{
    struct socket_message *message;
    while (socket && socket_receive(socket, false, &message) == 0) {
        int result = descriptor_check(message->frames[0].data, message->frames[0].n_bytes, last);
        assert(result == 0 && message->n_frames == 1);
        (void)result;
        (*n)++;
        socket_message_free(message);
    }
}

/* ---- supervisor ---- */

void fake_supervisor_register(struct fakes *fakes, struct fake_supervisor *supervisor, Hcattn__Control__Role role,
                              uint32_t index)
{
    *supervisor = (struct fake_supervisor){.incarnation = random_u64(), .fd = fakes_connect(fakes)};
    Hcattn__Control__Hello hello =
        fake_peers_greeting(HCATTN__CONTROL__ROLE__SUPERVISOR, index, supervisor->incarnation);
    hello.supervises = role;
    CONTROL(HELLO, hello, &hello);
    fakes_say(supervisor->fd, &control, -1);
}

void fake_supervisor_child_dead(struct fake_supervisor *supervisor, uint64_t incarnation)
{
    Hcattn__Control__ChildDead dead = HCATTN__CONTROL__CHILD_DEAD__INIT;
    dead.incarnation = incarnation;
    dead.exit_status = 9;
    CONTROL(CHILD_DEAD, child_dead, &dead);
    fakes_say(supervisor->fd, &control, -1);
}

void fake_supervisor_hang_up(struct fake_supervisor *supervisor)
{
    if (supervisor->fd >= 0)
        close(supervisor->fd);
    supervisor->fd = -1;
}

void fake_supervisor_pump(struct fake_supervisor *supervisor)
{
    Hcattn__Control__Control *message;
    int fd;
    while ((message = fakes_hear(supervisor->fd, &fd))) {
        if (message->message_case == HCATTN__CONTROL__CONTROL__MESSAGE_FENCE) {
            supervisor->fenced = message->fence->incarnation;
            snprintf(supervisor->reason, sizeof(supervisor->reason), "%s", message->fence->reason);
        }
        supervisor->n_starts += message->message_case == HCATTN__CONTROL__CONTROL__MESSAGE_START;
        hcattn__control__control__free_unpacked(message, NULL);
    }
    if (fd == -2)
        fake_supervisor_hang_up(supervisor);
}
