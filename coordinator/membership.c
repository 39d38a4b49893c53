/*
 * membership.c - which stores there are: those that are waited for, those that joined, those that leave and that have left.
 *
 * Members are numbers 0 .. --stores - 1 and every other store that has registered, served and been reached by all workers.
 * A coordinator that comes after another one finds what it knew in the file `membership` of the runtime directory: without
 * it, it would wait for a store that has left for good, and take sessions for broken whose store had joined later.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/file.h"
#include "common/log.h"
#include "coordinator/state.h"

#define FILE_BYTES 256u
#define FORMAT     "hcattn membership 1\nstores %u\nmembers %016" PRIx64 "\nleaving %016" PRIx64 "\nleft %016" PRIx64 "\n"
#define SCAN       "hcattn membership 1\nstores %u\nmembers %" SCNx64 "\nleaving %" SCNx64 "\nleft %" SCNx64 "\n"

static uint64_t first_stores(const struct server *server)
{
    return server->options.n_stores >= 64 ? UINT64_MAX : (UINT64_C(1) << server->options.n_stores) - 1;
}

static void path_of(const struct server *server, const char *suffix, char path[192])
{
    snprintf(path, 192, "%.120s/membership%s", server->options.runtime_dir, suffix);
}

/* By another file and a rename: one that is killed on the way leaves the old one. */
static int save(const struct server *server)
{
    char text[FILE_BYTES], path[192], new_path[192];
    path_of(server, "", path);
    path_of(server, ".new", new_path);
    int n =
        snprintf(text, sizeof(text), FORMAT, server->options.n_stores, server->members, server->leaving, server->left);
    int fd = open(new_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return -errno;
    int result = file_write_all(fd, text, (size_t)n);
    if (result == 0 && fsync(fd) != 0)
        result = -errno;
    close(fd);
    if (result == 0 && rename(new_path, path) != 0)
        result = -errno;
    return result;
}

void membership_load(struct server *server)
{
    char text[FILE_BYTES] = "", path[192];
    uint32_t n_stores;
    uint64_t members, leaving, left;
    server->members = first_stores(server);
    path_of(server, "", path);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    ssize_t n = read(fd, text, sizeof(text) - 1);
    close(fd);
    if (n <= 0 || sscanf(text, SCAN, &n_stores, &members, &leaving, &left) != 4 || (members & ~leaving) == 0 ||
        leaving & ~members || left & members) {
        LOG_WARNING("%s is not what a coordinator wrote: ignored", path);
        return;
    }
    if (n_stores != server->options.n_stores)
        return; /* the service is a new one */
    server->members = members;
    server->leaving = leaving;
    server->left = left;
    uint64_t joined = members & ~first_stores(server);
    if (joined || leaving || left)
        LOG_INFO("%d stores had joined, %d were being drained, %d had left", __builtin_popcountll(joined),
                 __builtin_popcountll(leaving), __builtin_popcountll(left));
}

bool membership_has(const struct server *server, uint32_t store)
{
    return server->members >> store & 1u;
}

void membership_set(struct server *server, uint64_t members, uint64_t leaving, uint64_t left)
{
    if (server->members == members && server->leaving == leaving && server->left == left)
        return;
    server->members = members;
    server->leaving = leaving;
    server->left = left;
    server->dirty = true;
    workers_judge(server); /* one may have waited for a store that is none of them any more */
    int result = save(server);
    if (result != 0)
        LOG_ERROR("a later coordinator will not know which stores there are: %s/membership cannot be written: %s",
                  server->options.runtime_dir, strerror(-result));
}

void membership_promote(struct server *server)
{
    uint64_t reached = stores_ready_mask(server) & ~server->members;
    uint32_t cursor = 0;
    for (const struct process *worker; reached && (worker = registry_next(server->registry, &cursor));)
        if (worker->role == PROCESS_WORKER && worker->state == PROCESS_READY)
            reached &= worker->pairs;
    if (!reached)
        return;
    membership_set(server, server->members | reached, server->leaving, server->left & ~reached);
    for (uint32_t i = 0; i < SERVER_MAX_STORES; i++)
        if (reached >> i & 1u)
            LOG_INFO("value-store %u has joined: sessions are served from %d stores", i,
                     __builtin_popcountll(server->members));
}

/* Of those that had joined only what is here counts from now on. */
static void forget_missing(struct server *server)
{
    uint64_t missing = server->members & ~server->seen & ~first_stores(server);
    server->stores_given = true;
    if (missing)
        LOG_WARNING("%d stores that had joined did not come back: no longer waited for", __builtin_popcountll(missing));
    uint64_t members = server->members & ~missing, leaving = server->leaving & ~missing;
    if (leaving == members) { /* nothing could go anywhere */
        LOG_WARNING("no value-store is drained any more: the one that was to stay did not come back");
        leaving = 0;
    }
    membership_set(server, members, leaving, server->left);
}

void membership_seen(struct server *server, uint32_t store, bool holds_segment)
{
    server->seen |= UINT64_C(1) << store;
    server->segments_found = server->segments_found || holds_segment;
}

bool membership_settled(const struct server *server)
{
    return server->now_us - server->started_us > server->options.recovery_timeout_us / 12;
}

void membership_tick(struct server *server)
{
    /* All that --stores names came without rows, and nothing else brought any: the service is a new one, and what had joined had
     * joined an earlier one. */
    bool anew = !server->segments_found && !(first_stores(server) & ~server->seen) && membership_settled(server);
    stores_check_table(server);
    bool late = server->now_us - server->started_us > server->options.recovery_timeout_us;
    if (server->stores_given || (!anew && !late))
        return;
    forget_missing(server);
    stores_judge(server);
    membership_promote(server); /* a worker may be ready only now */
}

uint64_t membership_targets(const struct server *server)
{
    return stores_ready_mask(server) & server->members & ~server->leaving;
}
