/* keys.h - `hcattn keys`: a pair of keys for coordinators and clients that talk over TCP. */
#pragma once

int keys_command(int argc, char **argv);
