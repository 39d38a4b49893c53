/* cuda_graphs.c - see cuda_graphs.h. */
#include "gpu-worker/backend/cuda/cuda_graphs.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/backend/cuda/cuda_internal.h"

/* What a place remembers. */
struct memory {
    uint64_t last;         /* of the list that was played last: its hash, which only decides what is worth a capture */
    uint64_t refused;      /* of one that cannot be captured */
    cudaGraphExec_t graph; /* NULL: none */
    uint64_t of_graph;     /* its list: hash, and bytes, which decide whether it is played */
    void *list;
    size_t n_bytes;
};

/* Of one part; there once the part was played. */
struct part {
    struct memory memories[CUDA_GRAPHS_N_PLAYS][CUDA_GRAPHS_N_STAGES];
};

struct cuda_graphs {
    struct part *parts[CUDA_GRAPHS_N_PARTS];
    bool is_allowed;
    struct cuda_graphs_counts counts;
};

int cuda_graphs_new(struct backend *backend)
{
    backend->graphs = calloc(1, sizeof *backend->graphs);
    if (backend->graphs == NULL)
        return -ENOMEM;
    backend->graphs->is_allowed = true;
    return 0;
}

static void drop(struct cuda_graphs *graphs, struct memory *memory)
{
    if (memory->graph == NULL)
        return;
    cudaGraphExecDestroy(memory->graph);
    free(memory->list);
    memory->graph = NULL;
    memory->list = NULL;
    graphs->counts.n_graphs--;
}

void cuda_graphs_forget(struct backend *backend)
{
    struct cuda_graphs *graphs = backend->graphs;
    if (graphs == NULL)
        return;
    for (uint32_t i = 0; i < CUDA_GRAPHS_N_PARTS; i++) {
        if (graphs->parts[i] == NULL)
            continue;
        for (uint32_t play = 0; play < CUDA_GRAPHS_N_PLAYS; play++)
            for (uint32_t stage = 0; stage < CUDA_GRAPHS_N_STAGES; stage++)
                drop(graphs, &graphs->parts[i]->memories[play][stage]);
        free(graphs->parts[i]);
        graphs->parts[i] = NULL;
    }
}

void cuda_graphs_free(struct backend *backend)
{
    cuda_graphs_forget(backend);
    free(backend->graphs);
    backend->graphs = NULL;
}

void cuda_graphs_allow(struct backend *backend, bool allow)
{
    cuda_graphs_forget(backend);
    backend->graphs->is_allowed = allow;
}

const struct cuda_graphs_counts *cuda_graphs_counts(const struct backend *backend)
{
    return &backend->graphs->counts;
}

/* NULL: a place without graphs, or no memory, which costs nothing but them. */
static struct memory *memory_of(struct cuda_graphs *graphs, const struct cuda_graphs_place *place)
{
    if (!graphs->is_allowed || place->part == 0 || place->part >= CUDA_GRAPHS_N_PARTS ||
        place->play >= CUDA_GRAPHS_N_PLAYS)
        return NULL;
    struct part **part = &graphs->parts[place->part];
    if (*part == NULL)
        *part = calloc(1, sizeof **part);
    return *part == NULL ? NULL : &(*part)->memories[place->play][place->stage];
}

/* Of whole words: lists are arrays of structs. Never 0. */
static uint64_t hash_of(const void *list, size_t n_bytes)
{
    const uint8_t *bytes = list;
    uint64_t hash = n_bytes, word;
    for (size_t i = 0; i + sizeof word <= n_bytes; i += sizeof word) {
        memcpy(&word, bytes + i, sizeof word);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    return hash == 0 ? 1 : hash;
}

static bool refuse(struct cuda_graphs *graphs, const char *call, cudaError_t error)
{
    (void)cudaGetLastError(); /* the plain launch tells its own */
    graphs->counts.n_refused++;
    snprintf(graphs->counts.note, sizeof graphs->counts.note, "%.40s: %.60s (%.48s)", call, cudaGetErrorString(error),
             cudaGetErrorName(error));
    return false;
}

/* The capture ends whatever happens in it; nothing of it is done yet. */
static bool capture(struct backend *backend, cuda_graphs_launch *launch, cudaGraphExec_t *ret_graph)
{
    cudaGraph_t written = NULL;
    const char *call = "cudaStreamBeginCapture";
    cudaError_t error = cudaStreamBeginCapture(backend->stream, cudaStreamCaptureModeThreadLocal);
    if (error != cudaSuccess)
        return refuse(backend->graphs, call, error);
    error = launch(backend, &call);
    const cudaError_t end = cudaStreamEndCapture(backend->stream, &written);
    if (error == cudaSuccess) {
        call = "cudaStreamEndCapture";
        error = end;
    }
    if (error == cudaSuccess) {
        call = "cudaGraphInstantiate";
        error = cudaGraphInstantiate(ret_graph, written, 0);
    }
    if (written != NULL)
        cudaGraphDestroy(written);
    return error == cudaSuccess || refuse(backend->graphs, call, error);
}

/* In the place of the graph that was there. */
static bool keep(struct cuda_graphs *graphs, struct memory *memory, cudaGraphExec_t graph, const void *list,
                 size_t n_bytes, uint64_t hash)
{
    void *copy = malloc(n_bytes);
    if (copy == NULL) {
        cudaGraphExecDestroy(graph);
        return refuse(graphs, "malloc", cudaErrorMemoryAllocation);
    }
    memcpy(copy, list, n_bytes);
    graphs->counts.n_recaptures += memory->graph != NULL;
    drop(graphs, memory);
    memory->graph = graph;
    memory->list = copy;
    memory->n_bytes = n_bytes;
    memory->of_graph = hash;
    graphs->counts.n_captures++;
    graphs->counts.n_graphs++;
    return true;
}

/* Whether the place has a graph of the list now. */
static bool make(struct backend *backend, struct memory *memory, const void *list, size_t n_bytes,
                 cuda_graphs_launch *launch)
{
    struct cuda_graphs *graphs = backend->graphs;
    const uint64_t hash = hash_of(list, n_bytes);
    const bool is_alike = hash == memory->last;
    cudaGraphExec_t graph = NULL;
    memory->last = hash;
    if (!is_alike || hash == memory->refused ||
        (memory->graph == NULL && graphs->counts.n_graphs == CUDA_GRAPHS_MAX_GRAPHS))
        return false;
    if (capture(backend, launch, &graph) && keep(graphs, memory, graph, list, n_bytes, hash))
        return true;
    memory->refused = hash;
    return false;
}

bool cuda_graphs_play(struct backend *backend, const struct cuda_graphs_place *place, const void *list, size_t n_bytes,
                      cuda_graphs_launch *launch)
{
    struct cuda_graphs *graphs = backend->graphs;
    struct memory *memory = memory_of(graphs, place);
    if (memory == NULL || n_bytes > CUDA_GRAPHS_MAX_BYTES) {
        graphs->counts.n_plain += place->part != 0;
        return false;
    }
    if (memory->graph != NULL && memory->n_bytes == n_bytes && memcmp(memory->list, list, n_bytes) == 0) {
        memory->last = memory->of_graph;
        graphs->counts.n_replays++;
    } else if (!make(backend, memory, list, n_bytes, launch)) {
        graphs->counts.n_plain++;
        return false;
    }
    cuda_commands_failed(backend, "cudaGraphLaunch", cudaGraphLaunch(memory->graph, backend->stream));
    return true;
}
