/* run.h - `hcattn run ROLE`: the supervisor of one process. */
#pragma once

int run_command(int argc, char **argv); /* struct command, command.h */
