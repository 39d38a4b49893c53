/*
 * link.h - a supervisor's connection to the coordinator: tells of its child's lives and deaths, hears of fences and starts.
 *
 * Nothing in here waits: a coordinator that is away, slow or hung never holds up supervision. What could not be told is told
 * again, all of it, after the next registration; the coordinator takes such news twice.
 *
 * Owner      the supervisor. Threads: one.
 */
#pragma once

#include "proto/control.pb-c.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define LINK_MAX_DEATHS 16u

struct link {
    char path[128];
    uint32_t index;
    uint64_t incarnation; /* the supervisor's own */
    Hcattn__Control__Role supervises;
    int fd; /* -1: not connected; for poll() */
    bool registered;
    bool refused_told;
    uint64_t retry_us;

    uint64_t child; /* incarnation; 0: none lives */
    pid_t child_pid;
    uint32_t n_starts;
    struct {
        uint64_t incarnation;
        int status;
    } deaths[LINK_MAX_DEATHS]; /* the last ones, a ring */
    uint32_t n_deaths;         /* ever */
};

enum link_order_kind { LINK_FENCE, LINK_START, LINK_LEAVE };

struct link_order {
    enum link_order_kind kind;
    uint64_t incarnation; /* of a fence */
    char reason[256];
};

void link_init(struct link *link, const char *path, Hcattn__Control__Role supervises, uint32_t index);
void link_fini(struct link *link);

void link_child_started(struct link *link, uint64_t incarnation, pid_t pid, uint32_t n_starts);
void link_child_dead(struct link *link, uint64_t incarnation, int wait_status);

/* Connects when it is time, takes what has arrived. 1: an order in *ret_order, call again; 0: nothing more. */
int link_step(struct link *link, struct link_order *ret_order);

bool link_knows_dead(const struct link *link, uint64_t incarnation);
void link_tell_dead_again(struct link *link, uint64_t incarnation);
