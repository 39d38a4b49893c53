/* policy.c - see policy.h. */
#include "proto/policy.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name, *meaning;
} presets[] = {
    {"default", "rot2,deviation=0.02"},
    {"quality", "rot4,deviation=0.01"},
    {"full", "every old token is read"},
};

static const struct {
    const char *name;
    enum policy_codec codec;
} codecs[] = {
    {"f16", POLICY_CODEC_F16},
    {"rot4", POLICY_CODEC_ROT4},
    {"rot3", POLICY_CODEC_ROT3},
    {"rot2", POLICY_CODEC_ROT2},
};

static bool is_word(const char *word, size_t n, const char *expected)
{
    return strlen(expected) == n && memcmp(word, expected, n) == 0;
}

static int read_codec(const char *word, size_t n, struct policy_terms *terms)
{
    for (size_t i = 0; i < sizeof(codecs) / sizeof(codecs[0]); i++)
        if (is_word(word, n, codecs[i].name)) {
            terms->codec = codecs[i].codec;
            return 0;
        }
    return -EINVAL;
}

/* SELECTOR=NUMBER; digits, a point, digits: the same in every locale and without strtod's other spellings. */
static int read_selector(const char *word, size_t n, struct policy_terms *terms)
{
    static const struct {
        const char *name;
        enum policy_selector selector;
        double most;
    } selectors[] = {{"mass=", POLICY_SELECTOR_MASS, 1}, {"deviation=", POLICY_SELECTOR_DEVIATION, 2}};
    for (size_t i = 0; i < sizeof(selectors) / sizeof(selectors[0]); i++) {
        size_t length = strlen(selectors[i].name);
        if (n <= length || memcmp(word, selectors[i].name, length) != 0)
            continue;
        double value = 0, unit = 1;
        bool point = false;
        for (size_t k = length; k < n; k++) {
            if (word[k] == '.' && !point) {
                point = true;
            } else if (word[k] >= '0' && word[k] <= '9' && n - length <= 12) {
                value = value * 10 + (word[k] - '0');
                unit *= point ? 10 : 1;
            } else {
                return -EINVAL;
            }
        }
        value /= unit;
        if (value > selectors[i].most || word[n - 1] == '.')
            return -ERANGE;
        terms->selector = selectors[i].selector;
        terms->parameter = (float)value;
        return 0;
    }
    return -EINVAL;
}

static int refuse(char *sentence, size_t size, const char *name, const char *word, size_t n)
{
    snprintf(sentence, size,
             "policy \"%.64s\": \"%.*s\" is not understood; there is: full, default, quality, or "
             "f16|rot4|rot3|rot2,mass=0..1|deviation=0..2[,weights][,notail]",
             name, n < 32 ? (int)n : 32, word);
    for (char *c = sentence; size > 0 && *c != '\0'; c++) /* what somebody typed stays one line */
        *c = *c < ' ' || *c > '~' ? '?' : *c;
    return -EINVAL;
}

int policy_parse(const char *name, struct policy_terms *ret_terms, char *sentence, size_t sentence_size)
{
    struct policy_terms terms = {.tail = true};
    if (strcmp(name, "full") == 0) {
        terms.tail = false;
        *ret_terms = terms;
        return 0;
    }
    const char *text = name;
    for (size_t i = 0; i < sizeof(presets) / sizeof(presets[0]); i++)
        if (strcmp(name, presets[i].name) == 0)
            text = presets[i].meaning;
    uint32_t n_words = 0;
    for (const char *word = text;; n_words++) {
        size_t n = strcspn(word, ",");
        int r;
        if (n_words == 0)
            r = read_codec(word, n, &terms);
        else if (n_words == 1)
            r = read_selector(word, n, &terms);
        else if (is_word(word, n, "weights") && !terms.weights)
            r = 0, terms.weights = true;
        else if (is_word(word, n, "notail") && terms.tail)
            r = 0, terms.tail = false;
        else
            r = -EINVAL;
        if (r < 0)
            return refuse(sentence, sentence_size, name, word, n);
        if (word[n] == 0)
            break;
        word += n + 1;
    }
    if (n_words == 0)
        return refuse(sentence, sentence_size, name, "", 0);
    *ret_terms = terms;
    return 0;
}

const char *policy_preset(uint32_t i, const char **ret_meaning)
{
    if (i >= sizeof(presets) / sizeof(presets[0]))
        return NULL;
    *ret_meaning = presets[i].meaning;
    return presets[i].name;
}
