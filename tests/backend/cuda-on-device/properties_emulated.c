/* properties_emulated.c - properties.h of the emulated device, which has a name and nothing that could be measured. */
#include "tests/backend/cuda-on-device/properties.h"

cudaError_t properties_read(struct properties *ret_properties)
{
    *ret_properties = (struct properties){.name = "emulated on the CPU", .pci = "none"};
    return cudaSuccess;
}
