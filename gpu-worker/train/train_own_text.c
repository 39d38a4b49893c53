/*
 * train_own_text.c - the text that the worker brings along to learn from: share/texts, built in, so that a worker needs no
 * file for it and every worker of a version learns the same.
 */
#include "gpu-worker/train/train.h"

extern const char train_own_text_bytes[]; /* made at build time */

const char *train_own_text(void)
{
    return train_own_text_bytes;
}
