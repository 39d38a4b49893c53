#include "coordinator/descriptors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct kept {
    int fd; /* -1: none */
    uint64_t owner;
    bool owner_dead;
    struct segment_mapping mapping;
    struct segment_view view;
};

struct descriptors {
    struct kept kept[DESCRIPTORS_MAX_STORES];
};

const struct block_header *descriptors_block(const struct segment_view *view, uint32_t index)
{
    return (const struct block_header *)(const void *)(view->base + view->header.blocks_offset +
                                                       index * view->header.block_bytes);
}

const struct session_record *descriptors_record(const struct segment_view *view, uint64_t index)
{
    return (const struct session_record *)(const void *)(view->base + view->header.sessions_offset +
                                                         index * sizeof(struct session_record));
}

int descriptors_new(struct descriptors **ret_descriptors)
{
    struct descriptors *descriptors = calloc(1, sizeof(*descriptors));
    if (!descriptors)
        return -ENOMEM;
    for (uint32_t i = 0; i < DESCRIPTORS_MAX_STORES; i++)
        descriptors->kept[i].fd = -1;
    *ret_descriptors = descriptors;
    return 0;
}

static void clear(struct kept *kept)
{
    segment_unmap(&kept->mapping);
    if (kept->fd >= 0)
        close(kept->fd);
    *kept = (struct kept){.fd = -1};
}

struct descriptors *descriptors_free(struct descriptors *descriptors)
{
    if (descriptors)
        for (uint32_t i = 0; i < DESCRIPTORS_MAX_STORES; i++)
            clear(&descriptors->kept[i]);
    free(descriptors);
    return NULL;
}

int descriptors_keep(struct descriptors *descriptors, uint32_t store, uint64_t owner, int fd)
{
    if (store >= DESCRIPTORS_MAX_STORES)
        return -EINVAL;
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || (flags & O_ACCMODE) != O_RDWR)
        return -EPROTO; /* nobody could adopt it */
    uint64_t n_bytes;
    int result = segment_check(fd, 0, &n_bytes);
    if (result != 0)
        return result;
    struct kept new = {.fd = fd, .owner = owner};
    result = segment_map(fd, n_bytes, false, &new.mapping);
    if (result != 0)
        return result;
    result = n_bytes >= sizeof(struct segment_header) ? 0 : -EPROTO;
    if (result == 0) {
        memcpy(&new.view.header, new.mapping.address, sizeof(new.view.header));
        new.view.base = new.mapping.address;
        result = layout_check_segment(&new.view.header, n_bytes); /* of the copy: it reads the header only */
    }
    if (result == 0 && (new.view.header.store != store || new.view.header.incarnation != owner))
        result = -EPROTO;
    if (result != 0) {
        segment_unmap(&new.mapping);
        return result == -EAGAIN ? -EPROTO : result;
    }
    clear(&descriptors->kept[store]);
    descriptors->kept[store] = new;
    return 0;
}

static const struct kept *find(const struct descriptors *descriptors, uint32_t store)
{
    return store < DESCRIPTORS_MAX_STORES && descriptors->kept[store].fd >= 0 ? &descriptors->kept[store] : NULL;
}

void descriptors_drop(struct descriptors *descriptors, uint32_t store)
{
    if (find(descriptors, store))
        clear(&descriptors->kept[store]);
}

bool descriptors_same(const struct descriptors *descriptors, uint32_t store, int fd)
{
    const struct kept *kept = find(descriptors, store);
    struct stat given, mine;
    return kept && fstat(fd, &given) == 0 && fstat(kept->fd, &mine) == 0 && given.st_ino == mine.st_ino &&
           given.st_dev == mine.st_dev;
}

const struct segment_view *descriptors_view(const struct descriptors *descriptors, uint32_t store)
{
    const struct kept *kept = find(descriptors, store);
    return kept ? &kept->view : NULL;
}

uint64_t descriptors_owner(const struct descriptors *descriptors, uint32_t store)
{
    const struct kept *kept = find(descriptors, store);
    return kept ? kept->owner : 0;
}

void descriptors_owner_died(struct descriptors *descriptors, uint32_t store, uint64_t owner)
{
    if (find(descriptors, store) && descriptors->kept[store].owner == owner)
        descriptors->kept[store].owner_dead = true;
}

bool descriptors_owner_is_dead(const struct descriptors *descriptors, uint32_t store)
{
    const struct kept *kept = find(descriptors, store);
    return kept && kept->owner_dead;
}

int descriptors_readonly(const struct descriptors *descriptors, uint32_t store, int *ret_fd)
{
    const struct kept *kept = find(descriptors, store);
    return kept ? segment_reopen_readonly(kept->fd, ret_fd) : -ENOENT;
}

int descriptors_hand_over(const struct descriptors *descriptors, uint32_t store, int *ret_fd)
{
    const struct kept *kept = find(descriptors, store);
    if (!kept)
        return -ENOENT;
    if (!kept->owner_dead)
        return -EBUSY;
    int fd = fcntl(kept->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    *ret_fd = fd;
    return 0;
}
