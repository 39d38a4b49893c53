/* eval_rows_json.c - see eval_rows.h: the document of `hcattn eval --json`, which plot-eval reads too. */
#include "client/command/eval_rows.h"
#include "client/command/report.h"

#include <math.h>
#include <stdlib.h>

static json_t *number(double value)
{
    return isfinite(value) ? json_real(value) : json_null(); /* JSON has no others */
}

static json_t *kept_by_head(const struct hcattn_eval_row *row)
{
    if (!row->kept_by_head)
        return json_null();
    json_t *layers = json_array();
    for (uint32_t layer = 0; layer < row->n_layers; layer++) {
        json_t *heads = json_array();
        for (uint32_t head = 0; head < row->n_kv_heads; head++)
            json_array_append_new(heads, number((double)row->kept_by_head[layer * row->n_kv_heads + head]));
        json_array_append_new(layers, heads);
    }
    return layers;
}

static json_t *attention(const struct hcattn_eval_row *row)
{
    if (!row->n_attention)
        return json_null();
    json_t *layers = json_array();
    for (size_t i = 0; i < row->n_attention; i++)
        json_array_append_new(layers, json_pack("{s:o,s:o,s:o,s:o}",                                            //
                                                "recall", number((double)row->attention[i].recall),             //
                                                "mass", number((double)row->attention[i].mass),                 //
                                                "output_error", number((double)row->attention[i].output_error), //
                                                "tail_error", number((double)row->attention[i].tail_error)));
    return layers;
}

/* What rows and means have both. */
static void set_numbers(json_t *json, const struct eval_mean *mean)
{
    const struct {
        const char *name;
        double value;
    } numbers[] = {{"kld_mean", mean->kld_mean},
                   {"kld_p99", mean->kld_p99},
                   {"top1", mean->top1},
                   {"perplexity_change", mean->perplexity_change},
                   {"kept", mean->kept},
                   {"device_bytes_fraction", mean->device_bytes_fraction},
                   {"device_bytes_measured", mean->device_bytes_measured > 0 ? mean->device_bytes_measured : NAN},
                   {"exact_bytes", mean->exact_bytes},
                   {"table_bytes", mean->table_bytes},
                   {"store_bytes", mean->store_bytes}};
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
        json_object_set_new(json, numbers[i].name, number(numbers[i].value));
    const struct eval_speed *speed = &mean->speed;
    json_object_set_new(json, "time_us", speed->measured ? number(speed->time_us) : json_null());
    if (speed->measured)
        json_object_set_new(json, "service",
                            json_pack("{s:o,s:o,s:o}", "store_wait_us", number(speed->store_wait_us), //
                                      "store_bytes", number(speed->store_bytes),                      //
                                      "key_bytes", number(speed->key_bytes)));
    else
        json_object_set_new(json, "service", json_null());
}

static json_t *row_json(const struct eval_row *from)
{
    const struct hcattn_eval_row *row = &from->row;
    json_t *json = json_pack("{s:o,s:o,s:o,s:b,s:I,s:I}",          //
                             "text", report_text(row->text),       //
                             "preset", report_text(row->preset),   //
                             "meaning", report_text(row->meaning), //
                             "baseline", row->baseline,            //
                             "context", (json_int_t)row->context,  //
                             "tail", (json_int_t)row->tail);
    if (!json)
        return NULL;
    struct eval_mean alone = {
        .kld_mean = row->kld_mean,
        .kld_p99 = row->kld_p99,
        .top1 = row->top1,
        .perplexity_change = row->full_perplexity > 0 ? row->perplexity / row->full_perplexity - 1 : NAN,
        .kept = row->kept,
        .device_bytes_fraction = row->device_bytes_fraction,
        .device_bytes_measured = row->device_bytes_measured,
        .exact_bytes = row->exact_bytes,
        .table_bytes = row->table_bytes,
        .store_bytes = row->store_bytes,
        .speed = from->speed,
    };
    set_numbers(json, &alone);
    json_object_set_new(json, "perplexity", number(row->perplexity));
    json_object_set_new(json, "full_perplexity", number(row->full_perplexity));
    json_object_set_new(json, "kept_by_head", kept_by_head(row));
    json_object_set_new(json, "attention", attention(row));
    return json;
}

json_t *eval_rows_json(const struct eval_rows *rows, const char *model)
{
    size_t n_means = 0;
    struct eval_mean *means = eval_rows_means(rows, &n_means);
    json_t *list = json_array(), *mean_list = json_array();
    for (size_t i = 0; i < rows->n_rows; i++)
        json_array_append_new(list, row_json(&rows->rows[i]));
    for (size_t i = 0; means && i < n_means; i++) {
        json_t *json = json_pack("{s:o,s:o,s:b,s:I}",                           //
                                 "preset", report_text(means[i].row->preset),   //
                                 "meaning", report_text(means[i].row->meaning), //
                                 "baseline", means[i].row->baseline,            //
                                 "texts", (json_int_t)means[i].n_texts);
        set_numbers(json, &means[i]);
        json_object_set_new(json, "kld_worst", number(means[i].kld_worst));
        json_array_append_new(mean_list, json);
    }
    free(means);
    return json_pack("{s:o,s:o,s:o,s:o}", "model", report_text(model), "version", report_text(HCATTN_VERSION), //
                     "rows", list, "means", mean_list);
}
