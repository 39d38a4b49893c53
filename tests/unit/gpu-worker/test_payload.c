/* test_payload.c - requests are written within their area. */
#include "tests/unit/gpu-worker/cmocka_all.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/payload.h"

static void pieces_are_aligned_and_never_overlap(void **state)
{
    (void)state;
    uint8_t *area = calloc(1, 4096);
    struct payload payload;
    payload_begin(&payload, area, 4096);
    uint32_t end = sizeof(struct request_header);
    for (uint32_t n = 1; n < 60; n++) {
        int64_t offset = payload_take(&payload, n);
        assert_true(offset >= end);
        assert_int_equal(offset % 16, 0);
        end = (uint32_t)offset + n;
        memset(payload_at(&payload, (uint32_t)offset), 0xff, n);
    }
    struct request_header header = {.request = 7, .layer = 3};
    payload_finish(&payload, &header);
    struct request_header written;
    memcpy(&written, area, sizeof(written));
    assert_int_equal(written.magic, REQUEST_MAGIC);
    assert_int_equal(written.request, 7);
    assert_int_equal(written.n_bytes, end);
    free(area);
}

static void what_does_not_fit_is_refused(void **state)
{
    (void)state;
    uint8_t *area = calloc(1, 256);
    struct payload payload;
    payload_begin(&payload, area, 256);
    assert_int_equal(payload_take(&payload, 193), -ENOSPC);
    assert_int_equal(payload_take(&payload, UINT64_MAX), -ENOSPC);
    assert_int_equal(payload_take(&payload, UINT64_MAX - 63), -ENOSPC);
    assert_int_equal(payload_take(&payload, 192), 64);
    assert_int_equal(payload_take(&payload, 1), -ENOSPC);
    assert_int_equal(payload_result(&payload, 10), sizeof(struct reply_header));
    assert_int_equal(payload_result(&payload, 10), sizeof(struct reply_header) + 16);
    free(area);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_are_aligned_and_never_overlap),
        cmocka_unit_test(what_does_not_fit_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
