#include "tests/system/service.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/clock.h"

enum { START_S = 120 * PATIENCE, STOP_S = 60 * PATIENCE, CALL_MS = 300000 * PATIENCE, MAX_ARGUMENTS = 32 };

static void log_path(const struct service *service, char *path, size_t size)
{
    snprintf(path, size, "%s/log", service->directory);
}

void service_show_log(const struct service *service)
{
    char path[96], line[1024];
    log_path(service, path, sizeof(path));
    FILE *file = fopen(path, "r");
    if (file == NULL)
        return;
    print_error("---- log of the service ----\n");
    while (fgets(line, sizeof(line), file) != NULL)
        print_error("%s", line);
    print_error("---- end of log ----\n");
    fclose(file);
}

bool service_log_contains(const struct service *service, const char *text)
{
    char path[96], line[4096];
    bool found = false;
    log_path(service, path, sizeof(path));
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    while (!found && fgets(line, sizeof(line), file) != NULL)
        found = strstr(line, text) != NULL;
    fclose(file);
    return found;
}

static void give_up(struct service *service, const char *what)
{
    service_show_log(service);
    if (service->pid > 0)
        kill(service->pid, SIGTERM);
    fail_msg("%s", what);
}

static const char *program_directory(void)
{
    const char *directory = getenv("HCATTN_BIN");
    assert_non_null(directory); /* set by ctest */
    return directory;
}

void service_launch(struct service *service, const char *const *arguments, const char *const *environment)
{
    char path[96], program[512];
    const char *argv[MAX_ARGUMENTS] = {program, "up"};
    size_t n = 2;
    *service = (struct service){0};
    strcpy(service->directory, "/tmp/hcattn-test-XXXXXX");
    assert_non_null(mkdtemp(service->directory));
    snprintf(program, sizeof(program), "%s/hcattn", program_directory());
    for (; *arguments != NULL && n + 1 < MAX_ARGUMENTS; arguments++)
        argv[n++] = *arguments;
    log_path(service, path, sizeof(path));
    service->pid = fork();
    assert_true(service->pid >= 0);
    if (service->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM); /* a test that fails leaves no service behind */
        int fd = open(path, O_CREAT | O_WRONLY | O_APPEND, 0600);
        dup2(fd, 1);
        dup2(fd, 2);
        setenv("HCATTN_RUNTIME_DIR", service->directory, 1);
        setenv("HCATTN_MEMORY", "1GiB", 1); /* the default is half of the machine */
        for (; environment != NULL && *environment != NULL; environment++)
            putenv((char *)(uintptr_t)*environment);
        execv(program, (char *const *)(uintptr_t)argv);
        _exit(127);
    }
    struct hcattn_config config = {.runtime_dir = service->directory, .connect_timeout_ms = 60000 * PATIENCE};
    assert_int_equal(hcattn_open(&config, &service->client, NULL), 0);
}

/* Are the supervisors registered as well, which may come a moment after their processes? */
static bool is_supervised(struct service *service)
{
    struct hcattn_stats stats = {0};
    if (hcattn_stats(service->client, 1000, &stats, NULL) < 0)
        return false;
    bool all = true;
    for (size_t i = 0; i < stats.n_processes; i++)
        all &= stats.processes[i].n_starts > 0 || strcmp(stats.processes[i].program, "hc-coordinator") == 0;
    hcattn_stats_free(&stats);
    return all;
}

void service_wait_ready(struct service *service)
{
    uint64_t deadline = clock_deadline_us((uint64_t)START_S * 1000000);
    struct hcattn_health health = {0};
    while (clock_now_us() < deadline) {
        if (waitpid(service->pid, NULL, WNOHANG) == service->pid) {
            service->pid = 0;
            give_up(service, "the service ended while starting");
        }
        if (hcattn_health(service->client, 1000, &health, NULL) == 0 && health.ready && is_supervised(service))
            return;
        clock_sleep_us(50000);
    }
    give_up(service, "the service did not become ready");
}

void service_start(struct service *service, const char *const *arguments, const char *const *environment)
{
    service_launch(service, arguments, environment);
    service_wait_ready(service);
}

/* Removes the runtime directory and what lies flat in it. */
static void remove_directory(const char *directory)
{
    DIR *entries = opendir(directory);
    assert_non_null(entries);
    for (struct dirent *entry; (entry = readdir(entries)) != NULL;)
        unlinkat(dirfd(entries), entry->d_name, 0);
    closedir(entries);
    rmdir(directory);
}

void service_stop(struct service *service)
{
    int status = -1;
    uint64_t deadline = clock_deadline_us((uint64_t)STOP_S * 1000000);
    service->client = hcattn_close(service->client);
    kill(service->pid, SIGTERM);
    while (waitpid(service->pid, &status, WNOHANG) == 0) {
        if (clock_now_us() > deadline)
            give_up(service, "the service did not stop");
        clock_sleep_us(20000);
    }
    service->pid = 0;
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        give_up(service, "the service did not end with status 0");
    if (service_log_contains(service, "Sanitizer") || service_log_contains(service, "runtime error:"))
        give_up(service, "a sanitizer has something to say");
    remove_directory(service->directory);
}

const char *service_real_model(void)
{
    const char *path = getenv("HCATTN_TEST_MODEL");
    if (path == NULL || *path == '\0') {
        print_message("HCATTN_TEST_MODEL is not set: scripts/test sets it\n");
        skip();
    }
    return path;
}

enum { MAX_TINY = 8 };
static struct {
    char arguments[256];
    char directory[64]; /* its own: what a worker learns from a model is kept beside it */
    char path[96];
} tiny[MAX_TINY];
static uint32_t n_tiny;

static void remove_tiny(void)
{
    for (uint32_t i = 0; i < n_tiny; i++)
        remove_directory(tiny[i].directory);
}

const char *service_tiny_model(const char *make_tiny_arguments)
{
    char command[512];
    for (uint32_t i = 0; i < n_tiny; i++)
        if (strcmp(tiny[i].arguments, make_tiny_arguments) == 0)
            return tiny[i].path;
    assert_true(n_tiny < MAX_TINY);
    if (n_tiny == 0)
        atexit(remove_tiny);
    char directory[] = "/tmp/hcattn-tiny-XXXXXX";
    assert_non_null(mkdtemp(directory));
    strcpy(tiny[n_tiny].directory, directory);
    snprintf(tiny[n_tiny].path, sizeof(tiny[n_tiny].path), "%s/model.gguf", directory);
    snprintf(tiny[n_tiny].arguments, sizeof(tiny[n_tiny].arguments), "%s", make_tiny_arguments);
    snprintf(command, sizeof(command), "tests/models/make-tiny %s %s", make_tiny_arguments, tiny[n_tiny].path);
    assert_int_equal(system(command), 0);
    return tiny[n_tiny++].path;
}

pid_t service_process(struct service *service, const char *program, uint32_t index)
{
    struct hcattn_stats stats = {0};
    pid_t pid = 0;
    assert_int_equal(hcattn_stats(service->client, CALL_MS, &stats, NULL), 0);
    for (size_t i = 0; i < stats.n_processes; i++)
        if (strcmp(stats.processes[i].program, program) == 0 && stats.processes[i].index == index)
            pid = (pid_t)stats.processes[i].pid;
    hcattn_stats_free(&stats);
    assert_true(pid > 0);
    return pid;
}

/* ---- generation ---- */

static int take_accepted(void *context, const struct hcattn_accepted *accepted)
{
    struct answer *answer = context;
    if (answer->prompt_ids != NULL) /* told again after a loss */
        return 0;
    answer->n_prompt = (uint32_t)accepted->n_prompt_ids;
    answer->prompt_ids = calloc(accepted->n_prompt_ids + 1, sizeof(uint32_t));
    if (accepted->n_prompt_ids > 0)
        memcpy(answer->prompt_ids, accepted->prompt_ids, accepted->n_prompt_ids * sizeof(uint32_t));
    return 0;
}

static int take_generated(void *context, const struct hcattn_generated *generated)
{
    struct answer *answer = context;
    size_t length = strlen(answer->text);
    answer->text = realloc(answer->text, length + generated->text_bytes + 1);
    memcpy(answer->text + length, generated->text, generated->text_bytes);
    answer->text[length + generated->text_bytes] = '\0';
    for (size_t i = 0; i < generated->n_ids; i++) {
        uint32_t k = answer->n++;
        assert_int_equal(generated->first + i, k); /* in order, none twice */
        answer->ids = realloc(answer->ids, answer->n * sizeof(uint32_t));
        answer->logprobs = realloc(answer->logprobs, answer->n * sizeof(float));
        answer->ids[k] = generated->ids[i];
        answer->logprobs[k] = generated->logprobs == NULL ? 0 : generated->logprobs[i].logprob;
        if (answer->n_top > 0) {
            answer->top = realloc(answer->top, (size_t)answer->n * answer->n_top * sizeof(*answer->top));
            assert_int_equal(generated->logprobs[i].n_top, answer->n_top);
            memcpy(answer->top + (size_t)k * answer->n_top, generated->logprobs[i].top,
                   answer->n_top * sizeof(*answer->top));
        }
        if (answer->on_token != NULL)
            answer->on_token(answer->context, answer->n);
    }
    return 0;
}

int service_generate(struct hcattn *client, const struct hcattn_generate *generate, struct answer *answer,
                     struct hcattn_error *ret_error)
{
    struct hcattn_events events = {.context = answer, .accepted = take_accepted, .generated = take_generated};
    answer->n_top = generate->top_logprobs;
    answer->text = calloc(1, 1);
    return hcattn_generate(client, generate, &events, CALL_MS, &answer->finished, ret_error);
}

static void generate_alone(struct hcattn *client, struct hcattn_generate *generate, struct answer *answer)
{
    struct hcattn_error error = {0};
    struct hcattn_session_config config = {.ephemeral = true};
    struct hcattn_session session;
    if (hcattn_open_session(client, &config, CALL_MS, &session, &error) < 0)
        fail_msg("open session: %s", error.sentence);
    generate->session = session.session;
    generate->logprobs = true;
    if (service_generate(client, generate, answer, &error) < 0)
        fail_msg("generate: %s", error.sentence);
    if (hcattn_close_session(client, session.session, CALL_MS, NULL, &error) < 0)
        fail_msg("close session: %s", error.sentence);
}

void service_generate_text(struct hcattn *client, const char *text, uint32_t max_tokens, uint32_t n_top,
                           struct answer *answer)
{
    struct hcattn_generate generate = {
        .input = {.text = text, .parse_special = true}, .max_tokens = max_tokens, .top_logprobs = n_top};
    generate_alone(client, &generate, answer);
}

void service_generate_ids(struct hcattn *client, const uint32_t *ids, size_t n_ids, uint32_t max_tokens,
                          struct answer *answer)
{
    struct hcattn_generate generate = {
        .input = {.ids = ids, .n_ids = n_ids}, .max_tokens = max_tokens, .ignore_end = true};
    generate_alone(client, &generate, answer);
}

void service_answer_free(struct answer *answer)
{
    free(answer->prompt_ids);
    free(answer->ids);
    free(answer->logprobs);
    free(answer->top);
    free(answer->text);
    *answer = (struct answer){0};
}

void service_answer_assert_equal(const struct answer *a, const struct answer *b)
{
    assert_int_equal(a->n, b->n);
    for (uint32_t i = 0; i < a->n; i++)
        assert_int_equal(a->ids[i], b->ids[i]);
    assert_memory_equal(a->logprobs, b->logprobs, a->n * sizeof(float));
    assert_string_equal(a->text, b->text);
}
