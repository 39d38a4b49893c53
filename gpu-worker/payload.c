#include "gpu-worker/payload.h"

#include <errno.h>
#include <string.h>

static uint64_t align16(uint64_t n)
{
    return (n + 15) / 16 * 16;
}

void payload_begin(struct payload *payload, void *area, uint32_t n_bytes)
{
    *payload = (struct payload){
        .area = area,
        .n_bytes = n_bytes,
        .used = sizeof(struct request_header),
        .result_used = sizeof(struct reply_header),
    };
}

int64_t payload_take(struct payload *payload, uint64_t n_bytes)
{
    uint64_t offset = align16(payload->used);
    if (n_bytes > payload->n_bytes || offset + n_bytes > payload->n_bytes)
        return -ENOSPC;
    payload->used = (uint32_t)(offset + n_bytes);
    return (int64_t)offset;
}

void *payload_at(const struct payload *payload, uint32_t offset)
{
    return payload->area + offset;
}

uint32_t payload_result(struct payload *payload, uint64_t n_bytes)
{
    uint64_t offset = align16(payload->result_used);
    payload->result_used = (uint32_t)(offset + n_bytes);
    return (uint32_t)offset;
}

void payload_finish(struct payload *payload, const struct request_header *header)
{
    struct request_header *to = (void *)payload->area;
    *to = *header;
    to->magic = REQUEST_MAGIC;
    to->n_bytes = payload->used;
}
