/*
 * pretokenizer.c - one regular expression a family, matched from word to word.
 *
 * Threads    compiled patterns are read-only; what a match writes lies in the caller's scratch.
 * Invariant  every pattern matches at least one character of any text.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "gpu-worker/model/pretokenizer.h"

#include <errno.h>
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

/* White space of Unicode. PCRE2's \s takes U+180E too, which tokenizers do not. */
#define SPACES                                                                                                         \
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define SPACE   "[" SPACES "]"
#define LETTER  "\\p{L}"
#define NUMBER  "\\p{N}"
#define OTHER   "[^" SPACES LETTER NUMBER "]"
#define VISIBLE "[^" SPACES "]"

#define GPT2_SUFFIXES "'s|'t|'re|'ve|'m|'ll|'d"

#define GPT2 GPT2_SUFFIXES "| ?" LETTER "+| ?" NUMBER "+| ?" OTHER "+|" SPACE "+(?!" VISIBLE ")|" SPACE "+"

/* First every digit stands alone, then GPT-2's pattern between the digits, which therefore ends at a digit too. */
#define SMOLLM NUMBER "|" GPT2_SUFFIXES "| ?" LETTER "+| ?" OTHER "+|" SPACE "+(?![^" SPACES NUMBER "])|" SPACE "+"

/* `numbers`: how many digits make a word. */
#define LLAMA3(numbers)                                                                                                \
    "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"                                                            \
    "|[^\\r\\n" LETTER NUMBER "]?" LETTER "+|" NUMBER numbers "| ?" OTHER "+[\\r\\n]*|" SPACE "*[\\r\\n]+|" SPACE      \
    "+(?!" VISIBLE ")|" SPACE "+"

struct family {
    const char *name; /* of tokenizer.ggml.pre */
    const char *pattern;
    bool takes_whole_words;
    bool adds_bos;
};

static const struct family families[] = {
    {"smollm", SMOLLM, false, false},
    {"gpt-2", GPT2, false, false},
    {"llama-bpe", LLAMA3("{1,3}"), true, true},
    {"qwen2", LLAMA3(""), false, false},
    /* Other names of the same. */
    {"llama3", LLAMA3("{1,3}"), true, true},
    {"llama-v3", LLAMA3("{1,3}"), true, true},
    {"falcon3", LLAMA3("{1,3}"), true, true},
    {"pixtral", LLAMA3("{1,3}"), true, true},
    {"phi-2", GPT2, false, false},
    {"deepseek-r1-qwen", LLAMA3(""), false, false},
};

struct pretokenizer {
    const struct family *family;
    pcre2_code *code;
};

struct pretokenizer_scratch {
    pcre2_match_data *match;
};

const char *pretokenizer_supported(void)
{
    return "smollm, gpt-2, llama-bpe and qwen2";
}

int pretokenizer_new(struct gguf_string name, struct pretokenizer **ret_pretokenizer)
{
    const struct family *family = NULL;
    for (size_t i = 0; i < sizeof families / sizeof families[0]; i++)
        if (strlen(families[i].name) == name.n_bytes && memcmp(families[i].name, name.data, name.n_bytes) == 0)
            family = &families[i];
    if (!family)
        return -ENOTSUP;

    int code;
    PCRE2_SIZE offset;
    struct pretokenizer *pretokenizer = calloc(1, sizeof *pretokenizer);
    if (!pretokenizer)
        return -ENOMEM;
    pretokenizer->family = family;
    pretokenizer->code = pcre2_compile((PCRE2_SPTR)family->pattern, PCRE2_ZERO_TERMINATED,
                                       PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &code, &offset, NULL);
    if (!pretokenizer->code) {
        pretokenizer_free(pretokenizer);
        return -ENOMEM; /* the patterns are ours and compile */
    }
    pcre2_jit_compile(pretokenizer->code, PCRE2_JIT_COMPLETE); /* without it matching is slower, not different */
    *ret_pretokenizer = pretokenizer;
    return 0;
}

struct pretokenizer *pretokenizer_free(struct pretokenizer *pretokenizer)
{
    if (!pretokenizer)
        return NULL;
    pcre2_code_free(pretokenizer->code);
    free(pretokenizer);
    return NULL;
}

bool pretokenizer_takes_whole_words(const struct pretokenizer *pretokenizer)
{
    return pretokenizer->family->takes_whole_words;
}

bool pretokenizer_adds_bos(const struct pretokenizer *pretokenizer)
{
    return pretokenizer->family->adds_bos;
}

struct pretokenizer_scratch *pretokenizer_scratch_new(const struct pretokenizer *pretokenizer)
{
    struct pretokenizer_scratch *scratch = calloc(1, sizeof *scratch);
    if (!scratch)
        return NULL;
    scratch->match = pcre2_match_data_create_from_pattern(pretokenizer->code, NULL);
    return scratch->match ? scratch : pretokenizer_scratch_free(scratch);
}

struct pretokenizer_scratch *pretokenizer_scratch_free(struct pretokenizer_scratch *scratch)
{
    if (!scratch)
        return NULL;
    pcre2_match_data_free(scratch->match);
    free(scratch);
    return NULL;
}

size_t pretokenizer_next(const struct pretokenizer *pretokenizer, struct pretokenizer_scratch *scratch,
                         const char *text, size_t n_bytes, size_t offset)
{
    int r =
        pcre2_match(pretokenizer->code, (PCRE2_SPTR)text, n_bytes, offset, PCRE2_NO_UTF_CHECK, scratch->match, NULL);
    if (r > 0) {
        size_t end = pcre2_get_ovector_pointer(scratch->match)[1];
        if (end > offset)
            return end - offset;
    }
    /* Not reached by our patterns; one character keeps the promise to move on. */
    size_t n = 1;
    while (offset + n < n_bytes && ((unsigned char)text[offset + n] & 0xc0) == 0x80)
        n++;
    return n;
}
