/* score.c - see score.h. */
#include "client/command/score.h"
#include "client/command/answer.h"
#include "client/command/command.h"
#include "client/command/opening.h"
#include "client/command/output.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#define NAME     "hcattn score"
#define CLOSE_MS 5000u

static const struct option_spec specs[] = {
    {.name = "from",
     .kind = OPTION_U64,
     .default_text = "1",
     .minimum = 1,
     .maximum = 9e15,
     .metavar = "N",
     .help = "score positions from N on (0 is the first token, which nothing predicts); earlier ones are prefilled"},
    {.name = "json", .kind = OPTION_FLAG, .help = "one JSON object"},
    {.name = "parse-special", .kind = OPTION_FLAG, .help = "special tokens written in the text are tokens"},
    {.name = "bos",
     .kind = OPTION_FLAG,
     .default_text = "yes",
     .help = "start with the begin-of-sequence token if the model asks for it"},
    OPENING_OPTIONS,
    COMMAND_CLIENT_OPTIONS,
};

static const struct options_table table = {
    .program = NAME,
    .usage = "FILE|-",
    .summary =
        "Log-probability of each token of a text given all before it, computed as decode steps; their sum and the "
        "perplexity.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .other_names = option_names_all,
    .max_positional = 1,
};

struct score {
    bool json;
    json_t *tokens;
    json_t *logprobs;
    uint64_t first;
    uint64_t n;
    double sum;
};

static int on_accepted(void *context, const struct hcattn_accepted *accepted)
{
    struct score *score = context;
    for (size_t i = 0; i < accepted->n_prompt_ids; i++)
        json_array_append_new(score->tokens, json_integer(accepted->prompt_ids[i]));
    return 0;
}

static int on_progress(void *context, uint64_t n_done, uint64_t n_total)
{
    (void)context;
    if (output_is_terminal())
        output_progress(false, "prefill: %llu of %llu tokens", (unsigned long long)n_done, (unsigned long long)n_total);
    return 0;
}

static int on_scored(void *context, const struct hcattn_scored *scored)
{
    struct score *score = context;
    output_progress(false, "%s", "");
    if (score->n == 0)
        score->first = scored->first;
    for (size_t i = 0; i < scored->n_scores; i++) {
        double logprob = (double)scored->scores[i].logprob;
        score->sum += logprob;
        score->n++;
        if (score->json) {
            json_array_append_new(score->logprobs, answer_logprob(scored->scores[i].logprob));
            continue;
        }
        uint64_t position = scored->first + i;
        json_int_t id =
            json_integer_value(json_array_get(score->tokens, (size_t)position)); /* the session began empty */
        output_format("%8llu %7lld %10.5f\n", (unsigned long long)position, (long long)id, logprob);
    }
    return output_flush();
}

static void show(const struct score *score, const struct hcattn_score_done *done)
{
    double perplexity = score->n ? exp(-score->sum / (double)score->n) : NAN;
    if (!score->json) {
        output_format("tokens %llu  scored %llu  sum %.5f  perplexity %.5f\n",
                      (unsigned long long)json_array_size(score->tokens), (unsigned long long)score->n, score->sum,
                      perplexity);
        return;
    }
    json_t *json = json_object();
    json_object_set(json, "tokens", score->tokens);
    json_object_set_new(json, "first", json_integer((json_int_t)score->first));
    json_object_set(json, "logprobs", score->logprobs);
    json_object_set_new(json, "sum", isfinite(score->sum) ? json_real(score->sum) : json_null());
    json_object_set_new(json, "perplexity", isfinite(perplexity) ? json_real(perplexity) : json_null());
    json_object_set_new(json, "timings", answer_timings(&done->timings));
    output_json(json);
}

static int measure(struct hcattn *client, const struct options *options, const char *text)
{
    struct hcattn_session_config config;
    struct hcattn_session session;
    struct hcattn_error error;
    char policy[HCATTN_POLICY_SIZE];
    int result = opening_config(options, client, policy, &config, &error);
    config.ephemeral = true;
    if (!result)
        result = hcattn_open_session(client, &config, 0, &session, &error);
    if (result < 0)
        return command_call_failed(NAME, result, &error);
    struct score score = {.json = options_flag(options, "json"), .tokens = json_array(), .logprobs = json_array()};
    struct hcattn_events events = {
        .context = &score, .accepted = on_accepted, .progress = on_progress, .scored = on_scored};
    struct hcattn_score request = {
        .session = session.session,
        .at = 0,
        .from = options_u64(options, "from"),
        .input = {.text = text,
                  .parse_special = options_flag(options, "parse-special"),
                  .no_bos = !options_flag(options, "bos")},
    };
    struct hcattn_score_done done;
    result = hcattn_score(client, &request, &events, 0, &done, &error);
    output_progress(false, "%s", "");
    int status = 0;
    if (result < 0)
        status = command_call_failed(NAME, result, &error);
    else
        show(&score, &done);
    json_decref(score.tokens);
    json_decref(score.logprobs);
    output_flush();
    hcattn_close_session(client, session.session, CLOSE_MS, NULL, &error);
    return status ? status : output_status();
}

int score_command(int argc, char **argv)
{
    int status = 0;
    struct options *options = command_options(&table, argc, argv, &status);
    if (!options)
        return status;
    char *text = NULL;
    if (options_n_positional(options) != 1)
        status = command_fail(COMMAND_USAGE, NAME, "a file is needed ('-' for standard input)");
    else
        text = command_text(NAME, options_positional(options, 0), true, &status);
    if (text) {
        struct hcattn *client = command_connect(NAME, options, &status);
        if (client)
            status = measure(client, options, text);
        command_disconnect(client);
    }
    free(text);
    options_free(options);
    return status;
}
