/*
 * cuda_commands.h - the operations that were asked for and not launched yet: written down as commands, launched together.
 *
 * Commands   a command is a function and its arguments by value; it launches kernels, copies or calls cuBLAS on the back end's
 *            stream. cuda_commands_play() launches what was written down, in order, behind one copy of what was staged.
 * Staging    what the host has to say to the device (positions, items, pieces) is put into pinned memory by cuda_commands_stage(), which
 *            tells where it will lie on the device when the commands behind it run.
 * Work       cuda_commands_work(): device memory for one operation to work in, which later operations use again.
 * Failure    the first failure is kept (cuda_commands_fail()); from then on nothing is written down or launched.
 *
 * Owner      the back end. Threads: its own.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

struct backend;

/* Launches; arguments: those that the command was written down with. */
typedef cudaError_t cuda_command(struct backend *backend, const void *arguments);

enum { CUDA_COMMAND_BYTES = 192 /* of arguments, at most */ };

struct cuda_commands;

/* backend->commands. Errors as finish(). */
int cuda_commands_new(struct backend *backend);
void cuda_commands_free(struct backend *backend); /* its commands; accepts that there are none */

/* Writes a command down. `name`: of the operation, for errors. Arguments without uninitialised padding: start from {0}. */
void cuda_commands_add(struct backend *backend, const char *name, cuda_command *run, const void *arguments,
                       size_t n_bytes);
#define CUDA_COMMAND(backend, name, run, arguments)                                                                    \
    cuda_commands_add((backend), (name), (run), &(arguments), sizeof(arguments))
/*
 * The same for a command whose launch depends on more than its arguments, or has effects beside the back end's stream (events,
 * other streams): what is played together with it never becomes a graph.
 */
#define CUDA_COMMAND_PLAIN(backend, name, run, arguments)                                                              \
    do {                                                                                                               \
        cuda_commands_keep_plain(backend);                                                                             \
        CUDA_COMMAND((backend), (name), (run), (arguments));                                                           \
    } while (0)
void cuda_commands_keep_plain(struct backend *backend);

/*
 * n_bytes that the device will have when the commands that follow run: to be filled before the next play. Returns where they
 * will lie there (aligned to 256 bytes); NULL: no memory, and the back end has failed.
 */
const void *cuda_commands_stage(struct backend *backend, size_t n_bytes, void **ret_host);
/* The same with a copy of `bytes`. */
const void *cuda_commands_stage_copy(struct backend *backend, const void *bytes, size_t n_bytes);

/* Bytes up to where the next part of a work, or of what is staged, may begin. */
static inline size_t cuda_commands_aligned(size_t n_bytes)
{
    return (n_bytes + 255) / 256 * 256;
}

/* Purposes whose memory may be in use at the same time. */
enum cuda_work {
    CUDA_WORK_PRODUCT_X,      /* inputs of cuBLAS */
    CUDA_WORK_PRODUCT_WEIGHT, /* a matrix as halves */
    CUDA_WORK_PREFILL_QUERY,
    CUDA_WORK_PREFILL_ROWS, /* rows of spans, two buffers */
    CUDA_WORK_PREFILL_KEYS,
    CUDA_WORK_PREFILL_SCORES,
    CUDA_WORK_PREFILL_PARTIALS,
    CUDA_WORK_ATTEND,
    CUDA_WORK_QUANTIZE,
    CUDA_WORK_SELECT,
    CUDA_WORK_SAMPLE,
    CUDA_N_WORKS
};
/* Device memory, at least n_bytes, 256-byte aligned, its content undefined; kept for the purpose. NULL: no memory, the back end has failed. */
void *cuda_commands_work(struct backend *backend, enum cuda_work purpose, size_t n_bytes);
/* The same for who can do with less: how many bytes there are, which may be fewer. No memory is no failure. */
size_t cuda_commands_work_bytes(struct backend *backend, enum cuda_work purpose, size_t n_bytes);

/* Launches what was written down. Does not wait. */
void cuda_commands_play(struct backend *backend);
/* Part `number` begins: plays what was written down before. What is played of a part may become a graph (cuda_graphs.h). */
void cuda_commands_part(struct backend *backend, uint32_t number);
/*
 * Plays, and waits until nothing is under way, also behind a failure: what was launched before it may still run. Tells none,
 * and keeps its own as any other.
 */
void cuda_commands_settle(struct backend *backend);
/* Plays, and waits until all is done; tells a failure once: -ENOMEM, -EIO, -ENODEV. */
int cuda_commands_finish(struct backend *backend);
/* A mark behind all that was asked for so far, which is played; and waiting for it. */
uint64_t cuda_commands_mark(struct backend *backend);
int cuda_commands_wait(struct backend *backend, uint64_t mark);

/* Keeps the first failure: the call's name and CUDA's words. cudaSuccess: nothing. Returns whether it is one. */
bool cuda_commands_failed(struct backend *backend, const char *call, cudaError_t error);
