/* report.c - see report.h. */
#include "client/command/report.h"
#include "client/command/output.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

const char *report_size(uint64_t n_bytes, char text[REPORT_SIZE_TEXT])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)n_bytes;
    size_t unit = 0;
    while (value >= 1024 && unit + 1 < sizeof(units) / sizeof(units[0])) {
        value /= 1024;
        unit++;
    }
    snprintf(text, REPORT_SIZE_TEXT, unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return text;
}

const char *report_word(const char *text)
{
    return text && *text ? text : "-"; /* columns stay columns */
}

/* "12.0 MiB of 1.0 GiB", or without the limit when there is none. */
static const char *share(uint64_t used, uint64_t total, char text[3 * REPORT_SIZE_TEXT])
{
    char a[REPORT_SIZE_TEXT], b[REPORT_SIZE_TEXT];
    report_size(used, a);
    if (total)
        snprintf(text, 3 * REPORT_SIZE_TEXT, "%s of %s", a, report_size(total, b));
    else
        snprintf(text, 3 * REPORT_SIZE_TEXT, "%s", a);
    return text;
}

static void process_row(const struct hcattn_process_stats *process)
{
    char node[16] = "-", starts[16] = "-", memory[3 * REPORT_SIZE_TEXT] = "-", device[3 * REPORT_SIZE_TEXT] = "-";
    if (process->node >= 0)
        snprintf(node, sizeof(node), "%d", process->node);
    if (process->n_starts) /* counted by its supervisor; nobody counts the coordinator's */
        snprintf(starts, sizeof(starts), "%" PRIu32, process->n_starts);
    if (process->bytes_total)
        share(process->bytes_used, process->bytes_total, memory);
    else if (process->weight_bytes)
        snprintf(memory, sizeof(memory), "%s weights", report_size(process->weight_bytes, device));
    if (process->weight_bytes || process->device_budget_bytes || process->device_bytes)
        share(process->device_bytes, process->device_budget_bytes, device);
    output_format("%-15s %5" PRIu32 " %8" PRIu32 " %-9s %4s %6s  %-24s %-22s %s%s%s\n", process->program,
                  process->index, process->pid, report_word(process->state), node, starts, memory, device,
                  process->phase ? process->phase : "", process->phase && *process->phase ? "; " : "",
                  report_word(process->achieved));
}

void report_table(const struct hcattn_health *health, const struct hcattn_stats *stats)
{
    char device[REPORT_SIZE_TEXT], store[REPORT_SIZE_TEXT], exact[48] = "sinks and window";
    output_format("%s%s%s%s\n", health->ready ? "ready" : "not ready", stats->draining ? ", draining" : "",
                  health->sentence[0] ? ": " : "", health->sentence);
    output_format("model %s, context %" PRIu32 " tokens, policy %s, transport %s, rows %s\n", report_word(stats->model),
                  stats->n_ctx, report_word(stats->policy), report_word(stats->transport),
                  report_word(stats->row_codec));
    if (stats->exact_tokens)
        snprintf(exact, sizeof(exact), "sessions of up to %" PRIu32 " tokens", stats->exact_tokens);
    output_format("per token: %s on the device, %s in the stores; exact on the device: %s\n",
                  report_size(stats->device_bytes_per_token, device), report_size(stats->store_bytes_per_token, store),
                  exact);
    output_format("requests: %" PRIu32 " running, %" PRIu32 " queued of at most %" PRIu32
                  "; an answer has at most %" PRIu32 " tokens unless asked for more\n",
                  stats->n_running, stats->n_queued, stats->max_queued, stats->default_max_tokens);
    output_format("\n%-15s %5s %8s %-9s %4s %6s  %-24s %-22s %s\n", "PROGRAM", "INDEX", "PID", "STATE", "NODE",
                  "STARTS", "MEMORY", "DEVICE", "ACHIEVED");
    for (size_t i = 0; i < stats->n_processes; i++)
        process_row(&stats->processes[i]);
    report_node_table(stats->processes, stats->n_processes);
    if (stats->n_sessions) {
        output_text("\n");
        report_session_table(stats->sessions, stats->n_sessions);
    }
}

json_t *report_text(const char *text)
{
    return output_json_text(text ? text : "", text ? strlen(text) : 0);
}

json_t *report_hex(uint64_t number)
{
    char text[17];
    snprintf(text, sizeof(text), "%016" PRIx64, number);
    return json_string(text);
}

static json_t *process_json(const struct hcattn_process_stats *process)
{
    return json_pack("{s:o,s:I,s:I,s:o,s:i,s:I,s:o,s:o,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:o}", //
                     "program", report_text(process->program),                                                    //
                     "index", (json_int_t)process->index,                                                         //
                     "pid", (json_int_t)process->pid,                                                             //
                     "state", report_text(process->state),                                                        //
                     "node", process->node,                                                                       //
                     "starts", (json_int_t)process->n_starts,                                                     //
                     "achieved", report_text(process->achieved),                                                  //
                     "phase", report_text(process->phase),                                                        //
                     "bytes_total", (json_int_t)process->bytes_total,                                             //
                     "bytes_used", (json_int_t)process->bytes_used,                                               //
                     "bytes_served", (json_int_t)process->bytes_served,                                           //
                     "requests", (json_int_t)process->n_requests,                                                 //
                     "tokens", (json_int_t)process->n_tokens,                                                     //
                     "weight_bytes", (json_int_t)process->weight_bytes,                                           //
                     "device_budget_bytes", (json_int_t)process->device_budget_bytes,                             //
                     "device_bytes", (json_int_t)process->device_bytes,                                           //
                     "sessions", (json_int_t)process->n_sessions,                                                 //
                     "home_node", (json_int_t)process->home_node,                                                 //
                     "bytes_resident", (json_int_t)process->bytes_resident,                                       //
                     "bytes_local", (json_int_t)process->bytes_local,                                             //
                     "bytes_per_s", (json_int_t)process->bytes_per_s,                                             //
                     "incarnation", report_hex(process->incarnation));
}

json_t *report_json(const struct hcattn_health *health, const struct hcattn_stats *stats)
{
    json_t *processes = json_array();
    for (size_t i = 0; i < stats->n_processes; i++)
        json_array_append_new(processes, process_json(&stats->processes[i]));
    return json_pack("{s:b,s:b,s:o,s:o,s:o,s:o,s:I,s:I,s:o,s:o,s:o,s:I,s:I,s:I,s:I,s:I,s:I,s:b,s:I,s:o,s:o,s:o}", //
                     "live", health->live,                                                                        //
                     "ready", health->ready,                                                                      //
                     "sentence", report_text(health->sentence),                                                   //
                     "coordinator", report_hex(health->coordinator),                                              //
                     "version", report_text(stats->version),                                                      //
                     "model", report_text(stats->model),                                                          //
                     "n_ctx", (json_int_t)stats->n_ctx,                                                           //
                     "default_max_tokens", (json_int_t)stats->default_max_tokens,                                 //
                     "transport", report_text(stats->transport),                                                  //
                     "policy", report_text(stats->policy),                                                        //
                     "row_codec", report_text(stats->row_codec),                                                  //
                     "exact_tokens", (json_int_t)stats->exact_tokens,                                             //
                     "device_bytes_per_token", (json_int_t)stats->device_bytes_per_token,                         //
                     "store_bytes_per_token", (json_int_t)stats->store_bytes_per_token,                           //
                     "running", (json_int_t)stats->n_running,                                                     //
                     "queued", (json_int_t)stats->n_queued,                                                       //
                     "max_queued", (json_int_t)stats->max_queued,                                                 //
                     "draining", stats->draining,                                                                 //
                     "uptime_s", (json_int_t)stats->uptime_s,                                                     //
                     "processes", processes,                                                                      //
                     "nodes", report_node_list(stats->processes, stats->n_processes),                             //
                     "sessions", report_session_list(stats->sessions, stats->n_sessions));
}
