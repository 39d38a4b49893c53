/*
 * emulation_memory.cpp - the CUDA runtime's calls of the host: memory with guard zones, copies that are checked, streams and
 * events that are always done. See emulation.h and cuda_runtime_api.h.
 */
#include "tests/backend/cuda-on-cpu/emulation.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <iterator>
#include <map>

#define GUARD_BYTES     256u /* also the alignment that cudaMalloc() promises */
#define GUARD_PATTERN   0xa5
#define SHARED_BYTES    (48u * 1024u)  /* of a block, unless the kernel was told otherwise */
#define SHARED_BYTES_UP (227u * 1024u) /* what can be told: compute capability 9.0 and 10.0 */

enum kind { DEVICE, HOST };

struct range {
    size_t n_bytes;
    enum kind kind;
    bool owned;
};

struct CUstream_st {
    int flags;
};

struct CUevent_st {
    bool recorded, timed;
    struct timespec at;
};

static std::map<uintptr_t, struct range> ranges; /* by address: device memory, and host memory the device may touch */
static std::map<const void *, size_t> shared_limits;
static size_t device_bytes = (size_t)8 << 30, used_bytes;
static size_t most_registered_bytes = SIZE_MAX, registered_bytes;
static cudaError_t last_error;

extern "C" void emulation_set_device_bytes(size_t n_bytes)
{
    device_bytes = n_bytes;
}

extern "C" void emulation_set_registered_bytes(size_t n_bytes)
{
    most_registered_bytes = n_bytes;
}

void emulation_set_error(cudaError_t error)
{
    last_error = error;
}

static cudaError_t failed(cudaError_t error)
{
    last_error = error;
    return error;
}

size_t emulation_shared_limit(const void *function)
{
    const auto found = shared_limits.find(function);
    return found == shared_limits.end() ? SHARED_BYTES : found->second;
}

/* ---- guard zones: [guard | memory | guard], so that it starts on 256 bytes and the guard at its last byte ---- */

static size_t whole_bytes(size_t n_bytes)
{
    return (n_bytes + 3 * GUARD_BYTES - 1) / GUARD_BYTES * GUARD_BYTES;
}

void *emulation_guarded_alloc(size_t n_bytes)
{
    unsigned char *whole = (unsigned char *)aligned_alloc(GUARD_BYTES, whole_bytes(n_bytes));
    if (!whole)
        emulation_fail("no memory for %zu bytes", n_bytes);
    memset(whole, GUARD_PATTERN, whole_bytes(n_bytes));
    memset(whole + GUARD_BYTES, 0xff, n_bytes); /* NaNs: nobody may count on zeros */
#if defined(__SANITIZE_ADDRESS__)
    ASAN_POISON_MEMORY_REGION(whole, GUARD_BYTES);
    ASAN_POISON_MEMORY_REGION(whole + GUARD_BYTES + n_bytes, whole_bytes(n_bytes) - GUARD_BYTES - n_bytes);
#else
    memcpy(whole, &n_bytes, sizeof n_bytes);
#endif
    return whole + GUARD_BYTES;
}

#if !defined(__SANITIZE_ADDRESS__)
static void check_guard(const unsigned char *memory, size_t n_bytes, const char *when)
{
    size_t noted;
    memcpy(&noted, memory - GUARD_BYTES, sizeof noted);
    bool whole = noted == n_bytes;
    for (size_t i = sizeof noted; i < GUARD_BYTES && whole; i++)
        whole = memory[i - GUARD_BYTES] == GUARD_PATTERN;
    if (!whole)
        emulation_fail("written before the beginning of %zu bytes, seen %s", n_bytes, when);
    for (size_t i = n_bytes; i < whole_bytes(n_bytes) - GUARD_BYTES; i++)
        if (memory[i] != GUARD_PATTERN)
            emulation_fail("written behind the end of %zu bytes, seen %s", n_bytes, when);
}
#endif

void emulation_guarded_free(void *memory, const char *when)
{
    unsigned char *whole = (unsigned char *)memory - GUARD_BYTES;
#if defined(__SANITIZE_ADDRESS__)
    (void)when;
    /* the sanitizer watched the guards; free() wants all of it readable */
    ASAN_UNPOISON_MEMORY_REGION(whole, GUARD_BYTES);
#else
    size_t n_bytes;
    memcpy(&n_bytes, whole, sizeof n_bytes);
    check_guard((unsigned char *)memory, n_bytes, when);
#endif
    free(whole);
}

void emulation_check_guards(const char *when)
{
#if !defined(__SANITIZE_ADDRESS__)
    for (const auto &[address, range] : ranges)
        if (range.kind == DEVICE)
            check_guard((const unsigned char *)address, range.n_bytes, when);
#else
    (void)when;
#endif
}

/* The range that holds the address (its end counts), or NULL. */
static const struct range *find_range(const volatile void *pointer)
{
    auto after = ranges.upper_bound((uintptr_t)pointer);
    if (after == ranges.begin())
        return NULL;
    --after;
    return (uintptr_t)pointer <= after->first + after->second.n_bytes ? &after->second : NULL;
}

void emulation_check_pointer(const char *kernel, int argument, const volatile void *pointer)
{
    if (pointer && !find_range(pointer))
        emulation_fail("argument %d of kernel %s is a pointer to memory that the device does not have", argument,
                       kernel);
}

/* ---- errors and the device ---- */

static const struct {
    cudaError_t error;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
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

cudaError_t cudaGetLastError(void)
{
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    return device == 0 ? cudaSuccess : failed(cudaErrorInvalidDevice);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    *total_bytes = device_bytes;
    *free_bytes = used_bytes < device_bytes ? device_bytes - used_bytes : 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    return last_error;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value)
{
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || (unsigned int)value > SHARED_BYTES_UP)
        return failed(cudaErrorInvalidValue);
    shared_limits[function] = (size_t)value;
    return cudaSuccess;
}

/* ---- memory ---- */

cudaError_t cudaMalloc(void **memory, size_t n_bytes)
{
    if (n_bytes > device_bytes || used_bytes > device_bytes - n_bytes)
        return failed(cudaErrorMemoryAllocation);
    if (!n_bytes) {
        *memory = NULL;
        return cudaSuccess;
    }
    *memory = emulation_guarded_alloc(n_bytes);
    ranges[(uintptr_t)*memory] = {n_bytes, DEVICE, true};
    used_bytes += n_bytes;
    return cudaSuccess;
}

cudaError_t cudaFree(void *memory)
{
    if (!memory)
        return cudaSuccess;
    const auto found = ranges.find((uintptr_t)memory);
    if (found == ranges.end() || found->second.kind != DEVICE)
        return failed(cudaErrorInvalidValue);
    used_bytes -= found->second.n_bytes;
    ranges.erase(found);
    emulation_guarded_free(memory, "at cudaFree");
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **memory, size_t n_bytes)
{
    *memory = aligned_alloc(4096, (n_bytes + 4096) / 4096 * 4096);
    if (!*memory)
        return failed(cudaErrorMemoryAllocation);
    ranges[(uintptr_t)*memory] = {n_bytes, HOST, true};
    return cudaSuccess;
}

static cudaError_t forget_host(void *memory, bool owned)
{
    const auto found = ranges.find((uintptr_t)memory);
    if (found == ranges.end() || found->second.kind != HOST || found->second.owned != owned)
        return failed(cudaErrorInvalidValue);
    ranges.erase(found);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *memory)
{
    if (!memory)
        return cudaSuccess;
    const cudaError_t error = forget_host(memory, true);
    if (!error)
        free(memory);
    return error;
}

/* Do any of these bytes lie in a range that there is? */
static bool is_known(const void *memory, size_t n_bytes)
{
    const auto after = ranges.lower_bound((uintptr_t)memory + n_bytes);
    return after != ranges.begin() && std::prev(after)->first + std::prev(after)->second.n_bytes > (uintptr_t)memory;
}

cudaError_t cudaHostRegister(void *memory, size_t n_bytes, unsigned int flags)
{
    (void)flags;
    if (!memory || !n_bytes || is_known(memory, n_bytes))
        return failed(cudaErrorInvalidValue);
    if (n_bytes > most_registered_bytes || registered_bytes > most_registered_bytes - n_bytes)
        return failed(cudaErrorMemoryAllocation);
    registered_bytes += n_bytes;
    ranges[(uintptr_t)memory] = {n_bytes, HOST, false};
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *memory)
{
    const auto found = ranges.find((uintptr_t)memory);
    const size_t n_bytes = found == ranges.end() ? 0 : found->second.n_bytes;
    const cudaError_t error = forget_host(memory, false);
    if (!error)
        registered_bytes -= n_bytes;
    return error;
}

cudaError_t cudaHostGetDevicePointer(void **device, void *memory, unsigned int flags)
{
    const struct range *range = find_range(memory);
    if (!range || range->kind != HOST || flags)
        return failed(cudaErrorInvalidValue);
    *device = memory;
    return cudaSuccess;
}

/* A range of device memory must hold all bytes; host memory must not be the device's. */
static void check_range(const void *memory, size_t n_bytes, bool on_device, const char *what)
{
    auto after = ranges.upper_bound((uintptr_t)memory);
    const bool inside = after != ranges.begin() &&
                        (uintptr_t)memory < std::prev(after)->first + std::prev(after)->second.n_bytes &&
                        std::prev(after)->second.kind == DEVICE;
    if (inside != on_device)
        emulation_fail("the %s is %sdevice memory", what, on_device ? "not " : "");
    if (inside && (uintptr_t)memory + n_bytes > std::prev(after)->first + std::prev(after)->second.n_bytes)
        emulation_fail("%zu bytes go beyond the %s", n_bytes, what);
}

/* Host memory that the driver knows a part of: it refuses to copy that. */
static bool is_shared_out(const void *memory, size_t n_bytes)
{
    if (!is_known(memory, n_bytes))
        return false;
    const auto range = std::prev(ranges.lower_bound((uintptr_t)memory + n_bytes));
    return range->second.kind == HOST &&
           ((uintptr_t)memory < range->first || (uintptr_t)memory + n_bytes > range->first + range->second.n_bytes);
}

void emulation_check_device(const void *memory, size_t n_bytes, const char *what)
{
    check_range(memory, n_bytes, true, what);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t n_bytes, enum cudaMemcpyKind kind)
{
    if (!n_bytes)
        return cudaSuccess;
    if (is_shared_out(to, n_bytes) || is_shared_out(from, n_bytes))
        return failed(cudaErrorInvalidValue);
    if (kind != cudaMemcpyDefault) {
        check_range(to, n_bytes, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice,
                    "target of a copy");
        check_range(from, n_bytes, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice,
                    "source of a copy");
    }
    memcpy(to, from, n_bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n_bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    (void)stream;
    return cudaMemcpy(to, from, n_bytes, kind);
}

cudaError_t cudaMemset(void *memory, int value, size_t n_bytes)
{
    if (!n_bytes)
        return cudaSuccess;
    check_range(memory, n_bytes, true, "memory to set");
    memset(memory, value, n_bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t n_bytes, cudaStream_t stream)
{
    (void)stream;
    return cudaMemset(memory, value, n_bytes);
}

/* ---- streams and events ---- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
    *stream = new CUstream_st{(int)flags};
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    (void)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    (void)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    (void)stream;
    (void)flags;
    return event ? cudaSuccess : failed(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    *event = new CUevent_st{false, !(flags & cudaEventDisableTiming), {}};
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    (void)stream;
    if (!event)
        return failed(cudaErrorInvalidResourceHandle);
    event->recorded = true;
    clock_gettime(CLOCK_MONOTONIC, &event->at);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    return event ? cudaSuccess : failed(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    return cudaEventQuery(event);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    if (!start || !end || !start->recorded || !end->recorded || !start->timed || !end->timed)
        return failed(cudaErrorInvalidResourceHandle);
    *milliseconds = (float)((double)(end->at.tv_sec - start->at.tv_sec) * 1e3 +
                            (double)(end->at.tv_nsec - start->at.tv_nsec) * 1e-6);
    return cudaSuccess;
}
