/* codebook.c - see codebook.h. */
#include "client/command/codebook.h"
#include "client/command/command.h"
#include "client/command/job.h"
#include "client/command/output.h"

#include <string.h>

#define NAME "hcattn codebook"

static const char *const groups[] = {"d/2", "d/4", "d/8", NULL};
static const uint32_t group_dims[] = {2, 4, 8};

static const struct option_spec specs[] = {
    JOB_TEXT_OPTION("train on this text"),
    {.name = "pq-groups",
     .kind = OPTION_CHOICE,
     .default_text = "d/2",
     .choices = groups,
     .help = "sub-spaces of a head of d dimensions: d/2 has 2 dimensions in each (pq2), d/4 has 4 (pq4), d/8 has 8"},
    {.name = "centroids",
     .kind = OPTION_U32,
     .default_text = "4096",
     .minimum = 256,
     .maximum = 4096,
     .metavar = "N",
     .help = "of each sub-space, a power of two"},
    {.name = "seed", .kind = OPTION_U64, .default_text = "0", .help = "the same seed makes the same codebook"},
    {.name = "again", .kind = OPTION_FLAG, .help = "although there is one"},
    COMMAND_CLIENT_OPTIONS,
};

static const struct options_table table = {
    .program = NAME,
    .usage = "train",
    .summary = "Trains the codebooks that policies with pqD/C need (D dimensions in a sub-space, C centroids). The\n"
               "worker keeps them beside the model; an interrupted training goes on where it was.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
    .max_positional = 1,
};

static int train(struct hcattn *client, const struct options *options, const struct job_texts *texts)
{
    char sentence[HCATTN_SENTENCE_SIZE];
    struct hcattn_error error;
    struct job_progress progress;
    struct hcattn_job_events events = job_events(&progress, NULL);
    struct hcattn_train_codebook job = {
        .texts = texts->texts,
        .n_texts = texts->n_texts,
        .n_dims = group_dims[options_choice(options, "pq-groups")],
        .n_centroids = options_u32(options, "centroids"),
        .seed = options_u64(options, "seed"),
        .again = options_flag(options, "again"),
    };
    int result = hcattn_train_codebook(client, &job, &events, JOB_QUIET_MS, sentence, &error);
    output_progress(false, "%s", "");
    if (result < 0)
        return command_call_failed(NAME, result, &error);
    output_format("%s\n", sentence);
    return output_status();
}

int codebook_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    uint32_t n_centroids = options_u32(options, "centroids");
    struct job_texts texts = {.n_texts = 0};
    if (options_n_positional(options) != 1 || strcmp(options_positional(options, 0), "train") != 0)
        status = command_fail(COMMAND_USAGE, NAME, "what is to be done? There is: train");
    else if (n_centroids & (n_centroids - 1))
        status = command_fail(COMMAND_USAGE, NAME, "--centroids takes a power of two, not %u", n_centroids);
    else
        status = job_texts_read(&texts, NAME, options);
    if (!status) {
        struct hcattn *client = command_connect(NAME, options, &status);
        if (client)
            status = train(client, options, &texts);
        command_disconnect(client);
    }
    job_texts_fini(&texts);
    options_free(options);
    return status;
}
