/*
 * server.h - the worker's dealings with the coordinator: registration, health, text, and the engine's runs and tokens.
 *
 * Owner      main.c. Threads: server_run() is the main thread's poll loop; the engine works in its own thread.
 * Refuses    to compute: what takes longer than tokenizing a prompt belongs to the engine.
 */
#pragma once

#include <stdint.h>

#include "gpu-worker/engine.h"
#include "gpu-worker/model/chat.h"

struct server_options {
    const char *runtime_dir;
    uint32_t index;
    uint64_t incarnation;
    uint64_t reconnect_timeout_us;
    uint32_t n_ctx;
    uint64_t weight_bytes;
    uint64_t device_bytes_per_token; /* of old tokens, under `policy` */
    uint64_t device_memory;          /* budget; 0: none */
    const char *policy;              /* default of the service */
    uint32_t row_codec;              /* enum row_codec */
    char achieved[768];              /* back end and device, where threads are, weights */
};

/*
 * Serves until a signal comes (signal_fd, signals.h): 0. -EPERM: refused; -ECONNABORTED: no coordinator within the
 * deadline; both were logged. chat may be NULL: `chat_error` then says why there is none.
 */
int server_run(const struct server_options *options, struct engine *engine, struct socket_context *sockets,
               const struct model *model, const struct tokenizer *tokenizer, const struct chat *chat,
               const char *chat_error, int signal_fd);
