/* up.h - `hcattn up`: all processes of a host under one roof. */
#pragma once

int up_command(int argc, char **argv); /* struct command, command.h */
