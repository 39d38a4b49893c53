/*
 * stream.h - Append, Generate and Score: many replies made one uninterrupted stream. Internal to libhcattn; the contracts
 * are those of hcattn_append(), hcattn_generate() and hcattn_score().
 *
 * Invariant  the caller sees token i once and after token i - 1, and text once, whatever is sent twice or again.
 *            A Generated whose tokens are all known is dropped with its text: the text of tokens [0, n) does not depend on how
 *            they were sent. One that overlaps, or leaves a gap, makes the request be sent again from where we are.
 */
#pragma once

#include "client/hcattn.h"

int stream_append(struct hcattn *client, uint64_t session, const struct hcattn_input *input, uint64_t at,
                  const struct hcattn_events *events, uint32_t timeout_ms, struct hcattn_appended *ret_appended,
                  struct hcattn_error *ret_error);
int stream_generate(struct hcattn *client, const struct hcattn_generate *generate, const struct hcattn_events *events,
                    uint32_t timeout_ms, struct hcattn_finished *ret_finished, struct hcattn_error *ret_error);
int stream_score(struct hcattn *client, const struct hcattn_score *score, const struct hcattn_events *events,
                 uint32_t timeout_ms, struct hcattn_score_done *ret_done, struct hcattn_error *ret_error);
