/* report_session.c - see report.h: sessions, many in a table or one in detail. */
#include "client/command/report.h"
#include "client/command/output.h"

#include <inttypes.h>
#include <stdio.h>

#define BLOCKS_TEXT 384u /* 24 stores, each with as many blocks as there can be */

/* "0:12 1:11": blocks by store. */
static const char *blocks(const struct hcattn_session_stats *session, char *text, size_t size)
{
    size_t n = 0;
    text[0] = '\0';
    for (size_t i = 0; i < session->n_stores && n < size; i++)
        n += (size_t)snprintf(text + n, size - n, "%s%" PRIu32 ":%" PRIu32, i ? " " : "", session->stores[i].store,
                              session->stores[i].n_blocks);
    return report_word(text);
}

void report_session_table(const struct hcattn_session_stats *sessions, size_t n_sessions)
{
    char size[REPORT_SIZE_TEXT], worker[16], stores[BLOCKS_TEXT];
    output_format("%-16s  %-10s %-22s %10s %10s %12s %6s  %s\n", "SESSION", "STATE", "POLICY", "TOKENS", "RESERVED",
                  "MEMORY", "WORKER", "BLOCKS BY STORE");
    for (size_t i = 0; i < n_sessions; i++) {
        const struct hcattn_session_stats *session = &sessions[i];
        snprintf(worker, sizeof(worker), "%" PRIu32, session->worker);
        output_format("%016" PRIx64 "  %-10s %-22s %10" PRIu64 " %10" PRIu64 " %12s %6s  %s\n", session->session,
                      report_word(session->state), report_word(session->policy), session->n_tokens,
                      session->reserved_tokens, report_size(session->bytes, size), session->held ? worker : "-",
                      blocks(session, stores, sizeof(stores)));
    }
}

static json_t *stats_json(const struct hcattn_session_stats *session)
{
    json_t *lanes = json_array();
    for (size_t i = 0; i < session->n_lanes; i++)
        json_array_append_new(lanes, json_integer(session->lane_store[i]));
    json_t *stores = json_array();
    for (size_t i = 0; i < session->n_stores; i++)
        json_array_append_new(stores, json_pack("{s:I,s:I,s:I}",                                   //
                                                "store", (json_int_t)session->stores[i].store,     //
                                                "blocks", (json_int_t)session->stores[i].n_blocks, //
                                                "bytes", (json_int_t)session->stores[i].bytes));
    return json_pack("{s:o,s:o,s:o,s:I,s:I,s:I,s:I,s:o,s:o,s:o}",                           //
                     "session", report_hex(session->session),                               //
                     "state", report_text(session->state),                                  //
                     "policy", report_text(session->policy),                                //
                     "tokens", (json_int_t)session->n_tokens,                               //
                     "reserved_tokens", (json_int_t)session->reserved_tokens,               //
                     "exact_tokens", (json_int_t)session->exact_tokens,                     //
                     "bytes", (json_int_t)session->bytes,                                   //
                     "worker", session->held ? json_integer(session->worker) : json_null(), //
                     "lane_store", lanes,                                                   //
                     "stores", stores);
}

json_t *report_session_list(const struct hcattn_session_stats *sessions, size_t n_sessions)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n_sessions; i++)
        json_array_append_new(list, stats_json(&sessions[i]));
    return list;
}

/* Mean of n values that lie `stride` apart. */
static double mean(const double *values, size_t n, size_t stride)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += values[i * stride];
    return n ? sum / (double)n : 0;
}

/* Share of the old tokens that was read, in percent: a line a layer, a column a KV head. */
static void kept_table(const struct hcattn_description *description)
{
    const double *kept = description->counts.kept;
    size_t n_layers = description->n_layers, n_heads = description->n_kv_heads;
    output_text("\nold tokens read from the stores, % by layer and KV head\nlayer");
    for (size_t head = 0; head < n_heads; head++)
        output_format(" %5zu", head);
    output_text("   mean\n");
    for (size_t layer = 0; layer < n_layers; layer++) {
        output_format("%5zu", layer);
        for (size_t head = 0; head < n_heads; head++)
            output_format(" %5.1f", 100 * kept[layer * n_heads + head]);
        output_format("  %5.1f\n", 100 * mean(kept + layer * n_heads, n_heads, 1));
    }
    output_text(" mean");
    for (size_t head = 0; head < n_heads; head++)
        output_format(" %5.1f", 100 * mean(kept + head, n_layers, n_heads));
    output_format("  %5.1f\n", 100 * mean(kept, n_layers * n_heads, 1));
}

static uint64_t rest_us(const struct hcattn_counts *counts)
{
    uint64_t parts = counts->select_us + counts->attention_us + counts->store_wait_us + counts->matmul_us;
    return counts->step_us > parts ? counts->step_us - parts : 0;
}

static void time_table(const struct hcattn_counts *counts)
{
    const struct {
        const char *name;
        uint64_t us;
    } parts[] = {{"scoring and selection", counts->select_us},
                 {"attention on the device", counts->attention_us},
                 {"waiting for stores", counts->store_wait_us},
                 {"rest of the network", counts->matmul_us},
                 {"other", rest_us(counts)},
                 {"all", counts->step_us}};
    output_text("\ntime of its decode steps (shared with the sessions that ran with it)\n");
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++)
        output_format("%-24s %10.1f ms %5.1f %%\n", parts[i].name, (double)parts[i].us / 1e3,
                      counts->step_us ? 100 * (double)parts[i].us / (double)counts->step_us : 0.0);
}

void report_session_details(const struct hcattn_description *description)
{
    const struct hcattn_session_stats *session = &description->stats;
    const struct hcattn_counts *counts = &description->counts;
    char size[REPORT_SIZE_TEXT], keys[REPORT_SIZE_TEXT];
    report_session_table(session, 1);
    for (size_t i = 0; i < session->n_stores; i++)
        output_format("%s%" PRIu32 " blocks, %s in store %" PRIu32, i ? "; " : "", session->stores[i].n_blocks,
                      report_size(session->stores[i].bytes, size), session->stores[i].store);
    output_text(session->n_stores ? "\n" : "");
    if (session->exact_tokens)
        output_format("exact on the device while it has at most %" PRIu32 " tokens\n", session->exact_tokens);
    if (!description->counted) {
        output_text("no worker holds it: nothing is counted\n");
        return;
    }
    output_format("on the device: %s exact rows, %s keys of old tokens\n", report_size(counts->exact_bytes, size),
                  report_size(counts->key_bytes, keys));
    output_format("%" PRIu64 " decode steps had old tokens", counts->n_steps);
    if (counts->n_steps)
        output_format(", %.1f on average", (double)counts->n_old_tokens / (double)counts->n_steps);
    for (size_t i = 0; i < counts->n_reads; i++)
        output_format("%s%s of store %" PRIu32, i ? ", " : "; rows read: ", report_size(counts->reads[i].bytes, size),
                      counts->reads[i].store);
    output_text("\n");
    if (counts->kept)
        kept_table(description);
    if (counts->step_us)
        time_table(counts);
}

static json_t *kept_json(const struct hcattn_description *description)
{
    if (!description->counts.kept)
        return json_null();
    json_t *layers = json_array();
    for (size_t layer = 0; layer < description->n_layers; layer++) {
        json_t *heads = json_array();
        for (size_t head = 0; head < description->n_kv_heads; head++)
            json_array_append_new(heads, json_real(description->counts.kept[layer * description->n_kv_heads + head]));
        json_array_append_new(layers, heads);
    }
    return layers;
}

static json_t *counts_json(const struct hcattn_description *description)
{
    const struct hcattn_counts *counts = &description->counts;
    json_t *reads = json_array();
    size_t n = (size_t)description->n_layers * description->n_kv_heads;
    for (size_t i = 0; i < counts->n_reads; i++)
        json_array_append_new(reads, json_pack("{s:I,s:I}", "store", (json_int_t)counts->reads[i].store, "bytes",
                                               (json_int_t)counts->reads[i].bytes));
    return json_pack("{s:I,s:I,s:o,s:o,s:o,s:I,s:I,s:{s:f,s:f,s:f,s:f,s:f,s:f}}",                   //
                     "steps", (json_int_t)counts->n_steps,                                          //
                     "old_tokens", (json_int_t)counts->n_old_tokens,                                //
                     "kept", kept_json(description),                                                //
                     "kept_mean", counts->kept ? json_real(mean(counts->kept, n, 1)) : json_null(), //
                     "reads", reads,                                                                //
                     "exact_bytes", (json_int_t)counts->exact_bytes,                                //
                     "key_bytes", (json_int_t)counts->key_bytes,                                    //
                     "time_ms",                                                                     //
                     "select", (double)counts->select_us / 1e3,                                     //
                     "attention", (double)counts->attention_us / 1e3,                               //
                     "store_wait", (double)counts->store_wait_us / 1e3,                             //
                     "matmul", (double)counts->matmul_us / 1e3,                                     //
                     "other", (double)rest_us(counts) / 1e3,                                        //
                     "step", (double)counts->step_us / 1e3);
}

json_t *report_session_json(const struct hcattn_description *description)
{
    json_t *json = stats_json(&description->stats);
    json_object_set_new(json, "layers", json_integer(description->n_layers));
    json_object_set_new(json, "kv_heads", json_integer(description->n_kv_heads));
    json_object_set_new(json, "counts", description->counted ? counts_json(description) : json_null());
    return json;
}
