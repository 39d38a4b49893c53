/* test_statistics.c - the statistics job against a naive forward pass, and the texts that it reads. */
#include "tests/unit/eval/naive.h"

#include <dirent.h>
#include <errno.h>

#include "common/utf8.h"
#include "gpu-worker/keys/quantizers.h"
#include "gpu-worker/train/train.h"
#include "gpu-worker/train/train_texts.h"

#define TINY "--layers 2 --heads 6 --kv-heads 2 --embd 120 --context 256" /* head_dim 20: not whole ranges */

static const struct policy_terms pair2 = {.codec = POLICY_CODEC_PAIR2, .selector = POLICY_SELECTOR_DEVIATION};
static const uint8_t hash[16] = "a tiny model ...";

static struct worker_fixture *open_worker(const char *directory)
{
    struct worker_fixture *fixture = worker_fixture_new(TINY, "cpu", ROW_CODEC_F16);
    const struct row_shape shape = {2, 2, 20, ROW_CODEC_F16};
    assert_int_equal(quantizers_new(&shape, hash, directory, &fixture->tools.quantizers), 0);
    return fixture;
}

static void close_worker(struct worker_fixture *fixture)
{
    quantizers_free(fixture->tools.quantizers);
    worker_fixture_free(fixture);
}

/* Letters, one token each for the most part. */
static char *letters(size_t n, uint32_t seed)
{
    char *text = malloc(n + 1);
    assert_non_null(text);
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525 + 1013904223;
        text[i] = (char)('A' + (seed >> 16) % 26);
    }
    text[n] = 0;
    return text;
}

static struct train_statistics_request request_of(uint32_t n_texts, const size_t *n_letters)
{
    struct train_statistics_request request = {.n_texts = n_texts, .texts = calloc(n_texts, sizeof(struct job_text))};
    for (uint32_t i = 0; i < n_texts; i++)
        request.texts[i] = (struct job_text){strdup("letters.txt"), letters(n_letters[i], i)};
    return request;
}

static int run(const struct job_tools *tools, struct train_statistics_request *request, char *sentence)
{
    struct job job;
    struct job_report report = {0};
    int r = train_statistics_job_new(request, &job, sentence);
    assert_int_equal(r, 0);
    double done = 0;
    do {
        r = job.ops->advance(job.state, tools, &report, sentence);
        assert_true(report.done >= done && report.done <= 1);
        assert_true(r != 1 || report.phase != NULL);
        done = report.done;
    } while (r == 1);
    job.ops->free(job.state);
    return r;
}

/* What the quantizers have, through the file that they keep. */
static struct key_statistics *statistics_of(const char *directory)
{
    char path[512] = "", sentence[JOB_SENTENCE_SIZE];
    DIR *dir = opendir(directory);
    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;)
        if (strstr(entry->d_name, ".statistics") != NULL)
            snprintf(path, sizeof(path), "%s/%s", directory, entry->d_name);
    closedir(dir);
    const struct row_shape shape = {2, 2, 20, ROW_CODEC_F16};
    struct key_statistics *statistics = NULL;
    int r = key_statistics_load(path, &shape, hash, &statistics, sentence, sizeof(sentence));
    if (r < 0)
        print_error("%s: %d, %s\n", path, r, sentence);
    assert_int_equal(r, 0);
    unlink(path);
    return statistics;
}

struct truth {
    double q_mean[20], q_square[20][20], k_spread[20][20];
};

static struct truth truth_of(const struct naive *naive, uint32_t n_contexts, uint32_t layer, uint32_t head)
{
    struct truth truth = {0};
    double n_queries = 0, n_keys = 0;
    for (uint32_t c = 0; c < n_contexts; c++) {
        size_t n = naive[c].n;
        for (size_t t = 0; t < n; t++)
            for (size_t h = 3 * head; h < 3 * head + 3; h++, n_queries++) {
                const double *q = naive[c].q + ((layer * n + t) * 6 + h) * 20;
                for (int i = 0; i < 20; i++) {
                    truth.q_mean[i] += q[i];
                    for (int j = 0; j < 20; j++)
                        truth.q_square[i][j] += q[i] * q[j];
                }
            }
        for (size_t block = 0; block < n / 64; block++) {
            double mean[20] = {0};
            for (int pass = 0; pass < 2; pass++)
                for (size_t t = block * 64; t < block * 64 + 64; t++) {
                    const double *k = naive[c].k + ((layer * n + t) * 2 + head) * 20;
                    for (int i = 0; pass == 0 && i < 20; i++)
                        mean[i] += k[i] / 64;
                    for (int i = 0; pass == 1 && i < 20; i++)
                        for (int j = 0; j < 20; j++)
                            truth.k_spread[i][j] += (k[i] - mean[i]) * (k[j] - mean[j]);
                }
            n_keys += 64;
        }
    }
    for (int i = 0; i < 20; i++) {
        truth.q_mean[i] /= n_queries;
        for (int j = 0; j < 20; j++) {
            truth.q_square[i][j] /= n_queries;
            truth.k_spread[i][j] /= n_keys;
        }
    }
    return truth;
}

/* Fewer keys than samples are wanted: every key of a whole block is one. Returns the worst difference. */
static double check_samples(const struct key_statistics *statistics, const struct naive *naive, uint32_t n_contexts,
                            uint32_t layer, uint32_t head)
{
    const struct kernels *kernels = kernels_get(KERNELS_ISA_PLAIN);
    const uint16_t *samples = key_statistics_samples(statistics, layer, head);
    double worst = 0;
    uint32_t n = 0;
    for (uint32_t c = 0; c < n_contexts; c++)
        for (size_t t = 0; t < naive[c].n / 64 * 64; t++, n++)
            for (size_t i = 0; i < 20; i++) {
                const double *keys = naive[c].k + ((size_t)layer * naive[c].n * 2 + head) * 20 + i;
                double mean = 0;
                for (size_t j = t / 64 * 64; j < t / 64 * 64 + 64; j++)
                    mean += keys[j * 40] / 64;
                float sample;
                kernels->f16_decode(samples + (size_t)n * 20 + i, 1, &sample);
                worst = fmax(worst, fabs((double)sample - (keys[t * 40] - mean)));
            }
    assert_int_equal(statistics->n_samples, n);
    return worst;
}

static void test_moments(void **state)
{
    (void)state;
    char directory[] = "/tmp/hcattn-train-XXXXXX", sentence[JOB_SENTENCE_SIZE] = "";
    assert_non_null(mkdtemp(directory));
    struct worker_fixture *fixture = open_worker(directory);
    const size_t n_letters[] = {300, 100}; /* 300: a context of 256 tokens, and what is left is not a whole block */
    struct train_statistics_request request = request_of(2, n_letters);
    struct train_texts *texts = NULL;
    struct naive naive[2];
    assert_int_equal(train_texts_new(&fixture->tools, request.texts, 2, 1024, 8192, &texts, sentence), 0);
    assert_int_equal(texts->n_contexts, 2);
    for (uint32_t i = 0; i < 2; i++)
        naive[i] = naive_new(fixture, texts->contexts[i].ids, texts->contexts[i].n);
    assert_int_equal(naive[0].n, 256);
    assert_int_equal(naive[1].n, 100);
    assert_false(quantizers_has(fixture->tools.quantizers, &pair2));
    assert_int_equal(run(&fixture->tools, &request, sentence), 0);
    assert_non_null(strstr(sentence, "356 tokens, kept"));
    assert_true(quantizers_has(fixture->tools.quantizers, &pair2));

    struct key_statistics *statistics = statistics_of(directory);
    assert_int_equal(statistics->n_tokens, 356);
    assert_int_equal(statistics->text_hash, texts->hash);
    double worst = 0, largest = 0;
    for (uint32_t layer = 0; layer < 2; layer++)
        for (uint32_t head = 0; head < 2; head++) {
            struct truth truth = truth_of(naive, 2, layer, head);
            struct key_statistics_head got = key_statistics_head(statistics, layer, head);
            assert_true(check_samples(statistics, naive, 2, layer, head) < 4e-3);
            for (int i = 0; i < 20; i++) {
                worst = fmax(worst, fabs(truth.q_mean[i] - (double)got.q_mean[i]));
                for (int j = 0; j < 20; j++) {
                    worst = fmax(worst, fabs(truth.q_square[i][j] - (double)got.q_square[i * 20 + j]));
                    worst = fmax(worst, fabs(truth.k_spread[i][j] - (double)got.k_spread[i * 20 + j]));
                    largest = fmax(largest, fabs(truth.k_spread[i][j]));
                }
            }
        }
    print_message("largest moment %.3g, worst difference %.2g\n", largest, worst);
    assert_true(largest > 0.5 && worst < 1e-4);

    key_statistics_free(statistics);
    for (uint32_t i = 0; i < 2; i++)
        naive_free(&naive[i]);
    train_texts_free(texts);
    close_worker(fixture);
    assert_int_equal(rmdir(directory), 0);
}

static void test_threads_change_nothing(void **state)
{
    (void)state;
    struct key_statistics *statistics[2];
    char directory[] = "/tmp/hcattn-train-XXXXXX", sentence[JOB_SENTENCE_SIZE];
    assert_non_null(mkdtemp(directory));
    for (int i = 0; i < 2; i++) {
        struct worker_fixture *fixture = open_worker(directory);
        if (i == 1)
            fixture->tools.pool = NULL;
        struct train_statistics_request request = request_of(1, (const size_t[]){200});
        assert_int_equal(run(&fixture->tools, &request, sentence), 0);
        statistics[i] = statistics_of(directory);
        close_worker(fixture);
    }
    assert_memory_equal(statistics[0]->values, statistics[1]->values, 4 * (20 + 2 * 20 * 20) * sizeof(float));
    key_statistics_free(statistics[0]);
    key_statistics_free(statistics[1]);
    assert_int_equal(rmdir(directory), 0);
}

static void test_again(void **state)
{
    (void)state;
    char sentence[JOB_SENTENCE_SIZE] = "";
    struct worker_fixture *fixture = open_worker(NULL);
    struct train_statistics_request request = request_of(1, (const size_t[]){64});
    assert_int_equal(run(&fixture->tools, &request, sentence), 0);
    assert_non_null(strstr(sentence, "not kept"));
    request = request_of(1, (const size_t[]){64});
    assert_int_equal(run(&fixture->tools, &request, sentence), 0);
    assert_non_null(strstr(sentence, "already"));
    request = request_of(1, (const size_t[]){70});
    request.again = true;
    assert_int_equal(run(&fixture->tools, &request, sentence), 0);
    assert_non_null(strstr(sentence, "70 tokens"));
    close_worker(fixture);
}

static void test_own_text(void **state)
{
    (void)state;
    char sentence[JOB_SENTENCE_SIZE] = "";
    size_t n = strlen(train_own_text());
    assert_in_range(n, 24 << 10, 34 << 10);
    assert_int_equal(utf8_check(train_own_text(), n, NULL), 0);
    struct worker_fixture *fixture = open_worker(NULL);
    struct train_statistics_request request = {.again = true};
#ifndef HCATTN_SANITIZED
    assert_int_equal(run(&fixture->tools, &request, sentence), 0);
    assert_non_null(strstr(sentence, "4096 tokens"));
#else
    (void)request;
    (void)sentence;
#endif
    close_worker(fixture);
}

static void test_texts(void **state)
{
    (void)state;
    char sentence[JOB_SENTENCE_SIZE] = "";
    struct worker_fixture *fixture = open_worker(NULL);
    struct train_statistics_request request = request_of(3, (const size_t[]){600, 63, 320});
    struct train_texts *texts = NULL, *other = NULL;
    assert_int_equal(train_texts_new(&fixture->tools, request.texts, 3, 1024, 8192, &texts, sentence), 0);
    /* in turn; 600 = 256 + 256 + 88, 63 is too short, 320 = 256 + 64 */
    const uint32_t sizes[] = {256, 256, 256, 64, 88};
    assert_int_equal(texts->n_contexts, 5);
    for (int i = 0; i < 5; i++)
        assert_int_equal(texts->contexts[i].n, sizes[i]);
    assert_int_equal(texts->n_tokens, 920);
    assert_memory_not_equal(texts->contexts[0].ids, texts->contexts[1].ids, 64 * sizeof(uint32_t));
    assert_int_equal(train_texts_new(&fixture->tools, request.texts, 3, 1024, 400, &other, sentence), 0);
    assert_int_equal(other->n_contexts, 2);
    assert_int_equal(other->contexts[1].n, 144);
    assert_memory_equal(other->contexts[0].ids, texts->contexts[0].ids, 256 * sizeof(uint32_t));
    assert_true(other->hash != texts->hash);
    train_texts_free(other);
    train_texts_free(texts);
    job_texts_free(request.texts, 3);

    request = request_of(2, (const size_t[]){63, 0});
    assert_int_equal(run(&fixture->tools, &request, sentence), -E2BIG);
    assert_non_null(strstr(sentence, "64 tokens"));
    request = request_of(1, (const size_t[]){100});
    request.texts[0].text[50] = (char)0xff;
    assert_int_equal(run(&fixture->tools, &request, sentence), -EINVAL);
    assert_non_null(strstr(sentence, "letters.txt is not UTF-8"));
    close_worker(fixture);
}

static int n_until_failure;

static void *failing_alloc(struct backend *backend, size_t n_bytes)
{
    return n_until_failure-- == 0 ? NULL : backend_cpu.alloc(backend, n_bytes);
}

static void test_no_memory(void **state)
{
    (void)state;
    char sentence[JOB_SENTENCE_SIZE] = "";
    struct worker_fixture *fixture = open_worker(NULL);
    size_t before = fixture->ops.bytes(fixture->backend);
    fixture->ops.alloc = failing_alloc;
    n_until_failure = 5;
    struct train_statistics_request request = request_of(1, (const size_t[]){100});
    assert_int_equal(run(&fixture->tools, &request, sentence), -ENOMEM);
    assert_non_null(strstr(sentence, "no memory"));
    assert_int_equal(fixture->ops.bytes(fixture->backend), before);
    close_worker(fixture);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_moments), cmocka_unit_test(test_threads_change_nothing),
        cmocka_unit_test(test_again),   cmocka_unit_test(test_own_text),
        cmocka_unit_test(test_texts),   cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
