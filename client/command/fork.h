/* fork.h - `hcattn fork`: a new session from the beginning of another. */
#pragma once

int fork_command(int argc, char **argv); /* struct command, command.h */
