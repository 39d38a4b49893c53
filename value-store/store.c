/* store.c - node, threads, segment. */
#include "value-store/store.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB          (1024.0 * 1024.0)
#define CPUS_TO_SPIN 8u /* below, whoever spins keeps worker or store from working */
#define SPIN_US      20u

static void setup_thread(void *context, uint32_t thread)
{
    (void)context;
    (void)thread;
    kernels_thread_setup();
}

static int choose_node(struct store *store, char sentence[STORE_SENTENCE])
{
    uint32_t n_nodes = topology_n_nodes(store->topology);
    struct topology_node node;
    store->node = store->config.has_node ? store->config.node : store->config.index % n_nodes;
    int result = topology_node(store->topology, store->node, &node);
    if (result < 0) {
        snprintf(sentence, STORE_SENTENCE, "there is no node %u: nodes are 0 to %u", store->node, n_nodes - 1);
        return result;
    }
    store->threads_bound = topology_bind_thread(store->topology, store->node);
    store->n_threads = store->config.n_threads;
    if (store->n_threads == 0)
        store->n_threads = store->threads_bound == 0 ? node.n_cpus : topology_n_allowed_cpus(store->topology);
    uint32_t n_cpus = topology_n_allowed_cpus(store->topology);
    store->spin_us = store->config.has_spin ? store->config.spin_us : n_cpus < CPUS_TO_SPIN ? 0 : SPIN_US;
    return 0;
}

static int start_threads(struct store *store, char sentence[STORE_SENTENCE])
{
    store->kernels = kernels_get(store->config.isa);
    if (!store->kernels) {
        snprintf(sentence, STORE_SENTENCE, "--isa %s: this CPU does not have it",
                 store->config.isa == KERNELS_ISA_AVX512 ? "avx512" : "avx2"); /* every CPU has the others */
        return -ENOTSUP;
    }
    kernels_thread_setup();
    int result = pool_new(store->n_threads, setup_thread, NULL, &store->pool);
    if (result == 0)
        result = aggregate_new(store->kernels, store->pool, &store->progress.value, &store->aggregate);
    if (result < 0)
        snprintf(sentence, STORE_SENTENCE, "%u threads could not be started: %s", store->n_threads, strerror(-result));
    return result;
}

int store_open(const struct store_config *config, struct store **ret_store, char sentence[STORE_SENTENCE])
{
    assert(config->incarnation != 0);
    struct store *store = calloc(1, sizeof(*store));
    if (!store) {
        snprintf(sentence, STORE_SENTENCE, "out of memory");
        return -ENOMEM;
    }
    store->config = *config;
    store->segment_fd = -1;
    store->memory_bound = -EALREADY;
    turn_init(&store->turn);
    atomic_store(&store->progress.phase, "idle");
    int result = topology_load(&store->topology);
    if (result < 0)
        snprintf(sentence, STORE_SENTENCE, "the machine's nodes could not be read: %s", strerror(-result));
    if (result == 0)
        result = choose_node(store, sentence);
    if (result == 0)
        result = start_threads(store, sentence);
    if (result < 0) {
        store_close(store);
        return result;
    }
    *ret_store = store;
    return 0;
}

static void drop_segment(struct store *store)
{
    store->blocks = blocks_free(store->blocks);
    segment_unmap(&store->mapping);
    if (store->segment_fd >= 0)
        close(store->segment_fd);
    store->segment_fd = -1;
    store->memory_bound = -EALREADY;
    store->huge_bytes = 0;
}

struct store *store_close(struct store *store)
{
    if (!store)
        return NULL;
    drop_segment(store);
    aggregate_free(store->aggregate);
    pool_free(store->pool);
    topology_free(store->topology);
    turn_fini(&store->turn);
    free(store);
    return NULL;
}

static struct blocks_owner owner_of(struct store *store)
{
    return (struct blocks_owner){
        .incarnation = store->config.incarnation,
        .store = store->config.index,
        .numa_node = store_numa_node(store),
        .kernels = store->kernels,
        .progress = &store->progress.value,
    };
}

/* ---- format ---- */

static int bind_segment(void *context, void *address, uint64_t n_bytes)
{
    const struct store *store = context;
    return topology_bind_memory(store->topology, store->node, address, n_bytes);
}

static int make_segment(struct store *store, const struct blocks_plan *plan, char sentence[STORE_SENTENCE])
{
    char name[32];
    int fd;
    snprintf(name, sizeof(name), "hcattn-store-%u", store->config.index);
    int result = segment_create_bound(name, plan->n_bytes, bind_segment, store, &store->memory_bound, &fd);
    if (result < 0) {
        snprintf(sentence, STORE_SENTENCE, "a segment of %.0f MiB could not be made: %s (%.0f MiB are available)",
                 (double)plan->n_bytes / MIB, strerror(-result), (double)segment_available_bytes() / MIB);
        return result;
    }
    result = segment_map(fd, plan->n_bytes, true, &store->mapping);
    if (result < 0) {
        snprintf(sentence, STORE_SENTENCE, "a segment of %.0f MiB could not be mapped: %s", (double)plan->n_bytes / MIB,
                 strerror(-result));
        close(fd);
        return result;
    }
    store->segment_fd = fd;
    if (store->config.huge_pages)
        store->huge_bytes = segment_collapse(&store->mapping);
    return 0;
}

int store_format(struct store *store, const struct row_shape *shape, char sentence[STORE_SENTENCE])
{
    struct blocks_plan plan;
    int result = blocks_plan(shape, store->config.memory_bytes, &plan);
    if (result == -ENOSPC)
        snprintf(sentence, STORE_SENTENCE, "a block of this model takes %.1f MiB: --memory %.1f MiB does not hold one",
                 (double)layout_block_bytes(shape) / MIB, (double)store->config.memory_bytes / MIB);
    else if (result < 0)
        snprintf(sentence, STORE_SENTENCE, "rows of %u layers, %u KV heads, head_dim %u, codec %u are not supported",
                 shape->n_layers, shape->n_kv_heads, shape->head_dim, shape->codec);
    if (result < 0)
        return result;
    drop_segment(store); /* first: both may not fit */
    result = make_segment(store, &plan, sentence);
    if (result == 0) {
        struct blocks_owner owner = owner_of(store);
        result = blocks_format(store->mapping.address, &plan, shape, &owner, &store->blocks);
        if (result < 0)
            snprintf(sentence, STORE_SENTENCE, "a segment could not be formatted: %s", strerror(-result));
    }
    if (result < 0)
        drop_segment(store);
    return result;
}

/* ---- adopt ---- */

int store_adopt(struct store *store, int fd, struct blocks_adoption *ret_adoption, char sentence[STORE_SENTENCE])
{
    struct segment_mapping mapping = {0};
    struct blocks *blocks = NULL;
    struct blocks_owner owner = owner_of(store);
    int result = segment_map(fd, 0, true, &mapping);
    if (result == 0)
        result = blocks_adopt(mapping.address, mapping.n_bytes, &owner, ret_adoption, &blocks);
    if (result < 0) {
        segment_unmap(&mapping);
        snprintf(sentence, STORE_SENTENCE, "the segment cannot be taken over: %s",
                 result == -EXDEV    ? "it belongs to a store of another number"
                 : result == -EAGAIN ? "its formatting had not ended"
                 : result == -EPROTO ? "it is not a segment of this layout"
                                     : strerror(-result));
        return result;
    }
    drop_segment(store);
    store->mapping = mapping;
    store->blocks = blocks;
    store->segment_fd = fd;
    /* Pages stay where the old store put them; the header remembers whether they were bound. */
    const struct segment_header *header = mapping.address;
    struct topology_node node;
    bool here = topology_node(store->topology, store->node, &node) == 0 && header->numa_node == (int32_t)node.os_index;
    store->memory_bound = here ? 0 : -EALREADY;
    return 0;
}

/* ---- requests ---- */

static void check_invariants(const struct store *store)
{
#ifdef HCATTN_SANITIZED
    char text[BLOCKS_CHECK_TEXT] = "";
    if (blocks_check(store->blocks, text) < 0)
        fprintf(stderr, "blocks: %s\n", text);
    assert(text[0] == 0);
#else
    (void)store;
#endif
}

void store_serve(struct store *store, const struct request_slot *slot, struct request_result *ret_result)
{
    turn_take(&store->turn);
    assert(store->blocks);
    progress_begin(&store->progress, "serving");
    request_serve(store->blocks, store->aggregate, slot, ret_result);
    uint64_t n_bytes = ret_result->n_rows_read * layout_row_bytes(blocks_shape(store->blocks));
    atomic_fetch_add_explicit(&store->progress.bytes_served, n_bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&store->progress.n_requests, 1, memory_order_relaxed);
    check_invariants(store);
    progress_end(&store->progress);
    turn_end(&store->turn);
}

/* ---- what was achieved ---- */

int32_t store_numa_node(const struct store *store)
{
    struct topology_node node;
    int bound = store->segment_fd >= 0 ? store->memory_bound : store->threads_bound;
    if (bound != 0 || topology_node(store->topology, store->node, &node) < 0)
        return -1;
    return (int32_t)node.os_index;
}

const char *store_describe(const struct store *store, char *text, size_t size)
{
    char binding[STORE_SENTENCE], segment[128], spin[48] = "rings do not spin";
    if (store->spin_us > 0)
        snprintf(spin, sizeof(spin), "rings spin %u us", store->spin_us);
    topology_describe(store->topology, store->node, store->threads_bound, store->memory_bound, binding,
                      sizeof(binding));
    if (store->blocks) {
        char huge[48] = "no huge pages";
        if (store->huge_bytes > 0)
            snprintf(huge, sizeof(huge), "%.0f MiB in huge pages", (double)store->huge_bytes / MIB);
        snprintf(segment, sizeof(segment), "segment %.0f MiB, %u blocks of %.2f MiB, %s",
                 (double)store->mapping.n_bytes / MIB, blocks_count(store->blocks).n_blocks,
                 (double)layout_block_bytes(blocks_shape(store->blocks)) / MIB, huge);
    } else {
        snprintf(segment, sizeof(segment), "no segment yet (at most %.0f MiB)",
                 (double)store->config.memory_bytes / MIB);
    }
    snprintf(text, size, "%s; %u threads, kernels %s, %s; %s", binding, store->n_threads, store->kernels->name, spin,
             segment);
    return text;
}
