/* fakes.c - the coordinator under test, and the round that lets all fakes act. */
#include "tests/unit/coordinator/fakes.h"

#include <assert.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/options.h"
#include "common/peer.h"
#include "common/random.h"

#define PATIENCE_US 20000000u

uint64_t fakes_deadline(void)
{
    return clock_deadline_us(PATIENCE_US);
}

void fakes_fail_late(const char *condition, const char *file, int line, uint64_t deadline)
{
    if (clock_remaining_us(deadline) > 0)
        return;
    fprintf(stderr, "%s:%d: did not come true: %s\n", file, line, condition);
    abort();
}

void fakes_start_coordinator(struct fakes *fakes, const char *const *arguments)
{
    char stores[16], program[512];
    const char *bin = options_environment("HCATTN_BIN");
    const char *argv[32] = {"hc-coordinator", "--runtime-dir", fakes->dir, "--stores",
                            stores,           "--log-level",   "warning"};
    size_t n = 7;
    snprintf(stores, sizeof(stores), "%u", fakes->n_stores);
    snprintf(program, sizeof(program), "%s/hc-coordinator", bin ? bin : ".");
    for (; arguments && *arguments && n < 31; arguments++)
        argv[n++] = *arguments;
    fakes->pid = fork();
    assert(fakes->pid >= 0);
    if (fakes->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        execv(program, (char *const *)(uintptr_t)argv);
        perror(program);
        _exit(127);
    }
}

void fakes_start(struct fakes *fakes, uint32_t n_stores, const char *const *arguments)
{
    *fakes = (struct fakes){.n_stores = n_stores, .next_id = 1000};
    snprintf(fakes->dir, sizeof(fakes->dir), "/tmp/hcattn-test-XXXXXX");
    char *made = mkdtemp(fakes->dir);
    int result = socket_context_new(&fakes->context);
    assert(made && result == 0);
    (void)made;
    (void)result;
    for (uint32_t i = 0; i < FAKE_STORES; i++) {
        fakes->stores[i] = (struct fake_store){
            .index = i, .incarnation = random_u64(), .fd = -1, .segment = {.fd = -1}, .n_blocks = 64};
        fakes->store_supervisor[i].fd = -1;
    }
    for (uint32_t i = 0; i < FAKE_WORKERS; i++) {
        fakes->workers[i] = (struct fake_worker){
            .index = i, .incarnation = random_u64(), .fd = -1, .model = 0xabc, .shape = segments_shape, .n_ctx = 1024};
        fakes->worker_supervisor[i].fd = -1;
    }
    fakes_start_coordinator(fakes, arguments);
    fake_client_open(fakes);
}

void fakes_kill_coordinator(struct fakes *fakes)
{
    kill(fakes->pid, SIGKILL);
    waitpid(fakes->pid, NULL, 0);
    fakes->pid = 0;
}

int fakes_stop_coordinator(struct fakes *fakes)
{
    int status = 0;
    kill(fakes->pid, SIGTERM);
    while (waitpid(fakes->pid, &status, WNOHANG) == 0)
        fakes_pump(fakes);
    fakes->pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void fakes_finish(struct fakes *fakes)
{
    int status = fakes->pid ? fakes_stop_coordinator(fakes) : 0;
    for (uint32_t i = 0; i < FAKE_STORES; i++) {
        fake_store_hang_up(&fakes->stores[i]);
        segments_drop(&fakes->stores[i].segment);
        if (fakes->store_supervisor[i].fd >= 0)
            close(fakes->store_supervisor[i].fd);
    }
    for (uint32_t i = 0; i < FAKE_WORKERS; i++) {
        fake_worker_hang_up(&fakes->workers[i]);
        if (fakes->worker_supervisor[i].fd >= 0)
            close(fakes->worker_supervisor[i].fd);
    }
    fake_client_close(&fakes->client);
    socket_context_free(fakes->context);
    char command[128];
    snprintf(command, sizeof(command), "rm -rf %s", fakes->dir);
    int removed = system(command);
    (void)removed;
    if (status != 0) {
        fprintf(stderr, "the coordinator ended with status %d\n", status);
        abort();
    }
}

void fakes_all_ready(struct fakes *fakes)
{
    for (uint32_t i = 0; i < fakes->n_stores; i++) {
        fake_supervisor_register(fakes, &fakes->store_supervisor[i], HCATTN__CONTROL__ROLE__VALUE_STORE, i);
        fake_store_register(fakes, i, false);
    }
    fake_supervisor_register(fakes, &fakes->worker_supervisor[0], HCATTN__CONTROL__ROLE__GPU_WORKER, 0);
    fake_worker_register(fakes, 0);
    FAKES_WAIT(fakes, fakes->workers[0].n_exchange_ready == fakes->n_stores);
}

static void add(struct socket_item *items, size_t *n, struct socket *socket, int fd)
{
    if (socket || fd >= 0)
        items[(*n)++] = (struct socket_item){.socket = socket, .fd = fd, .events = SOCKET_READABLE};
}

void fakes_pump(struct fakes *fakes)
{
    struct socket_item items[32];
    size_t n = 0;
    for (uint32_t i = 0; i < FAKE_STORES; i++) {
        add(items, &n, NULL, fakes->stores[i].fd);
        add(items, &n, fakes->stores[i].data, -1);
        add(items, &n, NULL, fakes->store_supervisor[i].fd);
    }
    for (uint32_t i = 0; i < FAKE_WORKERS; i++) {
        add(items, &n, NULL, fakes->workers[i].fd);
        add(items, &n, fakes->workers[i].data, -1);
        add(items, &n, fakes->workers[i].work, -1);
        add(items, &n, NULL, fakes->worker_supervisor[i].fd);
    }
    add(items, &n, fakes->client.socket, -1);
    (void)socket_poll(items, n, 20);
    for (uint32_t i = 0; i < FAKE_STORES; i++) {
        fake_store_pump(fakes, &fakes->stores[i]);
        fake_supervisor_pump(&fakes->store_supervisor[i]);
    }
    for (uint32_t i = 0; i < FAKE_WORKERS; i++) {
        fake_worker_pump(fakes, &fakes->workers[i]);
        fake_supervisor_pump(&fakes->worker_supervisor[i]);
    }
    fake_client_pump(&fakes->client);
}

int fakes_connect(const struct fakes *fakes)
{
    char path[128];
    int fd = -1;
    snprintf(path, sizeof(path), "%s/peer.sock", fakes->dir);
    int result = peer_connect(path, clock_deadline_us(PATIENCE_US), &fd);
    assert(result == 0);
    (void)result;
    return fd;
}

void fakes_say(int fd, const Hcattn__Control__Control *message, int attached)
{
    uint8_t bytes[4096];
    assert(hcattn__control__control__get_packed_size(message) <= sizeof(bytes));
    size_t n = hcattn__control__control__pack(message, bytes);
    (void)peer_send(fd, bytes, n, &attached, attached >= 0 ? 1 : 0); /* the coordinator may be dead by intent */
}

Hcattn__Control__Control *fakes_hear(int fd, int *ret_attached)
{
    static uint8_t bytes[PEER_MAX_MESSAGE];
    size_t n_bytes, n_fds = 0;
    *ret_attached = -1;
    if (fd < 0)
        return NULL;
    int result = peer_try_receive(fd, bytes, sizeof(bytes), &n_bytes, ret_attached, 1, &n_fds);
    if (result != 0) {
        *ret_attached = result == -EAGAIN ? -1 : -2;
        return NULL;
    }
    if (n_fds == 0)
        *ret_attached = -1;
    Hcattn__Control__Control *message = hcattn__control__control__unpack(NULL, n_bytes, bytes);
    assert(message);
    return message;
}

void fakes_quiet(struct fakes *fakes)
{
    for (int i = 0; i < FAKES_QUIET_ROUNDS; i++)
        fakes_pump(fakes);
}

void fakes_drop(Hcattn__Work__WorkRequest *request)
{
    hcattn__work__work_request__free_unpacked(request, NULL);
}
