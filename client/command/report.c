/* report.c - see report.h. */
#include "client/command/report.h"
#include "client/command/output.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define SIZE_TEXT 24

/* "512 B", "3.2 MiB" */
static const char *size_text(uint64_t n_bytes, char text[SIZE_TEXT])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)n_bytes;
    size_t unit = 0;
    while (value >= 1024 && unit + 1 < sizeof(units) / sizeof(units[0])) {
        value /= 1024;
        unit++;
    }
    snprintf(text, SIZE_TEXT, unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return text;
}

/* A word, or a dash in place of nothing: columns stay columns. */
static const char *word(const char *text)
{
    return text && *text ? text : "-";
}

static void process_row(const struct hcattn_process_stats *process)
{
    char node[16] = "-", starts[16] = "-", used[SIZE_TEXT], total[SIZE_TEXT], memory[3 * SIZE_TEXT] = "-";
    if (process->node >= 0)
        snprintf(node, sizeof(node), "%d", process->node);
    if (process->n_starts) /* counted by its supervisor; nobody counts the coordinator's */
        snprintf(starts, sizeof(starts), "%" PRIu32, process->n_starts);
    if (process->bytes_total)
        snprintf(memory, sizeof(memory), "%s of %s", size_text(process->bytes_used, used),
                 size_text(process->bytes_total, total));
    else if (process->weight_bytes)
        snprintf(memory, sizeof(memory), "%s weights", size_text(process->weight_bytes, used));
    output_format("%-15s %5" PRIu32 " %8" PRIu32 " %-9s %4s %6s  %-24s %s%s%s\n", process->program, process->index,
                  process->pid, word(process->state), node, starts, memory, process->phase ? process->phase : "",
                  process->phase && *process->phase ? "; " : "", word(process->achieved));
}

void report_table(const struct hcattn_health *health, const struct hcattn_stats *stats)
{
    char device[SIZE_TEXT], store[SIZE_TEXT];
    output_format("%s%s%s\n", health->ready ? "ready" : "not ready", health->sentence[0] ? ": " : "", health->sentence);
    output_format("model %s, context %" PRIu32 " tokens, policy %s, transport %s\n", word(stats->model), stats->n_ctx,
                  word(stats->policy), word(stats->transport));
    output_format("per token: %s on the device, %s in the stores; an answer has at most %" PRIu32
                  " tokens unless asked for more\n",
                  size_text(stats->device_bytes_per_token, device), size_text(stats->store_bytes_per_token, store),
                  stats->default_max_tokens);
    output_format("\n%-15s %5s %8s %-9s %4s %6s  %-24s %s\n", "PROGRAM", "INDEX", "PID", "STATE", "NODE", "STARTS",
                  "MEMORY", "ACHIEVED");
    for (size_t i = 0; i < stats->n_processes; i++)
        process_row(&stats->processes[i]);
    if (stats->n_sessions)
        output_format("\n%-16s  %-10s %-12s %10s %10s %12s\n", "SESSION", "STATE", "POLICY", "TOKENS", "RESERVED",
                      "MEMORY");
    for (size_t i = 0; i < stats->n_sessions; i++) {
        const struct hcattn_session_stats *session = &stats->sessions[i];
        output_format("%016" PRIx64 "  %-10s %-12s %10" PRIu64 " %10" PRIu64 " %12s\n", session->session,
                      word(session->state), word(session->policy), session->n_tokens, session->reserved_tokens,
                      size_text(session->bytes, store));
    }
}

static json_t *text_json(const char *text)
{
    return output_json_text(text ? text : "", text ? strlen(text) : 0);
}

static json_t *hex_json(uint64_t number)
{
    char text[17];
    snprintf(text, sizeof(text), "%016" PRIx64, number);
    return json_string(text);
}

static json_t *process_json(const struct hcattn_process_stats *process)
{
    return json_pack("{s:o,s:I,s:I,s:o,s:i,s:I,s:o,s:o,s:I,s:I,s:I,s:I,s:I,s:I,s:o}", //
                     "program", text_json(process->program),                          //
                     "index", (json_int_t)process->index,                             //
                     "pid", (json_int_t)process->pid,                                 //
                     "state", text_json(process->state),                              //
                     "node", process->node,                                           //
                     "starts", (json_int_t)process->n_starts,                         //
                     "achieved", text_json(process->achieved),                        //
                     "phase", text_json(process->phase),                              //
                     "bytes_total", (json_int_t)process->bytes_total,                 //
                     "bytes_used", (json_int_t)process->bytes_used,                   //
                     "bytes_served", (json_int_t)process->bytes_served,               //
                     "requests", (json_int_t)process->n_requests,                     //
                     "tokens", (json_int_t)process->n_tokens,                         //
                     "weight_bytes", (json_int_t)process->weight_bytes,               //
                     "incarnation", hex_json(process->incarnation));
}

static json_t *session_json(const struct hcattn_session_stats *session)
{
    json_t *lanes = json_array();
    for (size_t i = 0; i < session->n_lanes; i++)
        json_array_append_new(lanes, json_integer(session->lane_store[i]));
    return json_pack("{s:o,s:o,s:o,s:I,s:I,s:I,s:o}",                         //
                     "session", hex_json(session->session),                   //
                     "state", text_json(session->state),                      //
                     "policy", text_json(session->policy),                    //
                     "tokens", (json_int_t)session->n_tokens,                 //
                     "reserved_tokens", (json_int_t)session->reserved_tokens, //
                     "bytes", (json_int_t)session->bytes,                     //
                     "lane_store", lanes);
}

json_t *report_json(const struct hcattn_health *health, const struct hcattn_stats *stats)
{
    json_t *processes = json_array(), *sessions = json_array();
    for (size_t i = 0; i < stats->n_processes; i++)
        json_array_append_new(processes, process_json(&stats->processes[i]));
    for (size_t i = 0; i < stats->n_sessions; i++)
        json_array_append_new(sessions, session_json(&stats->sessions[i]));
    return json_pack("{s:b,s:b,s:o,s:o,s:o,s:o,s:I,s:I,s:o,s:o,s:I,s:I,s:I,s:o,s:o}",     //
                     "live", health->live,                                                //
                     "ready", health->ready,                                              //
                     "sentence", text_json(health->sentence),                             //
                     "coordinator", hex_json(health->coordinator),                        //
                     "version", text_json(stats->version),                                //
                     "model", text_json(stats->model),                                    //
                     "n_ctx", (json_int_t)stats->n_ctx,                                   //
                     "default_max_tokens", (json_int_t)stats->default_max_tokens,         //
                     "transport", text_json(stats->transport),                            //
                     "policy", text_json(stats->policy),                                  //
                     "device_bytes_per_token", (json_int_t)stats->device_bytes_per_token, //
                     "store_bytes_per_token", (json_int_t)stats->store_bytes_per_token,   //
                     "uptime_s", (json_int_t)stats->uptime_s,                             //
                     "processes", processes,                                              //
                     "sessions", sessions);
}
