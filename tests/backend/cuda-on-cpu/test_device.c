/* test_device.c - which device the cuda back end takes and what it says where there is none: against a runtime that answers as
 * each test wants. */
#include "gpu-worker/backend/cuda/cuda_device.h"
#include "gpu-worker/backend/cuda/cuda_visible.h"

#include <errno.h>
#include <stdbool.h>
#include <stdarg.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>
#include <cuda_runtime_api.h>

#define GIB ((size_t)1 << 30)

/* ---- the runtime ---- */

static struct {
    int driver_version, n_devices, major, minor;
    cudaError_t count, properties, set, info;
    size_t free_bytes;
    bool hides_address;
    int set_to; /* -1: not called */
} fake;

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = fake.driver_version;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    if (fake.count == cudaSuccess)
        *count = fake.n_devices;
    return fake.count;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    assert_in_range(device, 0, fake.n_devices - 1);
    if (fake.properties != cudaSuccess)
        return fake.properties;
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "NVIDIA Test %d", device);
    properties->major = fake.major;
    properties->minor = fake.minor;
    properties->multiProcessorCount = 132;
    properties->totalGlobalMem = 80 * GIB;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *address, int n, int device)
{
    if (fake.hides_address)
        return cudaErrorInvalidValue;
    snprintf(address, (size_t)n, "0000:%02X:00.0", 0xa0 + device);
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    fake.set_to = device;
    return fake.set;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    if (fake.info != cudaSuccess)
        return fake.info;
    *free_bytes = fake.free_bytes;
    *total_bytes = 80 * GIB;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t error)
{
    return error == cudaErrorInvalidValue ? "cudaErrorInvalidValue" : "cudaErrorOfSomeKind";
}

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorInvalidValue ? "invalid argument" : "it is of some kind";
}

static int two_devices(void **state)
{
    (void)state;
    memset(&fake, 0, sizeof fake);
    fake.driver_version = 13010;
    fake.n_devices = 2;
    fake.major = 9;
    fake.free_bytes = 79 * GIB;
    fake.set_to = -1;
    return 0;
}

/* ---- the tests ---- */

static struct backend_options by_worker(uint32_t worker)
{
    return (struct backend_options){.worker = worker, .device = BACKEND_DEVICE_BY_WORKER};
}

static void refused(const struct backend_options *options, int result, const char *words)
{
    struct cuda_device device;
    char error[256] = "", located[256] = "", pci[BACKEND_PCI_SIZE] = "untouched";
    memset(&device, 0x55, sizeof device);
    const struct cuda_device untouched = device;
    assert_int_equal(cuda_device_open(options, &device, error, sizeof error), result);
    if (strstr(error, words) == NULL)
        fail_msg("'%s' is not in '%s'", words, error);
    assert_memory_equal(&device, &untouched, sizeof device);
    if (fake.set_to < 0) { /* what is seen before the device is begun, locate() sees too */
        assert_int_equal(cuda_device_locate(options, pci, located, sizeof located), result);
        assert_string_equal(located, error);
        assert_string_equal(pci, "untouched");
    }
}

static void a_device_is_found_and_described(void **state)
{
    (void)state;
    struct cuda_device device;
    char error[256] = "", text[256], pci[BACKEND_PCI_SIZE] = "";
    struct backend_options options = by_worker(1);
    assert_int_equal(cuda_device_locate(&options, pci, error, sizeof error), 0);
    assert_string_equal(pci, "0000:a1:00.0");
    assert_int_equal(fake.set_to, -1);
    assert_int_equal(cuda_device_open(&options, &device, error, sizeof error), 0);
    assert_int_equal(fake.set_to, 1);
    assert_int_equal(device.number, 1);
    assert_string_equal(
        cuda_device_describe(&device, text, sizeof text),
        "NVIDIA Test 1 (device 1 of 2, 0000:a1:00.0, compute capability 9.0, 132 multiprocessors, 79.0 of "
        "80.0 GiB free, CUDA 13.0, driver's 13.1)");
    options.visible_devices = "1,0,7";
    assert_int_equal(cuda_device_open(&options, &device, error, sizeof error), 0);
    assert_non_null(strstr(cuda_device_describe(&device, text, sizeof text),
                           "(device 1 of 2, CUDA_VISIBLE_DEVICES names 3, 0000:a1:00.0, "));
    fake.hides_address = true;
    assert_int_equal(cuda_device_locate(&options, pci, error, sizeof error), 0);
    assert_string_equal(pci, "");
    assert_int_equal(cuda_device_open(&options, &device, error, sizeof error), 0);
    assert_non_null(strstr(cuda_device_describe(&device, text, sizeof text), "names 3, compute capability"));
}

static void workers_take_turns_and_the_option_wins(void **state)
{
    (void)state;
    struct cuda_device device;
    char error[256] = "";
    for (uint32_t worker = 0; worker < 5; worker++) {
        struct backend_options options = by_worker(worker);
        assert_int_equal(cuda_device_open(&options, &device, error, sizeof error), 0);
        assert_int_equal(device.number, worker % 2);
        options.device = 0;
        assert_int_equal(cuda_device_open(&options, &device, error, sizeof error), 0);
        assert_int_equal(fake.set_to, 0);
    }
    fake.set_to = -1;
    struct backend_options options = {.device = 2};
    refused(&options, -EINVAL, "there is no device 2: this process has 2");
    options.visible_devices = "1,0";
    refused(&options, -EINVAL, "there is no device 2: this process has 2 (CUDA_VISIBLE_DEVICES=1,0)");
}

static void what_is_wrong_with_driver_and_device_is_said(void **state)
{
    const struct backend_options options = by_worker(0);
    fake.driver_version = 0;
    fake.count = cudaErrorInsufficientDriver;
    refused(&options, -ENODEV, "");
    fake.driver_version = 12040;
    refused(&options, -ENOTSUP, "the driver is too old for CUDA 13 (has 12.4; 580 or later is needed)");
    two_devices(state);
    fake.major = 7;
    fake.minor = 5;
    refused(&options, -ENOTSUP, "NVIDIA Test 0 (device 0 of 2) has compute capability 7.5; 8.0 or later is needed");
    two_devices(state);
    fake.n_devices = 0;
    refused(&options, -ENODEV, "device");
    fake.count = cudaErrorNoDevice;
    refused(&options, -ENODEV, "device");
    fake.count = cudaErrorSystemNotReady;
    refused(&options, -EIO, "nvidia-fabricmanager");
    fake.count = cudaErrorSystemDriverMismatch;
    refused(&options, -EIO, "different versions");
    fake.count = cudaErrorCompatNotSupportedOnDevice;
    refused(&options, -ENOTSUP, "compatibility libraries");
    fake.count = cudaErrorInvalidValue;
    refused(&options, -EIO, "cudaGetDeviceCount: invalid argument (cudaErrorInvalidValue)");
    two_devices(state);
    fake.properties = cudaErrorInvalidValue;
    refused(&options, -EIO, "cudaGetDeviceProperties: invalid argument (cudaErrorInvalidValue)");
    two_devices(state);
    fake.set = cudaErrorDevicesUnavailable;
    refused(&options, -EBUSY, "another process has the device for itself");
    two_devices(state);
    fake.info = cudaErrorMemoryAllocation;
    refused(&options, -ENOMEM, "cudaMemGetInfo: it is of some kind (cudaErrorOfSomeKind)");
}

static void a_reserve_is_left_to_the_driver(void **state)
{
    (void)state;
    struct cuda_device device = {.free_bytes = 79 * GIB};
    assert_int_equal(cuda_device_capacity(&device), 79 * GIB - GIB / 2);
    device.free_bytes = GIB;
    assert_int_equal(cuda_device_capacity(&device), GIB - GIB / 8);
    device.free_bytes = 0;
    assert_int_equal(cuda_device_capacity(&device), 0);
}

static void every_form_of_the_variable_is_explained(void **state)
{
    (void)state;
    static const struct {
        const char *visible;
        int n_devices;
        const char *expected;
    } cases[] = {
        {NULL, -1, "no NVIDIA device on this machine"},
        {NULL, 0, "no NVIDIA device on this machine"},
        {"0", 0, "no NVIDIA device on this machine"},
        {NULL, 1,
         "the driver gives this process none of this machine's 1 device; a container must be started with them"},
        {"", 2, "CUDA_VISIBLE_DEVICES is set and empty, which hides all of this machine's 2 devices"},
        {" ", -1, "CUDA_VISIBLE_DEVICES is set and empty, which hides all of this machine's devices"},
        {"3", 2, "CUDA_VISIBLE_DEVICES=3 names none of this machine's 2 devices"},
        {"2,0", 2, "CUDA_VISIBLE_DEVICES=2,0 names none of this machine's 2 devices"},
        {"-1", 2, "CUDA_VISIBLE_DEVICES=-1 hides all of this machine's 2 devices: the list ends at a number below 0"},
        {"-1,0", 1,
         "CUDA_VISIBLE_DEVICES=-1,0 hides all of this machine's 1 device: the list ends at a number below 0"},
        {"0,1,0", 2, "CUDA_VISIBLE_DEVICES=0,1,0 names a device twice, which hides all of this machine's 2 devices"},
        {"0, 1", 2,
         "CUDA_VISIBLE_DEVICES=0, 1: the driver gives this process none of this machine's 2 devices; a container must "
         "be "
         "started with them"},
        {"0", -1,
         "CUDA_VISIBLE_DEVICES=0: the driver gives this process none of this machine's devices; a container must be "
         "started with them"},
        {"GPU-8932f937", 2,
         "CUDA_VISIBLE_DEVICES=GPU-8932f937 names none of this machine's 2 devices (nvidia-smi -L lists them)"},
        {"MIG-1a2b", 2,
         "CUDA_VISIBLE_DEVICES=MIG-1a2b names no MIG instance of this machine's 2 devices (nvidia-smi -L lists them)"},
        {"all", 2,
         "CUDA_VISIBLE_DEVICES=all hides all of this machine's 2 devices: entries are numbers, GPU-... or MIG-..."},
        {",0", 2,
         "CUDA_VISIBLE_DEVICES=,0 hides all of this machine's 2 devices: entries are numbers, GPU-... or MIG-..."},
        {"0x1", 2,
         "CUDA_VISIBLE_DEVICES=0x1 hides all of this machine's 2 devices: entries are numbers, GPU-... or MIG-..."},
    };
    char text[256];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_string_equal(cuda_visible_explain(cases[i].visible, cases[i].n_devices, text, sizeof text),
                            cases[i].expected);
    char *much = malloc(4000);
    assert_non_null(much);
    memset(much, '7', 3999);
    much[3999] = '\0';
    cuda_visible_explain(much, 2, text, sizeof text);
    assert_non_null(strstr(text, "777... names none of this machine's 2 devices"));
    free(much);
}

static void the_machines_devices_and_the_named_are_counted(void **state)
{
    (void)state;
    char folder[] = "/tmp/hc-devices-XXXXXX", path[64];
    assert_non_null(mkdtemp(folder));
    assert_int_equal(cuda_visible_count(folder), 0);
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/0000:%d5:00.0", folder, i);
        assert_int_equal(mkdir(path, 0700), 0);
    }
    assert_int_equal(cuda_visible_count(folder), 2);
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/0000:%d5:00.0", folder, i);
        assert_int_equal(rmdir(path), 0);
    }
    assert_int_equal(rmdir(folder), 0);
    assert_int_equal(cuda_visible_count(folder), -1);
    assert_int_equal(cuda_visible_n_named(NULL), -1);
    assert_int_equal(cuda_visible_n_named(" "), 0);
    assert_int_equal(cuda_visible_n_named("0"), 1);
    assert_int_equal(cuda_visible_n_named("0,GPU-1,7"), 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(a_device_is_found_and_described, two_devices),
        cmocka_unit_test_setup(workers_take_turns_and_the_option_wins, two_devices),
        cmocka_unit_test_setup(what_is_wrong_with_driver_and_device_is_said, two_devices),
        cmocka_unit_test(a_reserve_is_left_to_the_driver),
        cmocka_unit_test(every_form_of_the_variable_is_explained),
        cmocka_unit_test(the_machines_devices_and_the_named_are_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
