#include "gpu-worker/text_stream.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/model/utf8_stream.h"

struct text_stream {
    const struct tokenizer *tokenizer;
    const char *const *stop;
    uint32_t n_stop;
    struct utf8_stream utf8;
    char *held; /* whole characters that may begin a stop string */
    size_t n_held, capacity;
};

int text_stream_new(const struct tokenizer *tokenizer, const char *const *stop, uint32_t n_stop,
                    struct text_stream **ret_stream)
{
    struct text_stream *stream = calloc(1, sizeof(*stream));
    if (stream == NULL)
        return -ENOMEM;
    stream->tokenizer = tokenizer;
    stream->stop = stop;
    stream->n_stop = n_stop;
    *ret_stream = stream;
    return 0;
}

struct text_stream *text_stream_free(struct text_stream *stream)
{
    if (stream == NULL)
        return NULL;
    free(stream->held);
    free(stream);
    return NULL;
}

static int make_room(struct text_stream *stream, size_t n_bytes)
{
    if (stream->n_held + n_bytes <= stream->capacity)
        return 0;
    size_t capacity = (stream->n_held + n_bytes) * 2;
    char *held = realloc(stream->held, capacity);
    if (held == NULL)
        return -ENOMEM;
    stream->held = held;
    stream->capacity = capacity;
    return 0;
}

/* Where the earliest complete stop string begins; n_held: there is none. */
static size_t find_stop(const struct text_stream *stream)
{
    size_t first = stream->n_held;
    for (uint32_t i = 0; i < stream->n_stop; i++) {
        size_t n = strlen(stream->stop[i]);
        const char *at = n == 0 ? NULL : memmem(stream->held, stream->n_held, stream->stop[i], n);
        if (at != NULL && (size_t)(at - stream->held) < first)
            first = (size_t)(at - stream->held);
    }
    return first;
}

/* How many bytes at the end could be the beginning of a stop string. */
static size_t n_possible(const struct text_stream *stream)
{
    size_t most = 0;
    for (uint32_t i = 0; i < stream->n_stop; i++) {
        size_t n = strlen(stream->stop[i]);
        for (size_t k = n > stream->n_held ? stream->n_held : (n == 0 ? 0 : n - 1); k > most; k--)
            if (k < n && memcmp(stream->held + stream->n_held - k, stream->stop[i], k) == 0) {
                most = k;
                break;
            }
    }
    return most;
}

/* The first n_bytes held become the caller's. */
static int give(struct text_stream *stream, size_t n_bytes, char **ret_text)
{
    char *text = malloc(n_bytes + 1);
    if (text == NULL)
        return -ENOMEM;
    if (n_bytes > 0)
        memcpy(text, stream->held, n_bytes);
    text[n_bytes] = '\0';
    stream->n_held -= n_bytes;
    if (stream->n_held > 0)
        memmove(stream->held, stream->held + n_bytes, stream->n_held);
    *ret_text = text;
    return 0;
}

int text_stream_feed(struct text_stream *stream, uint32_t id, char **ret_text, bool *ret_stopped)
{
    const char *bytes;
    size_t n_bytes;
    int r = tokenizer_piece(stream->tokenizer, id, 0, &bytes, &n_bytes);
    if (r < 0)
        return r;
    r = make_room(stream, UTF8_STREAM_ROOM(n_bytes));
    if (r < 0)
        return r;
    stream->n_held += utf8_stream_add(&stream->utf8, bytes, n_bytes, stream->held + stream->n_held);
    size_t stop = find_stop(stream);
    bool stopped = stop < stream->n_held;
    r = give(stream, stopped ? stop : stream->n_held - n_possible(stream), ret_text);
    if (r == 0)
        *ret_stopped = stopped;
    return r;
}

int text_stream_flush(struct text_stream *stream, char **ret_text)
{
    int r = make_room(stream, UTF8_STREAM_ROOM(0));
    if (r < 0)
        return r;
    stream->n_held += utf8_stream_flush(&stream->utf8, stream->held + stream->n_held);
    return give(stream, stream->n_held, ret_text);
}
