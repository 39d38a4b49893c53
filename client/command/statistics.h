/* statistics.h - `hcattn statistics`: gathers what the pair codecs need to know of a model. */
#pragma once
int statistics_command(int argc, char **argv);
