/*
 * emulation.h - kernels on the CPU: the blocks of a launch run one after the other, the threads of a block as fibres.
 *
 * Owner      the thread that launches; one emulated device a process.
 * Order      threads of a block run in order, each up to its next barrier; with a seed, blocks and the threads between
 *            barriers run in random order, so that a missing barrier shows.
 * Checks     one line and abort: threads of a block at different barriers, or some at none; a warp operation with a mask that
 *            does not fit the lanes that come; a pointer argument that is not device memory; a damaged guard zone.
 *            Shared memory starts as NaNs in every block (not under the address sanitizer, which watches its ends).
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

#include "tests/backend/cuda-on-cpu/emulation_control.h"

/* Where a kernel is, one line, abort(). */
extern "C" [[noreturn]] [[gnu::format(printf, 1, 2)]] void emulation_fail(const char *format, ...);

struct uint3 {
    unsigned int x, y, z;
};

struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1) : x(x_), y(y_), z(z_)
    {
    }
};

/* What a kernel sees of where it is. */
struct emulation_place {
    dim3 grid, block;
    uint3 block_index;
    unsigned char *dynamic_shared;
};
extern struct emulation_place emulation_place;

struct emulation_thread {
    uint3 index;
    unsigned int lane;
};
extern struct emulation_thread *emulation_thread;

/* ---- for the header of the device side ---- */

/* All threads of the block; the result is how many gave `predicate`. `line` tells barriers apart. */
unsigned int emulation_barrier(int predicate, const char *file, int line);

/*
 * All lanes of `mask`, which must hold the caller: result of combine() over the values they brought. combine() may fail.
 * values[lane] is defined for the lanes of the mask.
 */
typedef uint64_t emulation_combine(const uint64_t *values, unsigned int mask, unsigned int lane, uint64_t argument);
uint64_t emulation_warp(unsigned int mask, uint64_t value, uint64_t argument, emulation_combine *combine,
                        const char *file, int line);

void emulation_check_pointer(const char *kernel, int argument, const volatile void *pointer);
void emulation_run(const char *kernel, const void *function, dim3 grid, dim3 block, size_t shared_bytes,
                   void (*call)(void *context), void *context);

/* ---- between the files of the emulation ---- */

/* Fails unless all bytes are in one allocation of the device; `what` names them. */
void emulation_check_device(const void *memory, size_t n_bytes, const char *what);

size_t emulation_shared_limit(const void *function);
void emulation_set_error(cudaError_t error);
void emulation_check_guards(const char *when);
void *emulation_guarded_alloc(size_t n_bytes);
void emulation_guarded_free(void *memory, const char *when);
