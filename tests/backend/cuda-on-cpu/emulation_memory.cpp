/*
 * emulation_memory.cpp - memory of the device and of the host with guard zones, and copies that are checked. See emulation.h
 * and cuda_runtime_api.h.
 */
#include "tests/backend/cuda-on-cpu/emulation.h"

#include <stdlib.h>
#include <string.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <array>
#include <iterator>
#include <map>

#define GUARD_BYTES      256u /* also the alignment that cudaMalloc() promises */
#define GUARD_PATTERN    0xa5
#define CHECKED_A_LAUNCH 16u           /* allocations, where there are many; all of them when somebody waits */
#define SHARED_BYTES     (48u * 1024u) /* of a block, unless the kernel was told otherwise */

enum kind { DEVICE, MANAGED, HOST };

struct range {
    size_t n_bytes;
    enum kind kind;
    bool owned; /* of HOST: by cudaMallocHost(), not registered */
};

static std::map<uintptr_t, struct range> ranges; /* by address: device memory, and host memory the device may touch */
static std::map<const void *, size_t> shared_limits;
static size_t device_bytes = (size_t)8 << 30, used_bytes;
static size_t most_registered_bytes = SIZE_MAX, registered_bytes;

extern "C" void emulation_set_device_bytes(size_t n_bytes)
{
    device_bytes = n_bytes;
}

extern "C" void emulation_set_registered_bytes(size_t n_bytes)
{
    most_registered_bytes = n_bytes;
}

void emulation_memory_bytes(size_t *free_bytes, size_t *total_bytes)
{
    *total_bytes = device_bytes;
    *free_bytes = used_bytes < device_bytes ? device_bytes - used_bytes : 0;
}

void emulation_set_shared_limit(const void *function, size_t n_bytes)
{
    shared_limits[function] = n_bytes;
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
static bool is_pattern(const unsigned char *bytes, size_t n_bytes)
{
    static const std::array<unsigned char, 3 *GUARD_BYTES> pattern = [] {
        std::array<unsigned char, 3 * GUARD_BYTES> all;
        all.fill(GUARD_PATTERN);
        return all;
    }();
    return memcmp(bytes, pattern.data(), n_bytes) == 0;
}

static void check_guard(const unsigned char *memory, size_t n_bytes, const char *when)
{
    size_t noted;
    memcpy(&noted, memory - GUARD_BYTES, sizeof noted);
    if (noted != n_bytes || !is_pattern(memory - GUARD_BYTES + sizeof noted, GUARD_BYTES - sizeof noted))
        emulation_fail("written before the beginning of %zu bytes, seen %s", n_bytes, when);
    if (!is_pattern(memory + n_bytes, whole_bytes(n_bytes) - GUARD_BYTES - n_bytes))
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

void emulation_check_guards(bool all, const char *when)
{
#if !defined(__SANITIZE_ADDRESS__)
    static uintptr_t last; /* where the launch before this one stopped */
    const size_t n = all || ranges.size() < 2 * CHECKED_A_LAUNCH ? ranges.size() : CHECKED_A_LAUNCH;
    auto next = n == ranges.size() ? ranges.begin() : ranges.upper_bound(last);
    for (size_t i = 0; i < n; i++, ++next) {
        if (next == ranges.end())
            next = ranges.begin();
        if (next->second.kind != HOST)
            check_guard((const unsigned char *)next->first, next->second.n_bytes, when);
        last = next->first;
    }
#else
    (void)all;
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

/* ---- allocations ---- */

static cudaError_t allocate(void **memory, size_t n_bytes, enum kind kind)
{
    const cudaError_t error = emulation_begin(EMULATION_ALLOCATES);
    if (error)
        return error;
    if (n_bytes > device_bytes || used_bytes > device_bytes - n_bytes)
        return emulation_error(cudaErrorMemoryAllocation);
    *memory = emulation_guarded_alloc(n_bytes);
    ranges[(uintptr_t)*memory] = {n_bytes, kind, true};
    used_bytes += n_bytes;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **memory, size_t n_bytes)
{
    if (!n_bytes) {
        *memory = NULL;
        return cudaSuccess;
    }
    return allocate(memory, n_bytes, DEVICE);
}

cudaError_t cudaMallocManaged(void **memory, size_t n_bytes, unsigned int flags)
{
    return n_bytes && flags == cudaMemAttachGlobal ? allocate(memory, n_bytes, MANAGED)
                                                   : emulation_error(cudaErrorInvalidValue);
}

/* A device that is lost leaves the memory to be freed: it says so and frees. */
cudaError_t cudaFree(void *memory)
{
    const cudaError_t error = memory ? emulation_begin(EMULATION_FREES) : cudaSuccess;
    const auto found = ranges.find((uintptr_t)memory);
    if (!memory || error == cudaErrorStreamCaptureUnsupported)
        return error;
    if (found == ranges.end() || found->second.kind == HOST)
        return error ? error : emulation_error(cudaErrorInvalidValue);
    used_bytes -= found->second.n_bytes;
    ranges.erase(found);
    emulation_guarded_free(memory, "at cudaFree");
    return error;
}

cudaError_t cudaMallocHost(void **memory, size_t n_bytes)
{
    const cudaError_t error = emulation_begin(EMULATION_ALLOCATES);
    if (error)
        return error;
    void *host = aligned_alloc(4096, (n_bytes + 4096) / 4096 * 4096);
    if (!host)
        return emulation_error(cudaErrorMemoryAllocation);
    *memory = host;
    ranges[(uintptr_t)host] = {n_bytes, HOST, true};
    return cudaSuccess;
}

static cudaError_t forget_host(void *memory, bool owned, cudaError_t unknown)
{
    const cudaError_t error = emulation_begin(EMULATION_FREES);
    const auto found = ranges.find((uintptr_t)memory);
    if (error == cudaErrorStreamCaptureUnsupported)
        return error;
    if (found == ranges.end() || found->second.kind != HOST || found->second.owned != owned)
        return error ? error : emulation_error(unknown);
    registered_bytes -= owned ? 0 : found->second.n_bytes;
    ranges.erase(found);
    if (owned)
        free(memory);
    return error;
}

cudaError_t cudaFreeHost(void *memory)
{
    return memory ? forget_host(memory, true, cudaErrorInvalidValue) : cudaSuccess;
}

cudaError_t cudaHostRegister(void *memory, size_t n_bytes, unsigned int flags)
{
    const cudaError_t error = emulation_begin(EMULATION_ALLOCATES);
    if (error)
        return error;
    if (!memory || !n_bytes || flags & ~(unsigned int)(cudaHostRegisterPortable | cudaHostRegisterMapped))
        return emulation_error(cudaErrorInvalidValue);
    auto after = ranges.lower_bound((uintptr_t)memory + n_bytes); /* the first one that begins behind */
    if (after != ranges.begin() && (--after)->first + after->second.n_bytes > (uintptr_t)memory)
        return emulation_error(cudaErrorHostMemoryAlreadyRegistered);
    if (n_bytes > most_registered_bytes || registered_bytes > most_registered_bytes - n_bytes)
        return emulation_error(cudaErrorMemoryAllocation);
    registered_bytes += n_bytes;
    ranges[(uintptr_t)memory] = {n_bytes, HOST, false};
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *memory)
{
    return forget_host(memory, false, cudaErrorHostMemoryNotRegistered);
}

size_t emulation_n_ranges(void)
{
    return ranges.size();
}

/* ---- copies ---- */

/* What lies at an address, NULL: memory that the device does not know. Bytes beyond its end end the program. */
static const struct range *range_of(const void *memory, size_t n_bytes, const char *what)
{
    auto after = ranges.upper_bound((uintptr_t)memory);
    if (after == ranges.begin())
        return NULL;
    const auto &[address, range] = *--after;
    if ((uintptr_t)memory >= address + range.n_bytes)
        return NULL;
    if ((uintptr_t)memory + n_bytes > address + range.n_bytes && (range.kind != HOST || range.owned))
        emulation_fail("%zu bytes go beyond the %s", n_bytes, what);
    return &range;
}

/* Whether some bytes but not all are in one registered range, which a device refuses. */
static bool is_split(const void *memory, size_t n_bytes)
{
    auto after = ranges.lower_bound((uintptr_t)memory + n_bytes);
    if (after == ranges.begin())
        return false;
    const auto &[address, range] = *--after;
    if (range.kind != HOST || address + range.n_bytes <= (uintptr_t)memory)
        return false;
    return address > (uintptr_t)memory || (uintptr_t)memory + n_bytes > address + range.n_bytes;
}

/* Fails unless the memory may stand on the device's side (or the host's) of a copy. */
static void check_side(const void *memory, size_t n_bytes, bool on_device, const char *what)
{
    const struct range *range = range_of(memory, n_bytes, what);
    if (range && range->kind == MANAGED)
        return;
    if ((range && range->kind == DEVICE) != on_device)
        emulation_fail("the %s is %sdevice memory", what, on_device ? "not " : "");
}

void emulation_check_device(const void *memory, size_t n_bytes, const char *what)
{
    check_side(memory, n_bytes, true, what);
}

cudaError_t cudaHostGetDevicePointer(void **memory, void *host, unsigned int flags)
{
    const cudaError_t error = emulation_begin(EMULATION_ASKS);
    if (error)
        return error;
    const struct range *range = range_of(host, 1, "pinned memory");
    if (flags || !range || range->kind != HOST)
        return emulation_error(cudaErrorInvalidValue);
    *memory = host;
    return cudaSuccess;
}

static cudaError_t check_copy(const void *to, const void *from, size_t n_bytes, enum cudaMemcpyKind kind)
{
    if (kind == cudaMemcpyDefault) {
        (void)range_of(to, n_bytes, "target of a copy");
        (void)range_of(from, n_bytes, "source of a copy");
    } else {
        check_side(to, n_bytes, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice, "target of a copy");
        check_side(from, n_bytes, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice,
                   "source of a copy");
    }
    return is_split(to, n_bytes) || is_split(from, n_bytes) ? emulation_error(cudaErrorInvalidValue) : cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t n_bytes, enum cudaMemcpyKind kind)
{
    cudaError_t error = emulation_begin(EMULATION_WAITS);
    if (error || !n_bytes)
        return error;
    emulation_waited();
    error = check_copy(to, from, n_bytes, kind);
    if (!error)
        memcpy(to, from, n_bytes);
    return error;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n_bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    cudaError_t error = emulation_begin_work(stream);
    if (error || !n_bytes)
        return error;
    error = check_copy(to, from, n_bytes, kind);
    if (error)
        return error;
    if (!emulation_is_recording(stream)) {
        memcpy(to, from, n_bytes);
        return cudaSuccess;
    }
    /* a device may take pageable memory, too, but when it reads it is nothing to rely on */
    if (!find_range(to) || !find_range(from))
        return emulation_spoil(stream, cudaErrorStreamCaptureUnsupported);
    emulation_record(stream, [=] {
        if (!check_copy(to, from, n_bytes, kind))
            memcpy(to, from, n_bytes);
    });
    return cudaSuccess;
}

static void set(void *memory, int value, size_t n_bytes)
{
    check_side(memory, n_bytes, true, "memory to set");
    memset(memory, value, n_bytes);
}

cudaError_t cudaMemset(void *memory, int value, size_t n_bytes)
{
    const cudaError_t error = emulation_begin(EMULATION_WAITS);
    if (!error && n_bytes)
        set(memory, value, n_bytes);
    return error;
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t n_bytes, cudaStream_t stream)
{
    const cudaError_t error = emulation_begin_work(stream);
    if (error || !n_bytes)
        return error;
    check_side(memory, n_bytes, true, "memory to set");
    if (emulation_is_recording(stream))
        emulation_record(stream, [=] { set(memory, value, n_bytes); });
    else
        set(memory, value, n_bytes);
    return cudaSuccess;
}
