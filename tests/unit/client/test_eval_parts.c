/* test_eval_parts.c - pieces of `hcattn eval`: lists of presets, what they need, means of rows, residencies, times. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "client/command/eval_presets.h"
#include "client/command/eval_rows.h"
#include "client/command/job.h"
#include "client/command/opening.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static void check_presets(const char *list, const char *const *expected)
{
    struct eval_presets presets = {.n_names = 0};
    assert_int_equal(eval_presets_add(&presets, list), 0);
    size_t n = 0;
    for (; expected[n]; n++) {
        assert_true(n < presets.n_names);
        assert_string_equal(presets.names[n], expected[n]);
    }
    assert_int_equal(presets.n_names, n);
    eval_presets_fini(&presets);
}
#define CHECK_PRESETS(list, ...) check_presets(list, (const char *[]){__VA_ARGS__, NULL})

static void test_presets(void **state)
{
    (void)state;
    CHECK_PRESETS("default", "default");
    CHECK_PRESETS("default,quality,default", "default", "quality");
    CHECK_PRESETS("rot2,deviation=0.02,q8_0", "rot2,deviation=0.02", "q8_0");
    CHECK_PRESETS("rot2,l2=0.001,q8_0", "rot2,l2=0.001", "q8_0");
    CHECK_PRESETS("h2o=0.2,pq2/4096,mass=0.9,weights,notail,small,fastgen=0.95,weightsome", "h2o=0.2",
                  "pq2/4096,mass=0.9,weights,notail", "small,fastgen=0.95", "weightsome");
    static const char *const wrong[] = {"", ",", "a,", ",a", "a,,b"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        struct eval_presets presets = {.n_names = 0};
        assert_int_equal(eval_presets_add(&presets, wrong[i]), -EINVAL);
        eval_presets_fini(&presets);
    }
}

static void test_needs(void **state)
{
    (void)state;
    struct job_needs needs = {.n_codebooks = 0};
    static const char *const nothing[] = {"rot2,deviation=0.02", "full", "q8_0", "h2o=0.2", "nonsense"};
    for (size_t i = 0; i < sizeof(nothing) / sizeof(nothing[0]); i++)
        job_need(&needs, nothing[i]);
    assert_false(needs.statistics);
    assert_int_equal(needs.n_codebooks, 0);
    job_need(&needs, "pair2,mass=0.9,fastgen=0.95");
    assert_true(needs.statistics);
    job_need(&needs, "pq2/4096,mass=0.9,weights,notail");
    job_need(&needs, "pq2/4096,deviation=0.02");
    job_need(&needs, "pq8/256,mass=0.9");
    assert_int_equal(needs.n_codebooks, 2);
    assert_int_equal(needs.codebooks[1].n_dims, 8);
    assert_int_equal(needs.codebooks[1].n_centroids, 256);
    needs = (struct job_needs){.n_codebooks = 0};
    job_need(&needs, "all");
    assert_int_equal(needs.n_codebooks, 2); /* of hcattention-25 and hcattention-12.5 */
    assert_int_equal(needs.codebooks[0].n_centroids, 4096);
}

static void test_left(void **state)
{
    (void)state;
    char text[JOB_LEFT_SIZE];
    assert_string_equal(job_left(1, text), "1 s");
    assert_string_equal(job_left(59000000, text), "59 s");
    assert_string_equal(job_left(200000000, text), "3 min 20 s");
    assert_string_equal(job_left(3900000000u, text), "1 h 05 min");
    assert_true(strlen(job_left(UINT64_MAX, text)) < JOB_LEFT_SIZE);
}

static const struct option_spec specs[] = {OPENING_OPTIONS};
static const struct options_table table = {
    .program = "test", .specs = specs, .n_specs = sizeof(specs) / sizeof(specs[0])};

/* The policy of `base` with options; NULL: refused, with the sentence in `sentence`. */
static const char *policy(const char *base, const char *first, const char *second, char *sentence)
{
    static char text[HCATTN_POLICY_SIZE];
    char error[OPTIONS_ERROR_SIZE], *argv[] = {(char *)"test", (char *)first, (char *)second};
    struct options *options = NULL;
    assert_int_equal(options_parse(&table, second ? 3 : first ? 2 : 1, argv, &options, error), 0);
    int result = opening_policy(options, base, text, sentence, OPTIONS_ERROR_SIZE);
    options_free(options);
    return result < 0 ? NULL : text;
}

static void test_residency(void **state)
{
    (void)state;
    char sentence[OPTIONS_ERROR_SIZE];
    assert_string_equal(policy("default", NULL, NULL, sentence), "default");
    assert_string_equal(policy("default", "--residency=all", NULL, sentence), "default");
    assert_string_equal(policy("default", "--residency=fastgen", NULL, sentence), "default,fastgen=0.98");
    assert_string_equal(policy("rot4,mass=0.9", "--fastgen-recovery=0.995", NULL, sentence),
                        "rot4,mass=0.9,fastgen=0.995");
    assert_string_equal(policy("small,fastgen=0.9", "--residency=fastgen", NULL, sentence), "small,fastgen=0.9");
    assert_null(policy("small,fastgen=0.9", "--residency=all", NULL, sentence));
    assert_non_null(strstr(sentence, "has FastGen residency"));
    assert_null(policy("default", "--residency=all", "--fastgen-recovery=0.9", sentence));
    assert_non_null(strstr(sentence, "no meaning"));
    assert_null(policy("full", "--residency=fastgen", NULL, sentence));
    assert_null(policy("default", "--residency=fastgen", "--fastgen-recovery=0", sentence));
    assert_null(policy("nonsense", NULL, NULL, sentence));
}

static void add(struct eval_rows *rows, const char *text, const char *preset, double kld, double perplexity, float kept)
{
    float by_head[] = {kept, 1.0f};
    struct hcattn_attention_row attention = {.recall = kept};
    struct hcattn_eval_row row = {.text = text,
                                  .preset = preset,
                                  .meaning = "",
                                  .kld_mean = kld,
                                  .perplexity = perplexity,
                                  .full_perplexity = 10,
                                  .kept = (double)kept,
                                  .n_layers = 1,
                                  .n_kv_heads = 2,
                                  .kept_by_head = by_head,
                                  .attention = &attention,
                                  .n_attention = 1};
    assert_int_equal(eval_rows_add(rows, &row), 0);
}

static void test_means(void **state)
{
    (void)state;
    struct eval_rows rows = {.n_rows = 0};
    size_t n_means = 99;
    assert_null(eval_rows_means(&rows, &n_means));
    assert_int_equal(n_means, 0);
    add(&rows, "prose", "default", 0.25, 11, 0.5f);
    add(&rows, "prose", "quality", 0.125, 10, 0.25f);
    add(&rows, "code", "default", 0.75, 12, 0.25f);
    rows.rows[2].speed = (struct eval_speed){.measured = true, .time_us = 3000};
    struct eval_mean *means = eval_rows_means(&rows, &n_means);
    assert_int_equal(n_means, 2);
    assert_string_equal(means[0].row->preset, "default");
    assert_int_equal(means[0].n_texts, 2);
    assert_true(means[0].kld_mean == 0.5);
    assert_true(means[0].kld_worst == 0.75);
    assert_true(means[0].kept == 0.375);
    assert_float_equal(means[0].perplexity_change, 0.15, 1e-9);
    assert_true(means[0].speed.measured);
    assert_true(means[0].speed.time_us == 3000); /* where it was measured */
    assert_string_equal(means[1].row->preset, "quality");
    assert_false(means[1].speed.measured);
    free(means);

    json_t *json = eval_rows_json(&rows, "tiny"), *row, *layers;
    assert_string_equal(json_string_value(json_object_get(json, "model")), "tiny");
    assert_int_equal(json_array_size(json_object_get(json, "rows")), 3);
    row = json_array_get(json_object_get(json, "rows"), 0);
    assert_true(json_real_value(json_object_get(row, "kld_mean")) == 0.25);
    assert_true(json_is_null(json_object_get(row, "time_us")));
    assert_true(json_is_null(json_object_get(row, "device_bytes_measured"))); /* nothing was allocated */
    layers = json_object_get(row, "kept_by_head");
    assert_int_equal(json_array_size(layers), 1);
    assert_true(json_real_value(json_array_get(json_array_get(layers, 0), 0)) == 0.5);
    assert_int_equal(json_array_size(json_object_get(json, "means")), 2);
    json_decref(json);
    eval_rows_fini(&rows);
}

/* What is no number in JSON does not make the whole document fail. */
static void test_no_numbers(void **state)
{
    (void)state;
    struct eval_rows rows = {.n_rows = 0};
    add(&rows, "prose", "default", (double)INFINITY, (double)NAN, 0.5f);
    json_t *json = eval_rows_json(&rows, NULL);
    assert_non_null(json);
    assert_true(json_is_null(json_object_get(json_array_get(json_object_get(json, "rows"), 0), "kld_mean")));
    json_decref(json);
    eval_rows_fini(&rows);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_presets),   cmocka_unit_test(test_needs), cmocka_unit_test(test_left),
        cmocka_unit_test(test_residency), cmocka_unit_test(test_means), cmocka_unit_test(test_no_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
