/* drain.h - `hcattn drain`: lets the service finish what runs, or one store leave. */
#pragma once

int drain_command(int argc, char **argv); /* struct command, command.h */
