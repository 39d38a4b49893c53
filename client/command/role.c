/* role.c - see role.h. */
#include "client/command/role.h"

#include <string.h>

const struct role role_table[] = {
    {"coordinator", "hc-coordinator", HCATTN__CONTROL__ROLE__COORDINATOR, false, false},
    {"value-store", "hc-value-store", HCATTN__CONTROL__ROLE__VALUE_STORE, true, true},
    {"gpu-worker", "hc-gpu-worker", HCATTN__CONTROL__ROLE__GPU_WORKER, true, true},
    {.name = NULL},
};

static const char *const coordinator_options[] = {"stores",          "workers",       "policy",        "exact-tokens",
                                                  "transport",       "max-queue",     "queue-timeout", "log-level",
                                                  "client-endpoint", "client-secret", "client-keys",   NULL};
static const char *const value_store_options[] = {"huge-pages", "strict-numa", "isa", "threads",
                                                  "spin-us",    "log-level",   NULL};
static const char *const gpu_worker_options[] = {
    "model",     "backend",         "gpu",        "isa",  "threads",       "n-ctx",       "policy",
    "transport", "device-memory",   "learnt-dir", "rows", "micro-batches", "max-step-ms", "spin-us",
    "log-level", "weights-by-node", NULL};

const struct role *role_find(const char *name)
{
    for (const struct role *role = role_table; role->name; role++) {
        if (strcmp(role->name, name) == 0)
            return role;
    }
    return NULL;
}

const char *const *role_options(const struct role *role)
{
    switch (role->number) {
    case HCATTN__CONTROL__ROLE__COORDINATOR:
        return coordinator_options;
    case HCATTN__CONTROL__ROLE__VALUE_STORE:
        return value_store_options;
    default:
        return gpu_worker_options;
    }
}
