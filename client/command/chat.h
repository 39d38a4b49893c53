/* chat.h - `hcattn chat`: many turns in one session. */
#pragma once

int chat_command(int argc, char **argv); /* struct command, command.h */
