/*
 * quantizers.c - see quantizers.h: a list of what was made, the newest of its kind first; statistics stay loaded for the codecs
 * that no policy has asked for yet, codebooks only until their tables are made.
 */
#include "gpu-worker/keys/quantizers.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "gpu-worker/keys/codec_pair.h"
#include "gpu-worker/keys/codec_pq.h"

#define MAX_PATH_BYTES 4096u

/* A quantizer and what it lives from. */
struct made {
    struct made *next;
    struct key_quantizer quantizer;
    enum policy_codec codec;
    uint32_t n_dims, n_centroids; /* pq */
    bool stale;                   /* newer statistics or a newer codebook have come */
    struct key_head *heads;
};

static _Atomic uint64_t n_made; /* of all objects */

struct quantizers {
    struct row_shape shape;
    uint8_t model_hash[16];
    char *directory; /* NULL: none */
    struct key_statistics *statistics;
    struct made *made;
};

__attribute__((format(printf, 4, 5))) static int fail(int error, char *sentence, size_t sentence_size,
                                                      const char *format, ...)
{
    if (sentence_size) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(sentence, sentence_size, format, arguments);
        va_end(arguments);
    }
    return error;
}

static void table_free(enum policy_codec codec, const void *table)
{
    void *owned = (void *)(uintptr_t)table; /* constant for all but its owner */
    if (codec == POLICY_CODEC_PQ)
        codec_pq_table_free(owned);
    else
        free(owned);
}

static struct made *made_free(struct made *made)
{
    if (!made)
        return NULL;
    for (size_t i = 0; made->heads && i < (size_t)made->quantizer.n_layers * made->quantizer.n_kv_heads; i++)
        table_free(made->codec, made->heads[i].table);
    free(made->heads);
    free(made);
    return NULL;
}

int quantizers_new(const struct row_shape *shape, const uint8_t model_hash[16], const char *directory,
                   struct quantizers **ret_quantizers)
{
    struct quantizers *quantizers = calloc(1, sizeof *quantizers);
    if (!quantizers)
        return -ENOMEM;
    quantizers->shape = *shape;
    memcpy(quantizers->model_hash, model_hash, sizeof quantizers->model_hash);
    if (directory && *directory && !(quantizers->directory = strdup(directory))) {
        free(quantizers);
        return -ENOMEM;
    }
    *ret_quantizers = quantizers;
    return 0;
}

struct quantizers *quantizers_free(struct quantizers *quantizers)
{
    if (!quantizers)
        return NULL;
    for (struct made *next; quantizers->made; quantizers->made = next) {
        next = quantizers->made->next;
        made_free(quantizers->made);
    }
    key_statistics_free(quantizers->statistics);
    free(quantizers->directory);
    free(quantizers);
    return NULL;
}

const uint8_t *quantizers_model_hash(const struct quantizers *quantizers)
{
    return quantizers->model_hash;
}

/* DIRECTORY/HASH.NAME; "" without a directory or where that does not fit. */
static void path_of(const struct quantizers *quantizers, const char *name, char *path, size_t path_size)
{
    char hash[33];
    for (size_t i = 0; i < 16; i++)
        snprintf(hash + 2 * i, 3, "%02x", quantizers->model_hash[i]);
    const int n = quantizers->directory ? snprintf(path, path_size, "%s/%s.%s", quantizers->directory, hash, name) : 0;
    if (path_size && (n <= 0 || (size_t)n >= path_size))
        path[0] = '\0';
}

static void path_of_pq(const struct quantizers *quantizers, uint32_t n_dims, uint32_t n_centroids, const char *ending,
                       char *path, size_t path_size)
{
    char name[64];
    snprintf(name, sizeof name, "pq%u-%u.%s", n_dims, n_centroids, ending);
    path_of(quantizers, name, path, path_size);
}

void quantizers_codebook_path(const struct quantizers *quantizers, uint32_t n_dims, uint32_t n_centroids, char *path,
                              size_t path_size)
{
    path_of_pq(quantizers, n_dims, n_centroids, "codebook", path, path_size);
}

void quantizers_checkpoint_path(const struct quantizers *quantizers, uint32_t n_dims, uint32_t n_centroids, char *path,
                                size_t path_size)
{
    path_of_pq(quantizers, n_dims, n_centroids, "checkpoint", path, path_size);
}

/* ---- making ---- */

static bool is_klt(enum policy_codec codec)
{
    return codec == POLICY_CODEC_KLT2 || codec == POLICY_CODEC_KLT1 || codec == POLICY_CODEC_KLT0;
}

/* Bytes of klt's tiles in the mean over the heads: as rot2's, as pair1's, and 2.5 % of f16 keys and values at head_dim 64. */
static double klt_bytes(enum policy_codec codec, uint32_t head_dim)
{
    return (codec == POLICY_CODEC_KLT2 ? 18.0 : codec == POLICY_CODEC_KLT1 ? 10.0 : 6.3) * head_dim;
}

/* The table of one head; bytes of it are added. */
static int make_table(const struct made *made, const struct key_statistics *statistics,
                      const struct key_codebook *codebook, uint32_t layer, uint32_t kv_head, const void **ret_table,
                      size_t *bytes)
{
    if (policy_codec_needs_statistics(made->codec)) {
        const uint32_t bits = made->codec == POLICY_CODEC_PAIR3 ? 3 : made->codec == POLICY_CODEC_PAIR2 ? 2 : 1;
        struct pair_table *table = NULL;
        const int r = codec_pair_table_new(statistics, layer, kv_head,
                                           codec_pair_table_groups(statistics->head_dim, bits), &table);
        if (r == 0)
            *bytes += table->n_bytes;
        *ret_table = table;
        return r;
    }
    if (made->codec == POLICY_CODEC_PQ) {
        struct pq_table *table = NULL;
        const int r = codec_pq_table_new(codebook, layer, kv_head, &table);
        if (r == 0)
            *bytes += table->n_bytes;
        *ret_table = table;
        return r;
    }
    *ret_table = NULL;
    return 0;
}

/* Makes the terms' quantizer and puts it in front; what came before it of this kind is stale. */
static int make(struct quantizers *quantizers, const struct policy_terms *terms, const struct key_codebook *codebook,
                struct made **ret_made)
{
    const size_t n_heads = (size_t)quantizers->shape.n_layers * quantizers->shape.n_kv_heads;
    struct made *made = calloc(1, sizeof *made);
    if (!made)
        return -ENOMEM;
    made->codec = terms->codec;
    made->n_dims = terms->codec == POLICY_CODEC_PQ ? terms->n_dims : 0;
    made->n_centroids = terms->codec == POLICY_CODEC_PQ ? terms->n_centroids : 0;
    made->heads = calloc(n_heads, sizeof *made->heads);
    made->quantizer = (struct key_quantizer){.codec = key_codec_find(terms->codec),
                                             .n_layers = quantizers->shape.n_layers,
                                             .n_kv_heads = quantizers->shape.n_kv_heads,
                                             .heads = made->heads,
                                             .id = atomic_fetch_add(&n_made, 1) + 1};
    struct pair_table **together = calloc(n_heads, sizeof *together);
    int r = made->heads && together ? 0 : -ENOMEM;
    if (r == 0 && is_klt(made->codec)) /* all heads at once, as they share the bytes */
        r = codec_pair_klt_tables(quantizers->statistics, klt_bytes(made->codec, quantizers->shape.head_dim), together);
    for (size_t i = 0; i < n_heads && made->heads && together; i++) {
        made->heads[i].head_dim = quantizers->shape.head_dim;
        made->heads[i].table = together[i];
        made->quantizer.table_bytes += together[i] ? together[i]->n_bytes : 0;
    }
    free(together);
    for (size_t i = 0; i < n_heads && r == 0 && !is_klt(made->codec); i++) {
        r = make_table(made, quantizers->statistics, codebook, (uint32_t)(i / quantizers->shape.n_kv_heads),
                       (uint32_t)(i % quantizers->shape.n_kv_heads), &made->heads[i].table,
                       &made->quantizer.table_bytes);
    }
    if (r) {
        made_free(made);
        return r;
    }
    for (struct made *old = quantizers->made; old; old = old->next)
        old->stale |= old->codec == made->codec && old->n_dims == made->n_dims && old->n_centroids == made->n_centroids;
    made->next = quantizers->made;
    quantizers->made = made;
    *ret_made = made;
    return 0;
}

static int load_statistics(struct quantizers *quantizers, const char *codec, char *sentence, size_t sentence_size)
{
    char path[MAX_PATH_BYTES];
    if (quantizers->statistics)
        return 0;
    path_of(quantizers, "statistics", path, sizeof path);
    const int r = *path ? key_statistics_load(path, &quantizers->shape, quantizers->model_hash, &quantizers->statistics,
                                              sentence, sentence_size)
                        : -ENOENT;
    if (r == -ENOENT)
        return fail(r, sentence, sentence_size,
                    "%s keys need statistics of the model, and there are none yet: hcattn statistics makes them",
                    codec);
    return r;
}

static int load_codebook(struct quantizers *quantizers, const struct policy_terms *terms,
                         struct key_codebook **ret_codebook, char *sentence, size_t sentence_size)
{
    char path[MAX_PATH_BYTES];
    struct key_codebook *codebook = NULL;
    quantizers_codebook_path(quantizers, terms->n_dims, terms->n_centroids, path, sizeof path);
    const int r =
        *path ? key_codebook_load(path, &quantizers->shape, quantizers->model_hash, &codebook, sentence, sentence_size)
              : -ENOENT;
    if (r == -ENOENT)
        return fail(r, sentence, sentence_size,
                    "pq%u/%u keys need a codebook of the model, and there is none yet: hcattn codebook train makes it",
                    terms->n_dims, terms->n_centroids);
    if (r == 0 && (codebook->n_dims != terms->n_dims || codebook->n_centroids != terms->n_centroids)) {
        fail(-EBADMSG, sentence, sentence_size, "%s is the codebook pq%u/%u", path, codebook->n_dims,
             codebook->n_centroids);
        key_codebook_free(codebook);
        return -EBADMSG;
    }
    if (r == 0)
        *ret_codebook = codebook;
    return r;
}

static struct made *find_made(const struct quantizers *quantizers, const struct policy_terms *terms)
{
    for (struct made *made = quantizers->made; made; made = made->next)
        if (!made->stale && made->codec == terms->codec &&
            (terms->codec != POLICY_CODEC_PQ ||
             (made->n_dims == terms->n_dims && made->n_centroids == terms->n_centroids)))
            return made;
    return NULL;
}

/* What the terms' tables are made from: statistics stay loaded, a codebook is the caller's; *ret_codebook NULL: none needed. */
static int load_source(struct quantizers *quantizers, const struct policy_terms *terms,
                       struct key_codebook **ret_codebook, char *sentence, size_t sentence_size)
{
    *ret_codebook = NULL;
    if (policy_codec_needs_statistics(terms->codec))
        return load_statistics(quantizers, key_codec_find(terms->codec)->name, sentence, sentence_size);
    if (terms->codec != POLICY_CODEC_PQ)
        return 0;
    if (terms->n_dims == 0 || quantizers->shape.head_dim % terms->n_dims != 0)
        return fail(-EINVAL, sentence, sentence_size, "head_dim %u does not divide into sub-spaces of %u dimensions",
                    quantizers->shape.head_dim, terms->n_dims);
    return load_codebook(quantizers, terms, ret_codebook, sentence, sentence_size);
}

int quantizers_find(struct quantizers *quantizers, const struct policy_terms *terms,
                    const struct key_quantizer **ret_quantizer, char *sentence, size_t sentence_size)
{
    const struct key_codec *codec = key_codec_find(terms->codec);
    struct key_codebook *codebook;
    if (!codec) {
        *ret_quantizer = NULL;
        return 0;
    }
    struct made *made = find_made(quantizers, terms);
    if (!made) {
        int r = load_source(quantizers, terms, &codebook, sentence, sentence_size);
        if (r)
            return r;
        r = make(quantizers, terms, codebook, &made);
        key_codebook_free(codebook);
        if (r)
            return fail(r, sentence, sentence_size, "no memory for the tables of %s keys", codec->name);
    }
    *ret_quantizer = &made->quantizer;
    return 0;
}

bool quantizers_has(struct quantizers *quantizers, const struct policy_terms *terms)
{
    struct key_codebook *codebook = NULL;
    if (!key_codec_find(terms->codec) || find_made(quantizers, terms))
        return true;
    const bool has = load_source(quantizers, terms, &codebook, NULL, 0) == 0;
    key_codebook_free(codebook);
    return has;
}

/* ---- taking ---- */

static bool same_model(const struct quantizers *quantizers, uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim,
                       const uint8_t *model_hash)
{
    return n_layers == quantizers->shape.n_layers && n_kv_heads == quantizers->shape.n_kv_heads &&
           head_dim == quantizers->shape.head_dim &&
           memcmp(model_hash, quantizers->model_hash, sizeof quantizers->model_hash) == 0;
}

/* What became of a file; an empty path: there is no directory. */
static void tell(int r, const char *path, bool *ret_kept, char *sentence, size_t sentence_size)
{
    *ret_kept = r == 0 && *path;
    if (r)
        fail(r, sentence, sentence_size, "%s could not be written: %s", path, strerror(-r));
}

static void make_directory(const struct quantizers *quantizers)
{
    if (quantizers->directory)
        (void)mkdir(quantizers->directory, 0755); /* there already, or what is written next says why not */
}

int quantizers_take_statistics(struct quantizers *quantizers, struct key_statistics *statistics, bool *ret_kept,
                               char *sentence, size_t sentence_size)
{
    char path[MAX_PATH_BYTES];
    if (!same_model(quantizers, statistics->n_layers, statistics->n_kv_heads, statistics->head_dim,
                    statistics->model_hash)) {
        key_statistics_free(statistics);
        return fail(-EINVAL, sentence, sentence_size, "these statistics are of another model");
    }
    key_statistics_free(quantizers->statistics);
    quantizers->statistics = statistics;
    for (struct made *made = quantizers->made; made; made = made->next)
        made->stale |= policy_codec_needs_statistics(made->codec);
    path_of(quantizers, "statistics", path, sizeof path);
    make_directory(quantizers);
    tell(*path ? key_statistics_save(statistics, path) : 0, path, ret_kept, sentence, sentence_size);
    return 0;
}

int quantizers_take_codebook(struct quantizers *quantizers, struct key_codebook *codebook, bool *ret_kept,
                             char *sentence, size_t sentence_size)
{
    char path[MAX_PATH_BYTES];
    const struct policy_terms terms = {
        .codec = POLICY_CODEC_PQ, .n_dims = codebook->n_dims, .n_centroids = codebook->n_centroids};
    struct made *made;
    if (!same_model(quantizers, codebook->n_layers, codebook->n_kv_heads, codebook->head_dim, codebook->model_hash)) {
        key_codebook_free(codebook);
        return fail(-EINVAL, sentence, sentence_size, "this codebook is of another model");
    }
    int r = make(quantizers, &terms, codebook, &made);
    if (r) {
        key_codebook_free(codebook);
        return fail(r, sentence, sentence_size, "no memory for the tables of pq%u/%u keys", terms.n_dims,
                    terms.n_centroids);
    }
    quantizers_codebook_path(quantizers, terms.n_dims, terms.n_centroids, path, sizeof path);
    make_directory(quantizers);
    tell(*path ? key_codebook_save(codebook, path) : 0, path, ret_kept, sentence, sentence_size);
    key_codebook_free(codebook);
    return 0;
}
