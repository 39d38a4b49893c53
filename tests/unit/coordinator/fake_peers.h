/*
 * fake_peers.h - what fake stores, workers and supervisors have in common. See fakes.h.
 */
#pragma once

#include "tests/unit/coordinator/fakes.h"

#define CONTROL(NAME, field, value)                                                                                    \
    Hcattn__Control__Control control = HCATTN__CONTROL__CONTROL__INIT;                                                 \
    control.message_case = HCATTN__CONTROL__CONTROL__MESSAGE_##NAME;                                                   \
    control.field = (value)

Hcattn__Control__Hello fake_peers_greeting(Hcattn__Control__Role role, uint32_t index, uint64_t incarnation);
struct socket *fake_peers_dealer(struct fakes *fakes, const char *path, uint64_t route);
void fake_peers_copy(char target[512], const char *sentence);
void fake_peers_beat(int fd, uint64_t *last_us, uint64_t progress, bool busy, const char *phase, uint64_t device_bytes);
void fake_peers_take_descriptors(struct socket *socket, struct descriptor *last, uint32_t *n);
