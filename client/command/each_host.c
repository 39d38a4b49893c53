/* each_host.c - see each_host.h. */
#include "client/command/each_host.h"
#include "client/command/output.h"
#include "client/command/report.h"

#include <stdlib.h>
#include <string.h>

static int run_one(const char *name, const struct options *options, bool json, each_host_show *show)
{
    int status = 0;
    json_t *object = NULL;
    struct hcattn_error error;
    struct hcattn *client = command_connect(name, options, &status);
    if (!client)
        return status;
    int result = show(client, json ? &object : NULL, &error);
    if (result < 0)
        status = command_call_failed(name, result, &error);
    else if (json)
        output_json(object);
    command_disconnect(client);
    return status ? status : output_status();
}

/* One of several. hosts: NULL: as text. */
static int run_among(const char *name, const struct options *options, const char *endpoint, json_t *hosts,
                     each_host_show *show)
{
    int status = 0;
    json_t *object = NULL;
    struct hcattn_error error;
    struct hcattn *client = command_connect_to(name, options, endpoint, &status);
    if (!client)
        return status;
    const char *host = hcattn_host(client, 0);
    if (!hosts)
        output_format("host %s\n", host);
    int result = show(client, hosts ? &object : NULL, &error);
    if (result < 0) {
        status = command_call_failed(name, result, &error);
        object = hosts ? json_pack("{s:o}", "error", report_text(error.sentence)) : NULL;
    }
    if (hosts) {
        json_object_set_new(object, "host", report_text(host));
        json_array_append_new(hosts, object);
    }
    command_disconnect(client);
    return status;
}

int each_host_run(const char *name, const struct options *options, bool json, each_host_show *show)
{
    if (command_n_hosts(options) == 1)
        return run_one(name, options, json, show);
    /* A list with a mistake is refused as a whole, before anything is shown. */
    int status = 0;
    struct hcattn *all = command_connect(name, options, &status);
    if (!all)
        return status;
    command_disconnect(all);
    char *list = strdup(options_string(options, "endpoint"));
    json_t *hosts = json ? json_array() : NULL;
    if (!list || (json && !hosts)) {
        free(list);
        return command_fail(COMMAND_ERROR, name, "no memory");
    }
    char *rest = list;
    for (char *endpoint; !command_interrupted() && (endpoint = strsep(&rest, ","));) {
        if (!json && endpoint != list)
            output_text("\n");
        int one = run_among(name, options, endpoint, hosts, show);
        status = status ? status : one;
    }
    free(list);
    if (json)
        output_json(json_pack("{s:o}", "hosts", hosts));
    return status ? status : output_status();
}
