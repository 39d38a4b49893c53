/* emulation_control.h - what a test says to the emulated device; C and C++. See emulation.h. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* 0 (at start): blocks and threads in order. Otherwise the random order of all later launches begins from this seed. */
void emulation_set_seed(uint64_t seed);

/* Bytes of device memory from now on; cudaMalloc() fails beyond. 8 GiB at start. */
void emulation_set_device_bytes(size_t n_bytes);

/* Bytes of host memory that cudaHostRegister() takes in all, from now on; without limit at start. */
void emulation_set_registered_bytes(size_t n_bytes);

/*
 * Call n (from 1) from now on of those of the runtime and of cuBLAS that can fail of themselves does: one that allocates or
 * creates finds no memory; one that asks has an invalid value; one whose stream captures spoils the capture; any other loses the
 * device (cudaErrorLaunchFailure). 0: none fails. Freeing never fails of itself.
 */
void emulation_fail_call(uint64_t n);
bool emulation_call_failed(void); /* since emulation_fail_call() */

/* From now on every call says cudaErrorIllegalAddress, as after a kernel that touched what it must not. Memory can be freed. */
void emulation_lose_device(void);
void emulation_restore_device(void); /* no errors any more, none to come */

/* Allocations of device, managed and pinned memory, registered ranges, streams, events, graphs that live: 0 where all was freed. */
size_t emulation_n_objects(void);

#ifdef __cplusplus
}
#endif
