/* test_run.c - what a run makes of its request. */
#include "tests/unit/gpu-worker/tokenizer_fixture.h"

#include <errno.h>
#include <string.h>

#include "gpu-worker/run.h"

static struct run_request *request(uint64_t at, uint32_t n_input, uint32_t max_tokens)
{
    struct run_request *r = calloc(1, sizeof(*r));
    strcpy(r->policy, "full");
    r->session = 5;
    r->at = at;
    r->n_input = n_input;
    r->input_ids = calloc(n_input + 1, sizeof(uint32_t));
    r->max_tokens = max_tokens;
    r->n_blocks = (uint32_t)(at + n_input + max_tokens) / LAYOUT_BLOCK_TOKENS + 1;
    r->blocks = calloc(r->n_blocks, sizeof(struct block_handle));
    return r;
}

static int make(struct run_request *r, void **state, struct run **ret_run)
{
    struct tokenizer_fixture *fixture = *state;
    char sentence[160] = "";
    int result = run_new(r, NULL, fixture->tokenizer, ret_run, sentence, sizeof(sentence));
    if (result < 0)
        assert_int_not_equal(strlen(sentence), 0); /* one clear line */
    return result;
}

static void goals_follow_from_the_request(void **state)
{
    struct run *run;
    assert_int_equal(make(request(10, 5, 7), state, &run), 0);
    assert_int_equal(run_input_end(run), 15);
    assert_int_equal(run->first_decode, 15);
    assert_int_equal(run->goal, 22);
    run_free(run);
    struct run_request *score = request(10, 5, 0);
    score->score = true;
    score->score_from = 12;
    assert_int_equal(make(score, state, &run), 0);
    assert_int_equal(run->first_decode, 12);
    assert_int_equal(run->goal, 15);
    run_free(run);
}

static void what_cannot_be_done_is_refused_with_a_sentence(void **state)
{
    struct run *run;
    struct run_request *r = request(0, 5, 5);
    strcpy(r->policy, "nonsense");
    assert_int_equal(make(r, state, &run), -ENOTSUP);
    r = request(0, 5, 5);
    strcpy(r->policy, "rot2,deviation=9");
    assert_int_equal(make(r, state, &run), -ENOTSUP);
    r = request(0, 5, 200);
    r->n_blocks = 3; /* 192 tokens */
    assert_int_equal(make(r, state, &run), -EINVAL);
    assert_int_equal(make(request(0, 0, 5), state, &run), -EINVAL);
    const uint64_t bad_from[] = {0, 9, 16};
    for (int i = 0; i < 3; i++) {
        r = request(10, 5, 0);
        r->score = true;
        r->score_from = bad_from[i];
        assert_int_equal(make(r, state, &run), -EINVAL);
    }
}

static void the_first_error_is_the_one_that_is_told(void **state)
{
    struct run *run;
    assert_int_equal(make(request(0, 5, 5), state, &run), 0);
    run_fail(run, -ESTALE, "store %u", 3u);
    run_fail(run, -EINVAL, "later");
    assert_int_equal(run->error, -ESTALE);
    assert_string_equal(run->sentence, "store 3");
    run_free(run);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(goals_follow_from_the_request),
        cmocka_unit_test(what_cannot_be_done_is_refused_with_a_sentence),
        cmocka_unit_test(the_first_error_is_the_one_that_is_told),
    };
    return cmocka_run_group_tests(tests, tokenizer_fixture_set_up, tokenizer_fixture_tear_down);
}
