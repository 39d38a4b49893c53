/*
 * eval_rows.h - the rows of an evaluation, kept; their means over the texts; as tables and as JSON.
 *
 * Owner      `hcattn eval`; eval_rows_fini() frees all. Threads: the main thread.
 */
#pragma once

#include "client/hcattn_jobs.h"

#include <jansson.h>

/* What the service itself needed, with sessions of its own. */
struct eval_speed {
    bool measured;
    double time_us;       /* of a decode step */
    double store_wait_us; /* of it */
    double store_bytes;   /* rows read from the stores per step */
    double key_bytes;     /* of the session, on the device */
};

struct eval_row {
    struct hcattn_eval_row row; /* what it points to is ours */
    struct eval_speed speed;
};

struct eval_rows {
    struct eval_row *rows;
    size_t n_rows;
};

int eval_rows_add(struct eval_rows *rows, const struct hcattn_eval_row *row); /* copies. -ENOMEM */
void eval_rows_fini(struct eval_rows *rows);

/* Of one preset, over its texts. */
struct eval_mean {
    const struct hcattn_eval_row *row; /* the first: names, shapes */
    size_t n_texts;
    double kld_mean, kld_p99, kld_worst; /* worst: of the text with the largest mean */
    double top1;
    double perplexity_change; /* relative to full attention's, mean */
    double kept;
    double device_bytes_fraction, device_bytes_measured, exact_bytes, table_bytes, store_bytes;
    struct eval_speed speed; /* of the texts where it was measured */
};

/* One for each preset, in the order in which they came: malloc'd; NULL: no memory, or no rows. */
struct eval_mean *eval_rows_means(const struct eval_rows *rows, size_t *ret_n_means);

/* eval_rows_table.c: to standard output. */
void eval_rows_table(const struct eval_rows *rows);

/* eval_rows_json.c: a new reference; NULL: no memory. `model` may be NULL. */
json_t *eval_rows_json(const struct eval_rows *rows, const char *model);
