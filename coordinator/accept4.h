/*
 * accept4.h - the coordinator does not run out of descriptors, however many strangers connect to it.
 *
 * accept4.c defines accept4() for the whole process, ZeroMQ included: libzmq 4.3 ends the process when its listener for
 * ipc meets EMFILE. Here a connection that would take one of the last descriptors is closed at once, and the caller
 * sees ECONNABORTED, as if the other side had given up. What is left is for segments and pidfds.
 *
 * Threads    any.
 */
#pragma once

#include <stdint.h>

/* Allows this process as many descriptors as it may have; returns how many. Call it first. */
uint64_t accept4_prepare(void);
