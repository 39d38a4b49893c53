#include "gpu-worker/job.h"

#include <stdlib.h>

void job_texts_free(struct job_text *texts, uint32_t n_texts)
{
    for (uint32_t i = 0; texts != NULL && i < n_texts; i++) {
        free(texts[i].name);
        free(texts[i].text);
    }
    free(texts);
}
