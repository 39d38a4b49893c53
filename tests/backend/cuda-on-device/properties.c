/* properties.c - see properties.h: by the CUDA runtime. */
#include "tests/backend/cuda-on-device/properties.h"

#include <string.h>

static int attribute(enum cudaDeviceAttr which)
{
    int value = 0;
    if (cudaDeviceGetAttribute(&value, which, 0))
        return 0;
    return value;
}

cudaError_t properties_read(struct properties *ret_properties)
{
    struct cudaDeviceProp p;
    memset(&p, 0, sizeof p);
    const cudaError_t error = cudaGetDeviceProperties(&p, 0);
    if (error)
        return error;
    struct properties properties = {.major = p.major,
                                    .minor = p.minor,
                                    .n_multiprocessors = p.multiProcessorCount,
                                    .bus_bits = p.memoryBusWidth,
                                    .ecc = p.ECCEnabled,
                                    .l2_bytes = p.l2CacheSize,
                                    .clock_hz = 1e3 * attribute(cudaDevAttrClockRate),
                                    .memory_clock_hz = 1e3 * attribute(cudaDevAttrMemoryClockRate)};
    (void)cudaDriverGetVersion(&properties.driver);
    (void)cudaRuntimeGetVersion(&properties.runtime);
    /* both edges of the clock carry data */
    properties.bytes_per_second = 2 * properties.memory_clock_hz * properties.bus_bits / 8;
    snprintf(properties.name, sizeof properties.name, "%.200s", p.name);
    snprintf(properties.pci, sizeof properties.pci, "%04x:%02x:%02x", (unsigned)p.pciDomainID, (unsigned)p.pciBusID,
             (unsigned)p.pciDeviceID);
    *ret_properties = properties;
    return cudaSuccess;
}
