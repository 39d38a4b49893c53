/* hcattn_sessions.c - see hcattn.h: sessions, opened, forked, described, closed. */
#include "client/hcattn.h"
#include "client/message.h"
#include "client/question.h"
#include "common/random.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

int hcattn_open_session(struct hcattn *client, const struct hcattn_session_config *config, uint32_t timeout_ms,
                        struct hcattn_session *ret_session, struct hcattn_error *ret_error)
{
    static const struct hcattn_session_config standard;
    if (!config)
        config = &standard;
    Hcattn__OpenSession open = HCATTN__OPEN_SESSION__INIT;
    Hcattn__ExactTokens exact = HCATTN__EXACT_TOKENS__INIT;
    /* Chosen here, so that sending it again cannot open a second one. */
    open.session = config->session ? config->session : random_u64();
    if (config->policy)
        open.policy = (char *)config->policy;
    if (config->exact_tokens) {
        exact.n_tokens = config->exact_tokens == HCATTN_EXACT_NONE ? 0 : config->exact_tokens;
        open.exact = &exact;
    }
    open.ephemeral = config->ephemeral;
    open.idle_timeout_s = config->idle_timeout_s;
    struct call call = {.request = HCATTN__REQUEST__INIT, .timeout_ms = timeout_ms};
    call.request.request_case = HCATTN__REQUEST__REQUEST_OPEN_SESSION;
    call.request.open_session = &open;
    struct question question = {.wanted = HCATTN__REPLY__REPLY_SESSION_OPENED};
    int error = 0;
    Hcattn__Reply *reply = question_ask(client, &call, &question, &error, ret_error);
    if (!reply)
        return error;
    const Hcattn__SessionOpened *opened = reply->session_opened;
    struct hcattn_session session = {
        .session = opened->session, .n_ctx = opened->n_ctx, .exact_tokens = opened->exact_tokens, .host = call.host};
    snprintf(session.policy, sizeof(session.policy), "%s", opened->policy);
    hcattn__reply__free_unpacked(reply, NULL);
    *ret_session = session;
    return 0;
}

int hcattn_close_session(struct hcattn *client, uint64_t session, uint32_t timeout_ms, uint64_t *ret_freed_bytes,
                         struct hcattn_error *ret_error)
{
    Hcattn__CloseSession close_session = HCATTN__CLOSE_SESSION__INIT;
    close_session.session = session;
    struct call call = {.request = HCATTN__REQUEST__INIT, .timeout_ms = timeout_ms};
    call.request.request_case = HCATTN__REQUEST__REQUEST_CLOSE_SESSION;
    call.request.close_session = &close_session;
    struct question question = {.wanted = HCATTN__REPLY__REPLY_SESSION_CLOSED};
    int error = 0;
    Hcattn__Reply *reply = question_ask(client, &call, &question, &error, ret_error);
    if (error == -ENOENT && question.again) {
        if (ret_freed_bytes) /* the first attempt has closed it */
            *ret_freed_bytes = 0;
        return 0;
    }
    if (!reply)
        return error;
    if (ret_freed_bytes)
        *ret_freed_bytes = reply->session_closed->freed_bytes;
    hcattn__reply__free_unpacked(reply, NULL);
    return 0;
}

/* What the first attempt of a fork has made. */
static int find_forked(struct hcattn *client, uint64_t session, uint32_t timeout_ms, struct hcattn_forked *ret_forked,
                       struct hcattn_error *ret_error)
{
    struct hcattn_description description;
    int error = hcattn_describe_session(client, session, timeout_ms, &description, ret_error);
    if (error)
        return error;
    *ret_forked = (struct hcattn_forked){.session = session, .n_tokens = description.stats.n_tokens};
    hcattn_description_free(&description);
    return 0;
}

int hcattn_fork(struct hcattn *client, const struct hcattn_fork *fork, uint32_t timeout_ms,
                struct hcattn_forked *ret_forked, struct hcattn_error *ret_error)
{
    Hcattn__Fork body = HCATTN__FORK__INIT;
    body.session = fork->session;
    body.new_session = fork->new_session ? fork->new_session : random_u64(); /* as in hcattn_open_session() */
    body.n_tokens = fork->n_tokens;
    body.ephemeral = fork->ephemeral;
    body.idle_timeout_s = fork->idle_timeout_s;
    if (fork->policy)
        body.policy = (char *)fork->policy;
    struct call call = {.request = HCATTN__REQUEST__INIT, .timeout_ms = timeout_ms};
    call.request.request_case = HCATTN__REQUEST__REQUEST_FORK;
    call.request.fork = &body;
    struct question question = {.wanted = HCATTN__REPLY__REPLY_FORKED};
    int error = 0;
    Hcattn__Reply *reply = question_ask(client, &call, &question, &error, ret_error);
    /* A random id is nobody else's: the source has grown since the first attempt, and that one's copy is as good. */
    if (error == -ESTALE && question.again && !fork->new_session)
        return find_forked(client, body.new_session, timeout_ms, ret_forked, ret_error);
    if (!reply)
        return error;
    *ret_forked = (struct hcattn_forked){.session = reply->forked->session, .n_tokens = reply->forked->n_tokens};
    hcattn__reply__free_unpacked(reply, NULL);
    return 0;
}

int hcattn_set_policy(struct hcattn *client, uint64_t session, const char *policy, uint32_t timeout_ms,
                      char ret_policy[HCATTN_POLICY_SIZE], struct hcattn_error *ret_error)
{
    Hcattn__SetPolicy body = HCATTN__SET_POLICY__INIT;
    body.session = session;
    body.policy = (char *)policy;
    struct call call = {.request = HCATTN__REQUEST__INIT, .timeout_ms = timeout_ms};
    call.request.request_case = HCATTN__REQUEST__REQUEST_SET_POLICY;
    call.request.set_policy = &body;
    struct question question = {.wanted = HCATTN__REPLY__REPLY_POLICY_SET};
    int error = 0;
    Hcattn__Reply *reply = question_ask(client, &call, &question, &error, ret_error);
    if (!reply)
        return error;
    if (ret_policy)
        snprintf(ret_policy, HCATTN_POLICY_SIZE, "%s", reply->policy_set->policy);
    hcattn__reply__free_unpacked(reply, NULL);
    return 0;
}

int hcattn_list_sessions(struct hcattn *client, uint32_t timeout_ms, struct hcattn_sessions *ret_sessions,
                         struct hcattn_error *ret_error)
{
    Hcattn__ListSessions body = HCATTN__LIST_SESSIONS__INIT;
    struct call call = {.request = HCATTN__REQUEST__INIT, .timeout_ms = timeout_ms};
    call.request.request_case = HCATTN__REQUEST__REQUEST_LIST_SESSIONS;
    call.request.list_sessions = &body;
    struct question question = {.wanted = HCATTN__REPLY__REPLY_SESSION_LIST};
    int error = 0;
    Hcattn__Reply *reply = question_ask(client, &call, &question, &error, ret_error);
    if (!reply)
        return error;
    const Hcattn__SessionList *list = reply->session_list;
    struct hcattn_session_stats *sessions = message_sessions(list->sessions, list->n_sessions);
    if (!sessions) {
        hcattn__reply__free_unpacked(reply, NULL);
        return call_fail(ret_error, HCATTN_NO_MEMORY, "no memory for the list of sessions");
    }
    *ret_sessions = (struct hcattn_sessions){.n_sessions = list->n_sessions, .sessions = sessions, .owner = reply};
    return 0;
}

void hcattn_sessions_free(struct hcattn_sessions *sessions)
{
    if (!sessions)
        return;
    free((void *)sessions->sessions);
    hcattn__reply__free_unpacked(sessions->owner, NULL);
    *sessions = (struct hcattn_sessions){.n_sessions = 0};
}

/* -EPROTO: numbers that do not belong to [n_layers][n_kv_heads]; -ENOMEM. */
static int take_counts(const Hcattn__SessionDescribed *from, struct hcattn_counts *ret_counts)
{
    const Hcattn__SessionCounts *counts = from->counts;
    if (counts->n_n_kept && counts->n_n_kept != (uint64_t)from->n_layers * from->n_kv_heads)
        return -EPROTO;
    bool any = counts->n_n_kept && counts->n_old_tokens;
    double *kept = any ? calloc(counts->n_n_kept, sizeof(*kept)) : NULL;
    struct hcattn_store_read *reads = calloc(counts->n_reads + 1, sizeof(*reads));
    if ((any && !kept) || !reads) {
        free(kept);
        free(reads);
        return -ENOMEM;
    }
    for (size_t i = 0; kept && i < counts->n_n_kept; i++)
        kept[i] = (double)counts->n_kept[i] / (double)counts->n_old_tokens;
    for (size_t i = 0; i < counts->n_reads; i++)
        reads[i] = (struct hcattn_store_read){.store = counts->reads[i]->store, .bytes = counts->reads[i]->bytes};
    *ret_counts = (struct hcattn_counts){
        .n_steps = counts->n_steps,
        .n_old_tokens = counts->n_old_tokens,
        .kept = kept,
        .reads = reads,
        .n_reads = counts->n_reads,
        .exact_bytes = counts->exact_bytes,
        .key_bytes = counts->key_bytes,
        .select_us = counts->select_us,
        .attention_us = counts->attention_us,
        .store_wait_us = counts->store_wait_us,
        .matmul_us = counts->matmul_us,
        .step_us = counts->step_us,
    };
    return 0;
}

/* As take_counts(). kept_mass points into the message. */
static int take_profile(const Hcattn__SessionDescribed *from, struct hcattn_profile *ret_profile)
{
    const Hcattn__HeadProfile *profile = from->profile;
    uint64_t n = (uint64_t)from->n_layers * from->n_kv_heads;
    if (n == 0 || profile->n_classes != n || profile->n_kept_mass != n)
        return -EPROTO;
    for (size_t i = 0; i < n; i++)
        if ((uint32_t)profile->classes[i] > HCATTN_HEAD_LOCAL)
            return -EPROTO;
    uint8_t *classes = malloc(n);
    if (!classes)
        return -ENOMEM;
    for (size_t i = 0; i < n; i++)
        classes[i] = (uint8_t)profile->classes[i];
    *ret_profile = (struct hcattn_profile){.n_tokens = profile->n_tokens,
                                           .recovery = profile->recovery,
                                           .classes = classes,
                                           .kept_mass = profile->kept_mass};
    return 0;
}

int hcattn_describe_session(struct hcattn *client, uint64_t session, uint32_t timeout_ms,
                            struct hcattn_description *ret_description, struct hcattn_error *ret_error)
{
    Hcattn__DescribeSession body = HCATTN__DESCRIBE_SESSION__INIT;
    body.session = session;
    struct call call = {.request = HCATTN__REQUEST__INIT, .timeout_ms = timeout_ms};
    call.request.request_case = HCATTN__REQUEST__REQUEST_DESCRIBE_SESSION;
    call.request.describe_session = &body;
    struct question question = {.wanted = HCATTN__REPLY__REPLY_SESSION_DESCRIBED};
    int error = 0;
    Hcattn__Reply *reply = question_ask(client, &call, &question, &error, ret_error);
    if (!reply)
        return error;
    const Hcattn__SessionDescribed *from = reply->session_described;
    struct hcattn_description description = {.n_layers = from->n_layers, .n_kv_heads = from->n_kv_heads};
    error = from->stats ? 0 : -EPROTO;
    if (!error)
        description.owned_stats = message_sessions(&from->stats, 1);
    if (!error && !description.owned_stats)
        error = -ENOMEM;
    if (!error && from->counts)
        error = take_counts(from, &description.counts);
    if (!error && from->profile)
        error = take_profile(from, &description.profile);
    if (error) {
        hcattn_description_free(&description);
        hcattn__reply__free_unpacked(reply, NULL);
        if (error == -ENOMEM)
            return call_fail(ret_error, HCATTN_NO_MEMORY, "no memory for the session's counts");
        call_fail(ret_error, HCATTN_INTERNAL, "the coordinator's description of the session is not complete");
        return error;
    }
    description.stats = description.owned_stats[0];
    description.counted = from->counts != NULL;
    description.profiled = from->profile != NULL;
    description.owner = reply;
    *ret_description = description;
    return 0;
}

void hcattn_description_free(struct hcattn_description *description)
{
    if (!description)
        return;
    free((void *)description->counts.kept);
    free((void *)description->counts.reads);
    free((void *)description->profile.classes);
    free(description->owned_stats);
    hcattn__reply__free_unpacked(description->owner, NULL);
    *description = (struct hcattn_description){.n_layers = 0};
}
