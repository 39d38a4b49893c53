#include "gpu-worker/backend/cuda/cuda_commands.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "gpu-worker/backend/cuda/cuda_graphs.h"
#include "gpu-worker/backend/cuda/cuda_internal.h"

enum {
    STAGE_BYTES = 1u << 20,      /* of a piece of staging memory, at least */
    WAIT_US = 60u * 1000 * 1000, /* a device that takes longer for what one step asks is lost */
    N_MARKS = 64,                /* marks that can be told apart */
};

struct command {
    cuda_command *run;
    const char *name;
    _Alignas(16) uint8_t arguments[CUDA_COMMAND_BYTES];
};

/* Pinned memory and its twin on the device. */
struct stage_piece {
    struct stage_piece *next;
    size_t n_bytes, used;
    uint8_t *host, *device;
};

/* What one play brought to the device: free again once its event has happened. */
struct stage {
    struct stage_piece *pieces; /* the last one first */
    cudaEvent_t played;
    bool is_under_way;
};

struct cuda_commands {
    struct command *commands;
    uint32_t n_commands, capacity;
    uint32_t n_staged; /* the last ones of them, while they are played: they run first */
    struct cuda_graphs_place place;
    bool is_plain;          /* what is written down */
    struct stage stages[2]; /* one is filled while the other is read */
    uint32_t filling;
    struct {
        void *memory;
        size_t n_bytes;
    } works[CUDA_N_WORKS];
    void **outgrown; /* work memory that commands under way may still use */
    uint32_t n_outgrown, outgrown_capacity;
    cudaEvent_t marks[N_MARKS];
    uint64_t n_marks;
};

/* ---- failures ---- */

static bool is_lost(cudaError_t error)
{
    switch (error) {
    case cudaErrorInvalidValue:
    case cudaErrorMemoryAllocation:
    case cudaErrorInvalidConfiguration:
    case cudaErrorInvalidResourceHandle:
        return false;
    default:
        return cudaDeviceSynchronize() != cudaSuccess; /* nothing works any more */
    }
}

bool cuda_commands_failed(struct backend *backend, const char *call, cudaError_t error)
{
    if (error == cudaSuccess)
        return false;
    (void)cudaGetLastError(); /* it is told here */
    if (backend->error != 0)
        return true;
    backend->error = error == cudaErrorMemoryAllocation ? -ENOMEM : is_lost(error) ? -ENODEV : -EIO;
    snprintf(backend->error_sentence, sizeof backend->error_sentence, "%s: %s (%s)", call, cudaGetErrorString(error),
             cudaGetErrorName(error));
    return true;
}

/* ---- life ---- */

static void free_pieces(struct backend *backend, struct stage *stage)
{
    for (struct stage_piece *piece = stage->pieces, *next; piece != NULL; piece = next) {
        next = piece->next;
        backend_cuda_free(backend, piece->device);
        cudaFreeHost(piece->host);
        free(piece);
    }
    stage->pieces = NULL;
}

int cuda_commands_new(struct backend *backend)
{
    struct cuda_commands *commands = calloc(1, sizeof *commands);
    if (commands == NULL)
        return -ENOMEM;
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < 2 && error == cudaSuccess; i++)
        error = cudaEventCreateWithFlags(&commands->stages[i].played, cudaEventDisableTiming);
    for (int i = 0; i < N_MARKS && error == cudaSuccess; i++)
        error = cudaEventCreateWithFlags(&commands->marks[i], cudaEventDisableTiming);
    backend->commands = commands;
    if (cuda_commands_failed(backend, "cudaEventCreateWithFlags", error))
        return backend->error;
    return cuda_graphs_new(backend);
}

static void free_outgrown(struct backend *backend)
{
    struct cuda_commands *commands = backend->commands;
    for (uint32_t i = 0; i < commands->n_outgrown; i++)
        backend_cuda_free(backend, commands->outgrown[i]);
    commands->n_outgrown = 0;
}

void cuda_commands_free(struct backend *backend)
{
    struct cuda_commands *commands = backend->commands;
    if (commands == NULL)
        return;
    cuda_graphs_free(backend);
    free_outgrown(backend);
    for (int i = 0; i < CUDA_N_WORKS; i++)
        backend_cuda_free(backend, commands->works[i].memory);
    for (int i = 0; i < 2; i++) {
        free_pieces(backend, &commands->stages[i]);
        if (commands->stages[i].played != NULL)
            cudaEventDestroy(commands->stages[i].played);
    }
    for (int i = 0; i < N_MARKS; i++)
        if (commands->marks[i] != NULL)
            cudaEventDestroy(commands->marks[i]);
    free(commands->commands);
    free(commands->outgrown);
    free(commands);
    backend->commands = NULL;
}

/* ---- writing down ---- */

void cuda_commands_add(struct backend *backend, const char *name, cuda_command *run, const void *arguments,
                       size_t n_bytes)
{
    struct cuda_commands *commands = backend->commands;
    if (backend->error != 0)
        return;
    if (commands->n_commands == commands->capacity) {
        uint32_t capacity = commands->capacity == 0 ? 64 : 2 * commands->capacity;
        struct command *grown = realloc(commands->commands, capacity * sizeof *grown);
        if (grown == NULL) {
            cuda_commands_failed(backend, name, cudaErrorMemoryAllocation);
            return;
        }
        commands->commands = grown;
        commands->capacity = capacity;
    }
    struct command *command = &commands->commands[commands->n_commands++];
    memset(command, 0, sizeof *command);
    command->run = run;
    command->name = name;
    memcpy(command->arguments, arguments, n_bytes);
}

void cuda_commands_keep_plain(struct backend *backend)
{
    backend->commands->is_plain = true;
}

/* ---- waiting ---- */

/* For an event, or (NULL) all of the stream. Polls, so that it ends; most waits are shorter than a sleep. */
static bool wait_for(struct backend *backend, cudaEvent_t event)
{
    uint64_t deadline = clock_deadline_us(WAIT_US);
    for (;;) {
        cudaError_t error = event != NULL ? cudaEventQuery(event) : cudaStreamQuery(backend->stream);
        if (error == cudaSuccess)
            return true;
        if (error != cudaErrorNotReady) {
            cuda_commands_failed(backend, event != NULL ? "cudaEventQuery" : "cudaStreamQuery", error);
            return false;
        }
        if (clock_now_us() < deadline)
            continue;
        if (backend->error == 0) {
            backend->error = -ENODEV;
            snprintf(backend->error_sentence, sizeof backend->error_sentence, "the device did not finish within %u s",
                     WAIT_US / 1000000);
        }
        return false;
    }
}

/* ---- staging ---- */

static bool new_piece(struct backend *backend, struct stage *stage, size_t n_bytes)
{
    struct stage_piece *piece = calloc(1, sizeof *piece);
    void *host = NULL;
    if (piece != NULL)
        piece->device = backend_cuda_alloc(backend, n_bytes);
    if (piece == NULL || piece->device == NULL ||
        cuda_commands_failed(backend, "cudaMallocHost", cudaMallocHost(&host, n_bytes))) {
        if (piece != NULL)
            backend_cuda_free(backend, piece->device);
        free(piece);
        cuda_commands_failed(backend, "staging memory", cudaErrorMemoryAllocation);
        return false;
    }
    memset(host, 0, n_bytes); /* what is between two arrays travels, too */
    piece->host = host;
    piece->n_bytes = n_bytes;
    piece->next = stage->pieces;
    stage->pieces = piece;
    return true;
}

/* The stage that is filled, free for it: one piece as large as all it needed before. */
static struct stage *begin_stage(struct backend *backend)
{
    struct cuda_commands *commands = backend->commands;
    struct stage *stage = &commands->stages[commands->filling];
    if (!stage->is_under_way)
        return stage;
    if (!wait_for(backend, stage->played))
        return NULL;
    stage->is_under_way = false;
    size_t n_bytes = 0;
    for (struct stage_piece *piece = stage->pieces; piece != NULL; piece = piece->next) {
        n_bytes += piece->n_bytes;
        piece->used = 0;
    }
    if (stage->pieces != NULL && stage->pieces->next != NULL) {
        free_pieces(backend, stage);
        if (!new_piece(backend, stage, n_bytes))
            return NULL;
    }
    return stage;
}

const void *cuda_commands_stage(struct backend *backend, size_t n_bytes, void **ret_host)
{
    if (backend->error != 0)
        return NULL;
    struct stage *stage = begin_stage(backend);
    if (stage == NULL)
        return NULL;
    n_bytes = cuda_commands_aligned(n_bytes);
    struct stage_piece *piece = stage->pieces;
    if ((piece == NULL || piece->n_bytes - piece->used < n_bytes) &&
        !new_piece(backend, stage, n_bytes > STAGE_BYTES ? n_bytes : STAGE_BYTES))
        return NULL;
    piece = stage->pieces;
    *ret_host = piece->host + piece->used;
    const void *device = piece->device + piece->used;
    piece->used += n_bytes;
    return device;
}

const void *cuda_commands_stage_copy(struct backend *backend, const void *bytes, size_t n_bytes)
{
    void *host;
    const void *device = cuda_commands_stage(backend, n_bytes, &host);
    if (device != NULL)
        memcpy(host, bytes, n_bytes);
    return device;
}

/* ---- work ---- */

/* False: no memory for that much; there is what there was. */
static bool grow_work(struct backend *backend, enum cuda_work purpose, size_t n_bytes)
{
    struct cuda_commands *commands = backend->commands;
    if (n_bytes <= commands->works[purpose].n_bytes && commands->works[purpose].memory != NULL)
        return true;
    if (commands->n_outgrown == commands->outgrown_capacity) {
        uint32_t capacity = commands->outgrown_capacity + CUDA_N_WORKS;
        void **grown = realloc(commands->outgrown, capacity * sizeof *grown);
        if (grown == NULL)
            return false;
        commands->outgrown = grown;
        commands->outgrown_capacity = capacity;
    }
    size_t size = n_bytes + n_bytes / 4;
    void *memory = backend_cuda_alloc(backend, size);
    if (memory == NULL) {
        size = n_bytes;
        memory = backend_cuda_alloc(backend, size);
    }
    if (memory == NULL)
        return false;
    if (commands->works[purpose].memory != NULL)
        commands->outgrown[commands->n_outgrown++] = commands->works[purpose].memory;
    commands->works[purpose].memory = memory;
    commands->works[purpose].n_bytes = size;
    return true;
}

void *cuda_commands_work(struct backend *backend, enum cuda_work purpose, size_t n_bytes)
{
    if (backend->error != 0)
        return NULL;
    if (!grow_work(backend, purpose, n_bytes)) {
        cuda_commands_failed(backend, "work memory", cudaErrorMemoryAllocation);
        return NULL;
    }
    return backend->commands->works[purpose].memory;
}

size_t cuda_commands_work_bytes(struct backend *backend, enum cuda_work purpose, size_t n_bytes)
{
    if (backend->error == 0)
        (void)grow_work(backend, purpose, n_bytes);
    return backend->commands->works[purpose].n_bytes;
}

/* ---- playing ---- */

struct stage_arguments {
    void *device;
    const void *host;
    size_t n_bytes;
};

static cudaError_t launch_stage(struct backend *backend, const void *arguments)
{
    const struct stage_arguments *a = arguments;
    return cudaMemcpyAsync(a->device, a->host, a->n_bytes, cudaMemcpyHostToDevice, backend->stream);
}

/* The copies of what was staged are commands, too: a list says all that a play does. */
static void add_stage(struct backend *backend, const struct stage *stage)
{
    const uint32_t n_before = backend->commands->n_commands;
    for (const struct stage_piece *piece = stage->pieces; piece != NULL; piece = piece->next) {
        const struct stage_arguments a = {piece->device, piece->host, piece->used};
        if (piece->used > 0)
            CUDA_COMMAND(backend, "copy of what was staged", launch_stage, a);
    }
    backend->commands->n_staged = backend->commands->n_commands - n_before;
}

static cudaError_t launch_all(struct backend *backend, const char **ret_name)
{
    const struct cuda_commands *commands = backend->commands;
    const uint32_t n = commands->n_commands, first = n - commands->n_staged;
    for (uint32_t i = 0; i < n; i++) {
        const struct command *command = &commands->commands[(first + i) % n];
        const cudaError_t error = command->run(backend, command->arguments);
        *ret_name = command->name;
        if (error != cudaSuccess)
            return error;
    }
    return cudaSuccess;
}

void cuda_commands_play(struct backend *backend)
{
    struct cuda_commands *commands = backend->commands;
    struct stage *stage = &commands->stages[commands->filling];
    if (backend->error == 0 && commands->n_commands > 0) {
        const bool is_staged = !stage->is_under_way;
        commands->n_staged = 0;
        commands->place.stage = commands->filling;
        if (is_staged)
            add_stage(backend, stage);
        const char *name = "";
        if (backend->error == 0 && !cuda_graphs_play(backend, &commands->place, commands->commands,
                                                     commands->n_commands * sizeof *commands->commands, launch_all)) {
            const cudaError_t error = launch_all(backend, &name);
            cuda_commands_failed(backend, name, error);
        }
        commands->place.play++;
        if (is_staged) {
            stage->is_under_way = true;
            cuda_commands_failed(backend, "cudaEventRecord", cudaEventRecord(stage->played, backend->stream));
            commands->filling = 1 - commands->filling;
        }
    }
    commands->n_commands = 0;
    commands->is_plain = false;
}

void cuda_commands_part(struct backend *backend, uint32_t number)
{
    cuda_commands_play(backend);
    backend->commands->place.part = number;
    backend->commands->place.play = 0;
}

void cuda_commands_settle(struct backend *backend)
{
    cuda_commands_play(backend);
    (void)wait_for(backend, NULL);
}

int cuda_commands_finish(struct backend *backend)
{
    uint64_t mark = cuda_commands_mark(backend);
    int r = cuda_commands_wait(backend, mark);
    if (r == 0)
        free_outgrown(backend);
    return r;
}

uint64_t cuda_commands_mark(struct backend *backend)
{
    struct cuda_commands *commands = backend->commands;
    cuda_commands_play(backend);
    if (backend->error == 0)
        cuda_commands_failed(backend, "cudaEventRecord",
                             cudaEventRecord(commands->marks[commands->n_marks % N_MARKS], backend->stream));
    return commands->n_marks++;
}

int cuda_commands_wait(struct backend *backend, uint64_t mark)
{
    struct cuda_commands *commands = backend->commands;
    /* an older mark's event may stand for a later mark: then that is waited for, which is behind it */
    if (backend->error == 0)
        (void)wait_for(backend, commands->marks[mark % N_MARKS]);
    int error = backend->error;
    if (error != -ENODEV)
        backend->error = 0; /* told */
    return error;
}
