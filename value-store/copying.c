/* copying.c - see copying.h. */
#include "value-store/copying.h"
#include "common/clock.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB (1024.0 * 1024.0)

struct copying {
    struct store *store;
    struct copying_order order;
    struct segment_mapping mapping; /* of an import */
    struct blocks_source source;
    uint64_t begun_us;
    uint64_t n_bytes; /* that were imported */
    size_t n_done;
    struct blocks_copy blocks[];
};

static const char *import_error(int error)
{
    switch (error) {
    case -ESTALE:
        return "it is not reserved for this session here";
    case -ENOENT:
        return "the other store has no such block of this session";
    case -EINVAL:
        return "they are different numbers of the session";
    case -EEXIST:
        return "other tokens are here";
    case -EBADMSG:
        return "what the other store says of it contradicts itself";
    default:
        return strerror(-error);
    }
}

static int fail(const struct copying *copying, const struct blocks_copy *block, int error,
                char sentence[STORE_SENTENCE])
{
    char of_store[32] = "";
    if (copying->order.imports)
        snprintf(of_store, sizeof(of_store), " of store %u", copying->order.from_store);
    snprintf(sentence, STORE_SENTENCE, "block %u, generation %u,%s to block %u, generation %u: %s", block->from.index,
             block->from.generation, of_store, block->to.index, block->to.generation,
             copying->order.imports ? import_error(error) : strerror(-error));
    return error;
}

static int open_source(struct copying *copying, char sentence[STORE_SENTENCE])
{
    const struct copying_order *order = &copying->order;
    const struct store *store = copying->store;
    int status = order->from_store == store->config.index ? -ELOOP : order->segment_fd < 0 ? -EBADF : 0;
    if (status == 0)
        status = segment_map(order->segment_fd, 0, false, &copying->mapping);
    if (status == 0)
        status = blocks_import_open(store->blocks, copying->mapping.address, copying->mapping.n_bytes,
                                    order->from_store, &copying->source);
    if (status < 0)
        snprintf(sentence, STORE_SENTENCE, "the segment of store %u cannot be read: %s", order->from_store,
                 status == -ELOOP                          ? "that is this store"
                 : status == -EBADF                        ? "no descriptor came with the order"
                 : status == -EXDEV                        ? "it belongs to a store of another number"
                 : status == -EMEDIUMTYPE                  ? "its rows have another shape"
                 : status == -EAGAIN                       ? "its formatting had not ended"
                 : status == -EPROTO || status == -EBADMSG ? "it is not a segment of this layout"
                                                           : strerror(-status));
    return status;
}

static const char *phase_of(const struct copying *copying)
{
    return copying->order.imports ? PROGRESS_IMPORTING : "copying";
}

static int check_all(const struct copying *copying, char sentence[STORE_SENTENCE])
{
    const struct copying_order *order = &copying->order;
    struct store *store = copying->store;
    int status = 0;
    store_begin_turn(store, phase_of(copying));
    for (size_t i = 0; i < order->n_blocks && status == 0; i++) {
        const struct blocks_copy *block = &copying->blocks[i];
        status = order->imports ? blocks_import_check(store->blocks, &copying->source, order->session, block)
                                : blocks_copy_check(store->blocks, order->from_session, order->session, block);
        if (status < 0)
            fail(copying, block, status, sentence);
    }
    store_end_turn(store);
    return status;
}

int copying_begin(struct store *store, const struct copying_order *order, struct copying **ret_copying,
                  char sentence[STORE_SENTENCE])
{
    struct copying *copying = calloc(1, sizeof(*copying) + order->n_blocks * sizeof(copying->blocks[0]));
    if (!copying) {
        snprintf(sentence, STORE_SENTENCE, "out of memory");
        return -ENOMEM;
    }
    copying->store = store;
    copying->order = *order;
    copying->order.blocks = copying->blocks;
    copying->begun_us = clock_now_us();
    if (order->n_blocks > 0)
        memcpy(copying->blocks, order->blocks, order->n_blocks * sizeof(copying->blocks[0]));
    int status = order->imports ? open_source(copying, sentence) : 0;
    if (status == 0)
        status = check_all(copying, sentence);
    if (status < 0) {
        copying_end(copying);
        return status;
    }
    *ret_copying = copying;
    return 0;
}

int copying_step(struct copying *copying, char sentence[STORE_SENTENCE])
{
    const struct copying_order *order = &copying->order;
    struct store *store = copying->store;
    sentence[0] = 0;
    if (copying->n_done < order->n_blocks) {
        const struct blocks_copy *block = &copying->blocks[copying->n_done];
        uint64_t n_bytes = 0;
        store_begin_turn(store, phase_of(copying));
        int status = order->imports ? blocks_import(store->blocks, &copying->source, order->session, block, &n_bytes)
                                    : blocks_copy(store->blocks, order->from_session, order->session, block);
        atomic_fetch_add_explicit(&store->progress.bytes_imported, n_bytes, memory_order_relaxed);
        store_end_turn(store);
        if (status < 0)
            return fail(copying, block, status, sentence);
        copying->n_bytes += n_bytes;
        copying->n_done++;
    }
    if (copying->n_done < order->n_blocks)
        return 1;
    if (copying->n_bytes > 0)
        snprintf(sentence, STORE_SENTENCE, "session %016lx: %zu blocks from store %u, %.1f MiB in %.2f s",
                 (unsigned long)order->session, order->n_blocks, order->from_store, (double)copying->n_bytes / MIB,
                 (double)(clock_now_us() - copying->begun_us) / 1e6);
    return 0;
}

uint64_t copying_sequence(const struct copying *copying)
{
    return copying->order.sequence;
}

struct copying *copying_end(struct copying *copying)
{
    if (copying)
        segment_unmap(&copying->mapping);
    free(copying);
    return NULL;
}
