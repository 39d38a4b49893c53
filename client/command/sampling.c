/* sampling.c - see sampling.h. */
#include "client/command/sampling.h"

struct hcattn_sampling sampling_from(const struct options *options)
{
    return (struct hcattn_sampling){
        .temperature = (float)options_float(options, "temperature"),
        .top_k = options_u32(options, "top-k"),
        .top_p = (float)options_float(options, "top-p"),
        .min_p = (float)options_float(options, "min-p"),
        .repeat_penalty = (float)options_float(options, "repeat-penalty"),
        .presence_penalty = (float)options_float(options, "presence-penalty"),
        .frequency_penalty = (float)options_float(options, "frequency-penalty"),
        .seed = options_u64(options, "seed"),
    };
}
