/* main.c - hc-gpu-worker: a model on a device, asked for tokens by the coordinator. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log.h"
#include "common/option_names.h"
#include "common/options.h"
#include "common/random.h"
#include "common/signals.h"
#include "common/topology.h"
#include "gpu-worker/main_backend.h"
#include "gpu-worker/server.h"
#include "gpu-worker/train/train.h"

enum { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

static const char *const isa_names[] = {"auto", "plain", "avx2", "avx512", NULL};
static const char *const transport_names[] = {"ring", "routed", "direct", NULL};
static const char *const row_names[] = {"f16", "q8_0", NULL};
static const char *const split_names[] = {"auto", "off", NULL};
static const char *const half_names[] = {"auto", "1", "2", NULL};
enum { SPIN_US = 20 };

static const struct option_spec specs[] = {
    {.name = "model", .kind = OPTION_STRING, .help = "model file (GGUF)", .metavar = "FILE"},
    {.name = "runtime-dir", .kind = OPTION_STRING, .help = "directory of the sockets", .metavar = "DIR"},
    {.name = "index",
     .kind = OPTION_U32,
     .default_text = "0",
     .help = "number of this worker on its host",
     .maximum = 255},
    {.name = "incarnation", .kind = OPTION_STRING, .help = "given by a supervisor: names this life", .metavar = "HEX"},
    {.name = "backend",
     .kind = OPTION_STRING,
     .default_text = "auto",
     .help = "cuda, cpu, or reference (plain loops, slow); auto: cuda if this build has it and a device is there, "
             "else cpu",
     .metavar = "NAME"},
    {.name = "gpu",
     .kind = OPTION_U32,
     .help =
         "number of the device, of those that CUDA_VISIBLE_DEVICES leaves; default: --index modulo how many there are",
     .maximum = 255},
    {.name = "isa",
     .kind = OPTION_CHOICE,
     .default_text = "auto",
     .help = "instruction set of the CPU kernels",
     .choices = isa_names},
    {.name = "transport",
     .kind = OPTION_CHOICE,
     .default_text = "ring",
     .help = "how aggregates reach the stores: as the coordinator says (ring, routed); direct computes them here, as "
             "an oracle",
     .choices = transport_names},
    {.name = "threads",
     .kind = OPTION_U32,
     .default_text = "0",
     .help = "threads of the back end; 0: one per allowed cpu",
     .maximum = 1024},
    {.name = "weights-by-node",
     .kind = OPTION_CHOICE,
     .default_text = "auto",
     .help =
         "auto: where threads run on several NUMA nodes, rows of weights are split over them and each node's threads "
         "read their own",
     .choices = split_names},
    {.name = "n-ctx",
     .kind = OPTION_U32,
     .default_text = "0",
     .help = "longest session in tokens; 0: what the model was trained for",
     .maximum = 16777216},
    {.name = "prefill-chunk",
     .kind = OPTION_U32,
     .default_text = "0",
     .help = "prompt tokens of one step, at most; 0: 256, on a device whose memory is not the host's 2048",
     .maximum = 65536},
    {.name = "max-batch",
     .kind = OPTION_U32,
     .default_text = "16",
     .help = "sessions that decode in one step",
     .minimum = 1,
     .maximum = 1024},
    {.name = "max-step-ms",
     .kind = OPTION_U32,
     .default_text = "100",
     .help = "a step in which sessions decode takes as much prefill as fits into this; 0: a whole chunk",
     .maximum = 60000},
    {.name = "micro-batches",
     .kind = OPTION_CHOICE,
     .default_text = "auto",
     .help =
         "2: the stores work for one half of a batch while the worker computes the other; auto: with 8 cpus or more",
     .choices = half_names},
    {.name = "rows",
     .kind = OPTION_CHOICE,
     .default_text = "f16",
     .help = "how the stores keep keys and values",
     .choices = row_names},
    {.name = "device-memory",
     .kind = OPTION_BYTES,
     .default_text = "0",
     .help = "most memory on the device, weights included; 0: what the device has for this process, without a device "
             "of its "
             "own no limit"},
    {.name = "spin-us",
     .kind = OPTION_U32,
     .maximum = 1000,
     .help = "looks this long for a store's answer before it sleeps; default: 20 with 8 cpus or more, else 0"},
    {.name = "policy",
     .kind = OPTION_STRING,
     .default_text = "default",
     .help = "the service's default: what is said of device bytes per token is meant for it",
     .metavar = "POLICY"},
    {.name = "learnt-dir",
     .kind = OPTION_STRING,
     .help =
         "where statistics and codebooks are kept, which key codecs learn from the model; default: beside the model",
     .metavar = "DIR"},
    {.name = "request-timeout",
     .kind = OPTION_DURATION,
     .default_text = "10s",
     .help = "a store's answer is asked for again after this",
     .minimum = 10,
     .maximum = 3600000},
    {.name = "recovery-timeout",
     .kind = OPTION_DURATION,
     .default_text = "120s",
     .help = "a store that does not come back fails its requests after this",
     .minimum = 100,
     .maximum = 86400000},
    {.name = "reconnect-timeout",
     .kind = OPTION_DURATION,
     .default_text = "60s",
     .help = "ends when there is no coordinator for this long",
     .minimum = 100,
     .maximum = 86400000},
    {.name = "log-level",
     .kind = OPTION_CHOICE,
     .default_text = "info",
     .help = "how much is logged",
     .choices = log_level_names},
};

struct app {
    struct model *model;
    struct tokenizer *tokenizer;
    struct chat *chat;
    struct main_backend with; /* back end and threads */
    struct quantizers *quantizers;
    struct network *network;
    struct socket_context *sockets;
    struct engine *engine;
    int signal_fd;
};

static void show_progress(void *context, uint32_t n_done, uint32_t n_total)
{
    (void)context;
    if (n_done == n_total || n_done % (n_total / 4 + 1) == 0)
        LOG_INFO("loading weights: layer %u of %u", n_done, n_total);
}

static int fail(const char *what, const char *why)
{
    LOG_ERROR("%s: %s", what, why);
    return -EINVAL;
}

static int open_model(struct app *app, const char *path, char *chat_error, size_t chat_error_size)
{
    char error[512] = "";
    if (path == NULL)
        return fail("--model", "no model file was given");
    if (model_open(path, &app->model, error, sizeof(error)) < 0)
        return fail("model", error); /* it names the file */
    if (tokenizer_new(app->model->gguf, &app->tokenizer, error, sizeof(error)) < 0)
        return fail(path, error);
    if (tokenizer_n_vocab(app->tokenizer) > app->model->shape.n_vocab)
        return fail(path, "more tokens in the vocabulary than rows in the embedding");
    if (app->model->shape.n_heads / app->model->shape.n_kv_heads > KERNELS_MAX_HEAD_DIM)
        return fail(path, "more than 256 query heads per KV head");
    int r = chat_new(app->model->gguf, app->tokenizer, &app->chat, chat_error, chat_error_size);
    if (r < 0)
        LOG_WARNING("chat is not possible with this model: %s", chat_error);
    return 0;
}

static int load(struct app *app, const struct options *options, const struct kernels *kernels)
{
    char error[512] = "";
    if (main_backend_open(&app->with, options, kernels) < 0)
        return -EINVAL;
    int r = network_load(app->with.ops, app->with.backend, app->model, show_progress, NULL, &app->network, error,
                         sizeof(error));
    if (r == -ENOMEM && main_backend_capacity(&app->with) != 0)
        snprintf(error, sizeof(error), "they do not fit into the %.1f MiB that the device has for this process",
                 (double)main_backend_capacity(&app->with) / 1048576);
    if (r < 0)
        return fail("weights", error[0] != '\0' ? error : strerror(-r));
    main_backend_tell_split(&app->with);
    return 0;
}

/* What the pair codecs need to know of the model: once for each model, before anybody waits for an answer. */
static int learn(struct app *app, const struct options *options, const struct kernels *kernels,
                 const struct row_shape *rows)
{
    char directory[OPTIONS_PATH_SIZE], sentence[JOB_SENTENCE_SIZE] = "";
    const char *path = options_string(options, "model"), *slash = strrchr(path, '/');
    int n = options_given(options, "learnt-dir")
                ? snprintf(directory, sizeof(directory), "%s", options_string(options, "learnt-dir"))
            : slash == NULL ? snprintf(directory, sizeof(directory), ".")
                            : snprintf(directory, sizeof(directory), "%.*s", (int)(slash - path) + 1, path);
    if (n < 0 || (size_t)n >= sizeof(directory))
        return fail("--learnt-dir", "too long");
    int r = quantizers_new(rows, app->model->hash, directory, &app->quantizers);
    if (r < 0)
        return fail("key codecs", strerror(-r));
    const struct policy_terms pair = {.codec = POLICY_CODEC_PAIR2};
    if (quantizers_has(app->quantizers, &pair))
        return 0;
    const struct job_tools tools = {.network = app->network,
                                    .kernels = kernels,
                                    .pool = app->with.pool,
                                    .tokenizer = app->tokenizer,
                                    .quantizers = app->quantizers,
                                    .row_codec = rows->codec,
                                    .n_ctx = app->model->shape.n_ctx_train};
    struct train_statistics_request request = {0};
    struct job job;
    struct job_report report = {0};
    r = train_statistics_job_new(&request, &job, sentence);
    if (r < 0)
        return fail("statistics", sentence);
    LOG_INFO("statistics of keys and queries: gathered once for this model");
    for (double told = 0.25; (r = job.ops->advance(job.state, &tools, &report, sentence)) > 0;)
        if (report.done >= told) {
            LOG_INFO("statistics: %.0f %%", 100 * report.done);
            told += 0.25;
        }
    job.ops->free(job.state);
    if (r < 0)
        LOG_WARNING("no statistics: %s; pair codecs are not possible", sentence[0] != '\0' ? sentence : strerror(-r));
    else
        LOG_INFO("%s", sentence);
    return 0;
}

/* On a device each chunk brings the rows of all before it over the link. */
static uint32_t prefill_chunk(const struct app *app, const struct options *options)
{
    uint32_t given = options_u32(options, "prefill-chunk");
    return given != 0 ? given : app->with.ops->device != NULL ? 2048 : 256;
}

static int start(struct app *app, const struct options *options, struct server_options *server,
                 const struct kernels *kernels)
{
    uint32_t n_ctx = options_u32(options, "n-ctx"), halves = options_choice(options, "micro-batches");
    const struct model_shape *shape = &app->model->shape;
    bool is_direct = options_choice(options, "transport") == 2;
    struct engine_options engine = {
        .incarnation = server->incarnation,
        .transport = is_direct ? TRANSPORT_DIRECT : TRANSPORT_ROUTED,
        .n_ctx = n_ctx != 0 ? n_ctx : shape->n_ctx_train,
        .row_codec = options_choice(options, "rows") == 0 ? ROW_CODEC_F16 : ROW_CODEC_Q8_0,
        .prefill_chunk = prefill_chunk(app, options),
        .max_batch = options_u32(options, "max-batch"),
        .max_halves = halves != 0                                 ? halves
                      : app->with.n_cpus >= TOPOLOGY_CPUS_TO_SPIN ? 2
                                                                  : 1,
        .spin_us = options_given(options, "spin-us")           ? options_u32(options, "spin-us")
                   : app->with.n_cpus >= TOPOLOGY_CPUS_TO_SPIN ? SPIN_US
                                                               : 0,
        .max_step_us = options_u32(options, "max-step-ms") * UINT64_C(1000),
        .device_memory = main_backend_budget(&app->with, options_bytes(options, "device-memory")),
        .request_timeout_us = options_duration_ms(options, "request-timeout") * 1000,
        .recovery_timeout_us = options_duration_ms(options, "recovery-timeout") * 1000,
        .thread_setup = main_backend_setup_engine_thread,
        .thread_context = &app->with,
    };
    char sentence[256] = "";
    struct policy policy;
    struct row_shape rows = {shape->n_layers, shape->n_kv_heads, shape->head_dim, engine.row_codec};
    if (learn(app, options, kernels, &rows) < 0)
        return -EINVAL;
    main_backend_release_thread(&app->with);
    if (policy_find(app->quantizers, options_string(options, "policy"), &policy, sentence, sizeof(sentence)) < 0)
        return fail("--policy", sentence);
    engine.quantizers = app->quantizers;
    server->n_ctx = engine.n_ctx;
    server->weight_bytes = app->network->weight_bytes;
    server->device_memory = engine.device_memory;
    server->row_codec = engine.row_codec;
    server->policy = options_string(options, "policy");
    server->device_bytes_per_token = (uint64_t)ceil(key_cache_bytes_per_token(policy.quantizer, NULL));
    int r = socket_context_new(&app->sockets);
    if (r == 0)
        r = engine_new(&engine, app->network, kernels, app->with.pool, app->tokenizer, app->sockets, &app->engine);
    if (r < 0)
        return fail("engine", strerror(-r));
    char budget[48] = "no limit", split[64];
    if (engine.device_memory != 0 && engine_device_bytes(app->engine) >= engine.device_memory)
        LOG_WARNING(
            "no session has room on the device: weights and what is needed beside them take %.1f MiB of %.1f MiB",
            (double)engine_device_bytes(app->engine) / 1048576, (double)engine.device_memory / 1048576);
    if (engine.device_memory != 0)
        snprintf(budget, sizeof(budget), "limit %.1f MiB", (double)engine.device_memory / 1048576);
    snprintf(server->achieved, sizeof(server->achieved),
             "%s, %s, %s, weights %.1f MiB%s, device memory %.1f MiB in use, %s, old token %" PRIu64
             " B on the device, %" PRIu64 " B in stores (%s), spin %u us, %u micro-batch%s",
             app->with.ops->describe(app->with.backend), main_backend_place(&app->with),
             is_direct ? "transport direct" : "transport as the coordinator says",
             (double)app->network->weight_bytes / 1048576, main_backend_split(&app->with, split, sizeof(split)),
             (double)engine_device_bytes(app->engine) / 1048576, budget, server->device_bytes_per_token,
             rows.n_layers * rows.n_kv_heads * layout_row_bytes(&rows), row_names[options_choice(options, "rows")],
             engine.spin_us, engine.max_halves, engine.max_halves == 1 ? "" : "es");
    LOG_INFO("%s: %u layers, %u query heads, %u KV heads, head_dim %u, context %u; %s", app->model->name,
             shape->n_layers, shape->n_heads, shape->n_kv_heads, shape->head_dim, engine.n_ctx, server->achieved);
    return 0;
}

static void stop(struct app *app)
{
    engine_free(app->engine);
    socket_context_free(app->sockets);
    quantizers_free(app->quantizers);
    network_free(app->network);
    main_backend_close(&app->with);
    chat_free(app->chat);
    tokenizer_free(app->tokenizer);
    model_close(app->model);
    signals_close(app->signal_fd);
}

static int serve(struct app *app, const struct server_options *server, const char *chat_error)
{
    int r = server_run(server, app->engine, app->sockets, app->model, app->tokenizer, app->chat, chat_error,
                       app->signal_fd);
    return r == 0 ? EXIT_OK : r == -EPERM ? EXIT_USAGE : EXIT_FAILED;
}

static int run(const struct options *options)
{
    struct app app = {.signal_fd = -1};
    char directory[OPTIONS_PATH_SIZE], error[OPTIONS_ERROR_SIZE], chat_error[256] = "";
    struct server_options server = {
        .runtime_dir = directory,
        .index = options_u32(options, "index"),
        .reconnect_timeout_us = options_duration_ms(options, "reconnect-timeout") * 1000,
    };
    if (random_incarnation(options_string(options, "incarnation"), &server.incarnation) < 0) {
        LOG_ERROR("--incarnation: not a hexadecimal number above 0");
        return EXIT_USAGE;
    }
    if (options_runtime_dir(options_string(options, "runtime-dir"), directory, error) < 0) {
        LOG_ERROR("%s", error);
        return EXIT_USAGE;
    }
    const char *isa_name = isa_names[options_choice(options, "isa")];
    enum kernels_isa isa;
    const struct kernels *kernels = kernels_isa_parse(isa_name, &isa) == 0 ? kernels_get(isa) : NULL;
    if (kernels == NULL) {
        LOG_ERROR("--isa %s: this CPU does not have it", isa_name);
        return EXIT_USAGE;
    }
    int status = EXIT_USAGE;
    if (signals_open(false, &app.signal_fd) < 0)
        status = EXIT_FAILED;
    else if (open_model(&app, options_string(options, "model"), chat_error, sizeof(chat_error)) == 0 &&
             load(&app, options, kernels) == 0 && start(&app, options, &server, kernels) == 0)
        status = serve(&app, &server, chat_error);
    stop(&app);
    return status;
}

int main(int argc, char *argv[])
{
    const struct options_table table = {
        .program = "hc-gpu-worker",
        .summary = "Owns a device: weights, quantized keys, scoring, selection, sampling.",
        .specs = specs,
        .n_specs = sizeof(specs) / sizeof(specs[0]),
        .other_names = option_names_all,
    };
    struct options *options;
    char error[OPTIONS_ERROR_SIZE];
    if (options_parse(&table, argc, argv, &options, error) < 0) {
        fprintf(stderr, "%s\n", error);
        return EXIT_USAGE;
    }
    int status = EXIT_OK;
    if (options_help_wanted(options)) {
        char *help = options_help(&table, options);
        fputs(help == NULL ? "" : help, stdout);
        free(help);
    } else if (options_version_wanted(options)) {
        printf("hc-gpu-worker %s\n", HCATTN_VERSION);
    } else {
        char id[16];
        snprintf(id, sizeof(id), "%u", options_u32(options, "index"));
        log_open("hc-gpu-worker", (enum log_level)options_choice(options, "log-level"));
        log_set_id(id);
        status = run(options);
    }
    options_free(options);
    return status;
}
