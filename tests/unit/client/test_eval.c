/* test_eval.c - eval, profile, statistics and codebook as people and programs see them: output, JSON, files, exit status. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/client/fake_coordinator.h"
#include "tests/unit/client/programs.h"

#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define N_TOKENS 400u /* of any text */

struct service {
    pthread_mutex_t lock; /* held by the fake's thread while it serves */
    struct programs programs;
    struct fake_coordinator fake;
    char jobs[1024];    /* of the last command, one after the other: "statistics 0; pq2/4096 0; eval default,q8_0; " */
    char policies[512]; /* of sessions and forks */
    unsigned n_opened, n_closed;
    bool fails_late; /* the evaluation breaks off after its first row */
    bool no_fork;    /* is refused */
    bool no_profile;
};

static void note(char *text, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void note(char *text, size_t size, const char *format, ...)
{
    size_t n = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + n, size - n, format, arguments);
    va_end(arguments);
}

static void send_row(struct fake_coordinator *fake, Hcattn__Reply *reply, uint32_t index, const char *text,
                     const Hcattn__Evaluate *asked, const char *preset)
{
    Hcattn__JobRow row = HCATTN__JOB_ROW__INIT;
    Hcattn__EvalRow eval = HCATTN__EVAL_ROW__INIT;
    Hcattn__AttentionRow attention = HCATTN__ATTENTION_ROW__INIT, *pointer = &attention;
    float kept[] = {0.125f, 0.25f};
    eval.index = index;
    eval.text = (char *)text;
    eval.preset = (char *)preset;
    eval.meaning = (char *)"what it means";
    eval.baseline = strcmp(preset, "q8_0") == 0;
    eval.context = asked->context;
    eval.tail = asked->tail;
    eval.kld_mean = 0.0005;
    eval.kld_p99 = 0.0025;
    eval.top1 = 0.985;
    eval.perplexity = 10.1;
    eval.full_perplexity = 10;
    eval.kept = 0.1875;
    eval.kept_by_head = kept;
    eval.n_kept_by_head = 2;
    eval.n_layers = 1;
    eval.n_kv_heads = 2;
    eval.device_bytes_fraction = 0.07;
    eval.device_bytes_measured = eval.baseline ? 0 : 0.0725;
    eval.exact_bytes = 2 << 20;
    eval.store_bytes = 3 << 10;
    attention.recall = 0.875f;
    eval.attention = &pointer;
    eval.n_attention = asked->attention ? 1 : 0;
    row.eval = &eval;
    reply->reply_case = HCATTN__REPLY__REPLY_JOB_ROW;
    reply->job_row = &row;
    fake_coordinator_reply(fake, reply);
}

static void run_job(struct fake_coordinator *fake, Hcattn__Reply *reply, const Hcattn__RunJob *job)
{
    struct service *service = fake->context;
    Hcattn__JobProgress progress = HCATTN__JOB_PROGRESS__INIT;
    progress.phase = (char *)"reading\x1b[2J";
    progress.done = 0.25;
    progress.left_us = 61000000;
    reply->reply_case = HCATTN__REPLY__REPLY_JOB_PROGRESS;
    reply->job_progress = &progress;
    fake_coordinator_reply(fake, reply);
    if (job->job_case == HCATTN__RUN_JOB__JOB_GATHER_STATISTICS)
        note(service->jobs, sizeof(service->jobs), "statistics %zu%s; ", job->gather_statistics->n_texts,
             job->gather_statistics->again ? " again" : "");
    if (job->job_case == HCATTN__RUN_JOB__JOB_TRAIN_CODEBOOK)
        note(service->jobs, sizeof(service->jobs), "pq%u/%u %zu seed %d%s; ", job->train_codebook->n_dims,
             job->train_codebook->n_centroids, job->train_codebook->n_texts, (int)job->train_codebook->seed,
             job->train_codebook->again ? " again" : "");
    if (job->job_case == HCATTN__RUN_JOB__JOB_EVALUATE) {
        const Hcattn__Evaluate *asked = job->evaluate;
        uint32_t index = 0;
        note(service->jobs, sizeof(service->jobs), "eval %u %u", asked->context, asked->tail);
        for (size_t k = 0; k < asked->n_presets; k++)
            note(service->jobs, sizeof(service->jobs), " %s", asked->presets[k]);
        note(service->jobs, sizeof(service->jobs), "; ");
        for (size_t i = 0; i < asked->n_texts; i++)
            for (size_t k = 0; k < asked->n_presets; k++) {
                send_row(fake, reply, index++, asked->texts[i]->name, asked, asked->presets[k]);
                if (service->fails_late) {
                    fake_coordinator_error(fake, reply->request_id, HCATTN__ERROR_CODE__NO_MEMORY,
                                           "the worker is full");
                    return;
                }
            }
    }
    Hcattn__JobDone done = HCATTN__JOB_DONE__INIT;
    done.sentence = (char *)"kept beside the model";
    reply->reply_case = HCATTN__REPLY__REPLY_JOB_DONE;
    reply->job_done = &done;
    fake_coordinator_reply(fake, reply);
}

static void describe(struct fake_coordinator *fake, Hcattn__Reply *reply)
{
    struct service *service = fake->context;
    Hcattn__SessionDescribed described = HCATTN__SESSION_DESCRIBED__INIT;
    Hcattn__SessionStats stats = HCATTN__SESSION_STATS__INIT;
    Hcattn__SessionCounts counts = HCATTN__SESSION_COUNTS__INIT;
    Hcattn__StoreRead read = HCATTN__STORE_READ__INIT, *reads[] = {&read};
    Hcattn__HeadProfile profile = HCATTN__HEAD_PROFILE__INIT;
    Hcattn__HeadClass classes[] = {HCATTN__HEAD_CLASS__HEAD_FULL, HCATTN__HEAD_CLASS__HEAD_PUNCTUATION,
                                   HCATTN__HEAD_CLASS__HEAD_FULL, HCATTN__HEAD_CLASS__HEAD_LOCAL};
    float kept[] = {1.0f, 0.99f, 1.0f, 0.985f};
    read.bytes = 40 * 1024;
    counts.n_steps = 40;
    counts.reads = reads;
    counts.n_reads = 1;
    counts.key_bytes = 4096;
    profile.n_tokens = N_TOKENS;
    profile.recovery = 0.98f;
    profile.classes = classes;
    profile.n_classes = 4;
    profile.kept_mass = kept;
    profile.n_kept_mass = 4;
    described.stats = &stats;
    described.counts = &counts;
    described.n_layers = 2;
    described.n_kv_heads = 2;
    described.profile = service->no_profile ? NULL : &profile;
    reply->reply_case = HCATTN__REPLY__REPLY_SESSION_DESCRIBED;
    reply->session_described = &described;
    fake_coordinator_reply(fake, reply);
}

static void answer(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    struct service *service = fake->context;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    Hcattn__Timings timings = HCATTN__TIMINGS__INIT;
    static uint32_t ids[N_TOKENS];
    reply.request_id = request->request_id;
    timings.n_decode = 32;
    timings.decode_us = 32 * 5000;
    timings.store_wait_us = 32 * 1000;
    switch (request->request_case) {
    case HCATTN__REQUEST__REQUEST_RUN_JOB:
        run_job(fake, &reply, request->run_job);
        return;
    case HCATTN__REQUEST__REQUEST_DESCRIBE_SESSION:
        describe(fake, &reply);
        return;
    case HCATTN__REQUEST__REQUEST_TOKENIZE: {
        Hcattn__Tokenized tokenized = HCATTN__TOKENIZED__INIT;
        tokenized.ids = ids;
        tokenized.n_ids = N_TOKENS;
        reply.reply_case = HCATTN__REPLY__REPLY_TOKENIZED;
        reply.tokenized = &tokenized;
        fake_coordinator_reply(fake, &reply);
        return;
    }
    case HCATTN__REQUEST__REQUEST_OPEN_SESSION: {
        Hcattn__SessionOpened opened = HCATTN__SESSION_OPENED__INIT;
        service->n_opened++;
        note(service->policies, sizeof(service->policies), "%s; ", request->open_session->policy);
        opened.session = request->open_session->session;
        reply.reply_case = HCATTN__REPLY__REPLY_SESSION_OPENED;
        reply.session_opened = &opened;
        fake_coordinator_reply(fake, &reply);
        return;
    }
    case HCATTN__REQUEST__REQUEST_FORK: {
        Hcattn__Forked forked = HCATTN__FORKED__INIT;
        if (service->no_fork) {
            fake_coordinator_error(fake, request->request_id, HCATTN__ERROR_CODE__NO_MEMORY, "no room for a fork");
            return;
        }
        service->n_opened++;
        note(service->policies, sizeof(service->policies), "fork %s; ", request->fork->policy);
        forked.session = request->fork->new_session;
        reply.reply_case = HCATTN__REPLY__REPLY_FORKED;
        reply.forked = &forked;
        fake_coordinator_reply(fake, &reply);
        return;
    }
    case HCATTN__REQUEST__REQUEST_CLOSE_SESSION: {
        Hcattn__SessionClosed closed = HCATTN__SESSION_CLOSED__INIT;
        service->n_closed++;
        reply.reply_case = HCATTN__REPLY__REPLY_SESSION_CLOSED;
        reply.session_closed = &closed;
        fake_coordinator_reply(fake, &reply);
        return;
    }
    case HCATTN__REQUEST__REQUEST_APPEND: {
        Hcattn__Appended appended = HCATTN__APPENDED__INIT;
        fake_coordinator_accepted(fake, request->request_id, 0, NULL, 0);
        appended.n_tokens = N_TOKENS;
        reply.reply_case = HCATTN__REPLY__REPLY_APPENDED;
        reply.appended = &appended;
        fake_coordinator_reply(fake, &reply);
        return;
    }
    case HCATTN__REQUEST__REQUEST_GENERATE: {
        uint32_t id = 7;
        uint64_t at = request->generate->at->n_tokens;
        fake_coordinator_accepted(fake, request->request_id, at, NULL, 0);
        fake_coordinator_generated(fake, request->request_id, 0, &id, 1, "x", false);
        fake_coordinator_done(fake, request->request_id, 1, "", at + 1);
        return;
    }
    case HCATTN__REQUEST__REQUEST_SCORE: {
        Hcattn__ScoreDone done = HCATTN__SCORE_DONE__INIT;
        fake_coordinator_accepted(fake, request->request_id, request->score->at->n_tokens, NULL, 0);
        done.timings = &timings;
        reply.reply_case = HCATTN__REPLY__REPLY_SCORE_DONE;
        reply.score_done = &done;
        fake_coordinator_reply(fake, &reply);
        return;
    }
    case HCATTN__REQUEST__REQUEST_STATS: {
        Hcattn__StatsReply stats = HCATTN__STATS_REPLY__INIT;
        stats.model = (char *)"tiny";
        stats.policy = (char *)"quality";
        reply.reply_case = HCATTN__REPLY__REPLY_STATS;
        reply.stats = &stats;
        fake_coordinator_reply(fake, &reply);
        return;
    }
    default:
        fake_coordinator_error(fake, request->request_id, HCATTN__ERROR_CODE__NOT_SUPPORTED, "not here");
    }
}

static enum fake_coordinator_step serve(struct fake_coordinator *fake, const Hcattn__Request *request)
{
    struct service *service = fake->context;
    pthread_mutex_lock(&service->lock);
    answer(fake, request);
    pthread_mutex_unlock(&service->lock);
    return FAKE_KNOWN;
}

static int setup(void **state)
{
    struct service *service = calloc(1, sizeof(*service));
    assert_non_null(service);
    pthread_mutex_init(&service->lock, NULL);
    programs_setup(&service->programs, "");
    service->programs.split = true;
    service->fake.handle = serve;
    service->fake.context = service;
    snprintf(service->fake.endpoint, sizeof(service->fake.endpoint), "ipc://%s/client.sock",
             service->programs.directory);
    fake_coordinator_start(&service->fake);
    int fd = open(service->programs.in, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_int_equal(write(fd, "some text", 9), 9);
    close(fd);
    *state = service;
    return 0;
}

static int teardown(void **state)
{
    struct service *service = *state;
    fake_coordinator_stop(&service->fake);
    programs_cleanup(&service->programs);
    free(service);
    return 0;
}

static int run(struct service *service, const char *const *arguments)
{
    pthread_mutex_lock(&service->lock);
    service->jobs[0] = service->policies[0] = '\0';
    pthread_mutex_unlock(&service->lock);
    int status = programs_run(&service->programs, false, arguments);
    pthread_mutex_lock(&service->lock); /* what the fake's thread has written we may read */
    pthread_mutex_unlock(&service->lock);
    return status;
}
#define RUN(...) run(service, (const char *[]){__VA_ARGS__, NULL})

static const char *output(const struct service *service)
{
    static char text[1 << 16];
    programs_read(service->programs.out, text, sizeof(text));
    return text;
}

static json_t *output_object(const struct service *service)
{
    json_t *json = json_loads(output(service), 0, NULL);
    assert_non_null(json);
    return json;
}

static void test_eval(void **state)
{
    struct service *service = *state;
    const char *in = service->programs.in;
    assert_int_equal(
        RUN("eval", "--text", in, "--context=384", "--tail=128", "--presets", "default,q8_0,rot2,mass=0.9"), 0);
    assert_string_equal(service->jobs, "statistics 0; eval 384 128 default q8_0 rot2,mass=0.9; ");
    assert_string_equal(service->policies, "full; fork default; fork rot2,mass=0.9; ");
    assert_int_equal(service->n_opened, 3);
    assert_int_equal(service->n_closed, 3);
    const char *text = output(service);
    assert_non_null(
        strstr(text, "in: 384 tokens, the last 128 of them decoded; perplexity of full attention 10.0000\n"));
    assert_non_null(strstr(text, "\ndefault         7.00 %  18.8 %  0.000500  0.002500  98.50 %   +1.000 %     3.0 KiB"
                                 "       5.0\n"));
    assert_non_null(strstr(text, "\nq8_0*           7.00 %  18.8 %  0.000500  0.002500  98.50 %   +1.000 %     3.0 KiB"
                                 "         -\n"));
    assert_non_null(strstr(text, "means over 1 text\n"));
    assert_non_null(strstr(text, "7.25 %"));
    assert_non_null(strstr(text, "* for comparison: no session can have it"));
    assert_null(strstr(text, "LAYER"));
    assert_true(programs_log_has(&service->programs, "reading?[2J: 25 %, 1 min 01 s left"));
}

static void test_eval_json_and_needs(void **state)
{
    struct service *service = *state;
    char second[128];
    const char *in = service->programs.in;
    snprintf(second, sizeof(second), "%s/../%s/in", service->programs.directory, service->programs.directory + 5);
    assert_int_equal(RUN("eval", "--text", in, "--text", second, "--context=128", "--tail=64", "--presets",
                         "small,hcattention-12.5", "--presets", "q8_0", "--json", "--no-speed", "--attention"),
                     0);
    assert_string_equal(service->jobs, "statistics 0; pq4/4096 0 seed 0; eval 128 64 small hcattention-12.5 q8_0; ");
    assert_string_equal(service->policies, "");
    json_t *json = output_object(service), *rows = json_object_get(json, "rows");
    assert_int_equal(json_array_size(rows), 6);
    json_t *row = json_array_get(rows, 3);
    assert_string_equal(json_string_value(json_object_get(row, "text")), second); /* two are called "in" */
    assert_string_equal(json_string_value(json_object_get(row, "preset")), "small");
    assert_true(json_real_value(json_object_get(row, "device_bytes_fraction")) == 0.07);
    assert_true(json_is_null(json_object_get(row, "time_us")));
    json_t *attention = json_object_get(row, "attention");
    assert_true(json_real_value(json_object_get(json_array_get(attention, 0), "recall")) == 0.875);
    assert_true(json_is_true(json_object_get(json_array_get(rows, 2), "baseline")));
    assert_int_equal(json_array_size(json_object_get(json, "means")), 3);
    json_decref(json);
}

/* What was measured is shown, also when the rest fails. */
static void test_eval_fails_late(void **state)
{
    struct service *service = *state;
    service->fails_late = true;
    const char *in = service->programs.in;
    assert_int_equal(RUN("eval", "--text", in, "--context=128", "--tail=64", "--presets", "default,quality"), 1);
    assert_true(programs_log_has(&service->programs, "hcattn eval: the worker is full"));
    assert_non_null(strstr(output(service), "means over 1 text"));
    service->fails_late = false;
    service->no_fork = true;
    assert_int_equal(RUN("eval", "--text", in, "--context=128", "--tail=64", "--presets", "default"), 0);
    assert_true(programs_log_has(&service->programs, "time per token of default: no room for a fork"));
}

static void test_eval_used_wrongly(void **state)
{
    struct service *service = *state;
    const char *in = service->programs.in;
    assert_int_equal(RUN("eval", "--text", in, "--context=1000"), 2);
    assert_int_equal(RUN("eval", "--text", in, "--context=256", "--tail=256"), 2);
    assert_int_equal(RUN("eval", "--text", in, "--presets", "default,,quality"), 2);
    assert_int_equal(RUN("eval", "--text", "/no/such/file"), 2);
    assert_string_equal(service->jobs, "");
}

static void test_files(void **state)
{
    struct service *service = *state;
    char folder[128], path[160], command[160];
    struct stat status;
    snprintf(folder, sizeof(folder), "%s/out-files", service->programs.directory);
    snprintf(path, sizeof(path), "%s/eval.json", folder);
    const char *in = service->programs.in;
    assert_int_equal(RUN("eval", "--text", in, "--context=128", "--tail=64", "--presets", "default,rot2,mass=0.9",
                         "--no-speed", "--out", folder),
                     0);
    json_t *json = json_load_file(path, 0, NULL);
    assert_int_equal(json_array_size(json_object_get(json, "rows")), 2);
    json_decref(json);
    assert_int_equal(RUN("profile", "--text", in, "--out", folder), 0);
    snprintf(path, sizeof(path), "%s/profile.json", folder);
    assert_int_equal(stat(path, &status), 0);
    if (system("/usr/bin/python3 -c 'import matplotlib' 2>/dev/null || python3 -c 'import matplotlib' 2>/dev/null") ==
        0) {
        static const char *const plots[] = {"quality.svg", "kept-default.svg", "kept-rot2_mass_0.9.svg", "profile.svg"};
        for (size_t i = 0; i < 4; i++) {
            snprintf(path, sizeof(path), "%s/%s", folder, plots[i]);
            assert_int_equal(stat(path, &status), 0);
            assert_true(status.st_size > 1000);
        }
    } else {
        assert_true(programs_log_has(&service->programs, "no plots: install python3-matplotlib, then: python3 "));
    }
    snprintf(command, sizeof(command), "rm -r '%s'", folder);
    assert_int_equal(system(command), 0);
    assert_int_equal(RUN("eval", "--text", in, "--context=128", "--tail=64", "--no-speed", "--out", "/no/such/folder"),
                     1);
}

static void test_profile(void **state)
{
    struct service *service = *state;
    const char *in = service->programs.in;
    assert_int_equal(RUN("profile", "--text", in, "--recovery=0.95", "--policy", "rot4,mass=0.9"), 0);
    assert_string_equal(service->policies, "rot4,mass=0.9,fastgen=0.95; ");
    assert_non_null(strstr(output(service), "    0  F 1.000  P 0.990\n    1  F 1.000  L 0.985\n"));
    assert_non_null(strstr(output(service), "F full             2  50.0 %"));
    assert_non_null(strstr(output(service), "S special          0   0.0 %"));
    assert_int_equal(RUN("profile", "--text", in, "--json"), 0);
    assert_string_equal(service->policies, "default,fastgen=0.98; ");
    json_t *json = output_object(service), *classes = json_object_get(json, "classes");
    assert_string_equal(json_string_value(json_array_get(json_array_get(classes, 1), 1)), "local");
    assert_int_equal(json_integer_value(json_object_get(json_object_get(json, "counts"), "full")), 2);
    json_decref(json);
    assert_int_equal(service->n_opened, service->n_closed);
    assert_int_equal(RUN("profile"), 2);
    assert_int_equal(RUN("profile", "--text", in, "--policy", "full"), 2);
    assert_int_equal(RUN("profile", "--text", in, "--policy", "tiny,fastgen=0.9"), 2);
    service->no_profile = true;
    assert_int_equal(RUN("profile", "--text", in), 1);
    assert_true(programs_log_has(&service->programs, "the session was not profiled"));
}

static void test_trainings(void **state)
{
    struct service *service = *state;
    const char *in = service->programs.in;
    assert_int_equal(RUN("statistics"), 0);
    assert_string_equal(service->jobs, "statistics 0; ");
    assert_string_equal(output(service), "kept beside the model\n");
    assert_int_equal(RUN("statistics", "--text", in), 0);
    assert_string_equal(service->jobs, "statistics 1 again; "); /* a text of one's own is meant to be used */
    assert_int_equal(RUN("codebook", "train"), 0);
    assert_string_equal(service->jobs, "pq2/4096 0 seed 0; ");
    assert_int_equal(
        RUN("codebook", "train", "--pq-groups", "d/8", "--centroids=512", "--seed=3", "--again", "--text", in), 0);
    assert_string_equal(service->jobs, "pq8/512 1 seed 3 again; ");
    assert_int_equal(RUN("codebook"), 2);
    assert_int_equal(RUN("codebook", "destroy"), 2);
    assert_int_equal(RUN("codebook", "train", "--centroids=1000"), 2);
}

/* A residency without a policy is of the service's default. */
static void test_residency(void **state)
{
    struct service *service = *state;
    assert_int_equal(RUN("generate", "--raw", "--residency=fastgen", "hello"), 0);
    assert_string_equal(service->policies, "quality,fastgen=0.98; ");
    assert_int_equal(RUN("generate", "--raw", "--policy=small", "--fastgen-recovery=0.9", "hello"), 0);
    assert_string_equal(service->policies, "small,fastgen=0.9; ");
    assert_int_equal(RUN("generate", "--raw", "--residency=all", "hello"), 0);
    assert_string_equal(service->policies, "quality; ");
    assert_int_equal(RUN("generate", "--raw", "--policy=full", "--residency=fastgen", "hello"), 1);
    assert_int_equal(RUN("generate", "--raw", "hello"), 0);
    assert_string_equal(service->policies, "; ");
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {TEST(test_eval),
                                       TEST(test_eval_json_and_needs),
                                       TEST(test_eval_fails_late),
                                       TEST(test_files),
                                       TEST(test_eval_used_wrongly),
                                       TEST(test_profile),
                                       TEST(test_trainings),
                                       TEST(test_residency)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
