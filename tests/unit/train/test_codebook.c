/*
 * test_codebook.c - the job that trains codebooks: what it makes fits a naive forward pass's keys as well as it says, and neither
 * threads nor interruptions nor damaged checkpoints change a byte of it.
 */
#include "tests/unit/eval/naive.h"

#include <errno.h>

#include "gpu-worker/keys/codec_pq.h"
#include "gpu-worker/keys/quantizers.h"
#include "gpu-worker/train/kmeans.h"
#include "gpu-worker/train/train.h"
#include "gpu-worker/train/train_codebook_checkpoint.h"
#include "gpu-worker/train/train_rotate.h"
#include "gpu-worker/train/train_texts.h"

#define TINY "--layers 2 --heads 6 --kv-heads 2 --embd 120 --context 256"

enum { N_HEADS = 4, HEAD_DIM = 20, N_CENTROIDS = 256, MAX_BYTES = 1 << 20 };

static const uint8_t hash[16] = "a tiny model ...";
static const struct row_shape shape = {2, 2, HEAD_DIM, ROW_CODEC_F16};
static char directory[] = "/tmp/hcattn-codebook-XXXXXX", sentence[JOB_SENTENCE_SIZE];
static char codebook_path[128], checkpoint_path[128], large_codebook_path[128], large_checkpoint_path[128];

static struct worker_fixture *open_worker(const char *keep_in)
{
    struct worker_fixture *fixture = worker_fixture_new(TINY, "cpu", ROW_CODEC_F16);
    assert_int_equal(quantizers_new(&shape, hash, keep_in, &fixture->tools.quantizers), 0);
    return fixture;
}

static void close_worker(struct worker_fixture *fixture)
{
    quantizers_free(fixture->tools.quantizers);
    worker_fixture_free(fixture);
}

static struct train_codebook_request request_of(size_t n_letters, uint32_t n_dims, uint64_t seed)
{
    struct train_codebook_request request = {.n_texts = 1,
                                             .texts = calloc(1, sizeof(struct job_text)),
                                             .n_dims = n_dims,
                                             .n_centroids = N_CENTROIDS,
                                             .seed = seed,
                                             .max_iterations = 3};
    char *text = malloc(n_letters + 1);
    uint32_t state = 7;
    assert_non_null(text);
    for (size_t i = 0; i < n_letters; i++) {
        state = state * 1664525 + 1013904223;
        text[i] = (char)('A' + (state >> 16) % 26);
    }
    text[n_letters] = 0;
    request.texts[0] = (struct job_text){strdup("letters.txt"), text};
    return request;
}

/* To its end, or only until the first sub-spaces are finished. */
static int run(const struct job_tools *tools, struct train_codebook_request *request, bool interrupted)
{
    struct job job;
    struct job_report report = {0};
    double done = 0;
    int r = train_codebook_job_new(request, &job, sentence);
    if (r < 0)
        return r;
    do {
        r = job.ops->advance(job.state, tools, &report, sentence);
        assert_true(report.done >= done && report.done <= 1);
        assert_true(r != 1 || report.phase != NULL);
        done = report.done;
        if (interrupted && r == 1 && strstr(report.phase, "codebooks") && !strstr(report.phase, "codebooks, 0 "))
            break;
    } while (r == 1);
    job.ops->free(job.state);
    return r;
}

static uint8_t *bytes_of(const char *path, size_t *ret_n)
{
    static uint8_t buffers[2][MAX_BYTES];
    static int which;
    uint8_t *bytes = buffers[which = !which];
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    *ret_n = fread(bytes, 1, sizeof buffers[0], file);
    assert_true(*ret_n > 0 && *ret_n < sizeof buffers[0]);
    fclose(file);
    return bytes;
}

static void put_bytes(const char *path, const uint8_t *bytes, size_t n)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n, file), n);
    fclose(file);
}

enum { N_CONTEXTS = 2, N_TOKENS = N_CONTEXTS * 256, MAX_SAMPLES = 40000 };

/* The i-th sample of four dimensions: a key of the text's, had it begun offset tokens later. */
static void sample_of(const struct naive *naive, const struct backend_rope *rope, uint32_t layer, uint32_t head,
                      uint32_t space, uint32_t i, uint32_t offset, float *ret_x)
{
    const uint32_t t = i % N_TOKENS;
    const double *k = naive[t / 256].k + ((layer * 256 + t % 256) * 2 + head) * HEAD_DIM + space * 4;
    for (uint32_t pair = 0; pair < 2; pair++) {
        const double angle = offset * (double)rope->frequencies[space * 2 + pair];
        ret_x[2 * pair] = (float)(k[2 * pair] * cos(angle) - k[2 * pair + 1] * sin(angle));
        ret_x[2 * pair + 1] = (float)(k[2 * pair] * sin(angle) + k[2 * pair + 1] * cos(angle));
    }
}

/* Square distance of a head's keys from their centroids in sub-spaces of 4, and from their mean. */
static void add_errors(const struct naive *naive, const struct backend_rope *rope, const struct key_codebook *codebook,
                       uint32_t n_samples, uint32_t n_offsets, uint32_t layer, uint32_t head, double *error,
                       double *variance)
{
    static float x[MAX_SAMPLES * 4], distances[MAX_SAMPLES];
    static uint16_t numbers[MAX_SAMPLES];
    struct pq_table *table = NULL;
    assert_int_equal(codec_pq_table_new(codebook, layer, head, &table), 0);
    for (uint32_t s = 0; s < HEAD_DIM / 4; s++) {
        const struct pq_space space = pq_table_space(table, s);
        double mean[4] = {0};
        for (uint32_t t = 0; t < n_samples; t++) {
            sample_of(naive, rope, layer, head, s, t, train_rotate_offset(t, n_offsets), x + t * 4);
            for (uint32_t i = 0; i < 4; i++)
                mean[i] += (double)x[t * 4 + i] / n_samples;
        }
        codec_pq_plain.nearest(&space, x, n_samples, numbers, distances);
        for (uint32_t t = 0; t < n_samples; t++) {
            *error += (double)distances[t];
            for (uint32_t i = 0; i < 4; i++)
                *variance += ((double)x[t * 4 + i] - mean[i]) * ((double)x[t * 4 + i] - mean[i]);
        }
    }
    codec_pq_table_free(table);
}

/* n_offsets: places in the context at which the text could begin; each key counts at n_samples / N_TOKENS of them. */
static void expect_fit(uint32_t n_offsets, uint32_t n_samples)
{
    struct worker_fixture *fixture = open_worker(directory);
    const struct backend_rope *rope = &fixture->tools.network->rope;
    struct train_codebook_request request = request_of(N_TOKENS, 4, 1);
    struct train_texts *texts = NULL;
    struct key_codebook *codebook = NULL;
    struct naive naive[N_CONTEXTS];
    const struct policy_terms terms = {
        .codec = POLICY_CODEC_PQ, .n_dims = 4, .n_centroids = N_CENTROIDS, .selector = POLICY_SELECTOR_MASS};
    fixture->tools.n_ctx = 256 + n_offsets - 1;
    assert_int_equal(train_texts_new(&fixture->tools, request.texts, 1, TRAIN_CONTEXT, 8192, &texts, sentence), 0);
    assert_int_equal(train_texts_n_offsets(texts, &fixture->tools), n_offsets);
    assert_int_equal(texts->n_contexts, N_CONTEXTS);
    for (uint32_t i = 0; i < N_CONTEXTS; i++) {
        naive[i] = naive_new(fixture, texts->contexts[i].ids, texts->contexts[i].n);
        assert_int_equal(naive[i].n, 256);
    }
    assert_int_equal(run(&fixture->tools, &request, false), 0);
    assert_non_null(strstr(sentence, "pq4/256 of 512 tokens"));
    assert_non_null(strstr(sentence, "kept beside the model"));
    assert_true(quantizers_has(fixture->tools.quantizers, &terms));
    assert_int_equal(access(checkpoint_path, F_OK), -1);
    assert_int_equal(key_codebook_load(codebook_path, &shape, hash, &codebook, sentence, sizeof sentence), 0);
    assert_int_equal(codebook->n_samples, n_samples);
    assert_int_equal(codebook->seed, 1);
    assert_int_equal(codebook->text_hash, texts->hash);
    assert_int_equal(codebook->n_iterations, 3);
    double error = 0, variance = 0, elsewhere = 0, variance_elsewhere = 0;
    for (uint32_t i = 0; i < N_HEADS; i++) {
        add_errors(naive, rope, codebook, n_samples, n_offsets, i / 2, i % 2, &error, &variance);
        add_errors(naive, rope, codebook, 10 * N_TOKENS, 5000, i / 2, i % 2, &elsewhere, &variance_elsewhere);
    }
    elsewhere /= variance_elsewhere;
    print_message("error %.5g of the variance, said to be %.5g, %.5g elsewhere\n", error / variance, codebook->error,
                  elsewhere);
    assert_true(codebook->error > 1e-5 && codebook->error < 0.1);
    assert_true(fabs(error / variance / codebook->error - 1) < 1e-3);
    assert_true(n_offsets == 5000 ? elsewhere < 1.5 * codebook->error : elsewhere > 2 * codebook->error);
    key_codebook_free(codebook);
    for (uint32_t i = 0; i < N_CONTEXTS; i++)
        naive_free(&naive[i]);
    train_texts_free(texts);
    unlink(codebook_path);
    close_worker(fixture);
}

static void test_it_fits_the_keys(void **unused)
{
    (void)unused;
    expect_fit(1, N_TOKENS);
}

static void test_it_fits_keys_at_other_places(void **unused)
{
    (void)unused;
    expect_fit(3, 3 * N_TOKENS);
    expect_fit(5000, MAX_SAMPLES / N_TOKENS * N_TOKENS);
}

static size_t trained(struct worker_fixture *fixture, uint64_t seed, bool interrupted, uint8_t **ret_bytes)
{
    size_t n = 0;
    struct train_codebook_request request = request_of(700, 2, seed);
    request.n_centroids = 2048;
    request.again = true;
    request.max_iterations = 20;
    fixture->tools.slice_us = interrupted ? 1 : JOB_SLICE_US;
    assert_int_equal(run(&fixture->tools, &request, interrupted), interrupted);
    if (!interrupted) {
        *ret_bytes = bytes_of(large_codebook_path, &n);
        unlink(large_codebook_path);
    }
    return n;
}

static void test_nothing_changes_it(void **unused)
{
    (void)unused;
    static uint8_t first[MAX_BYTES], checkpoint[MAX_BYTES];
    uint8_t *bytes;
    size_t n_checkpoint;
    struct worker_fixture *fixture = open_worker(directory);
    const size_t n = trained(fixture, 5, false, &bytes);
    memcpy(first, bytes, n);
    assert_int_equal(n, 80 + N_HEADS * HEAD_DIM * 2048 * 4 + 4);

    assert_int_equal(trained(fixture, 6, false, &bytes), n); /* another seed */
    assert_memory_not_equal(bytes, first, n);

    fixture->tools.pool = NULL; /* one thread */
    trained(fixture, 5, true, NULL);
    bytes = bytes_of(large_checkpoint_path, &n_checkpoint);
    memcpy(checkpoint, bytes, n_checkpoint);
    const size_t record = 24 + 2048 * 2 * 4 + 4, header = sizeof(struct train_codebook_identity) + 8;
    print_message("%zu of 40 sub-spaces in the checkpoint\n", (n_checkpoint - header) / record);
    assert_true(n_checkpoint >= header + record && (n_checkpoint - header) % record == 0);
    assert_int_equal(trained(fixture, 5, false, &bytes), n);
    assert_memory_equal(bytes, first, n);
    assert_int_equal(access(large_checkpoint_path, F_OK), -1);
    fixture->tools.pool = fixture->pool;

    put_bytes(large_checkpoint_path, checkpoint, n_checkpoint); /* of another training */
    trained(fixture, 6, false, &bytes);
    assert_memory_not_equal(bytes, first, n);
    /* damaged: at its head, in a record, cut off */
    const struct {
        size_t at, n_bytes;
    } damages[] = {{3, n_checkpoint},
                   {40, n_checkpoint},
                   {header + 1, n_checkpoint},
                   {header + record / 2, n_checkpoint},
                   {n_checkpoint - 1, n_checkpoint},
                   {0, header - 1},
                   {0, header + record - 1}};
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        const uint8_t flip = damages[i].at ? 1 : 0;
        checkpoint[damages[i].at] ^= flip;
        put_bytes(large_checkpoint_path, checkpoint, damages[i].n_bytes);
        checkpoint[damages[i].at] ^= flip;
        assert_int_equal(trained(fixture, 5, false, &bytes), n);
        assert_memory_equal(bytes, first, n);
    }
    close_worker(fixture);
}

/* What a checkpoint has is not trained again: a record that says something else, whole by its checksum, is believed. */
static void test_a_checkpoint_is_used(void **unused)
{
    (void)unused;
    const struct train_codebook_identity identity = {.n_layers = 2,
                                                     .n_kv_heads = 2,
                                                     .head_dim = HEAD_DIM,
                                                     .row_codec = ROW_CODEC_F16,
                                                     .n_dims = 4,
                                                     .n_centroids = N_CENTROIDS,
                                                     .max_iterations = 3,
                                                     .seed = 9};
    struct train_codebook_space spaces[20] = {0}, again[20] = {0};
    struct key_codebook *codebook = NULL, *other = NULL;
    assert_int_equal(key_codebook_new(&shape, hash, 4, N_CENTROIDS, &codebook), 0);
    assert_int_equal(key_codebook_new(&shape, hash, 4, N_CENTROIDS, &other), 0);
    struct train_codebook_checkpoint *checkpoint =
        train_codebook_checkpoint_open(checkpoint_path, &identity, spaces, codebook);
    assert_non_null(checkpoint);
    assert_null(train_codebook_checkpoint_open(checkpoint_path, &identity, again, other)); /* somebody has it */
    for (uint32_t i = 0; i < 20; i += 7) {
        spaces[i] = (struct train_codebook_space){.done = true, .n_iterations = i, .error = i, .variance = i + 1};
        for (uint32_t j = 0; j < 1024; j++)
            codebook->centroids[i * 1024 + j] = (float)(i * j);
        train_codebook_checkpoint_save(checkpoint, spaces, codebook);
    }
    train_codebook_checkpoint_close(checkpoint, false);
    checkpoint = train_codebook_checkpoint_open(checkpoint_path, &identity, again, other);
    assert_non_null(checkpoint);
    for (uint32_t i = 0; i < 20; i++) {
        assert_int_equal(again[i].done, i % 7 == 0);
        assert_true(i % 7 != 0 || (again[i].n_iterations == i && again[i].error == i && again[i].variance == i + 1));
    }
    assert_memory_equal(codebook->centroids, other->centroids, 20 * 1024 * sizeof(float));
    train_codebook_checkpoint_close(checkpoint, true);
    assert_int_equal(access(checkpoint_path, F_OK), -1);
    assert_null(train_codebook_checkpoint_open("", &identity, again, other));
    assert_null(train_codebook_checkpoint_open("/no-such-folder-of-hcattn/x", &identity, again, other));
    train_codebook_checkpoint_save(NULL, spaces, codebook);
    assert_null(train_codebook_checkpoint_close(NULL, true));
    key_codebook_free(codebook);
    key_codebook_free(other);
}

static void test_what_is_asked_for(void **unused)
{
    (void)unused;
    struct worker_fixture *fixture = open_worker(NULL);
    struct train_codebook_request request = request_of(100, 3, 1);
    assert_int_equal(run(&fixture->tools, &request, false), -EINVAL);
    assert_non_null(strstr(sentence, "2, 4 and 8"));
    request = request_of(100, 2, 1);
    request.n_centroids = 1000;
    assert_int_equal(run(&fixture->tools, &request, false), -EINVAL);
    assert_non_null(strstr(sentence, "1000 centroids"));
    request = request_of(100, 8, 1);
    assert_int_equal(run(&fixture->tools, &request, false), -EINVAL);
    assert_non_null(strstr(sentence, "20 dimensions"));
    request = request_of(63, 2, 1);
    assert_int_equal(run(&fixture->tools, &request, false), -E2BIG);

    request = request_of(100, 2, 1);
    assert_int_equal(run(&fixture->tools, &request, false), 0);
    assert_non_null(strstr(sentence, "not kept"));
    request = request_of(100, 2, 1);
    assert_int_equal(run(&fixture->tools, &request, false), 0);
    assert_non_null(strstr(sentence, "already"));
    request = request_of(101, 2, 1);
    request.again = true;
    assert_int_equal(run(&fixture->tools, &request, false), 0);
    assert_non_null(strstr(sentence, "101 tokens"));
    close_worker(fixture);
}

static int make_directory(void **unused)
{
    (void)unused;
    if (mkdtemp(directory) == NULL)
        return -1;
    struct quantizers *quantizers = NULL;
    if (quantizers_new(&shape, hash, directory, &quantizers) < 0)
        return -1;
    const struct {
        uint32_t n_dims, n_centroids;
        char *checkpoint, *codebook;
    } paths[] = {{4, N_CENTROIDS, checkpoint_path, codebook_path},
                 {2, 2048, large_checkpoint_path, large_codebook_path}};
    for (int i = 0; i < 2; i++) {
        quantizers_checkpoint_path(quantizers, paths[i].n_dims, paths[i].n_centroids, paths[i].checkpoint, 128);
        snprintf(paths[i].codebook, 128, "%.*scodebook", (int)(strlen(paths[i].checkpoint) - strlen("checkpoint")),
                 paths[i].checkpoint);
    }
    quantizers_free(quantizers);
    return 0;
}

static int remove_directory(void **unused)
{
    (void)unused;
    return rmdir(directory); /* nothing is left behind */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_it_fits_the_keys),   cmocka_unit_test(test_it_fits_keys_at_other_places),
        cmocka_unit_test(test_nothing_changes_it), cmocka_unit_test(test_a_checkpoint_is_used),
        cmocka_unit_test(test_what_is_asked_for),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
