/* cuda_key_tables.c - see cuda_key_tables.h: a list, the one that was made last first. */
#include "gpu-worker/backend/cuda/cuda_key_tables.h"

#include <assert.h>
#include <stdlib.h>

#include "common/clock.h"
#include "gpu-worker/backend/cuda/cuda_internal.h"
#include "gpu-worker/backend/cuda/cuda_keys.h"

enum { UNUSED_US = 10u * 60 * 1000 * 1000 };

struct cuda_key_tables {
    struct cuda_key_tables *next;
    uint64_t id;        /* of the quantizer */
    uint64_t used_us;   /* when an operation last named it */
    uint64_t operation; /* which one */
    void *memory;
    const void **tables; /* [heads], in memory */
};

static size_t n_heads(const struct key_quantizer *quantizer)
{
    return (size_t)quantizer->n_layers * quantizer->n_kv_heads;
}

static enum policy_codec codec_of(const struct key_quantizer *quantizer)
{
    for (int codec = POLICY_CODEC_F16; codec < POLICY_N_CODECS; codec++)
        if (key_codec_find((enum policy_codec)codec) == quantizer->codec)
            return (enum policy_codec)codec;
    return POLICY_CODEC_NONE;
}

/* ---- making ---- */

static size_t centroids_bytes(const struct pq_table *table)
{
    return (size_t)table->n_spaces * table->n_centroids * table->n_dims * sizeof(uint16_t);
}

static size_t table_bytes(enum policy_codec codec, const struct key_head *head)
{
    if (policy_codec_needs_statistics(codec))
        return cuda_prepare_pair_table_bytes(head->table);
    return cuda_commands_aligned(centroids_bytes(head->table));
}

/* The host's table is read before it returns; the device has it when what follows in the stream runs. */
static cudaError_t upload(struct backend *backend, enum policy_codec codec, const struct key_head *head, void *to)
{
    const struct pq_table *table = head->table;
    if (policy_codec_needs_statistics(codec))
        return cuda_prepare_pair_table(&backend->queue, head->table, to);
    return cudaMemcpyAsync(to, table->centroids, centroids_bytes(table), cudaMemcpyHostToDevice, backend->stream);
}

static void drop(struct backend *backend, struct cuda_key_tables *tables)
{
    if (tables == NULL)
        return;
    backend_cuda_free(backend, tables->memory);
    free(tables->tables);
    free(tables);
}

static struct cuda_key_tables *make(struct backend *backend, enum policy_codec codec,
                                    const struct key_quantizer *quantizer)
{
    struct cuda_key_tables *tables = calloc(1, sizeof *tables);
    if (tables == NULL)
        return NULL;
    const size_t n = n_heads(quantizer);
    size_t n_bytes = 0;
    for (size_t i = 0; i < n; i++)
        n_bytes += table_bytes(codec, &quantizer->heads[i]);
    tables->id = quantizer->id;
    tables->tables = calloc(n, sizeof *tables->tables);
    tables->memory = tables->tables == NULL ? NULL : backend_cuda_alloc(backend, n_bytes);
    if (tables->memory == NULL) {
        drop(backend, tables);
        return NULL;
    }
    uint8_t *at = tables->memory;
    for (size_t i = 0; i < n && backend->error == 0; i++) {
        tables->tables[i] = at;
        cuda_commands_failed(backend, "tables of keys", upload(backend, codec, &quantizer->heads[i], at));
        at += table_bytes(codec, &quantizer->heads[i]);
    }
    return tables;
}

/* Frees those that `all` or their age lets go. Returns whether there were any. */
static bool let_go(struct backend *backend, bool all)
{
    const uint64_t now = clock_now_us();
    bool any = false;
    for (struct cuda_key_tables **at = &backend->key_tables; *at != NULL;) {
        struct cuda_key_tables *tables = *at;
        if (tables->operation == backend->key_operation || (!all && now - tables->used_us < UNUSED_US)) {
            at = &tables->next;
            continue;
        }
        if (!any)
            cuda_commands_play(backend); /* what was asked for may name them; freeing waits for it */
        any = true;
        *at = tables->next;
        drop(backend, tables);
    }
    return any;
}

static struct cuda_key_tables *find(struct backend *backend, enum policy_codec codec,
                                    const struct key_quantizer *quantizer)
{
    for (struct cuda_key_tables *tables = backend->key_tables; tables != NULL; tables = tables->next)
        if (tables->id == quantizer->id)
            return tables;
    (void)let_go(backend, false);
    struct cuda_key_tables *made = make(backend, codec, quantizer);
    if (made == NULL && backend->error == 0 && let_go(backend, true))
        made = make(backend, codec, quantizer);
    if (made == NULL) {
        cuda_commands_failed(backend, "tables of keys", cudaErrorMemoryAllocation);
        return NULL;
    }
    made->next = backend->key_tables;
    backend->key_tables = made;
    return made;
}

void cuda_key_tables_begin(struct backend *backend)
{
    backend->key_operation++;
}

bool cuda_key_tables_find(struct backend *backend, const struct key_quantizer *quantizer,
                          struct cuda_key_codec *ret_codec)
{
    struct cuda_key_codec codec = {.codec = codec_of(quantizer)};
    assert(codec.codec != POLICY_CODEC_NONE);
    if (backend->error != 0)
        return false;
    if (codec.codec == POLICY_CODEC_PQ) {
        const struct pq_table *table = quantizer->heads[0].table;
        codec.n_dims = table->n_dims;
        codec.n_centroids = table->n_centroids;
    }
    for (size_t i = 0; policy_codec_needs_statistics(codec.codec) && i < n_heads(quantizer); i++) {
        const struct pair_table *table = quantizer->heads[i].table;
        codec.most_groups = table->layout.n_groups > codec.most_groups ? table->layout.n_groups : codec.most_groups;
    }
    if (quantizer->heads[0].table != NULL) {
        assert(quantizer->id != 0);
        struct cuda_key_tables *tables = find(backend, codec.codec, quantizer);
        if (tables == NULL)
            return false;
        tables->used_us = clock_now_us();
        tables->operation = backend->key_operation;
        codec.tables = tables->tables;
    }
    *ret_codec = codec;
    return backend->error == 0;
}

void cuda_key_tables_free(struct backend *backend)
{
    for (struct cuda_key_tables *tables = backend->key_tables, *next; tables != NULL; tables = next) {
        next = tables->next;
        drop(backend, tables);
    }
    backend->key_tables = NULL;
}
