/*
 * turn.h - whose turn it is to work on the store: a lock that is given in the order in which it was asked for, so that a ring
 * that is never empty cannot keep the coordinator's orders waiting.
 *
 * Threads    any. What the turn protects: blocks, aggregate, pool, and who may say in progress.h that the store is busy.
 */
#pragma once

#include <pthread.h>
#include <stdint.h>

struct turn {
    pthread_mutex_t lock;
    pthread_cond_t next;
    uint64_t n_asked;
    uint64_t n_ended;
};

void turn_init(struct turn *turn);
void turn_fini(struct turn *turn);
void turn_take(struct turn *turn);
void turn_end(struct turn *turn);
