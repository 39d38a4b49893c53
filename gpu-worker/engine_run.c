/* engine_run.c - one run: from the journal to its start, from logits to tokens, to its end. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "gpu-worker/engine_private.h"
#include "gpu-worker/policy/exact_set.h"

/* ---- the journal ---- */

struct journal {
    uint32_t n_ids;  /* tokens the stores know of the session */
    uint32_t n_rows; /* tokens whose rows are complete in every layer */
    bool decoded;    /* the last token before the request's input was a decode step's */
};

static uint32_t complete_rows(const struct block_header *header, uint32_t n_layers)
{
    uint32_t n = LAYOUT_BLOCK_TOKENS;
    for (uint32_t layer = 0; layer < n_layers; layer++) {
        uint32_t rows = atomic_load_explicit(&header->n_rows[layer], memory_order_acquire);
        n = rows < n ? rows : n;
    }
    return n;
}

/* Reads ids into run->ids and checks them against the input. */
static int read_journal(struct engine *engine, struct run *run, struct journal *ret_journal)
{
    const struct run_request *request = run->request;
    struct journal journal = {0};
    bool ids_end = false, rows_end = false;
    for (uint32_t block = 0; block < request->n_blocks && !ids_end; block++) {
        struct store *store = stores_get(&engine->stores, run_store(run, block));
        if (store == NULL || !store->is_up)
            return -EAGAIN;
        const struct block_header *header =
            stores_block(&engine->stores, store->number, request->blocks[block], request->session, block);
        if (header == NULL) {
            run_fail(run, -ESTALE, "block %u of the session is not in store %u", block, store->number);
            return -ESTALE;
        }
        uint32_t n_ids = atomic_load_explicit(&header->n_ids, memory_order_acquire);
        n_ids = n_ids < LAYOUT_BLOCK_TOKENS ? n_ids : LAYOUT_BLOCK_TOKENS;
        for (uint32_t i = 0; i < n_ids; i++, journal.n_ids++)
            if (journal.n_ids < run->capacity)
                run->ids[journal.n_ids] = header->ids[i];
        uint64_t decoded = atomic_load_explicit(&header->decoded, memory_order_relaxed);
        if (request->at > 0 && (request->at - 1) / LAYOUT_BLOCK_TOKENS == block)
            journal.decoded = decoded >> (request->at - 1) % LAYOUT_BLOCK_TOKENS & 1;
        if (!rows_end)
            journal.n_rows += complete_rows(header, engine->stores.shape.n_layers);
        rows_end = journal.n_rows % LAYOUT_BLOCK_TOKENS != 0 || journal.n_rows < (block + 1) * LAYOUT_BLOCK_TOKENS;
        ids_end = n_ids < LAYOUT_BLOCK_TOKENS;
    }
    for (uint32_t i = 0; i < journal.n_ids && i < run->capacity; i++)
        if (run->ids[i] >= engine->network->shape.n_vocab) {
            run_fail(run, -EPROTO, "the journal holds token %u, which the model does not have", run->ids[i]);
            return -EPROTO;
        }
    *ret_journal = journal;
    return 0;
}

/* Does what the stores hold agree with what the request says? Then all ids it may build on stand in run->ids. */
static int check_journal(struct engine *engine, struct run *run, const struct journal *journal)
{
    const struct run_request *request = run->request;
    uint32_t at = (uint32_t)request->at, known = run_input_end(run) + (request->score ? 0 : request->resume_from);
    if (journal->n_ids < at || (request->max_tokens > 0 && request->resume_from > 0 && journal->n_ids < known)) {
        run_fail(run, -EEXIST, "the session holds %u tokens, fewer than the request builds on", journal->n_ids);
        return -EEXIST;
    }
    if (journal->n_ids > run->capacity) {
        run_fail(run, -EEXIST, "the session holds %u tokens, more than the request knows of", journal->n_ids);
        return -EEXIST;
    }
    for (uint32_t i = 0; i < request->n_input; i++) {
        if (request->input_ids[i] >= engine->network->shape.n_vocab) {
            run_fail(run, -EINVAL, "token %u is not in the vocabulary of %u tokens", request->input_ids[i],
                     engine->network->shape.n_vocab);
            return -EINVAL;
        }
        if (at + i < journal->n_ids && run->ids[at + i] != request->input_ids[i]) {
            run_fail(run, -EEXIST, "the session holds another token at position %u than the request", at + i);
            return -EEXIST;
        }
        run->ids[at + i] = request->input_ids[i];
    }
    run->n_known = known;
    return 0;
}

/* First position that is computed: rows that are there are computed again only to get at logits. */
static uint32_t first_position(const struct run *run, const struct journal *journal)
{
    uint32_t first = run->n_known;
    if (run->request->score)
        first = (uint32_t)run->request->score_from - 1 + run->request->resume_from;
    else if (run->request->max_tokens > 0)
        first = run->n_known - 1;
    return journal->n_rows < first ? journal->n_rows : first;
}

/* Tokens that the client has: their text is told already. */
static int feed_resumed(struct run *run)
{
    for (uint32_t i = run_input_end(run); i < run->n_known; i++) {
        char *text;
        bool stopped;
        int r = text_stream_feed(run->text, run->ids[i], &text, &stopped);
        if (r < 0)
            return r;
        free(text);
        run->n_generated++;
        if (stopped)
            run->end = RUN_END_STOP;
    }
    if (run->end == RUN_END_NONE && run->n_generated > 0 && run->n_generated == run->request->max_tokens)
        run->end = RUN_END_LENGTH;
    run->is_finished = run->end != RUN_END_NONE;
    return 0;
}

int engine_prepare(struct engine *engine, struct run *run)
{
    struct journal journal;
    int r = read_journal(engine, run, &journal);
    if (r == 0)
        r = check_journal(engine, run, &journal);
    if (r < 0)
        return r;
    if (journal.decoded && run->request->max_tokens > 0 && run->request->n_input == 0)
        run->first_decode = (uint32_t)run->request->at - 1; /* it goes on as if it had not been interrupted */
    run->position = first_position(run, &journal);
    run->n_generated = 0;
    if (run->request->max_tokens > 0 && run->request->resume_from > 0) {
        r = feed_resumed(run);
        if (r < 0) {
            run_fail(run, r, "out of memory");
            return r;
        }
    }
    if (engine_is_finished(run))
        return 0;
    bool goes_on = session_goes_on(run->session, run->position); /* before the window may become another */
    r = engine_make_room(engine, run);
    if (r < 0)
        return r;
    if (goes_on && session_goes_on(run->session, run->position)) {
        run->session->n_rows = run->position;
        return 0;
    }
    atomic_store_explicit(&engine->phase, "rebuilding", memory_order_relaxed);
    r = engine_rebuild(engine, run, run->position);
    if (r < 0 && r != -EAGAIN && r != -ECONNRESET)
        run_fail(run, r, "the session could not be rebuilt from its stores: %s", strerror(-r));
    return r;
}

struct mapped_block {
    const struct stores *stores;
    const struct block_header *header;
};

static const void *mapped_rows(void *context, uint32_t layer, uint32_t kv_head)
{
    const struct mapped_block *block = context;
    return stores_rows(block->stores, block->header, layer, kv_head);
}

int engine_add_keys(struct engine *engine, struct run *run, uint32_t position)
{
    struct session *session = run->session;
    if (position >= session->exact_tokens && session->n_window_blocks > EXACT_SET_WINDOW_BLOCKS) {
        int r = session_reserve(session, EXACT_SET_WINDOW_BLOCKS, 0); /* the rest is old from now on */
        if (r < 0)
            return r;
    }
    while (key_cache_n_blocks(session->keys) < exact_set_n_old_blocks(position, session->exact_tokens)) {
        uint32_t block = key_cache_n_blocks(session->keys);
        struct mapped_block mapped = {.stores = &engine->stores};
        mapped.header =
            stores_block(&engine->stores, run_store(run, block), run->request->blocks[block], session->id, block);
        if (mapped.header == NULL)
            return -ESTALE;
        int r = key_cache_add(session->keys, engine->kernels, mapped_rows, &mapped);
        if (r < 0)
            return r;
    }
    return 0;
}

/* ---- what comes out ---- */

static int describe(const struct run *run, const float *logits, uint32_t n_vocab, uint32_t id,
                    struct run_logprobs *ret_logprobs)
{
    double sum = sampler_log_sum_exp(logits, n_vocab);
    struct run_logprobs logprobs = {.logprob = (float)((double)logits[id] - sum)};
    uint32_t n_top = run->request->top_logprobs < n_vocab ? run->request->top_logprobs : n_vocab;
    if (n_top > 0) {
        logprobs.top = calloc(n_top, sizeof(*logprobs.top));
        if (logprobs.top == NULL)
            return -ENOMEM;
        logprobs.n_top = sampler_top(logits, n_vocab, n_top, logprobs.top);
        for (uint32_t i = 0; i < logprobs.n_top; i++)
            logprobs.top[i].logit = (float)((double)logprobs.top[i].logit - sum);
    }
    if (run->request->all_logprobs) {
        logprobs.all = malloc(n_vocab * sizeof(float));
        if (logprobs.all == NULL) {
            run_logprobs_fini(&logprobs);
            return -ENOMEM;
        }
        for (uint32_t i = 0; i < n_vocab; i++)
            logprobs.all[i] = (float)((double)logits[i] - sum);
    }
    *ret_logprobs = logprobs;
    return 0;
}

static void take_score(struct engine *engine, struct run *run, uint32_t position, const float *logits)
{
    struct engine_event *event = engine_new_event(engine, ENGINE_SCORED, run);
    int r = event == NULL
                ? -ENOMEM
                : describe(run, logits, engine->network->shape.n_vocab, run->ids[position + 1], &event->logprobs);
    if (r < 0) {
        engine_event_free(event);
        run_fail(run, r, "out of memory");
        return;
    }
    event->index = position + 1;
    engine_tell(engine, event);
}

/* raw_logits: the distribution before biases and penalties; NULL: nobody asks for it */
static void take_token(struct engine *engine, struct run *run, uint32_t id, const float *raw_logits)
{
    const struct run_request *request = run->request;
    run->ids[run->n_known++] = id;
    run->pending_id = id;
    run->has_pending = true;
    if (!request->ignore_end && tokenizer_is_end(engine->tokenizer, id)) {
        run->end = RUN_END_TOKEN;
    } else {
        run->n_generated++;
        int r = raw_logits == NULL
                    ? 0
                    : describe(run, raw_logits, engine->network->shape.n_vocab, id, &run->pending_logprobs);
        bool stopped = false;
        if (r == 0)
            r = text_stream_feed(run->text, id, &run->pending_text, &stopped);
        if (r < 0)
            run_fail(run, r, "out of memory");
        if (stopped)
            run->end = RUN_END_STOP;
        else if (run->n_generated == request->max_tokens)
            run->end = RUN_END_LENGTH;
    }
}

void engine_take_token(struct engine *engine, struct run *run, uint32_t id)
{
    take_token(engine, run, id, NULL);
}

void engine_take_logits(struct engine *engine, struct run *run, uint32_t position, float *logits)
{
    uint32_t n_vocab = engine->network->shape.n_vocab;
    if (run->request->score) {
        take_score(engine, run, position, logits);
        return;
    }
    bool describes = run_wants_logits(run->request);
    if (describes)
        memcpy(engine->raw_logits, logits, n_vocab * sizeof(float));
    uint32_t id = sampler_choose(&run->request->sampling, run->ids, position + 1, logits, n_vocab, engine->candidates);
    take_token(engine, run, id, describes ? engine->raw_logits : NULL);
}

void engine_tell_pending(struct engine *engine, struct run *run)
{
    if (!run->has_pending)
        return;
    run->has_pending = false;
    if (run->end == RUN_END_TOKEN)
        return; /* kept in the session, not among what was generated */
    struct engine_event *event = engine_new_event(engine, ENGINE_GENERATED, run);
    if (event == NULL) {
        run_fail(run, -ENOMEM, "out of memory");
        return;
    }
    event->index = run->n_generated - 1;
    event->id = run->pending_id;
    event->text = run->pending_text;
    run->pending_text = NULL;
    event->has_logprobs = run_wants_logits(run->request);
    event->logprobs = run->pending_logprobs;
    run->pending_logprobs = (struct run_logprobs){0};
    engine_tell(engine, event);
}

bool engine_is_finished(const struct run *run)
{
    if (run->is_finished)
        return true;
    return run->request->max_tokens == 0 && run->position >= run->goal;
}

void engine_finish(struct engine *engine, struct run *run)
{
    struct engine_event *event = engine_new_event(engine, ENGINE_FINISHED, run);
    if (event == NULL)
        return;
    event->end = run->end;
    event->index = run->n_generated;
    event->id = run->end == RUN_END_TOKEN ? run->ids[run->n_known - 1] : 0;
    event->n_tokens = run->request->max_tokens > 0 ? run->n_known : run->goal;
    event->prefill_us = run->prefill_us;
    event->decode_us = run->decode_us;
    event->store_wait_us = run->store_wait_us;
    event->n_prefill = run->n_prefill;
    event->n_decode = run->n_decode;
    if (run->text != NULL && run->end != RUN_END_STOP && text_stream_flush(run->text, &event->text) < 0)
        event->text = NULL;
    engine_tell(engine, event);
}
