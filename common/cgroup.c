/* cgroup.c - see cgroup.h. */
#include "common/cgroup.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NO_LIMIT ((uint64_t)1 << 62) /* version 1 says a number near 2^63 */

/* Files of one version. */
struct version {
    const char *folder; /* below the root */
    const char *limit, *used, *inactive_key;
};

static const struct version versions[] = {
    {"/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "},
    {"", "memory.max", "memory.current", "inactive_file "},
};

uint64_t cgroup_read_number(const char *path, const char *key)
{
    FILE *file = fopen(path, "re");
    if (!file)
        return UINT64_MAX;
    char line[256];
    uint64_t value = UINT64_MAX;
    size_t key_length = strlen(key);
    while (fgets(line, sizeof(line), file)) {
        if (strncmp(line, key, key_length) != 0)
            continue;
        char *end;
        unsigned long long number = strtoull(line + key_length, &end, 10);
        if (end != line + key_length) /* "max" means no limit */
            value = number;
        break;
    }
    fclose(file);
    return value;
}

static uint64_t read_file(const char *folder, const char *name, const char *key)
{
    char path[2 * PATH_MAX];
    int length = snprintf(path, sizeof(path), "%s/%s", folder, name);
    if (length < 0 || (size_t)length >= sizeof(path))
        return UINT64_MAX;
    return cgroup_read_number(path, key);
}

static void look_at_level(const struct version *version, const char *folder, struct cgroup_memory *memory)
{
    uint64_t limit = read_file(folder, version->limit, "");
    uint64_t used = read_file(folder, version->used, "");
    uint64_t inactive = read_file(folder, "memory.stat", version->inactive_key);
    if (limit >= NO_LIMIT)
        return;
    memory->limit_bytes = limit < memory->limit_bytes ? limit : memory->limit_bytes;
    if (used == UINT64_MAX)
        return;
    if (inactive != UINT64_MAX)
        used -= inactive < used ? inactive : used;
    uint64_t left = used < limit ? limit - used : 0;
    memory->left_bytes = left < memory->left_bytes ? left : memory->left_bytes;
}

static void look_upwards(const struct version *version, const char *root, const char *group,
                         struct cgroup_memory *memory)
{
    char folder[2 * PATH_MAX];
    int length = snprintf(folder, sizeof(folder), "%s%s", root, version->folder);
    if (length < 0 || (size_t)length >= sizeof(folder))
        return;
    snprintf(folder + length, sizeof(folder) - (size_t)length, "%s", group);
    for (;;) {
        look_at_level(version, folder, memory);
        char *slash = strrchr(folder + length, '/');
        if (!slash)
            break;
        *slash = '\0';
    }
}

/* The path of a line "0::/path" (version 2) or "4:memory:/path" (1); NULL: of other controllers. */
static const char *group_of(char *line, const struct version **ret_version)
{
    char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL, *rest = NULL;
    if (!path || path[1] != '/')
        return NULL;
    *path++ = '\0';
    path[strcspn(path, "\n")] = '\0';
    *ret_version = &versions[1];
    if (controllers[1] == '\0')
        return path;
    for (char *name = strtok_r(controllers + 1, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
        *ret_version = &versions[0];
        if (strcmp(name, "memory") == 0)
            return path;
    }
    return NULL;
}

void cgroup_memory_at(const char *groups_path, const char *root, struct cgroup_memory *ret_memory)
{
    *ret_memory = (struct cgroup_memory){.limit_bytes = UINT64_MAX, .left_bytes = UINT64_MAX};
    FILE *file = fopen(groups_path, "re");
    if (!file)
        return;
    char line[PATH_MAX];
    while (fgets(line, sizeof(line), file)) {
        const struct version *version;
        const char *group = group_of(line, &version);
        if (group)
            look_upwards(version, root, group, ret_memory);
    }
    fclose(file);
}

void cgroup_memory(struct cgroup_memory *ret_memory)
{
    cgroup_memory_at("/proc/self/cgroup", "/sys/fs/cgroup", ret_memory);
}
