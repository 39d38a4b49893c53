/* cuda_product.c - see cuda_product.h. */
#include "gpu-worker/backend/cuda/cuda_product.h"

#include <errno.h>

#include "gpu-worker/backend/cuda/cuda_blas.h"
#include "gpu-worker/backend/cuda/cuda_halves.h"

enum {
    TILE = 128,         /* tokens of one call of cuBLAS: as many as a matrix of halves takes anyway to be read */
    PIECE_ROWS = 16384, /* of a matrix at a time, at most: their products with a tile are 8 MiB */
};
/* Of a matrix as halves at a time: the caches of A100 and later hold it from its copy to the last tile that is multiplied with it. */
#define PIECE_BYTES ((size_t)32 << 20)

/* ---- at load ---- */

int cuda_product_prepare(struct backend *backend, struct weight *weight)
{
    const struct cuda_queue queue = {.stream = NULL}; /* behind the copy of the matrix */
    weight->to_halves = weight->from_halves = 1;
    if (weight->type == TENSOR_F16 || backend->blas == NULL)
        return 0;
    uint32_t *largest = backend_cuda_alloc(backend, sizeof *largest), bits = 0;
    if (largest == NULL)
        return -ENOMEM;
    bool failed =
        cuda_commands_failed(backend, "cudaMemset", cudaMemset(largest, 0, sizeof *largest)) ||
        cuda_commands_failed(
            backend, "largest weight",
            cuda_halves_largest(&queue, weight->type, weight->data, weight->n_rows, weight->n_columns, largest)) ||
        cuda_commands_failed(backend, "cudaMemcpy", cudaMemcpy(&bits, largest, sizeof bits, cudaMemcpyDeviceToHost));
    backend_cuda_free(backend, largest);
    if (failed)
        return backend->error;
    weight->to_halves = cuda_halves_factor(bits, &weight->from_halves);
    return 0;
}

/* ---- few tokens ---- */

struct few {
    const struct weight *weight;
    const float *x;
    float *y;
    size_t n_tokens;
};

static cudaError_t launch_few(struct backend *backend, const void *arguments)
{
    const struct few *a = arguments;
    return cuda_matvec(&backend->queue, a->weight->type, a->weight->data, a->weight->n_rows, a->weight->n_columns, a->x,
                       (uint32_t)a->n_tokens, a->y);
}

/* ---- many ---- */

struct inputs {
    const float *x;
    uint16_t *halves; /* [whole tiles][n_columns] */
    float *factors;   /* [whole tiles] */
    uint32_t n_tokens, n_columns;
};

static uint32_t whole_tiles(uint32_t n_tokens)
{
    return (n_tokens + TILE - 1) / TILE * TILE;
}

static cudaError_t launch_inputs(struct backend *backend, const void *arguments)
{
    const struct inputs *a = arguments;
    return cuda_halves_rows(&backend->queue, a->x, a->n_tokens, 1, 1, a->n_columns, whole_tiles(a->n_tokens), a->halves,
                            a->factors);
}

/* False: no memory, the back end has failed. */
static bool make_inputs(struct backend *backend, const float *x, uint32_t n_tokens, uint32_t n_columns,
                        struct inputs *ret_inputs)
{
    struct inputs inputs = {.x = x, .n_tokens = n_tokens, .n_columns = n_columns};
    const size_t n = (size_t)whole_tiles(n_tokens) * n_columns;
    inputs.halves = cuda_commands_work(backend, CUDA_WORK_PRODUCT_X,
                                       n * sizeof *inputs.halves + whole_tiles(n_tokens) * sizeof *inputs.factors);
    if (inputs.halves == NULL)
        return false;
    inputs.factors = (float *)(void *)(inputs.halves + n); /* n is a multiple of TILE */
    CUDA_COMMAND(backend, "matmul's inputs", launch_inputs, inputs);
    *ret_inputs = inputs;
    return true;
}

struct many {
    const struct weight *weight;
    uint16_t *piece;      /* rows of the matrix as halves; NULL: it has halves */
    const uint16_t *x;    /* of inputs */
    const float *factors; /* of inputs */
    float *products, *y;  /* products: [TILE][rows of a piece] */
    uint32_t n_tokens, piece_rows;
};

static uint32_t rows_of_a_piece(const struct weight *weight)
{
    size_t rows = PIECE_BYTES / (weight->n_columns * sizeof(uint16_t)) / 8 * 8; /* pieces begin aligned */
    rows = rows < 8 ? 8 : rows > PIECE_ROWS ? PIECE_ROWS : rows;
    return rows < weight->n_rows ? (uint32_t)rows : weight->n_rows;
}

/* The products of rows `first` .. first + n_rows - 1 of the matrix, which lie at `rows` as halves, with all tokens. */
static cudaError_t multiply_piece(struct backend *backend, const struct many *a, const uint16_t *rows, uint32_t first,
                                  uint32_t n_rows)
{
    const struct weight *weight = a->weight;
    cudaError_t error = cudaSuccess;
    for (uint32_t token = 0; token < a->n_tokens && error == cudaSuccess; token += TILE) {
        const struct cuda_blas_product product = {
            .left = rows,
            .right = a->x + (size_t)token * weight->n_columns,
            .c = a->products,
            .m = (int)n_rows,
            .n = TILE,
            .k = (int)weight->n_columns,
            .left_stride = (int)weight->n_columns,
            .right_stride = (int)weight->n_columns,
            .c_stride = (int)n_rows,
            .left_by_rows = true,
            .alpha = weight->from_halves,
            .n_batch = 1,
        };
        uint32_t left = a->n_tokens - token;
        error = cuda_blas_multiply(backend, &product);
        if (error == cudaSuccess)
            error = cuda_halves_scale(&backend->queue, a->products, a->factors + token, left < TILE ? left : TILE,
                                      n_rows, a->y + (size_t)token * weight->n_rows + first, weight->n_rows);
    }
    return error;
}

static cudaError_t launch_many(struct backend *backend, const void *arguments)
{
    const struct many *a = arguments;
    const struct weight *weight = a->weight;
    const size_t row_bytes = tensor_row_bytes(weight->type, weight->n_columns);
    cudaError_t error = cudaSuccess;
    for (uint32_t first = 0; first < weight->n_rows && error == cudaSuccess; first += a->piece_rows) {
        uint32_t left = weight->n_rows - first, n_rows = left < a->piece_rows ? left : a->piece_rows;
        const void *rows = (const uint8_t *)weight->data + first * row_bytes;
        if (a->piece != NULL) {
            error = cuda_dequantize_f16(&backend->queue, weight->type, rows, n_rows, weight->n_columns,
                                        weight->to_halves, a->piece);
            rows = a->piece;
        }
        if (error == cudaSuccess)
            error = multiply_piece(backend, a, rows, first, n_rows);
    }
    return error;
}

static void multiply_many(struct backend *backend, const struct weight *weight, const struct inputs *inputs, float *y)
{
    struct many a = {.weight = weight,
                     .x = inputs->halves,
                     .factors = inputs->factors,
                     .y = y,
                     .n_tokens = inputs->n_tokens,
                     .piece_rows = rows_of_a_piece(weight)};
    /* one work: halves of the piece, then what they are multiplied to */
    size_t piece_bytes = weight->type == TENSOR_F16 ? 0 : (size_t)a.piece_rows * weight->n_columns * sizeof(uint16_t);
    piece_bytes = cuda_commands_aligned(piece_bytes);
    uint8_t *work = cuda_commands_work(backend, CUDA_WORK_PRODUCT_WEIGHT,
                                       piece_bytes + (size_t)TILE * a.piece_rows * sizeof(float));
    if (work == NULL)
        return;
    a.piece = piece_bytes == 0 ? NULL : (uint16_t *)(void *)work;
    a.products = (float *)(void *)(work + piece_bytes);
    CUDA_COMMAND(backend, "matmul", launch_many, a);
}

static bool is_few(const struct backend *backend, const struct weight *weight, uint32_t n_tokens)
{
    return backend->blas == NULL ||
           n_tokens <= (uint32_t)(weight->type == TENSOR_F16 ? CUDA_PRODUCT_FEW_F16 : CUDA_PRODUCT_FEW);
}

void cuda_product_matmul(struct backend *backend, const struct weight *const *weights, uint32_t n_weights,
                         const float *x, uint32_t n_tokens, float *const *y)
{
    struct inputs inputs = {.x = NULL}; /* not made yet */
    for (uint32_t i = 0; i < n_weights && n_tokens > 0; i++) {
        if (is_few(backend, weights[i], n_tokens)) {
            const struct few a = {weights[i], x, y[i], n_tokens};
            CUDA_COMMAND(backend, "matmul", launch_few, a);
            continue;
        }
        if (inputs.x == NULL && !make_inputs(backend, x, n_tokens, weights[i]->n_columns, &inputs))
            return;
        multiply_many(backend, weights[i], &inputs, y[i]);
    }
}
