/* down.h - `hcattn down`: stops what `hcattn up` started. */
#pragma once

int down_command(int argc, char **argv); /* struct command, command.h */
