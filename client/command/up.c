/*
 * up.c - see up.h. Starts the supervisors, waits until the service is ready, stays until a signal, stops all in order.
 *
 * Threads    the main thread; the client library's come after the first supervisors are started.
 */
#include "client/command/up.h"
#include "client/command/command.h"
#include "client/command/detach.h"
#include "client/command/fleet.h"
#include "client/command/lock.h"
#include "client/command/opening.h"
#include "client/command/output.h"
#include "client/command/patience.h"
#include "client/command/report.h"
#include "common/clock.h"
#include "common/log.h"
#include "common/signals.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NAME          "hcattn up"
#define DEFAULT_MODEL "hcattn/models/SmolLM2-135M-Instruct.Q4_1.gguf" /* where scripts/fetch-model puts it */
#define ASK_MS        400u /* a question to a coordinator that may not be there yet */
#define LOOK_MS       250  /* between two questions */

static const char *const transports[] = {"ring", "routed", "direct", NULL};
static const char *const row_codecs[] = {"f16", "q8_0", NULL};
static const char *const micro_batches[] = {"auto", "1", "2", NULL};
static const char *const weights_by_node[] = {"auto", "off", NULL};
static const char *const huge_pages[] = {"try", "require", "off", NULL};
static const char *const isas[] = {"auto", "plain", "avx2", "avx512", NULL};
static const char *const backends[] = {"auto", "cpu", "cuda", "reference", NULL};

static const struct option_spec specs[] = {
    {.name = "model",
     .short_name = 'm',
     .kind = OPTION_STRING,
     .metavar = "FILE",
     .help = "GGUF file; by default the one that scripts/fetch-model gets"},
    {.name = "stores",
     .kind = OPTION_U32,
     .minimum = 1,
     .maximum = FLEET_MAX_STORES,
     .metavar = "N",
     .help = "value-stores; by default one for each NUMA node that has memory and cpus that may be used"},
    {.name = "nodes",
     .kind = OPTION_STRING,
     .metavar = "N,N,...",
     .help = "NUMA nodes that get a store each (with --stores the stores in turn), by the kernel's numbers"},
    {.name = "workers",
     .kind = OPTION_U32,
     .default_text = "1",
     .minimum = 1,
     .maximum = FLEET_MAX_WORKERS,
     .metavar = "N",
     .help = "gpu-workers; one per device"},
    {.name = "memory",
     .kind = OPTION_MEMORY,
     .help = "of each store; a percentage is of all stores together, of the control group's limit or of the node's "
             "memory, whichever is smaller; 50% if not given, or what is free"},
    {.name = "huge-pages",
     .kind = OPTION_CHOICE,
     .default_text = "try",
     .choices = huge_pages,
     .help = "of the stores; from the pool of vm.nr_hugepages if it has enough"},
    {.name = "strict-numa",
     .kind = OPTION_FLAG,
     .help = "stores do not start where threads or memory cannot be bound to the node"},
    {.name = "device-memory",
     .kind = OPTION_BYTES,
     .metavar = "SIZE",
     .help = "of each worker's device, weights included; no limit if not given"},
    {.name = "policy",
     .kind = OPTION_STRING,
     .default_text = "default",
     .metavar = "POLICY",
     .help = "of sessions that do not name one: " OPENING_POLICIES},
    OPENING_RESIDENCY_OPTIONS,
    {.name = "exact-tokens",
     .kind = OPTION_U32,
     .maximum = OPENING_MAX_EXACT,
     .metavar = "N",
     .help = "sessions of at most N tokens that do not say otherwise are kept exactly on the device"},
    {.name = "rows",
     .kind = OPTION_CHOICE,
     .default_text = "f16",
     .choices = row_codecs,
     .help = "how the stores keep K and V; q8_0 takes half the memory"},
    {.name = "learnt-dir",
     .kind = OPTION_STRING,
     .metavar = "DIR",
     .help = "where workers keep the statistics and codebooks of the model; beside the model if not given"},
    {.name = "transport",
     .kind = OPTION_CHOICE,
     .default_text = "ring",
     .choices = transports,
     .help =
         "how aggregates travel: through rings in shared memory, through the coordinator, or, for tests, not at all: "
         "straight from the mapped memory"},
    {.name = "micro-batches",
     .kind = OPTION_CHOICE,
     .default_text = "auto",
     .choices = micro_batches,
     .help = "parts of a step, so that the stores work on one while the worker is busy with the other"},
    {.name = "max-step-ms",
     .kind = OPTION_U32,
     .maximum = 60000,
     .metavar = "N",
     .help = "time of a step, which bounds how long a prefill holds up running generations"},
    {.name = "max-queue",
     .kind = OPTION_U32,
     .maximum = 65536,
     .metavar = "N",
     .help = "requests that may wait for room; more are refused"},
    {.name = "queue-timeout", .kind = OPTION_DURATION, .help = "how long a request waits for room"},
    {.name = "spin-us",
     .kind = OPTION_U32,
     .maximum = 1000,
     .metavar = "N",
     .help = "how long workers and stores look for work before they sleep; for machines with cores to spare"},
    {.name = "backend",
     .kind = OPTION_CHOICE,
     .default_text = "auto",
     .choices = backends,
     .help =
         "of the workers; auto: cuda if they were built with it and there is a device, else cpu; reference is slow and "
         "simple"},
    {.name = "gpu",
     .kind = OPTION_U32,
     .maximum = 255,
     .metavar = "N",
     .help = "device of the workers, of those that CUDA_VISIBLE_DEVICES leaves; if not given they take the devices in "
             "turn"},
    {.name = "isa",
     .kind = OPTION_CHOICE,
     .default_text = "auto",
     .choices = isas,
     .help = "instruction set; auto takes the best that the processor has"},
    {.name = "threads",
     .kind = OPTION_U32,
     .metavar = "N",
     .help = "of each worker and store; 0: as many as there are processors"},
    {.name = "weights-by-node",
     .kind = OPTION_CHOICE,
     .default_text = "auto",
     .choices = weights_by_node,
     .help = "auto: with several NUMA nodes each worker's weights are split over them and its threads read their own"},
    {.name = "n-ctx", .kind = OPTION_U32, .metavar = "N", .help = "longest session; 0: as the model says"},
    {.name = "client-endpoint",
     .kind = OPTION_STRING,
     .metavar = "ENDPOINT",
     .help =
         "serve clients here too, for example tcp://0.0.0.0:7070; without keys whoever reaches it is served, in clear"},
    {.name = "client-secret",
     .kind = OPTION_STRING,
     .metavar = "FILE",
     .help = "secret key of that endpoint ('hcattn keys' makes a pair)"},
    {.name = "client-keys",
     .kind = OPTION_STRING,
     .metavar = "FILE",
     .help = "public keys of the clients that may connect there, one a line; it may change at any time"},
    COMMAND_RUNTIME_DIR_OPTION,
    {.name = "bin-dir",
     .kind = OPTION_STRING,
     .metavar = "DIR",
     .help = "where the programs lie; by default beside hcattn, then on PATH"},
    {.name = "detach",
     .short_name = 'd',
     .kind = OPTION_FLAG,
     .help = "go to the background once the service is ready; its log is hcattn.log in the runtime directory"},
    {.name = "start-timeout",
     .kind = OPTION_DURATION,
     .default_text = "300s",
     .help =
         "until the service must be ready, counted anew whenever a percentage grows that is shown meanwhile: a large "
         "model or store takes long"},
    {.name = "stop-timeout",
     .kind = OPTION_DURATION,
     .default_text = "10s",
     .help = "for each process to stop before it is killed"},
    {.name = "max-restarts",
     .kind = OPTION_U32,
     .default_text = "10",
     .help = "deaths of a process in a row, each soon after its start, before all is given up"},
    {.name = "log-level",
     .kind = OPTION_CHOICE,
     .default_text = "info",
     .choices = log_level_names,
     .help = "what is worth a line"},
};

static const struct options_table table = {
    .program = NAME,
    .summary = "Starts coordinator, value-stores and workers on this machine and stays until Ctrl-C.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
};

struct up {
    const struct options *options;
    char directory[OPTIONS_PATH_SIZE];
    char model[4096];
    char policy[HCATTN_POLICY_SIZE];
    int lock_fd;
    int signal_fd;
    int report_fd; /* of detach.h; -1: we are in the foreground */
    struct placing placing;
    struct fleet fleet;
    struct hcattn *client;
    bool stop_asked;
};

static void show_progress(const struct up *up, const char *text)
{
    if (up->report_fd >= 0)
        detach_progress(up->report_fd, text);
    else
        output_progress(false, "%s", text);
}

/* Exit status, told; 0: fine. */
static int find_model(struct up *up)
{
    const char *given = options_string(up->options, "model");
    const char *data = options_environment("XDG_DATA_HOME"), *home = options_environment("HOME");
    int n;
    if (given && *given)
        n = snprintf(up->model, sizeof(up->model), "%s", given);
    else if (data)
        n = snprintf(up->model, sizeof(up->model), "%s/" DEFAULT_MODEL, data);
    else
        n = snprintf(up->model, sizeof(up->model), "%s/.local/share/" DEFAULT_MODEL, home ? home : "");
    if (n < 0 || (size_t)n >= sizeof(up->model))
        return command_fail(COMMAND_USAGE, NAME, "the model's path is too long");
    if (access(up->model, R_OK) == 0)
        return 0;
    if (given && *given)
        return command_fail(COMMAND_USAGE, NAME, "cannot read the model %s: %s", up->model, strerror(errno));
    return command_fail(COMMAND_USAGE, NAME,
                        "no model at %s: get it with scripts/fetch-model, or name one with --model", up->model);
}

static int take_lock(struct up *up)
{
    struct lock_owner owner = {.pid = 0};
    int error = lock_take(up->directory, &up->lock_fd, &owner);
    if (error == -EWOULDBLOCK && owner.pid)
        return command_fail(COMMAND_USAGE, NAME, "already running as pid %d in %s", (int)owner.pid, up->directory);
    if (error == -EWOULDBLOCK)
        return command_fail(COMMAND_USAGE, NAME, "already running in %s", up->directory);
    if (error)
        return command_fail(COMMAND_ERROR, NAME, "cannot lock %s/hcattn.lock: %s", up->directory, strerror(-error));
    return 0;
}

/* Waits for a signal, at most timeout_ms; keeps the fleet alive. */
static void turn(struct up *up, int timeout_ms)
{
    int fleet_ms = fleet_timeout_ms(&up->fleet);
    if (fleet_ms >= 0 && (timeout_ms < 0 || fleet_ms < timeout_ms))
        timeout_ms = fleet_ms;
    struct pollfd item = {.fd = up->signal_fd, .events = POLLIN};
    poll(&item, 1, timeout_ms);
    int number;
    while (signals_read(up->signal_fd, &number) == 0) {
        if (number == SIGCHLD)
            fleet_reap(&up->fleet);
        else
            up->stop_asked = true;
    }
    if (!up->stop_asked && !up->fleet.status)
        fleet_start(&up->fleet, up->model);
}

/* What of its phase says most: a worker's, or one of a store that tells how far it is. NULL: none. */
static const char *find_phase(const struct hcattn_stats *stats)
{
    const char *phase = NULL;
    for (size_t i = 0; i < stats->n_processes; i++) {
        const struct hcattn_process_stats *process = &stats->processes[i];
        uint32_t percent;
        size_t length;
        bool is_worker = strcmp(process->program, "hc-gpu-worker") == 0;
        if (!process->phase || strcmp(process->phase, "idle") == 0)
            continue;
        if (patience_percent(process->phase, &percent, &length))
            return process->phase;
        if (is_worker)
            phase = process->phase;
    }
    return phase;
}

/* "no worker yet (loading weights 42 %)". True: it has come nearer to being ready since the last time. */
static bool show_state(const struct up *up, const struct hcattn_health *health, struct patience *patience)
{
    struct hcattn_stats stats;
    char text[256];
    if (hcattn_stats(up->client, ASK_MS, &stats, NULL) < 0) {
        show_progress(up, health->sentence);
        return false;
    }
    const char *phase = find_phase(&stats);
    snprintf(text, sizeof(text), "starting: %.150s%s%.60s%s", health->sentence, phase ? " (" : "", phase ? phase : "",
             phase ? ")" : "");
    show_progress(up, text);
    bool moved = patience_moved(patience, &stats);
    hcattn_stats_free(&stats);
    return moved;
}

/* Exit status, told; 0: ready, or asked to stop. */
static int wait_ready(struct up *up)
{
    uint64_t timeout_ms = options_duration_ms(up->options, "start-timeout");
    uint64_t deadline_us = clock_deadline_us(timeout_ms * 1000);
    struct hcattn_health health = {.sentence = "no answer of the coordinator"};
    struct hcattn_error error;
    struct patience patience = {.n_seen = 0};
    bool has_moved = false;
    struct hcattn_config config = {
        .runtime_dir = up->directory, .connect_timeout_ms = ASK_MS, .lost_timeout_ms = ASK_MS};
    if (hcattn_open(&config, &up->client, &error) < 0)
        return command_fail(COMMAND_ERROR, NAME, "%s", error.sentence);
    show_progress(up, "starting");
    for (;;) {
        turn(up, LOOK_MS);
        if (up->stop_asked)
            return 0;
        if (up->fleet.status) {
            show_progress(up, "");
            return command_fail(up->fleet.status, NAME, "%s", up->fleet.reason);
        }
        int result = hcattn_health(up->client, ASK_MS, &health, &error);
        if (result == 0 && health.ready) {
            show_progress(up, "");
            return 0;
        }
        if (result == 0 && show_state(up, &health, &patience)) {
            deadline_us = clock_deadline_us(timeout_ms * 1000);
            has_moved = true;
        }
        if (clock_remaining_us(deadline_us) == 0) {
            show_progress(up, "");
            return command_fail(COMMAND_ERROR, NAME, "not ready %s %llu s: %s",
                                has_moved ? "and nothing has moved for" : "after",
                                (unsigned long long)(timeout_ms / 1000), health.sentence);
        }
    }
}

static void show_table(const struct up *up, struct hcattn *client)
{
    char sharing[PLACING_TEXT];
    struct hcattn_health health;
    struct hcattn_stats stats;
    if (hcattn_health(client, 10 * ASK_MS, &health, NULL) < 0 || hcattn_stats(client, 10 * ASK_MS, &stats, NULL) < 0)
        return;
    report_table(&health, &stats);
    if (*placing_sharing(&up->placing, options_u32(up->options, "workers"), sharing))
        output_format("\n%s.\n", sharing);
    output_flush();
    hcattn_stats_free(&stats);
}

/* The service, from the first process to the last. */
static int serve(struct up *up)
{
    int error = fleet_init(&up->fleet, up->options, &up->placing, up->directory, up->policy, up->lock_fd);
    if (!error)
        error = signals_open(true, &up->signal_fd);
    if (error)
        return command_fail(COMMAND_ERROR, NAME, "cannot start: %s", strerror(-error));
    int status = 0;
    if (fleet_start(&up->fleet, up->model) < 0)
        status = command_fail(up->fleet.status, NAME, "%s", up->fleet.reason);
    else
        status = wait_ready(up);
    if (!status && !up->stop_asked) {
        show_table(up, up->client);
        if (up->report_fd >= 0) {
            detach_ready(up->report_fd);
            close(up->report_fd);
            up->report_fd = -1;
        } else {
            output_text("\nCtrl-C stops the service.\n");
            output_flush();
        }
        up->client = hcattn_close(up->client);
        while (!up->stop_asked && !up->fleet.status)
            turn(up, -1);
        if (up->fleet.status)
            status = command_fail(up->fleet.status, NAME, "%s", up->fleet.reason);
    }
    hcattn_close(up->client);
    /* A supervisor needs its own deadline and a moment. */
    fleet_stop(&up->fleet, up->signal_fd, 1000 * options_duration_ms(up->options, "stop-timeout") + 2000000);
    return status;
}

/* In the caller of --detach, once the service is ready. */
static void show_detached(const struct up *up, const char *log_path)
{
    struct hcattn_config config = {.runtime_dir = up->directory};
    struct hcattn *client = NULL;
    if (hcattn_open(&config, &client, NULL) == 0)
        show_table(up, client);
    hcattn_close(client);
    output_format("\nThe service runs in the background; 'hcattn down' stops it. Its log: %s\n", log_path);
}

static int run(struct up *up)
{
    char reason[OPTIONS_ERROR_SIZE], log_path[OPTIONS_PATH_SIZE + 16];
    if (options_runtime_dir(options_string(up->options, "runtime-dir"), up->directory, reason) < 0)
        return command_fail(COMMAND_USAGE, NAME, "%s", reason);
    if (opening_policy(up->options, options_string(up->options, "policy"), up->policy, reason, sizeof(reason)) < 0)
        return command_fail(COMMAND_USAGE, NAME, "--policy: %s", reason);
    if (placing_plan(up->options, &up->placing, reason) < 0)
        return command_fail(COMMAND_USAGE, NAME, "%s", reason);
    int status = take_lock(up);
    if (!status)
        status = find_model(up);
    if (status || !options_flag(up->options, "detach"))
        return status ? status : serve(up);
    snprintf(log_path, sizeof(log_path), "%s/hcattn.log", up->directory);
    pid_t pid = 0;
    int fd = -1;
    int error = detach_fork(log_path, &pid, &fd);
    if (error)
        return command_fail(COMMAND_ERROR, NAME, "cannot go to the background: %s", strerror(-error));
    if (pid == 0) {
        up->report_fd = fd;
        lock_write(up->lock_fd, &(struct lock_owner){.pid = getpid()});
        return serve(up);
    }
    close(up->lock_fd); /* the child holds it */
    up->lock_fd = -1;
    status = detach_wait(NAME, log_path, pid, fd);
    if (!status)
        show_detached(up, log_path);
    return status ? status : output_status();
}

int up_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    struct up *up = calloc(1, sizeof(*up));
    if (up) {
        up->options = options;
        up->lock_fd = up->signal_fd = up->report_fd = -1;
        status = run(up);
        signals_close(up->signal_fd);
        if (up->lock_fd >= 0)
            close(up->lock_fd);
    } else {
        status = command_fail(COMMAND_ERROR, NAME, "no memory");
    }
    free(up);
    options_free(options);
    return status;
}
