/* random.c - getrandom(2). */
#include "common/random.h"

#include <sys/random.h>

uint64_t random_u64(void)
{
    uint64_t value = 0;
    /* Up to 256 bytes are never interrupted once the pool is initialised; before that the call may be: try again. Any
     * kernel this runs on has the call (memfd seals and pidfds are younger), so a failure is no answer to work with. */
    while (value == 0) {
        if (getrandom(&value, sizeof(value), 0) != (ssize_t)sizeof(value))
            value = 0;
    }
    return value;
}
