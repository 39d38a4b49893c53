/* eval.c - see eval.h: options, and what is done one after the other. */
#include "client/command/eval.h"
#include "client/command/command.h"
#include "client/command/eval_presets.h"
#include "client/command/eval_rows.h"
#include "client/command/eval_speed.h"
#include "client/command/eval_tasks.h"
#include "client/command/job.h"
#include "client/command/output.h"
#include "client/command/share.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define NAME            "hcattn eval"
#define ASK_MS          10000u
#define DEFAULT_PRESETS "default,quality,small,tiny"
#define BLOCK_TOKENS    64u

static const struct option_spec specs[] = {
    {.name = "text",
     .kind = OPTION_STRING,
     .metavar = "FILE",
     .repeats = true,
     .help = "of at least --context tokens, UTF-8; may be given several times; the texts that are installed with this "
             "program if not given"},
    {.name = "context",
     .kind = OPTION_U32,
     .default_text = "4096",
     .minimum = 128,
     .maximum = 4194304,
     .metavar = "N",
     .help = "tokens of each text that are used; whole blocks of 64"},
    {.name = "tail",
     .kind = OPTION_U32,
     .default_text = "256",
     .minimum = 64,
     .maximum = 4194304,
     .metavar = "N",
     .help = "the last N of them are decoded and compared; whole blocks of 64"},
    {.name = "presets",
     .kind = OPTION_STRING,
     .default_text = DEFAULT_PRESETS,
     .metavar = "A,B,...|all",
     .repeats = true,
     .help = "policies (see --policy of hcattn generate) and baselines (see docs/quality.md), with commas between "
             "them; all: all presets and baselines"},
    {.name = "attention", .kind = OPTION_FLAG, .help = "look into the attention of each layer, too; takes longer"},
    {.name = "speed",
     .kind = OPTION_FLAG,
     .default_text = "yes",
     .help = "measure the time of a decode step with sessions of the service"},
    {.name = "tasks",
     .kind = OPTION_STRING,
     .metavar = "A,B,...|all",
     .help = "tasks with known answers, done greedily by full attention and by each preset: niah_single, "
             "niah_multikey_2, niah_multikey_3, niah_multivalue, vt, cwe, fwe, kv, copy"},
    {.name = "lengths",
     .kind = OPTION_STRING,
     .default_text = "512,1k,2k,4k",
     .metavar = "N,N,...",
     .help = "of the tasks, in tokens with the answer; k: 1024"},
    {.name = "samples",
     .kind = OPTION_U32,
     .default_text = "5",
     .minimum = 1,
     .maximum = 1000,
     .help = "of each task and length"},
    {.name = "divergence",
     .kind = OPTION_FLAG,
     .default_text = "yes",
     .help = "compare on texts; with --no-divergence tasks are all that is done"},
    {.name = "json", .kind = OPTION_FLAG, .help = "one JSON object"},
    {.name = "out",
     .kind = OPTION_STRING,
     .metavar = "DIR",
     .help = "write eval.json, quality.svg and kept-PRESET.svg there (the plots need python3-matplotlib)"},
    COMMAND_CLIENT_OPTIONS,
};

static const struct options_table table = {
    .program = NAME,
    .summary =
        "Compares presets with full attention on texts: divergence, memory on the device, rows read, time. A\n"
        "running service does it beside its sessions; what a preset needs (statistics, codebooks) is made first.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
};

struct eval {
    struct hcattn *client;
    const struct options *options;
    struct job_texts texts;
    struct eval_presets presets;
    struct eval_rows rows;
    struct eval_tasks tasks;
    struct job_progress progress;
    struct hcattn_job_events show; /* of the progress line */
    bool no_memory;
};

/* Exit status, told. */
static int get_texts(struct eval *eval)
{
    char folder[4096];
    int status = job_texts_read(&eval->texts, NAME, eval->options);
    if (status || eval->texts.n_texts)
        return status;
    if (share_find("eval-texts", folder, sizeof(folder)) < 0 ||
        job_texts_read_folder(&eval->texts, NAME, folder, &status) < 0)
        return command_fail(COMMAND_USAGE, NAME, "no texts are installed with this program: name one with --text");
    return status;
}

static int get_presets(struct eval *eval)
{
    size_t n = options_n_strings(eval->options, "presets");
    int result = 0;
    for (size_t i = 0; !result && i < n; i++)
        result = eval_presets_add(&eval->presets, options_string_at(eval->options, "presets", i));
    if (result == -EINVAL)
        return command_fail(COMMAND_USAGE, NAME, "--presets: a name between two commas is empty");
    return result ? command_fail(COMMAND_ERROR, NAME, "no memory") : 0;
}

/* Exit status, told. */
static int get_tasks(struct eval *eval)
{
    const char *list = options_string(eval->options, "tasks"), *wrong = NULL;
    if (!list)
        return options_flag(eval->options, "divergence")
                   ? 0
                   : command_fail(COMMAND_USAGE, NAME, "--no-divergence leaves nothing to do without --tasks");
    int result = eval_tasks_add(&eval->tasks, list, &wrong);
    if (result == -EINVAL)
        return command_fail(COMMAND_USAGE, NAME, "--tasks: there is no task '%.*s'", (int)strcspn(wrong, ","), wrong);
    if (!result)
        result = eval_tasks_add_lengths(&eval->tasks, options_string(eval->options, "lengths"));
    if (result == -EINVAL)
        return command_fail(COMMAND_USAGE, NAME, "--lengths takes numbers of 256 to 4194304 tokens, as in 512,1k,2k");
    if (!result && !eval_tasks_has_policy((const char *const *)eval->presets.names, eval->presets.n_names))
        return command_fail(COMMAND_USAGE, NAME, "--tasks needs a preset that a session can have, other than full");
    return result ? command_fail(COMMAND_ERROR, NAME, "no memory") : 0;
}

static int check_numbers(const struct options *options)
{
    uint32_t context = options_u32(options, "context"), tail = options_u32(options, "tail");
    if (context % BLOCK_TOKENS || tail % BLOCK_TOKENS)
        return command_fail(COMMAND_USAGE, NAME, "--context and --tail take whole blocks of %u tokens", BLOCK_TOKENS);
    if (tail >= context)
        return command_fail(COMMAND_USAGE, NAME, "--tail must be shorter than --context");
    return 0;
}

static int on_progress(void *context, const struct hcattn_job_progress *progress)
{
    struct eval *eval = context;
    return eval->show.progress(eval->show.context, progress);
}

static int on_row(void *context, const struct hcattn_eval_row *row)
{
    struct eval *eval = context;
    if (eval_rows_add(&eval->rows, row) == 0)
        return 0;
    eval->no_memory = true;
    return -1;
}

static int run_job(struct eval *eval)
{
    struct hcattn_error error;
    struct hcattn_evaluate job = {
        .texts = eval->texts.texts,
        .n_texts = eval->texts.n_texts,
        .context = options_u32(eval->options, "context"),
        .tail = options_u32(eval->options, "tail"),
        .presets = (const char *const *)eval->presets.names,
        .n_presets = eval->presets.n_names,
        .attention = options_flag(eval->options, "attention"),
    };
    eval->show = job_events(&eval->progress, NULL);
    struct hcattn_job_events events = {.context = eval, .progress = on_progress, .row = on_row};
    int result = hcattn_evaluate(eval->client, &job, &events, JOB_QUIET_MS, NULL, &error);
    output_progress(false, "%s", "");
    if (eval->no_memory)
        return command_fail(COMMAND_ERROR, NAME, "no memory for the rows");
    return result < 0 ? command_call_failed(NAME, result, &error) : 0;
}

static int measure_speed(struct eval *eval)
{
    struct hcattn_error error;
    for (size_t i = 0; i < eval->texts.n_texts; i++) {
        int result = eval_speed_measure(eval->client, NAME, &eval->texts.texts[i], &eval->rows, &error);
        output_progress(false, "%s", "");
        if (result < 0)
            return command_call_failed(NAME, result, &error);
    }
    return 0;
}

static int run_tasks(struct eval *eval)
{
    struct hcattn_error error;
    int result = eval_tasks_run(&eval->tasks, eval->client, NAME, (const char *const *)eval->presets.names,
                                eval->presets.n_names, options_u32(eval->options, "samples"), &error);
    return result < 0 ? command_call_failed(NAME, result, &error) : 0;
}

static int write_folder(const char *folder, const json_t *json, bool plot)
{
    char path[4096];
    if (mkdir(folder, 0777) < 0 && errno != EEXIST)
        return command_fail(COMMAND_ERROR, NAME, "cannot make the folder %s: %s", folder, strerror(errno));
    int n = snprintf(path, sizeof(path), "%s/eval.json", folder);
    errno = 0;
    if (n < 0 || (size_t)n >= sizeof(path) ||
        json_dump_file(json, path, JSON_INDENT(2) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(9)) < 0)
        return command_fail(COMMAND_ERROR, NAME, "cannot write %s: %s", path, strerror(errno ? errno : ENAMETOOLONG));
    return plot ? share_plot(NAME, path, folder) : 0;
}

/* What there is, also after a failure: it may have taken long. */
static int show(struct eval *eval)
{
    struct hcattn_stats stats = {.n_ctx = 0};
    struct hcattn_error ignored;
    const char *folder = options_string(eval->options, "out");
    bool known = hcattn_stats(eval->client, ASK_MS, &stats, &ignored) == 0;
    json_t *json = eval_rows_json(&eval->rows, known ? stats.model : NULL);
    hcattn_stats_free(&stats);
    if (json && eval->tasks.n_tasks)
        json_object_set_new(json, "tasks", eval_tasks_json(&eval->tasks));
    if (!json)
        return command_fail(COMMAND_ERROR, NAME, "no memory");
    int status = folder ? write_folder(folder, json, eval->rows.n_rows) : 0;
    if (options_flag(eval->options, "json"))
        output_json(json_incref(json));
    else if (eval->rows.n_rows)
        eval_rows_table(&eval->rows);
    if (!options_flag(eval->options, "json") && eval->tasks.n_rows) {
        output_text(eval->rows.n_rows ? "\n" : "");
        eval_tasks_table(&eval->tasks);
    }
    json_decref(json);
    return status ? status : output_status();
}

static int evaluate(struct eval *eval)
{
    struct job_needs needs = {.n_codebooks = 0};
    for (size_t i = 0; i < eval->presets.n_names; i++)
        job_need(&needs, eval->presets.names[i]);
    int status = job_meet(&needs, NAME, eval->client);
    bool divergence = options_flag(eval->options, "divergence");
    if (!status && divergence)
        status = run_job(eval);
    if (!status && divergence && options_flag(eval->options, "speed"))
        status = measure_speed(eval);
    if (!status && eval->tasks.n_tasks)
        status = run_tasks(eval);
    int shown = eval->rows.n_rows || eval->tasks.n_rows ? show(eval) : 0;
    return status ? status : shown;
}

int eval_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    struct eval eval = {.options = options};
    status = check_numbers(options);
    if (!status)
        status = get_presets(&eval);
    if (!status)
        status = get_tasks(&eval);
    if (!status && options_flag(options, "divergence"))
        status = get_texts(&eval);
    if (!status)
        eval.client = command_connect(NAME, options, &status);
    if (eval.client)
        status = evaluate(&eval);
    command_disconnect(eval.client);
    eval_rows_fini(&eval.rows);
    eval_tasks_fini(&eval.tasks);
    eval_presets_fini(&eval.presets);
    job_texts_fini(&eval.texts);
    options_free(options);
    return status;
}
