/*
 * run.c - see run.h. One child at a time: started, watched, started again; killed when the coordinator fences it. A
 * child that left the service, as it was told to, is not started again until the coordinator asks for it.
 *
 * Threads    one. Invariant: at most one life of the child exists; its death is told only after waitpid().
 */
#include "client/command/run.h"
#include "client/command/child.h"
#include "client/command/command.h"
#include "client/command/link.h"
#include "client/command/role.h"
#include "common/clock.h"
#include "common/exit_status.h"
#include "common/log.h"
#include "common/random.h"
#include "common/signals.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#define NAME           "hcattn run"
#define FAST_US        10000000u /* a life shorter than this counts as a fast death */
#define BACKOFF_US     100000u
#define BACKOFF_MAX_US 5000000u
#define LINK_PERIOD_MS 200

static const struct option_spec specs[] = {
    {.name = "index",
     .kind = OPTION_U32,
     .default_text = "0",
     .maximum = 4095,
     .help = "number of this process among its like"},
    COMMAND_RUNTIME_DIR_OPTION,
    {.name = "bin-dir",
     .kind = OPTION_STRING,
     .metavar = "DIR",
     .help = "where the programs lie; by default beside hcattn, then on PATH"},
    {.name = "max-restarts",
     .kind = OPTION_U32,
     .default_text = "10",
     .help = "give up after this many deaths in a row, each within 10 s of its start"},
    {.name = "stop-timeout",
     .kind = OPTION_DURATION,
     .default_text = "10s",
     .help = "after SIGTERM: how long until SIGKILL"},
    {.name = "log-level",
     .kind = OPTION_CHOICE,
     .default_text = "info",
     .choices = log_level_names,
     .help = "what is worth a line"},
};

static const struct options_table table = {
    .program = NAME,
    .usage = "coordinator|value-store|gpu-worker [-- OPTIONS OF THE PROCESS]",
    .summary = "Runs one process of the service, starts it again when it dies, kills it when it hangs. Also as PID 1.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
    .max_positional = 1000,
};

struct supervisor {
    const struct options *options;
    const struct role *role;
    char directory[OPTIONS_PATH_SIZE];
    char path[4096];
    char **argv;
    char incarnation_text[17]; /* an element of argv */
    int signal_fd;
    struct link link;

    pid_t pid; /* 0: none lives */
    uint64_t incarnation;
    uint64_t started_us;
    uint32_t n_starts;
    uint32_t n_fast;   /* fast deaths in a row */
    uint64_t start_us; /* when to start it; CLOCK_NEVER while it lives, or has left */
    uint64_t kill_us;  /* when a child that is to stop is killed */
    bool leaves;       /* the coordinator has let it go: it has left, however it ends */
    bool left;         /* none lives, and none is to be started before the coordinator says so */
    bool stopping;
    bool over;
    int status;
};

/* program --runtime-dir D [--index N] --incarnation HEX [--config F] arguments... */
static int make_argv(struct supervisor *supervisor)
{
    const struct options *options = supervisor->options;
    size_t n_given = options_n_positional(options);
    char **argv = calloc(n_given + 12, sizeof(*argv));
    static char index_text[16];
    if (!argv)
        return -ENOMEM;
    size_t n = 0;
    argv[n++] = (char *)supervisor->role->program;
    argv[n++] = (char *)"--runtime-dir";
    argv[n++] = supervisor->directory;
    if (supervisor->role->has_index) {
        snprintf(index_text, sizeof(index_text), "%" PRIu32, options_u32(options, "index"));
        argv[n++] = (char *)"--index";
        argv[n++] = index_text;
    }
    argv[n++] = (char *)"--incarnation";
    argv[n++] = supervisor->incarnation_text;
    if (options_config_file(options)) {
        argv[n++] = (char *)"--config";
        argv[n++] = (char *)options_config_file(options);
    }
    for (size_t i = 1; i < n_given; i++)
        argv[n++] = (char *)options_positional(options, i);
    supervisor->argv = argv;
    return 0;
}

static void end(struct supervisor *supervisor, int status)
{
    supervisor->over = true;
    supervisor->status = status;
}

static void start(struct supervisor *supervisor)
{
    supervisor->incarnation = random_u64();
    snprintf(supervisor->incarnation_text, sizeof(supervisor->incarnation_text), "%016" PRIx64,
             supervisor->incarnation);
    struct child child = {
        .path = supervisor->path, .argv = supervisor->argv, .death_signal = SIGKILL, .group = -1, .empty_input = true};
    int error = child_start(&child, &supervisor->pid);
    if (error == -EAGAIN || error == -ENOMEM) {
        LOG_WARNING("cannot start %s now: %s", supervisor->path, strerror(-error));
        supervisor->start_us = clock_deadline_us(BACKOFF_MAX_US);
        return;
    }
    if (error) {
        LOG_ERROR("cannot run %s: %s", supervisor->path, strerror(-error));
        end(supervisor, COMMAND_USAGE);
        return;
    }
    supervisor->left = false;
    supervisor->start_us = CLOCK_NEVER;
    supervisor->started_us = clock_now_us();
    supervisor->n_starts++;
    LOG_DEBUG("started %s as pid %d, incarnation %s", supervisor->role->program, (int)supervisor->pid,
              supervisor->incarnation_text);
    link_child_started(&supervisor->link, supervisor->incarnation, supervisor->pid, supervisor->n_starts);
}

static uint64_t backoff_us(uint32_t n_fast)
{
    uint64_t delay = BACKOFF_US;
    for (uint32_t i = 1; i < n_fast && delay < BACKOFF_MAX_US; i++)
        delay *= 2;
    return delay < BACKOFF_MAX_US ? delay : BACKOFF_MAX_US;
}

static void child_left(struct supervisor *supervisor)
{
    LOG_INFO("%s has left the service and is not started again until the coordinator asks for it"
             " (hcattn drain --resume %" PRIu32 "); waiting",
             supervisor->role->program, options_u32(supervisor->options, "index"));
    supervisor->left = true;
    supervisor->start_us = CLOCK_NEVER;
    supervisor->n_fast = 0;
}

static void child_died(struct supervisor *supervisor, int wait_status)
{
    char how[128];
    bool has_left = supervisor->leaves || (WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == EXIT_STATUS_LEFT);
    child_describe(wait_status, how, sizeof(how));
    link_child_dead(&supervisor->link, supervisor->incarnation, wait_status);
    pid_t pid = supervisor->pid;
    supervisor->pid = 0;
    if (WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == COMMAND_USAGE) {
        /* A bad option or model does not become better by trying again. The child has said why. */
        LOG_DEBUG("%s[%d] %s", supervisor->role->program, (int)pid, how);
        end(supervisor, COMMAND_USAGE);
        return;
    }
    if (supervisor->stopping) {
        LOG_DEBUG("%s[%d] %s", supervisor->role->program, (int)pid, how);
        end(supervisor, WIFEXITED(wait_status) && !has_left ? WEXITSTATUS(wait_status) : 0);
        return;
    }
    if (has_left && supervisor->role->is_a_peer) {
        child_left(supervisor);
        return;
    }
    bool fast = clock_now_us() - supervisor->started_us < FAST_US;
    supervisor->n_fast = fast ? supervisor->n_fast + 1 : 0;
    if (supervisor->n_fast > options_u32(supervisor->options, "max-restarts")) {
        LOG_ERROR("%s[%d] %s; it died %u times in a row soon after its start: given up", supervisor->role->program,
                  (int)pid, how, supervisor->n_fast);
        end(supervisor, COMMAND_ERROR);
        return;
    }
    uint64_t delay_us = backoff_us(supervisor->n_fast);
    LOG_WARNING("%s[%d] %s; starts again in %.1f s", supervisor->role->program, (int)pid, how, (double)delay_us / 1e6);
    supervisor->start_us = clock_deadline_us(delay_us);
}

/* As PID 1 the orphans of the container are ours as well. */
static void reap(struct supervisor *supervisor)
{
    int wait_status;
    pid_t pid;
    while ((pid = waitpid(-1, &wait_status, WNOHANG)) > 0) {
        if (pid == supervisor->pid)
            child_died(supervisor, wait_status);
    }
}

static void stop(struct supervisor *supervisor, int number)
{
    if (supervisor->pid == 0) {
        end(supervisor, 0);
        return;
    }
    if (!supervisor->stopping)
        supervisor->kill_us = clock_deadline_us(options_duration_ms(supervisor->options, "stop-timeout") * 1000);
    supervisor->stopping = true;
    kill(supervisor->pid, number);
}

static void take_signals(struct supervisor *supervisor)
{
    int number;
    while (signals_read(supervisor->signal_fd, &number) == 0) {
        if (number == SIGCHLD)
            reap(supervisor);
        else if (!supervisor->over)
            stop(supervisor, number);
    }
}

static void fence(struct supervisor *supervisor, const struct link_order *order)
{
    if (supervisor->pid && order->incarnation == supervisor->incarnation) {
        LOG_WARNING("%s[%d] is fenced: %s", supervisor->role->program, (int)supervisor->pid, order->reason);
        kill(supervisor->pid, SIGKILL); /* its death is confirmed after waitpid() */
    } else if (link_knows_dead(&supervisor->link, order->incarnation)) {
        link_tell_dead_again(&supervisor->link, order->incarnation);
    } else {
        LOG_WARNING("asked to fence %016" PRIx64 ", which is no life of this process", order->incarnation);
    }
}

/* Asked twice, or of a child that lives or is about to be started: nothing is to be done. */
static void start_again(struct supervisor *supervisor)
{
    reap(supervisor); /* its end may have been heard of sooner by the coordinator than by us */
    supervisor->leaves = false;
    if (!supervisor->left || supervisor->over)
        return;
    LOG_INFO("%s is started again: the coordinator asks for it", supervisor->role->program);
    supervisor->left = false;
    supervisor->start_us = 0;
}

/* Its process ends by itself; one that is killed on the way, or died before and waits for its next start, stays away, too. */
static void let_go(struct supervisor *supervisor)
{
    supervisor->leaves = true;
    if (supervisor->pid == 0 && !supervisor->left && !supervisor->over)
        child_left(supervisor);
}

static int timeout_ms(const struct supervisor *supervisor)
{
    uint64_t wake = supervisor->stopping ? supervisor->kill_us : supervisor->start_us;
    int ms = clock_remaining_ms(wake);
    bool reconnects = supervisor->role->is_a_peer && supervisor->link.fd < 0;
    if (reconnects && (ms < 0 || ms > LINK_PERIOD_MS))
        ms = LINK_PERIOD_MS;
    return ms;
}

static int supervise(struct supervisor *supervisor)
{
    while (!supervisor->over) {
        if (!supervisor->stopping && clock_now_us() >= supervisor->start_us)
            start(supervisor);
        if (supervisor->stopping && clock_now_us() >= supervisor->kill_us) {
            LOG_WARNING("%s[%d] does not stop: killed", supervisor->role->program, (int)supervisor->pid);
            kill(supervisor->pid, SIGKILL);
            supervisor->kill_us = CLOCK_NEVER;
        }
        struct link_order order;
        while (supervisor->role->is_a_peer && link_step(&supervisor->link, &order) > 0) {
            if (order.kind == LINK_START)
                start_again(supervisor);
            else if (order.kind == LINK_LEAVE)
                let_go(supervisor);
            else
                fence(supervisor, &order);
        }
        if (supervisor->over)
            break;
        struct pollfd items[] = {{.fd = supervisor->signal_fd, .events = POLLIN},
                                 {.fd = supervisor->link.fd, .events = POLLIN}};
        poll(items, 2, timeout_ms(supervisor));
        take_signals(supervisor);
    }
    return supervisor->status;
}

/* What is wrong with what was asked for: told, exit status; 0: fine. */
static int prepare(struct supervisor *supervisor)
{
    const struct options *options = supervisor->options;
    char reason[OPTIONS_ERROR_SIZE];
    if (options_n_positional(options) == 0)
        return command_fail(COMMAND_USAGE, NAME, "a role is needed: coordinator, value-store or gpu-worker");
    supervisor->role = role_find(options_positional(options, 0));
    if (!supervisor->role)
        return command_fail(COMMAND_USAGE, NAME, "unknown role '%s': coordinator, value-store or gpu-worker",
                            options_positional(options, 0));
    if (options_runtime_dir(options_string(options, "runtime-dir"), supervisor->directory, reason) < 0)
        return command_fail(COMMAND_USAGE, NAME, "%s", reason);
    if (child_find(supervisor->role->program, options_string(options, "bin-dir"), supervisor->path,
                   sizeof(supervisor->path)) < 0)
        return command_fail(COMMAND_USAGE, NAME, "no program %s %s%s", supervisor->role->program,
                            options_string(options, "bin-dir") ? "in " : "beside hcattn or on PATH",
                            options_string(options, "bin-dir") ? options_string(options, "bin-dir") : "");
    if (make_argv(supervisor) < 0)
        return command_fail(COMMAND_ERROR, NAME, "no memory");
    int error = signals_open(true, &supervisor->signal_fd);
    if (error)
        return command_fail(COMMAND_ERROR, NAME, "cannot take signals: %s", strerror(-error));
    char id[64], socket[OPTIONS_PATH_SIZE + OPTIONS_SOCKET_NAME_MAX];
    snprintf(id, sizeof(id), "%s/%" PRIu32, supervisor->role->name, options_u32(options, "index"));
    log_open("hcattn-run", (enum log_level)options_choice(options, "log-level"));
    log_set_id(id);
    snprintf(socket, sizeof(socket), "%s/peer.sock", supervisor->directory);
    link_init(&supervisor->link, socket, supervisor->role->number, options_u32(options, "index"));
    return 0;
}

int run_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    struct supervisor supervisor = {
        .options = options, .signal_fd = -1, .start_us = 0, .kill_us = CLOCK_NEVER, .link = {.fd = -1}};
    status = prepare(&supervisor);
    if (!status) {
        status = supervise(&supervisor);
        link_fini(&supervisor.link);
    }
    signals_close(supervisor.signal_fd);
    free(supervisor.argv);
    options_free(options);
    return status;
}
