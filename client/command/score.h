/* score.h - `hcattn score`: log-probabilities of a text. */
#pragma once

int score_command(int argc, char **argv); /* struct command, command.h */
