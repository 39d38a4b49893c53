#include "proto/descriptor.h"

#include <errno.h>
#include <string.h>

int descriptor_check(const void *bytes, uint64_t n_bytes, struct descriptor *ret_descriptor)
{
    struct descriptor descriptor;
    if (n_bytes != sizeof(descriptor))
        return -EPROTO;
    memcpy(&descriptor, bytes, sizeof(descriptor));
    if (descriptor.magic != DESCRIPTOR_MAGIC || descriptor.version != DESCRIPTOR_VERSION)
        return -EPROTO;
    if (descriptor.kind != DESCRIPTOR_REQUEST && descriptor.kind != DESCRIPTOR_REPLY)
        return -EPROTO;
    *ret_descriptor = descriptor;
    return 0;
}
