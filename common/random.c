/* random.c - getrandom(2). */
#include "common/random.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
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

int random_incarnation(const char *hex, uint64_t *ret_incarnation)
{
    char *end = NULL;
    errno = 0;
    uint64_t value = hex == NULL ? random_u64() : isxdigit((unsigned char)*hex) ? strtoull(hex, &end, 16) : 0;
    if (value == 0 || errno != 0 || (end != NULL && *end != '\0'))
        return -EINVAL;
    *ret_incarnation = value;
    return 0;
}
