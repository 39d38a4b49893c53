/* test_descriptor.c - what is taken for a descriptor and what is not. */
#include "proto/descriptor.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static const struct descriptor good = {
    .magic = DESCRIPTOR_MAGIC,
    .version = DESCRIPTOR_VERSION,
    .kind = DESCRIPTOR_REQUEST,
    .to = 1,
    .from = 2,
    .request = 3,
    .worker = 4,
    .slot = 5,
    .n_bytes = 6,
    .remaining_us = 7,
    .status = -8,
};

static void good_ones_are_copied(void **state)
{
    (void)state;
    struct descriptor reply = good, copy;
    uint8_t unaligned[sizeof(good) + 1];
    memset(&copy, 0xaa, sizeof(copy));
    assert_int_equal(descriptor_check(&good, sizeof(good), &copy), 0);
    assert_memory_equal(&copy, &good, sizeof(good));
    reply.kind = DESCRIPTOR_REPLY;
    memcpy(unaligned + 1, &reply, sizeof(reply)); /* as a frame may lie */
    assert_int_equal(descriptor_check(unaligned + 1, sizeof(reply), &copy), 0);
    assert_memory_equal(&copy, &reply, sizeof(reply));
}

static void others_are_refused(void **state)
{
    (void)state;
    uint8_t bytes[2 * sizeof(good)] = {0};
    struct descriptor copy, untouched;
    memset(&untouched, 0xaa, sizeof(untouched));
    copy = untouched;
    memcpy(bytes, &good, sizeof(good));
    for (uint64_t n_bytes = 0; n_bytes <= sizeof(bytes); n_bytes++) {
        if (n_bytes != sizeof(good))
            assert_int_equal(descriptor_check(bytes, n_bytes, &copy), -EPROTO);
    }
    /* Any other value of the first eight bytes (magic, version, kind) but the other kind. */
    for (size_t i = 0; i < 8; i++) {
        for (int value = 0; value < 256; value++) {
            struct descriptor bad = good;
            ((uint8_t *)&bad)[i] = (uint8_t)value;
            if (memcmp(&bad, &good, sizeof(bad)) == 0 || bad.kind == DESCRIPTOR_REPLY)
                continue;
            assert_int_equal(descriptor_check(&bad, sizeof(bad), &copy), -EPROTO);
        }
    }
    assert_memory_equal(&copy, &untouched, sizeof(copy));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_ones_are_copied),
        cmocka_unit_test(others_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
