/* main_backend.c - see main_backend.h. */
#include "gpu-worker/main_backend.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "common/log.h"
#include "gpu-worker/choose_backend.h"

#define MIB 1048576.0

enum {
    POOL_SPIN_US = 10, /* bridges what one thread does between the products of a layer, not an answer of a store */
};

static int fail(const char *what, const char *why)
{
    LOG_ERROR("%s: %s", what, why);
    return -EINVAL;
}

/* ---- threads ---- */

static void setup_thread(void *context, uint32_t thread)
{
    struct main_backend *with = context;
    kernels_thread_setup();
    if (with->nodes != NULL)
        nodes_bind_thread(with->nodes, thread);
}

void main_backend_setup_engine_thread(void *context)
{
    setup_thread(context, 0);
}

void main_backend_release_thread(const struct main_backend *with)
{
    if (with->nodes != NULL)
        (void)topology_release_thread(with->topology);
}

static void read_topology(struct main_backend *with)
{
    int r = topology_load(&with->topology);
    if (r < 0)
        LOG_WARNING("the machine's nodes could not be read: %s", strerror(-r));
    with->n_cpus = r == 0 ? topology_n_allowed_cpus(with->topology) : 1;
}

/*
 * Binds this thread, and so all that it starts from now on, to the cpus of the device's node: what they touch first, pinned
 * memory too, comes from there.
 */
static void go_near(struct main_backend *with, const char *pci)
{
    struct topology_node node;
    uint32_t index;
    int r = with->topology != NULL ? topology_node_of_pci(with->topology, pci, &index) : -ENODATA;
    if (r < 0 || topology_node(with->topology, index, &node) < 0) {
        snprintf(with->near, sizeof(with->near), "device's node %s: not bound",
                 r == -EACCES ? "not among those allowed" : "unknown");
        return;
    }
    r = topology_bind_thread(with->topology, index);
    if (r == 0) {
        with->n_cpus = node.n_cpus;
        snprintf(with->near, sizeof(with->near), "near its device: node %u, %u cpu%s", node.os_index, node.n_cpus,
                 node.n_cpus == 1 ? "" : "s");
    } else if (r == -ENODATA)
        snprintf(with->near, sizeof(with->near), "no cpu of the device's node %u allowed: not bound", node.os_index);
    else
        snprintf(with->near, sizeof(with->near), "device's node %u: not bound (%s)", node.os_index, strerror(-r));
}

static void leave(struct main_backend *with)
{
    with->near[0] = '\0';
    with->n_cpus = with->topology != NULL ? topology_n_allowed_cpus(with->topology) : 1;
    if (with->topology != NULL)
        (void)topology_release_thread(with->topology);
}

/* Threads by node and a pool of them; this thread is its first until the engine has one. */
static int start_threads(struct main_backend *with, const struct options *options)
{
    uint32_t n_threads = options_u32(options, "threads");
    int r = 0;
    if (n_threads == 0)
        n_threads = with->n_cpus;
    if (with->topology != NULL && options_choice(options, "weights-by-node") == 0 && with->ops == &backend_cpu) {
        r = nodes_new(with->topology, n_threads, &with->nodes);
        if (r == -ERANGE)
            LOG_WARNING("weights are not split over the NUMA nodes: --threads %u are fewer than nodes", n_threads);
        if (r == -ENOMEM)
            return fail("threads", strerror(-r));
    }
    if (with->nodes != NULL) {
        nodes_bind_thread(with->nodes, 0);
        r = pool_new_grouped(n_threads, with->nodes->node_of_thread, with->nodes->n_nodes, setup_thread, with,
                             &with->pool);
    } else
        r = pool_new(n_threads, setup_thread, with, &with->pool);
    if (r < 0)
        return fail("threads", strerror(-r));
    pool_set_spin(with->pool, n_threads <= with->n_cpus ? POOL_SPIN_US : 0);
    return 0;
}

static void stop_threads(struct main_backend *with)
{
    with->pool = pool_free(with->pool);
    with->nodes = nodes_free(with->nodes);
}

/* ---- the back end ---- */

/* With threads of its own. A failure of the back end itself leaves none, and its sentence in `error`; others are logged. */
static int open_chosen(struct main_backend *with, const struct options *options, struct backend_options *of_backend,
                       const struct backend_ops *ops, char *error, size_t error_size)
{
    with->ops = ops;
    int r = start_threads(with, options);
    if (r < 0)
        return r;
    of_backend->pool = with->pool;
    of_backend->nodes = with->nodes;
    r = ops->open(of_backend, &with->backend, error, error_size);
    if (r < 0) {
        stop_threads(with);
        if (error[0] == '\0')
            snprintf(error, error_size, "%s", strerror(-r));
    }
    return r;
}

int main_backend_open(struct main_backend *with, const struct options *options, const struct kernels *kernels)
{
    const char *name = options_string(options, "backend");
    char error[512] = "", what[64];
    struct choose_backend choice;
    struct backend_options of_backend = {
        .isa = kernels->isa,
        .worker = options_u32(options, "index"),
        .device = options_given(options, "gpu") ? (int32_t)options_u32(options, "gpu") : BACKEND_DEVICE_BY_WORKER,
        .visible_devices = options_environment_of_others("CUDA_VISIBLE_DEVICES"),
    };
    snprintf(what, sizeof(what), "--backend %.40s", name);
    if (choose_backend(name, &of_backend, backend_find, &choice, error, sizeof(error)) < 0)
        return fail(what, error);
    read_topology(with);
    if (choice.ops->locate != NULL)
        go_near(with, choice.pci);
    int r = open_chosen(with, options, &of_backend, choice.ops, error, sizeof(error));
    if (r < 0 && error[0] != '\0' && choice.is_automatic && choice.ops != &backend_cpu) {
        choice.is_second_best = true;
        snprintf(choice.sentence, sizeof(choice.sentence), "cpu: %.250s", error);
        error[0] = '\0';
        leave(with);
        r = open_chosen(with, options, &of_backend, &backend_cpu, error, sizeof(error));
    }
    if (r < 0)
        return error[0] != '\0' ? fail(what, error) : r;
    if (choice.is_second_best)
        LOG_WARNING("back end %s", choice.sentence);
    else if (choice.is_automatic)
        LOG_INFO("back end %s", choice.sentence);
    return 0;
}

void main_backend_close(struct main_backend *with)
{
    if (with->backend != NULL)
        with->backend = with->ops->close(with->backend);
    stop_threads(with);
    with->topology = topology_free(with->topology);
}

/* ---- what became of it ---- */

void main_backend_tell_split(struct main_backend *with)
{
    struct nodes_pages pages[TOPOLOGY_MAX_NODES] = {0};
    char text[LOG_LINE_BYTES];
    if (with->nodes == NULL)
        return;
    for (uint32_t i = 0; i < with->nodes->n_nodes; i++)
        pages[i].error = with->ops->node_bytes(with->backend, i, &pages[i].bytes_on_node, &pages[i].bytes);
    with->percent_local = nodes_percent_local(with->nodes, pages);
    LOG_INFO("%s", nodes_describe(with->nodes, pages, text, sizeof(text)));
    if (nodes_memory_refused(with->nodes) == -EPERM)
        LOG_WARNING("memory of weights is not bound to nodes: its pages come from where the threads "
                    "run; " TOPOLOGY_BINDING_HELP);
}

uint64_t main_backend_capacity(const struct main_backend *with)
{
    return with->ops->capacity != NULL ? with->ops->capacity(with->backend) : 0;
}

uint64_t main_backend_budget(const struct main_backend *with, uint64_t asked)
{
    const uint64_t capacity = main_backend_capacity(with);
    if (capacity == 0 || (asked != 0 && asked <= capacity))
        return asked;
    if (asked != 0)
        LOG_WARNING(
            "--device-memory: %.1f MiB are more than the %.1f MiB that the device has for this process, which are "
            "the limit",
            (double)asked / MIB, (double)capacity / MIB);
    return capacity;
}

const char *main_backend_split(const struct main_backend *with, char *text, size_t text_size)
{
    text[0] = '\0';
    if (with->nodes != NULL && with->percent_local >= 0)
        snprintf(text, text_size, " split over %u nodes (%d %% local)", with->nodes->n_nodes, with->percent_local);
    else if (with->nodes != NULL)
        snprintf(text, text_size, " split over %u nodes", with->nodes->n_nodes);
    return text;
}

const char *main_backend_place(const struct main_backend *with)
{
    if (with->near[0] != '\0')
        return with->near;
    return with->nodes != NULL && nodes_threads_refused(with->nodes) == 0 ? "threads bound to nodes" : "not bound";
}
