/* drain.h - `hcattn drain`: lets the service finish what runs. */
#pragma once

int drain_command(int argc, char **argv); /* struct command, command.h */
