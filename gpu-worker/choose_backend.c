/* choose_backend.c - see choose_backend.h. */
#include "gpu-worker/choose_backend.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define NO_CUDA "this build has no CUDA (-DHCATTN_CUDA=ON)"

static int locate(const struct backend_options *options, struct choose_backend *choice, char *error, size_t error_size)
{
    if (choice->ops->locate == NULL)
        return 0;
    return choice->ops->locate(options, choice->pci, error, error_size);
}

int choose_backend(const char *name, const struct backend_options *options,
                   const struct backend_ops *(*find)(const char *name), struct choose_backend *ret_choice, char *error,
                   size_t error_size)
{
    const bool is_automatic = strcmp(name, "auto") == 0;
    struct choose_backend choice = {.ops = find(is_automatic ? "cuda" : name), .is_automatic = is_automatic};
    char why[256] = NO_CUDA;
    if (choice.ops == NULL && !is_automatic) {
        snprintf(error, error_size, "%s", strcmp(name, "cuda") == 0 ? NO_CUDA : "there is no such back end");
        return -EINVAL;
    }
    int r = choice.ops != NULL ? locate(options, &choice, why, sizeof(why)) : 0;
    if (r < 0 && !is_automatic) {
        snprintf(error, error_size, "%s", why);
        return r;
    }
    if (is_automatic && choice.ops != NULL && r == 0) {
        snprintf(choice.sentence, sizeof(choice.sentence), "cuda: a device is there");
    } else if (is_automatic) {
        choice.ops = find("cpu");
        choice.is_second_best = r < 0 && r != -ENODEV;
        snprintf(choice.sentence, sizeof(choice.sentence), "cpu: %s", why);
    }
    *ret_choice = choice;
    return 0;
}
