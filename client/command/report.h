/* report.h - the service's state as a table for people and as a JSON object. Threads: the main thread. */
#pragma once

#include "client/hcattn.h"

#include <jansson.h>

void report_table(const struct hcattn_health *health, const struct hcattn_stats *stats);   /* to standard output */
json_t *report_json(const struct hcattn_health *health, const struct hcattn_stats *stats); /* NULL: no memory */
