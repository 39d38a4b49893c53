/* test_choose_backend.c - which back end --backend and the machine make a worker take. */
#include "gpu-worker/choose_backend.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* ---- builds and machines ---- */

static int located;        /* what the device answers */
static uint32_t asked_for; /* the worker that it was asked for */

static int locate(const struct backend_options *options, char ret_pci[BACKEND_PCI_SIZE], char *error, size_t error_size)
{
    asked_for = options->worker;
    if (located < 0)
        snprintf(error, error_size, "that is why");
    else
        snprintf(ret_pci, BACKEND_PCI_SIZE, "0000:65:00.0");
    return located;
}

static const struct backend_ops cuda = {.name = "cuda", .locate = locate};

static const struct backend_ops *find_with_cuda(const char *name)
{
    return strcmp(name, "cuda") == 0 ? &cuda : strcmp(name, "auto") == 0 ? NULL : backend_find(name);
}

static const struct backend_ops *find_without(const char *name)
{
    return strcmp(name, "cuda") == 0 ? NULL : find_with_cuda(name);
}

/* ---- the tests ---- */

static struct choose_backend chosen(const char *name, const struct backend_ops *(*find)(const char *name))
{
    const struct backend_options options = {.worker = 3};
    struct choose_backend choice;
    char error[256] = "";
    assert_int_equal(choose_backend(name, &options, find, &choice, error, sizeof(error)), 0);
    assert_string_equal(error, "");
    assert_non_null(choice.ops);
    return choice;
}

static void refused(const char *name, const struct backend_ops *(*find)(const char *name), int result, const char *why)
{
    const struct backend_options options = {.worker = 3};
    struct choose_backend choice = {.ops = &cuda};
    char error[256] = "";
    assert_int_equal(choose_backend(name, &options, find, &choice, error, sizeof(error)), result);
    assert_string_equal(error, why);
    assert_ptr_equal(choice.ops, &cuda);
}

static void one_that_is_named_is_taken(void **state)
{
    (void)state;
    located = 0;
    assert_ptr_equal(chosen("cpu", find_with_cuda).ops, &backend_cpu);
    assert_string_equal(chosen("cpu", find_with_cuda).sentence, "");
    assert_string_equal(chosen("cpu", find_with_cuda).pci, "");
    assert_ptr_equal(chosen("reference", find_without).ops, &backend_reference);
    const struct choose_backend choice = chosen("cuda", find_with_cuda);
    assert_ptr_equal(choice.ops, &cuda);
    assert_string_equal(choice.pci, "0000:65:00.0");
    assert_false(choice.is_automatic);
    assert_int_equal(asked_for, 3);
}

static void one_that_cannot_be_had_is_refused(void **state)
{
    (void)state;
    refused("cuda", find_without, -EINVAL, "this build has no CUDA (-DHCATTN_CUDA=ON)");
    refused("nonsense", find_with_cuda, -EINVAL, "there is no such back end");
    refused("", find_with_cuda, -EINVAL, "there is no such back end");
    located = -ENODEV;
    refused("cuda", find_with_cuda, -ENODEV, "that is why");
}

static void auto_takes_a_device_that_is_there(void **state)
{
    (void)state;
    located = 0;
    const struct choose_backend choice = chosen("auto", find_with_cuda);
    assert_ptr_equal(choice.ops, &cuda);
    assert_true(choice.is_automatic);
    assert_false(choice.is_second_best);
    assert_string_equal(choice.pci, "0000:65:00.0");
    assert_string_equal(choice.sentence, "cuda: a device is there");
}

static void auto_says_why_it_takes_the_cpu(void **state)
{
    (void)state;
    struct choose_backend choice = chosen("auto", find_without);
    assert_ptr_equal(choice.ops, &backend_cpu);
    assert_false(choice.is_second_best);
    assert_string_equal(choice.sentence, "cpu: this build has no CUDA (-DHCATTN_CUDA=ON)");
    located = -ENODEV;
    choice = chosen("auto", find_with_cuda);
    assert_ptr_equal(choice.ops, &backend_cpu);
    assert_false(choice.is_second_best);
    assert_string_equal(choice.sentence, "cpu: that is why");
    assert_string_equal(choice.pci, "");
    located = -ENOTSUP; /* there is something, and it will not do */
    assert_true(chosen("auto", find_with_cuda).is_second_best);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_that_is_named_is_taken),
        cmocka_unit_test(one_that_cannot_be_had_is_refused),
        cmocka_unit_test(auto_takes_a_device_that_is_there),
        cmocka_unit_test(auto_says_why_it_takes_the_cpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
