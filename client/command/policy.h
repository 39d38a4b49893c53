/* policy.h - `hcattn policy`: the policy of sessions. */
#pragma once

int policy_command(int argc, char **argv); /* struct command, command.h */
