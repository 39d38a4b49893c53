/* test_segment.c - what is created is sealed and promised; what a peer sends is checked before it is mapped. */
#include "common/segment.h"
#include "tests/unit/common/helpers.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MIB ((uint64_t)1 << 20)

static int raw_memfd(uint64_t n_bytes, int seals, int reserve)
{
    int fd = memfd_create("raw", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)n_bytes), 0);
    if (reserve)
        assert_int_equal(fallocate(fd, 0, 0, (off_t)n_bytes), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

static void assert_refused(int fd, uint64_t n_bytes, int expected)
{
    struct segment_mapping mapping = {.address = (void *)1, .n_bytes = 2};
    assert_int_equal(segment_check(fd, n_bytes, NULL), expected);
    assert_int_equal(segment_map(fd, n_bytes, false, &mapping), expected);
    assert_ptr_equal(mapping.address, (void *)1); /* outputs untouched */
}

static void a_segment_is_promised_sealed_and_zero(void **state)
{
    (void)state;
    int n_before = helpers_n_descriptors();
    int fd = -1;
    assert_int_equal(segment_create("test", 3 * MIB + 4096, &fd), 0);
    struct stat status;
    assert_int_equal(fstat(fd, &status), 0);
    assert_int_equal(status.st_size, 3 * MIB + 4096);
    assert_true((uint64_t)status.st_blocks * 512 >= 3 * MIB + 4096);
    assert_true(ftruncate(fd, (off_t)MIB) < 0 && errno == EPERM);
    assert_true(ftruncate(fd, (off_t)(8 * MIB)) < 0 && errno == EPERM);
    assert_true(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) < 0 && errno == EPERM); /* nobody can add seals later */
    assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);

    uint64_t n_bytes = 0;
    assert_int_equal(segment_check(fd, 0, &n_bytes), 0);
    assert_int_equal(n_bytes, 3 * MIB + 4096);
    struct segment_mapping writer = {0}, reader = {0};
    assert_int_equal(segment_map(fd, n_bytes, true, &writer), 0);
    assert_int_equal(segment_map(fd, 0, false, &reader), 0);
    assert_int_equal((uintptr_t)writer.address % SEGMENT_ALIGNMENT, 0);
    assert_int_equal((uintptr_t)reader.address % SEGMENT_ALIGNMENT, 0);
    assert_int_equal(reader.n_bytes, n_bytes);
    assert_true(writer.writable && !reader.writable);
    const char *bytes = reader.address;
    for (uint64_t i = 0; i < n_bytes; i += 4096)
        assert_int_equal(bytes[i], 0);
    close(fd); /* mappings outlive it */
    memset(writer.address, 7, n_bytes);
    assert_int_equal(bytes[0] + bytes[n_bytes - 1], 14);
    segment_unmap(&writer);
    segment_unmap(&writer);
    segment_unmap(&reader);
    segment_unmap(NULL);
    assert_null(reader.address);
    assert_int_equal(helpers_n_descriptors(), n_before);
}

static void a_foreign_descriptor_is_checked(void **state)
{
    (void)state;
    int n_before = helpers_n_descriptors();
    const int both = F_SEAL_SHRINK | F_SEAL_GROW;
    const struct {
        int seals, reserve, expected;
    } cases[] = {{0, 1, -EBADMSG}, {F_SEAL_SHRINK, 1, -EBADMSG}, {F_SEAL_GROW, 1, -EBADMSG}, {both, 0, -EBADMSG}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int fd = raw_memfd(MIB, cases[i].seals, cases[i].reserve);
        assert_refused(fd, MIB, cases[i].expected);
        close(fd);
    }
    int fd = raw_memfd(MIB, both, 1);
    assert_int_equal(segment_check(fd, MIB, NULL), 0);
    assert_refused(fd, MIB + 4096, -EMSGSIZE);
    assert_refused(fd, MIB - 4096, -EMSGSIZE);
    close(fd);
    fd = raw_memfd(0, both, 0);
    assert_refused(fd, 0, -EMSGSIZE);
    close(fd);
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    assert_refused(ends[0], MIB, -EBADMSG);
    close(ends[0]);
    close(ends[1]);
    fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    assert_refused(fd, 0, -EBADMSG);
    close(fd);
    assert_refused(fd, MIB, -EBADF);
    assert_refused(-1, MIB, -EBADF);
    assert_int_equal(helpers_n_descriptors(), n_before);
}

static void sizes_that_cannot_be_are_refused(void **state)
{
    (void)state;
    int n_before = helpers_n_descriptors();
    int fd = 1234;
    assert_int_equal(segment_create("test", 0, &fd), -EINVAL);
    assert_int_equal(segment_create("test", 4097, &fd), -EINVAL);
    assert_int_equal(segment_create("test", (uint64_t)1 << 63, &fd), -EINVAL);
    assert_int_equal(segment_create("test", (uint64_t)1 << 50, &fd), -ENOMEM); /* and nobody was killed for it */
    uint64_t available = segment_available_bytes();
    assert_in_range(available, MIB, (uint64_t)1 << 50);
    assert_int_equal(segment_create("test", available / 4096 * 4096 + ((uint64_t)4 << 30), &fd), -ENOMEM);
    assert_int_equal(fd, 1234);
    assert_int_equal(helpers_n_descriptors(), n_before);
}

static void a_readonly_descriptor_stays_readonly(void **state)
{
    (void)state;
    int fd = -1, readonly = -1;
    assert_int_equal(segment_create("test", 2 * MIB, &fd), 0);
    assert_int_equal(segment_reopen_readonly(fd, &readonly), 0);
    assert_true(fcntl(readonly, F_GETFD) & FD_CLOEXEC);
    struct segment_mapping mapping = {0}, writer = {0};
    assert_int_equal(segment_map(readonly, 2 * MIB, true, &mapping), -EACCES);
    assert_null(mapping.address);
    assert_int_equal(segment_map(readonly, 2 * MIB, false, &mapping), 0);
    assert_true(mprotect(mapping.address, 4096, PROT_READ | PROT_WRITE) < 0 && errno == EACCES);
    assert_int_equal(segment_map(fd, 2 * MIB, true, &writer), 0);
    *(char *)writer.address = 5;
    assert_int_equal(*(const char *)mapping.address, 5);
    assert_int_equal(segment_reopen_readonly(9999, &readonly), -ENOENT);
    segment_unmap(&mapping);
    segment_unmap(&writer);
    close(readonly);
    close(fd);
}

struct bound {
    uint64_t n_bytes;
    unsigned char resident;
    int result;
};

static int note_binding(void *context, void *address, uint64_t n_bytes)
{
    struct bound *bound = context;
    bound->n_bytes = n_bytes;
    mincore(address, 4096, &bound->resident);
    return bound->result;
}

/* Pages must not exist yet when they are bound, and a right that is missing is reported only. */
static void binding_comes_before_the_pages(void **state)
{
    (void)state;
    for (int result = 0; result >= -EPERM; result -= EPERM) {
        struct bound bound = {.resident = 1, .result = result};
        const struct segment_terms terms = {.context = &bound, .bind = note_binding};
        int fd = -1, ret_bound = 1;
        assert_int_equal(segment_create_on("test", MIB, &terms, &ret_bound, &fd), 0);
        assert_int_equal(ret_bound, result);
        assert_int_equal(bound.n_bytes, MIB);
        assert_int_equal(bound.resident & 1, 0);
        assert_int_equal(segment_check(fd, MIB, NULL), 0);
        close(fd);
    }
}

/* Counts down; at 0 it is given up. */
static int give_up(void *context, uint64_t n_done, uint64_t n_bytes)
{
    int *n_left = context;
    assert_true(n_done <= n_bytes);
    return (*n_left)-- > 0 ? 0 : -ECANCELED;
}

static void making_is_given_up(void **state)
{
    (void)state;
    int n_before = helpers_n_descriptors(), fd = -1;
    struct segment_mapping mapping = {0};
    for (int patience = 0; patience < 2; patience++) { /* before the only piece, and after it */
        int n_left = patience;
        const struct segment_terms terms = {.context = &n_left, .promised = give_up};
        assert_int_equal(segment_create_on("test", MIB, &terms, NULL, &fd), -ECANCELED);
        assert_int_equal(fd, -1);
        assert_int_equal(helpers_n_descriptors(), n_before);
    }
    int n_left = 2;
    const struct segment_terms terms = {.context = &n_left, .promised = give_up};
    assert_int_equal(segment_create_on("test", 130 * MIB, &terms, NULL, &fd), 0);
    assert_int_equal(segment_map(fd, 0, true, &mapping), 0);
    segment_collapse(&mapping, &terms);
    assert_int_equal(n_left, -1); /* asked before the first piece of 64 MiB, and never again */
    segment_unmap(&mapping);
    close(fd);
}

static void collapsing_keeps_the_bytes(void **state)
{
    (void)state;
    int fd = -1;
    struct segment_mapping mapping = {0};
    assert_int_equal(segment_create("test", 5 * MIB, &fd), 0);
    assert_int_equal(segment_map(fd, 5 * MIB, true, &mapping), 0);
    uint32_t *words = mapping.address;
    for (uint32_t i = 0; i < 5 * MIB / 4; i++)
        words[i] = i * 2654435761u;
    uint64_t huge = segment_collapse(&mapping, &(const struct segment_terms){0});
    assert_true(huge % SEGMENT_ALIGNMENT == 0 && huge <= 4 * MIB); /* 0 where the machine has no huge pages */
    for (uint32_t i = 0; i < 5 * MIB / 4; i++) {
        if (words[i] != i * 2654435761u)
            fail_msg("word %u changed", i);
    }
    segment_unmap(&mapping);
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_segment_is_promised_sealed_and_zero),
        cmocka_unit_test(a_foreign_descriptor_is_checked),
        cmocka_unit_test(sizes_that_cannot_be_are_refused),
        cmocka_unit_test(a_readonly_descriptor_stays_readonly),
        cmocka_unit_test(binding_comes_before_the_pages),
        cmocka_unit_test(collapsing_keeps_the_bytes),
        cmocka_unit_test(making_is_given_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
