/* properties.h - what a device says of itself. One source file for devices, one for the emulated one. */
#pragma once

#include <stdio.h>

#include <cuda_runtime_api.h>

struct properties {
    char name[256];
    int major, minor, n_multiprocessors, bus_bits, ecc, driver, runtime; /* driver, runtime: 13000 is 13.0 */
    double l2_bytes, clock_hz, memory_clock_hz;
    double bytes_per_second; /* peak of its memory, of clock and width; 0: not known */
    char pci[32];
};

cudaError_t properties_read(struct properties *ret_properties);
