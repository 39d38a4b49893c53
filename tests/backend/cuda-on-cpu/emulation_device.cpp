/*
 * emulation_device.cpp - what the emulated device is, errors of the runtime and how tests bring them about. See emulation.h.
 *
 * The machine can be described by the environment, for programs that a test starts:
 *   HCATTN_TEST_CUDA_BYTES=N          device memory
 *   HCATTN_TEST_CUDA_NO_DEVICE=WHY    driver: there is none; old: one of CUDA 12.2; none: a driver, no device; busy, fabric,
 *                                     mismatch, compat: a device that cannot be had
 *   HCATTN_TEST_CUDA_FAIL_AFTER=N     launch N of the process (kernels and graphs, from 1) loses the device
 *   HCATTN_TEST_CUDA_PCI=ADDRESS      of the device; otherwise one that no machine has
 *   CUDA_VISIBLE_DEVICES              as the runtime reads it: the first word hides the device unless it names number 0 or the
 *                                     beginning of its UUID
 */
#include "tests/backend/cuda-on-cpu/emulation.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define UUID         "GPU-e0e0e0e0-0000-4000-8000-000000000000"
#define SHARED_BYTES (227u * 1024u) /* that a block can be given: compute capability 9.0 and 10.0 */
#define CUDA_VERSION 13000

static thread_local cudaError_t last_error;
static cudaError_t lost; /* what every call says from now on: the device is lost, or there never was one */
static int driver_version = CUDA_VERSION;
static uint64_t calls_to_failure; /* the call that makes it 0 fails; 0: none does */
static bool call_failed;
static uint64_t launches_to_loss; /* likewise */

static const struct {
    const char *why;
    cudaError_t error;
    int driver_version;
} missing[] = {
    {"driver", cudaErrorInsufficientDriver, 0},
    {"old", cudaErrorInsufficientDriver, 12020},
    {"none", cudaErrorNoDevice, CUDA_VERSION},
    {"busy", cudaErrorDevicesUnavailable, CUDA_VERSION},
    {"fabric", cudaErrorSystemNotReady, CUDA_VERSION},
    {"mismatch", cudaErrorSystemDriverMismatch, CUDA_VERSION},
    {"compat", cudaErrorCompatNotSupportedOnDevice, CUDA_VERSION},
};

static bool is_visible(const char *list)
{
    const size_t length = strcspn(list, ",");
    if (length == 1 && list[0] == '0')
        return true;
    return length > strlen("GPU-") && length <= strlen(UUID) && strncmp(list, UUID, length) == 0;
}

/* The environment, once: no call of the runtime comes before the first one of these. */
static bool read_environment(void)
{
    const char *bytes = getenv("HCATTN_TEST_CUDA_BYTES"), *why = getenv("HCATTN_TEST_CUDA_NO_DEVICE");
    const char *launches = getenv("HCATTN_TEST_CUDA_FAIL_AFTER"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    const char *registered = getenv("HCATTN_TEST_CUDA_REGISTERED_BYTES");
    if (bytes)
        emulation_set_device_bytes((size_t)strtoull(bytes, NULL, 10));
    if (registered)
        emulation_set_registered_bytes((size_t)strtoull(registered, NULL, 10));
    if (launches)
        launches_to_loss = strtoull(launches, NULL, 10);
    if (visible && !is_visible(visible))
        lost = cudaErrorNoDevice;
    for (const auto &known : missing) {
        if (!why || strcmp(why, known.why) != 0)
            continue;
        lost = known.error;
        driver_version = known.driver_version;
    }
    return true;
}

static void begin_process(void)
{
    static const bool done = read_environment();
    (void)done;
}

/* ---- errors ---- */

cudaError_t emulation_error(cudaError_t error)
{
    last_error = error;
    return error;
}

cudaError_t emulation_begin(enum emulation_call call)
{
    begin_process();
    if (lost)
        return lost;
    if (call != EMULATION_FREES && call != EMULATION_DESTROYS && calls_to_failure && --calls_to_failure == 0) {
        call_failed = true;
        if (call == EMULATION_ASKS)
            return emulation_error(cudaErrorInvalidValue);
        if (call != EMULATION_WORKS && call != EMULATION_WAITS)
            return emulation_error(cudaErrorMemoryAllocation);
        lost = cudaErrorLaunchFailure;
        return lost;
    }
    if (call == EMULATION_ALLOCATES || call == EMULATION_WAITS || call == EMULATION_FREES)
        return emulation_capture_forbids();
    return cudaSuccess;
}

cudaError_t emulation_begin_launch(void)
{
    const cudaError_t error = emulation_begin(EMULATION_WORKS);
    if (!error && launches_to_loss && --launches_to_loss == 0)
        emulation_lose_device();
    return lost ? lost : error;
}

extern "C" void emulation_lose_device(void)
{
    lost = cudaErrorIllegalAddress;
}

extern "C" void emulation_restore_device(void)
{
    begin_process();
    lost = cudaSuccess;
    last_error = cudaSuccess;
    calls_to_failure = launches_to_loss = 0;
}

extern "C" void emulation_fail_call(uint64_t n)
{
    calls_to_failure = n;
    call_failed = false;
}

extern "C" bool emulation_call_failed(void)
{
    return call_failed;
}

static const struct {
    cudaError_t error;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "the driver is too old for this runtime, or there is none"},
    {cudaErrorDevicesUnavailable, "cudaErrorDevicesUnavailable", "the device is busy or unavailable"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "not in this state"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "a kernel touched memory that it has not"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "some of this host memory is registered already"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "no host memory is registered at this address"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorSystemNotReady, "cudaErrorSystemNotReady", "the system is not ready"},
    {cudaErrorSystemDriverMismatch, "cudaErrorSystemDriverMismatch", "library and module of the driver differ"},
    {cudaErrorCompatNotSupportedOnDevice, "cudaErrorCompatNotSupportedOnDevice",
     "the device does not run with compatibility libraries"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported", "not while a stream captures"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated", "an error spoiled the capture"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "a captured stream waits for work outside of the capture"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit", "the legacy stream would wait for a capture"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent", "the event was recorded in a capture"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread", "the capture is another thread's"},
};

const char *cudaGetErrorName(cudaError_t error)
{
    for (const auto &known : errors)
        if (known.error == error)
            return known.name;
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error)
{
    for (const auto &known : errors)
        if (known.error == error)
            return known.text;
    return "unrecognized error code";
}

cudaError_t cudaPeekAtLastError(void)
{
    return lost ? lost : last_error;
}

cudaError_t cudaGetLastError(void)
{
    const cudaError_t error = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return error;
}

/* ---- the device ---- */

cudaError_t cudaDriverGetVersion(int *version)
{
    begin_process();
    *version = driver_version;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDA_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    const cudaError_t error = emulation_begin(EMULATION_ASKS);
    *count = error ? 0 : 1;
    return error;
}

cudaError_t cudaGetDevice(int *device)
{
    const cudaError_t error = emulation_begin(EMULATION_ASKS);
    if (!error)
        *device = 0;
    return error;
}

static cudaError_t begin_of_device(int device)
{
    const cudaError_t error = emulation_begin(EMULATION_ASKS);
    if (error)
        return error;
    return device == 0 ? cudaSuccess : emulation_error(cudaErrorInvalidDevice);
}

cudaError_t cudaSetDevice(int device)
{
    return begin_of_device(device);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    static const struct {
        enum cudaDeviceAttr attribute;
        int value;
    } attributes[] = {
        {cudaDevAttrMultiProcessorCount, 4},
        {cudaDevAttrUnifiedAddressing, 1},
        {cudaDevAttrComputeCapabilityMajor, 9},
        {cudaDevAttrComputeCapabilityMinor, 0},
        {cudaDevAttrManagedMemory, 1},
        {cudaDevAttrPageableMemoryAccess, 0},
        {cudaDevAttrConcurrentManagedAccess, 1},
        {cudaDevAttrCanUseHostPointerForRegisteredMem, 1},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, (int)SHARED_BYTES},
        {cudaDevAttrHostRegisterSupported, 1},
    };
    const cudaError_t error = begin_of_device(device);
    if (error)
        return error;
    for (const auto &known : attributes) {
        if (known.attribute == attribute) {
            *value = known.value;
            return cudaSuccess;
        }
    }
    return emulation_error(cudaErrorInvalidValue);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    const cudaError_t error = begin_of_device(device);
    if (error)
        return error;
    *properties = {};
    snprintf(properties->name, sizeof properties->name, "emulated on the CPU");
    size_t free_bytes;
    emulation_memory_bytes(&free_bytes, &properties->totalGlobalMem);
    properties->sharedMemPerBlockOptin = SHARED_BYTES;
    properties->major = 9;
    properties->multiProcessorCount = 4;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *address, int n, int device)
{
    const char *given = getenv("HCATTN_TEST_CUDA_PCI");
    const cudaError_t error = begin_of_device(device);
    if (error)
        return error;
    if (!address || n < 13)
        return emulation_error(cudaErrorInvalidValue);
    snprintf(address, (size_t)n, "%s", given ? given : "ffff:ff:1f.7");
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    const cudaError_t error = emulation_begin(EMULATION_ASKS);
    if (!error)
        emulation_memory_bytes(free_bytes, total_bytes);
    return error;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value)
{
    const cudaError_t error = emulation_begin(EMULATION_ASKS);
    if (error)
        return error;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || (unsigned int)value > SHARED_BYTES)
        return emulation_error(cudaErrorInvalidValue);
    emulation_set_shared_limit(function, (size_t)value);
    return cudaSuccess;
}
