/* stats.c - Health, Stats and lists of sessions: answered at once, from what is known here. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "coordinator/state.h"

static void append(char *text, size_t size, const char *part)
{
    size_t n = strlen(text);
    if (n < size)
        snprintf(text + n, size - n, "%s%s", n > 0 ? "; " : "", part);
}

bool stats_ready(const struct server *server, char *sentence, size_t sentence_size)
{
    char part[384];
    bool ready = true, worker_ready = false, worker_there = false;
    sentence[0] = 0;
    for (uint32_t i = 0; i < SERVER_MAX_STORES; i++) {
        if (!membership_has(server, i) || server->leaving >> i & 1u)
            continue; /* has joined for good neither yet nor still */
        const struct process *process = registry_find(server->registry, PROCESS_STORE, i);
        if (process && process->state == PROCESS_READY)
            continue;
        ready = false;
        if (process)
            snprintf(part, sizeof(part), "value-store %u is %s%s%s", i, registry_state_name(process->state),
                     server->stores[i].trouble[0] ? ": " : "", server->stores[i].trouble);
        else
            snprintf(part, sizeof(part), "value-store %u is not there", i);
        append(sentence, sentence_size, part);
    }
    uint32_t cursor = 0;
    for (const struct process *worker; (worker = registry_next(server->registry, &cursor));) {
        if (worker->role != PROCESS_WORKER || worker->state == PROCESS_DEAD)
            continue;
        worker_there = true;
        worker_ready = worker_ready ||
                       (worker->state == PROCESS_READY && (server->members & ~server->leaving & ~worker->pairs) == 0);
        if (worker->state != PROCESS_READY) {
            snprintf(part, sizeof(part), "gpu-worker %u is %s (%s)", worker->index, registry_state_name(worker->state),
                     worker->phase);
            append(sentence, sentence_size, part);
        }
    }
    if (!worker_there)
        append(sentence, sentence_size,
               server->options.n_workers > 1 ? "no gpu-worker is there; one of them is enough"
                                             : "no gpu-worker is there");
    else if (!worker_ready && sentence[0] == 0)
        append(sentence, sentence_size, "the gpu-worker is not connected to all stores yet");
    if (server->stopping)
        append(sentence, sentence_size, "the coordinator is shutting down");
    ready = ready && worker_ready && !server->stopping;
    if (ready)
        sentence[0] = 0;
    return ready;
}

int stats_health(struct server *server, const struct client_route *client, uint64_t request_id)
{
    char sentence[1024];
    Hcattn__HealthReply health = HCATTN__HEALTH_REPLY__INIT;
    health.live = true;
    health.ready = stats_ready(server, sentence, sizeof(sentence));
    health.coordinator = server->options.incarnation;
    health.sentence = sentence;
    uint64_t *running = calloc(requests_count(server->requests) + 1u, sizeof(*running));
    uint32_t cursor = 0;
    for (const struct request *request; running && (request = requests_next(server->requests, &cursor));)
        if (request->state != REQUEST_DONE && !request->mute && requests_same_route(&request->client, client))
            running[health.n_running++] = request->id;
    health.running = running;
    Hcattn__Reply reply = HCATTN__REPLY__INIT;
    reply.request_id = request_id;
    reply.reply_case = HCATTN__REPLY__REPLY_HEALTH;
    reply.health = &health;
    int result = rpc_send(server, client, &reply);
    free(running);
    return result;
}

static void describe_process(const struct server *server, const struct process *process, Hcattn__ProcessStats *stats,
                             char state[16])
{
    char program[32];
    const struct process *supervisor = registry_supervisor_of(server->registry, process);
    hcattn__process_stats__init(stats);
    snprintf(program, sizeof(program), "hc-%s", registry_role_name(process->role));
    stats->program = strdup(program);
    stats->index = process->index;
    stats->pid = process->own_pid;
    bool drains = process->role == PROCESS_STORE && server->leaving >> process->index & 1u;
    bool has_left = process->role == PROCESS_STORE && server->left >> process->index & 1u &&
                    (process->state == PROCESS_DEAD || process->incarnation == server->stores[process->index].left);
    snprintf(state, 16, "%s",
             process->state == PROCESS_FENCING           ? "fenced"
             : has_left                                  ? "drained"
             : drains && process->state == PROCESS_READY ? "draining"
                                                         : registry_state_name(process->state));
    stats->state = state;
    stats->node = process->numa_node;
    stats->n_starts = supervisor ? supervisor->n_starts : 0;
    stats->achieved = (char *)(uintptr_t)process->achieved;
    stats->phase = (char *)(uintptr_t)process->phase;
    if (process->role == PROCESS_STORE) {
        (void)placement_usage(server->placement, process->index, &stats->bytes_total, &stats->bytes_used);
        stats->home_node = process->home_node;
        stats->node_cores = process->node_cores;
        stats->bytes_resident = process->bytes_resident;
        stats->bytes_local = process->bytes_local;
        stats->bytes_per_s = process->bytes_per_s;
    }
    stats->bytes_served = process->bytes_served;
    stats->n_requests = process->n_requests;
    stats->n_tokens = process->n_tokens;
    stats->weight_bytes = process->weight_bytes;
    stats->incarnation = process->incarnation;
    if (process->role != PROCESS_WORKER)
        return;
    stats->device_budget_bytes = process->device_budget_bytes;
    stats->device_bytes = process->device_bytes;
    stats->n_sessions = sessions_bound_to(server->sessions, process->incarnation);
}

static void describe_self(const struct server *server, Hcattn__ProcessStats *stats, char *achieved, size_t size)
{
    struct process self = {.role = PROCESS_COORDINATOR, .index = 0};
    const struct process *supervisor = registry_supervisor_of(server->registry, &self);
    char sentence[8];
    hcattn__process_stats__init(stats);
    stats->program = strdup("hc-coordinator");
    stats->pid = (uint32_t)getpid();
    stats->state = stats_ready(server, sentence, sizeof(sentence)) ? "ready" : "starting";
    stats->node = -1;
    stats->n_starts = supervisor ? supervisor->n_starts : 0;
    stats->achieved = (char *)(uintptr_t)server_describe(server, achieved, (uint32_t)size);
    stats->phase = server->stopping ? "stopping" : "serving";
    stats->n_requests = requests_count(server->requests);
    stats->incarnation = server->options.incarnation;
}

/* Where its blocks live, by store. Freed by stats_free_session(). */
static void fill_shares(const struct server *server, const struct session *session, Hcattn__SessionStats *stats)
{
    uint32_t n_blocks[SERVER_MAX_STORES] = {0}, n = 0;
    for (uint32_t i = 0; i < session->n_blocks; i++)
        n_blocks[session->blocks[i].store & 63u]++;
    for (uint32_t i = 0; i < SERVER_MAX_STORES; i++)
        n += n_blocks[i] > 0;
    Hcattn__StoreShare *shares = calloc(n + 1u, sizeof(*shares));
    stats->stores = calloc(n + 1u, sizeof(Hcattn__StoreShare *));
    if (!shares || !stats->stores) {
        free(shares);
        return;
    }
    stats->stores[0] = shares;
    for (uint32_t i = 0; i < SERVER_MAX_STORES; i++) {
        if (n_blocks[i] == 0)
            continue;
        Hcattn__StoreShare *share = &shares[stats->n_stores];
        hcattn__store_share__init(share);
        share->store = i;
        share->n_blocks = n_blocks[i];
        share->bytes = n_blocks[i] * placement_block_bytes(server->placement, i);
        stats->stores[stats->n_stores++] = share;
    }
}

void stats_free_session(Hcattn__SessionStats *stats)
{
    if (stats->stores)
        free(stats->stores[0]);
    free(stats->stores);
    stats->stores = NULL;
    stats->n_stores = 0;
}

void stats_session(const struct server *server, const struct session *session, Hcattn__SessionStats *stats)
{
    const struct process *worker = workers_holding(server, session);
    hcattn__session_stats__init(stats);
    stats->session = session->id;
    stats->state = (char *)(uintptr_t)sessions_state_name(session->state);
    stats->policy = (char *)(uintptr_t)session->terms.policy;
    stats->n_tokens = sessions_n_tokens(session, server->descriptors);
    stats->reserved_tokens = (uint64_t)session->n_blocks * LAYOUT_BLOCK_TOKENS;
    for (uint32_t i = 0; i < session->n_blocks; i++)
        stats->bytes += placement_block_bytes(server->placement, session->blocks[i].store);
    stats->lane_store = (ProtobufCBinaryData){LAYOUT_N_LANES, (uint8_t *)(uintptr_t)session->terms.lane_store};
    stats->exact_tokens = session->terms.exact_tokens;
    stats->held = worker != NULL;
    stats->worker = worker ? worker->index : 0;
    fill_shares(server, session, stats);
}

struct tables {
    Hcattn__ProcessStats *processes, **process_pointers;
    char (*states)[16];
    Hcattn__SessionStats *sessions, **session_pointers;
};

static void fill(const struct server *server, struct tables *tables, Hcattn__StatsReply *stats, uint32_t capacity,
                 char *achieved, size_t achieved_size)
{
    describe_self(server, &tables->processes[stats->n_processes++], achieved, achieved_size);
    uint32_t cursor = 0;
    for (const struct process *process; (process = registry_next(server->registry, &cursor));)
        if (process->role != PROCESS_SUPERVISOR && !process->replaced && stats->n_processes < capacity) {
            size_t i = stats->n_processes++;
            describe_process(server, process, &tables->processes[i], tables->states[i]);
        }
    for (uint32_t i = 0; i < SERVER_MAX_STORES; i++)
        if (server->left >> i & 1u && !registry_find(server->registry, PROCESS_STORE, i) &&
            stats->n_processes < capacity) { /* an earlier coordinator let it go */
            const struct process gone = {.role = PROCESS_STORE, .index = i, .state = PROCESS_DEAD, .numa_node = -1};
            size_t j = stats->n_processes++;
            describe_process(server, &gone, &tables->processes[j], tables->states[j]);
        }
    cursor = 0;
    for (const struct session *session; (session = sessions_next(server->sessions, &cursor));)
        stats_session(server, session, &tables->sessions[stats->n_sessions++]);
    for (size_t i = 0; i < stats->n_processes; i++)
        tables->process_pointers[i] = &tables->processes[i];
    for (size_t i = 0; i < stats->n_sessions; i++)
        tables->session_pointers[i] = &tables->sessions[i];
    stats->processes = tables->process_pointers;
    stats->sessions = tables->session_pointers;
}

static const char *row_codec_name(const struct server *server)
{
    if (!server->model.known)
        return "";
    return server->model.shape.codec == ROW_CODEC_Q8_0 ? "q8_0" : "f16";
}

static uint32_t n_running(const struct server *server)
{
    uint32_t n = 0, cursor = 0;
    for (const struct request *request; (request = requests_next(server->requests, &cursor));)
        n += (requests_is_work(request->kind) && request->session != NULL && request->state != REQUEST_WAITING) ||
             (request->kind == REQUEST_JOB && request->work != 0);
    return n;
}

void stats_stats(struct server *server, const struct client_route *client, uint64_t request_id)
{
    uint32_t capacity = 1u + (uint32_t)__builtin_popcountll(server->left), cursor = 0;
    while (registry_next(server->registry, &cursor))
        capacity++;
    size_t n_sessions = sessions_count(server->sessions) + 1u;
    struct tables tables = {
        .processes = calloc(capacity, sizeof(*tables.processes)),
        .process_pointers = calloc(capacity, sizeof(*tables.process_pointers)),
        .states = calloc(capacity, sizeof(*tables.states)),
        .sessions = calloc(n_sessions, sizeof(*tables.sessions)),
        .session_pointers = calloc(n_sessions, sizeof(*tables.session_pointers)),
    };
    Hcattn__StatsReply stats = HCATTN__STATS_REPLY__INIT;
    char achieved[768];
    stats.version = HCATTN_VERSION;
    stats.model = (char *)(uintptr_t)server->model.name;
    stats.n_ctx = server->model.n_ctx;
    stats.default_max_tokens = server->options.default_max_tokens;
    stats.transport = (char *)(uintptr_t)server_transport_names[server->transport];
    stats.policy = server->policy;
    stats.exact_tokens = server->options.exact_tokens;
    stats.n_running = n_running(server);
    stats.n_queued = queue_n_waiting(server);
    stats.max_queued = server->options.max_queued;
    stats.draining = server->draining;
    stats.row_codec = (char *)(uintptr_t)row_codec_name(server);
    stats.device_bytes_per_token = server->model.device_bytes_per_token;
    stats.store_bytes_per_token =
        server->model.known ? layout_block_bytes(&server->model.shape) / LAYOUT_BLOCK_TOKENS : 0;
    stats.uptime_s = (clock_now_us() - server->started_us) / 1000000u;
    if (tables.processes && tables.process_pointers && tables.states && tables.sessions && tables.session_pointers) {
        fill(server, &tables, &stats, capacity, achieved, sizeof(achieved));
        Hcattn__Reply reply = HCATTN__REPLY__INIT;
        reply.request_id = request_id;
        reply.reply_case = HCATTN__REPLY__REPLY_STATS;
        reply.stats = &stats;
        (void)rpc_send(server, client, &reply);
    } else {
        rpc_answer_error(server, client, request_id, HCATTN__ERROR_CODE__INTERNAL, "out of memory");
    }
    for (size_t i = 0; i < stats.n_processes; i++)
        free(tables.processes[i].program);
    for (size_t i = 0; i < stats.n_sessions; i++)
        stats_free_session(&tables.sessions[i]);
    free(tables.processes);
    free(tables.process_pointers);
    free(tables.states);
    free(tables.sessions);
    free(tables.session_pointers);
}

void stats_list(struct server *server, const struct client_route *client, uint64_t request_id)
{
    size_t n_sessions = sessions_count(server->sessions) + 1u;
    Hcattn__SessionStats *sessions = calloc(n_sessions, sizeof(*sessions));
    Hcattn__SessionStats **pointers = calloc(n_sessions, sizeof(*pointers));
    Hcattn__SessionList list = HCATTN__SESSION_LIST__INIT;
    uint32_t cursor = 0;
    if (sessions && pointers) {
        for (const struct session *session; (session = sessions_next(server->sessions, &cursor));) {
            pointers[list.n_sessions] = &sessions[list.n_sessions];
            stats_session(server, session, &sessions[list.n_sessions++]);
        }
        list.sessions = pointers;
        Hcattn__Reply reply = HCATTN__REPLY__INIT;
        reply.request_id = request_id;
        reply.reply_case = HCATTN__REPLY__REPLY_SESSION_LIST;
        reply.session_list = &list;
        (void)rpc_send(server, client, &reply);
    } else {
        rpc_answer_error(server, client, request_id, HCATTN__ERROR_CODE__INTERNAL, "out of memory");
    }
    for (size_t i = 0; i < list.n_sessions; i++)
        stats_free_session(&sessions[i]);
    free(sessions);
    free(pointers);
}
