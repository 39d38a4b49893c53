/* sessions.h - `hcattn sessions`: the sessions of the service. */
#pragma once

int sessions_command(int argc, char **argv); /* struct command, command.h */
