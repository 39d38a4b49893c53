/* generate.h - `hcattn generate`: one prompt, one answer. */
#pragma once

int generate_command(int argc, char **argv); /* struct command, command.h */
