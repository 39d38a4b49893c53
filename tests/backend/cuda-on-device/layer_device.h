/*
 * layer_device.h - the device's side of one layer's attention: the key cache of the session, exact set, selection and merge, asked
 * of the cuda back end's table as the worker asks it.
 *
 * Owner      the main thread.
 */
#pragma once

#include "gpu-worker/policy/policy.h"
#include "tests/backend/cuda-on-device/layer.h"

struct layer_device;

/* Seconds of a step by part. */
struct layer_times {
    double asked;  /* until exact attention and selection were asked for */
    double waited; /* from then until masks and masses were there */
    double gathered;
    double merged;  /* from partials to attention on the host */
    double n_kept;  /* tokens, all KV heads together */
    double n_bytes; /* of rows and sums that were read */
};

/* Opens the device, and a key cache for what the policy keeps. Errors with a sentence. */
int layer_device_new(const struct layer_rows *rows, const struct policy *policy, struct layer_device **ret_device,
                     char *sentence, size_t sentence_size);
struct layer_device *layer_device_free(struct layer_device *device); /* accepts NULL, returns NULL */
const char *layer_device_describe(const struct layer_device *device);
const char *layer_device_error(const struct layer_device *device);

/* Keys of n_blocks in all, which rows has. -ENOMEM: of the device; others as finish() of backend_device.h. */
int layer_device_extend(struct layer_device *device, uint32_t n_blocks);
/* The block's keys as its rows are now. */
void layer_device_put(struct layer_device *device, uint32_t block);
double layer_device_key_bytes(const struct layer_device *device);

/* One step; out [head][dim]. Errors as finish(). */
int layer_device_step(struct layer_device *device, const struct policy *policy, const struct layer_gather *gather,
                      uint32_t query, float *out, struct layer_times *ret_times);
/* The same with every row read, and the time of reading; for a query that a step was made for just now. */
void layer_device_full(struct layer_device *device, const struct layer_gather *gather, uint32_t query, float *out,
                       struct layer_times *ret_times);
