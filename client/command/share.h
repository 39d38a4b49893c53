/* share.h - files that are installed with the program: beside bin/ in share/ (a build tree) or share/hcattn/. */
#pragma once

#include <stddef.h>

/* -ENOENT, -ENAMETOOLONG. */
int share_find(const char *name, char *ret_path, size_t size);

/* Draws what is in a JSON file into a folder, by plot-eval. Exit status of the subcommand `name`, told; that no tool for it is
 * there is told and no failure. */
int share_plot(const char *name, const char *json_path, const char *folder);
