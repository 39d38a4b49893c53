/*
 * descriptor.h - the 64 bytes that travel for a request whose payload lies in an exchange slot.
 *
 * Routed: a worker sends [descriptor] to the coordinator's data socket; the coordinator reads only `to`, sends it on to the
 * peer registered under that route and, when it cannot, returns it as a reply with status -EHOSTUNREACH.
 * The store answers with a descriptor of kind DESCRIPTOR_REPLY with `to` and `from` exchanged.
 *
 * Invariant  all 64 bytes are defined; time is what remains, never a clock reading.
 */
#pragma once

#include <assert.h>
#include <stdint.h>

#define DESCRIPTOR_MAGIC   0x44434848u /* "HHCD" */
#define DESCRIPTOR_VERSION 1u

enum descriptor_kind { DESCRIPTOR_REQUEST = 1, DESCRIPTOR_REPLY = 2 };

struct descriptor {
    uint32_t magic;
    uint16_t version;
    uint16_t kind;
    uint64_t to; /* route: ZeroMQ routing id of the receiver, fresh for every registration */
    uint64_t from;
    uint64_t request; /* id, unique for the worker's incarnation */
    uint64_t worker;  /* incarnation: names the exchange */
    uint32_t slot;
    uint32_t n_bytes;      /* of the payload */
    uint32_t remaining_us; /* the sender's patience; 0 in replies */
    int32_t status;        /* replies: 0 or -errno when there is no payload that could say it */
    uint8_t padding[8];
};
static_assert(sizeof(struct descriptor) == 64, "raise DESCRIPTOR_VERSION");

/* 0 or -EPROTO: magic, version, kind and size of a message that claims to be a descriptor. */
int descriptor_check(const void *bytes, uint64_t n_bytes, struct descriptor *ret_descriptor);
