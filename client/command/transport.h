/* transport.h - `hcattn transport`: how requests travel to the stores. */
#pragma once

int transport_command(int argc, char **argv); /* struct command, command.h */
