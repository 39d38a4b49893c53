/* cuda_prefill.c - see cuda_prefill.h. */
#include "gpu-worker/backend/cuda/cuda_prefill.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/backend/cuda/cuda_blas.h"
#include "gpu-worker/backend/cuda/cuda_halves.h"
#include "gpu-worker/backend/cuda/cuda_host.h"
#include "gpu-worker/backend/cuda/cuda_internal.h"
#include "gpu-worker/backend/cuda/cuda_prefill_ops.h"

enum {
    PIECE = CUDA_PREFILL_PIECE,
    BLOCK = KERNELS_BLOCK_TOKENS,
    BUFFER_TOKENS = 512,
    COLUMNS = 8, /* tokens of a product are a multiple: halves are read 16 bytes at a time */
};
/* Scores of a piece at a time, f32; with the weights half as much again: what the caches of A100 and later hold. */
#define SCORE_BYTES ((size_t)32 << 20)

/* Contiguous bytes of the host. */
struct copy {
    uint8_t *to;
    const void *from;
    size_t n_bytes;
};

struct cuda_prefill {
    struct backend_prefill call;
    uint32_t group, n_queries; /* of a KV head */
    size_t row_bytes;
    bool is_open, with_blas;
    bool is_lost; /* something failed since it was begun: no more of it, though that has been told */

    /* works */
    void *queries;  /* [n_kv_heads][n_queries][head_dim]: halves, or f32 without cuBLAS */
    float *factors; /* [n_kv_heads][n_queries] */
    uint8_t *buffers[2];
    uint16_t *keys, *values; /* of the piece; without cuBLAS `keys` are its rows */
    float *states,
        *out; /* [n_kv_heads][n_queries]: states [2] and outputs [head_dim], or whole partials without cuBLAS */
    float *scores;
    uint16_t *weights;
    uint32_t tile_positions;

    /* the piece */
    uint32_t n_tokens;     /* in it, those of chunks included */
    uint32_t causal_first; /* position of its first token */
    bool is_causal, is_first;

    /* what goes there next */
    struct cuda_prefill_chunk chunks[PIECE + 1];
    struct copy *copies; /* of this play; the next chunks' from first_copy on */
    uint32_t n_chunks, n_copies, first_copy, copies_capacity;
    uint32_t buffer, buffer_tokens; /* the buffer that is filled, and how far */

    cudaStream_t stream;                /* of copies */
    cudaEvent_t copied[2], gathered[2]; /* the buffer is full; it is free again */
};

/* ---- life ---- */

int cuda_prefill_new(struct backend *backend)
{
    struct cuda_prefill *p = calloc(1, sizeof *p);
    if (p == NULL)
        return -ENOMEM;
    backend->prefill = p;
    cudaError_t error = cudaStreamCreateWithFlags(&p->stream, cudaStreamNonBlocking);
    for (int i = 0; i < 2 && error == cudaSuccess; i++) {
        error = cudaEventCreateWithFlags(&p->copied[i], cudaEventDisableTiming);
        if (error == cudaSuccess)
            error = cudaEventCreateWithFlags(&p->gathered[i], cudaEventDisableTiming);
    }
    return cuda_commands_failed(backend, "streams and events of prefill", error) ? backend->error : 0;
}

void cuda_prefill_free(struct backend *backend)
{
    struct cuda_prefill *p = backend->prefill;
    if (p == NULL)
        return;
    for (int i = 0; i < 2; i++) {
        if (p->copied[i] != NULL)
            cudaEventDestroy(p->copied[i]);
        if (p->gathered[i] != NULL)
            cudaEventDestroy(p->gathered[i]);
    }
    if (p->stream != NULL)
        cudaStreamDestroy(p->stream);
    free(p->copies);
    free(p);
    backend->prefill = NULL;
}

/* ---- begin ---- */

static cudaError_t launch_begin(struct backend *backend, const void *arguments)
{
    struct cuda_prefill *p = backend->prefill;
    const struct backend_prefill *call = arguments;
    const size_t n = (size_t)call->n * call->n_heads;
    cudaError_t error = cuda_prefill_empty(&backend->queue, p->states, p->with_blas ? 2 : 2 + call->head_dim, n);
    for (int i = 0; i < 2 && error == cudaSuccess; i++) /* buffers may lie where others lay before */
        error = cudaEventRecord(p->gathered[i], backend->stream);
    if (error != cudaSuccess)
        return error;
    return p->with_blas ? cuda_halves_rows(&backend->queue, call->q, call->n, call->n_heads, p->group, call->head_dim,
                                           call->n * call->n_heads, p->queries, p->factors)
                        : cuda_prefill_queries(&backend->queue, call->q, call->n, call->n_heads, p->group,
                                               call->head_dim, p->queries);
}

/* One work in two: the first n_first bytes, and the rest. */
static void *work_of_two(struct backend *backend, enum cuda_work purpose, size_t n_first, size_t n_second,
                         void **ret_second)
{
    uint8_t *work = cuda_commands_work(backend, purpose, cuda_commands_aligned(n_first) + n_second);
    *ret_second = work == NULL ? NULL : work + cuda_commands_aligned(n_first);
    return work;
}

static bool take_works(struct backend *backend, struct cuda_prefill *p)
{
    const struct backend_prefill *call = &p->call;
    const size_t n = (size_t)call->n * call->n_heads, head_dim = call->head_dim;
    void *second;
    p->queries = work_of_two(backend, CUDA_WORK_PREFILL_QUERY, n * head_dim * (p->with_blas ? 2 : 4),
                             n * sizeof *p->factors, &second);
    p->factors = second;
    const size_t buffer_bytes = (size_t)BUFFER_TOKENS * call->n_kv_heads * p->row_bytes;
    p->buffers[0] = work_of_two(backend, CUDA_WORK_PREFILL_ROWS, buffer_bytes, buffer_bytes, &second);
    p->buffers[1] = second;
    const size_t piece = (size_t)PIECE * call->n_kv_heads;
    p->keys = work_of_two(backend, CUDA_WORK_PREFILL_KEYS, piece * (p->with_blas ? head_dim * 2 : p->row_bytes),
                          p->with_blas ? piece * head_dim * 2 : 0, &second);
    p->values = second;
    p->states = work_of_two(backend, CUDA_WORK_PREFILL_PARTIALS, n * (p->with_blas ? 2 : 2 + head_dim) * sizeof(float),
                            p->with_blas ? n * head_dim * sizeof(float) : 0, &second);
    p->out = second;
    if (p->with_blas) {
        const size_t of_position = (size_t)PIECE * call->n_heads * sizeof(float);
        const size_t positions = SCORE_BYTES / of_position;
        p->tile_positions = positions < 1 ? 1 : positions < call->n ? (uint32_t)positions : call->n;
        p->scores = work_of_two(backend, CUDA_WORK_PREFILL_SCORES, p->tile_positions * of_position,
                                p->tile_positions * of_position / 2, &second);
        p->weights = second;
    }
    return backend->error == 0;
}

void cuda_prefill_begin(struct backend *backend, const struct backend_prefill *prefill)
{
    struct cuda_prefill *p = backend->prefill;
    assert(!p->is_open && prefill->n > 0 && prefill->n_heads % prefill->n_kv_heads == 0);
    cuda_commands_part(backend, 0); /* copies of another stream, and never the same twice: no graph */
    p->call = *prefill;
    p->is_open = true;
    p->with_blas = backend->blas != NULL;
    p->group = prefill->n_heads / prefill->n_kv_heads;
    p->n_queries = prefill->n * p->group;
    p->row_bytes = kernels_row_bytes(prefill->head_dim, prefill->codec);
    p->n_tokens = p->causal_first = 0;
    p->is_causal = false;
    p->is_first = true;
    p->n_chunks = p->n_copies = p->first_copy = p->buffer_tokens = 0;
    p->is_lost = !take_works(backend, p);
    if (!p->is_lost)
        CUDA_COMMAND_PLAIN(backend, "prefill's queries", launch_begin, *prefill);
}

/* ---- attention of a piece ---- */

/* What attention needs to know of the piece, which has changed when it runs. */
struct piece {
    uint32_t n_tokens, causal_first;
    bool is_causal, is_first;
    uint8_t padding[6];
};

/* Scores, weights and their products with the values, for the positions of a tile. */
static cudaError_t attend_tile(struct backend *backend, const struct piece *piece, uint32_t first_position,
                               uint32_t n_positions)
{
    const struct cuda_prefill *p = backend->prefill;
    const struct backend_prefill *call = &p->call;
    const uint32_t n_queries = n_positions * p->group, first = first_position * p->group;
    const size_t head_dim = call->head_dim, all_queries = p->n_queries;
    uint32_t n_tokens = piece->n_tokens, end = first_position + n_positions;
    if (piece->is_causal && end < piece->causal_first + n_tokens)
        n_tokens = end > piece->causal_first ? end - piece->causal_first : 0;
    if (n_tokens == 0)
        return cudaSuccess;
    const uint32_t n_columns = (n_tokens + COLUMNS - 1) / COLUMNS * COLUMNS;
    const struct cuda_blas_product scores = {
        .left = p->keys,
        .right = (const uint16_t *)p->queries + first * head_dim,
        .c = p->scores,
        .m = (int)n_columns,
        .n = (int)n_queries,
        .k = (int)head_dim,
        .left_stride = (int)head_dim,
        .right_stride = (int)head_dim,
        .c_stride = PIECE,
        .left_by_rows = true,
        .alpha = 1,
        .n_batch = (int)call->n_kv_heads,
        .left_batch = (long long)(PIECE * head_dim),
        .right_batch = (long long)(all_queries * head_dim),
        .c_batch = (long long)n_queries * PIECE,
    };
    const struct cuda_prefill_softmax softmax = {
        .scores = p->scores,
        .weights = p->weights,
        .states = p->states,
        .out = p->out,
        .factors = p->factors,
        .n_kv_heads = call->n_kv_heads,
        .n_queries = p->n_queries,
        .tile_queries = n_queries,
        .first_query = first,
        .group = p->group,
        .head_dim = call->head_dim,
        .n_tokens = n_tokens,
        .n_columns = n_columns,
        .causal_first = piece->causal_first,
        .is_causal = piece->is_causal,
        .is_first = piece->is_first,
        .scale = call->scale,
    };
    const struct cuda_blas_product outputs = {
        .left = p->values,
        .right = p->weights,
        .c = p->out + first * head_dim,
        .m = (int)head_dim,
        .n = (int)n_queries,
        .k = (int)n_columns,
        .left_stride = (int)head_dim,
        .right_stride = PIECE,
        .c_stride = (int)head_dim,
        .left_by_rows = false,
        .adds = !piece->is_first,
        .alpha = 1,
        .n_batch = (int)call->n_kv_heads,
        .left_batch = (long long)(PIECE * head_dim),
        .right_batch = (long long)n_queries * PIECE,
        .c_batch = (long long)(all_queries * head_dim),
    };
    cudaError_t error = cuda_blas_multiply(backend, &scores);
    if (error == cudaSuccess)
        error = cuda_prefill_weigh(&backend->queue, &softmax);
    return error == cudaSuccess ? cuda_blas_multiply(backend, &outputs) : error;
}

static cudaError_t launch_piece(struct backend *backend, const void *arguments)
{
    const struct cuda_prefill *p = backend->prefill;
    cudaError_t error = cudaSuccess;
    for (uint32_t first = 0; first < p->call.n && error == cudaSuccess; first += p->tile_positions) {
        uint32_t left = p->call.n - first;
        error = attend_tile(backend, arguments, first, left < p->tile_positions ? left : p->tile_positions);
    }
    return error;
}

/* An item of `attend`: the queries of 64 positions of a KV head, and of its pieces the first ones. */
static struct backend_attend item_of(const struct cuda_prefill *p, uint32_t head, uint32_t tile,
                                     const struct backend_piece *pieces, uint32_t n_pieces)
{
    const uint32_t left = p->call.n - tile * BLOCK;
    const size_t query = (size_t)head * p->n_queries + (size_t)tile * BLOCK * p->group;
    struct backend_attend item = {.q = (const float *)p->queries + query * p->call.head_dim,
                                  .partials = p->states + query * KERNELS_PARTIAL_FLOATS(p->call.head_dim),
                                  .pieces = pieces,
                                  .n_pieces = n_pieces,
                                  .n_queries = (left < BLOCK ? left : BLOCK) * p->group,
                                  .group = p->group,
                                  .causal_piece = n_pieces};
    if (!p->is_causal)
        return item;
    const uint32_t first = p->causal_first / BLOCK; /* pieces begin with a tile */
    item.n_pieces = tile < first ? 0 : tile - first + 1 < n_pieces ? tile - first + 1 : n_pieces;
    item.causal_piece = tile < first ? 0 : tile - first;
    return item;
}

/* Without cuBLAS. */
static void attend_blocks(struct backend *backend, struct cuda_prefill *p)
{
    const uint32_t n_heads = p->call.n_kv_heads, n_pieces = (p->n_tokens + BLOCK - 1) / BLOCK;
    const uint32_t n_tiles = (p->call.n + BLOCK - 1) / BLOCK, last = p->n_tokens % BLOCK;
    struct backend_piece *pieces = calloc((size_t)n_heads * n_pieces, sizeof *pieces);
    struct backend_attend *items = calloc((size_t)n_heads * n_tiles, sizeof *items);
    if (pieces == NULL || items == NULL)
        cuda_commands_failed(backend, "prefill", cudaErrorMemoryAllocation);
    for (uint32_t head = 0; head < n_heads && backend->error == 0; head++) {
        struct backend_piece *of_head = pieces + (size_t)head * n_pieces;
        for (uint32_t i = 0; i < n_pieces; i++)
            of_head[i] = (struct backend_piece){
                .rows = (const uint8_t *)p->keys + ((size_t)i * n_heads + head) * BLOCK * p->row_bytes,
                .mask = i == n_pieces - 1 && last > 0 ? (UINT64_C(1) << last) - 1 : ~UINT64_C(0)};
        for (uint32_t tile = 0; tile < n_tiles; tile++)
            items[(size_t)head * n_tiles + tile] = item_of(p, head, tile, of_head, n_pieces);
    }
    if (backend->error == 0)
        backend_cuda.attend(backend, items, n_heads * n_tiles, p->call.head_dim, p->call.codec, p->call.scale);
    free(pieces);
    free(items);
}

/* ---- rows into the piece ---- */

struct chunks_arguments {
    const struct cuda_prefill_chunk *chunks;
    uint32_t n_chunks, first_copy, n_copies, buffer;
    bool has_copies;
    uint8_t padding[7];
};

/* Copies beside what the device does; the back end's stream waits for them. */
static cudaError_t copy_rows(const struct backend *backend, const struct chunks_arguments *a)
{
    const struct cuda_prefill *p = backend->prefill;
    cudaError_t error = cudaStreamWaitEvent(p->stream, p->gathered[a->buffer], 0);
    for (uint32_t i = 0; i < a->n_copies && error == cudaSuccess; i++) {
        const struct copy *copy = &p->copies[a->first_copy + i];
        error = cudaMemcpyAsync(copy->to, copy->from, copy->n_bytes, cudaMemcpyHostToDevice, p->stream);
    }
    if (error == cudaSuccess)
        error = cudaEventRecord(p->copied[a->buffer], p->stream);
    return error == cudaSuccess ? cudaStreamWaitEvent(backend->stream, p->copied[a->buffer], 0) : error;
}

static cudaError_t launch_chunks(struct backend *backend, const void *arguments)
{
    const struct chunks_arguments *a = arguments;
    const struct cuda_prefill *p = backend->prefill;
    const struct backend_prefill *call = &p->call;
    cudaError_t error = a->has_copies ? copy_rows(backend, a) : cudaSuccess;
    if (error == cudaSuccess && p->with_blas)
        error = cuda_prefill_decode(&backend->queue, a->chunks, a->n_chunks, call->n_kv_heads, call->head_dim,
                                    call->codec, p->keys, p->values);
    else if (error == cudaSuccess)
        error = cuda_prefill_gather(&backend->queue, a->chunks, a->n_chunks, call->n_kv_heads, (uint32_t)p->row_bytes,
                                    p->keys);
    if (error == cudaSuccess && a->has_copies)
        error = cudaEventRecord(p->gathered[a->buffer], backend->stream);
    return error;
}

static void flush_chunks(struct backend *backend, struct cuda_prefill *p)
{
    if (p->n_chunks == 0)
        return;
    const struct chunks_arguments a = {
        .chunks = cuda_commands_stage_copy(backend, p->chunks, p->n_chunks * sizeof *p->chunks),
        .n_chunks = p->n_chunks,
        .first_copy = p->first_copy,
        .n_copies = p->n_copies - p->first_copy,
        .buffer = p->buffer,
        .has_copies = p->n_copies > p->first_copy};
    CUDA_COMMAND_PLAIN(backend, "prefill's rows", launch_chunks, a);
    p->n_chunks = 0;
    p->first_copy = p->n_copies;
    if (p->buffer_tokens > 0)
        p->buffer = 1 - p->buffer;
    p->buffer_tokens = 0;
}

/* The piece is whole, or no more comes: its attention, and the next piece begins. */
static void flush_piece(struct backend *backend, struct cuda_prefill *p)
{
    if (p->n_tokens == 0)
        return;
    if (p->with_blas && p->n_tokens % COLUMNS != 0)
        p->chunks[p->n_chunks++] =
            (struct cuda_prefill_chunk){.n_tokens = COLUMNS - p->n_tokens % COLUMNS, .first = p->n_tokens};
    flush_chunks(backend, p);
    if (p->with_blas) {
        const struct piece piece = {.n_tokens = p->n_tokens,
                                    .causal_first = p->causal_first,
                                    .is_causal = p->is_causal,
                                    .is_first = p->is_first};
        CUDA_COMMAND_PLAIN(backend, "prefill", launch_piece, piece);
    } else {
        attend_blocks(backend, p);
    }
    p->is_first = false;
    p->causal_first += p->is_causal ? p->n_tokens : 0;
    p->n_tokens = 0;
}

/* Rows by head or by token as they lie, runs of rows that touch each other as one. */
struct layout {
    bool by_token;
    uint32_t n_outer, n_inner;
    size_t outer_bytes, inner_bytes;
};

static struct layout layout_of(const struct cuda_prefill *p, const struct backend_span *span)
{
    const uint32_t n_heads = p->call.n_kv_heads;
    struct layout l = {.n_outer = n_heads,
                       .n_inner = span->n_tokens,
                       .outer_bytes = span->head_bytes,
                       .inner_bytes = span->token_bytes};
    if (span->token_bytes > span->head_bytes && n_heads > 1)
        l = (struct layout){true, span->n_tokens, n_heads, span->token_bytes, span->head_bytes};
    return l;
}

static bool add_copy(struct backend *backend, struct cuda_prefill *p, uint8_t *to, const void *from, size_t n_bytes)
{
    if (p->n_copies == p->copies_capacity) {
        uint32_t capacity = p->copies_capacity == 0 ? 64 : 2 * p->copies_capacity;
        struct copy *grown = realloc(p->copies, capacity * sizeof *grown);
        if (grown == NULL) {
            cuda_commands_failed(backend, "prefill", cudaErrorMemoryAllocation);
            return false;
        }
        p->copies = grown;
        p->copies_capacity = capacity;
    }
    p->copies[p->n_copies++] = (struct copy){to, from, n_bytes};
    return true;
}

/* The runs of a span, each to its place at `to` without gaps: as copies of the buffer, or by the host. False: the device does not
 * reach all of it (copies), or there is no memory. */
static bool copy_runs(struct backend *backend, struct cuda_prefill *p, const struct layout *l, const uint8_t *rows,
                      uint8_t *to, bool by_host)
{
    size_t run = p->row_bytes;
    uint32_t n_outer = l->n_outer, n_inner = l->n_inner;
    if (l->inner_bytes == run || n_inner == 1) {
        run *= n_inner;
        n_inner = 1;
    }
    if (n_inner == 1 && (l->outer_bytes == run || n_outer == 1)) {
        run *= n_outer;
        n_outer = 1;
    }
    for (uint32_t o = 0; o < n_outer; o++) {
        for (uint32_t i = 0; i < n_inner; i++, to += run) {
            const uint8_t *from = rows + o * l->outer_bytes + i * l->inner_bytes;
            if (by_host)
                memcpy(to, from, run);
            else if (cuda_host_find(backend, from, run) == NULL || !add_copy(backend, p, to, from, run))
                return false;
        }
    }
    return true;
}

/* Where the device finds rows of the host: in the buffer, or staged. Returns them as a span of the device. */
static struct backend_span bring(struct backend *backend, struct cuda_prefill *p, const struct backend_span *span)
{
    const struct layout l = layout_of(p, span);
    const uint32_t before = p->n_copies;
    struct backend_span brought = {.n_tokens = span->n_tokens};
    brought.token_bytes = l.by_token ? p->row_bytes * p->call.n_kv_heads : p->row_bytes;
    brought.head_bytes = l.by_token ? p->row_bytes : p->row_bytes * span->n_tokens;
    uint8_t *to = p->buffers[p->buffer] + (size_t)p->buffer_tokens * p->call.n_kv_heads * p->row_bytes;
    brought.rows = to;
    if (copy_runs(backend, p, &l, span->rows, to, false))
        return brought;
    p->n_copies = before;
    void *staged;
    brought.rows = cuda_commands_stage(backend, p->row_bytes * p->call.n_kv_heads * span->n_tokens, &staged);
    if (brought.rows != NULL)
        copy_runs(backend, p, &l, span->rows, staged, true);
    return brought;
}

static void add_chunks(struct cuda_prefill *p, const struct backend_span *span)
{
    for (uint32_t first = 0; first < span->n_tokens; first += CUDA_PREFILL_CHUNK) {
        uint32_t left = span->n_tokens - first, n = left < CUDA_PREFILL_CHUNK ? left : CUDA_PREFILL_CHUNK;
        p->chunks[p->n_chunks++] =
            (struct cuda_prefill_chunk){.rows = (const uint8_t *)span->rows + first * span->token_bytes,
                                        .head_bytes = span->head_bytes,
                                        .token_bytes = span->token_bytes,
                                        .n_tokens = n,
                                        .first = p->n_tokens};
        p->n_tokens += n;
    }
}

static void take_span(struct backend *backend, struct cuda_prefill *p, const struct backend_span *span, bool on_host)
{
    for (uint32_t first = 0, n; first < span->n_tokens && backend->error == 0; first += n) {
        uint32_t room = PIECE - p->n_tokens;
        if (on_host && room > BUFFER_TOKENS - p->buffer_tokens)
            room = BUFFER_TOKENS - p->buffer_tokens;
        n = span->n_tokens - first < room ? span->n_tokens - first : room;
        struct backend_span part = *span;
        part.rows = (const uint8_t *)span->rows + first * span->token_bytes;
        part.n_tokens = n;
        if (on_host) {
            part = bring(backend, p, &part);
            p->buffer_tokens += n;
        }
        add_chunks(p, &part);
        if (p->n_tokens == PIECE)
            flush_piece(backend, p);
        else if (p->buffer_tokens == BUFFER_TOKENS)
            flush_chunks(backend, p);
    }
}

uint64_t cuda_prefill_take(struct backend *backend, const struct backend_span *spans, uint32_t n_spans, bool on_host,
                           bool is_causal)
{
    struct cuda_prefill *p = backend->prefill;
    assert(p->is_open);
    if (!p->is_lost) {
        if (is_causal) { /* a piece of its own */
            flush_piece(backend, p);
            p->is_causal = true;
            p->causal_first = 0;
        }
        for (uint32_t i = 0; i < n_spans; i++)
            take_span(backend, p, &spans[i], on_host);
        if (is_causal)
            flush_piece(backend, p);
        p->is_causal = false;
        flush_chunks(backend, p);
    }
    uint64_t mark = cuda_commands_mark(backend); /* plays */
    p->is_lost = p->is_lost || backend->error != 0;
    p->n_copies = p->first_copy = 0;
    return mark;
}

/* ---- end ---- */

static cudaError_t launch_end(struct backend *backend, const void *arguments)
{
    const struct cuda_prefill *p = backend->prefill;
    const struct backend_prefill *call = arguments;
    const uint32_t stride = 2 + call->head_dim;
    return p->with_blas ? cuda_prefill_finish(&backend->queue, p->out, call->head_dim, p->states + 1, 2, call->n,
                                              call->n_heads, p->group, call->head_dim, call->out)
                        : cuda_prefill_finish(&backend->queue, p->states + 2, stride, p->states + 1, stride, call->n,
                                              call->n_heads, p->group, call->head_dim, call->out);
}

void cuda_prefill_end(struct backend *backend)
{
    struct cuda_prefill *p = backend->prefill;
    assert(p->is_open);
    if (!p->is_lost) {
        flush_piece(backend, p);
        CUDA_COMMAND_PLAIN(backend, "prefill's output", launch_end, p->call);
        cuda_commands_play(backend); /* the commands look at what the next one changes */
    }
    p->is_open = false;
}
