/* eval.h - `hcattn eval`: what each setting costs and saves, on the user's own model and text. */
#pragma once
int eval_command(int argc, char **argv);
