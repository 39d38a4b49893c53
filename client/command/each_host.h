/*
 * each_host.h - what a command shows of every host that --endpoint names, one after the other: each under its name, or as an
 * object of the array "hosts". Of one host alone it shows the same without the name.
 */
#pragma once

#include "client/command/command.h"

#include <jansson.h>

/* Shows the host on standard output, or, where ret_json is not NULL, returns an object. Errors of a call: told by the caller. */
typedef int each_host_show(struct hcattn *client, json_t **ret_json, struct hcattn_error *error);

/* Returns the exit status; of several hosts the first that is not 0. */
int each_host_run(const char *name, const struct options *options, bool json, each_host_show *show);
