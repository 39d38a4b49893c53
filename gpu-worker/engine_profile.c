/* engine_profile.c - FastGen: profiles a session's heads before its first decode step, and again after a long append. */

#include "gpu-worker/engine_private.h"
#include "gpu-worker/policy/exact_set.h"
#include "gpu-worker/profile_rows.h"

struct source {
    struct engine *engine;
    const struct run *run;
};

static const struct block_header *block_of(const struct source *source, uint32_t block)
{
    const struct run *run = source->run;
    return stores_block(&source->engine->stores, run_store(run, block), run->request->blocks[block], run->session->id,
                        block);
}

static const void *mapped_rows(void *context, uint32_t layer, uint32_t kv_head, uint32_t block)
{
    const struct source *source = context;
    const struct block_header *header = block_of(source, block);
    return header == NULL ? NULL : stores_rows(&source->engine->stores, header, layer, kv_head);
}

static uint64_t decoded_bits(void *context, uint32_t block)
{
    const struct block_header *header = block_of(context, block);
    return header == NULL ? 0 : atomic_load_explicit(&header->decoded, memory_order_relaxed);
}

static int between(void *context)
{
    struct engine *engine = context;
    atomic_fetch_add_explicit(&engine->progress, 1, memory_order_relaxed);
    return 0;
}

int engine_profile(struct engine *engine, struct run *run)
{
    struct session *session = run->session;
    const struct model_shape *shape = &engine->network->shape;
    struct source source = {engine, run};
    struct fastgen_profile *profile;
    if (run->policy.terms.fastgen <= 0 || run->is_profiled ||
        exact_set_n_old_blocks(run->position, session->exact_tokens) == 0)
        return 0;
    uint32_t n_tokens = fastgen_profile_point(decoded_bits, &source, run->position);
    run->is_profiled = true;
    if (n_tokens == 0 || (session->profile != NULL && fastgen_profile_n_tokens(session->profile) == n_tokens))
        return 0; /* nothing was prefilled: all heads keep their keys; or nothing has changed */
    int r = fastgen_profile_new(engine->tokenizer, run->ids, n_tokens, shape->n_layers, shape->n_kv_heads,
                                run->policy.terms.fastgen, &profile);
    if (r < 0)
        return r;
    fastgen_profile_keep_exact(profile, session->exact_tokens);
    const struct profile_rows rows = {
        .network = engine->network,
        .kernels = engine->kernels,
        .pool = engine->tools.pool,
        .codec = (enum kernels_rows)engine->stores.shape.codec,
        .ids = run->ids,
        .n_tokens = n_tokens,
        .rows = mapped_rows,
        .context = &source,
        .between = between,
        .between_context = engine,
    };
    const char *phase = engine_phase(engine);
    atomic_store_explicit(&engine->phase, "profiling heads", memory_order_relaxed);
    r = engine_device_check(engine, profile_rows_run(&rows, profile));
    atomic_store_explicit(&engine->phase, phase, memory_order_relaxed);
    if (r < 0) {
        fastgen_profile_free(profile);
        return r;
    }
    return session_set_profile(session, profile);
}
