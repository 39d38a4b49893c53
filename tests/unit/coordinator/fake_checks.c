/* fake_checks.c - what the stores hold against what the coordinator believes. See fakes.h. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/coordinator/fakes.h"

enum { MAX_BLOCKS = 2048 }; /* of a session */

static uint32_t n_used(const struct fake_store *store)
{
    uint32_t n = 0;
    for (uint32_t i = 0; store->has_segment && i < store->segment.header->n_blocks; i++)
        n += atomic_load(&layout_block(store->segment.mapping.address, i)->state) != BLOCK_FREE;
    return n;
}

static uint32_t n_records(struct fake_store *store, uint64_t session)
{
    uint32_t n = 0;
    for (uint32_t i = 0; store->has_segment && i < store->segment.header->session_capacity; i++) {
        const struct session_record *record = segments_record(&store->segment, i);
        n += record->session == session && atomic_load(&record->state) == SESSION_RECORD_LIVE;
    }
    return n;
}

/* n_tokens of the journal that lie where the lanes say; blocks or records elsewhere, or two of a number: UINT64_MAX. */
static uint64_t tokens_of(struct fakes *fakes, uint64_t session)
{
    uint8_t lane_store[LAYOUT_N_LANES];
    const struct block_header *found[MAX_BLOCKS] = {NULL};
    if (!fake_store_lanes(fakes, session, lane_store))
        return UINT64_MAX;
    for (uint32_t i = 0; i < FAKE_STORES; i++) {
        struct fake_store *store = &fakes->stores[i];
        bool lives = memchr(lane_store, (int)i, sizeof(lane_store)) != NULL;
        if (n_records(store, session) != lives)
            return UINT64_MAX;
        for (uint32_t j = 0; store->has_segment && j < store->segment.header->n_blocks; j++) {
            const struct block_header *header = segments_block(&store->segment, j);
            if (header->session != session || atomic_load(&header->state) == BLOCK_FREE)
                continue;
            if (header->number >= MAX_BLOCKS || found[header->number] ||
                lane_store[header->number % LAYOUT_N_LANES] != i)
                return UINT64_MAX;
            found[header->number] = header;
        }
    }
    uint64_t n_tokens = 0;
    for (uint32_t number = 0; number < MAX_BLOCKS && found[number]; number++) {
        uint32_t n_ids = atomic_load(&found[number]->n_ids);
        for (uint32_t i = 0; i < n_ids; i++)
            if (found[number]->ids[i] != number * LAYOUT_BLOCK_TOKENS + i)
                return UINT64_MAX;
        n_tokens += n_ids;
        if (n_ids < LAYOUT_BLOCK_TOKENS)
            break;
    }
    return n_tokens;
}

void fake_checks_session(struct fakes *fakes, uint64_t session, uint64_t n_tokens)
{
    FAKES_WAIT(fakes, tokens_of(fakes, session) == n_tokens);
}

void fake_checks_gone(struct fakes *fakes, uint64_t session)
{
    for (uint32_t i = 0; i < FAKE_STORES; i++)
        FAKES_WAIT(fakes,
                   fake_store_held(&fakes->stores[i], session) == 0 && n_records(&fakes->stores[i], session) == 0);
}

static const Hcattn__ProcessStats *stats_of(const Hcattn__StatsReply *stats, uint32_t store)
{
    for (size_t i = 0; i < stats->n_processes; i++)
        if (strcmp(stats->processes[i]->program, "hc-value-store") == 0 && stats->processes[i]->index == store)
            return stats->processes[i];
    return NULL;
}

static bool is_tidy(struct fakes *fakes)
{
    bool tidy = true;
    Hcattn__Reply *reply = fake_client_stats(fakes);
    for (uint32_t i = 0; i < FAKE_STORES; i++) {
        const struct fake_store *store = &fakes->stores[i];
        const Hcattn__ProcessStats *stats = stats_of(reply->stats, i);
        if (stats && store->has_segment && store->fd >= 0)
            tidy = tidy && stats->bytes_used == n_used(store) * store->segment.header->block_bytes;
        else if (stats && !store->has_segment)
            tidy = tidy && stats->bytes_used == 0;
    }
    hcattn__reply__free_unpacked(reply, NULL);
    return tidy;
}

void fake_checks_tidy(struct fakes *fakes)
{
    FAKES_WAIT(fakes, is_tidy(fakes));
}

uint32_t fake_checks_lanes_in(struct fakes *fakes, uint64_t session, uint32_t store)
{
    uint8_t lane_store[LAYOUT_N_LANES];
    uint32_t lanes = 0;
    bool found = fake_store_lanes(fakes, session, lane_store);
    assert(found);
    (void)found;
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
        lanes |= (lane_store[lane] == store ? UINT32_C(1) : 0) << lane;
    return lanes;
}

void fake_checks_run(struct fakes *fakes, const Hcattn__Work__WorkRequest *run)
{
    uint8_t lane_store[LAYOUT_N_LANES];
    bool right = fake_store_lanes(fakes, run->run->session, lane_store) &&
                 memcmp(lane_store, run->run->lane_store.data, sizeof(lane_store)) == 0;
    for (uint32_t number = 0; right && number < run->run->n_blocks; number++) {
        struct fake_store *store = &fakes->stores[lane_store[number % LAYOUT_N_LANES]];
        const struct block_header *header = segments_block(&store->segment, run->run->blocks[number]->index);
        right = header->session == run->run->session && header->number == number &&
                atomic_load(&header->state) != BLOCK_FREE &&
                header->handle.generation == run->run->blocks[number]->generation;
    }
    if (!right) {
        fprintf(stderr, "a Run names blocks that are not those of its session\n");
        abort();
    }
}

bool fake_checks_state(struct fakes *fakes, uint32_t store, const char *state)
{
    Hcattn__Reply *reply = fake_client_stats(fakes);
    const Hcattn__ProcessStats *stats = stats_of(reply->stats, store);
    bool is_so = stats && strcmp(stats->state, state) == 0;
    hcattn__reply__free_unpacked(reply, NULL);
    return is_so;
}
