/*
 * job.h - what the commands that run a job of the worker share: texts, the progress line, what presets need before they run.
 *
 * Owner      the subcommand. Threads: the main thread.
 */
#pragma once

#include "client/command/command.h"
#include "client/hcattn_jobs.h"

#include <stddef.h>

#define JOB_QUIET_MS                                                                                                   \
    600000u /* a worker that says nothing for so long does not come back: a model may have to be loaded */
#define JOB_LEFT_SIZE 32

/* ---- texts ---- */

#define JOB_TEXT_OPTION(purpose)                                                                                       \
    {                                                                                                                  \
        .name = "text", .kind = OPTION_STRING, .metavar = "FILE", .repeats = true,                                     \
        .help = purpose " (UTF-8; may be given several times); the worker's own text if not given"                     \
    }

struct job_texts {
    struct hcattn_text *texts; /* names and texts are ours */
    size_t n_texts;
};

/*
 * Reads the files of the options --text. A name is the file's without folder and ".txt"; the path where two would have the same.
 * Exit status, told; 0: read, possibly none.
 */
int job_texts_read(struct job_texts *texts, const char *name, const struct options *options);
/* Reads all *.txt of a folder, by name. As job_texts_read(); -ENOENT: there is none. */
int job_texts_read_folder(struct job_texts *texts, const char *name, const char *folder, int *ret_status);
void job_texts_fini(struct job_texts *texts);

/* ---- progress ---- */

struct job_progress {
    const char *what; /* "statistics", before the worker's words; NULL: nothing */
    bool terminal;
    int shown_percent; /* where it is lines that stay: of the last one */
    uint64_t next_us;  /* the next one whatever it says */
};

/* Events of a job that only shows how far it is; `progress` is their context. */
struct hcattn_job_events job_events(struct job_progress *progress, const char *what);
void job_show(struct job_progress *progress, const char *phase, double done, uint64_t left_us);
/* "1 h 05 min", "3 min 20 s", "12 s"; returns text. */
const char *job_left(uint64_t left_us, char text[JOB_LEFT_SIZE]);

/* ---- what is needed ---- */

struct job_codebook {
    uint32_t n_dims, n_centroids;
};

#define JOB_MAX_CODEBOOKS 16u /* 3 sizes of sub-spaces, 5 of codebooks */

struct job_needs {
    bool statistics;
    struct job_codebook codebooks[JOB_MAX_CODEBOOKS];
    size_t n_codebooks;
};

/* Adds what a policy needs; a name that is none (a baseline) needs nothing. "all": what the presets need. */
void job_need(struct job_needs *needs, const char *preset);
/* Gathers and trains what is not there yet; exit status, told. */
int job_meet(const struct job_needs *needs, const char *name, struct hcattn *client);
