/*
 * emulation.h - kernels on the CPU: the blocks of a launch run one after the other, the threads of a block as fibres.
 *
 * Owner      the thread that launches, one at a time; one emulated device a process.
 * Order      threads of a block run in order, each up to its next barrier; with a seed, blocks and the threads between
 *            barriers run in random order, so that a missing barrier shows.
 * Checks     one line and abort: threads of a block at different barriers, or some at none; a warp operation with a mask that
 *            does not fit the lanes that come; a pointer argument that is not device memory; a damaged guard zone.
 *            Shared memory starts as NaNs in every block (not under the address sanitizer, which watches its ends).
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <functional>

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
 * All lanes of `mask`, which must hold the caller: what combine() makes of the values and arguments they brought, all defined
 * for the lanes of the mask alone. combine() may fail.
 */
typedef void emulation_combine(const uint64_t *values, const uint64_t *arguments, unsigned int mask, uint64_t *results);
uint64_t emulation_warp(unsigned int mask, uint64_t value, uint64_t argument, emulation_combine *combine,
                        const char *file, int line);

void emulation_check_pointer(const char *kernel, int argument, const volatile void *pointer);

/* A launch but for its arguments, which lie in a struct `call` of the launcher's. */
struct emulation_kernel {
    const char *name;
    const void *function;
    dim3 grid, block;
    size_t shared_bytes;
    void (*check)(const char *name, const void *call); /* the pointers among them */
    void (*thread)(const void *call);                  /* runs as one thread */
};

/* Into a stream; errors as cudaGetLastError() gives them. `call` is copied byte by byte where it is kept. */
void emulation_launch(const struct emulation_kernel *kernel, cudaStream_t stream, const void *call, size_t n_bytes);

/* ---- between the files of the emulation ---- */

/* emulation.cpp */
cudaError_t emulation_check_launch(const struct emulation_kernel *kernel);
void emulation_run(const struct emulation_kernel *kernel, const void *call);
void emulation_waited(void); /* looks at all guards, if anything was launched since the last time */

/* Calls of the runtime by what they do; see emulation_fail_call(). */
enum emulation_call {
    EMULATION_ASKS,
    EMULATION_ALLOCATES, /* memory: not while this thread captures */
    EMULATION_CREATES,   /* anything else */
    EMULATION_WORKS,     /* gives work to a stream */
    EMULATION_RECORDS,   /* to one that captures */
    EMULATION_WAITS,     /* for what was given; not while this thread captures */
    EMULATION_FREES,     /* memory: not while this thread captures */
    EMULATION_DESTROYS,
};

/* emulation_device.cpp: what a call begins with: the error that it is to return. emulation_error() notes and gives one. */
cudaError_t emulation_begin(enum emulation_call call);
cudaError_t emulation_begin_launch(void);
cudaError_t emulation_error(cudaError_t error);

/* emulation_memory.cpp; emulation_check_device() fails unless all bytes are in one allocation of the device; `what` names them. */
void emulation_check_device(const void *memory, size_t n_bytes, const char *what);
void emulation_memory_bytes(size_t *free_bytes, size_t *total_bytes);
size_t emulation_n_ranges(void);
size_t emulation_shared_limit(const void *function);
void emulation_set_shared_limit(const void *function, size_t n_bytes);
void emulation_check_guards(bool all, const char *when);
void *emulation_guarded_alloc(size_t n_bytes);
void emulation_guarded_free(void *memory, const char *when);

/* emulation_streams.cpp; the work is recorded where emulation_is_recording(), done at once otherwise */
cudaError_t emulation_begin_work(cudaStream_t stream);
bool emulation_is_recording(cudaStream_t stream);
void emulation_record(cudaStream_t stream, std::function<void()> operation);
cudaError_t emulation_spoil(cudaStream_t stream, cudaError_t error); /* its capture; gives the error */
cudaError_t emulation_capture_forbids(void);                         /* this thread to allocate and to wait */
cudaError_t emulation_legacy_forbids(void);                          /* work of the stream NULL */
void emulation_count_object(int more);                               /* 1: it lives, -1: no more */
