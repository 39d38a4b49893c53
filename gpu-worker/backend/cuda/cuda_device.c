/* cuda_device.c - see cuda_device.h. */
#include "gpu-worker/backend/cuda/cuda_device.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cuda_runtime_api.h>

#include "gpu-worker/backend/cuda/cuda_visible.h"

#define DRIVER_FOLDER   "/proc/driver/nvidia"
#define RUNTIME_VERSION 13000
#define LEAST_MAJOR     8 /* what the kernels are compiled for begins there */
#define RESERVE_BYTES   ((size_t)512 << 20)
#define GIB             (1024.0 * 1024 * 1024)

static int refuse(int result, char *error, size_t error_size, const char *sentence)
{
    snprintf(error, error_size, "%s", sentence);
    return result;
}

/* The runtime's answer where it tells more than one of CUDA's words would. */
static int refuse_runtime(cudaError_t answer, const char *call, char *error, size_t error_size)
{
    switch (answer) {
    case cudaErrorSystemNotReady:
        return refuse(-EIO, error, error_size,
                      "the devices are not ready: where they are joined by NVSwitch, nvidia-fabricmanager must run");
    case cudaErrorSystemDriverMismatch:
        return refuse(-EIO, error, error_size,
                      "the driver's library and its kernel module are of different versions: load the module anew");
    case cudaErrorCompatNotSupportedOnDevice:
        return refuse(-ENOTSUP, error, error_size, "this device does not run with the compatibility libraries of CUDA");
    case cudaErrorDevicesUnavailable:
        return refuse(-EBUSY, error, error_size,
                      "another process has the device for itself, or its compute mode forbids us (nvidia-smi -q)");
    default:
        snprintf(error, error_size, "%s: %s (%s)", call, cudaGetErrorString(answer), cudaGetErrorName(answer));
        return answer == cudaErrorMemoryAllocation ? -ENOMEM : -EIO;
    }
}

static int refuse_driver(int version, char *error, size_t error_size)
{
    if (version != 0) {
        snprintf(error, error_size, "the driver is too old for CUDA 13 (has %d.%d; 580 or later is needed)",
                 version / 1000, version % 1000 / 10);
        return -ENOTSUP;
    }
    if (access(DRIVER_FOLDER "/version", F_OK) == 0)
        return refuse(
            -ENODEV, error, error_size,
            "the NVIDIA driver's library libcuda.so.1 is missing; a container gets it from the NVIDIA container "
            "toolkit when it is started with devices");
    return refuse(-ENODEV, error, error_size,
                  "no NVIDIA driver on this machine (neither libcuda.so.1 nor " DRIVER_FOLDER ")");
}

static int count_devices(const struct backend_options *options, int *ret_n, char *error, size_t error_size)
{
    int version = 0, n = 0;
    /* Without a driver the version is 0, and the other calls say that it is too old. */
    if (cudaDriverGetVersion(&version) != cudaSuccess)
        version = 0;
    if (version < RUNTIME_VERSION)
        return refuse_driver(version, error, error_size);
    const cudaError_t answer = cudaGetDeviceCount(&n);
    if (answer == cudaSuccess && n > 0) {
        *ret_n = n;
        return 0;
    }
    (void)cudaGetLastError();
    if (answer != cudaSuccess && answer != cudaErrorNoDevice && answer != cudaErrorInvalidDevice)
        return refuse_runtime(answer, "cudaGetDeviceCount", error, error_size);
    cuda_visible_explain(options->visible_devices, cuda_visible_count(DRIVER_FOLDER "/gpus"), error, error_size);
    return -ENODEV;
}

static int choose(const struct backend_options *options, int n_devices, int *ret_number, char *error, size_t error_size)
{
    if (options->device < 0) {
        *ret_number = (int)(options->worker % (uint32_t)n_devices);
        return 0;
    }
    if (options->device < n_devices) {
        *ret_number = options->device;
        return 0;
    }
    const char *visible = options->visible_devices;
    snprintf(error, error_size, "there is no device %d: this process has %d%s%.80s%s", options->device, n_devices,
             visible ? " (CUDA_VISIBLE_DEVICES=" : "", visible ? visible : "", visible ? ")" : "");
    return -EINVAL;
}

/* Nothing of this begins anything on the device. */
static int find(const struct backend_options *options, struct cuda_device *ret_device, char *error, size_t error_size)
{
    struct cuda_device device = {.n_named = cuda_visible_n_named(options->visible_devices)};
    struct cudaDeviceProp properties;
    int r = count_devices(options, &device.n_devices, error, error_size);
    if (r == 0)
        r = choose(options, device.n_devices, &device.number, error, error_size);
    if (r < 0)
        return r;
    const cudaError_t answer = cudaGetDeviceProperties(&properties, device.number);
    if (answer != cudaSuccess)
        return refuse_runtime(answer, "cudaGetDeviceProperties", error, error_size);
    snprintf(device.name, sizeof device.name, "%.100s", properties.name);
    device.major = properties.major;
    device.minor = properties.minor;
    device.n_multiprocessors = (uint32_t)properties.multiProcessorCount;
    device.total_bytes = properties.totalGlobalMem;
    if (device.major < LEAST_MAJOR) {
        snprintf(error, error_size, "%s (device %d of %d) has compute capability %d.%d; %d.0 or later is needed",
                 device.name, device.number, device.n_devices, device.major, device.minor, LEAST_MAJOR);
        return -ENOTSUP;
    }
    (void)cudaDriverGetVersion(&device.driver_version);
    (void)cudaRuntimeGetVersion(&device.runtime_version);
    if (cudaDeviceGetPCIBusId(device.pci, sizeof device.pci, device.number) != cudaSuccess)
        device.pci[0] = '\0';
    for (char *at = device.pci; *at != '\0'; at++) /* as the kernel writes it */
        *at = (char)tolower((unsigned char)*at);
    *ret_device = device;
    return 0;
}

int cuda_device_locate(const struct backend_options *options, char ret_pci[BACKEND_PCI_SIZE], char *error,
                       size_t error_size)
{
    struct cuda_device device;
    const int r = find(options, &device, error, error_size);
    if (r == 0)
        memcpy(ret_pci, device.pci, sizeof device.pci);
    return r;
}

int cuda_device_open(const struct backend_options *options, struct cuda_device *ret_device, char *error,
                     size_t error_size)
{
    struct cuda_device device;
    const int r = find(options, &device, error, error_size);
    if (r < 0)
        return r;
    cudaError_t answer = cudaSetDevice(device.number);
    if (answer != cudaSuccess)
        return refuse_runtime(answer, "cudaSetDevice", error, error_size);
    answer = cudaMemGetInfo(&device.free_bytes, &device.total_bytes);
    if (answer != cudaSuccess)
        return refuse_runtime(answer, "cudaMemGetInfo", error, error_size);
    *ret_device = device;
    return 0;
}

size_t cuda_device_capacity(const struct cuda_device *device)
{
    const size_t eighth = device->free_bytes / 8;
    return device->free_bytes - (eighth < RESERVE_BYTES ? eighth : RESERVE_BYTES);
}

const char *cuda_device_describe(const struct cuda_device *device, char *text, size_t text_size)
{
    char named[64] = "";
    if (device->n_named > device->n_devices)
        snprintf(named, sizeof named, ", CUDA_VISIBLE_DEVICES names %d", device->n_named);
    snprintf(text, text_size,
             "%s (device %d of %d%s, %s%scompute capability %d.%d, %u multiprocessors, %.1f of %.1f GiB free, CUDA "
             "%d.%d, driver's %d.%d)",
             device->name, device->number, device->n_devices, named, device->pci, device->pci[0] ? ", " : "",
             device->major, device->minor, device->n_multiprocessors, (double)device->free_bytes / GIB,
             (double)device->total_bytes / GIB, device->runtime_version / 1000, device->runtime_version % 1000 / 10,
             device->driver_version / 1000, device->driver_version % 1000 / 10);
    return text;
}
