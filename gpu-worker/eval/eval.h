/*
 * eval.h - the job behind `hcattn eval`: presets in lock-step with full attention, teacher-forced over the last tokens of texts.
 *
 * The text's pass under full attention is shared by all presets; then each preset computes the tail again with its own
 * attention. Distributions are compared position by position: KL divergence of full attention's to the preset's, in nats.
 *
 * Owner      job.h.
 */
#pragma once

#include "gpu-worker/eval/method.h"
#include "gpu-worker/job.h"

/* As hcattn.EvalRow. */
struct eval_row {
    uint32_t index;
    const char *text, *preset, *meaning;
    bool baseline;
    uint32_t context, tail, n_layers, n_kv_heads;
    double kld_mean, kld_p99, top1, perplexity, full_perplexity;
    double kept;
    const float *kept_by_head;                           /* [n_layers][n_kv_heads] */
    double device_bytes_fraction, device_bytes_measured; /* of f16 K and V of an old token */
    double exact_bytes, table_bytes, store_bytes;
    const struct method_attention *attention; /* [n_layers], means, output_error its root; NULL: nobody looked */
};

struct eval_request {
    uint32_t n_texts;
    struct job_text *texts;
    uint32_t context, tail; /* tokens, multiples of 64, 0 < tail < context */
    uint32_t n_presets;     /* what is named again counts once; "all": all presets and baselines */
    char **presets;
    bool attention;
};

/* Takes over what the request points to, also on failure. -EINVAL with a sentence (JOB_SENTENCE_SIZE); -ENOMEM. */
int eval_job_new(struct eval_request *request, struct job *ret_job, char *sentence);
