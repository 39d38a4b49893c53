/* codebook.c - see codebook.h. */
#include "client/command/codebook.h"
#include "client/command/command.h"
#include "client/command/job.h"
#include "client/command/output.h"
#include "common/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
    {.name = "out", .kind = OPTION_STRING, .metavar = "FILE", .help = "copies the codebook to this file, too"},
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

/* In pieces. -errno. */
static int copy_bytes(int from, int to)
{
    enum { PIECE_BYTES = 1 << 20 };
    char *piece = malloc(PIECE_BYTES);
    int result = piece ? 0 : -ENOMEM;
    while (!result) {
        ssize_t n = read(from, piece, PIECE_BYTES);
        if (n == 0)
            break;
        if (n < 0 && errno != EINTR)
            result = -errno;
        if (n > 0)
            result = file_write_all(to, piece, (size_t)n);
    }
    free(piece);
    return result;
}

/* What the worker keeps is whole: it is written elsewhere and renamed. So is the copy. Exit status, told. */
static int copy_out(const char *path, const char *out)
{
    char partial[4096];
    if (!*path)
        return command_fail(COMMAND_ERROR, NAME, "--out %s: the worker has no directory to keep codebooks in", out);
    if ((size_t)snprintf(partial, sizeof(partial), "%s.partial", out) >= sizeof(partial))
        return command_fail(COMMAND_USAGE, NAME, "--out: the path is too long");
    int from = open(path, O_RDONLY | O_CLOEXEC);
    if (from < 0)
        return command_fail(COMMAND_ERROR, NAME, "the worker keeps the codebook in %s, which cannot be read here: %s",
                            path, strerror(errno));
    int to = open(partial, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    int result = to < 0 ? -errno : copy_bytes(from, to);
    if (!result && fsync(to) < 0)
        result = -errno;
    if (to >= 0 && close(to) < 0 && !result)
        result = -errno;
    if (!result && rename(partial, out) < 0)
        result = -errno;
    if (result < 0 && to >= 0)
        unlink(partial);
    close(from);
    return result ? command_fail(COMMAND_ERROR, NAME, "--out %s: %s", out, strerror(-result)) : 0;
}

static int train(struct hcattn *client, const struct options *options, const struct job_texts *texts)
{
    struct hcattn_job_done done;
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
    int result = hcattn_train_codebook(client, &job, &events, JOB_QUIET_MS, &done, &error);
    output_progress(false, "%s", "");
    if (result < 0)
        return command_call_failed(NAME, result, &error);
    output_format("%s\n", done.sentence);
    const char *out = options_string(options, "out");
    int status = out && *out ? copy_out(done.path, out) : 0;
    if (status)
        return status;
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
        struct hcattn *client = command_connect_one(NAME, options, &status);
        if (client)
            status = train(client, options, &texts);
        command_disconnect(client);
    }
    job_texts_fini(&texts);
    options_free(options);
    return status;
}
