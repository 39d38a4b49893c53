/*
 * test_start.c - starting what cannot be started: models, options, directories and sockets that are wrong, each told in one
 * line with exit status 2; a service that has no room; and the ways to start and stop that work.
 */
#include "tests/system/programs.h"
#include "tests/system/rows.h"
#include "tests/system/service.h"

#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/clock.h"

struct folder {
    char path[64]; /* runtime directory */
    char file[96]; /* for a test to write */
    char log[96];
};

static int set_up(void **state)
{
    struct folder *folder = calloc(1, sizeof(*folder));
    strcpy(folder->path, "/tmp/hcattn-test-XXXXXX");
    assert_non_null(mkdtemp(folder->path));
    snprintf(folder->file, sizeof(folder->file), "%s/model.gguf", folder->path);
    snprintf(folder->log, sizeof(folder->log), "%s/log", folder->path);
    *state = folder;
    return 0;
}

static int tear_down(void **state)
{
    struct folder *folder = *state;
    static const char *const names[] = {"model.gguf", "log",       "hcattn.lock", "hcattn.log", "peer.sock",
                                        "data.sock",  "work.sock", "client.sock", "sub"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char path[128];
        snprintf(path, sizeof(path), "%s/%s", folder->path, names[i]);
        if (unlink(path) < 0)
            rmdir(path);
    }
    int result = rmdir(folder->path); /* nothing else was left in it */
    free(folder);
    return result;
}

static struct outcome run(const char *name, const char *directory, const char *const *arguments)
{
    struct program program = {.name = name, .runtime_dir = directory};
    return programs_run(&program, arguments);
}

static void refused(const char *name, const char *directory, int status, const char *const *parts,
                    const char *const *arguments)
{
    struct outcome outcome = run(name, directory, arguments);
    programs_assert_refused(&outcome, status, parts);
    programs_free(&outcome);
}

/* ---- models ---- */

static uint8_t *read_tiny(size_t *ret_n_bytes)
{
    FILE *file = fopen(service_tiny_model(""), "r");
    struct stat status;
    assert_non_null(file);
    assert_int_equal(fstat(fileno(file), &status), 0);
    uint8_t *bytes = malloc((size_t)status.st_size);
    assert_int_equal(fread(bytes, 1, (size_t)status.st_size, file), status.st_size);
    fclose(file);
    *ret_n_bytes = (size_t)status.st_size;
    return bytes;
}

static void write_file(const char *path, const void *bytes, size_t n_bytes)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n_bytes, file), n_bytes);
    assert_int_equal(fclose(file), 0);
}

/* The worker itself: one line that names the file, and status 2 so that its supervisor does not try again. */
static void worker_refuses(struct folder *folder, const char *path, const char *part)
{
    refused("hc-gpu-worker", folder->path, 2, ARGUMENTS(path, part), ARGUMENTS("--model", path));
}

static void no_model(void **state)
{
    struct folder *folder = *state;
    size_t n_bytes;
    uint8_t *bytes = read_tiny(&n_bytes);
    worker_refuses(folder, "/no-such-model.gguf", "No such file");
    worker_refuses(folder, "/tmp", "");
    worker_refuses(folder, "/dev/null", "");
    worker_refuses(folder, "/proc/self/mem", "");
    refused("hc-gpu-worker", folder->path, 2, ARGUMENTS("--model"), ARGUMENTS("--isa", "auto"));
    const size_t cuts[] = {0, 1, 4, 23, 24, 100, n_bytes / 2, n_bytes - 1};
    for (size_t i = 0; i < sizeof(cuts) / sizeof(cuts[0]); i++) {
        write_file(folder->file, bytes, cuts[i]);
        worker_refuses(folder, folder->file, "");
    }
    bytes[0] = 'X';
    write_file(folder->file, bytes, n_bytes);
    worker_refuses(folder, folder->file, "GGUF");
    bytes[0] = 'G';
    bytes[4] = 2;
    write_file(folder->file, bytes, n_bytes);
    worker_refuses(folder, folder->file, "version 2");
    bytes[4] = 3;
    memset(bytes + 8, 0xff, 16); /* numbers of tensors and keys */
    write_file(folder->file, bytes, n_bytes);
    worker_refuses(folder, folder->file, "");
    free(bytes);
}

static void unusable_models(void **state)
{
    struct folder *folder = *state;
    static const struct {
        const char *arguments, *part;
    } models[] = {
        {"--set general.architecture=str:mamba", "mamba"},
        {"--drop general.architecture", "general.architecture"},
        {"--heads 6 --kv-heads 4 --embd 96", "KV heads"},
        {"--drop llama.block_count", "llama.block_count"},
        {"--set llama.block_count=u32:9", "blk.2"},
        {"--set llama.block_count=u32:4000000000", "llama.block_count"},
        {"--drop-tensor blk.1.ffn_up.weight", "blk.1.ffn_up.weight"},
        {"--set llama.context_length=u32:0", "context"},
        {"--rope-scaling spiral", "spiral"},
        {"--tokenizer none", "tokenizer"},
        {"--pre klingon", "klingon"},
        {"--set tokenizer.ggml.model=str:rwkv", "rwkv"},
    };
    for (size_t i = 0; i < sizeof(models) / sizeof(models[0]); i++) {
        char command[256];
        snprintf(command, sizeof(command), "tests/models/make-tiny %s %s", models[i].arguments, folder->file);
        assert_int_equal(system(command), 0);
        worker_refuses(folder, folder->file, models[i].part);
    }
    /* a tensor type that nobody supports: the number after the name and dimensions of token_embd.weight */
    size_t n_bytes;
    uint8_t *bytes = read_tiny(&n_bytes);
    uint8_t *name = memmem(bytes, n_bytes, "token_embd.weight", 17);
    assert_non_null(name);
    name[17 + 4 + 16] = 19; /* IQ1_S */
    write_file(folder->file, bytes, n_bytes);
    worker_refuses(folder, folder->file, "token_embd.weight");
    free(bytes);
}

/* The whole service: it ends at once instead of trying again, with the reason in its output and status 2. */
static void up_tells_why(void **state)
{
    struct folder *folder = *state;
    refused(NULL, folder->path, 2, ARGUMENTS("/no-such-model.gguf", "No such file"),
            ARGUMENTS("up", "--model", "/no-such-model.gguf"));
    struct program homeless = {.runtime_dir = folder->path, .environment = ARGUMENTS("XDG_DATA_HOME=/no-such-home")};
    struct outcome outcome = programs_run(&homeless, ARGUMENTS("up"));
    programs_assert_refused(&outcome, 2, ARGUMENTS("/no-such-home", "fetch-model", "--model"));
    programs_free(&outcome);
    size_t n_bytes;
    uint8_t *bytes = read_tiny(&n_bytes);
    write_file(folder->file, bytes, n_bytes / 2);
    free(bytes);
    uint64_t begin = clock_now_us();
    outcome =
        run(NULL, folder->path, ARGUMENTS("up", "--model", folder->file, "--memory", "64MiB", "--log-level", "error"));
    assert_int_equal(outcome.status, 2);
    assert_non_null(strstr(outcome.err, folder->file));
    assert_non_null(strstr(outcome.err, "hcattn up: gpu-worker 0 ended with status 2"));
    assert_int_equal(programs_n_lines(outcome.err), 3); /* that it starts, why it cannot, and what of it */
    assert_true(clock_now_us() - begin < UINT64_C(10000000) * PATIENCE);
    programs_free(&outcome);
}

/* ---- options ---- */

static void bad_options(void **state)
{
    struct folder *folder = *state;
    const char *model = service_tiny_model("");
    const char *directory = folder->path;
    refused(NULL, directory, 2, ARGUMENTS("--backend", "'nonsense'"),
            ARGUMENTS("up", "--model", model, "--backend", "nonsense"));
    refused(NULL, directory, 2, ARGUMENTS("--transport"), ARGUMENTS("up", "--model", model, "--transport", "pigeon"));
    refused(NULL, directory, 2, ARGUMENTS("--isa"), ARGUMENTS("up", "--model", model, "--isa", "neon"));
    refused(NULL, directory, 2, ARGUMENTS("--stores"), ARGUMENTS("up", "--model", model, "--stores", "0"));
    refused(NULL, directory, 2, ARGUMENTS("--stores"), ARGUMENTS("up", "--model", model, "--stores", "13"));
    refused(NULL, directory, 2, ARGUMENTS("--memory"), ARGUMENTS("up", "--model", model, "--memory", "much"));
    refused(NULL, directory, 2, ARGUMENTS("unexpected argument"), ARGUMENTS("up", model));
    refused(NULL, directory, 2, ARGUMENTS("a role is needed"), ARGUMENTS("run"));
    refused(NULL, directory, 2, ARGUMENTS("unknown role 'gateway'"), ARGUMENTS("run", "gateway"));
    refused(NULL, directory, 2, ARGUMENTS("hc-coordinator", "/no-such-bin"),
            ARGUMENTS("run", "--bin-dir", "/no-such-bin", "coordinator"));
    static const char *const programs[] = {"hc-coordinator", "hc-value-store", "hc-gpu-worker"};
    for (size_t i = 0; i < 3; i++) {
        refused(programs[i], directory, 2, ARGUMENTS("--frobnicate"), ARGUMENTS("--frobnicate"));
        refused(programs[i], directory, 2, ARGUMENTS("unexpected argument 'more'"), ARGUMENTS("more"));
        refused(programs[i], directory, 2, ARGUMENTS("--incarnation"), ARGUMENTS("--incarnation", "xyz"));
        refused(programs[i], directory, 2, ARGUMENTS("--incarnation"), ARGUMENTS("--incarnation", "0"));
        refused(programs[i], directory, 2, ARGUMENTS("--log-level"), ARGUMENTS("--log-level", "loud"));
        struct outcome help = run(programs[i], directory, ARGUMENTS("--help"));
        programs_assert_done(&help);
        assert_non_null(strstr(help.out, programs[i]));
        programs_free(&help);
    }
    refused("hc-gpu-worker", directory, 2, ARGUMENTS("nonsense"), ARGUMENTS("--model", model, "--backend", "nonsense"));
    refused("hc-coordinator", directory, 2, ARGUMENTS("--stores"), ARGUMENTS("--stores", "65"));
    refused("hc-coordinator", directory, 2, ARGUMENTS("--policy"), ARGUMENTS("--policy", "clever"));
    refused("hc-coordinator", directory, 2, ARGUMENTS("nowhere"), ARGUMENTS("--client-endpoint", "nowhere"));
    if (!__builtin_cpu_supports("avx512f"))
        for (size_t i = 1; i < 3; i++)
            refused(programs[i], directory, 2, ARGUMENTS("avx512"), ARGUMENTS("--isa", "avx512", "--threads", "1"));
}

/* ---- directories and sockets ---- */

static void bad_directories(void **state)
{
    struct folder *folder = *state;
    char path[256], sub[96];
    snprintf(sub, sizeof(sub), "%s/sub", folder->path);
    memset(path, 'x', 200);
    memcpy(path, "/tmp/", 5);
    path[200] = '\0';
    static const char *const commands[] = {"status", "down", "generate", "up"};
    for (size_t i = 0; i < 4; i++) {
        const char *command = commands[i], *word = i == 2 ? "words" : NULL;
        refused(NULL, path, 2, ARGUMENTS("too long", "HCATTN_RUNTIME_DIR"), (const char *const[]){command, word, NULL});
        refused(NULL, "/no-such-parent/x", 2, ARGUMENTS("/no-such-parent/x"),
                (const char *const[]){command, word, NULL});
        refused(NULL, "/dev/null", 2, ARGUMENTS("not a directory"), (const char *const[]){command, word, NULL});
        assert_int_equal(symlink("/tmp", sub), 0);
        refused(NULL, sub, 2, ARGUMENTS("not a directory"), (const char *const[]){command, word, NULL});
        assert_int_equal(unlink(sub), 0);
        assert_int_equal(mkdir(sub, 0755), 0);
        refused(NULL, sub, 2, ARGUMENTS("open to others", "chmod 700"), (const char *const[]){command, word, NULL});
        assert_int_equal(chmod(sub, 0700), 0);
        if (geteuid() == 0) {
            assert_int_equal(chown(sub, 12345, 12345), 0);
            refused(NULL, sub, 2, ARGUMENTS("uid 12345"), (const char *const[]){command, word, NULL});
        }
        assert_int_equal(rmdir(sub), 0);
    }
}

static void no_service(void **state)
{
    struct folder *folder = *state;
    uint64_t begin = clock_now_us();
    refused(NULL, folder->path, 1, ARGUMENTS("no coordinator at", "hcattn up"), ARGUMENTS("generate", "words"));
    refused(NULL, folder->path, 1, ARGUMENTS("no coordinator at", "hcattn up"), ARGUMENTS("status"));
    refused(NULL, folder->path, 1, ARGUMENTS("no coordinator at", "hcattn up"), ARGUMENTS("tokenize", "words"));
    refused(NULL, folder->path, 1, ARGUMENTS("no coordinator answers at tcp://127.0.0.1:9"),
            ARGUMENTS("status", "--endpoint", "tcp://127.0.0.1:9"));
    assert_true(clock_now_us() - begin < UINT64_C(8000000) * PATIENCE);
    struct outcome outcome = run(NULL, folder->path, ARGUMENTS("down"));
    programs_assert_done(&outcome);
    assert_non_null(strstr(outcome.out, "nothing runs"));
    programs_free(&outcome);
}

static void wait_for_socket(const char *directory)
{
    char path[96];
    snprintf(path, sizeof(path), "%s/client.sock", directory);
    uint64_t deadline = clock_deadline_us(UINT64_C(20000000) * PATIENCE);
    while (access(path, F_OK) < 0 && clock_now_us() < deadline)
        clock_sleep_us(5000);
    assert_int_equal(access(path, F_OK), 0);
}

static void socket_in_use(void **state)
{
    struct folder *folder = *state;
    struct program coordinator = {.name = "hc-coordinator", .runtime_dir = folder->path};
    pid_t pid = programs_start(&coordinator, (const char *const[]){NULL}, folder->log);
    wait_for_socket(folder->path);
    refused("hc-coordinator", folder->path, 2, ARGUMENTS("peer.sock is in use", "another coordinator"),
            (const char *const[]){NULL});
    struct outcome outcome =
        run(NULL, folder->path,
            ARGUMENTS("up", "--model", service_tiny_model(""), "--memory", "64MiB", "--log-level", "error"));
    assert_int_equal(outcome.status, 2);
    assert_non_null(strstr(outcome.err, "peer.sock is in use"));
    assert_non_null(strstr(outcome.err, "hcattn up: coordinator 0 ended with status 2"));
    programs_free(&outcome);
    /* the first one has not suffered */
    outcome = run(NULL, folder->path, ARGUMENTS("status", "--json"));
    programs_assert_done(&outcome);
    programs_free(&outcome);
    kill(pid, SIGTERM);
    assert_int_equal(programs_wait(pid, 20 * PATIENCE), 0);
}

/* ---- what works ---- */

static void detached(void **state)
{
    struct folder *folder = *state;
    const char *model = service_tiny_model("");
    struct outcome up = run(NULL, folder->path, ARGUMENTS("up", "--detach", "--model", model, "--memory", "64MiB"));
    if (up.status != 0)
        fail_msg("status %d: %s", up.status, up.err);
    assert_int_equal(strncmp(up.out, "ready\n", 6), 0);
    programs_free(&up);
    refused(NULL, folder->path, 2, ARGUMENTS("already running as pid"), ARGUMENTS("up", "--model", model));
    refused(NULL, folder->path, 2, ARGUMENTS("already running as pid"), ARGUMENTS("up", "-d", "--model", model));
    struct outcome text = run(NULL, folder->path, ARGUMENTS("generate", "--raw", "-n", "4", "words"));
    programs_assert_done(&text);
    programs_free(&text);
    struct outcome down = run(NULL, folder->path, ARGUMENTS("down"));
    programs_assert_done(&down);
    assert_int_equal(strncmp(down.out, "stopped (pid ", 13), 0);
    programs_free(&down);
    refused(NULL, folder->path, 1, ARGUMENTS("no coordinator"), ARGUMENTS("status"));
}

static pid_t child_of(pid_t parent)
{
    char path[64];
    int pid = 0;
    snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)parent, (int)parent);
    FILE *file = fopen(path, "r");
    if (file != NULL && fscanf(file, "%d", &pid) != 1)
        pid = 0;
    if (file != NULL)
        fclose(file);
    return pid;
}

static void run_supervises(void **state)
{
    struct folder *folder = *state;
    struct program program = {.runtime_dir = folder->path};
    pid_t pid = programs_start(&program, ARGUMENTS("run", "coordinator", "--", "--stores", "2"), folder->log);
    wait_for_socket(folder->path);
    pid_t child = child_of(pid), next = 0;
    assert_true(child > 0);
    assert_int_equal(kill(child, SIGKILL), 0);
    uint64_t deadline = clock_deadline_us(UINT64_C(20000000) * PATIENCE);
    while (((next = child_of(pid)) == 0 || next == child) && clock_now_us() < deadline)
        clock_sleep_us(10000);
    assert_true(next > 0 && next != child);
    struct outcome outcome = {0};
    do {
        programs_free(&outcome);
        outcome = run(NULL, folder->path, ARGUMENTS("status", "--json", "--connect-timeout", "10s"));
    } while (outcome.status != 0 && clock_now_us() < deadline);
    programs_assert_done(&outcome);
    char wanted[32];
    snprintf(wanted, sizeof(wanted), "\"pid\": %d,", (int)next);
    assert_non_null(strstr(outcome.out, wanted));
    assert_non_null(strstr(outcome.out, "value-store 1 is not there")); /* its own option arrived */
    programs_free(&outcome);
    kill(pid, SIGTERM);
    assert_int_equal(programs_wait(pid, 20 * PATIENCE), 0);
    assert_int_equal(kill(next, 0), -1);
}

/* ---- services with something missing ---- */

static void unknown_template(void **state)
{
    (void)state;
    struct service service;
    service_start(&service, ARGUMENTS("--model", service_tiny_model("--chat unknown"), "--memory", "64MiB"), NULL);
    refused(NULL, service.directory, 1, ARGUMENTS("hcattn generate", "template"), ARGUMENTS("generate", "words"));
    struct program chat = {.runtime_dir = service.directory, .input = "hello\n"};
    struct outcome outcome = programs_run(&chat, ARGUMENTS("chat"));
    programs_assert_refused(&outcome, 1, ARGUMENTS("hcattn chat", "template"));
    programs_free(&outcome);
    refused(NULL, service.directory, 1, ARGUMENTS("template"), ARGUMENTS("tokenize", "--chat", "words"));
    outcome = run(NULL, service.directory, ARGUMENTS("generate", "--raw", "--ignore-end", "-n", "4", "words"));
    programs_assert_done(&outcome);
    assert_true(outcome.out_bytes > 1);
    programs_free(&outcome);
    service_stop(&service);
}

/* "N bytes asked, M free" of the line. */
static void bytes_of(const char *line, uint64_t *asked, uint64_t *free_bytes)
{
    unsigned long long a = 0, f = 0;
    const char *from = strstr(line, "no room: ");
    if (from == NULL || sscanf(from, "no room: %llu bytes asked, %llu free", &a, &f) != 2)
        fail_msg("no numbers in: %s", line);
    *asked = a;
    *free_bytes = f;
}

/* Two blocks fit. What needs more is refused with numbers, what needs less works, also when it comes right afterwards. */
static void no_room(void **state)
{
    (void)state;
    struct service service;
    const char *model = service_tiny_model("--context 4096");
    service_start(&service, ARGUMENTS("--model", model, "--memory", "450KiB"), NULL);
    struct hcattn_stats stats;
    assert_int_equal(hcattn_stats(service.client, 60000, &stats, NULL), 0);
    uint64_t block = stats.store_bytes_per_token * 64, total = 0, asked, free_bytes;
    for (size_t i = 0; i < stats.n_processes; i++)
        total += stats.processes[i].bytes_total;
    hcattn_stats_free(&stats);
    uint64_t n_blocks = total / block;
    assert_true(n_blocks >= 1 && n_blocks < 30); /* otherwise choose another --memory above */
    char fits[16], does_not[16];
    snprintf(fits, sizeof(fits), "%u", (unsigned)(n_blocks * 64 - 20));
    snprintf(does_not, sizeof(does_not), "%u", (unsigned)(n_blocks * 64 + 1));
    for (int i = 0; i < 3; i++) {
        struct outcome outcome = run(NULL, service.directory, ARGUMENTS("generate", "--raw", "-n", does_not, "words"));
        programs_assert_refused(&outcome, 1, ARGUMENTS("hcattn generate: ", "no room"));
        bytes_of(outcome.err, &asked, &free_bytes);
        assert_int_equal(asked, (n_blocks + 1) * block);
        assert_int_equal(free_bytes, n_blocks * block);
        programs_free(&outcome);
        outcome = run(NULL, service.directory, ARGUMENTS("generate", "--raw", "--ignore-end", "-n", fits, "words"));
        programs_assert_done(&outcome);
        programs_free(&outcome);
    }
    assert_int_equal(rows_n_used_blocks(&service, 1), 0);
    service_stop(&service);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(no_model),
        TEST(unusable_models),
        TEST(up_tells_why),
        TEST(bad_options),
        TEST(bad_directories),
        TEST(no_service),
        TEST(socket_in_use),
        TEST(detached),
        TEST(run_supervises),
        cmocka_unit_test(unknown_template),
        cmocka_unit_test(no_room),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
