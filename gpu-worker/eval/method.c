/* method.c - finding what a name stands for: a service's policy, or a baseline. See method.h. */
#include "gpu-worker/eval/method.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/network.h"

/* Names come from outside; in a sentence they stay one printable line. */
static void make_printable(char *text)
{
    for (; *text != '\0'; text++)
        *text = *text < ' ' || *text > '~' ? '?' : *text;
}

static int find(struct method *method, const struct job_tools *tools, uint32_t n_tokens, char *sentence,
                size_t sentence_size)
{
    int error = method_policy_new(method, tools, n_tokens, sentence, sentence_size);
    if (error != -EINVAL)
        return error;
    char of_baseline[JOB_SENTENCE_SIZE] = "";
    error = methods_baseline_new(method, tools, n_tokens, of_baseline, sizeof of_baseline);
    if (error == -ESRCH) { /* what the policy says is wrong with the name stands */
        size_t n = strlen(sentence);
        if (methods_baseline_name(0) != NULL && n + 1 < sentence_size)
            snprintf(sentence + n, sentence_size - n, "; nor is it a baseline such as %s", methods_baseline_name(0));
        return -EINVAL;
    }
    if (error != 0)
        snprintf(sentence, sentence_size, "%s", of_baseline);
    return error;
}

int method_new(const char *name, const struct job_tools *tools, uint32_t n_tokens, struct method **ret_method,
               char *sentence, size_t sentence_size)
{
    const struct model_shape *shape = &tools->network->shape;
    struct method *method = calloc(1, sizeof *method);
    int error = -ENOMEM;
    if (method == NULL)
        return error;
    method->n_kept = calloc((size_t)shape->n_layers * shape->n_kv_heads, sizeof *method->n_kept);
    method->attention = calloc(shape->n_layers, sizeof *method->attention);
    if (strlen(name) >= sizeof method->name) {
        snprintf(sentence, sentence_size, "\"%.64s...\" is too long for the name of a preset", name);
        make_printable(sentence);
        error = -EINVAL;
    } else if (method->n_kept != NULL && method->attention != NULL) {
        snprintf(method->name, sizeof method->name, "%s", name);
        snprintf(method->meaning, sizeof method->meaning, "%s", name);
        error = find(method, tools, n_tokens, sentence, sentence_size);
    }
    if (error != 0) {
        method_free(method);
        return error;
    }
    *ret_method = method;
    return 0;
}

struct method *method_free(struct method *method)
{
    if (method == NULL)
        return NULL;
    if (method->ops != NULL)
        method->ops->free(method);
    free(method->n_kept);
    free(method->attention);
    free(method);
    return NULL;
}
