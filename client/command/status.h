/* status.h - `hcattn status`: what runs, and what it holds. */
#pragma once

int status_command(int argc, char **argv); /* struct command, command.h */
