/*
 * eval.c - the job behind `hcattn eval`: its stages, and the rows that come of them. See eval.h.
 *
 * Everything that was asked for is looked at before anything is computed: texts are tokenized and methods are made first. The
 * methods of a text live from there on, since some watch its pass; what they need for the tail they take when it begins, and
 * each goes when its row is there.
 *
 * Threads    the engine's, after eval_job_new().
 */
#include "gpu-worker/eval/eval.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "gpu-worker/eval/eval_compare.h"
#include "gpu-worker/eval/eval_progress.h"
#include "gpu-worker/model/tokenizer.h"
#include "gpu-worker/network.h"
#include "proto/policy.h"

enum stage { CHECK_TEXTS, MAKE_METHODS, RUN_PASS, KEEP_FULL, RUN_TAIL, COMPARE, DONE };

/* The tokens of a text that are used: `context` of them, and the one behind if there is one. */
struct eval_text {
    uint32_t *ids;
    uint32_t n_ids;
};

struct eval {
    struct eval_request request;
    struct eval_text *texts; /* [n_texts] */
    struct eval_progress progress;
    enum stage stage;
    uint32_t text, preset, position; /* at hand; position: of the tail */
    struct method **methods;         /* [n_presets]: of the text at hand; NULL: its row is there */
    struct pass *pass;
    struct pass_tail *tail;
    struct eval_compare *compare;
    float *logprobs; /* [n_vocab] */
    uint64_t spent_us;
    char phase[128];
    /* the row that was reported last */
    struct eval_row row;
    char meaning[sizeof((struct method *)0)->meaning];
    float *kept_by_head;                /* [n_layers][n_kv_heads] */
    struct method_attention *attention; /* [n_layers] */
};

/* What people typed stays one printable line. */
static void make_printable(char *text)
{
    for (; *text != '\0'; text++)
        *text = *text < ' ' || *text > '~' ? '?' : *text;
}

static void end_text(struct eval *eval)
{
    for (uint32_t i = 0; eval->methods != NULL && i < eval->request.n_presets; i++)
        eval->methods[i] = method_free(eval->methods[i]);
    eval->tail = pass_tail_free(eval->tail);
    eval->pass = pass_free(eval->pass);
    eval->compare = eval_compare_free(eval->compare);
}

static void free_request(struct eval_request *request)
{
    job_texts_free(request->texts, request->n_texts);
    for (uint32_t i = 0; request->presets != NULL && i < request->n_presets; i++)
        free(request->presets[i]);
    free(request->presets);
    *request = (struct eval_request){0};
}

static void free_eval(void *state)
{
    struct eval *eval = state;
    if (eval == NULL)
        return;
    end_text(eval);
    for (uint32_t i = 0; eval->texts != NULL && i < eval->request.n_texts; i++)
        free(eval->texts[i].ids);
    free(eval->texts);
    free(eval->methods);
    eval_progress_fini(&eval->progress);
    free(eval->logprobs);
    free(eval->kept_by_head);
    free(eval->attention);
    free_request(&eval->request);
    free(eval);
}

/* ---- before anything is computed ---- */

/* Room for what depends on the model. */
static int make_room(struct eval *eval, const struct job_tools *tools)
{
    const struct model_shape *shape = &tools->network->shape;
    eval->logprobs = malloc(shape->n_vocab * sizeof *eval->logprobs);
    eval->kept_by_head = calloc((size_t)shape->n_layers * shape->n_kv_heads, sizeof *eval->kept_by_head);
    eval->attention = calloc(shape->n_layers, sizeof *eval->attention);
    return eval->logprobs == NULL || eval->kept_by_head == NULL || eval->attention == NULL ? -ENOMEM : 0;
}

static int check_text(struct eval *eval, const struct job_tools *tools, char *sentence)
{
    const struct job_text *text = &eval->request.texts[eval->text];
    struct eval_text *ret_text = &eval->texts[eval->text];
    const uint32_t context = eval->request.context;
    uint32_t *ids;
    size_t n_ids;
    int error = tokenizer_encode(tools->tokenizer, text->text, strlen(text->text), TOKENIZER_ADD_BOS, &ids, &n_ids);
    if (error == -EILSEQ || error == -E2BIG) {
        snprintf(sentence, JOB_SENTENCE_SIZE, "text \"%.80s\" is %s", text->name,
                 error == -EILSEQ ? "not UTF-8" : "too long");
        make_printable(sentence);
        return -EINVAL;
    }
    if (error != 0)
        return error;
    if (n_ids < context) {
        snprintf(sentence, JOB_SENTENCE_SIZE, "text \"%.80s\" has %zu tokens, and a context of %u was asked for",
                 text->name, n_ids, context);
        make_printable(sentence);
        free(ids);
        return -E2BIG;
    }
    ret_text->ids = ids;
    ret_text->n_ids = n_ids > context ? context + 1 : context;
    return 0;
}

static int make_methods(struct eval *eval, const struct job_tools *tools, char *sentence)
{
    for (uint32_t i = 0; i < eval->request.n_presets; i++) {
        int error = method_new(eval->request.presets[i], tools, eval->request.context, &eval->methods[i], sentence,
                               JOB_SENTENCE_SIZE);
        if (error != 0)
            return error;
        eval->methods[i]->looks = eval->request.attention;
    }
    return 0;
}

/* ---- a text ---- */

static int visit(void *context, const struct pass_layer *layer)
{
    struct eval *eval = context;
    for (uint32_t i = 0; i < eval->request.n_presets; i++) {
        struct method *method = eval->methods[i];
        int error = method->ops->observe == NULL
                        ? 0
                        : method->ops->observe(method, layer, eval->request.context - eval->request.tail);
        if (error != 0)
            return error;
    }
    return 0;
}

static int attend(void *context, const struct pass_tail_layer *layer)
{
    struct method *method = context;
    return method->ops->attend(method, layer);
}

static int begin_pass(struct eval *eval, const struct job_tools *tools)
{
    const struct eval_text *text = &eval->texts[eval->text];
    const uint32_t context = eval->request.context, tail = eval->request.tail, second = context - tail + 1;
    const struct pass_options options = {.keep_rows = true, .visit = visit, .context = eval};
    int error =
        eval_compare_new(tail, tools->network->shape.n_vocab, text->ids + second, text->n_ids - second, &eval->compare);
    return error != 0 ? error : pass_new(tools, &options, text->ids, context, &eval->pass);
}

static void make_row(struct eval *eval, const struct job_tools *tools)
{
    const struct model_shape *shape = &tools->network->shape;
    const struct method *method = eval->methods[eval->preset];
    const size_t n_heads = (size_t)shape->n_layers * shape->n_kv_heads;
    const double f16_bytes = (double)n_heads * shape->head_dim * 2 * 2;
    struct eval_compared compared;
    struct method_account account;
    eval_compare_finish(eval->compare, &compared);
    method->ops->account(method, &account);
    double kept = 0;
    for (size_t i = 0; i < n_heads; i++) {
        const double share = method->n_old == 0 ? 0 : (double)method->n_kept[i] / (double)method->n_old;
        eval->kept_by_head[i] = (float)share;
        kept += share / (double)n_heads;
    }
    bool was_looked = false;
    for (uint32_t layer = 0; layer < shape->n_layers; layer++) {
        struct method_attention attention = method->attention[layer];
        const double n = attention.n == 0 ? 1 : (double)attention.n;
        was_looked |= attention.n > 0;
        attention.recall /= n;
        attention.mass /= n;
        attention.output_error = sqrt(attention.output_error / n);
        attention.tail_error /= n;
        eval->attention[layer] = attention;
    }
    snprintf(eval->meaning, sizeof eval->meaning, "%s", method->meaning);
    eval->row = (struct eval_row){
        .index = eval->text * eval->request.n_presets + eval->preset,
        .text = eval->request.texts[eval->text].name,
        .preset = eval->request.presets[eval->preset],
        .meaning = eval->meaning,
        .baseline = method->baseline,
        .context = eval->request.context,
        .tail = eval->request.tail,
        .n_layers = shape->n_layers,
        .n_kv_heads = shape->n_kv_heads,
        .kld_mean = compared.kld_mean,
        .kld_p99 = compared.kld_p99,
        .top1 = compared.top1,
        .perplexity = compared.perplexity,
        .full_perplexity = compared.full_perplexity,
        .kept = kept,
        .kept_by_head = eval->kept_by_head,
        .device_bytes_fraction = account.device_bytes / f16_bytes,
        .device_bytes_measured = account.device_measured / f16_bytes,
        .exact_bytes = account.exact_bytes,
        .table_bytes = account.table_bytes,
        .store_bytes = account.store_bytes,
        .attention = was_looked ? eval->attention : NULL,
    };
}

/* ---- stages ---- */

static void enter(struct eval *eval, enum stage stage)
{
    eval->stage = stage;
    eval->position = 0;
}

static int keep_full(struct eval *eval)
{
    const uint32_t first = eval->request.context - eval->request.tail;
    int r = pass_logprobs(eval->pass, NULL, first + eval->position, eval_compare_full(eval->compare, eval->position));
    if (r < 0)
        return r;
    if (++eval->position == eval->request.tail)
        enter(eval, RUN_TAIL);
    return 0;
}

static int run_tail(struct eval *eval)
{
    if (eval->tail == NULL)
        return pass_tail_new(eval->pass, eval->request.context - eval->request.tail, attend,
                             eval->methods[eval->preset], &eval->tail);
    int r = pass_tail_advance(eval->tail);
    if (r == 0)
        enter(eval, COMPARE);
    return r < 0 ? r : 0;
}

/* Sets *ret_row with the last position. */
static int compare(struct eval *eval, const struct job_tools *tools, const struct eval_row **ret_row)
{
    const uint32_t first = eval->request.context - eval->request.tail;
    int r = pass_logprobs(eval->pass, eval->tail, first + eval->position, eval->logprobs);
    if (r < 0)
        return r;
    eval_compare_add(eval->compare, eval->position, eval->logprobs);
    if (++eval->position < eval->request.tail)
        return 0;
    make_row(eval, tools);
    *ret_row = &eval->row;
    eval->tail = pass_tail_free(eval->tail);
    eval->methods[eval->preset] = method_free(eval->methods[eval->preset]);
    if (++eval->preset < eval->request.n_presets) {
        enter(eval, RUN_TAIL);
        return 0;
    }
    end_text(eval);
    eval->preset = 0;
    enter(eval, ++eval->text < eval->request.n_texts ? MAKE_METHODS : DONE);
    return 0;
}

/* A little work. 0, or what ends the job. */
static int work(struct eval *eval, const struct job_tools *tools, const struct eval_row **ret_row, char *sentence)
{
    int r = 0;
    switch (eval->stage) {
    case CHECK_TEXTS:
        if (eval->text == 0 && eval->request.context > tools->n_ctx) {
            snprintf(sentence, JOB_SENTENCE_SIZE, "a context of %u tokens was asked for; this worker has %u",
                     eval->request.context, tools->n_ctx);
            return -EINVAL;
        }
        if (eval->logprobs == NULL && (r = make_room(eval, tools)) < 0)
            return r;
        r = check_text(eval, tools, sentence);
        if (r == 0 && ++eval->text == eval->request.n_texts) {
            eval->text = 0;
            enter(eval, MAKE_METHODS);
        }
        return r;
    case MAKE_METHODS:
        r = make_methods(eval, tools, sentence);
        if (r == 0)
            r = begin_pass(eval, tools);
        if (r == 0)
            enter(eval, RUN_PASS);
        return r;
    case RUN_PASS:
        r = pass_advance(eval->pass);
        if (r == 0)
            enter(eval, KEEP_FULL);
        return r < 0 ? r : 0;
    case KEEP_FULL:
        return keep_full(eval);
    case RUN_TAIL:
        return run_tail(eval);
    case COMPARE:
        return compare(eval, tools, ret_row);
    case DONE:
        break;
    }
    return 0;
}

static double done_of_stage(const struct eval *eval)
{
    switch (eval->stage) {
    case RUN_PASS:
        return pass_done(eval->pass);
    case RUN_TAIL:
        return eval->tail == NULL ? 0 : pass_tail_done(eval->tail);
    case KEEP_FULL:
    case COMPARE:
        return (double)eval->position / eval->request.tail;
    default:
        return 0;
    }
}

static void describe(struct eval *eval)
{
    const struct eval_request *request = &eval->request;
    if (eval->stage == CHECK_TEXTS || eval->stage == DONE)
        snprintf(eval->phase, sizeof eval->phase, "%s", eval->stage == DONE ? "done" : "reading the texts");
    else
        snprintf(eval->phase, sizeof eval->phase, "%.48s: %.64s", request->texts[eval->text].name,
                 eval->stage < RUN_TAIL ? "full attention" : request->presets[eval->preset]);
    make_printable(eval->phase);
}

static int advance(void *state, const struct job_tools *tools, struct job_report *report, char *sentence)
{
    struct eval *eval = state;
    const uint64_t start = clock_now_us();
    uint64_t before = start, now = start;
    *report = (struct job_report){.phase = eval->phase};
    do {
        const enum stage stage = eval->stage;
        sentence[0] = '\0';
        int error = work(eval, tools, &report->row, sentence);
        if (error != 0) {
            describe(eval);
            if (sentence[0] == '\0')
                snprintf(sentence, JOB_SENTENCE_SIZE, "%s: %s", eval->phase,
                         error == -ENOMEM ? "no memory" : strerror(-error));
            return error;
        }
        now = clock_now_us();
        if (stage >= RUN_PASS)
            eval_progress_work(&eval->progress, now - before);
        if (stage >= RUN_PASS && eval->stage != stage) /* each such stage is a part, in this order */
            eval_progress_next(&eval->progress);
        before = now;
    } while (eval->stage != DONE && report->row == NULL && now - start < tools->slice_us);
    eval->spent_us += now - start;
    describe(eval);
    report->done = eval_progress_done(&eval->progress, done_of_stage(eval));
    if (eval->stage != DONE)
        return 1;
    snprintf(sentence, JOB_SENTENCE_SIZE, "%u %s, %u %s, in %.1f s", eval->request.n_texts,
             eval->request.n_texts == 1 ? "text" : "texts", eval->request.n_presets,
             eval->request.n_presets == 1 ? "preset" : "presets", (double)eval->spent_us * 1e-6);
    return 0;
}

static const struct job_ops ops = {.name = "evaluation", .advance = advance, .free = free_eval};

static bool is_blocks(uint32_t n)
{
    return n > 0 && n % LAYOUT_BLOCK_TOKENS == 0;
}

static int check_request(const struct eval_request *request, char *sentence)
{
    if (request->n_texts == 0 || request->n_presets == 0) {
        snprintf(sentence, JOB_SENTENCE_SIZE, "an evaluation needs at least one text and one preset");
        return -EINVAL;
    }
    if (!is_blocks(request->context) || !is_blocks(request->tail) || request->tail >= request->context) {
        snprintf(sentence, JOB_SENTENCE_SIZE,
                 "context %u, tail %u: both are multiples of %u tokens, and the tail is shorter than the context",
                 request->context, request->tail, LAYOUT_BLOCK_TOKENS);
        return -EINVAL;
    }
    return 0;
}

/* Each preset once. */
static int add_preset(struct eval_request *request, const char *name)
{
    for (uint32_t i = 0; i < request->n_presets; i++)
        if (strcmp(request->presets[i], name) == 0)
            return 0;
    char **presets = realloc(request->presets, (request->n_presets + 1) * sizeof *presets);
    if (presets == NULL)
        return -ENOMEM;
    request->presets = presets;
    presets[request->n_presets] = strdup(name);
    return presets[request->n_presets] == NULL ? -ENOMEM : (request->n_presets++, 0);
}

/* Puts presets and baselines in the place of "all". */
static int expand_all(struct eval_request *request)
{
    struct eval_request expanded = {0};
    int error = 0;
    for (uint32_t i = 0; error == 0 && i < request->n_presets; i++) {
        const char *name, *meaning;
        if (strcmp(request->presets[i], "all") != 0) {
            error = add_preset(&expanded, request->presets[i]);
            continue;
        }
        for (uint32_t k = 0; error == 0 && (name = policy_preset(k, &meaning)) != NULL; k++)
            error = add_preset(&expanded, name);
        for (uint32_t k = 0; error == 0 && (name = methods_baseline_name(k)) != NULL; k++)
            error = add_preset(&expanded, name);
    }
    if (error == 0) {
        char **before = request->presets;
        const uint32_t n_before = request->n_presets;
        request->presets = expanded.presets;
        request->n_presets = expanded.n_presets;
        expanded.presets = before;
        expanded.n_presets = n_before;
    }
    free_request(&expanded);
    return error;
}

int eval_job_new(struct eval_request *request, struct job *ret_job, char *sentence)
{
    int error = check_request(request, sentence);
    error = error == 0 ? expand_all(request) : error;
    struct eval *eval = error != 0 ? NULL : calloc(1, sizeof *eval);
    if (eval == NULL) {
        free_request(request);
        return error != 0 ? error : -ENOMEM;
    }
    eval->request = *request;
    *request = (struct eval_request){0};
    eval->texts = calloc(eval->request.n_texts, sizeof *eval->texts);
    eval->methods = calloc(eval->request.n_presets, sizeof(struct method *));
    if (eval->texts == NULL || eval->methods == NULL ||
        eval_progress_init(&eval->progress, eval->request.n_texts, eval->request.n_presets) < 0) {
        free_eval(eval);
        return -ENOMEM;
    }
    *ret_job = (struct job){.ops = &ops, .state = eval};
    return 0;
}
