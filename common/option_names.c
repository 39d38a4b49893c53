/* option_names.c - see option_names.h. */
#include "common/option_names.h"

#include <stddef.h>

const char *const option_names_all[] = {
    /* the processes */
    "backend", "client-endpoint", "default-max-tokens", "device-memory", "exact-tokens", "hang-timeout", "huge-pages",
    "incarnation", "index", "isa", "log-level", "max-batch", "max-queue", "max-requests", "max-sessions", "max-step-ms",
    "memory", "micro-batches", "model", "n-ctx", "node", "policy", "prefill-chunk", "queue-timeout",
    "reconnect-timeout", "recovery-timeout", "request-timeout", "rows", "runtime-dir", "spin-us", "stores", "threads",
    "transport", "workers",
    /* hcattn */
    "bin-dir", "bos", "chat", "connect-timeout", "decode", "detach", "endpoint", "frequency-penalty", "from", "ids",
    "ignore-end", "json", "logprobs", "max-restarts", "max-tokens", "min-p", "parse-special", "presence-penalty", "raw",
    "repeat-penalty", "resume", "seed", "session", "start-timeout", "stop", "stop-timeout", "system", "temperature",
    "timeout", "tokens", "top-k", "top-logprobs", "top-p", NULL};
