/* job.c - see job.h. */
#include "client/command/job.h"
#include "client/command/output.h"
#include "common/clock.h"
#include "proto/policy.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BAR_CHARACTERS 24
#define LINE_US        30000000u /* between two lines where they stay */

/* ---- texts ---- */

void job_texts_fini(struct job_texts *texts)
{
    for (size_t i = 0; i < texts->n_texts; i++) {
        free((char *)texts->texts[i].name);
        free((char *)texts->texts[i].text);
    }
    free(texts->texts);
    *texts = (struct job_texts){.n_texts = 0};
}

static char *short_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *name = strdup(slash && slash[1] ? slash + 1 : path);
    size_t n = name ? strlen(name) : 0;
    if (n > 4 && strcmp(name + n - 4, ".txt") == 0)
        name[n - 4] = '\0';
    return name;
}

static bool has_name(const struct job_texts *texts, const char *name)
{
    for (size_t i = 0; i < texts->n_texts; i++)
        if (strcmp(texts->texts[i].name, name) == 0)
            return true;
    return false;
}

static int read_text(struct job_texts *texts, const char *name, const char *path)
{
    int status = 0;
    char *text = command_text(name, path, true, &status);
    if (!text)
        return status;
    char *shown = short_name(path);
    if (shown && has_name(texts, shown)) {
        free(shown);
        shown = strdup(path);
    }
    struct hcattn_text *grown = realloc(texts->texts, (texts->n_texts + 1) * sizeof(*grown));
    if (grown)
        texts->texts = grown;
    if (!grown || !shown) {
        free(text);
        free(shown);
        return command_fail(COMMAND_ERROR, name, "no memory for the texts");
    }
    texts->texts[texts->n_texts++] = (struct hcattn_text){.name = shown, .text = text};
    return 0;
}

int job_texts_read(struct job_texts *texts, const char *name, const struct options *options)
{
    *texts = (struct job_texts){.n_texts = 0};
    int status = 0;
    for (size_t i = 0; !status && i < options_n_strings(options, "text"); i++)
        status = read_text(texts, name, options_string_at(options, "text", i));
    if (status)
        job_texts_fini(texts);
    return status;
}

static int is_text(const struct dirent *entry)
{
    size_t n = strlen(entry->d_name);
    return n > 4 && strcmp(entry->d_name + n - 4, ".txt") == 0;
}

int job_texts_read_folder(struct job_texts *texts, const char *name, const char *folder, int *ret_status)
{
    struct dirent **entries = NULL;
    *texts = (struct job_texts){.n_texts = 0};
    int n = scandir(folder, &entries, is_text, alphasort), status = 0;
    for (int i = 0; i < n; i++) {
        char path[4096];
        snprintf(path, sizeof(path), "%.3000s/%.255s", folder, entries[i]->d_name);
        if (!status)
            status = read_text(texts, name, path);
        free(entries[i]);
    }
    free(entries);
    if (status)
        job_texts_fini(texts);
    *ret_status = status;
    return n > 0 ? 0 : -ENOENT;
}

/* ---- progress ---- */

const char *job_left(uint64_t left_us, char text[JOB_LEFT_SIZE])
{
    uint64_t s = (left_us + 999999) / 1000000;
    if (s >= 3600)
        snprintf(text, JOB_LEFT_SIZE, "%" PRIu64 " h %02" PRIu64 " min", s / 3600 < 10000 ? s / 3600 : 9999,
                 s % 3600 / 60);
    else if (s >= 60)
        snprintf(text, JOB_LEFT_SIZE, "%" PRIu64 " min %02" PRIu64 " s", s / 60, s % 60);
    else
        snprintf(text, JOB_LEFT_SIZE, "%" PRIu64 " s", s);
    return text;
}

void job_show(struct job_progress *progress, const char *phase, double done, uint64_t left_us)
{
    char bar[BAR_CHARACTERS + 1], left[JOB_LEFT_SIZE + 8] = "", time[JOB_LEFT_SIZE], words[64];
    int percent = (int)(100 * done), filled = (int)(BAR_CHARACTERS * done);
    size_t n = 0;
    for (; phase[n] && n + 1 < sizeof(words); n++) /* a peer's words do nothing to the terminal */
        words[n] = phase[n] < ' ' || phase[n] > '~' ? '?' : phase[n];
    words[n] = '\0';
    if (left_us)
        snprintf(left, sizeof(left), ", %s left", job_left(left_us, time));
    const char *what = progress->what ? progress->what : "", *colon = progress->what && words[0] ? ": " : "";
    if (progress->terminal) {
        for (int i = 0; i < BAR_CHARACTERS; i++)
            bar[i] = i < filled ? '#' : '.';
        bar[BAR_CHARACTERS] = '\0';
        output_progress(false, "[%s] %3d %%%s  %s%s%s", bar, percent, left, what, colon, words);
        return;
    }
    /* Many lines of it help nobody: one for each tenth, and one now and then. */
    if (percent / 10 == progress->shown_percent / 10 && clock_remaining_us(progress->next_us) > 0)
        return;
    progress->shown_percent = percent;
    progress->next_us = clock_deadline_us(LINE_US);
    output_progress(false, "%s%s%s%s%d %%%s", what, colon, words, *what || words[0] ? ": " : "", percent, left);
}

static int on_progress(void *context, const struct hcattn_job_progress *progress)
{
    job_show(context, progress->phase, progress->done, progress->left_us);
    return 0;
}

struct hcattn_job_events job_events(struct job_progress *progress, const char *what)
{
    *progress = (struct job_progress){.what = what, .terminal = output_is_terminal(), .shown_percent = -100};
    return (struct hcattn_job_events){.context = progress, .progress = on_progress};
}

/* ---- what is needed ---- */

static void need_codebook(struct job_needs *needs, uint32_t n_dims, uint32_t n_centroids)
{
    for (size_t i = 0; i < needs->n_codebooks; i++)
        if (needs->codebooks[i].n_dims == n_dims && needs->codebooks[i].n_centroids == n_centroids)
            return;
    if (needs->n_codebooks < JOB_MAX_CODEBOOKS)
        needs->codebooks[needs->n_codebooks++] = (struct job_codebook){n_dims, n_centroids};
}

void job_need(struct job_needs *needs, const char *preset)
{
    struct policy_terms terms;
    char sentence[256];
    if (strcmp(preset, "all") == 0) {
        const char *meaning, *name;
        for (uint32_t i = 0; (name = policy_preset(i, &meaning)) != NULL; i++)
            job_need(needs, name);
        return;
    }
    if (policy_parse(preset, &terms, sentence, sizeof(sentence)) < 0)
        return;
    needs->statistics |= policy_codec_needs_statistics(terms.codec);
    if (terms.codec == POLICY_CODEC_PQ)
        need_codebook(needs, terms.n_dims, terms.n_centroids);
}

int job_meet(const struct job_needs *needs, const char *name, struct hcattn *client)
{
    struct job_progress progress;
    struct hcattn_error error;
    if (needs->statistics) {
        struct hcattn_gather_statistics gather = {.n_texts = 0};
        struct hcattn_job_events events = job_events(&progress, "statistics of keys and queries");
        int result = hcattn_gather_statistics(client, &gather, &events, JOB_QUIET_MS, NULL, &error);
        output_progress(false, "%s", "");
        if (result < 0)
            return command_call_failed(name, result, &error);
    }
    for (size_t i = 0; i < needs->n_codebooks; i++) {
        char what[64];
        struct hcattn_train_codebook train = {.n_dims = needs->codebooks[i].n_dims,
                                              .n_centroids = needs->codebooks[i].n_centroids};
        snprintf(what, sizeof(what), "codebook pq%" PRIu32 "/%" PRIu32, train.n_dims, train.n_centroids);
        struct hcattn_job_events events = job_events(&progress, what);
        int result = hcattn_train_codebook(client, &train, &events, JOB_QUIET_MS, NULL, &error);
        output_progress(false, "%s", "");
        if (result < 0)
            return command_call_failed(name, result, &error);
    }
    return 0;
}
