/*
 * cuda_key_quantize.c - `quantize` of the table: K of sealed blocks is staged in pieces, decoded, and quantized there.
 *
 * A piece is played before the next one is staged, and what small calls have staged is played once it is MOST_STAGED: staging
 * memory is that of two pieces, whatever a rebuild of a long session asks for. Of rows only K travels.
 */
#include <assert.h>
#include <string.h>

#include "gpu-worker/backend/cuda/cuda_internal.h"
#include "gpu-worker/backend/cuda/cuda_key_ops.h"
#include "gpu-worker/backend/cuda/cuda_key_tables.h"
#include "gpu-worker/backend/cuda/cuda_keys.h"
#include "gpu-worker/keys/key_cache.h"

enum {
    TILE = KERNELS_BLOCK_TOKENS,
    GROUP = 32,             /* numbers of a scale of q8_0 */
    MOST_TILES = 256,       /* of a piece: 4 MiB of K in f16 at 128 dimensions */
    MOST_STAGED = 1u << 20, /* bytes */
};

struct quantize_arguments {
    const struct cuda_key_block *blocks;
    struct cuda_key_rows rows;
    float *keys;
    struct cuda_key_codec codec;
    uint32_t n_tiles, head_dim;
};

static cudaError_t launch(struct backend *backend, const void *arguments)
{
    const struct quantize_arguments *a = arguments;
    const struct cuda_queue *queue = &backend->queue;
    const cudaError_t error = cuda_decode_keys(queue, &a->rows, (size_t)a->n_tiles * TILE, a->head_dim, a->keys);
    if (error != cudaSuccess)
        return error;
    switch (a->codec.codec) {
    case POLICY_CODEC_F16:
        return cuda_quantize_f16(queue, a->head_dim, a->blocks, a->n_tiles);
    case POLICY_CODEC_ROT4:
    case POLICY_CODEC_ROT3:
    case POLICY_CODEC_ROT2:
        return cuda_quantize_rot(queue, cuda_key_tables_rot_bits(a->codec.codec), a->head_dim, a->blocks, a->n_tiles);
    case POLICY_CODEC_PQ:
        return cuda_quantize_pq(queue, a->codec.n_dims, a->codec.n_centroids, a->head_dim, a->blocks, a->n_tiles);
    default:
        return cuda_quantize_pair(queue, a->head_dim, a->blocks, a->n_tiles);
    }
}

/* K of 64 rows, as `staged` says. */
static void put_keys(const void *rows, uint32_t head_dim, const struct cuda_key_rows *staged, uint8_t *to)
{
    const size_t row_bytes = kernels_row_bytes(head_dim, staged->codec);
    const size_t k_bytes = staged->codec == KERNELS_ROWS_F16 ? 2 * (size_t)head_dim : head_dim;
    for (uint32_t t = 0; t < TILE; t++, to += staged->row_bytes) {
        const uint8_t *row = (const uint8_t *)rows + t * row_bytes;
        memcpy(to, row, k_bytes);
        if (staged->codec == KERNELS_ROWS_Q8_0)
            memcpy(to + staged->scales_at, row + 2 * (size_t)head_dim, staged->row_bytes - staged->scales_at);
    }
}

static void ask(struct backend *backend, const struct key_quantizer *quantizer, const struct cuda_key_codec *codec,
                enum kernels_rows row_codec, const struct key_cache_tile *tiles, uint32_t n_tiles)
{
    const uint32_t d = quantizer->heads[0].head_dim;
    struct quantize_arguments a = {.codec = *codec, .n_tiles = n_tiles, .head_dim = d};
    a.rows.codec = row_codec;
    a.rows.scales_at = (d + 1) / 2 * 2;
    a.rows.row_bytes =
        row_codec == KERNELS_ROWS_F16 ? 2 * (size_t)d : a.rows.scales_at + (d + GROUP - 1) / GROUP * sizeof(uint16_t);
    void *host_rows, *host_blocks;
    const size_t rows_bytes = TILE * a.rows.row_bytes, keys_floats = (size_t)TILE * d;
    a.rows.rows = cuda_commands_stage(backend, n_tiles * rows_bytes, &host_rows);
    a.blocks = cuda_commands_stage(backend, n_tiles * sizeof *a.blocks, &host_blocks);
    /* keys, and coordinates of pair codecs, of which there are no more than dimensions */
    a.keys = cuda_commands_work(backend, CUDA_WORK_QUANTIZE, 2 * n_tiles * keys_floats * sizeof(float));
    if (a.rows.rows == NULL || a.blocks == NULL || a.keys == NULL)
        return;
    struct cuda_key_block *blocks = host_blocks;
    for (uint32_t i = 0; i < n_tiles; i++) {
        const void *table = codec->tables == NULL ? NULL : codec->tables[tiles[i].head - quantizer->heads];
        assert(tiles[i].head->head_dim == d);
        put_keys(tiles[i].rows, d, &a.rows, (uint8_t *)host_rows + i * rows_bytes);
        blocks[i] = (struct cuda_key_block){
            .keys = a.keys + i * keys_floats,
            .tile = tiles[i].tile,
            .side = tiles[i].side,
            .table = codec->codec == POLICY_CODEC_PQ ? NULL : table,
            .work = a.keys + (n_tiles + i) * keys_floats,
            .centroids = codec->codec == POLICY_CODEC_PQ ? table : NULL,
        };
    }
    CUDA_COMMAND(backend, "quantize", launch, a);
    backend->keys_staged += n_tiles * rows_bytes;
    if (backend->keys_staged >= MOST_STAGED) {
        cuda_commands_play(backend);
        backend->keys_staged = 0;
    }
}

void cuda_key_quantize(struct backend *backend, const struct key_quantizer *quantizer, enum kernels_rows codec,
                       const struct key_cache_tile *tiles, uint32_t n_tiles)
{
    struct cuda_key_codec on_device;
    cuda_key_tables_begin(backend);
    if (!cuda_key_tables_find(backend, quantizer, &on_device))
        return;
    for (uint32_t first = 0, n; first < n_tiles; first += n) {
        n = n_tiles - first < MOST_TILES ? n_tiles - first : MOST_TILES;
        ask(backend, quantizer, &on_device, codec, tiles + first, n);
    }
}
