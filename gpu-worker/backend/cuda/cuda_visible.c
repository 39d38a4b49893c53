/* cuda_visible.c - see cuda_visible.h. */
#include "gpu-worker/backend/cuda/cuda_visible.h"

#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SHOWN_CHARACTERS = 80 /* of the variable */ };

int cuda_visible_count(const char *folder)
{
    DIR *directory = opendir(folder);
    int n = 0;
    if (directory == NULL)
        return -1;
    for (const struct dirent *entry; (entry = readdir(directory)) != NULL;)
        n += entry->d_name[0] != '.';
    closedir(directory);
    return n;
}

int cuda_visible_n_named(const char *visible)
{
    int n = 1;
    if (visible == NULL)
        return -1;
    if (visible[strspn(visible, " \t")] == '\0')
        return 0;
    for (; (visible = strchr(visible, ',')) != NULL; visible++)
        n++;
    return n;
}

/* An entry of the list, blanks aside. */
struct entry {
    const char *text;
    size_t length;
};

static struct entry next_entry(const char **rest)
{
    struct entry entry = {.text = *rest + strspn(*rest, " \t")};
    const char *end = entry.text + strcspn(entry.text, ",");
    *rest = *end == ',' ? end + 1 : NULL;
    while (end > entry.text && (end[-1] == ' ' || end[-1] == '\t'))
        end--;
    entry.length = (size_t)(end - entry.text);
    return entry;
}

static bool is_twice(const char *visible)
{
    for (const char *rest = visible; rest != NULL;) {
        const struct entry entry = next_entry(&rest);
        for (const char *later = rest; later != NULL;) {
            const struct entry other = next_entry(&later);
            if (entry.length > 0 && entry.length == other.length && memcmp(entry.text, other.text, entry.length) == 0)
                return true;
        }
    }
    return false;
}

static const char *explain_unset(int n_devices, char *text, size_t text_size)
{
    if (n_devices > 0)
        snprintf(
            text, text_size,
            "the driver gives this process none of this machine's %d device%s; a container must be started with them",
            n_devices, n_devices == 1 ? "" : "s");
    else
        snprintf(text, text_size, "no NVIDIA device on this machine");
    return text;
}

const char *cuda_visible_explain(const char *visible, int n_devices, char *text, size_t text_size)
{
    char machine[48] = "this machine's devices", shown[SHOWN_CHARACTERS + 32], *end = NULL;
    if (visible == NULL || n_devices == 0)
        return explain_unset(n_devices, text, text_size);
    if (n_devices > 0)
        snprintf(machine, sizeof machine, "this machine's %d device%s", n_devices, n_devices == 1 ? "" : "s");
    if (cuda_visible_n_named(visible) == 0) {
        snprintf(text, text_size, "CUDA_VISIBLE_DEVICES is set and empty, which hides all of %s", machine);
        return text;
    }
    snprintf(shown, sizeof shown, "CUDA_VISIBLE_DEVICES=%.*s%s", SHOWN_CHARACTERS, visible,
             strlen(visible) > SHOWN_CHARACTERS ? "..." : "");
    const char *rest = visible;
    const struct entry first = next_entry(&rest);
    const long number = strtol(first.text, &end, 10);
    const bool is_number = first.length > 0 && end == first.text + first.length;
    if (is_number && number < 0)
        snprintf(text, text_size, "%s hides all of %s: the list ends at a number below 0", shown, machine);
    else if (is_twice(visible))
        snprintf(text, text_size, "%s names a device twice, which hides all of %s", shown, machine);
    else if (is_number && (n_devices < 0 || number < n_devices))
        snprintf(text, text_size, "%s: the driver gives this process none of %s; a container must be started with them",
                 shown, machine);
    else if (is_number || strncmp(first.text, "GPU-", 4) == 0)
        snprintf(text, text_size, "%s names none of %s%s", shown, machine,
                 is_number ? "" : " (nvidia-smi -L lists them)");
    else if (strncmp(first.text, "MIG-", 4) == 0)
        snprintf(text, text_size, "%s names no MIG instance of %s (nvidia-smi -L lists them)", shown, machine);
    else
        snprintf(text, text_size, "%s hides all of %s: entries are numbers, GPU-... or MIG-...", shown, machine);
    return text;
}
