/*
 * timings.h - times of kernels on a device: what the parts of the program (timings_*.c) share.
 *
 * Owner      one thread, one stream.
 * Output     a line of JSON per case on stdout, at once, so that what ended early has said what it knows.
 * Method     events around batches of launches that take some 200 us together; the median of many batches. Every launch takes the
 *            next copy of its data out of a pool larger than the device's cache: a decode step finds its weights in memory.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu-worker/backend/cuda/cuda_ops.h"
#include "tests/backend/cuda-on-device/properties.h"

struct timings {
    bool tiny; /* emulation: the smallest sizes, once */
    struct properties properties;
    struct cuda_queue queue;
    cudaEvent_t before, after;
    double until;        /* of timings_now(): cases that begin later are skipped */
    unsigned char *pool; /* device memory, random bits of which every half, float and scale is a number */
    size_t pool_bytes;
    uint32_t n_failed;
};

/* What is timed: its name and size, what it moves and computes at least. */
struct timing {
    const char *kernel, *type; /* type: of weights or rows, or how host memory is had */
    char shape[64];
    double bytes, operations;
    bool on_host_clock; /* of the call and a synchronization, instead of events */
};

/* Launch number i; its data are copy i of those in the pool. */
typedef cudaError_t timings_launch(struct timings *timings, void *context, uint32_t i);

double timings_now(void);

/* Measures and prints; a failed call is printed and counted, and the program goes on where the device can. */
void timings_case(struct timings *timings, const struct timing *timing, timings_launch *launch, void *context);
/* Prints that a case is left out, with one word why. */
void timings_skip(const struct timing *timing, const char *why);

/* Device memory apart from the pool, zeroed; NULL: none, said by timings_skip(). */
void *timings_new(const struct timing *timing, size_t n_bytes);

/* Address of copy i of n_bytes in the pool; n_bytes up to pool_bytes. */
void *timings_copy(const struct timings *timings, size_t n_bytes, uint32_t i);

/* The parts. */
void timings_products(struct timings *timings);
void timings_blas(struct timings *timings);
void timings_rows(struct timings *timings);
void timings_attention(struct timings *timings);
void timings_keys(struct timings *timings);
void timings_step(struct timings *timings);
void timings_copies(struct timings *timings);
