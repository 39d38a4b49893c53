/* tokenize.h - `hcattn tokenize`: text to ids and back. */
#pragma once

int tokenize_command(int argc, char **argv); /* struct command, command.h */
