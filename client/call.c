/* call.c - see call.h. */
#include "client/call.h"
#include "client/message.h"
#include "common/clock.h"
#include "common/random.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define MESSAGE_MAX_BYTES  ((size_t)64 << 20)
#define HEALTH_PERIOD_US   1000000u
#define SEND_RETRY_US      50000u
#define AGAIN_US           500000u /* before a resumed request that was refused for now is tried again */
#define DRAIN_US           100000u /* the rest of a stream with a gap passes by before it is asked for again */
#define ABSENT_US          500000u /* no socket file for this long: nobody is there; less may be a restart */
#define BUSY_US            10000000u
#define CANCEL_PATIENCE_US 3000000u
#define MAX_OUT_OF_STEP    8u

/* What one call_run() knows. */
struct wait {
    struct hcattn *client;
    struct host *host;
    struct call *call;
    struct hcattn_error *error;
    uint64_t id;
    uint64_t begun_us;
    uint64_t deadline_us;
    uint64_t heard_us;   /* last message of any kind */
    uint64_t connect_us; /* until when a first answer must be there */
    enum call_line line;
    bool heard; /* a coordinator answered during this call */

    bool to_send;
    uint64_t send_at_us;
    uint64_t epoch;     /* attempts sent so far */
    uint64_t confirmed; /* coordinator that listed this attempt as running; 0: none yet */
    bool sent_ready;    /* the coordinator was known to be ready when this attempt was sent */
    bool resumed;       /* sent again because another coordinator answers */
    uint64_t resumed_us;
    uint32_t n_out_of_step;
    bool answered; /* something that is no Error came for this request */
    bool refused;  /* by an Error in *error that is to be judged with the next health */
    int refused_result;
    bool kept; /* the last reply is the caller's now */

    uint64_t health_id;
    uint64_t health_epoch; /* attempts sent when it was asked */
    uint64_t judged_epoch; /* last attempt that a health reply was about */
    uint64_t health_at_us;
    uint64_t stats_id; /* of the last Stats, for calls that want them; 0: none asked */

    bool cancelling;
    uint64_t cancel_until_us;
    int cancel_result;
};

int call_fail(struct hcattn_error *ret_error, enum hcattn_code code, const char *format, ...)
{
    if (ret_error) {
        *ret_error = (struct hcattn_error){.code = code};
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(ret_error->sentence, sizeof(ret_error->sentence), format, arguments);
        va_end(arguments);
    }
    return message_errno(code);
}

void call_cancel(struct hcattn *client)
{
    int saved = errno;
    uint64_t one = 1;
    atomic_store(&client->cancelled, true);
    ssize_t n = write(client->cancel_fd, &one, sizeof(one));
    (void)n; /* full means that it is readable already */
    errno = saved;
}

static void forget_cancel(struct hcattn *client)
{
    uint64_t count;
    atomic_store(&client->cancelled, false);
    ssize_t n = read(client->cancel_fd, &count, sizeof(count));
    (void)n;
}

int call_send(struct host *host, const Hcattn__Request *request)
{
    size_t n_bytes = hcattn__request__get_packed_size(request);
    if (n_bytes > MESSAGE_MAX_BYTES)
        return -EMSGSIZE;
    uint8_t *bytes = malloc(n_bytes ? n_bytes : 1);
    if (!bytes)
        return -ENOMEM;
    hcattn__request__pack(request, bytes);
    struct frame frame = {.data = bytes, .n_bytes = n_bytes};
    int error = socket_send(host->socket, &frame, 1, false);
    free(bytes);
    return error;
}

static int send_health(struct wait *wait)
{
    Hcattn__Health health = HCATTN__HEALTH__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    request.request_id = random_u64();
    request.request_case = HCATTN__REQUEST__REQUEST_HEALTH;
    request.health = &health;
    int error = call_send(wait->host, &request);
    if (!error) {
        wait->health_id = request.request_id;
        wait->health_epoch = wait->epoch;
    }
    return error;
}

static void send_stats(struct wait *wait)
{
    Hcattn__Stats stats = HCATTN__STATS__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    request.request_id = random_u64();
    request.request_case = HCATTN__REQUEST__REQUEST_STATS;
    request.stats = &stats;
    if (call_send(wait->host, &request) == 0)
        wait->stats_id = request.request_id;
}

static void send_cancel(struct wait *wait)
{
    Hcattn__Cancel cancel = HCATTN__CANCEL__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    cancel.request = wait->id;
    request.request_id = random_u64();
    request.request_case = HCATTN__REQUEST__REQUEST_CANCEL;
    request.cancel = &cancel;
    call_send(wait->host, &request); /* not sent: nobody to tell it to */
}

/* The call ends with `result` once the coordinator has let go of it, or soon anyway. */
static void begin_cancel(struct wait *wait, int result)
{
    wait->cancelling = true;
    wait->cancel_result = result;
    wait->cancel_until_us = clock_deadline_us(CANCEL_PATIENCE_US);
    if (wait->epoch == 0 || !wait->heard)
        wait->cancel_until_us = 0;
    else
        send_cancel(wait);
}

static void ask_again(struct wait *wait, uint64_t delay_us)
{
    wait->to_send = true;
    wait->send_at_us = clock_deadline_us(delay_us);
}

static int try_send(struct wait *wait)
{
    struct host *host = wait->host;
    if (wait->epoch > 0 && wait->call->prepare_again && !wait->call->prepare_again(wait->call->context, wait->resumed))
        return call_fail(wait->error, HCATTN_UNAVAILABLE,
                         "the coordinator was lost before it accepted the request; "
                         "whether the session holds its input is not known");
    wait->call->request.request_id = wait->id;
    int error = call_send(host, &wait->call->request);
    if (error == -EAGAIN) {
        ask_again(wait, SEND_RETRY_US);
        return 0;
    }
    if (error == -EMSGSIZE)
        return call_fail(wait->error, HCATTN_INVALID_ARGUMENT, "the request is larger than 64 MiB");
    if (error)
        return call_fail(wait->error, HCATTN_INTERNAL, "cannot send the request (errno %d)", -error);
    wait->to_send = false;
    wait->epoch++;
    wait->confirmed = 0;
    wait->sent_ready = host->ready;
    /* A coordinator that was never heard of is asked at once: the answer tells that it is there. */
    uint64_t delay_us = host->coordinator && wait->heard ? HEALTH_PERIOD_US : 0;
    if (host->coordinator && !wait->heard)
        delay_us = HEALTH_PERIOD_US / 4;
    wait->health_at_us = clock_deadline_us(delay_us);
    return 0;
}

/* A request that another coordinator takes up may be refused for a while: its peers are still coming back. */
static bool may_be_for_now(enum hcattn_code code)
{
    return code == HCATTN_UNAVAILABLE || code == HCATTN_BUSY || code == HCATTN_NOT_FOUND || code == HCATTN_CONFLICT;
}

static bool refused_for_now(const struct wait *wait, enum hcattn_code code)
{
    if (!wait->resumed || !may_be_for_now(code))
        return false;
    uint64_t since_us = clock_now_us() - wait->resumed_us;
    if (code == HCATTN_BUSY)
        return since_us < BUSY_US;
    /* NOT_FOUND, CONFLICT: the stores with this session have not registered yet. */
    return since_us < wait->client->lost_timeout_us && (code == HCATTN_UNAVAILABLE || !wait->sent_ready);
}

static void note_loss(struct wait *wait)
{
    wait->resumed = true;
    wait->resumed_us = clock_now_us();
    wait->sent_ready = false;
}

/* 1: goes on; 0 or negative errno: the call ends so. */
static int judge_health(struct wait *wait, const Hcattn__Reply *reply)
{
    struct host *host = wait->host;
    const Hcattn__HealthReply *health = reply->health;
    bool lost = host->coordinator && health->coordinator != host->coordinator;
    host->coordinator = health->coordinator;
    host->ready = health->ready;
    if (lost)
        note_loss(wait);
    if (wait->cancelling || wait->to_send || wait->epoch == 0 || reply->request_id != wait->health_id ||
        wait->health_epoch != wait->epoch)
        return 1;
    wait->judged_epoch = wait->epoch;
    if (wait->refused) {
        wait->refused = false;
        if (!refused_for_now(wait, wait->error->code))
            return wait->refused_result;
        ask_again(wait, AGAIN_US);
        return 1;
    }
    bool listed = false;
    for (size_t i = 0; i < health->n_running; i++)
        listed |= health->running[i] == wait->id;
    if (!listed && wait->answered && !wait->resumed)
        note_loss(wait); /* it had begun to answer, so this must be another one, though we never heard of the first */
    if (!listed || (wait->confirmed && wait->confirmed != health->coordinator))
        ask_again(wait, 0);
    else
        wait->confirmed = health->coordinator;
    return 1;
}

static int take_error(struct wait *wait, const Hcattn__Error *message)
{
    if (wait->cancelling)
        return wait->cancel_result;
    if (wait->to_send)
        return 1; /* of an attempt that is given up already */
    int result = message_error(message, wait->error);
    if (!may_be_for_now(wait->error->code) || wait->host->coordinator == 0)
        return result;
    if (wait->judged_epoch != wait->epoch) {
        /* Who refuses: the coordinator that we knew, or another one? Its health tells. */
        wait->refused = true;
        wait->refused_result = result;
        wait->health_at_us = clock_now_us();
        return 1;
    }
    if (!refused_for_now(wait, wait->error->code))
        return result;
    ask_again(wait, AGAIN_US);
    return 1;
}

static int stopped(const struct wait *wait)
{
    return call_fail(wait->error, HCATTN_CANCELLED, "stopped by the caller");
}

/* As judge_health(). */
static int take_reply(struct wait *wait, Hcattn__Reply *reply)
{
    wait->heard_us = clock_now_us();
    wait->heard = true;
    hosts_heard(wait->host);
    if (reply->reply_case == HCATTN__REPLY__REPLY_HEALTH) {
        int result = judge_health(wait, reply);
        if (result <= 0)
            return result;
    }
    if (reply->reply_case == HCATTN__REPLY__REPLY_STATS && wait->stats_id && reply->request_id == wait->stats_id) {
        if (!wait->cancelling && !wait->call->on_stats(wait->call->context, reply->stats))
            begin_cancel(wait, stopped(wait));
        return 1;
    }
    if (reply->request_id != wait->id)
        return 1;
    if (reply->reply_case == HCATTN__REPLY__REPLY_ERROR)
        return take_error(wait, reply->error);
    if (wait->cancelling)
        return message_is_last(reply) ? wait->cancel_result : 1;
    wait->answered = true;
    if (wait->call->extends && wait->call->timeout_ms)
        wait->deadline_us = clock_deadline_us((uint64_t)wait->call->timeout_ms * 1000);
    switch (wait->call->on_reply(wait->call->context, reply)) {
    case CALL_GOES_ON:
        return 1;
    case CALL_KEPT:
        wait->kept = true;
        return 0;
    case CALL_FINISHED:
        return 0;
    case CALL_STOPPED:
        begin_cancel(wait, stopped(wait));
        return 1;
    case CALL_OUT_OF_STEP:
        if (wait->to_send)
            return 1; /* more of what is asked for again already */
        if (wait->n_out_of_step++ < MAX_OUT_OF_STEP) {
            ask_again(wait, DRAIN_US);
            return 1;
        }
        call_fail(wait->error, HCATTN_INTERNAL, "the coordinator's replies have gaps");
        return -EPROTO;
    case CALL_MALFORMED:
        break;
    }
    call_fail(wait->error, HCATTN_INTERNAL, "the coordinator's reply is not one to this request");
    return -EPROTO;
}

/* Everything that has arrived. As judge_health(). */
static int take_replies(struct wait *wait)
{
    for (;;) {
        struct socket_message *message = NULL;
        int error = socket_receive(wait->host->socket, false, &message);
        if (error == -EAGAIN || error == -EINTR)
            return 1;
        if (error == -EMSGSIZE)
            continue;
        if (error)
            return call_fail(wait->error, HCATTN_INTERNAL, "cannot receive (errno %d)", -error);
        Hcattn__Reply *reply = NULL;
        if (message->n_frames == 1)
            reply = hcattn__reply__unpack(NULL, message->frames[0].n_bytes, message->frames[0].data);
        int result = reply ? take_reply(wait, reply) : 1; /* what cannot be read is no reply to anything */
        if (reply && !wait->kept)
            hcattn__reply__free_unpacked(reply, NULL);
        socket_message_free(message);
        if (result <= 0)
            return result;
    }
}

static int no_coordinator(const struct wait *wait)
{
    return hosts_no_answer(wait->host, wait->error);
}

/* What has run out of time. As judge_health(). */
static int check_times(struct wait *wait)
{
    struct hcattn *client = wait->client;
    uint64_t now = clock_now_us();
    if (wait->cancelling)
        return now >= wait->cancel_until_us ? wait->cancel_result : 1;
    if (atomic_load(&client->cancelled)) {
        begin_cancel(wait, call_fail(wait->error, HCATTN_CANCELLED, "cancelled"));
        return check_times(wait);
    }
    if (!wait->heard) {
        bool soon = wait->host->coordinator == 0 && now - wait->begun_us >= ABSENT_US;
        if (now >= wait->connect_us || (soon && (hosts_no_file(wait->host) || hosts_hopeless(wait->host)))) {
            wait->line = CALL_LINE_SILENT;
            return no_coordinator(wait);
        }
    } else if (now - wait->heard_us >= client->lost_timeout_us) {
        wait->line = CALL_LINE_LOST;
        return call_fail(wait->error, HCATTN_UNAVAILABLE, "the coordinator at %s has not answered for %llu s",
                         wait->host->endpoint, (unsigned long long)((now - wait->heard_us) / 1000000));
    }
    if (now >= wait->deadline_us) {
        if (!wait->heard)
            return no_coordinator(wait);
        call_fail(wait->error, HCATTN_UNAVAILABLE, "no %s within %u ms",
                  wait->call->extends && wait->answered ? "progress" : "answer", wait->call->timeout_ms);
        begin_cancel(wait, -ETIMEDOUT);
        return check_times(wait);
    }
    return 1;
}

static uint64_t earliest(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Until when nothing is to be done unless something arrives. */
static uint64_t wake_us(const struct wait *wait)
{
    uint64_t wake = wait->cancelling ? wait->cancel_until_us : wait->deadline_us;
    if (wait->to_send)
        wake = earliest(wake, wait->send_at_us);
    wake = earliest(wake, wait->health_at_us);
    if (!wait->heard)
        wake = earliest(wake, clock_now_us() + 100000);
    return wake;
}

static int run_locked(struct wait *wait)
{
    struct hcattn *client = wait->client;
    for (;;) {
        int result = check_times(wait);
        if (result <= 0)
            return result;
        uint64_t now = clock_now_us();
        if (!wait->cancelling && wait->to_send && now >= wait->send_at_us) {
            result = try_send(wait);
            if (result < 0)
                return result;
        }
        if (now >= wait->health_at_us) {
            int error = send_health(wait);
            if (!error && wait->call->on_stats && !wait->cancelling)
                send_stats(wait);
            wait->health_at_us = clock_deadline_us(error ? SEND_RETRY_US : HEALTH_PERIOD_US);
        }
        struct socket_item items[] = {
            {.socket = wait->host->socket, .fd = -1, .events = SOCKET_READABLE},
            {.fd = wait->cancelling ? -1 : client->cancel_fd, .events = SOCKET_READABLE},
        };
        int n = socket_poll(items, 2, clock_remaining_ms(wake_us(wait)));
        if (n < 0 && n != -EINTR)
            return call_fail(wait->error, HCATTN_INTERNAL, "cannot wait for replies (errno %d)", -n);
        result = take_replies(wait);
        if (result <= 0)
            return result;
    }
}

int call_on(struct hcattn *client, struct host *host, struct call *call, uint64_t patience_us, uint64_t deadline_us,
            enum call_line *ret_line, struct hcattn_error *error)
{
    uint64_t now = clock_now_us();
    struct wait wait = {
        .client = client,
        .host = host,
        .call = call,
        .error = error,
        .id = random_u64(),
        .begun_us = now,
        .deadline_us = deadline_us,
        .heard_us = now,
        .connect_us = clock_deadline_us(patience_us),
        .to_send = true,
        .send_at_us = now,
        .health_at_us = CLOCK_NEVER,
    };
    int result = run_locked(&wait);
    *ret_line = wait.line;
    return result;
}

int call_run(struct hcattn *client, struct call *call, struct hcattn_error *ret_error)
{
    struct hcattn_error error = {.code = HCATTN_OK};
    pthread_mutex_lock(&client->mutex);
    int result = hosts_run(client, call, &error);
    if (result == -ECANCELED)
        forget_cancel(client);
    pthread_mutex_unlock(&client->mutex);
    if (result < 0 && ret_error)
        *ret_error = error;
    return result;
}
