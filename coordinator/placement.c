#include "coordinator/placement.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define NOT_FREE UINT32_MAX

struct store {
    uint32_t n_blocks;
    uint32_t n_free;
    uint64_t block_bytes;
    uint32_t *generations; /* [n_blocks] last one given out or found */
    uint32_t *floors;      /* [n_blocks] highest one seen in a header */
    uint32_t *free_list;   /* [n_free] indices, a stack: low indices on top at first */
    uint32_t *place;       /* [n_blocks] where a free block stands in free_list; NOT_FREE: it is used */
};

struct placement {
    struct store stores[PLACEMENT_MAX_STORES]; /* n_blocks 0: not there */
};

int placement_new(struct placement **ret_placement)
{
    struct placement *placement = calloc(1, sizeof(*placement));
    if (!placement)
        return -ENOMEM;
    *ret_placement = placement;
    return 0;
}

static void clear(struct store *store)
{
    free(store->generations);
    free(store->floors);
    free(store->free_list);
    free(store->place);
    *store = (struct store){0};
}

struct placement *placement_free(struct placement *placement)
{
    if (placement)
        for (uint32_t i = 0; i < PLACEMENT_MAX_STORES; i++)
            clear(&placement->stores[i]);
    free(placement);
    return NULL;
}

static const struct store *find(const struct placement *placement, uint32_t store)
{
    return store < PLACEMENT_MAX_STORES && placement->stores[store].n_blocks > 0 ? &placement->stores[store] : NULL;
}

int placement_add_store(struct placement *placement, uint32_t store, uint32_t n_blocks, uint64_t block_bytes,
                        const uint32_t *generations)
{
    if (store >= PLACEMENT_MAX_STORES || n_blocks == 0 || block_bytes == 0)
        return -EINVAL;
    struct store new = {.n_blocks = n_blocks, .n_free = n_blocks, .block_bytes = block_bytes};
    new.generations = malloc(n_blocks * sizeof(uint32_t));
    new.floors = malloc(n_blocks * sizeof(uint32_t));
    new.free_list = malloc(n_blocks * sizeof(uint32_t));
    new.place = malloc(n_blocks * sizeof(uint32_t));
    if (!new.generations || !new.floors || !new.free_list || !new.place) {
        clear(&new);
        return -ENOMEM;
    }
    memcpy(new.generations, generations, n_blocks * sizeof(uint32_t));
    memcpy(new.floors, generations, n_blocks * sizeof(uint32_t));
    for (uint32_t i = 0; i < n_blocks; i++)
        new.free_list[i] = new.place[i] = n_blocks - 1 - i;
    clear(&placement->stores[store]);
    placement->stores[store] = new;
    return 0;
}

void placement_remove_store(struct placement *placement, uint32_t store)
{
    if (store < PLACEMENT_MAX_STORES)
        clear(&placement->stores[store]);
}

static void take(struct store *store, uint32_t index)
{
    uint32_t place = store->place[index], last = store->free_list[--store->n_free];
    store->free_list[place] = last;
    store->place[last] = place;
    store->place[index] = NOT_FREE;
}

static void give_back(struct store *store, uint32_t index)
{
    store->place[index] = store->n_free;
    store->free_list[store->n_free++] = index;
}

int placement_claim(struct placement *placement, uint32_t store, struct block_handle handle)
{
    if (!find(placement, store) || handle.index >= placement->stores[store].n_blocks)
        return -EINVAL;
    struct store *entry = &placement->stores[store];
    if (entry->place[handle.index] == NOT_FREE)
        return -EBUSY;
    take(entry, handle.index);
    if (handle.generation > entry->generations[handle.index])
        entry->generations[handle.index] = handle.generation;
    return 0;
}

void placement_raise(struct placement *placement, uint32_t store, uint32_t index, uint32_t generation)
{
    if (find(placement, store) && index < placement->stores[store].n_blocks &&
        placement->stores[store].floors[index] < generation)
        placement->stores[store].floors[index] = generation;
}

int placement_lanes(const struct placement *placement, uint64_t ready, uint8_t ret_lane_store[LAYOUT_N_LANES])
{
    uint32_t n_lanes[PLACEMENT_MAX_STORES] = {0};
    uint8_t lane_store[LAYOUT_N_LANES];
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++) {
        uint32_t best = PLACEMENT_MAX_STORES;
        for (uint32_t store = 0; store < PLACEMENT_MAX_STORES; store++) {
            if (!(ready >> store & 1u) || !find(placement, store))
                continue;
            /* free / (lanes + 1) as fractions: the next lane goes where the most blocks come with it */
            uint64_t share = (uint64_t)placement->stores[store].n_free;
            if (best == PLACEMENT_MAX_STORES ||
                share * (n_lanes[best] + 1u) > (uint64_t)placement->stores[best].n_free * (n_lanes[store] + 1u) ||
                (share == 0 && placement->stores[best].n_free == 0 && n_lanes[store] < n_lanes[best]))
                best = store;
        }
        if (best == PLACEMENT_MAX_STORES)
            return -ENODEV;
        n_lanes[best]++;
        lane_store[lane] = (uint8_t)best;
    }
    memcpy(ret_lane_store, lane_store, sizeof(lane_store));
    return 0;
}

/* Generation UINT32_MAX is the end of a block: it is never given out again. */
static bool exhausted(const struct store *store, uint32_t index)
{
    return store->generations[index] == UINT32_MAX || store->floors[index] == UINT32_MAX;
}

static void drop_exhausted(struct store *store)
{
    while (store->n_free > 0 && exhausted(store, store->free_list[store->n_free - 1]))
        take(store, store->free_list[store->n_free - 1]);
}

int placement_room(const struct placement *placement, const uint8_t lane_store[LAYOUT_N_LANES], uint32_t first_number,
                   uint32_t n_blocks, struct placement_room *ret_room)
{
    uint32_t left[PLACEMENT_MAX_STORES];
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++) {
        if (!find(placement, lane_store[lane]))
            return -EINVAL;
        left[lane_store[lane]] = placement->stores[lane_store[lane]].n_free;
    }
    struct placement_room room = {0, 0};
    bool full = false;
    for (uint32_t i = 0; i < n_blocks; i++) {
        uint32_t store = lane_store[(first_number + i) % LAYOUT_N_LANES];
        room.bytes_asked += placement->stores[store].block_bytes;
        if (!full && left[store] > 0) {
            left[store]--;
            room.bytes_free += placement->stores[store].block_bytes;
        } else {
            full = true;
        }
    }
    *ret_room = room;
    return full ? -ENOMEM : 0;
}

bool placement_could_hold(const struct placement *placement, const uint8_t lane_store[LAYOUT_N_LANES],
                          uint64_t n_blocks)
{
    uint64_t n_here[PLACEMENT_MAX_STORES] = {0};
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++) {
        const struct store *store = find(placement, lane_store[lane]);
        uint64_t n_lane = n_blocks / LAYOUT_N_LANES + (lane < n_blocks % LAYOUT_N_LANES);
        if (!store || (n_here[lane_store[lane]] += n_lane) > store->n_blocks)
            return false;
    }
    return true;
}

int placement_reserve_in(struct placement *placement, uint32_t store, struct placed_block *ret_block)
{
    if (!find(placement, store))
        return -EINVAL;
    struct store *entry = &placement->stores[store];
    drop_exhausted(entry);
    if (entry->n_free == 0)
        return -ENOMEM;
    uint32_t index = entry->free_list[entry->n_free - 1];
    take(entry, index);
    if (entry->generations[index] < entry->floors[index])
        entry->generations[index] = entry->floors[index];
    *ret_block = (struct placed_block){{index, ++entry->generations[index]}, (uint8_t)store};
    return 0;
}

int placement_move_lanes(const struct placement *placement, uint64_t targets, uint32_t from,
                         const uint8_t lane_store[LAYOUT_N_LANES], uint32_t n_blocks,
                         uint8_t ret_lane_store[LAYOUT_N_LANES], struct placement_room *ret_room)
{
    uint32_t left[PLACEMENT_MAX_STORES] = {0}, n_lanes[PLACEMENT_MAX_STORES] = {0};
    uint8_t moved[LAYOUT_N_LANES];
    struct placement_room room = {0, 0};
    bool full = false;
    for (uint32_t store = 0; store < PLACEMENT_MAX_STORES; store++)
        left[store] =
            targets >> store & 1u && store != from && find(placement, store) ? placement->stores[store].n_free : 0;
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++) {
        uint32_t n = n_blocks / LAYOUT_N_LANES + (lane < n_blocks % LAYOUT_N_LANES), best = PLACEMENT_MAX_STORES;
        moved[lane] = lane_store[lane];
        if (lane_store[lane] != from)
            continue;
        for (uint32_t store = 0; store < PLACEMENT_MAX_STORES; store++) {
            if (!(targets >> store & 1u) || store == from || !find(placement, store))
                continue;
            /* as in placement_lanes(), so that lanes without blocks yet are spread, too; but what fits comes first */
            bool fits = left[store] >= n, best_fits = best < PLACEMENT_MAX_STORES && left[best] >= n;
            if (best == PLACEMENT_MAX_STORES || fits > best_fits ||
                (fits == best_fits &&
                 ((uint64_t)left[store] * (n_lanes[best] + 1u) > (uint64_t)left[best] * (n_lanes[store] + 1u) ||
                  (left[store] == 0 && left[best] == 0 && n_lanes[store] < n_lanes[best]))))
                best = store;
        }
        if (best == PLACEMENT_MAX_STORES)
            return -ENODEV;
        uint32_t fits = n < left[best] ? n : left[best];
        room.bytes_asked += n * placement->stores[best].block_bytes;
        room.bytes_free += fits * placement->stores[best].block_bytes;
        full = full || fits < n;
        left[best] -= fits;
        n_lanes[best]++;
        moved[lane] = (uint8_t)best;
    }
    if (full) {
        *ret_room = room;
        return -ENOMEM;
    }
    memcpy(ret_lane_store, moved, sizeof(moved));
    return 0;
}

int placement_reserve(struct placement *placement, const uint8_t lane_store[LAYOUT_N_LANES], uint32_t first_number,
                      uint32_t n_blocks, struct placed_block *ret_blocks, struct placement_room *ret_room)
{
    struct placement_room room;
    int result = placement_room(placement, lane_store, first_number, n_blocks, &room);
    if (result == -ENOMEM)
        *ret_room = room;
    if (result != 0)
        return result;
    for (uint32_t i = 0; i < n_blocks; i++) {
        uint8_t number = lane_store[(first_number + i) % LAYOUT_N_LANES];
        if (placement_reserve_in(placement, number, &ret_blocks[i]) == 0)
            continue;
        for (uint32_t j = 0; j < i; j++) /* only by exhausted generations */
            (void)placement_release(placement, ret_blocks[j].store, ret_blocks[j].handle);
        room.bytes_free = i * placement->stores[number].block_bytes;
        *ret_room = room;
        return -ENOMEM;
    }
    return 0;
}

int placement_release(struct placement *placement, uint32_t store, struct block_handle handle)
{
    if (!find(placement, store) || handle.index >= placement->stores[store].n_blocks)
        return -ESTALE;
    struct store *entry = &placement->stores[store];
    if (entry->place[handle.index] != NOT_FREE || entry->generations[handle.index] != handle.generation)
        return -ESTALE;
    give_back(entry, handle.index);
    return 0;
}

bool placement_usage(const struct placement *placement, uint32_t store, uint64_t *ret_bytes_total,
                     uint64_t *ret_bytes_used)
{
    const struct store *entry = find(placement, store);
    if (!entry)
        return false;
    *ret_bytes_total = entry->n_blocks * entry->block_bytes;
    *ret_bytes_used = (entry->n_blocks - entry->n_free) * entry->block_bytes;
    return true;
}

uint32_t placement_n_free(const struct placement *placement, uint32_t store)
{
    const struct store *entry = find(placement, store);
    return entry ? entry->n_free : 0;
}

uint64_t placement_block_bytes(const struct placement *placement, uint32_t store)
{
    const struct store *entry = find(placement, store);
    return entry ? entry->block_bytes : 0;
}
