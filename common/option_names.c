/* option_names.c - see option_names.h. */
#include "common/option_names.h"

#include <stddef.h>

const char *const option_names_all[] = {
    /* the processes */
    "backend", "client-endpoint", "client-keys", "client-secret", "default-max-tokens", "device-memory", "exact-tokens",
    "gpu", "hang-timeout", "huge-pages", "incarnation", "index", "isa", "learnt-dir", "log-level", "max-batch",
    "max-queue", "max-requests", "max-sessions", "max-step-ms", "memory", "micro-batches", "model", "n-ctx", "node",
    "nodes", "policy", "prefill-chunk", "queue-timeout", "reconnect-timeout", "recovery-timeout", "request-timeout",
    "rows", "runtime-dir", "spin-us", "stores", "strict-numa", "threads", "transport", "weights-by-node", "workers",
    /* hcattn */
    "again", "attention", "bin-dir", "bos", "centroids", "chat", "connect-timeout", "context", "decode", "detach",
    "divergence", "endpoint", "fastgen-recovery", "frequency-penalty", "from", "ids", "ignore-end", "json", "key",
    "lengths", "logprobs", "lost-timeout", "max-restarts", "max-tokens", "min-p", "out", "parse-special", "pq-groups",
    "presence-penalty", "presets", "raw", "recovery", "repeat-penalty", "residency", "resume", "samples", "seed",
    "server-key", "session", "speed", "start-timeout", "stop", "stop-timeout", "system", "tail", "tasks", "temperature",
    "text", "timeout", "tokens", "top-k", "top-logprobs", "top-p", NULL};
