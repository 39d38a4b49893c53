/* test_fastgen.c - profiles against what the definition says, row by row and in doubles. */
#include "tests/unit/model/tiny_tokenizer.h"

#include "gpu-worker/fastgen/fastgen.h"
#include "gpu-worker/fastgen/fastgen_kinds.h"
#include "gpu-worker/policy/exact_set.h"

enum { MAX_TOKENS = 1000, BLOCK = 64, WORD = 'a', MARK = ',' };

/* Byte-level pieces as the vocabulary spells them: " ,", "...", em dash, ideographic space, "e" with an accent, euro sign, "-x". */
static const char words[] = "--word Ġ, --word ... --word âĢĶ --word ãĢĢ --word Ã© --word âĤ¬ --word=-x";

static struct tiny_tokenizer tiny;
static uint32_t special_id;

static int set_up(void **state)
{
    (void)state;
    tiny = tiny_tokenizer(words);
    special_id = tokenizer_eos(tiny.tokenizer);
    assert_true(tokenizer_is_special(tiny.tokenizer, special_id));
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    tiny_tokenizer_free(&tiny);
    return 0;
}

/* ---- kinds ---- */

static enum fastgen_kind kind_of(const uint8_t *kinds, const char *piece)
{
    for (uint32_t id = 0; id < tokenizer_n_vocab(tiny.tokenizer); id++) {
        const char *bytes;
        size_t n;
        assert_int_equal(tokenizer_piece(tiny.tokenizer, id, TOKENIZER_SHOW_SPECIAL, &bytes, &n), 0);
        if (n == strlen(piece) && memcmp(bytes, piece, n) == 0)
            return (enum fastgen_kind)kinds[id];
    }
    fail_msg("no token \"%s\"", piece);
    return FASTGEN_KIND_WORD;
}

static void test_kinds(void **state)
{
    (void)state;
    static const struct {
        const char *piece;
        enum fastgen_kind kind;
    } cases[] = {
        {",", FASTGEN_KIND_PUNCTUATION},
        {"$", FASTGEN_KIND_PUNCTUATION}, /* a symbol to Unicode */
        {"~", FASTGEN_KIND_PUNCTUATION},
        {"\n", FASTGEN_KIND_PUNCTUATION},
        {" ", FASTGEN_KIND_PUNCTUATION},
        {" ,", FASTGEN_KIND_PUNCTUATION},
        {"...", FASTGEN_KIND_PUNCTUATION},
        {"\xe2\x80\x94", FASTGEN_KIND_PUNCTUATION}, /* em dash */
        {"\xe3\x80\x80", FASTGEN_KIND_PUNCTUATION}, /* ideographic space */
        {"\xe2", FASTGEN_KIND_WORD},                /* a third of either */
        {"\xc3\xa9", FASTGEN_KIND_WORD},
        {"\xe2\x82\xac", FASTGEN_KIND_WORD}, /* a symbol, not ASCII */
        {"-x", FASTGEN_KIND_WORD},
        {"a", FASTGEN_KIND_WORD},
        {"7", FASTGEN_KIND_WORD},
        {"\x1b", FASTGEN_KIND_WORD},
        {"\x7f", FASTGEN_KIND_WORD},
        {"<|im_end|>", FASTGEN_KIND_SPECIAL},
    };
    uint8_t *kinds = NULL;
    assert_int_equal(fastgen_kinds(tiny.tokenizer, &kinds), 0);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        if (kind_of(kinds, cases[i].piece) != cases[i].kind)
            fail_msg("\"%s\" is of kind %d", cases[i].piece, kind_of(kinds, cases[i].piece));
    free(kinds);
}

/* ---- which rows ---- */

static void test_sample(void **state)
{
    (void)state;
    for (uint32_t n = 1; n < 9000; n += 1 + n / 100) {
        uint32_t positions[FASTGEN_MAX_ROWS], count = fastgen_sample(n, positions);
        assert_true(count >= 1 && count <= FASTGEN_MAX_ROWS);
        assert_int_equal(positions[count - 1], n - 1);
        assert_true(positions[0] >= n / 2);
        for (uint32_t i = 1; i < count; i++) {
            uint32_t gap = positions[i] - positions[i - 1], even = (n - n / 2) / count;
            assert_true(positions[i] > positions[i - 1] && gap >= even && gap <= even + 1);
        }
        if (n >= 2048)
            assert_true(count * 256 <= n);
        if (n >= 16)
            assert_true(count >= FASTGEN_MIN_ROWS);
    }
    uint32_t positions[FASTGEN_MAX_ROWS];
    assert_int_equal(fastgen_sample(4096, positions), 16);
    assert_int_equal(fastgen_sample(8192, positions), FASTGEN_MAX_ROWS);
}

struct journal {
    uint64_t bits[64];
};

static uint64_t decoded_bits(void *context, uint32_t block)
{
    return ((struct journal *)context)->bits[block];
}

/* Runs of prefilled and decoded tokens in turn; ends with a 0. */
static void check_point(const uint32_t *runs, uint32_t expected)
{
    struct journal journal = {0};
    uint32_t n = 0, naive = 0;
    for (uint32_t i = 0; runs[i] != 0; i++) {
        for (uint32_t k = 0; k < runs[i]; k++, n++)
            journal.bits[n / BLOCK] |= (uint64_t)(i % 2) << n % BLOCK;
        if (i % 2 == 0 && (naive == 0 || runs[i] >= FASTGEN_MIN_APPEND))
            naive = n;
    }
    assert_int_equal(naive, expected);
    assert_int_equal(fastgen_profile_point(decoded_bits, &journal, n), expected);
}

static void test_point(void **state)
{
    (void)state;
    struct journal none = {.bits = {~(uint64_t)0, ~(uint64_t)0}};
    assert_int_equal(fastgen_profile_point(decoded_bits, &none, 0), 0);
    assert_int_equal(fastgen_profile_point(decoded_bits, &none, 100), 0);
    check_point((const uint32_t[]){1, 0}, 1);
    check_point((const uint32_t[]){1, 1, 0}, 1);
    check_point((const uint32_t[]){64, 0}, 64);
    check_point((const uint32_t[]){64, 64, 0}, 64);
    check_point((const uint32_t[]){100, 28, 511, 0}, 100);
    check_point((const uint32_t[]){100, 28, 511, 5, 0}, 100);
    check_point((const uint32_t[]){100, 28, 512, 0}, 640);
    check_point((const uint32_t[]){100, 30, 512, 300, 100, 7, 0}, 642);
    check_point((const uint32_t[]){700, 30, 512, 70, 600, 80, 511, 100, 0}, 1912);
    check_point((const uint32_t[]){3, 61, 512, 64, 0}, 576);
    uint64_t random = 1;
    for (uint32_t i = 0; i < 300; i++) {
        uint32_t runs[8] = {0}, naive = 0, n = 0;
        for (uint32_t k = 0; k < 7; k++) {
            runs[k] = 1 + tiny_random(&random) % (tiny_random(&random) % 2 ? 1000 : 130) / (k % 2 + 1);
            if (k == 0 || (k % 2 == 0 && runs[k] >= FASTGEN_MIN_APPEND))
                naive = n + runs[k];
            n += runs[k];
        }
        if (n <= 64 * BLOCK)
            check_point(runs, naive);
    }
    /* a journal that begins with decode steps (a fork's, say) */
    struct journal late = {.bits = {0xff}};
    assert_int_equal(fastgen_profile_point(decoded_bits, &late, 8), 0);
    assert_int_equal(fastgen_profile_point(decoded_bits, &late, 50), 50);
}

/* ---- profiles ---- */

struct prompt {
    uint32_t ids[MAX_TOKENS + 200], n;
    uint32_t positions[FASTGEN_MAX_ROWS], n_rows;
    float weights[FASTGEN_MAX_ROWS][MAX_TOKENS]; /* multiples of 2^-16, so that every sum is exact */
    bool keeps_exact;
    uint32_t exact_tokens;
};

static bool is_special(uint32_t id)
{
    return id == special_id;
}

/* Everything is a word, but for the marks and special tokens that a test puts in. */
static struct prompt *prompt_new(uint32_t n)
{
    struct prompt *prompt = calloc(1, sizeof *prompt);
    assert_non_null(prompt);
    prompt->n = n;
    for (uint32_t i = 0; i < MAX_TOKENS + 200; i++)
        prompt->ids[i] = WORD;
    prompt->n_rows = fastgen_sample(n, prompt->positions);
    return prompt;
}

static struct fastgen_profile *profile_of(const struct prompt *prompt, float recovery)
{
    struct fastgen_profile *profile = NULL;
    assert_int_equal(fastgen_profile_new(tiny.tokenizer, prompt->ids, prompt->n, 2, 3, recovery, &profile), 0);
    if (prompt->keeps_exact)
        fastgen_profile_keep_exact(profile, prompt->exact_tokens);
    for (uint32_t i = 0; i < prompt->n_rows; i++) {
        /* another head sees other rows: what is not there is full, and nobody's sums mix */
        static const float nothing[MAX_TOKENS];
        fastgen_profile_add_row(profile, 1, 2, prompt->positions[i], prompt->weights[i]);
        fastgen_profile_add_row(profile, 1, 1, prompt->positions[i], nothing);
    }
    fastgen_profile_finish(profile);
    assert_int_equal(fastgen_profile_class(profile, 0, 2), FASTGEN_FULL);
    if (!prompt->keeps_exact)
        assert_int_equal(fastgen_profile_class(profile, 1, 1), FASTGEN_SPECIAL);
    assert_int_equal(fastgen_profile_n_tokens(profile), prompt->n);
    assert_true(fastgen_profile_recovery(profile) == recovery);
    return profile;
}

struct naive {
    enum fastgen_class class;
    double kept;
    bool frequent[MAX_TOKENS];
};

static bool is_exact(const struct prompt *prompt, uint32_t position, uint32_t token)
{
    if (!prompt->keeps_exact)
        return false;
    return token < 4 || position < prompt->exact_tokens || token / BLOCK + 1 >= position / BLOCK;
}

static bool is_local(uint32_t position, uint32_t token)
{
    uint32_t n = (uint32_t)((position + 1) * 0.3 + 0.5);
    return token + (n > 0 ? n : 1) > position;
}

static bool is_kept(const struct naive *naive, enum fastgen_class class, const uint32_t *ids, uint32_t n_prompt,
                    uint32_t position, uint32_t token)
{
    return class == FASTGEN_FULL || is_special(ids[token]) || (class >= FASTGEN_PUNCTUATION && ids[token] == MARK) ||
           (class >= FASTGEN_FREQUENT_CLASS && token < n_prompt && naive->frequent[token]) ||
           (class >= FASTGEN_LOCAL_CLASS && is_local(position, token));
}

/* Does the row say anything? */
static bool counts(const struct prompt *prompt, uint32_t position)
{
    uint32_t n_exact = 0;
    for (uint32_t j = 0; j <= position; j++)
        n_exact += is_exact(prompt, position, j);
    return 2 * n_exact <= position + 1;
}

static uint32_t half_of(const struct prompt *prompt, uint32_t position)
{
    return position + prompt->n / 4 >= prompt->n;
}

/* The frequent tokens by the rows of one half, or of both (half 2). */
static void naive_frequent(const struct prompt *prompt, uint32_t half, struct naive *naive)
{
    double sums[MAX_TOKENS] = {0};
    for (uint32_t i = 0; i < prompt->n_rows; i++) {
        if (!counts(prompt, prompt->positions[i]))
            continue;
        for (uint32_t j = 0; (half == 2 || half_of(prompt, prompt->positions[i]) == half) && j <= prompt->positions[i];
             j++)
            sums[j] += is_exact(prompt, prompt->positions[i], j) ? 0 : (double)prompt->weights[i][j];
    }
    uint32_t n = (uint32_t)(prompt->n * 0.3 + 0.5);
    memset(naive->frequent, 0, sizeof naive->frequent);
    for (uint32_t k = 0; k < (n > 0 ? n : 1); k++) {
        uint32_t best = UINT32_MAX;
        for (uint32_t j = 0; j < prompt->n; j++)
            if (!naive->frequent[j] && (best == UINT32_MAX || sums[j] > sums[best]))
                best = j;
        naive->frequent[best] = true;
    }
}

/* What a class loses in all rows; frequent tokens are the choice of the half that the row is not in. */
static double naive_loss(const struct prompt *prompt, enum fastgen_class class, struct naive *naive)
{
    double lost = 0;
    for (uint32_t half = 0; half < 2; half++) {
        naive_frequent(prompt, 1 - half, naive);
        for (uint32_t i = 0; i < prompt->n_rows; i++) {
            uint32_t position = prompt->positions[i];
            if (!counts(prompt, position))
                continue;
            for (uint32_t j = 0; half_of(prompt, position) == half && j <= position; j++)
                if (!is_exact(prompt, position, j) && !is_kept(naive, class, prompt->ids, prompt->n, position, j))
                    lost += (double)prompt->weights[i][j];
        }
    }
    return lost;
}

static struct naive *naive_of(const struct prompt *prompt, float recovery)
{
    struct naive *naive = calloc(1, sizeof *naive);
    assert_non_null(naive);
    naive->kept = 1;
    uint32_t n_rows = 0;
    for (uint32_t i = 0; i < prompt->n_rows; i++)
        n_rows += counts(prompt, prompt->positions[i]);
    for (uint32_t class = FASTGEN_SPECIAL; n_rows > 0 && class <= FASTGEN_LOCAL_CLASS; class += 1) {
        double lost = naive_loss(prompt, (enum fastgen_class) class, naive);
        if (lost <= (1.0 - (double)recovery) * n_rows) {
            naive->class = (enum fastgen_class) class;
            naive->kept = 1.0 - lost / n_rows;
            break;
        }
    }
    naive_frequent(prompt, 2, naive);
    return naive;
}

/* Class, kept mass and masks, within the prompt and behind it. */
static enum fastgen_class check(const struct prompt *prompt, float recovery)
{
    struct fastgen_profile *profile = profile_of(prompt, recovery);
    struct naive *naive = naive_of(prompt, recovery);
    assert_int_equal(fastgen_profile_class(profile, 1, 2), naive->class);
    assert_true(fastgen_profile_kept(profile, 1, 2) == (float)naive->kept);
    assert_int_equal(fastgen_profile_absent(profile)[5], naive->class != FASTGEN_FULL);
    for (uint32_t position = 0; position < prompt->n + 150; position += 1 + position / 5) {
        uint64_t masks[(MAX_TOKENS + 200) / BLOCK + 2];
        uint32_t n_blocks = position / BLOCK + 2;
        memset(masks, 0xa5, sizeof masks);
        fastgen_profile_masks(profile, 1, 2, prompt->ids, position, n_blocks, masks);
        for (uint32_t token = 0; token < n_blocks * BLOCK; token++) {
            bool expected = token <= position && is_kept(naive, naive->class, prompt->ids, prompt->n, position, token);
            if ((masks[token / BLOCK] >> token % BLOCK & 1) != expected)
                fail_msg("token %u of %u at %u, class %d: expected %d", token, prompt->n, position, naive->class,
                         expected);
        }
        assert_true(masks[n_blocks] == 0xa5a5a5a5a5a5a5a5u);
    }
    enum fastgen_class class = naive->class;
    assert_null(fastgen_profile_free(profile));
    free(naive);
    return class;
}

static void test_patterns(void **state)
{
    (void)state;
    struct prompt *prompt = prompt_new(300);
    prompt->ids[0] = special_id;
    prompt->ids[20] = MARK;
    for (uint32_t i = 0; i < prompt->n_rows; i++)
        prompt->weights[i][0] = 1;
    assert_int_equal(check(prompt, 1.0f), FASTGEN_SPECIAL);
    for (uint32_t i = 0; i < prompt->n_rows; i++) {
        prompt->weights[i][0] = 0.5f;
        prompt->weights[i][20] = 0.5f;
    }
    assert_int_equal(check(prompt, 1.0f), FASTGEN_PUNCTUATION);
    assert_int_equal(check(prompt, 0.5f), FASTGEN_SPECIAL);
    for (uint32_t i = 0; i < prompt->n_rows; i++) {
        prompt->weights[i][20] = 0.25f;
        prompt->weights[i][77] = 0.25f;
    }
    assert_int_equal(check(prompt, 0.98f), FASTGEN_FREQUENT_CLASS);
    assert_int_equal(check(prompt, 0.75f), FASTGEN_PUNCTUATION);
    free(prompt);
    prompt = prompt_new(600); /* every row looks at the 64 tokens before it; then half at what is far */
    for (uint32_t i = 0; i < prompt->n_rows; i++)
        for (uint32_t k = 0; k < 64; k++)
            prompt->weights[i][prompt->positions[i] - k] = 1.0f / 64;
    assert_int_equal(check(prompt, 1.0f), FASTGEN_LOCAL_CLASS);
    for (uint32_t i = 0; i < prompt->n_rows; i++)
        for (uint32_t k = 0; k < 256; k++) {
            prompt->weights[i][prompt->positions[i] - k % 64] = 0.5f / 64;
            prompt->weights[i][k] = 0.5f / 256;
        }
    assert_int_equal(check(prompt, 0.9f), FASTGEN_FULL);
    prompt->keeps_exact = true; /* two blocks are more than 64 tokens: what is left is the far half */
    assert_int_equal(check(prompt, 0.5f), FASTGEN_SPECIAL);
    free(prompt);
}

/* Rows that see everything alike: nothing is enough, and the share of the largest goes to the earliest. */
static void test_equal(void **state)
{
    (void)state;
    struct prompt *prompt = prompt_new(512);
    for (uint32_t i = 0; i < prompt->n_rows; i++)
        for (uint32_t j = 0; j <= prompt->positions[i]; j++)
            prompt->weights[i][j] = 1.0f / 512;
    assert_int_equal(check(prompt, 0.98f), FASTGEN_FULL);
    assert_int_equal(check(prompt, 0.6f), FASTGEN_LOCAL_CLASS);
    free(prompt);
}

/* The least that is lost tells at recovery 1; all of it kept is enough, whatever rounding did to the sum of a row. */
static void test_everything(void **state)
{
    (void)state;
    struct prompt *prompt = prompt_new(100);
    prompt->ids[3] = special_id;
    for (uint32_t i = 0; i < prompt->n_rows; i++)
        prompt->weights[i][3] = 0.99999f;
    assert_int_equal(check(prompt, 1.0f), FASTGEN_SPECIAL);
    for (uint32_t j = 0; j < 40; j++) /* more than are frequent, and not local to the last row */
        prompt->weights[prompt->n_rows - 1][5 + j] = 0x1p-60f;
    struct fastgen_profile *profile = profile_of(prompt, 1.0f);
    assert_int_equal(fastgen_profile_class(profile, 1, 2), FASTGEN_FULL);
    fastgen_profile_free(profile);
    profile = profile_of(prompt, 0.9999999f);
    assert_int_equal(fastgen_profile_class(profile, 1, 2), FASTGEN_SPECIAL);
    fastgen_profile_free(profile);
    free(prompt);
}

/* Random prompts and rows of a few kinds, all lengths around a block's ends. */
static void test_random(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 2, 3, 63, 64, 65, 128, 200, 640, 999};
    static const float recoveries[] = {0.3f, 0.6f, 0.8f, 0.9f, 0.95f, 0.98f, 0.995f, 1.0f};
    uint64_t random = 7;
    uint32_t n_of[5] = {0};
#ifdef HCATTN_SANITIZED
    const uint32_t n_rounds = 50;
#else
    const uint32_t n_rounds = 150;
#endif
    for (uint32_t round = 0; round < n_rounds; round++) {
        struct prompt *prompt = prompt_new(lengths[round % 10]);
        prompt->keeps_exact = round % 3 == 0;
        prompt->exact_tokens = round % 2 ? 0 : 256;
        for (uint32_t i = 0; i < MAX_TOKENS + 200; i++) {
            uint32_t roll = tiny_random(&random) % 16;
            prompt->ids[i] = roll == 0 ? special_id : roll < 4 ? MARK : WORD;
        }
        for (uint32_t i = 0; i < prompt->n_rows; i++) {
            uint32_t p = prompt->positions[i], left = 65536;
            for (uint32_t k = 0; k < 4000 && left > 0; k++) {
                uint32_t part = 1 + tiny_random(&random) % (1 + left / 8), j = tiny_random(&random) % (p + 1);
                switch (round / 10 % 5) { /* whom it goes to */
                case 0:
                    break;
                case 1:
                    j = p - tiny_random(&random) % (1 + p / 4);
                    break;
                case 2:
                    j %= 1 + p / 5;
                    break;
                case 3: /* mostly marks */
                    while (prompt->ids[j] == WORD && j > 0)
                        j--;
                    break;
                default: /* mostly special tokens */
                    while (!is_special(prompt->ids[j]) && j > 0)
                        j--;
                }
                prompt->weights[i][j] += (float)part / 65536;
                left -= part;
            }
        }
        for (uint32_t k = 0; k < 8; k++)
            n_of[check(prompt, recoveries[k])]++;
        free(prompt);
    }
    for (uint32_t class = 0; class < 5; class += 1)
        assert_true(n_of[class] > 5); /* the patterns reach every class */
}

/* Two tokens with the mass of the whole: with equal sums the earlier stays, up to the share. */
static void test_ties(void **state)
{
    (void)state;
    struct prompt *prompt = prompt_new(10); /* three are frequent, three local */
    for (uint32_t i = 0; i < prompt->n_rows; i++)
        for (uint32_t j = 0; j < 4; j++)
            prompt->weights[i][j] = 0.25f;
    struct fastgen_profile *profile = profile_of(prompt, 0.75f);
    uint64_t mask = 0;
    assert_int_equal(fastgen_profile_class(profile, 1, 2), FASTGEN_FREQUENT_CLASS);
    fastgen_profile_masks(profile, 1, 2, prompt->ids, 9, 1, &mask);
    assert_int_equal(mask, 7);
    fastgen_profile_free(profile);
    free(prompt);
}

/* An id that the vocabulary does not have is a word. */
static void test_unknown_id(void **state)
{
    (void)state;
    struct prompt *prompt = prompt_new(5);
    prompt->ids[2] = UINT32_MAX;
    prompt->ids[1] = special_id;
    prompt->weights[0][1] = 1;
    struct fastgen_profile *profile = profile_of(prompt, 0.1f);
    uint64_t mask = 0;
    fastgen_profile_masks(profile, 1, 2, prompt->ids, 4, 1, &mask);
    assert_int_equal(mask, 2);
    fastgen_profile_free(profile);
    assert_null(fastgen_profile_free(NULL));
    free(prompt);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kinds),    cmocka_unit_test(test_sample), cmocka_unit_test(test_point),
        cmocka_unit_test(test_patterns), cmocka_unit_test(test_equal),  cmocka_unit_test(test_everything),
        cmocka_unit_test(test_random),   cmocka_unit_test(test_ties),   cmocka_unit_test(test_unknown_id),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
