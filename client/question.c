/* question.c - see question.h. */
#include "client/question.h"

struct asking {
    struct question *question;
    Hcattn__Reply *reply;
    const struct call *call; /* the caller's: its on_stats has a context of its own */
};

static enum call_step keep_answer(void *context, Hcattn__Reply *reply)
{
    struct asking *asking = context;
    if (reply->reply_case != asking->question->wanted)
        return CALL_MALFORMED;
    asking->reply = reply;
    return CALL_KEPT;
}

static bool note_again(void *context, bool lost)
{
    struct asking *asking = context;
    (void)lost;
    asking->question->again = true;
    return true;
}

static bool pass_stats(void *context, const Hcattn__StatsReply *stats)
{
    const struct asking *asking = context;
    return asking->call->on_stats(asking->call->context, stats);
}

Hcattn__Reply *question_ask(struct hcattn *client, struct call *call, struct question *question, int *ret_result,
                            struct hcattn_error *ret_error)
{
    struct asking asking = {.question = question, .call = call};
    struct call asked = {.request = call->request,
                         .on_reply = keep_answer,
                         .prepare_again = note_again,
                         .on_stats = call->on_stats ? pass_stats : NULL,
                         .context = &asking,
                         .timeout_ms = call->timeout_ms};
    *ret_result = call_run(client, &asked, ret_error);
    call->host = asked.host;
    return asking.reply;
}
