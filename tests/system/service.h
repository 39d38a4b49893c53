/*
 * service.h - a whole service for a test: the real processes in a runtime directory of their own.
 *
 * Owner      the test; service_start() to service_stop(). Threads: one.
 * Failures   assert (cmocka) with the end of the service's log shown.
 */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <cmocka.h>

#include "client/hcattn.h"

#ifdef HCATTN_SANITIZED
enum { PATIENCE = 6 }; /* times longer than in a release build may things take */
#else
enum { PATIENCE = 1 };
#endif

struct service {
    char directory[64]; /* runtime directory; the log is DIRECTORY/log */
    pid_t pid;          /* of `hcattn up` */
    struct hcattn *client;
};

/* `arguments` follow `hcattn up` (closed by NULL); `environment` are "NAME=VALUE" settings for it (closed by NULL, or NULL). */
void service_start(struct service *service, const char *const *arguments, const char *const *environment);
/* Starts without waiting or asserting; service_wait_ready() follows. */
void service_launch(struct service *service, const char *const *arguments, const char *const *environment);
void service_wait_ready(struct service *service);
/* Ends it in order and checks that everything ended well: status 0, no process left, no sanitizer report in the log. */
void service_stop(struct service *service);
void service_show_log(const struct service *service);
bool service_log_contains(const struct service *service, const char *text);

/* The real model (HCATTN_TEST_MODEL), or skip() the test. */
const char *service_real_model(void);
/* A tiny random model of make-tiny with these arguments; the file is made once per test program and removed at exit. */
const char *service_tiny_model(const char *make_tiny_arguments);

/* Process id of a program ("hc-gpu-worker") with an index. */
pid_t service_process(struct service *service, const char *program, uint32_t index);

/* One generation in a session of its own. */
struct answer {
    uint32_t n_prompt;
    uint32_t *prompt_ids;
    uint32_t n;
    uint32_t *ids;
    float *logprobs;
    struct hcattn_top *top; /* [n][n_top] */
    uint32_t n_top;
    char *text;
    struct hcattn_finished finished;
    /* called after each token, if set */
    void (*on_token)(void *context, uint32_t n);
    void *context;
};

/* Input text (raw, special tokens parsed) or ids. Asserts success. service_answer_free() afterwards. */
void service_generate_text(struct hcattn *client, const char *text, uint32_t max_tokens, uint32_t n_top,
                           struct answer *answer);
void service_generate_ids(struct hcattn *client, const uint32_t *ids, size_t n_ids, uint32_t max_tokens,
                          struct answer *answer);
/* The call itself, in a session of the caller's; returns what hcattn_generate() returns. */
int service_generate(struct hcattn *client, const struct hcattn_generate *generate, struct answer *answer,
                     struct hcattn_error *ret_error);
void service_answer_free(struct answer *answer);

/* The same ids and the same bits of log-probabilities. */
void service_answer_assert_equal(const struct answer *a, const struct answer *b);
