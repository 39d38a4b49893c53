/* test_client_keys.c - the real coordinator with keys: who is served over TCP, when the list counts, and what it refuses to start
 * with. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/clock.h"
#include "common/key_file.h"
#include "common/options.h"
#include "proto/hcattn.pb-c.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define PATIENCE_US 20000000u

struct bench {
    char directory[64];
    char endpoint[200]; /* tcp */
    pid_t pid;
    char alice[SOCKET_KEY_SIZE], bob[SOCKET_KEY_SIZE], server[SOCKET_KEY_SIZE]; /* public */
};

static const char *path(const struct bench *bench, const char *name)
{
    static char paths[4][128];
    static unsigned next;
    char *text = paths[next++ % 4];
    snprintf(text, sizeof(paths[0]), "%s/%s", bench->directory, name);
    return text;
}

static void write_file(const struct bench *bench, const char *name, const char *text)
{
    FILE *file = fopen(path(bench, name), "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static int setup(void **state)
{
    struct bench *bench = calloc(1, sizeof(*bench));
    char error[KEY_FILE_ERROR_SIZE];
    struct socket_context *context = NULL;
    struct socket *socket = NULL;
    assert_non_null(bench);
    snprintf(bench->directory, sizeof(bench->directory), "/tmp/hcattn-test-XXXXXX");
    assert_non_null(mkdtemp(bench->directory));
    assert_int_equal(key_file_make(path(bench, "alice"), bench->alice, error), 0);
    assert_int_equal(key_file_make(path(bench, "bob"), bench->bob, error), 0);
    assert_int_equal(key_file_make(path(bench, "server"), bench->server, error), 0);
    write_file(bench, "clients", bench->alice);
    /* A port that is free. */
    assert_int_equal(socket_context_new(&context), 0);
    assert_int_equal(socket_new_router(context, 0, &socket), 0);
    assert_int_equal(socket_bind(socket, "tcp://127.0.0.1:*"), 0);
    assert_int_equal(socket_endpoint(socket, bench->endpoint, sizeof(bench->endpoint)), 0);
    socket_free(socket);
    socket_context_free(context);
    *state = bench;
    return 0;
}

/* Its log is file "log". arguments: closed by NULL. */
static void start(struct bench *bench, const char *const *arguments)
{
    const char *argv[32] = {"hc-coordinator", "--runtime-dir", bench->directory};
    const char *bin = options_environment("HCATTN_BIN");
    char program[512];
    size_t n = 3;
    snprintf(program, sizeof(program), "%s/hc-coordinator", bin ? bin : ".");
    while (*arguments && n < 31)
        argv[n++] = *arguments++;
    bench->pid = fork();
    assert_true(bench->pid >= 0);
    if (bench->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int fd = open(path(bench, "log"), O_WRONLY | O_CREAT | O_TRUNC, 0600);
        dup2(fd, STDERR_FILENO);
        execv(program, (char *const *)(uintptr_t)argv);
        _exit(127);
    }
}

static int end(struct bench *bench)
{
    int status = 0;
    assert_int_equal(waitpid(bench->pid, &status, 0), bench->pid);
    bench->pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int teardown(void **state)
{
    struct bench *bench = *state;
    if (bench->pid) {
        kill(bench->pid, SIGTERM);
        assert_int_equal(end(bench), 0);
    }
    char command[128];
    snprintf(command, sizeof(command), "rm -r %s", bench->directory);
    int result = system(command);
    free(bench);
    return result;
}

/* Says it, so many times. */
static void expect_log_times(const struct bench *bench, const char *part, unsigned n_times)
{
    char text[8192] = "";
    FILE *file = fopen(path(bench, "log"), "r");
    assert_non_null(file);
    size_t n = fread(text, 1, sizeof(text) - 1, file);
    fclose(file);
    text[n] = '\0';
    unsigned n_found = 0;
    for (const char *at = text; (at = strstr(at, part)); at++)
        n_found++;
    if (n_found != n_times)
        fail_msg("the log says \"%s\" %u times, not %u:\n%s", part, n_found, n_times, text);
}

static void expect_log(const struct bench *bench, const char *part)
{
    expect_log_times(bench, part, 1);
}

static void start_with_keys(struct bench *bench)
{
    start(bench, (const char *const[]){"--client-endpoint", bench->endpoint, "--client-secret",
                                       path(bench, "server.secret"), "--client-keys", path(bench, "clients"), NULL});
}

/* Asks for its health: 0, or -EACCES: the key is refused. name: whose keys; NULL: none. */
static int ask(const struct bench *bench, const char *endpoint, const char *name)
{
    Hcattn__Health health = HCATTN__HEALTH__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    uint8_t bytes[64];
    char secret[SOCKET_KEY_SIZE], error[KEY_FILE_ERROR_SIZE], file[64];
    struct socket_context *context = NULL;
    struct socket *socket = NULL;
    struct socket_message *message = NULL;
    request.request_id = 9;
    request.request_case = HCATTN__REQUEST__REQUEST_HEALTH;
    request.health = &health;
    struct frame frame = {.data = bytes, .n_bytes = hcattn__request__pack(&request, bytes)};
    assert_int_equal(socket_context_new(&context), 0);
    assert_int_equal(socket_new_dealer(context, 7, 0, &socket), 0);
    if (name) {
        snprintf(file, sizeof(file), "%s.secret", name);
        assert_int_equal(key_file_secret(path(bench, file), secret, error), 0);
        assert_int_equal(socket_use_keys(socket, bench->server, secret), 0);
    }
    assert_int_equal(socket_watch(context, socket), 0);
    assert_int_equal(socket_connect(socket, endpoint), 0);
    assert_int_equal(socket_send(socket, &frame, 1, false), 0);
    int result = -ETIMEDOUT;
    for (uint64_t deadline = clock_deadline_us(PATIENCE_US); result == -ETIMEDOUT && clock_remaining_us(deadline);) {
        struct socket_item item = {.socket = socket, .fd = -1, .events = SOCKET_READABLE};
        socket_poll(&item, 1, 50);
        if (socket_receive(socket, false, &message) == 0)
            result = 0;
        else if (socket_state(socket) == SOCKET_REFUSED)
            result = -EACCES;
        else if (socket_state(socket) == SOCKET_MISMATCH)
            result = -EPROTO;
    }
    socket_message_free(message);
    socket_free(socket);
    socket_context_free(context);
    return result;
}

static void test_who_is_served(void **state)
{
    struct bench *bench = *state;
    char ipc[128];
    start_with_keys(bench);
    snprintf(ipc, sizeof(ipc), "ipc://%s", path(bench, "client.sock"));
    assert_int_equal(ask(bench, bench->endpoint, "alice"), 0);
    assert_int_equal(ask(bench, bench->endpoint, "bob"), -EACCES);
    assert_int_equal(ask(bench, bench->endpoint, NULL), -EPROTO);
    assert_int_equal(ask(bench, ipc, NULL), 0);
    expect_log(bench, "(CURVE; client keys: 1)");
    expect_log(bench, "a client at 127.0.0.1 is refused: its key ");
    expect_log(bench, bench->bob);
}

static void test_the_list_changes(void **state)
{
    struct bench *bench = *state;
    char text[200];
    start_with_keys(bench);
    assert_int_equal(ask(bench, bench->endpoint, "bob"), -EACCES);
    snprintf(text, sizeof(text), "%s\n%s\n", bench->alice, bench->bob);
    write_file(bench, "clients", text);
    assert_int_equal(ask(bench, bench->endpoint, "bob"), 0);
    write_file(bench, "clients", "what?\n"); /* changes nothing */
    assert_int_equal(ask(bench, bench->endpoint, "bob"), 0);
    expect_log(bench, "line 1: this is no key (40 characters of Z85); the 2 keys read before go on");
    snprintf(text, sizeof(text), "%s only\n", bench->bob);
    write_file(bench, "clients", text);
    assert_int_equal(ask(bench, bench->endpoint, "alice"), -EACCES);
    assert_int_equal(ask(bench, bench->endpoint, "bob"), 0);
    assert_int_equal(unlink(path(bench, "clients")), 0);
    for (int i = 0; i < 3; i++)
        assert_int_equal(ask(bench, bench->endpoint, "bob"), 0);
    expect_log(bench, "No such file or directory; the 1 keys read before go on");
}

static void refuse(struct bench *bench, const char *secret, const char *keys, const char *endpoint, const char *part)
{
    const char *arguments[7] = {NULL};
    size_t n = 0;
    if (endpoint) {
        arguments[n++] = "--client-endpoint";
        arguments[n++] = endpoint;
    }
    if (secret) {
        arguments[n++] = "--client-secret";
        arguments[n++] = path(bench, secret);
    }
    if (keys) {
        arguments[n++] = "--client-keys";
        arguments[n++] = path(bench, keys);
    }
    start(bench, arguments);
    assert_int_equal(end(bench), 2);
    expect_log(bench, part);
}

static void test_what_it_does_not_start_with(void **state)
{
    static const char together[] = "--client-secret, --client-keys and a --client-endpoint tcp://... belong together";
    struct bench *bench = *state;
    refuse(bench, "server.secret", NULL, bench->endpoint, together);
    refuse(bench, NULL, "clients", bench->endpoint, together);
    refuse(bench, "server.secret", "clients", NULL, together);
    refuse(bench, "server.secret", "clients", "ipc:///tmp/x", together);
    refuse(bench, "none", "clients", bench->endpoint, "none: No such file or directory");
    refuse(bench, "server.public", "clients", bench->endpoint, "this is a public key; a secret one is needed");
    refuse(bench, "server.secret", "alice.secret", bench->endpoint, "this is a secret key; a public one is needed");
    write_file(bench, "clients", "# nobody yet\n");
    refuse(bench, "server.secret", "clients", bench->endpoint, "clients holds no key");
    write_file(bench, "clients", "# me\nabc\n");
    refuse(bench, "server.secret", "clients", bench->endpoint, "clients, line 2: this is no key");
    assert_int_equal(chmod(path(bench, "server.secret"), 0644), 0);
    write_file(bench, "clients", bench->alice);
    refuse(bench, "server.secret", "clients", bench->endpoint, "is open to others: chmod 600");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_who_is_served, setup, teardown),
        cmocka_unit_test_setup_teardown(test_the_list_changes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_it_does_not_start_with, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
