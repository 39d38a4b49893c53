/*
 * option_names.h - the names of the options of all programs, for `other_names` of an options table: one configuration file
 * and one environment serve them all, and a name that none of them has is a slip of the pen.
 */
#pragma once

extern const char *const option_names_all[]; /* closed by NULL; a test compares it with every program's --help */
