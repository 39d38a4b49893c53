/* keys.c - see keys.h. */
#include "client/command/keys.h"
#include "client/command/command.h"
#include "client/command/output.h"
#include "common/key_file.h"

#define NAME "hcattn keys"

static const struct option_spec specs[] = {
    {.name = "json", .kind = OPTION_FLAG, .help = "one JSON object"},
};

static const struct options_table table = {
    .program = NAME,
    .usage = "NAME",
    .summary = "Makes a pair of keys: NAME.secret, which stays where it is, and NAME.public, which others are given.\n"
               "Coordinator: --client-secret NAME.secret --client-keys FILE, a list of the clients' public keys.\n"
               "Client: --key NAME.secret --server-key FILE, the coordinator's public key.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
    .max_positional = 1,
};

int keys_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    char public[SOCKET_KEY_SIZE], error[KEY_FILE_ERROR_SIZE];
    const char *base = options_n_positional(options) ? options_positional(options, 0) : NULL;
    if (!base)
        status = command_fail(COMMAND_USAGE, NAME, "a name for the files is needed: NAME.secret and NAME.public");
    else if (key_file_make(base, public, error) < 0)
        status = command_fail(COMMAND_ERROR, NAME, "%s", error);
    else if (options_flag(options, "json"))
        output_json(json_pack("{s:s}", "public", public));
    else
        output_format("%s.secret and %s.public, with %s\n", base, base, public);
    options_free(options);
    return status ? status : output_status();
}
