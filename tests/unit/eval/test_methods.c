/* test_methods.c - baselines on a tiny model: how far they are from full attention, what they keep and cost, what they lose. */
#include "tests/unit/eval/methods_fixture.h"

#include <errno.h>

#include "gpu-worker/eval/eval.h"
#include "proto/layout.h"

static bool is_near(double a, double b)
{
    return fabs(a - b) <= 1e-6 * fmax(fabs(a), fabs(b));
}

static double device_fraction(const struct method *method)
{
    struct method_account account;
    method->ops->account(method, &account);
    assert_true(account.device_measured <= 0 && account.table_bytes <= 0);
    assert_true(is_near(account.exact_bytes, N_HEADS * (4 + 128) * 4 * HEAD_DIM));
    return account.device_bytes / (N_HEADS * 2 * 2 * HEAD_DIM);
}

static double store_bytes(const struct method *method)
{
    struct method_account account;
    method->ops->account(method, &account);
    return account.store_bytes;
}

static double mean_old(const struct method *method)
{
    return (double)method->n_old / TAIL;
}

/* ---- formats ---- */

static void test_formats(void **state)
{
    (void)state;
    const char *const names[] = {"q8_0", "kivi4", "q4_0", "kivi2", NULL};
    /* of 16 bits: 8 + 16/32; keys 4 + 32/64 and values 4 + 32/32; 4 + 16/32; as kivi4. No channel of these keys stands out:
     * kivi4 and q4_0 are about as good as each other */
    const double fractions[] = {8.5 / 16, (4.5 + 5) / 32, 4.5 / 16, (2.5 + 3) / 32};
    for (enum row_codec codec = ROW_CODEC_F16; codec <= ROW_CODEC_Q8_0; codec++) {
        struct methods_fixture *fixture = methods_fixture_new(codec);
        methods_fixture_begin(fixture, names, false);
        double before = 0;
        for (uint32_t i = 0; names[i] != NULL; i++) {
            const double divergence = methods_fixture_tail(fixture, i);
            struct method *method = fixture->methods[i];
            print_message("%-6s KLD %.3g\n", names[i], divergence);
            assert_true(method->baseline);
            assert_true(strlen(method->meaning) > 0 && strcmp(method->meaning, names[i]) != 0);
            assert_true(is_near(methods_fixture_kept(fixture, i), 1));
            if (codec == ROW_CODEC_F16) {
                assert_true(is_near(device_fraction(method), fractions[i]));
                assert_true(store_bytes(method) <= 0);
                assert_true(divergence > (i == 0 ? 0 : i == 2 ? 0.5 * before : 2 * before));
            }
            assert_true(i > 0 || divergence < 0.01);
            before = divergence;
        }
        methods_fixture_free(fixture);
    }
}

/* ---- what keeps everything ---- */

static void test_everything_is_full(void **state)
{
    (void)state;
    const char *const names[] = {"h2o=1", "snapkv=1", "quest=1", "fastgen-permanent=1", NULL};
    for (enum row_codec codec = ROW_CODEC_F16; codec <= ROW_CODEC_Q8_0; codec++) {
        struct methods_fixture *fixture = methods_fixture_new(codec);
        methods_fixture_begin(fixture, names, true);
        for (uint32_t i = 0; names[i] != NULL; i++) {
            const double divergence = methods_fixture_tail(fixture, i);
            print_message("%-20s KLD %.3g\n", names[i], divergence);
            assert_true(fabs(divergence) < 1e-6);
            assert_true(is_near(methods_fixture_kept(fixture, i), 1));
            for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
                const struct method_attention *attention = &fixture->methods[i]->attention[layer];
                const double n = (double)attention->n;
                assert_int_equal(attention->n, TAIL / 8 * N_KV_HEADS);
                assert_true(fabs(attention->mass / n - 1) < 1e-5);
                assert_true(is_near(attention->recall, n));
                assert_true(attention->output_error / n < 1e-5);
            }
        }
        methods_fixture_free(fixture);
    }
}

/* ---- what keeps a share ---- */

static void test_shares(void **state)
{
    (void)state;
    static const char *const names[] = {"h2o=0.5",    "h2o=0.1",   "snapkv=0.5", "snapkv=0.1",
                                        "quest=0.25", "quest=0.1", "streaming",  NULL};
    struct methods_fixture *fixture = methods_fixture_new(ROW_CODEC_F16);
    methods_fixture_begin(fixture, names, true);
    double mass[MAX_METHODS], divergence[MAX_METHODS], kept[MAX_METHODS];
    for (uint32_t i = 0; names[i] != NULL; i++) {
        const struct method *method = fixture->methods[i];
        divergence[i] = methods_fixture_tail(fixture, i);
        kept[i] = methods_fixture_kept(fixture, i);
        mass[i] = method->attention[0].mass / (double)method->attention[0].n;
        print_message("%-12s KLD %.3g, kept %.4f, mass %.4f, recall %.3f, output %.3g; %s\n", names[i], divergence[i],
                      kept[i], mass[i], method->attention[0].recall / (double)method->attention[0].n,
                      method->attention[0].output_error / (double)method->attention[0].n, method->meaning);
        assert_true(divergence[i] > 0);
        const bool is_quest = strncmp(names[i], "quest", 5) == 0;
        if (is_quest) { /* extremes of 16 keys */
            assert_true(is_near(device_fraction(method), 1.0 / 16));
            assert_true(is_near(store_bytes(method), kept[i] * mean_old(method) * N_HEADS * 4 * HEAD_DIM));
        } else {
            assert_true(fabs(device_fraction(method) - kept[i]) < 1e-9);
            assert_true(store_bytes(method) <= 0);
        }
    }
    assert_true(fabs(kept[0] - 0.5) < 0.01 && fabs(kept[1] - 0.1) < 0.01);
    /* of 316 and then 380 old tokens (the tail's two blocks), 64 lie behind the prompt's in the second */
    assert_true(is_near(kept[2], (2 * 158 + 64) / (316.0 + 380)) && is_near(kept[3], (2 * 32 + 64) / (316.0 + 380)));
    assert_true(kept[4] < 0.26 && kept[4] > 0.24 && kept[5] < 0.1 && kept[5] > 0.08);
    assert_true(kept[6] <= 0 && fixture->methods[6]->n_old > 0);
    for (uint32_t i = 0; i < 6; i++)
        assert_true(mass[i] > mass[6] + 0.01);
    for (uint32_t i = 0; i < 6; i += 2) {
        assert_true(mass[i] > mass[i + 1]);
        assert_true(divergence[i] < divergence[i + 1]);
    }
    methods_fixture_free(fixture);
}

static void test_fastgen_permanent(void **state)
{
    (void)state;
    const char *const names[] = {"fastgen-permanent=0.9", "fastgen-permanent=0.3", "fastgen-permanent=0.001", NULL};
    struct methods_fixture *fixture = methods_fixture_new(ROW_CODEC_F16);
    methods_fixture_begin(fixture, names, true);
    double before = 1;
    for (uint32_t i = 0; names[i] != NULL; i++) {
        const double divergence = methods_fixture_tail(fixture, i), kept = methods_fixture_kept(fixture, i);
        const struct method *method = fixture->methods[i];
        print_message("%-24s KLD %.3g, kept %.4f; %s\n", names[i], divergence, kept, method->meaning);
        assert_true(fabs(device_fraction(method) - kept) < 1e-9);
        assert_true(store_bytes(method) <= 0);
        assert_true(kept <= before);
        before = kept;
    }
    /* attention of random weights is nearly even: no set holds most of it, and many hold a little */
    assert_true(is_near(methods_fixture_kept(fixture, 0), 1));
    assert_true(methods_fixture_kept(fixture, 1) < 0.9 && methods_fixture_kept(fixture, 1) > 0);
    assert_true(methods_fixture_kept(fixture, 2) < methods_fixture_kept(fixture, 1));
    methods_fixture_free(fixture);
}

/* ---- a token that nobody asks for until late ---- */

enum { PLANTED = 100 };

/* Queries of n positions from `first` on: along the planted token's key, which they score with `score`. */
static float *ask(const struct methods_fixture *fixture, const uint8_t *(*row_of)(const void *layer, uint32_t kv_head),
                  const void *layer, uint32_t n, float score)
{
    float *q = malloc((size_t)n * N_KV_HEADS * GROUP * HEAD_DIM * sizeof(float)), key[HEAD_DIM];
    assert_non_null(q);
    for (uint32_t head = 0; head < N_KV_HEADS * GROUP; head++) {
        float size = 0;
        fixture->worker->tools.kernels->decode_keys(row_of(layer, head / GROUP), 1, HEAD_DIM, KERNELS_ROWS_F16, key);
        for (uint32_t i = 0; i < HEAD_DIM; i++)
            size += key[i] * key[i];
        for (uint32_t position = 0; position < n; position++)
            for (uint32_t i = 0; i < HEAD_DIM; i++)
                q[((size_t)position * N_KV_HEADS * GROUP + head) * HEAD_DIM + i] =
                    key[i] * score / (size * pass_scale(fixture->pass));
    }
    return q;
}

static const uint8_t *row_of_pass(const void *context, uint32_t kv_head)
{
    const struct pass_layer *layer = context;
    const size_t head_rows = (layer->n_tokens + 63) / 64 * 64;
    return layer->rows + (kv_head * head_rows + PLANTED) * layout_row_bytes(pass_shape(layer->pass));
}

static const uint8_t *row_of_tail(const void *context, uint32_t kv_head)
{
    const struct pass_tail_layer *layer = context;
    return pass_tail_block(layer, kv_head, PLANTED / 64) + PLANTED % 64 * layout_row_bytes(pass_shape(layer->pass));
}

static float *asked; /* of the layer at hand */

/* The planted token's key becomes one that stands out of its page; what the pass computes from here on sees it so. */
static void look_away(struct methods_fixture *fixture, struct pass_layer *layer)
{
    const struct kernels *kernels = fixture->worker->tools.kernels;
    for (uint32_t kv_head = 0; kv_head < N_KV_HEADS; kv_head++) {
        uint8_t *row = (uint8_t *)row_of_pass(layer, kv_head);
        uint16_t halves[HEAD_DIM];
        float key[HEAD_DIM];
        kernels->decode_keys(row, 1, HEAD_DIM, KERNELS_ROWS_F16, key);
        for (uint32_t i = 0; i < HEAD_DIM; i++)
            key[i] *= 4;
        kernels->f16_encode(key, HEAD_DIM, halves);
        memcpy(row, halves, sizeof(halves));
    }
    free(asked);
    layer->q = asked = ask(fixture, row_of_pass, layer, CONTEXT, -60);
}

static void look_at_it(struct methods_fixture *fixture, struct pass_tail_layer *layer)
{
    free(asked);
    layer->q = asked = ask(fixture, row_of_tail, layer, TAIL, 60);
}

static void test_asked_for_late(void **state)
{
    (void)state;
    const char *const names[] = {"quest=0.2", "rot2,deviation=0.02", "quality", "q8_0", "streaming", "h2o=0.2", NULL};
    struct methods_fixture *fixture = methods_fixture_new(ROW_CODEC_F16);
    fixture->at_prompt = look_away;
    fixture->at_tail = look_at_it;
    methods_fixture_begin(fixture, names, true);
    for (uint32_t i = 0; names[i] != NULL; i++) {
        methods_fixture_tail(fixture, i);
        for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
            const struct method_attention *attention = &fixture->methods[i]->attention[layer];
            const double mass = attention->mass / (double)attention->n;
            const double error = attention->output_error / (double)attention->n;
            print_message("%-10s layer %u: mass %.4f, output %.3g\n", names[i], layer, mass, error);
            if (i < 4)
                assert_true(mass > 0.95 && error < 0.05);
            else
                assert_true(mass < 0.1 && error > 0.5);
        }
    }
    methods_fixture_free(fixture);
    free(asked);
    asked = NULL;
}

/* ---- in an evaluation ---- */

static struct job make_job(bool attention)
{
    enum { LENGTH = 4096 };
    struct eval_request request = {.n_texts = 1, .context = 256, .tail = 64, .attention = attention};
    uint32_t seed = 1;
    request.texts = calloc(1, sizeof(*request.texts));
    request.texts[0] = (struct job_text){strdup("text"), calloc(1, LENGTH + 1)};
    for (uint32_t i = 0; i < LENGTH; i++) {
        seed = seed * 1664525 + 1013904223;
        request.texts[0].text[i] = "BCDFGHJKLMNPQRSTVWXZ .,"[(seed >> 8) % 23];
    }
    request.presets = calloc(16, sizeof(char *));
    for (const char *name; (name = methods_baseline_name(request.n_presets)) != NULL;)
        request.presets[request.n_presets++] = strdup(name);
    struct job job = {0};
    char sentence[JOB_SENTENCE_SIZE];
    assert_int_equal(eval_job_new(&request, &job, sentence), 0);
    return job;
}

static void test_evaluation(void **state)
{
    (void)state;
    struct methods_fixture *fixture = methods_fixture_new(ROW_CODEC_F16);
    struct job job = make_job(true);
    char sentence[JOB_SENTENCE_SIZE];
    uint32_t n_rows = 0;
    for (int r = 1; r > 0;) {
        struct job_report report;
        r = job.ops->advance(job.state, &fixture->worker->tools, &report, sentence);
        assert_true(r >= 0);
        if (report.row == NULL)
            continue;
        assert_true(report.row->baseline);
        assert_string_equal(report.row->preset, methods_baseline_name(n_rows));
        assert_true(report.row->kept >= 0 && report.row->kept < 1 + 1e-6);
        assert_true(report.row->kld_mean > 0 || strncmp(report.row->preset, "fastgen", 7) == 0);
        assert_int_equal(report.row->attention[0].n, 64 / 8 * N_KV_HEADS);
        n_rows++;
    }
    assert_int_equal(n_rows, 9);
    job.ops->free(job.state);
    methods_fixture_free(fixture);
}

/* Ending an evaluation anywhere leaves nothing behind (the sanitizers see to that). */
static void test_cancelled(void **state)
{
    (void)state;
    struct methods_fixture *fixture = methods_fixture_new(ROW_CODEC_F16);
    int r = 1;
    for (uint32_t n_slices = 0; r > 0; n_slices = 2 * n_slices + 1) {
        struct job job = make_job(false);
        char sentence[JOB_SENTENCE_SIZE];
        r = 1;
        for (uint32_t i = 0; i < n_slices && r > 0; i++) {
            struct job_report report;
            r = job.ops->advance(job.state, &fixture->worker->tools, &report, sentence);
            assert_true(r >= 0);
        }
        job.ops->free(job.state);
    }
    methods_fixture_free(fixture);
}

/* ---- names ---- */

static void test_names(void **state)
{
    (void)state;
    struct methods_fixture *fixture = methods_fixture_new(ROW_CODEC_F16);
    const char *name;
    uint32_t n = 0;
    for (; (name = methods_baseline_name(n)) != NULL; n++) { /* made and freed without a text */
        struct method *method = NULL;
        char sentence[JOB_SENTENCE_SIZE];
        struct method_account account;
        assert_int_equal(method_new(name, &fixture->worker->tools, CONTEXT, &method, sentence, sizeof(sentence)), 0);
        assert_true(method->baseline);
        assert_true(strlen(method->meaning) + 1 < sizeof(method->meaning));
        method->ops->account(method, &account);
        assert_true(account.store_bytes <= 0);
        method_free(method);
    }
    assert_int_equal(n, 9);
    static const struct {
        const char *name, *part;
    } refused[] = {
        {"h2o", "h2o=0.2"},
        {"h2o=", "h2o=0.2"},
        {"h2o=0", "above 0"},
        {"h2o=1.01", "at most 1"},
        {"h2o=-0.5", "h2o=0.2"},
        {"h2o=0.2x", "h2o=0.2"},
        {"h2o=0.2,notail", "h2o=0.2"},
        {"h2o=nan", "h2o=0.2"},
        {"snapkv=1e-1", "prompt"},
        {"quest=0.1.2", "read"},
        {"quest=.", "read"},
        {"q8_0=3", "alone"},
        {"streaming,", "alone"},
        {"kivi4,notail", "alone"},
        {"fastgen-permanent", "0.98"},
        {"h2o2=0.2", "not understood"},
        {"quest= 0.2", "read"},
        {"kivi3", "not understood"},
    };
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
        struct method *method = NULL;
        char sentence[JOB_SENTENCE_SIZE] = "";
        assert_int_equal(
            method_new(refused[i].name, &fixture->worker->tools, CONTEXT, &method, sentence, sizeof(sentence)),
            -EINVAL);
        print_message("%s: %s\n", refused[i].name, sentence);
        assert_non_null(strstr(sentence, refused[i].part));
        assert_null(strchr(sentence, '\n'));
        assert_null(method);
    }
    methods_fixture_free(fixture);
}

int main(void)
{
    kernels_thread_setup();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formats),        cmocka_unit_test(test_everything_is_full),
        cmocka_unit_test(test_shares),         cmocka_unit_test(test_fastgen_permanent),
        cmocka_unit_test(test_evaluation),     cmocka_unit_test(test_cancelled),
        cmocka_unit_test(test_asked_for_late), cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
