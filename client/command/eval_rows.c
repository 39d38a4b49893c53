/* eval_rows.c - see eval_rows.h. */
#include "client/command/eval_rows.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void row_fini(struct hcattn_eval_row *row)
{
    free((char *)row->text);
    free((char *)row->preset);
    free((char *)row->meaning);
    free((float *)row->kept_by_head);
    free((struct hcattn_attention_row *)row->attention);
}

void eval_rows_fini(struct eval_rows *rows)
{
    for (size_t i = 0; i < rows->n_rows; i++)
        row_fini(&rows->rows[i].row);
    free(rows->rows);
    *rows = (struct eval_rows){.n_rows = 0};
}

static void *copy(const void *from, size_t n_bytes)
{
    void *to = malloc(n_bytes + 1);
    if (to && n_bytes)
        memcpy(to, from, n_bytes);
    return to;
}

int eval_rows_add(struct eval_rows *rows, const struct hcattn_eval_row *row)
{
    struct eval_row *grown = realloc(rows->rows, (rows->n_rows + 1) * sizeof(*grown));
    if (!grown)
        return -ENOMEM;
    rows->rows = grown;
    struct hcattn_eval_row kept = *row;
    size_t n_heads = row->kept_by_head ? (size_t)row->n_layers * row->n_kv_heads : 0;
    kept.text = strdup(row->text);
    kept.preset = strdup(row->preset);
    kept.meaning = strdup(row->meaning);
    kept.kept_by_head = n_heads ? copy(row->kept_by_head, n_heads * sizeof(float)) : NULL;
    kept.attention = copy(row->attention, row->n_attention * sizeof(*row->attention));
    if (!kept.text || !kept.preset || !kept.meaning || (n_heads && !kept.kept_by_head) || !kept.attention) {
        row_fini(&kept);
        return -ENOMEM;
    }
    rows->rows[rows->n_rows++] = (struct eval_row){.row = kept};
    return 0;
}

static void add(struct eval_mean *mean, const struct eval_row *from)
{
    const struct hcattn_eval_row *row = &from->row;
    if (mean->n_texts++ == 0)
        mean->row = row;
    mean->kld_mean += row->kld_mean;
    mean->kld_p99 += row->kld_p99;
    mean->kld_worst = mean->kld_worst > row->kld_mean ? mean->kld_worst : row->kld_mean;
    mean->top1 += row->top1;
    mean->perplexity_change += row->full_perplexity > 0 ? row->perplexity / row->full_perplexity - 1 : 0;
    mean->kept += row->kept;
    mean->device_bytes_fraction += row->device_bytes_fraction;
    mean->device_bytes_measured += row->device_bytes_measured;
    mean->exact_bytes += row->exact_bytes;
    mean->table_bytes += row->table_bytes;
    mean->store_bytes += row->store_bytes;
    mean->speed.time_us += from->speed.time_us; /* zeroes where it was not measured */
    mean->speed.store_wait_us += from->speed.store_wait_us;
    mean->speed.store_bytes += from->speed.store_bytes;
    mean->speed.key_bytes += from->speed.key_bytes;
}

static void divide(struct eval_mean *mean, size_t n_measured)
{
    double n = (double)mean->n_texts;
    double *const values[] = {&mean->kld_mean,
                              &mean->kld_p99,
                              &mean->top1,
                              &mean->perplexity_change,
                              &mean->kept,
                              &mean->device_bytes_fraction,
                              &mean->device_bytes_measured,
                              &mean->exact_bytes,
                              &mean->table_bytes,
                              &mean->store_bytes};
    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++)
        *values[i] /= n;
    mean->speed.measured = n_measured > 0;
    if (!n_measured)
        return;
    mean->speed.time_us /= (double)n_measured;
    mean->speed.store_wait_us /= (double)n_measured;
    mean->speed.store_bytes /= (double)n_measured;
    mean->speed.key_bytes /= (double)n_measured;
}

struct eval_mean *eval_rows_means(const struct eval_rows *rows, size_t *ret_n_means)
{
    struct eval_mean *means = rows->n_rows ? calloc(rows->n_rows, sizeof(*means)) : NULL;
    size_t n_means = 0;
    for (size_t i = 0; means && i < rows->n_rows; i++) {
        const char *preset = rows->rows[i].row.preset;
        bool known = false;
        for (size_t k = 0; k < n_means; k++)
            known |= strcmp(means[k].row->preset, preset) == 0;
        if (known)
            continue;
        size_t n_measured = 0;
        struct eval_mean *mean = &means[n_means++];
        for (size_t k = i; k < rows->n_rows; k++) {
            if (strcmp(rows->rows[k].row.preset, preset) != 0)
                continue;
            add(mean, &rows->rows[k]);
            n_measured += rows->rows[k].speed.measured;
        }
        divide(mean, n_measured);
    }
    *ret_n_means = n_means;
    return means;
}
