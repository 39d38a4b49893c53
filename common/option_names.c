/* option_names.c - see option_names.h. */
#include "common/option_names.h"

#include <stddef.h>

const char *const option_names_all[] = {
    /* the processes */
    "backend", "client-endpoint", "default-max-tokens", "hang-timeout", "huge-pages", "incarnation", "index", "isa",
    "log-level", "max-batch", "max-requests", "max-sessions", "memory", "model", "n-ctx", "node", "policy",
    "prefill-chunk", "reconnect-timeout", "recovery-timeout", "request-timeout", "runtime-dir", "stores", "threads",
    "transport",
    /* hcattn */
    "bin-dir", "bos", "chat", "connect-timeout", "decode", "detach", "endpoint", "frequency-penalty", "from", "ids",
    "ignore-end", "json", "logprobs", "max-restarts", "max-tokens", "min-p", "parse-special", "presence-penalty", "raw",
    "repeat-penalty", "seed", "session", "start-timeout", "stop", "stop-timeout", "system", "temperature", "timeout",
    "top-k", "top-logprobs", "top-p", NULL};
