/* emulation.c - tests/backend/cuda-on-cpu/emulation_control.h on a real device, which takes no orders: a test that gives one is skipped. */
#include "tests/backend/cuda-on-cpu/emulation_control.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

void emulation_set_device_bytes(size_t n_bytes)
{
    if (n_bytes != (size_t)8 << 30) /* as at start */
        skip();
}

void emulation_set_registered_bytes(size_t n_bytes)
{
    if (n_bytes != SIZE_MAX)
        skip();
}

/* Orders are its own. */
void emulation_set_seed(uint64_t seed)
{
    (void)seed;
}

void emulation_fail_call(uint64_t n)
{
    if (n != 0)
        skip();
}

bool emulation_call_failed(void)
{
    return false;
}

void emulation_restore_device(void)
{
}

/* It does not tell. */
size_t emulation_n_objects(void)
{
    return 0;
}
