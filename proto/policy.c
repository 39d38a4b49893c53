/* policy.c - see policy.h. */
#include "proto/policy.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "proto/layout.h"

static const struct {
    const char *name, *meaning;
} presets[] = {
    {"default", "klt1,l2=0.0006"},
    {"quality", "rot4,deviation=0.01"},
    {"small", "klt0,l2=0.0008"},
    {"tiny", "klt0,l2=0.00125"},
    {"hcattention-25", "pq2/4096,mass=0.9,weights,notail"},
    {"hcattention-12.5", "pq4/4096,mass=0.9,weights,notail"},
    {"full", "every old token is read"},
};
enum { N_PRESETS = sizeof(presets) / sizeof(presets[0]) };

static const struct {
    const char *name;
    enum policy_codec codec;
} codecs[] = {
    {"f16", POLICY_CODEC_F16},     {"rot4", POLICY_CODEC_ROT4},   {"rot3", POLICY_CODEC_ROT3},
    {"rot2", POLICY_CODEC_ROT2},   {"pair3", POLICY_CODEC_PAIR3}, {"pair2", POLICY_CODEC_PAIR2},
    {"pair1", POLICY_CODEC_PAIR1}, {"klt2", POLICY_CODEC_KLT2},   {"klt1", POLICY_CODEC_KLT1},
    {"klt0", POLICY_CODEC_KLT0},
};
#define CODECS    "f16|rot4|rot3|rot2|pair3|pair2|pair1|klt2|klt1|klt0|pqD/C"
#define SELECTORS "deviation=0..2|mass=0..1|l2=0..2"
#define PQ_LEAST  256u
#define PQ_MOST   4096u

/* ---- words ---- */

struct word { /* between commas */
    const char *text;
    size_t n;
};

struct words { /* of a name, one after the other */
    const char *name, *next;
    char *sentence;
    size_t sentence_size;
};

static bool next_word(struct words *words, struct word *ret_word)
{
    if (!words->next)
        return false;
    size_t n = strcspn(words->next, ",");
    *ret_word = (struct word){words->next, n};
    words->next = words->next[n] == ',' ? words->next + n + 1 : NULL;
    return true;
}

static bool is(struct word word, const char *expected)
{
    return strlen(expected) == word.n && memcmp(word.text, expected, word.n) == 0;
}

static bool starts(struct word word, const char *prefix)
{
    return word.n >= strlen(prefix) && memcmp(word.text, prefix, strlen(prefix)) == 0;
}

static int refuse(const struct words *words, const char *format, ...) __attribute__((format(printf, 2, 3)));
static int refuse(const struct words *words, const char *format, ...)
{
    char *sentence = words->sentence;
    size_t size = words->sentence_size;
    bool cut = strlen(words->name) >= LAYOUT_POLICY_BYTES;
    int n = snprintf(sentence, size, "policy \"%.*s%s\": ", cut ? 32 : (int)LAYOUT_POLICY_BYTES, words->name,
                     cut ? "..." : "");
    va_list arguments;
    va_start(arguments, format);
    if (n > 0 && (size_t)n < size)
        vsnprintf(sentence + n, size - (size_t)n, format, arguments);
    va_end(arguments);
    for (char *c = sentence; size > 0 && *c != '\0'; c++) /* what somebody typed stays one line */
        *c = *c < ' ' || *c > '~' ? '?' : *c;
    return -EINVAL;
}
#define SHOWN(word) (int)(word).n, (word).text /* for %.*s */

/* What stands from `from` on: digits, a point, digits: the same in every locale and without strtod's other spellings. */
static bool read_number(struct word word, size_t from, double *ret_value)
{
    double value = 0, unit = 1;
    bool point = false;
    if (from >= word.n || word.n - from > 12 || word.text[word.n - 1] == '.')
        return false;
    for (size_t k = from; k < word.n; k++) {
        char c = word.text[k];
        if (c == '.' && !point) {
            point = true;
        } else if (c >= '0' && c <= '9') {
            value = value * 10 + (c - '0');
            unit *= point ? 10 : 1;
        } else {
            return false;
        }
    }
    *ret_value = value / unit;
    return true;
}

/* ---- codec ---- */

/* pqD or pqD/C */
static int read_pq(const struct words *words, struct word word, struct policy_terms *terms)
{
    uint32_t n_dims = word.n > 2 ? (uint32_t)(word.text[2] - '0') : 0, n_centroids = 0;
    bool good = n_dims == 2 || n_dims == 4 || n_dims == 8;
    if (word.n == 3)
        n_centroids = PQ_MOST;
    else if (word.n < 7 || word.n > 8 || word.text[3] != '/' || word.text[4] == '0')
        good = false;
    for (size_t k = 4; good && k < word.n; k++) {
        good = word.text[k] >= '0' && word.text[k] <= '9';
        n_centroids = n_centroids * 10 + (uint32_t)(word.text[k] - '0');
    }
    if (!good || n_centroids < PQ_LEAST || n_centroids > PQ_MOST || (n_centroids & (n_centroids - 1)) != 0)
        return refuse(words,
                      "\"%.*s\": pqD/C has sub-spaces of D = 2, 4 or 8 dimensions and C = %u..%u centroids, a power of "
                      "two",
                      SHOWN(word), PQ_LEAST, PQ_MOST);
    terms->codec = POLICY_CODEC_PQ;
    terms->n_dims = n_dims;
    terms->n_centroids = n_centroids;
    return 0;
}

static int read_codec(const struct words *words, struct word word, struct policy_terms *terms)
{
    char names[128] = "";
    if (starts(word, "pq"))
        return read_pq(words, word, terms);
    for (size_t i = 0; i < sizeof(codecs) / sizeof(codecs[0]); i++)
        if (is(word, codecs[i].name)) {
            terms->codec = codecs[i].codec;
            return 0;
        }
    for (size_t i = 0, n = 0; i < N_PRESETS && n < sizeof(names); i++)
        n += (size_t)snprintf(names + n, sizeof(names) - n, "%s, ", presets[i].name);
    return refuse(
        words, "\"%.*s\" is not understood; there is: %sor " CODECS "," SELECTORS "[,weights][,notail][,fastgen=0..1]",
        SHOWN(word), names);
}

/* ---- selector and options ---- */

/* SELECTOR=NUMBER */
static int read_selector(const struct words *words, struct word word, struct policy_terms *terms)
{
    static const struct {
        const char *name;
        enum policy_selector selector;
        int most;
    } selectors[] = {{"mass=", POLICY_SELECTOR_MASS, 1},
                     {"deviation=", POLICY_SELECTOR_DEVIATION, 2},
                     {"l2=", POLICY_SELECTOR_L2, 2}};
    for (size_t i = 0; i < sizeof(selectors) / sizeof(selectors[0]); i++) {
        double value;
        if (!starts(word, selectors[i].name))
            continue;
        if (!read_number(word, strlen(selectors[i].name), &value) || value > selectors[i].most)
            return refuse(words, "\"%.*s\": the number is 0..%d, of at most 12 characters", SHOWN(word),
                          selectors[i].most);
        terms->selector = selectors[i].selector;
        terms->parameter = (float)value;
        return 0;
    }
    return refuse(words, "\"%.*s\" is no selector; there is: " SELECTORS, SHOWN(word));
}

static int read_fastgen(const struct words *words, struct word word, struct policy_terms *terms)
{
    double value;
    if (!read_number(word, strlen("fastgen="), &value) || value <= 0 || value > 1)
        return refuse(words, "\"%.*s\": the recovery is a number above 0, at most 1, of at most 12 characters",
                      SHOWN(word));
    terms->fastgen = (float)value;
    return 0;
}

/* weights, notail, fastgen=RECOVERY, each once, in any order */
static int read_options(struct words *words, struct policy_terms *terms)
{
    bool weights = false, notail = false, fastgen = false;
    for (struct word word; next_word(words, &word);) {
        bool *said;
        if (is(word, "weights"))
            said = &weights;
        else if (is(word, "notail"))
            said = &notail;
        else if (starts(word, "fastgen="))
            said = &fastgen;
        else
            return refuse(words,
                          "\"%.*s\" is not understood; behind the selector there is: weights, notail, "
                          "fastgen=0..1",
                          SHOWN(word));
        if (*said)
            return refuse(words, "\"%.*s\": that is said twice", SHOWN(word));
        *said = true;
        if (said == &fastgen) {
            int result = read_fastgen(words, word, terms);
            if (result != 0)
                return result;
        }
    }
    terms->weights = weights;
    terms->tail = !notail;
    return 0;
}

/* CODEC,SELECTOR=NUMBER and options; `first` is the codec. */
static int read_form(struct words *words, struct word first, struct policy_terms *terms)
{
    struct word word;
    int result = read_codec(words, first, terms);
    if (result == 0)
        result = next_word(words, &word)
                     ? read_selector(words, word, terms)
                     : refuse(words, "a selector is missing behind \"%.*s\"; there is: " SELECTORS, SHOWN(first));
    return result == 0 ? read_options(words, terms) : result;
}

/* What may stand behind a preset: a recovery, instead of the one that the preset has. */
static int read_after_preset(struct words *words, struct policy_terms *terms)
{
    struct word word, more;
    if (!next_word(words, &word))
        return 0;
    if (terms->selector == POLICY_SELECTOR_FULL)
        return refuse(words, "full reads every old token: nothing can be said behind it");
    if (!starts(word, "fastgen="))
        return refuse(words, "\"%.*s\": behind a preset there is only fastgen=0..1", SHOWN(word));
    if (next_word(words, &more))
        return refuse(words, "\"%.*s\": nothing can be said behind fastgen of a preset", SHOWN(more));
    return read_fastgen(words, word, terms);
}

int policy_parse(const char *name, struct policy_terms *ret_terms, char *sentence, size_t sentence_size)
{
    struct words words = {name, name, sentence, sentence_size};
    struct policy_terms terms = {.codec = POLICY_CODEC_NONE};
    struct word first;
    size_t n_bytes = strlen(name), preset = 0;
    if (n_bytes >= LAYOUT_POLICY_BYTES)
        return refuse(&words, "a name of %zu bytes; at most %u", n_bytes, LAYOUT_POLICY_BYTES - 1);
    (void)next_word(&words, &first);
    while (preset < N_PRESETS && !is(first, presets[preset].name))
        preset++;
    int result;
    if (preset == N_PRESETS) {
        result = read_form(&words, first, &terms);
    } else {
        if (!is(first, "full")) {
            struct words meaning = {name, presets[preset].meaning, sentence, sentence_size};
            (void)next_word(&meaning, &first);
            result = read_form(&meaning, first, &terms);
            assert(result == 0);
        }
        result = read_after_preset(&words, &terms);
    }
    if (result == 0)
        *ret_terms = terms;
    return result;
}

const char *policy_preset(uint32_t i, const char **ret_meaning)
{
    if (i >= N_PRESETS)
        return NULL;
    *ret_meaning = presets[i].meaning;
    return presets[i].name;
}
