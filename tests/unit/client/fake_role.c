/*
 * fake_role.c - stands for hc-coordinator, hc-value-store and hc-gpu-worker (by its name) in tests of the supervisor and of
 * `hcattn up`. Writes a line "PROGRAM PID ARGUMENTS" to <runtime dir>/started, then does as HCATTN_TEST_MODE says:
 * "" sleeps until SIGTERM, or SIGUSR1, which makes it leave with status 3; "exit2" ends with status 2, "crash" at once by SIGABRT; "stubborn" takes no SIGTERM. With
 * "-worker" behind it a mode is the worker's only. The coordinator answers Health and Stats; it is ready at once, but for
 * "exit2-worker" never, for "formats" when a store has come to 100 % (20 more with every Stats), for "stuck" it stays at 20 %.
 */
#include "common/exit_status.h"
#include "common/options.h"
#include "tests/unit/client/fake_coordinator.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct formatting {
    uint32_t percent; /* 0: nothing is formatted */
    bool is_stuck;
};

static enum fake_coordinator_step answer(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    Hcattn__StatsReply stats = HCATTN__STATS_REPLY__INIT;
    Hcattn__ProcessStats process = HCATTN__PROCESS_STATS__INIT, store = HCATTN__PROCESS_STATS__INIT;
    Hcattn__ProcessStats *pointers[2] = {&process, &store};
    struct formatting *formatting = fake->context;
    char phase[32];
    if (request->request_case != HCATTN__REQUEST__REQUEST_STATS) {
        fake_coordinator_error(fake, request->request_id, HCATTN__ERROR_CODE__NOT_SUPPORTED, "a fake");
        return FAKE_KNOWN;
    }
    process.program = (char *)"hc-coordinator";
    process.pid = (uint32_t)getpid();
    process.state = (char *)"ready";
    process.node = -1;
    stats.model = (char *)"fake-model";
    store.program = (char *)"hc-value-store";
    store.state = (char *)"starting";
    store.phase = phase;
    stats.processes = pointers;
    stats.n_processes = formatting->percent > 0 ? 2 : 1;
    snprintf(phase, sizeof(phase), "formatting %u %%", formatting->percent);
    if (formatting->percent > 0 && !formatting->is_stuck && formatting->percent < 100)
        formatting->percent += 20;
    if (formatting->percent == 100)
        fake->ready = true;
    reply.request_id = request->request_id;
    reply.reply_case = HCATTN__REPLY__REPLY_STATS;
    reply.stats = &stats;
    fake_coordinator_reply(fake, &reply);
    return FAKE_KNOWN;
}

static void note_start(const char *program, int argc, char **argv, const char *directory)
{
    char path[256], line[2048];
    snprintf(path, sizeof(path), "%s/started", directory);
    int n = snprintf(line, sizeof(line), "%s %d", program, (int)getpid());
    for (int i = 1; i < argc; i++)
        n += snprintf(line + n, sizeof(line) - (size_t)n, " %s", argv[i]);
    line[n++] = '\n';
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (fd < 0 || write(fd, line, (size_t)n) != n)
        abort();
    close(fd);
}

int main(int argc, char **argv)
{
    const char *slash = strrchr(argv[0], '/');
    const char *program = slash ? slash + 1 : argv[0];
    const char *directory = "/tmp";
    const char *given = options_environment("HCATTN_TEST_MODE");
    char mode[64];
    snprintf(mode, sizeof(mode), "%s", given ? given : "");
    char *suffix = strstr(mode, "-worker");
    bool worker_fails = suffix && strncmp(mode, "exit2", 5) == 0; /* then the service is never ready */
    if (suffix)
        *suffix = '\0';
    if (suffix && strcmp(program, "hc-gpu-worker") != 0)
        mode[0] = '\0';
    for (int i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], "--runtime-dir") == 0)
            directory = argv[i + 1];
    }
    sigset_t set;
    int number;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, NULL);
    note_start(program, argc, argv, directory);
    if (strcmp(mode, "exit2") == 0) {
        fprintf(stderr, "%s: no such model\n", program);
        return 2;
    }
    if (strcmp(mode, "crash") == 0) {
        signal(SIGABRT, SIG_DFL);
        abort();
    }
    static struct fake_coordinator fake;
    static struct formatting formatting;
    formatting.is_stuck = strcmp(mode, "stuck") == 0;
    if (formatting.is_stuck || strcmp(mode, "formats") == 0)
        formatting.percent = 20;
    bool coordinates = strcmp(program, "hc-coordinator") == 0;
    if (coordinates) {
        snprintf(fake.endpoint, sizeof(fake.endpoint), "ipc://%.100s/client.sock", directory);
        fake.handle = answer;
        fake.context = &formatting;
        fake.not_ready = worker_fails || formatting.percent > 0;
        fake_coordinator_start(&fake);
    }
    while (strcmp(mode, "stubborn") == 0)
        pause();
    sigwait(&set, &number);
    if (coordinates) {
        fake_coordinator_stop(&fake);
        unlink(fake.endpoint + strlen("ipc://"));
    }
    return number == SIGUSR1 ? EXIT_STATUS_LEFT : 0;
}
