/* eval_rows_table.c - see eval_rows.h: a table of each text, one of the means, and one of the attention where it was asked for. */
#include "client/command/eval_rows.h"
#include "client/command/output.h"
#include "client/command/report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME_WIDTH_MAX 40

/* One line, of a row or of a mean. */
struct line {
    const struct hcattn_eval_row *row;
    double kld_mean, kld_p99, top1, perplexity_change, kept, device, store_bytes;
    const struct eval_speed *speed;
};

static int name_width(const struct eval_rows *rows)
{
    size_t width = strlen("PRESET");
    for (size_t i = 0; i < rows->n_rows; i++) {
        size_t n = strlen(rows->rows[i].row.preset) + (rows->rows[i].row.baseline ? 1 : 0);
        width = n > width ? n : width;
    }
    return (int)(width < NAME_WIDTH_MAX ? width : NAME_WIDTH_MAX);
}

/* The name, with a star where no session can have it. */
static const char *shown_name(const struct hcattn_eval_row *row, char text[128])
{
    snprintf(text, 128, "%.120s%s", row->preset, row->baseline ? "*" : "");
    return text;
}

static const char *milliseconds(const struct eval_speed *speed, char text[16])
{
    if (speed->measured)
        snprintf(text, 16, "%.1f", speed->time_us / 1e3);
    else
        snprintf(text, 16, "-");
    return text;
}

static void show_heading(int width)
{
    output_format("%-*s %8s %7s %9s %9s %8s %10s %11s %9s", width, "PRESET", "DEVICE", "KEPT", "KLD", "KLD P99",
                  "TOP-1", "PERPLEXITY", "FROM STORES", "MS/TOKEN");
}

static void show_line(int width, const struct line *line)
{
    char name[128], size[REPORT_SIZE_TEXT], time[16];
    double bytes = line->store_bytes > 0 ? line->store_bytes : 0;
    output_format("%-*s %6.2f %% %5.1f %% %9.6f %9.6f %6.2f %% %+8.3f %% %11s %9s", width, shown_name(line->row, name),
                  100 * line->device, 100 * line->kept, line->kld_mean, line->kld_p99, 100 * line->top1,
                  100 * line->perplexity_change, report_size((uint64_t)bytes, size), milliseconds(line->speed, time));
}

static void show_text(const struct eval_rows *rows, int width, const char *text)
{
    bool first = true;
    for (size_t i = 0; i < rows->n_rows; i++) {
        const struct hcattn_eval_row *row = &rows->rows[i].row;
        if (strcmp(row->text, text) != 0)
            continue;
        if (first) {
            output_format("%s: %llu tokens, the last %llu of them decoded; perplexity of full attention %.4f\n", text,
                          (unsigned long long)row->context, (unsigned long long)row->tail, row->full_perplexity);
            show_heading(width);
            output_text("\n");
        }
        first = false;
        struct line line = {.row = row,
                            .kld_mean = row->kld_mean,
                            .kld_p99 = row->kld_p99,
                            .top1 = row->top1,
                            .perplexity_change =
                                row->full_perplexity > 0 ? row->perplexity / row->full_perplexity - 1 : 0,
                            .kept = row->kept,
                            .device = row->device_bytes_fraction,
                            .store_bytes = row->store_bytes,
                            .speed = &rows->rows[i].speed};
        show_line(width, &line);
        output_text("\n");
    }
    output_text("\n");
}

static void show_means(const struct eval_mean *means, size_t n_means, int width)
{
    char exact[REPORT_SIZE_TEXT], tables[REPORT_SIZE_TEXT], measured[16];
    size_t n_texts = 0;
    bool any_baseline = false;
    for (size_t i = 0; i < n_means; i++)
        n_texts = means[i].n_texts > n_texts ? means[i].n_texts : n_texts;
    output_format("means over %zu text%s\n", n_texts, n_texts == 1 ? "" : "s");
    show_heading(width);
    output_format(" %9s %9s %10s %10s  %s\n", "WORST KLD", "MEASURED", "EXACT SET", "TABLES", "MEANING");
    for (size_t i = 0; i < n_means; i++) {
        const struct eval_mean *mean = &means[i];
        struct line line = {mean->row,
                            mean->kld_mean,
                            mean->kld_p99,
                            mean->top1,
                            mean->perplexity_change,
                            mean->kept,
                            mean->device_bytes_fraction,
                            mean->store_bytes,
                            &mean->speed};
        show_line(width, &line);
        if (mean->device_bytes_measured > 0)
            snprintf(measured, sizeof(measured), "%.2f %%", 100 * mean->device_bytes_measured);
        else
            snprintf(measured, sizeof(measured), "-");
        output_format(" %9.6f %9s %10s %10s  %s\n", mean->kld_worst, measured,
                      report_size((uint64_t)fmax(mean->exact_bytes, 0), exact),
                      report_size((uint64_t)fmax(mean->table_bytes, 0), tables), mean->row->meaning);
        any_baseline |= mean->row->baseline;
    }
    output_text(
        "\nDEVICE: bytes per old token on the device, of f16 keys and values; MEASURED: the same from memory that was\n"
        "allocated; EXACT SET: what a session of this context keeps exactly beside them; TABLES: once a model\n");
    if (any_baseline)
        output_text("* for comparison: no session can have it\n");
}

/* By layer, means over the texts. */
static void show_attention(const struct eval_rows *rows, const struct eval_mean *mean)
{
    size_t n_layers = mean->row->n_attention;
    if (!n_layers)
        return;
    output_format("\n%s: inside the attention, by layer\n%5s %8s %8s %13s %11s\n", mean->row->preset, "LAYER", "RECALL",
                  "MASS", "OUTPUT ERROR", "TAIL ERROR");
    for (size_t layer = 0; layer < n_layers; layer++) {
        double sums[4] = {0}, n = 0;
        for (size_t i = 0; i < rows->n_rows; i++) {
            const struct hcattn_eval_row *row = &rows->rows[i].row;
            if (strcmp(row->preset, mean->row->preset) != 0 || row->n_attention != n_layers)
                continue;
            const struct hcattn_attention_row *from = &row->attention[layer];
            sums[0] += (double)from->recall;
            sums[1] += (double)from->mass;
            sums[2] += (double)from->output_error;
            sums[3] += (double)from->tail_error;
            n++;
        }
        output_format("%5zu %6.1f %% %6.1f %% %13.5f %11.5f\n", layer, 100 * sums[0] / n, 100 * sums[1] / n,
                      sums[2] / n, sums[3] / n);
    }
}

void eval_rows_table(const struct eval_rows *rows)
{
    size_t n_means = 0;
    struct eval_mean *means = eval_rows_means(rows, &n_means);
    int width = name_width(rows);
    for (size_t i = 0; i < rows->n_rows; i++) {
        bool known = false;
        for (size_t k = 0; k < i; k++)
            known |= strcmp(rows->rows[k].row.text, rows->rows[i].row.text) == 0;
        if (!known)
            show_text(rows, width, rows->rows[i].row.text);
    }
    if (means)
        show_means(means, n_means, width);
    for (size_t i = 0; means && i < n_means; i++)
        show_attention(rows, &means[i]);
    free(means);
}
