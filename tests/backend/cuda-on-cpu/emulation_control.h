/* emulation_control.h - what a test says to the emulated device; C and C++. See emulation.h. */
#pragma once

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

#ifdef __cplusplus
}
#endif
