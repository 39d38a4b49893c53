/*
 * eval_speed.h - what a decode step takes on the real service, under the policies of an evaluation.
 *
 * A session takes the text but for its tail; a fork of it for each policy decodes some tokens of the tail, teacher-forced.
 */
#pragma once

#include "client/command/eval_rows.h"
#include "client/command/job.h"
#include "client/hcattn.h"

/*
 * Fills `speed` of the rows of a text whose preset is a policy. A policy for which it does not work (no memory ...) stays
 * without, which is told on stderr. Errors of the calls that all of them need.
 */
int eval_speed_measure(struct hcattn *client, const char *name, const struct hcattn_text *text, struct eval_rows *rows,
                       struct hcattn_error *ret_error);
