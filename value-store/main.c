/* main.c - hc-value-store: the process that owns one NUMA node's rows. */
#include "common/log.h"
#include "common/option_names.h"
#include "common/options.h"
#include "common/random.h"
#include "common/signals.h"
#include "value-store/server.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

static const char *const isa_names[] = {"auto", "plain", "avx2", "avx512", NULL};
static const char *const huge_names[] = {"try", "require", "off", NULL};

static const struct option_spec specs[] = {
    {.name = "runtime-dir", .kind = OPTION_STRING, .metavar = "DIR", .help = "Directory of the sockets."},
    {.name = "index", .kind = OPTION_U32, .default_text = "0", .maximum = 63, .help = "Number of this store."},
    {.name = "memory",
     .kind = OPTION_MEMORY,
     .default_text = "75%",
     .help = "Largest segment, taken when formatted: a size, or a part of the control group's limit or of the node's "
             "memory, whichever is smaller. The default takes less where less is free."},
    {.name = "node",
     .kind = OPTION_U32,
     .help = "NUMA node to bind to, the kernel's number; default: by the index, of those with memory and cpus."},
    {.name = "strict-numa", .kind = OPTION_FLAG, .help = "Threads and memory are bound, or the store does not start."},
    {.name = "threads",
     .kind = OPTION_U32,
     .default_text = "0",
     .maximum = 1024,
     .help = "0: one per cpu of the node."},
    {.name = "isa", .kind = OPTION_CHOICE, .default_text = "auto", .choices = isa_names, .help = "Instruction set."},
    {.name = "incarnation", .kind = OPTION_STRING, .metavar = "HEX", .help = "Given by a supervisor; default: random."},
    {.name = "reconnect-timeout", .kind = OPTION_DURATION, .default_text = "60s", .help = "For a lost coordinator."},
    {.name = "huge-pages",
     .kind = OPTION_CHOICE,
     .default_text = "try",
     .choices = huge_names,
     .help = "For rows: from the kernel's pool if it has enough of them, else made of small pages."},
    {.name = "spin-us",
     .kind = OPTION_U32,
     .maximum = 1000,
     .help = "How long a ring looks for work before it sleeps; default: 20 with 8 cpus or more, else 0."},
    {.name = "log-level", .kind = OPTION_CHOICE, .default_text = "info", .choices = log_level_names, .help = "Least."},
};

static const struct options_table table = {
    .program = "hc-value-store",
    .summary = "Owns the rows of one NUMA node: takes new ones, sums selected ones, gives them back.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
};

static int configure(const struct options *options, struct server_config *config, char error[OPTIONS_ERROR_SIZE])
{
    config->store = (struct store_config){
        .index = options_u32(options, "index"),
        .memory_bytes = options_bytes(options, "memory"),
        .memory_percent = options_percent(options, "memory"),
        .memory_fits = !options_given(options, "memory"),
        .has_node = options_given(options, "node"),
        .node = options_u32(options, "node"),
        .n_threads = options_u32(options, "threads"),
        .huge_pages = (enum store_huge)options_choice(options, "huge-pages"),
        .strict_numa = options_flag(options, "strict-numa"),
        .has_spin = options_given(options, "spin-us"),
        .spin_us = options_u32(options, "spin-us"),
    };
    config->reconnect_timeout_ms = options_duration_ms(options, "reconnect-timeout");
    if (random_incarnation(options_string(options, "incarnation"), &config->store.incarnation) < 0) {
        snprintf(error, OPTIONS_ERROR_SIZE, "hc-value-store: --incarnation: not a hexadecimal number above 0");
        return -EINVAL;
    }
    if (kernels_isa_parse(isa_names[options_choice(options, "isa")], &config->store.isa) < 0)
        return -EINVAL;
    return options_runtime_dir(options_string(options, "runtime-dir"), config->runtime_dir, error);
}

int main(int argc, char **argv)
{
    char error[OPTIONS_ERROR_SIZE] = "", id[16];
    struct options *options = NULL;
    struct server_config config = {0};
    struct server *server = NULL;
    int signal_fd = -1, status = SERVER_REFUSED;
    if (options_parse(&table, argc, argv, &options, error) < 0) {
        fprintf(stderr, "%s\n", error);
        return SERVER_REFUSED;
    }
    if (options_help_wanted(options) || options_version_wanted(options)) {
        char *help = options_help_wanted(options) ? options_help(&table, options) : NULL;
        fputs(help ? help : "hc-value-store " HCATTN_VERSION "\n", stdout);
        free(help);
        status = SERVER_OK;
    } else if (configure(options, &config, error) < 0) {
        fprintf(stderr, "%s\n", error);
    } else {
        snprintf(id, sizeof(id), "%u", config.store.index);
        log_open("hc-value-store", (enum log_level)options_choice(options, "log-level"));
        log_set_id(id);
        int result = signals_open(false, &signal_fd);
        if (result == 0)
            result = server_new(&config, &server);
        status = result == 0                                                   ? (int)server_run(server, signal_fd)
                 : result == -ENOENT || result == -ENOTSUP || result == -EPERM ? 2
                                                                               : 1;
    }
    server_free(server);
    signals_close(signal_fd);
    options_free(options);
    return status;
}
