/* test_host.c - memory of the host that the device reaches: what is shown in pieces, what is copied, partials and rows from there. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "gpu-worker/backend/cuda/cuda_host.h"
#include "gpu-worker/backend/cuda/cuda_internal.h"
#include "tests/backend/cuda-on-cpu/device.h"
#include "tests/backend/cuda-on-cpu/emulation_control.h"
#include "tests/backend/fixture.h"

#define MIB ((size_t)1 << 20)

static struct backend *open_backend(void)
{
    const struct backend_options options = {.device = BACKEND_DEVICE_BY_WORKER};
    struct backend *backend = NULL;
    char error[256];
    assert_int_equal(backend_cuda.open(&options, &backend, error, sizeof error), 0);
    return backend;
}

static uint8_t *map(size_t n_bytes)
{
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(memory, MAP_FAILED);
    return memory;
}

static void memory_of_ours(void **state)
{
    (void)state;
    struct backend *backend = open_backend();
    const struct backend_device_ops *device = backend_cuda.device;
    uint8_t *memory[40];
    for (uint32_t i = 0; i < 40; i++) {
        size_t n_bytes = (size_t)i * 997;
        memory[i] = device->host_alloc(backend, n_bytes);
        assert_non_null(memory[i]);
        assert_int_equal((uintptr_t)memory[i] % 64, 0);
        for (size_t k = 0; k < n_bytes; k++)
            assert_int_equal(memory[i][k], 0);
        memset(memory[i], 0xee, n_bytes);
    }
    for (uint32_t i = 1; i < 40; i++) {
        size_t n_bytes = (size_t)i * 997;
        assert_ptr_equal(cuda_host_find(backend, memory[i], n_bytes), memory[i]);
        assert_ptr_equal(cuda_host_find(backend, memory[i] + 5, n_bytes - 5), memory[i] + 5);
        assert_null(cuda_host_find(backend, memory[i] + 5, n_bytes));
    }
    device->host_free(backend, memory[20]);
    assert_null(cuda_host_find(backend, memory[20], 1));
    assert_non_null(cuda_host_find(backend, memory[21], 1));
    device->host_free(backend, NULL);
    for (uint32_t i = 0; i < 40; i += 2)
        if (i != 20)
            device->host_free(backend, memory[i]);
    backend_cuda.close(backend); /* and the others */
    assert_int_equal(cudaFreeHost(memory[1]), cudaErrorInvalidValue);
    (void)cudaGetLastError();
}

/* Every byte of memory that was shown is found exactly if it is registered, and a range that is not in one piece is not found. */
static void shown_in_pieces(void **state)
{
    (void)state;
    static const struct {
        size_t limit, taken;
    } cases[] = {{SIZE_MAX, 33 * MIB + 4096}, {0, 0}, {33 * MIB, 33 * MIB}, {20 * MIB, 20 * MIB}, {3 * MIB, 3 * MIB}};
    const size_t n_bytes = 33 * MIB + 4096;
    struct backend *backend = open_backend();
    const struct backend_device_ops *device = backend_cuda.device;
    uint8_t *memory = map(n_bytes);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        emulation_set_registered_bytes(cases[c].limit);
        size_t n_taken = device->show(backend, memory, n_bytes);
        assert_true(n_taken <= cases[c].taken);
        assert_true(n_taken + 4 * MIB > cases[c].taken); /* pieces are no smaller */
        size_t n_found = 0;
        for (size_t at = 0; at < n_bytes; at += 4096)
            n_found += cuda_host_find(backend, memory + at, 4096) == memory + at ? 4096 : 0;
        assert_int_equal(n_found, n_taken);
        assert_true((cuda_host_find(backend, memory, n_bytes) != NULL) == (n_taken == n_bytes));
        assert_null(cuda_host_find(backend, memory + n_bytes, 1));
        device->hide(backend, memory, n_bytes);
        assert_null(cuda_host_find(backend, memory, 1));
        assert_int_equal(cudaHostUnregister(memory),
                         cudaErrorHostMemoryNotRegistered); /* the driver has none of it any more */
        (void)cudaGetLastError();
        device->hide(backend, memory, n_bytes);
    }
    emulation_set_registered_bytes(SIZE_MAX);
    /* what is shown beside it stays */
    assert_int_equal(device->show(backend, memory, 8 * MIB), 8 * MIB);
    assert_int_equal(device->show(backend, memory + 8 * MIB, 8 * MIB), 8 * MIB);
    assert_int_equal(device->show(backend, memory + 16 * MIB, 8 * MIB), 8 * MIB);
    assert_null(cuda_host_find(backend, memory + 8 * MIB - 1, 2));
    device->hide(backend, memory + 8 * MIB, 8 * MIB);
    assert_non_null(cuda_host_find(backend, memory, 8 * MIB));
    assert_null(cuda_host_find(backend, memory + 8 * MIB, 1));
    assert_non_null(cuda_host_find(backend, memory + 16 * MIB, 8 * MIB));
    assert_int_equal(device->finish(backend), 0);
    backend_cuda.close(backend); /* unregisters the rest */
    assert_int_equal(cudaHostUnregister(memory), cudaErrorHostMemoryNotRegistered);
    (void)cudaGetLastError();
    munmap(memory, n_bytes);
}

/* Partials in memory of each kind, hidden before anything waited for them: those of the plain kernels, to the bit. */
static void merges_from_the_host(void **state)
{
    (void)state;
    enum { N = 5, GROUP = 3, DIM = 80, WIDTH = 2 + DIM };
    struct backend *backend = open_backend();
    const struct backend_device_ops *device = backend_cuda.device;
    const struct kernels *plain = kernels_get(KERNELS_ISA_PLAIN);
    static float partials[N][GROUP * WIDTH], out[N][GROUP * DIM], unseen[N][GROUP * WIDTH];
    const size_t partial_bytes = sizeof partials[0];
    float *pinned = device->host_alloc(backend, N * partial_bytes);
    uint8_t *shown = map(8 * MIB);
    /* one of two pieces: the middle is shared out, and everything behind it is unknown */
    assert_int_equal(device->show(backend, shown, 4 * MIB), 4 * MIB);
    float *on_device = backend_cuda.alloc(backend, sizeof partials), *result = backend_cuda.alloc(backend, sizeof out);
    float *got = device->host_alloc(backend, sizeof out);
    struct backend_merge items[N] = {0};
    for (uint32_t i = 0; i < N; i++) {
        float *places[] = {pinned + i * GROUP * WIDTH, (float *)(void *)(shown + i * 4096), unseen[i],
                           (float *)(void *)(shown + 4 * MIB - 8 + i * 4096)};
        fixture_fill(partials[i], GROUP * WIDTH, 2.0f);
        items[i] = (struct backend_merge){.partials = on_device + i * GROUP * WIDTH, .out = result + i * GROUP * DIM};
        for (uint32_t g = 0; g < GROUP; g++)
            partials[i][g * WIDTH + 1] = 1.5f;
        device->to_device(backend, items[i].partials, partials[i], partial_bytes);
        for (uint32_t p = 0; p < 4; p++) {
            fixture_fill(places[p], GROUP * WIDTH, 2.0f);
            for (uint32_t g = 0; g < GROUP; g++) {
                places[p][g * WIDTH + 1] = 2.5f;
                plain->partial_merge(partials[i] + g * WIDTH, places[p] + g * WIDTH, DIM);
            }
            items[i].from[p * 3] = places[p]; /* lanes in the order in which they were merged */
        }
        for (uint32_t g = 0; g < GROUP; g++)
            plain->partial_finish(partials[i] + g * WIDTH, DIM, out[i] + g * DIM);
    }
    device->merge(backend, items, N, GROUP, DIM);
    memset(unseen, 0xff, sizeof unseen);   /* read before the call returned */
    device->hide(backend, shown, 8 * MIB); /* waits: what was shown is read by now */
    memset(shown, 0xff, 8 * MIB);
    device->merge(backend, items, 0, GROUP, DIM);
    device->to_host(backend, got, result, sizeof out);
    assert_int_equal(device->finish(backend), 0);
    assert_memory_equal(got, out, sizeof out);
    backend_cuda.free(backend, on_device);
    backend_cuda.free(backend, result);
    backend_cuda.close(backend);
    munmap(shown, 8 * MIB);
}

static void copies_small_and_large(void **state)
{
    (void)state;
    enum { N = 20 };
    struct backend *backend = open_backend();
    const struct backend_device_ops *device = backend_cuda.device;
    const size_t stride = 100000;
    uint8_t *from = backend_cuda.alloc(backend, N * stride), *to = backend_cuda.alloc(backend, N * stride);
    uint8_t *host = device->host_alloc(backend, N * stride), *want = calloc(N, stride);
    for (size_t i = 0; i < N * stride; i++)
        host[i] = (uint8_t)fixture_random();
    device->to_device(backend, from, host, N * stride);
    struct backend_copy copies[N];
    for (uint32_t i = 0; i < N; i++) {
        const size_t n = i % 6 == 0 ? 0 : i % 6 == 1 ? stride - i : (size_t)i * 100 + i % 3;
        copies[i] = (struct backend_copy){to + i * stride, from + (N - 1 - i) * stride, n};
        memcpy(want + i * stride, host + (N - 1 - i) * stride, n);
    }
    backend_cuda.copy(backend, copies, N);
    backend_cuda.copy(backend, copies, 0);
    backend_cuda.copy(backend, copies, 1); /* of nothing */
    device->to_host(backend, host, to, N * stride);
    assert_int_equal(device->finish(backend), 0);
    assert_memory_equal(host, want, N * stride);
    free(want);
    backend_cuda.free(backend, from);
    backend_cuda.free(backend, to);
    backend_cuda.close(backend);
}

/* What is refused is copied, what fails is told, once, and nothing is left behind: whichever call of the runtime fails. */
static bool whole_life(uint8_t *shown, size_t n_bytes)
{
    enum { DIM = 16, WIDTH = 2 + DIM };
    const struct backend_options options = {.device = BACKEND_DEVICE_BY_WORKER};
    const struct backend_device_ops *device = backend_cuda.device;
    struct backend *backend = NULL;
    char error[256];
    if (backend_cuda.open(&options, &backend, error, sizeof error) < 0)
        return false;
    size_t n_taken = device->show(backend, shown, n_bytes);
    float *host = device->host_alloc(backend, 2 * WIDTH * sizeof *host);
    float *there = backend_cuda.alloc(backend, 2 * WIDTH * sizeof *there), partial[WIDTH],
          *from = (float *)(void *)shown;
    bool is_right = host != NULL && there != NULL;
    for (uint32_t i = 0; i < WIDTH; i++)
        partial[i] = from[i] = i == 0 ? 0.5f : 1.0f;
    if (is_right) {
        const struct backend_merge item = {.partials = there, .from = {[3] = from}, .out = there + WIDTH};
        device->to_device(backend, there, partial, sizeof partial);
        device->merge(backend, &item, 1, 1, DIM);
    }
    device->hide(backend, shown, n_bytes);
    if (is_right) {
        device->to_host(backend, host, there + WIDTH, DIM * sizeof *host);
        int r = device->finish(backend);
        is_right = r == 0;
        assert_true(r == 0 || device->error(backend)[0] != '\0');
        for (uint32_t i = 0; i < DIM && r == 0; i++)
            assert_true(host[i] == 1.0f);
        assert_true(n_taken <= n_bytes);
    }
    backend_cuda.free(backend, there);
    device->host_free(backend, host);
    backend_cuda.close(backend);
    return is_right;
}

static void each_call_fails_in_turn(void **state)
{
    (void)state;
    const size_t n_bytes = 8 * MIB;
    uint8_t *shown = map(n_bytes);
    const size_t before = emulation_n_objects();
    uint32_t n_right = 0;
    bool failed = true;
    for (uint64_t n = 1; failed; n++) {
        emulation_fail_call(n);
        bool is_right = whole_life(shown, n_bytes);
        failed = emulation_call_failed();
        emulation_fail_call(0);
        emulation_restore_device();
        assert_true(failed || is_right);
        assert_int_equal(emulation_n_objects(), before);
        n_right += is_right && failed;
    }
    assert_true(n_right > 0); /* a piece that is refused */
    munmap(shown, n_bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_of_ours),          cmocka_unit_test(shown_in_pieces),
        cmocka_unit_test(merges_from_the_host),    cmocka_unit_test(copies_small_and_large),
        cmocka_unit_test(each_call_fails_in_turn),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
