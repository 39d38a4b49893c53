/* store.c - node, threads, segment. */
#include "value-store/store.h"
#include "common/budget.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MIB        (1024.0 * 1024.0)
#define SPIN_US    20u
#define NODE_SPARE 64u /* part of a node's memory that the kernel keeps for itself */

static void setup_thread(void *context, uint32_t thread)
{
    (void)context;
    (void)thread;
    kernels_thread_setup();
}

static int choose_node(struct store *store, char sentence[STORE_SENTENCE])
{
    char list[STORE_SENTENCE / 2];
    uint32_t nodes[TOPOLOGY_MAX_NODES];
    uint32_t n_nodes = topology_store_nodes(store->topology, nodes, TOPOLOGY_MAX_NODES);
    int result = 0;
    if (store->config.has_node)
        result = topology_find(store->topology, store->config.node, &store->node);
    else if (n_nodes > 0)
        store->node = nodes[store->config.index % (n_nodes < TOPOLOGY_MAX_NODES ? n_nodes : TOPOLOGY_MAX_NODES)];
    struct topology_node node = {0};
    if (result == 0)
        result = topology_node(store->topology, store->node, &node);
    if (result == 0 && node.memory_bytes == 0)
        result = -ENOENT;
    if (result < 0) {
        snprintf(sentence, STORE_SENTENCE, "there is no node %u with memory: nodes are %s", store->config.node,
                 topology_list(store->topology, list, sizeof(list)));
        return result;
    }
    store->threads_bound = topology_bind_thread(store->topology, store->node);
    store->n_threads = store->config.n_threads;
    if (store->n_threads == 0)
        store->n_threads = store->threads_bound == 0 ? node.n_cpus : topology_n_allowed_cpus(store->topology);
    uint32_t n_cpus = topology_n_allowed_cpus(store->topology);
    store->spin_us = store->config.has_spin ? store->config.spin_us : n_cpus < TOPOLOGY_CPUS_TO_SPIN ? 0 : SPIN_US;
    return 0;
}

/* Whether memory may be bound at all is known before a segment is made. */
static int try_memory(struct store *store, char sentence[STORE_SENTENCE])
{
    store->memory_right = topology_try_memory(store->topology, store->node);
    if (!store->config.strict_numa || (store->memory_right == 0 && store->threads_bound == 0))
        return 0;
    if (store->memory_right < 0)
        snprintf(sentence, STORE_SENTENCE, "--strict-numa: memory cannot be bound to node %u: %s%s",
                 store_home_node(store), strerror(-store->memory_right),
                 store->memory_right == -EPERM ? "; " TOPOLOGY_BINDING_HELP : "");
    else
        snprintf(sentence, STORE_SENTENCE, "--strict-numa: threads cannot be bound to node %u: %s",
                 store_home_node(store), strerror(-store->threads_bound));
    return -EPERM;
}

static int choose_memory(struct store *store, char sentence[STORE_SENTENCE])
{
    const struct budget_terms terms = {.percent = store->config.memory_percent, .n_in_group = 1, .n_on_node = 1};
    if (terms.percent > 0)
        store->config.memory_bytes = budget_bytes(store->topology, store->node, &terms);
    if (store->config.memory_bytes > 0)
        return 0;
    snprintf(sentence, STORE_SENTENCE, "--memory %u%%: that is nothing on node %u", terms.percent,
             store_home_node(store));
    return -ENOSPC;
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
    store->segment_fd = store->stop_fd = -1;
    store->memory_bound = -EALREADY;
    turn_init(&store->turn);
    atomic_store(&store->progress.phase, "idle");
    int result = topology_load(&store->topology);
    if (result < 0)
        snprintf(sentence, STORE_SENTENCE, "the machine's nodes could not be read: %s", strerror(-result));
    if (result == 0)
        result = choose_node(store, sentence);
    if (result == 0)
        result = try_memory(store, sentence);
    if (result == 0)
        result = choose_memory(store, sentence);
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
    store->placement = placement_stop(store->placement);
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

void store_begin_turn(struct store *store, const char *phase)
{
    turn_take(&store->turn);
    progress_begin(&store->progress, phase);
}

void store_end_turn(struct store *store)
{
    progress_end(&store->progress);
    turn_end(&store->turn);
}

/* ---- format ---- */

/* That nobody looks is no reason not to serve. */
static void watch_placement(struct store *store)
{
    (void)placement_start(store->topology, store->node, &store->mapping, &store->progress, &store->placement);
}

static int bind_segment(void *context, void *address, uint64_t n_bytes)
{
    const struct store *store = context;
    return topology_bind_memory(store->topology, store->node, address, n_bytes);
}

/* A large segment takes minutes: nobody who stops the store waits for it. */
static int check_stop(const struct store *store)
{
    struct pollfd item = {.fd = store->stop_fd, .events = POLLIN};
    return store->stop_fd >= 0 && poll(&item, 1, 0) > 0 ? -ECANCELED : 0;
}

static int note_promised(void *context, uint64_t n_done, uint64_t n_bytes)
{
    struct store *store = context;
    atomic_fetch_add_explicit(&store->progress.value, 1, memory_order_relaxed);
    atomic_store_explicit(&store->progress.percent, (uint32_t)((double)n_done / (double)n_bytes * 100),
                          memory_order_relaxed);
    return check_stop(store);
}

/* From the pool of huge pages if it has all of them there: it is asked by taking them, so none can be missing later. */
static int create_segment(struct store *store, struct blocks_plan *plan, uint64_t max_bytes, int *ret_fd)
{
    char name[32];
    struct segment_terms terms = {.context = store, .bind = bind_segment, .promised = note_promised};
    uint64_t whole = (plan->n_bytes + SEGMENT_ALIGNMENT - 1) / SEGMENT_ALIGNMENT * SEGMENT_ALIGNMENT;
    snprintf(name, sizeof(name), "hcattn-store-%u", store->config.index);
    if (store->config.huge_pages != STORE_HUGE_OFF && whole <= max_bytes) {
        terms.from_huge_pool = true;
        if (segment_create_on(name, whole, &terms, &store->memory_bound, ret_fd) == 0) {
            store->huge_bytes = plan->n_bytes = whole;
            return 0;
        }
        terms.from_huge_pool = false;
    }
    return segment_create_on(name, plan->n_bytes, &terms, &store->memory_bound, ret_fd);
}

/* Bound memory is taken from the node or not at all: there the kernel would rather kill a process than say no. */
static int check_room(const struct store *store, uint64_t n_bytes, char sentence[STORE_SENTENCE])
{
    struct topology_node node;
    if (store->memory_right != 0 || topology_node(store->topology, store->node, &node) < 0)
        return 0;
    uint64_t spare = node.memory_bytes / NODE_SPARE;
    uint64_t room = node.free_bytes > spare ? node.free_bytes - spare : 0;
    if (n_bytes <= room)
        return 0;
    snprintf(sentence, STORE_SENTENCE, "a segment of %.0f MiB does not fit into node %u: it has %.0f MiB free of %.0f",
             (double)n_bytes / MIB, node.os_index, (double)room / MIB, (double)node.memory_bytes / MIB);
    return -ENOMEM;
}

static int make_segment(struct store *store, struct blocks_plan *plan, uint64_t max_bytes,
                        char sentence[STORE_SENTENCE])
{
    int fd, result = check_room(store, plan->n_bytes, sentence);
    if (result < 0)
        return result;
    result = create_segment(store, plan, max_bytes, &fd);
    if (result == -ECANCELED)
        snprintf(sentence, STORE_SENTENCE, "the store is told to stop");
    else if (result < 0)
        snprintf(sentence, STORE_SENTENCE, "a segment of %.0f MiB could not be made: %s (%.0f MiB are available)",
                 (double)plan->n_bytes / MIB, strerror(-result), (double)segment_available_bytes() / MIB);
    if (result < 0)
        return result;
    result = segment_map(fd, plan->n_bytes, true, &store->mapping);
    if (result < 0) {
        snprintf(sentence, STORE_SENTENCE, "a segment of %.0f MiB could not be mapped: %s", (double)plan->n_bytes / MIB,
                 strerror(-result));
        close(fd);
        return result;
    }
    store->segment_fd = fd;
    if (store->config.huge_pages != STORE_HUGE_OFF && store->huge_bytes == 0) {
        atomic_store_explicit(&store->progress.phase, "making huge pages", memory_order_relaxed);
        store->huge_bytes = segment_collapse(
            &store->mapping, &(const struct segment_terms){.context = store, .promised = note_promised});
        if (check_stop(store) < 0) {
            snprintf(sentence, STORE_SENTENCE, "the store is told to stop");
            return -ECANCELED;
        }
    }
    uint64_t wanted = plan->n_bytes / SEGMENT_ALIGNMENT * SEGMENT_ALIGNMENT;
    if (store->config.huge_pages == STORE_HUGE_REQUIRE && (wanted == 0 || store->huge_bytes < wanted)) {
        snprintf(sentence, STORE_SENTENCE,
                 "--huge-pages require: %.0f of %.0f MiB are in huge pages; 'sysctl vm.nr_hugepages=%.0f' keeps them",
                 (double)store->huge_bytes / MIB, (double)plan->n_bytes / MIB,
                 (double)(plan->n_bytes / SEGMENT_ALIGNMENT + 1));
        return -ENOMEM;
    }
    return 0;
}

int store_format(struct store *store, const struct row_shape *shape, char sentence[STORE_SENTENCE])
{
    struct blocks_plan plan;
    uint64_t max_bytes = store->config.memory_bytes;
    drop_segment(store); /* first: both may not fit */
    if (store->config.memory_fits) {
        const struct budget_terms alone = {.percent = 100, .n_in_group = 1, .n_on_node = 1};
        uint64_t free_bytes = budget_free_bytes(store->topology, store->node, &alone);
        max_bytes = free_bytes < max_bytes ? free_bytes : max_bytes;
    }
    int result = blocks_plan(shape, max_bytes, &plan);
    if (result == -ENOSPC)
        snprintf(sentence, STORE_SENTENCE, "a block of this model takes %.1f MiB: --memory %.1f MiB does not hold one",
                 (double)layout_block_bytes(shape) / MIB, (double)max_bytes / MIB);
    else if (result < 0)
        snprintf(sentence, STORE_SENTENCE, "rows of %u layers, %u KV heads, head_dim %u, codec %u are not supported",
                 shape->n_layers, shape->n_kv_heads, shape->head_dim, shape->codec);
    if (result < 0)
        return result;
    result = make_segment(store, &plan, max_bytes, sentence);
    if (result == 0) {
        struct blocks_owner owner = owner_of(store);
        result = blocks_format(store->mapping.address, &plan, shape, &owner, &store->blocks);
        if (result < 0)
            snprintf(sentence, STORE_SENTENCE, "a segment could not be formatted: %s", strerror(-result));
    }
    if (result == 0)
        watch_placement(store);
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
    struct stat status;
    if (fstat(fd, &status) == 0 && (uint64_t)status.st_blksize == SEGMENT_ALIGNMENT)
        store->huge_bytes = mapping.n_bytes; /* of the pool */
    watch_placement(store);
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

uint32_t store_home_node(const struct store *store)
{
    struct topology_node node;
    return topology_node(store->topology, store->node, &node) < 0 ? 0 : node.os_index;
}

uint32_t store_node_cores(const struct store *store)
{
    struct topology_node node;
    return topology_node(store->topology, store->node, &node) < 0 ? 0 : node.n_cores;
}

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
