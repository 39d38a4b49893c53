/* hosts_look.c - see hosts.h: all hosts are asked at once how they are. */
#include "client/call.h"
#include "client/hosts.h"
#include "common/clock.h"
#include "common/random.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define LOOK_US 1000000u /* for hosts to say how they are, once one of them has */
#define SOON_US 300000u  /* for hosts where nobody listens: it may be a restart */

bool hosts_left_alone(const struct host *host)
{
    return clock_now_us() < host->retry_us;
}

static void ask(struct host *host)
{
    Hcattn__Health health = HCATTN__HEALTH__INIT;
    Hcattn__Stats stats = HCATTN__STATS__INIT;
    Hcattn__Request request = HCATTN__REQUEST__INIT;
    host->look = (struct host_look){.asked = true, .health_id = random_u64(), .stats_id = random_u64()};
    request.request_id = host->look.health_id;
    request.request_case = HCATTN__REQUEST__REQUEST_HEALTH;
    request.health = &health;
    if (call_send(host, &request) < 0)
        return; /* as if it did not answer */
    request.request_id = host->look.stats_id;
    request.request_case = HCATTN__REQUEST__REQUEST_STATS;
    request.stats = &stats;
    (void)call_send(host, &request);
}

static void take_stats(struct host *host, const Hcattn__StatsReply *stats, uint64_t session)
{
    struct host_look *look = &host->look;
    uint64_t n_empty = 0;
    look->stats = true;
    look->draining = stats->draining;
    look->n_sessions = (uint32_t)stats->n_sessions;
    snprintf(host->identity, sizeof(host->identity), "%.160s (version %.60s)", stats->model, stats->version);
    for (size_t i = 0; i < stats->n_processes; i++) {
        const Hcattn__ProcessStats *process = stats->processes[i];
        if (process->bytes_total > process->bytes_used)
            look->free_bytes += process->bytes_total - process->bytes_used;
    }
    for (size_t i = 0; i < stats->n_sessions; i++) {
        n_empty += stats->sessions[i]->reserved_tokens == 0;
        look->has_session |= stats->sessions[i]->session == session;
    }
    /* Several sessions opened in a row would all go to the host that is largest now. */
    uint64_t n_bytes = n_empty * stats->default_max_tokens * stats->store_bytes_per_token;
    look->free_bytes -= n_bytes < look->free_bytes ? n_bytes : look->free_bytes;
}

static void take_message(struct host *host, const struct socket_message *message, uint64_t session)
{
    struct host_look *look = &host->look;
    Hcattn__Reply *reply = NULL;
    if (message->n_frames == 1)
        reply = hcattn__reply__unpack(NULL, message->frames[0].n_bytes, message->frames[0].data);
    if (!reply)
        return;
    hosts_heard(host);
    if (reply->reply_case == HCATTN__REPLY__REPLY_HEALTH && reply->request_id == look->health_id) {
        look->health = true;
        look->ready = reply->health->ready;
        host->coordinator = reply->health->coordinator;
        host->ready = reply->health->ready;
    } else if (reply->reply_case == HCATTN__REPLY__REPLY_STATS && reply->request_id == look->stats_id) {
        take_stats(host, reply->stats, session);
    }
    hcattn__reply__free_unpacked(reply, NULL);
}

static void take_messages(struct hosts *hosts, uint64_t session)
{
    for (size_t i = 0; i < hosts->n; i++) {
        struct socket_message *message = NULL;
        int error;
        while ((error = socket_receive(hosts->all[i].socket, false, &message)) == 0 || error == -EMSGSIZE) {
            if (error)
                continue;
            take_message(&hosts->all[i], message, session);
            socket_message_free(message);
        }
    }
}

bool hosts_told(const struct host *host)
{
    return host->look.health && host->look.stats;
}

/* 0: go on; negative errno: it ends. */
static int wait_for_messages(struct hcattn *client, uint64_t until_us, struct hcattn_error *error)
{
    struct hosts *hosts = &client->hosts;
    struct socket_item items[HOSTS_MAX + 1];
    for (size_t i = 0; i < hosts->n; i++)
        items[i] = (struct socket_item){.socket = hosts->all[i].socket, .fd = -1, .events = SOCKET_READABLE};
    items[hosts->n] = (struct socket_item){.fd = client->cancel_fd, .events = SOCKET_READABLE};
    int n = socket_poll(items, hosts->n + 1, clock_remaining_ms(until_us));
    if (n < 0 && n != -EINTR)
        return call_fail(error, HCATTN_INTERNAL, "cannot wait for replies (errno %d)", -n);
    return atomic_load(&client->cancelled) ? call_fail(error, HCATTN_CANCELLED, "cancelled") : 0;
}

int hosts_look(struct hcattn *client, uint64_t session, bool every, uint64_t deadline_us, struct hcattn_error *error)
{
    struct hosts *hosts = &client->hosts;
    uint64_t begun_us = clock_now_us(), until_us = clock_deadline_us(client->connect_timeout_us);
    bool all_lost = true;
    if (until_us > deadline_us)
        until_us = deadline_us;
    for (size_t i = 0; i < hosts->n; i++)
        all_lost &= hosts_left_alone(&hosts->all[i]);
    for (size_t i = 0; i < hosts->n; i++) {
        hosts->all[i].look = (struct host_look){.asked = false};
        if (all_lost || !hosts_left_alone(&hosts->all[i]))
            ask(&hosts->all[i]);
    }
    for (;;) {
        take_messages(hosts, session);
        uint64_t now_us = clock_now_us();
        bool all = true, found = false, ready = false, soon = now_us - begun_us >= SOON_US;
        for (size_t i = 0; i < hosts->n; i++)
            ready |= hosts_told(&hosts->all[i]) && hosts->all[i].look.ready;
        for (size_t i = 0; i < hosts->n; i++) {
            struct host *host = &hosts->all[i];
            /* Where nobody listens somebody may soon, which is worth waiting for if there is no other one. */
            bool gone = hosts_hopeless(host) || hosts_no_file(host) || (ready && !every && hosts_absent(host));
            all &= !host->look.asked || hosts_told(host) || (soon && gone);
            found |= hosts_told(host) && host->look.has_session;
        }
        bool enough = all || (!every && ready && now_us - begun_us >= LOOK_US);
        if (found)
            return 0; /* the others need not have answered yet */
        if (enough || now_us >= until_us)
            break;
        uint64_t wake_us = now_us + SOON_US < until_us ? now_us + SOON_US : until_us;
        int result = wait_for_messages(client, wake_us, error);
        if (result < 0)
            return result;
    }
    for (size_t i = 0; i < hosts->n; i++) {
        struct host *host = &hosts->all[i];
        if (host->look.asked && !hosts_told(host) && (clock_now_us() - begun_us >= LOOK_US || hosts_absent(host)))
            hosts_miss(host); /* it had its time */
        if (!hosts->identity[0] && hosts_told(host) && host->look.ready)
            memcpy(hosts->identity, host->identity, sizeof(hosts->identity));
    }
    return 0;
}
