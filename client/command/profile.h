/* profile.h - `hcattn profile`: which heads need which tokens, by FastGen's classes. */
#pragma once
int profile_command(int argc, char **argv);
