/* table.c - the subcommands of `hcattn`, in the order of its help. */
#include "client/command/chat.h"
#include "client/command/table.h"
#include "client/command/codebook.h"
#include "client/command/down.h"
#include "client/command/drain.h"
#include "client/command/eval.h"
#include "client/command/fork.h"
#include "client/command/generate.h"
#include "client/command/keys.h"
#include "client/command/policy.h"
#include "client/command/profile.h"
#include "client/command/run.h"
#include "client/command/score.h"
#include "client/command/sessions.h"
#include "client/command/statistics.h"
#include "client/command/status.h"
#include "client/command/tokenize.h"
#include "client/command/transport.h"
#include "client/command/up.h"

const struct command table_commands[] = {
    {"up", "start the whole service on this machine", up_command},
    {"down", "stop it", down_command},
    {"status", "show its processes and sessions", status_command},
    {"sessions", "show the sessions, or one of them in detail", sessions_command},
    {"generate", "complete a prompt", generate_command},
    {"chat", "talk to the model", chat_command},
    {"tokenize", "text to token ids, and back", tokenize_command},
    {"score", "log-probabilities of a text", score_command},
    {"fork", "open a session that begins like another", fork_command},
    {"policy", "set the policy of new sessions", policy_command},
    {"eval", "compare settings with full attention", eval_command},
    {"profile", "show which heads need which tokens", profile_command},
    {"statistics", "gather what pair keys need", statistics_command},
    {"codebook", "train what pq keys need", codebook_command},
    {"transport", "set how requests travel to the stores", transport_command},
    {"drain", "finish what runs and take nothing new", drain_command},
    {"keys", "make keys for talking over TCP", keys_command},
    {"run", "run one process and restart it when it dies", run_command},
    {.name = NULL},
};
