/* profile_report.h - a session's FastGen profile as a table and as JSON. Threads: the main thread. */
#pragma once

#include "client/hcattn.h"

#include <jansson.h>

/* Of a description that is `profiled`. */
void profile_report_table(const struct hcattn_description *description);   /* to standard output */
json_t *profile_report_json(const struct hcattn_description *description); /* a new reference; NULL: no memory */
