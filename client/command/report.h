/* report.h - the service's state and its sessions as tables for people and as JSON objects. Threads: the main thread. */
#pragma once

#include "client/hcattn.h"

#include <jansson.h>

/* Tables go to standard output. JSON objects are new references; NULL: no memory. */

void report_table(const struct hcattn_health *health, const struct hcattn_stats *stats);
json_t *report_json(const struct hcattn_health *health, const struct hcattn_stats *stats);

/* report_session.c */
void report_session_table(const struct hcattn_session_stats *sessions, size_t n_sessions);
json_t *report_session_list(const struct hcattn_session_stats *sessions, size_t n_sessions); /* an array */
void report_session_details(const struct hcattn_description *description);
json_t *report_session_json(const struct hcattn_description *description);

/* report_nodes.c: the stores' NUMA nodes */
void report_node_table(const struct hcattn_process_stats *processes, size_t n_processes);
json_t *report_node_list(const struct hcattn_process_stats *processes, size_t n_processes); /* an array */

/* Pieces of all. */
#define REPORT_SIZE_TEXT 24
const char *report_size(uint64_t n_bytes, char text[REPORT_SIZE_TEXT]); /* "512 B", "3.2 MiB"; returns text */
const char *report_word(const char *text);                              /* a dash in place of nothing */
json_t *report_text(const char *text);
json_t *report_hex(uint64_t number); /* 16 digits, as ids and incarnations are shown */
