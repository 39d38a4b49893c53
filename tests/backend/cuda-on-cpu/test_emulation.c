/* test_emulation.c - the emulated device: what kernels may use gives what CUDA says, and mistakes are found. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "kernels/half.h"
#include "tests/backend/cuda-on-cpu/device.h"
#include "tests/backend/cuda-on-cpu/emulation_control.h"
#include "tests/backend/cuda-on-cpu/kernels_of_emulation.h"

static void block_sums(void **state)
{
    (void)state;
    static const unsigned int sizes[] = {32, 64, 96, 1024};
    float in[3 * 1024], out[3 * 1024];
    for (int i = 0; i < 3 * 1024; i++)
        in[i] = (float)(i % 97);
    for (int run = 0; run < DEVICE_N_RUNS; run++) {
        device_run(run);
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            const size_t n = 3 * (size_t)sizes[s];
            float *from = device_new(in, n * sizeof *in), *to = device_new(NULL, n * sizeof *out);
            kernels_block_sums(from, to, 3, sizes[s]);
            device_read(out, to, n * sizeof *out);
            for (size_t i = 0; i < n; i++) {
                float sum = 0;
                for (size_t j = i / sizes[s] * sizes[s]; j < (i / sizes[s] + 1) * sizes[s]; j++)
                    sum += in[j];
                assert_true(out[i] == sum);
            }
            device_free(from);
            device_free(to);
        }
    }
}

static void warp_results(void **state)
{
    (void)state;
    int in[32], out[KERNELS_N_WARP_RESULTS][32];
    unsigned int odd = 0;
    int sum = 0, low_min = 1000, high_sum = 0;
    for (int lane = 0; lane < 32; lane++) {
        in[lane] = (lane * 37 + 11) % 101 - 50;
        odd |= (unsigned int)(in[lane] & 1) << lane;
        sum += in[lane];
        high_sum += lane >= 16 ? in[lane] : 0;
        low_min = lane < 16 && in[lane] < low_min ? in[lane] : low_min;
    }
    for (int run = 0; run < DEVICE_N_RUNS; run++) {
        device_run(run);
        int *from = device_new(in, sizeof in), *to = device_new(NULL, sizeof out);
        kernels_warp_results(from, to);
        device_read(out, to, sizeof out);
        for (int lane = 0; lane < 32; lane++) {
            const int down = lane % 16 + 3 < 16 ? lane + 3 : lane, up = lane >= 2 ? lane - 2 : lane;
            assert_int_equal((unsigned int)out[0][lane], odd);
            assert_int_equal(out[1][lane], 0);
            assert_int_equal(out[2][lane], 1);
            assert_int_equal(out[3][lane], in[31 - lane]);
            assert_int_equal(out[4][lane], in[lane ^ 5]);
            assert_int_equal(out[5][lane], in[down]);
            assert_int_equal(out[6][lane], in[up]);
            assert_int_equal(out[7][lane], sum);
            assert_int_equal(out[8][lane], 48);
            assert_int_equal(out[9][lane], lane < 16 ? low_min : high_sum);
        }
        device_free(from);
        device_free(to);
    }
}

static void atomics(void **state)
{
    (void)state;
    enum { N = 1000 };
    unsigned int in[N], counts[16], expected[16] = {0}, largest = 0;
    for (unsigned int i = 0; i < N; i++) {
        in[i] = i * 2654435761u >> 20;
        expected[in[i] % 16]++;
        largest = in[i] > largest ? in[i] : largest;
    }
    for (int run = 0; run < DEVICE_N_RUNS; run++) {
        device_run(run);
        memset(counts, 0, sizeof counts);
        unsigned int *from = device_new(in, sizeof in), *to = device_new(counts, sizeof counts);
        unsigned int *max = device_new(counts, sizeof *counts), got = 0;
        kernels_histogram(from, N, to, max);
        device_read(counts, to, sizeof counts);
        device_read(&got, max, sizeof got);
        assert_memory_equal(counts, expected, sizeof counts);
        assert_int_equal(got, largest);
        device_free(from);
        device_free(to);
        device_free(max);
    }
}

static void intrinsics(void **state)
{
    (void)state;
    enum { N = 70000 };
    static unsigned int in[N], out[4 * N];
    for (unsigned int i = 0; i < N; i++)
        in[i] = i < 65536 ? i | i << 16 : i * 2654435761u;
    in[65536] = 0;
    device_run(0);
    unsigned int *from = device_new(in, sizeof in), *to = device_new(NULL, sizeof out);
    kernels_intrinsics(from, N, to);
    device_read(out, to, sizeof out);
    for (unsigned int i = 0; i < N; i++) {
        const unsigned int x = in[i], low = x & 0xffff, *got = out + 4 * i;
        const bool nan = (low & 0x7fff) > 0x7c00;
        assert_int_equal(got[0] & 0xffff, nan ? 0x7fff : low); /* there and back */
        float value;
        memcpy(&value, &x, sizeof value);
        assert_int_equal(got[0] >> 16, isnan(value) ? 0x7fff : half_encode(value));
        int dot = -7;
        for (int k = 0; k < 4; k++)
            dot += (int8_t)(x >> 8 * k) * (int8_t)(x >> 3 >> 8 * k);
        assert_int_equal((int)got[1], dot);
        const int first = x ? __builtin_ctz(x) + 1 : 0, zeros = x ? __builtin_clz(x) : 32;
        assert_int_equal((int)got[2], __builtin_popcount(x) + 64 * zeros + 4096 * first);
        /* bytes 2 and 6, 3 and 7 of (x, ~x), from the lowest: 2, 6, 3, 7 */
        assert_int_equal(got[3], (x >> 16 & 255) | (~x >> 16 & 255) << 8 | (x >> 24) << 16 | (~x >> 24) << 24);
    }
    device_free(from);
    device_free(to);
}

/* Without its barrier the kernel is wrong in order, too; with it, right in every order. */
static void a_missing_barrier_shows(void **state)
{
    (void)state;
    float in[64], out[64], expected[64];
    for (int i = 0; i < 64; i++)
        in[i] = expected[63 - i] = (float)i;
    for (int run = 0; run < DEVICE_N_RUNS; run++) {
        for (int with_barrier = 0; with_barrier < 2; with_barrier++) {
            device_run(run);
            float *from = device_new(in, sizeof in), *to = device_new(NULL, sizeof out);
            kernels_reverse(from, to, 64, with_barrier);
            device_read(out, to, sizeof out);
            assert_int_equal(memcmp(out, expected, sizeof out) == 0, with_barrier);
            device_free(from);
            device_free(to);
        }
    }
}

/* The last line that the mistake says before it ends its process. */
static void say_mistake(int which, char *line, size_t line_size)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        float *out = NULL;
        void *one_of_many = NULL;
        for (int i = 0; which == KERNELS_N_MISTAKES + 2 && i < 100; i++)
            (void)cudaMalloc(&one_of_many, 16);
        if (cudaMalloc((void **)&out, 64 * sizeof *out) == cudaSuccess) {
            if (which < KERNELS_N_MISTAKES)
                kernels_mistake((enum kernels_mistake)which, out, 64);
            else if (which == KERNELS_N_MISTAKES)
                kernels_mistake(KERNELS_N_MISTAKES, (float[64]){0}, 64); /* host memory */
            else if (which == KERNELS_N_MISTAKES + 2)
                kernels_mistake(KERNELS_BEHIND_THE_END, out, 64);
            else
                (void)cudaMemcpy(out, (float[65]){0}, 65 * sizeof *out, cudaMemcpyHostToDevice);
            (void)cudaDeviceSynchronize();
        }
        _exit(0);
    }
    close(ends[1]);
    FILE *said = fdopen(ends[0], "r");
    assert_non_null(said);
    const size_t n = fread(line, 1, line_size - 1, said);
    line[n] = '\0';
    fclose(said);
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        fail_msg("mistake %d was not seen", which);
}

static void mistakes_are_found(void **state)
{
    (void)state;
    /* the address sanitizer finds writes outside in words of its own */
#ifdef HCATTN_SANITIZED
#define OUTSIDE(text) "AddressSanitizer"
#else
#define OUTSIDE(text) text
#endif
    static const char *const lines[] = {
        [KERNELS_BARRIER_IN_BRANCH] = "which 32 of 64 threads do not reach",
        [KERNELS_TWO_BARRIERS] = "threads of one block are at different barriers",
        [KERNELS_RETURN_BEFORE_BARRIER] = "which 1 of 64 threads do not reach",
        [KERNELS_MASK_WITHOUT_ME] = "by a lane that is not in its mask 0000ffff",
        [KERNELS_LANES_MISSING] = "for lanes of mask ffffffff that do not come",
        [KERNELS_SHUFFLE_FROM_OUTSIDE] = "shuffles from lane 20, which is not in mask 0000ffff",
        [KERNELS_BEHIND_THE_END] = OUTSIDE("written behind the end of 256 bytes"),
        [KERNELS_BEFORE_THE_BEGINNING] = OUTSIDE("written before the beginning of 256 bytes"),
        [KERNELS_BEHIND_SHARED] = OUTSIDE("written behind the end of 256 bytes, seen dynamic shared memory"),
        [KERNELS_N_MISTAKES] = "is a pointer to memory that the device does not have",
        [KERNELS_N_MISTAKES + 1] = "260 bytes go beyond the target of a copy",
        [KERNELS_N_MISTAKES + 2] =
            OUTSIDE("behind the end of 256 bytes, seen after launches, the last of them of kernel "
                    "mistake"), /* of so many allocations some are looked at later */
    };
    for (int which = 0; which < (int)(sizeof lines / sizeof *lines); which++) {
        static char said[1 << 16];
        for (int run = 0; run < 2; run++) {
            device_run(run);
            say_mistake(which, said, sizeof said);
            if (!strstr(said, lines[which]))
                fail_msg("mistake %d: \"%s\" does not say \"%s\"", which, said, lines[which]);
        }
    }
}

static void launches_that_a_device_refuses(void **state)
{
    (void)state;
    device_run(0);
    assert_int_equal(kernels_launch_error(1024, 0, 0), cudaSuccess);
    assert_int_equal(kernels_launch_error(1025, 0, 0), cudaErrorInvalidConfiguration);
    assert_int_equal(kernels_launch_error(0, 0, 0), cudaErrorInvalidConfiguration);
    assert_int_equal(kernels_launch_error(32, 48 * 1024, 0), cudaSuccess);
    assert_int_equal(kernels_launch_error(32, 48 * 1024 + 1, 0), cudaErrorInvalidValue);
    assert_int_equal(kernels_launch_error(32, 99 * 1024, 1), cudaSuccess);
    assert_int_equal(kernels_launch_error(32, 228 * 1024, 1), cudaErrorInvalidValue);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidValue); /* of cudaFuncSetAttribute() */
    assert_int_equal(cudaGetLastError(), cudaSuccess);
}

static void memory(void **state)
{
    (void)state;
    void *a = NULL, *b = NULL;
    size_t free_bytes, total_bytes;
    emulation_set_device_bytes(1000);
    assert_int_equal(cudaMalloc(&a, 600), cudaSuccess);
    assert_int_equal((uintptr_t)a % 256, 0);
    assert_int_equal(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
    assert_int_equal(free_bytes, 400);
    assert_int_equal(cudaMalloc(&b, 401), cudaErrorMemoryAllocation);
    assert_null(b);
    assert_string_equal(cudaGetErrorName(cudaGetLastError()), "cudaErrorMemoryAllocation");
    assert_int_equal(cudaFree(a), cudaSuccess);
    assert_int_equal(cudaFree(a), cudaErrorInvalidValue);
    (void)cudaGetLastError();
    emulation_set_device_bytes((size_t)8 << 30);
}

static void memory_of_the_host_in_kernels(void **state)
{
    (void)state;
    enum { N = 1024 };
    static _Alignas(4096) float pages[3 * N];
    float *managed = NULL, *pinned = NULL, *seen = NULL;
    const size_t n_bytes = N * sizeof *managed, n_before = emulation_n_objects();
    size_t free_bytes, free_after, total_bytes;
    assert_int_equal(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
    assert_int_equal(cudaMallocManaged((void **)&managed, n_bytes, cudaMemAttachGlobal), cudaSuccess);
    assert_int_equal(cudaMallocHost((void **)&pinned, n_bytes), cudaSuccess);
    assert_int_equal(cudaMemGetInfo(&free_after, &total_bytes), cudaSuccess);
    assert_int_equal(free_bytes - free_after, n_bytes);
    /* neighbours are registered in pieces, none twice */
    assert_int_equal(cudaHostRegister(pages + N, n_bytes, cudaHostRegisterPortable | cudaHostRegisterMapped),
                     cudaSuccess);
    assert_int_equal(cudaHostRegister(pages, n_bytes, cudaHostRegisterDefault), cudaSuccess);
    assert_int_equal(cudaHostRegister(pages + N / 2, n_bytes, 0), cudaErrorHostMemoryAlreadyRegistered);
    assert_int_equal(cudaHostRegister(pages + 2 * N - 1, n_bytes, 0), cudaErrorHostMemoryAlreadyRegistered);
    assert_int_equal(cudaHostGetDevicePointer((void **)&seen, pages + 5, 0), cudaSuccess);
    assert_ptr_equal(seen, pages + 5);
    assert_int_equal(cudaHostGetDevicePointer((void **)&seen, pages + 2 * N, 0), cudaErrorInvalidValue);

    (void)cudaGetLastError();

    float *all[] = {managed, pinned, pages, pages + N};
    for (size_t which = 0; which < sizeof all / sizeof *all; which++) {
        for (int i = 0; i < N; i++)
            all[which][i] = (float)i;
        assert_int_equal(kernels_scale(NULL, all[which], N, 2), cudaSuccess);
        for (int i = 0; i < N; i++)
            assert_true(all[which][i] == (float)(2 * i + 1));
    }
    /* managed memory stands on either side of a copy; a copy takes no two registrations */
    void *device = device_new(NULL, n_bytes);
    assert_int_equal(cudaMemcpy(device, managed, n_bytes, cudaMemcpyHostToDevice), cudaSuccess);
    assert_int_equal(cudaMemcpy(device, managed, n_bytes, cudaMemcpyDeviceToDevice), cudaSuccess);
    assert_int_equal(cudaMemcpy(pinned, managed, n_bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    assert_int_equal(cudaMemcpy(pages, device, n_bytes, cudaMemcpyDefault), cudaSuccess);
    assert_int_equal(cudaMemcpy(pages + N / 2, device, n_bytes, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    assert_int_equal(cudaMemcpy(pages + 3 * N / 2, device, n_bytes, cudaMemcpyDefault), cudaErrorInvalidValue);
    assert_memory_equal(pages, pinned, n_bytes);

    assert_int_equal(cudaHostUnregister(pages), cudaSuccess);
    assert_int_equal(cudaHostUnregister(pages), cudaErrorHostMemoryNotRegistered);
    assert_int_equal(cudaHostUnregister(pages + N), cudaSuccess);
    assert_int_equal(cudaFreeHost(pinned), cudaSuccess);
    assert_int_equal(cudaFree(managed), cudaSuccess);
    device_free(device);
    (void)cudaGetLastError();
    assert_int_equal(emulation_n_objects(), n_before);
}

static void what_the_device_is(void **state)
{
    (void)state;
    int n = -1, value = -1;
    char address[16];
    struct cudaDeviceProp properties;
    assert_int_equal(cudaGetDeviceCount(&n), cudaSuccess);
    assert_int_equal(n, 1);
    assert_int_equal(cudaGetDevice(&n), cudaSuccess);
    assert_int_equal(n, 0);
    assert_int_equal(cudaSetDevice(1), cudaErrorInvalidDevice);
    assert_int_equal(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
    assert_string_equal(properties.name, "emulated on the CPU");
    assert_int_equal(properties.totalGlobalMem, (size_t)8 << 30);
    assert_int_equal(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
    assert_int_equal(value, properties.major);
    assert_int_equal(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0), cudaSuccess);
    assert_int_equal(value, properties.sharedMemPerBlockOptin);
    assert_int_equal(cudaDeviceGetAttribute(&value, (enum cudaDeviceAttr)9999, 0), cudaErrorInvalidValue);
    assert_int_equal(cudaDeviceGetPCIBusId(address, 12, 0), cudaErrorInvalidValue);
    assert_int_equal(cudaDeviceGetPCIBusId(address, sizeof address, 0), cudaSuccess);
    assert_string_equal(address, "ffff:ff:1f.7");
    (void)cudaGetLastError();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(block_sums),
        cmocka_unit_test(warp_results),
        cmocka_unit_test(atomics),
        cmocka_unit_test(intrinsics),
        cmocka_unit_test(a_missing_barrier_shows),
        cmocka_unit_test(mistakes_are_found),
        cmocka_unit_test(launches_that_a_device_refuses),
        cmocka_unit_test(memory),
        cmocka_unit_test(memory_of_the_host_in_kernels),
        cmocka_unit_test(what_the_device_is),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
