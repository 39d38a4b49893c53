/* statistics.c - see statistics.h. */
#include "client/command/statistics.h"
#include "client/command/command.h"
#include "client/command/job.h"
#include "client/command/output.h"

#define NAME "hcattn statistics"

static const struct option_spec specs[] = {
    JOB_TEXT_OPTION("gather them on this text"),
    {.name = "again", .kind = OPTION_FLAG, .help = "although there are some"},
    COMMAND_CLIENT_OPTIONS,
};

static const struct options_table table = {
    .program = NAME,
    .summary = "Gathers the statistics of keys and queries that the policies with pair3, pair2 and pair1 need. The\n"
               "worker keeps them beside the model. Sessions that are open take them when their keys are made anew.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
};

static int gather(struct hcattn *client, const struct options *options, const struct job_texts *texts)
{
    struct hcattn_job_done done;
    struct hcattn_error error;
    struct job_progress progress;
    struct hcattn_job_events events = job_events(&progress, NULL);
    struct hcattn_gather_statistics job = {
        .texts = texts->texts, .n_texts = texts->n_texts, .again = options_flag(options, "again") || texts->n_texts};
    int result = hcattn_gather_statistics(client, &job, &events, JOB_QUIET_MS, &done, &error);
    output_progress(false, "%s", "");
    if (result < 0)
        return command_call_failed(NAME, result, &error);
    output_format("%s\n", done.sentence);
    return output_status();
}

int statistics_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    struct job_texts texts;
    status = job_texts_read(&texts, NAME, options);
    if (!status) {
        struct hcattn *client = command_connect_one(NAME, options, &status);
        if (client)
            status = gather(client, options, &texts);
        command_disconnect(client);
        job_texts_fini(&texts);
    }
    options_free(options);
    return status;
}
