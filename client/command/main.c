/* main.c - `hcattn`: finds the subcommand and runs it. */
#include "client/command/command.h"
#include "client/command/output.h"
#include "client/command/table.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

static int show_help(void)
{
    output_text("Usage: hcattn COMMAND [OPTIONS] [ARGUMENTS]\n\n"
                "Serves language models whose KV cache does not fit on the device.\n\nCommands:\n");
    for (const struct command *command = table_commands; command->name; command++)
        output_format("  %-11s %s\n", command->name, command->summary);
    output_text(
        "\n'hcattn COMMAND --help' tells the options of a command. Every option may also be given in the environment\n"
        "(HCATTN_NAME) or in a file of lines 'name = value' (--config FILE).\n");
    return output_status();
}

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN); /* output.c sees EPIPE instead */
    if (argc < 2) {
        fprintf(stderr, "hcattn: no command given; 'hcattn --help' lists them\n");
        return COMMAND_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0)
        return show_help();
    if (strcmp(argv[1], "--version") == 0) {
        output_format("hcattn %s\n", HCATTN_VERSION);
        return output_status();
    }
    for (const struct command *command = table_commands; command->name; command++) {
        if (strcmp(argv[1], command->name) == 0)
            return command->run(argc - 1, argv + 1);
    }
    fprintf(stderr, "hcattn: unknown command '%.100s'; 'hcattn --help' lists them\n", argv[1]);
    return COMMAND_USAGE;
}
