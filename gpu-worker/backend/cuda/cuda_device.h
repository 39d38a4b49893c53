/*
 * cuda_device.h - the device of the cuda back end: which one it is, whether it will do, and what to say where there is none.
 *
 * Which      of the devices that CUDA_VISIBLE_DEVICES leaves (cuda_visible.h) the one of the options, or number `worker` modulo
 *            their number: workers of one host that are numbered from 0 have one each.
 * Errors     each with one sentence: -ENODEV there is none (no driver, no device, none for this process); -ENOTSUP a driver
 *            or device that is too old; -EINVAL the options' number is of none; -EBUSY somebody else has it for himself; -EIO CUDA
 *            does not start.
 *
 * Threads    cuda_device_open() makes the device the calling thread's; other threads say cudaSetDevice(number) themselves.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "gpu-worker/backend/backend.h"

struct cuda_device {
    int number; /* for cudaSetDevice() */
    int n_devices;
    int driver_version, runtime_version; /* 13000 is 13.0 */
    int major, minor;                    /* compute capability */
    uint32_t n_multiprocessors;
    size_t total_bytes;
    size_t free_bytes; /* when it was opened */
    int n_named;       /* devices that CUDA_VISIBLE_DEVICES names; -1: it is not set */
    char name[128];
    char pci[BACKEND_PCI_SIZE]; /* "0000:65:00.0"; "": it does not say */
};

/* Finds the device and makes it the calling thread's. */
int cuda_device_open(const struct backend_options *options, struct cuda_device *ret_device, char *error,
                     size_t error_size);

/* `locate` of backend.h: nothing is begun on the device. */
int cuda_device_locate(const struct backend_options *options, char ret_pci[BACKEND_PCI_SIZE], char *error,
                       size_t error_size);

/* Bytes that the back end may use in all: what was free when it was opened, less 512 MiB (of small devices an eighth) for what
 * the driver allocates by itself: code of kernels, cuBLAS's work, page tables. */
size_t cuda_device_capacity(const struct cuda_device *device);

/* "NVIDIA H100 (device 1 of 2, 0000:65:00.0, compute capability 9.0, 132 multiprocessors, 79.1 of 80.0 GiB free, CUDA 13.0,
 * driver's 13.1)". Returns text. */
const char *cuda_device_describe(const struct cuda_device *device, char *text, size_t text_size);
