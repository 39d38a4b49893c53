/* eval_speed.c - see eval_speed.h. */
#include "client/command/eval_speed.h"
#include "client/command/output.h"

#include <errno.h>
#include <string.h>

#define CALL_MS  600000u
#define CLOSE_MS 5000u
#define IDLE_S   600u /* of a session that we could not close */
#define N_WARM   8u   /* tokens decoded first: keys are made, caches filled */
#define N_STEPS  32u

struct context {
    struct hcattn *client;
    const char *name; /* of the subcommand */
    struct job_progress progress;
    char what[128];
    const uint32_t *ids;
    uint64_t n_prompt;
};

static int on_prefill(void *context, uint64_t n_done, uint64_t n_total)
{
    struct context *speed = context;
    job_show(&speed->progress, "prefill", n_total ? (double)n_done / (double)n_total : 0, 0);
    return 0;
}

/* n tokens from `at` on, a decode step each. */
static int decode(struct context *speed, uint64_t session, uint64_t at, uint32_t n, struct hcattn_score_done *ret_done,
                  struct hcattn_error *error)
{
    struct hcattn_score score = {
        .session = session, .at = at, .from = at, .input = {.ids = speed->ids + at, .n_ids = n, .no_bos = true}};
    return hcattn_score(speed->client, &score, NULL, CALL_MS, ret_done, error);
}

static int describe(struct context *speed, uint64_t session, struct eval_speed *ret_speed, struct hcattn_error *error)
{
    struct hcattn_description description;
    int result = hcattn_describe_session(speed->client, session, CALL_MS, &description, error);
    if (result < 0)
        return result;
    double bytes = 0;
    for (size_t i = 0; i < description.counts.n_reads; i++)
        bytes += (double)description.counts.reads[i].bytes;
    if (description.counts.n_steps)
        ret_speed->store_bytes = bytes / (double)description.counts.n_steps;
    ret_speed->key_bytes = (double)description.counts.key_bytes;
    hcattn_description_free(&description);
    return 0;
}

static int measure_policy(struct context *speed, uint64_t source, const char *policy, struct eval_speed *ret_speed,
                          struct hcattn_error *error)
{
    struct hcattn_fork fork = {.session = source, .ephemeral = true, .idle_timeout_s = IDLE_S, .policy = policy};
    struct hcattn_forked forked;
    struct hcattn_score_done done;
    int result = hcattn_fork(speed->client, &fork, CALL_MS, &forked, error);
    if (result < 0)
        return result;
    struct eval_speed measured = {.measured = true};
    result = decode(speed, forked.session, speed->n_prompt, N_WARM, &done, error);
    if (!result)
        result = decode(speed, forked.session, speed->n_prompt + N_WARM, N_STEPS, &done, error);
    if (!result)
        result = describe(speed, forked.session, &measured, error);
    if (!result && done.timings.n_decode) {
        measured.time_us = (double)done.timings.decode_us / (double)done.timings.n_decode;
        measured.store_wait_us = (double)done.timings.store_wait_us / (double)done.timings.n_decode;
        *ret_speed = measured;
    }
    struct hcattn_error ignored;
    hcattn_close_session(speed->client, forked.session, CLOSE_MS, NULL, &ignored);
    return result;
}

/* Whatever else comes is of one policy. */
static bool ends_all(int result)
{
    return result == -ECANCELED || result == -ENOTCONN || result == -ETIMEDOUT || result == -EPROTO;
}

static bool is_wanted(const struct hcattn_eval_row *row, const struct hcattn_text *text)
{
    return !row->baseline && strcmp(row->text, text->name) == 0;
}

static int measure_policies(struct context *speed, uint64_t source, const struct hcattn_text *text,
                            struct eval_rows *rows, struct hcattn_error *error)
{
    size_t n_done = 0, n_policies = 0;
    for (size_t i = 0; i < rows->n_rows; i++)
        n_policies += is_wanted(&rows->rows[i].row, text);
    for (size_t i = 0; i < rows->n_rows; i++) {
        struct eval_row *row = &rows->rows[i];
        if (!is_wanted(&row->row, text))
            continue;
        job_show(&speed->progress, row->row.preset, (double)n_done++ / (double)n_policies, 0);
        int result = measure_policy(speed, source, row->row.preset, &row->speed, error);
        if (result < 0 && ends_all(result))
            return result;
        if (result < 0) {
            output_progress(false, "%s", "");
            command_fail(0, speed->name, "time per token of %s: %s", row->row.preset, error->sentence);
        }
    }
    return 0;
}

/* What the rows of a text say of its length; NULL: it has none. */
static const struct hcattn_eval_row *row_of(const struct eval_rows *rows, const struct hcattn_text *text)
{
    for (size_t i = 0; i < rows->n_rows; i++)
        if (is_wanted(&rows->rows[i].row, text))
            return &rows->rows[i].row;
    return NULL;
}

static int measure_text(struct context *speed, const struct hcattn_text *text, struct eval_rows *rows,
                        struct hcattn_error *error)
{
    /* Exact tokens would hide what is measured in a short context. */
    struct hcattn_session_config config = {
        .policy = "full", .exact_tokens = HCATTN_EXACT_NONE, .ephemeral = true, .idle_timeout_s = IDLE_S};
    struct hcattn_session session;
    int result = hcattn_open_session(speed->client, &config, CALL_MS, &session, error);
    if (result < 0)
        return result;
    struct hcattn_input input = {.ids = speed->ids, .n_ids = (size_t)speed->n_prompt, .no_bos = true};
    struct hcattn_events events = {.context = speed, .progress = on_prefill};
    result = hcattn_append(speed->client, session.session, &input, 0, &events, CALL_MS, NULL, error);
    if (!result)
        result = measure_policies(speed, session.session, text, rows, error);
    struct hcattn_error ignored;
    hcattn_close_session(speed->client, session.session, CLOSE_MS, NULL, &ignored);
    return result;
}

int eval_speed_measure(struct hcattn *client, const char *name, const struct hcattn_text *text, struct eval_rows *rows,
                       struct hcattn_error *ret_error)
{
    const struct hcattn_eval_row *row = row_of(rows, text);
    if (!row)
        return 0;
    struct context speed = {.client = client, .name = name, .n_prompt = row->context - row->tail};
    snprintf(speed.what, sizeof(speed.what), "time per token, %.80s", text->name);
    job_events(&speed.progress, speed.what);
    struct hcattn_tokens tokens;
    struct hcattn_input input = {.text = text->text};
    int result = hcattn_tokenize(client, &input, CALL_MS, &tokens, ret_error);
    if (result < 0)
        return result;
    if (row->tail < row->context && tokens.n_ids >= row->context && row->tail >= N_WARM + N_STEPS) {
        speed.ids = tokens.ids;
        result = measure_text(&speed, text, rows, ret_error);
    }
    hcattn_tokens_free(&tokens);
    output_progress(false, "%s", "");
    return result;
}
