#include "tests/unit/gpu-worker/fake_stores.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/clock.h"
#include "tests/unit/gpu-worker/cmocka_all.h"

enum { SPARE_BLOCKS = 1 };

/* ---- rows ---- */

static float number(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(*state >> 33) / (float)(1 << 30) - 1.0f;
}

static uint32_t store_of(const struct fake_stores *fakes, uint32_t block)
{
    return fakes->request.lane_store[block % LAYOUT_N_LANES];
}

const void *fake_stores_row(const struct fake_stores *fakes, uint32_t position, uint32_t layer, uint32_t kv_head)
{
    const uint32_t block = position / LAYOUT_BLOCK_TOKENS;
    const struct fake_store *store = &fakes->all[store_of(fakes, block)];
    const uint8_t *header = (const uint8_t *)layout_block(store->segment.address, fakes->request.blocks[block].index);
    return header + layout_head_rows_offset(&fakes->shape, layer, kv_head) +
           position % LAYOUT_BLOCK_TOKENS * layout_row_bytes(&fakes->shape);
}

static void make_segment(struct fake_stores *fakes, struct fake_store *store)
{
    const struct row_shape *shape = &fakes->shape;
    const uint64_t block_bytes = layout_block_bytes(shape);
    const uint32_t n_blocks = fakes->n_blocks + SPARE_BLOCKS;
    const uint64_t n_bytes = 2 * LAYOUT_PAGE_BYTES + n_blocks * block_bytes;
    assert_int_equal(segment_create("fake store", n_bytes, &store->segment_fd), 0);
    assert_int_equal(segment_map(store->segment_fd, n_bytes, true, &store->segment), 0);
    struct segment_header *header = store->segment.address;
    *header = (struct segment_header){.magic = SEGMENT_MAGIC,
                                      .layout = LAYOUT_VERSION,
                                      .n_bytes = n_bytes,
                                      .session_capacity = 4,
                                      .sessions_offset = LAYOUT_PAGE_BYTES,
                                      .blocks_offset = 2 * LAYOUT_PAGE_BYTES,
                                      .block_bytes = block_bytes,
                                      .n_blocks = n_blocks,
                                      .shape = *shape};
    atomic_store(&header->ready, 1);
}

/* The session's blocks, the last index first: order in memory means nothing. */
static void fill(struct fake_stores *fakes)
{
    const struct row_shape *shape = &fakes->shape;
    const struct kernels *kernels = kernels_get(KERNELS_ISA_PLAIN);
    uint64_t state = 1;
    for (uint32_t block = 0; block < fakes->n_blocks; block++) {
        const struct block_handle handle = {fakes->n_blocks - 1 - block, 3 + block};
        fakes->request.blocks[block] = handle;
        struct block_header *header = layout_block(fakes->all[store_of(fakes, block)].segment.address, handle.index);
        header->magic = BLOCK_MAGIC;
        header->handle = handle;
        header->session = FAKE_STORES_SESSION;
        header->number = block;
        atomic_store(&header->state, BLOCK_SEALED);
        for (uint32_t i = 0; i < LAYOUT_BLOCK_TOKENS * shape->n_layers * shape->n_kv_heads; i++) {
            const uint32_t layer = i % shape->n_layers, head = i / shape->n_layers % shape->n_kv_heads;
            const uint32_t token = i / shape->n_layers / shape->n_kv_heads;
            float k[shape->head_dim], v[shape->head_dim];
            for (uint32_t j = 0; j < shape->head_dim; j++) {
                k[j] = 2 * number(&state);
                v[j] = number(&state);
            }
            uint8_t *row =
                (uint8_t *)header + layout_head_rows_offset(shape, layer, head) + token * layout_row_bytes(shape);
            kernels->encode_row(k, v, shape->head_dim, (enum kernels_rows)shape->codec, row);
        }
    }
}

/* ---- serving ---- */

/* Status of the reply: what a store would refuse is refused. */
static int32_t serve_fetch(const struct fake_store *store, const uint8_t *request, uint8_t *reply, uint32_t index)
{
    const struct exchange_header *exchange = store->exchange.address;
    const struct segment_header *segment = store->segment.address;
    const struct row_shape *shape = &segment->shape;
    const struct request_header *header = (const void *)request;
    const struct fetch_entry *entry =
        (const struct fetch_entry *)(const void *)(request + header->fetches_offset) + index;
    const size_t n_bytes = entry->n_tokens * layout_row_bytes(shape);
    if ((const uint8_t *)(entry + 1) > request + header->n_bytes || entry->layer >= shape->n_layers ||
        entry->kv_head >= shape->n_kv_heads || entry->n_tokens == 0 || entry->first_token != 0 ||
        entry->n_tokens > LAYOUT_BLOCK_TOKENS || entry->result_offset < sizeof(struct reply_header) ||
        entry->result_offset % 16 != 0 || entry->result_offset + n_bytes > exchange->reply_bytes ||
        entry->handle.index >= segment->n_blocks)
        return -EINVAL;
    const uint8_t *block = (const uint8_t *)layout_block(store->segment.address, entry->handle.index);
    const struct block_header *there = (const void *)block;
    if (there->handle.generation != entry->handle.generation || there->session != entry->session)
        return -ESTALE;
    memcpy(reply + entry->result_offset, block + layout_head_rows_offset(shape, entry->layer, entry->kv_head), n_bytes);
    return 0;
}

static void serve(struct fake_store *store, uint32_t slot, uint64_t request)
{
    struct exchange_header *exchange = store->exchange.address;
    const uint8_t *area = (const uint8_t *)exchange + layout_request_offset(exchange, slot);
    uint8_t *reply_area = (uint8_t *)exchange + layout_reply_offset(exchange, slot);
    const struct request_header *header = (const void *)area;
    struct reply_header *reply = (void *)reply_area;
    int32_t status =
        header->magic == REQUEST_MAGIC && header->request == request && header->n_fetches > 0 ? 0 : -EINVAL;
    memset(reply_area + sizeof(*reply), 0xff, exchange->reply_bytes - sizeof(*reply)); /* NaNs: nothing old is left */
    for (uint32_t i = 0; status == 0 && i < header->n_fetches; i++)
        status = serve_fetch(store, area, reply_area, i);
    reply->magic = REPLY_MAGIC;
    reply->status = status;
    reply->entry = REPLY_ENTRY(REPLY_ENTRY_FETCH, 0);
    atomic_store_explicit(&reply->answered, request, memory_order_release);
    bell_ring(&layout_ring(exchange)->replies);
}

/* The oldest post that was not served yet; 0: none. */
static uint64_t find_post(const struct fake_store *store, uint32_t *ret_slot)
{
    const struct exchange_ring *ring = layout_ring(store->exchange.address);
    uint64_t oldest = 0;
    for (uint32_t slot = 0; slot < STORES_N_SLOTS; slot++) {
        uint64_t request = atomic_load_explicit(&ring->posts[slot].request, memory_order_acquire);
        if (request > store->served[slot] && (oldest == 0 || request < oldest)) {
            oldest = request;
            *ret_slot = slot;
        }
    }
    return oldest;
}

static void *serve_all(void *context)
{
    struct fake_store *store = context;
    struct bell *bell = &layout_ring(store->exchange.address)->requests;
    while (!atomic_load(&store->quit)) {
        uint32_t seen = bell_count(bell), slot = 0;
        uint64_t request = find_post(store, &slot);
        if (request == 0) {
            bell_wait(bell, seen, clock_deadline_us(5000), 0);
            continue;
        }
        store->served[slot] = request;
        if (store->n_unanswered > 0) {
            store->n_unanswered--;
            continue;
        }
        if (store->slow_us > 0)
            usleep(store->slow_us);
        if (store->dies_after > 0 && atomic_load(&store->n_served) == store->dies_after) {
            store->dies_after = 0;
            atomic_store(&store->is_dead, true);
            atomic_store(&store->all->has_control, true);
            uint64_t one = 1;
            assert_int_equal(write(store->all->link.wake_fd, &one, sizeof(one)), sizeof(one));
            return NULL;
        }
        serve(store, slot, request);
        atomic_fetch_add(&store->n_served, 1);
    }
    return NULL;
}

/* ---- lives ---- */

static void end_life(struct fake_store *store)
{
    if (!store->has_thread)
        return;
    atomic_store(&store->quit, true);
    pthread_join(store->thread, NULL);
    store->has_thread = false;
    segment_unmap(&store->exchange);
}

static void begin_life(struct fake_stores *fakes, struct fake_store *store)
{
    int fd;
    uint64_t life = ++fakes->n_lives;
    assert_int_equal(stores_up(&fakes->stores, store->number, 100 + life, 200 + life, store->segment_fd, &fd), 0);
    assert_int_equal(
        segment_map(fd, stores_get(&fakes->stores, store->number)->exchange.n_bytes, true, &store->exchange), 0);
    close(fd);
    memset(store->served, 0, sizeof(store->served));
    atomic_store(&store->quit, false);
    atomic_store(&store->is_dead, false);
    assert_int_equal(pthread_create(&store->thread, NULL, serve_all, store), 0);
    store->has_thread = true;
    assert_true(stores_ready(&fakes->stores, store->number, 100 + life));
    assert_true(stores_use_ring(&fakes->stores, store->number, 100 + life, true));
}

static int control(void *context)
{
    struct fake_stores *fakes = context;
    atomic_store(&fakes->has_control, false);
    for (uint32_t i = 0; i < fakes->n_stores; i++) {
        struct fake_store *store = &fakes->all[i];
        if (!atomic_load(&store->is_dead))
            continue;
        stores_down(&fakes->stores, i, stores_get(&fakes->stores, i)->incarnation);
        end_life(store);
        begin_life(fakes, store);
    }
    return 0;
}

void fake_stores_start(struct fake_stores *fakes, const struct row_shape *shape, uint32_t n_stores, uint32_t n_blocks,
                       uint32_t request_bytes, uint32_t reply_bytes, const struct stores_device *device)
{
    *fakes = (struct fake_stores){.shape = *shape, .n_stores = n_stores, .n_blocks = n_blocks};
    fakes->link = (struct link){.next_request = 1,
                                .wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK),
                                .has_control = &fakes->has_control,
                                .request_timeout_us = 5 * 1000 * 1000,
                                .recovery_timeout_us = 20 * 1000 * 1000,
                                .control = control,
                                .engine = fakes};
    assert_true(fakes->link.wake_fd >= 0);
    fakes->request.session = FAKE_STORES_SESSION;
    fakes->request.n_blocks = n_blocks;
    fakes->request.blocks = calloc(n_blocks, sizeof(*fakes->request.blocks));
    fakes->all = calloc(n_stores, sizeof(*fakes->all));
    assert_non_null(fakes->request.blocks);
    assert_non_null(fakes->all);
    for (uint32_t lane = 0; lane < LAYOUT_N_LANES; lane++)
        fakes->request.lane_store[lane] = (uint8_t)(lane * 5 % n_stores);
    stores_init(&fakes->stores, shape, 1, request_bytes, reply_bytes);
    if (device != NULL)
        fakes->stores.device = *device;
    for (uint32_t i = 0; i < n_stores; i++) {
        fakes->all[i].all = fakes;
        fakes->all[i].number = i;
        make_segment(fakes, &fakes->all[i]);
    }
    fill(fakes);
    for (uint32_t i = 0; i < n_stores; i++)
        begin_life(fakes, &fakes->all[i]);
}

void fake_stores_stop(struct fake_stores *fakes)
{
    for (uint32_t i = 0; i < fakes->n_stores; i++) {
        end_life(&fakes->all[i]);
        segment_unmap(&fakes->all[i].segment);
        close(fakes->all[i].segment_fd);
    }
    stores_fini(&fakes->stores);
    close(fakes->link.wake_fd);
    free(fakes->request.blocks);
    free(fakes->all);
}

uint32_t fake_stores_n_slots(const struct fake_stores *fakes, enum slot_state state)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < fakes->n_stores; i++)
        for (uint32_t slot = 0; slot < STORES_N_SLOTS; slot++)
            n += fakes->stores.stores[i]->slots[slot].state == state;
    return n;
}
