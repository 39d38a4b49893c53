/* table.h - the subcommands of `hcattn`. */
#pragma once

#include "client/command/command.h"

extern const struct command table_commands[]; /* closed by a NULL name */
