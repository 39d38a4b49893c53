/*
 * test_ring.c - posts of workers are served as descriptors are: in order, whatever the coordinator grants and revokes
 * meanwhile, and whatever a worker writes into its ring.
 */
#include "common/clock.h"
#include "tests/unit/value-store/fixture.h"
#include "value-store/exchanges.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define HEAD_DIM      8u
#define N_BLOCKS      3u /* of each session, sealed */
#define N_SLOTS       4u
#define N_KINDS       6u /* of requests */
#define AREA_BYTES    8192u
#define RESULT_BYTES  (3u * 2u * (2u + HEAD_DIM) * 4u)
#define PAYLOAD_BYTES 1536u /* of a reply, behind its header */
#define PATIENCE_US   (20 * UINT64_C(1000000))
#ifdef HCATTN_SANITIZED
#define N_REQUESTS 300u
#else
#define N_REQUESTS 2000u
#endif

static const uint64_t sessions[2] = {FIXTURE_SESSION, FIXTURE_OTHER};
static const struct fixture rows_of = {
    .shape = {.n_layers = 3, .n_kv_heads = 2, .head_dim = HEAD_DIM, .codec = ROW_CODEC_F16}};

struct bench {
    struct store *store;
    struct exchanges exchanges;
    uint8_t expected[2][N_KINDS][PAYLOAD_BYTES]; /* by session */
};

static struct block_handle handle_of(uint32_t who, uint32_t number)
{
    return (struct block_handle){.index = who * 8 + number, .generation = 1};
}

/* ---- a worker's end ---- */

static void add_exchange(struct bench *bench, uint64_t worker)
{
    uint64_t n_bytes = LAYOUT_PAGE_BYTES + N_SLOTS * 2 * AREA_BYTES;
    struct segment_mapping mapping;
    int fd;
    assert_int_equal(segment_create("test-exchange", n_bytes, &fd), 0);
    assert_int_equal(segment_map(fd, n_bytes, true, &mapping), 0);
    *(struct exchange_header *)mapping.address = (struct exchange_header){
        .magic = EXCHANGE_MAGIC,
        .layout = LAYOUT_VERSION,
        .n_bytes = n_bytes,
        .worker = worker,
        .store = 7,
        .n_slots = N_SLOTS,
        .request_bytes = AREA_BYTES,
        .reply_bytes = AREA_BYTES,
        .ready = 1,
    };
    assert_int_equal(exchanges_add(&bench->exchanges, worker, 7, fd), 0);
    segment_unmap(&mapping);
    close(fd);
}

static struct exchange_ring *ring_of(const struct exchange *exchange)
{
    return layout_ring(exchange->mapping.address);
}

static struct reply_header *reply_of(const struct exchange *exchange, uint32_t slot)
{
    return exchanges_reply_area(exchange, slot);
}

/* One aggregate and one fetch, both of one layer and KV head. Returns the request's bytes. */
static uint32_t write_request(const struct exchange *exchange, uint32_t slot, uint64_t id, uint32_t who, uint32_t kind)
{
    uint8_t *area = exchanges_request_area(exchange, slot);
    const uint32_t n_bytes = 640;
    memset(area, 0, n_bytes);
    *(struct request_header *)(void *)area = (struct request_header){
        .magic = REQUEST_MAGIC,
        .n_bytes = n_bytes,
        .request = id,
        .layer = kind % 3,
        .n_items = 1,
        .items_offset = 64,
        .n_blocks = N_BLOCKS,
        .blocks_offset = 128,
        .n_fetches = 1,
        .fetches_offset = 192,
    };
    *(struct aggregate_item *)(void *)(area + 64) = (struct aggregate_item){
        .session = sessions[who],
        .kv_head = kind / 3,
        .mode = AGGREGATE_RESCORE,
        .n_queries = 2,
        .q_offset = 256,
        .n_blocks = N_BLOCKS,
        .lanes = 7,
        .masks_offset = 384,
        .masses_offset = 448,
        .references_offset = 512,
        .scale = 0.3f,
        .result_offset = sizeof(struct reply_header),
    };
    *(struct fetch_entry *)(void *)(area + 192) = (struct fetch_entry){
        .session = sessions[who],
        .handle = handle_of(who, kind % N_BLOCKS),
        .layer = kind % 3,
        .kv_head = kind / 3,
        .first_token = kind,
        .n_tokens = 32,
        .result_offset = 512,
    };
    for (uint32_t i = 0; i < N_BLOCKS; i++) {
        ((struct block_handle *)(void *)(area + 128))[i] = handle_of(who, i);
        ((uint64_t *)(void *)(area + 384))[i] = 0x9249249249249249u << (kind + i);
        ((float *)(void *)(area + 448))[i] = (float)(kind + i) * 0.25f;
    }
    for (uint32_t i = 0; i < 2 * HEAD_DIM; i++)
        ((float *)(void *)(area + 256))[i] = (float)((i * 7 + kind) % 11) * 0.2f - 1;
    memset(reply_of(exchange, slot), 0, AREA_BYTES);
    return n_bytes;
}

static void post(const struct exchange *exchange, uint32_t slot, uint64_t id, uint32_t n_bytes, bool rings)
{
    struct exchange_ring *ring = ring_of(exchange);
    ring->posts[slot].n_bytes = n_bytes;
    atomic_store_explicit(&ring->posts[slot].request, id, memory_order_release);
    if (rings)
        bell_ring(&ring->requests);
}

static bool is_answered(const struct exchange *exchange, uint32_t slot, uint64_t id)
{
    return atomic_load_explicit(&reply_of(exchange, slot)->answered, memory_order_acquire) == id;
}

/* False: not within the time. */
static bool wait_for(const struct exchange *exchange, uint32_t slot, uint64_t id, uint64_t timeout_us)
{
    uint64_t deadline_us = clock_deadline_us(timeout_us);
    for (;;) {
        uint32_t seen = bell_count(&ring_of(exchange)->replies);
        if (is_answered(exchange, slot, id))
            return true;
        if (bell_wait(&ring_of(exchange)->replies, seen, deadline_us, 0) == -ETIMEDOUT)
            return is_answered(exchange, slot, id);
    }
}

/* A worker in a thread of its own: all slots under way, results compared. cmocka's asserts are for the main thread. */
struct worker {
    const struct bench *bench;
    const struct exchange *exchange;
    uint32_t who;
    uint32_t n_requests;
    uint64_t first_id;
    pthread_t thread;
    char failure[128];
};

static bool reply_is_right(struct worker *worker, uint32_t slot, uint64_t id)
{
    const struct reply_header *reply = reply_of(worker->exchange, slot);
    const uint8_t *expected = worker->bench->expected[worker->who][id % N_KINDS];
    if (reply->status != 0 || reply->magic != REPLY_MAGIC)
        snprintf(worker->failure, sizeof(worker->failure), "request %lu: status %d, entry %x", (unsigned long)id,
                 reply->status, reply->entry);
    else if (memcmp(reply + 1, expected, PAYLOAD_BYTES) != 0)
        snprintf(worker->failure, sizeof(worker->failure), "request %lu: other bits", (unsigned long)id);
    return worker->failure[0] == 0;
}

static void *worker_main(void *argument)
{
    struct worker *worker = argument;
    uint64_t under_way[N_SLOTS] = {0};
    for (uint32_t i = 0; i < worker->n_requests + N_SLOTS; i++) {
        uint32_t slot = i % N_SLOTS;
        if (under_way[slot] && !wait_for(worker->exchange, slot, under_way[slot], PATIENCE_US)) {
            snprintf(worker->failure, sizeof(worker->failure), "no reply to request %lu", under_way[slot]);
            return NULL;
        }
        if (under_way[slot] && !reply_is_right(worker, slot, under_way[slot]))
            return NULL;
        under_way[slot] = i < worker->n_requests ? worker->first_id + i : 0;
        if (under_way[slot] == 0)
            continue;
        uint32_t n_bytes =
            write_request(worker->exchange, slot, under_way[slot], worker->who, (uint32_t)(under_way[slot] % N_KINDS));
        post(worker->exchange, slot, under_way[slot], n_bytes, true);
    }
    return NULL;
}

static void start(struct worker *worker, const struct bench *bench, uint64_t incarnation, uint32_t who,
                  uint64_t first_id)
{
    *worker = (struct worker){.bench = bench,
                              .exchange = exchanges_find(&bench->exchanges, incarnation),
                              .who = who,
                              .n_requests = N_REQUESTS,
                              .first_id = first_id};
    assert_non_null(worker->exchange);
    assert_int_equal(pthread_create(&worker->thread, NULL, worker_main, worker), 0);
}

static void finish(struct worker *worker)
{
    pthread_join(worker->thread, NULL);
    if (worker->failure[0])
        fail_msg("%s", worker->failure);
}

/* ---- a store with two sessions, and what their requests are answered ---- */

static void serve_directly(struct bench *bench, const struct exchange *exchange, uint32_t slot, uint64_t id,
                           uint32_t n_bytes, struct request_result *ret_result)
{
    const struct request_slot order = {
        .request = id,
        .n_bytes = n_bytes,
        .request_area = exchanges_request_area(exchange, slot),
        .request_bytes = AREA_BYTES,
        .reply_area = exchanges_reply_area(exchange, slot),
        .reply_bytes = AREA_BYTES,
    };
    store_serve(bench->store, &order, ret_result);
}

static int set_up(void **state)
{
    struct bench *bench = calloc(1, sizeof(*bench));
    struct request_result result;
    char sentence[STORE_SENTENCE];
    const struct store_config config = {
        .incarnation = 7, .memory_bytes = 4 << 20, .n_threads = 2, .isa = KERNELS_ISA_PLAIN};
    assert_non_null(bench);
    assert_int_equal(store_open(&config, &bench->store, sentence), 0);
    assert_int_equal(store_format(bench->store, &rows_of.shape, sentence), 0);
    add_exchange(bench, 1);
    const struct exchange *exchange = exchanges_find(&bench->exchanges, 1);
    for (uint32_t who = 0; who < 2; who++) {
        fixture_session(bench->store->blocks, sessions[who]);
        for (uint32_t number = 0; number < 5; number++) {
            struct block_handle handle = handle_of(who, number);
            fixture_reserve(bench->store->blocks, sessions[who], handle.index, 1, number);
            if (number < N_BLOCKS)
                assert_int_equal(
                    fixture_append(&rows_of, bench->store->blocks, sessions[who], handle, number, 0, 64, UINT32_MAX),
                    0);
        }
        for (uint32_t kind = 0; kind < N_KINDS; kind++) {
            uint32_t n_bytes = write_request(exchange, 0, 1, who, kind);
            serve_directly(bench, exchange, 0, 1, n_bytes, &result);
            assert_int_equal(result.status, 0);
            memcpy(bench->expected[who][kind], reply_of(exchange, 0) + 1, PAYLOAD_BYTES);
        }
    }
    *state = bench;
    return 0;
}

static int tear_down(void **state)
{
    struct bench *bench = *state;
    char text[BLOCKS_CHECK_TEXT] = "";
    exchanges_clear(&bench->exchanges);
    int result = blocks_check(bench->store->blocks, text);
    store_close(bench->store);
    free(bench);
    return result;
}

/* ---- tests ---- */

static void requests_are_served(void **state)
{
    struct bench *bench = *state;
    struct worker worker;
    const struct exchange_ring *ring = ring_of(exchanges_find(&bench->exchanges, 1));
    uint64_t progress = atomic_load(&bench->store->progress.value);
    uint64_t n_requests = atomic_load(&bench->store->progress.n_requests);
    assert_int_equal(exchanges_grant(&bench->exchanges, 2, bench->store), -ENOENT);
    assert_int_equal(atomic_load(&ring->serving), 0);
    assert_int_equal(exchanges_grant(&bench->exchanges, 1, bench->store), 0);
    assert_int_equal(exchanges_grant(&bench->exchanges, 1, bench->store), 0); /* again: fine */
    assert_int_equal(atomic_load(&ring->serving), 1);
    start(&worker, bench, 1, 0, 1000);
    finish(&worker);
    exchanges_revoke(&bench->exchanges, 1);
    exchanges_revoke(&bench->exchanges, 1);
    exchanges_revoke(&bench->exchanges, 2);
    assert_int_equal(atomic_load(&ring->serving), 0);
    assert_int_equal(atomic_load(&bench->store->progress.n_requests), n_requests + N_REQUESTS);
    assert_true(atomic_load(&bench->store->progress.value) >= progress + 5 * N_REQUESTS); /* begin, 3 partials, end */
    assert_false(atomic_load(&bench->store->progress.busy));
}

static void two_workers_take_turns(void **state)
{
    struct bench *bench = *state;
    struct worker workers[2];
    add_exchange(bench, 2);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(exchanges_grant(&bench->exchanges, 1 + i, bench->store), 0);
    for (uint32_t i = 0; i < 2; i++)
        start(&workers[i], bench, 1 + i, i, 5000);
    for (uint32_t i = 0; i < 2; i++)
        finish(&workers[i]);
}

/* Tokens in three slots that only fit when the smallest id comes first, whatever its slot. */
static void oldest_comes_first(void **state)
{
    struct bench *bench = *state;
    const struct exchange *exchange = exchanges_find(&bench->exchanges, 1);
    static const uint32_t order[3] = {2, 0, 1}; /* slots */
    for (uint32_t i = 0; i < 3; i++) {
        uint8_t *area = exchanges_request_area(exchange, order[i]);
        const uint64_t id = 100 + i;
        *(struct request_header *)(void *)area = (struct request_header){
            .magic = REQUEST_MAGIC, .n_bytes = 1024, .request = id, .n_appends = 1, .appends_offset = 64};
        *(struct append_entry *)(void *)(area + 64) = (struct append_entry){
            .session = FIXTURE_SESSION,
            .handle = handle_of(0, 3),
            .first_token = i * 5,
            .n_tokens = 5,
            .flags = APPEND_IDS | APPEND_ROWS,
            .ids_offset = 128,
            .rows_offset = 192,
        };
        void *rows = fixture_rows(&rows_of, FIXTURE_SESSION, 3 * 64 + i * 5, 5, 0);
        memcpy(area + 192, rows, 5 * 2 * 4 * HEAD_DIM);
        free(rows);
        for (uint32_t k = 0; k < 5; k++)
            ((uint32_t *)(void *)(area + 128))[k] = fixture_id(FIXTURE_SESSION, 3 * 64 + i * 5 + k);
        post(exchange, order[i], id, 1024, true);
    }
    assert_int_equal(exchanges_grant(&bench->exchanges, 1, bench->store), 0);
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(wait_for(exchange, order[i], 100 + i, PATIENCE_US));
        assert_int_equal(reply_of(exchange, order[i])->status, 0);
    }
    exchanges_revoke(&bench->exchanges, 1);
    assert_true(fixture_block_is_right(&rows_of, bench->store->blocks, FIXTURE_SESSION, handle_of(0, 3)));
}

/* Grants come and go, descriptors are served and the coordinator's orders carried out: no request is lost or changed. */
static void revoked_and_granted_under_fire(void **state)
{
    struct bench *bench = *state;
    struct worker workers[2];
    struct request_result result;
    add_exchange(bench, 2);
    add_exchange(bench, 3);
    const struct exchange *other = exchanges_find(&bench->exchanges, 3);
    for (uint32_t i = 0; i < 2; i++)
        start(&workers[i], bench, 1 + i, i, 1 + 1000000 * (uint64_t)i);
    srand(8);
    for (uint32_t round = 0; round < N_REQUESTS / 10; round++) {
        for (uint32_t i = 0; i < 2; i++) {
            if (rand() % 2)
                assert_int_equal(exchanges_grant(&bench->exchanges, 1 + i, bench->store), 0);
            else
                exchanges_revoke(&bench->exchanges, 1 + i);
        }
        uint32_t n_bytes = write_request(other, 0, round + 1, round % 2, round % N_KINDS);
        serve_directly(bench, other, 0, round + 1, n_bytes, &result);
        assert_int_equal(result.status, 0);
        assert_memory_equal(reply_of(other, 0) + 1, bench->expected[round % 2][round % N_KINDS], PAYLOAD_BYTES);
        turn_take(&bench->store->turn);
        fixture_session(bench->store->blocks, 99);
        fixture_reserve(bench->store->blocks, 99, 20, 1 + round, 0);
        assert_int_equal(blocks_release(bench->store->blocks, 99, 0, 0), 1);
        turn_end(&bench->store->turn);
        clock_sleep_us((uint64_t)rand() % 500);
    }
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(exchanges_grant(&bench->exchanges, 1 + i, bench->store), 0);
    for (uint32_t i = 0; i < 2; i++)
        finish(&workers[i]);
}

/* What was posted before a revocation is served by it. */
static void revocation_drains(void **state)
{
    struct bench *bench = *state;
    const struct exchange *exchange = exchanges_find(&bench->exchanges, 1);
    for (uint64_t round = 0; round < 200; round++) {
        assert_int_equal(exchanges_grant(&bench->exchanges, 1, bench->store), 0);
        for (uint32_t slot = 0; slot < N_SLOTS; slot++) {
            uint64_t id = round * N_SLOTS + slot + 1;
            post(exchange, slot, id, write_request(exchange, slot, id, 0, (uint32_t)id % N_KINDS), slot % 2);
        }
        exchanges_revoke(&bench->exchanges, 1);
        for (uint32_t slot = 0; slot < N_SLOTS; slot++)
            assert_true(is_answered(exchange, slot, round * N_SLOTS + slot + 1));
    }
}

static void a_worker_that_does_not_ring_is_found(void **state)
{
    struct bench *bench = *state;
    const struct exchange *exchange = exchanges_find(&bench->exchanges, 1);
    assert_int_equal(exchanges_grant(&bench->exchanges, 1, bench->store), 0);
    clock_sleep_us(20000); /* it sleeps */
    post(exchange, 1, 5, write_request(exchange, 1, 5, 0, 2), false);
    assert_true(wait_for(exchange, 1, 5, 3 * RING_LOOK_US));
    assert_memory_equal(reply_of(exchange, 1) + 1, bench->expected[0][2], PAYLOAD_BYTES);
    /* Words of the bell that are not what they should be: no stop takes longer than a look. */
    atomic_store(&ring_of(exchange)->requests.n_waiting, 0);
    uint64_t started_us = clock_now_us();
    exchanges_revoke(&bench->exchanges, 1);
    assert_true(clock_now_us() - started_us < 3 * RING_LOOK_US);
}

/* An id is served once; posts of a life before are not served at all. */
static void nothing_is_served_twice(void **state)
{
    struct bench *bench = *state;
    const struct exchange *exchange = exchanges_find(&bench->exchanges, 1);
    struct exchange copy = {0};
    int fd;
    assert_int_equal(exchanges_grant(&bench->exchanges, 1, bench->store), 0);
    uint32_t n_bytes = write_request(exchange, 0, 9, 0, 0);
    post(exchange, 0, 9, n_bytes, true);
    assert_true(wait_for(exchange, 0, 9, PATIENCE_US));
    uint64_t n_requests = atomic_load(&bench->store->progress.n_requests);
    for (uint32_t i = 0; i < 20; i++) {
        post(exchange, 0, 9, n_bytes, true);
        exchanges_revoke(&bench->exchanges, 1);
        assert_int_equal(exchanges_grant(&bench->exchanges, 1, bench->store), 0);
    }
    exchanges_revoke(&bench->exchanges, 1);
    assert_int_equal(atomic_load(&bench->store->progress.n_requests), n_requests);

    /* The same memory, shown again with a post in it that nobody served. */
    post(exchange, 1, 10, n_bytes, true);
    assert_int_equal(segment_create("test-exchange", exchange->mapping.n_bytes, &fd), 0);
    assert_int_equal(segment_map(fd, 0, true, &copy.mapping), 0);
    memcpy(copy.mapping.address, exchange->mapping.address, exchange->mapping.n_bytes);
    assert_int_equal(exchanges_add(&bench->exchanges, 1, 7, fd), 0);
    assert_int_equal(exchanges_grant(&bench->exchanges, 1, bench->store), 0);
    exchanges_revoke(&bench->exchanges, 1);
    assert_int_equal(atomic_load(&bench->store->progress.n_requests), n_requests);
    segment_unmap(&copy.mapping);
    close(fd);
}

/* Posts whose size, slot, header or id is nonsense are answered by an error or ignored; a good one after them is served. */
static void garbage_is_answered(void **state)
{
    struct bench *bench = *state;
    const struct exchange *exchange = exchanges_find(&bench->exchanges, 1);
    struct exchange_ring *ring = ring_of(exchange);
    static const uint32_t sizes[] = {0, 63, 641, AREA_BYTES + 1, UINT32_MAX};
    uint64_t id = 1;
    assert_int_equal(exchanges_grant(&bench->exchanges, 1, bench->store), 0);
    for (uint32_t i = 0; i < 5; i++, id++) {
        write_request(exchange, 2, id, 0, 0);
        post(exchange, 2, id, sizes[i], true);
        assert_true(wait_for(exchange, 2, id, PATIENCE_US));
        assert_int_equal(reply_of(exchange, 2)->status, -EINVAL);
        assert_int_equal(reply_of(exchange, 2)->entry, 0);
    }
    post(exchange, 2, id + 1, write_request(exchange, 2, id, 0, 0), true); /* another id in the header */
    assert_true(wait_for(exchange, 2, id + 1, PATIENCE_US));
    assert_int_equal(reply_of(exchange, 2)->status, -EINVAL);
    for (uint32_t slot = N_SLOTS; slot < EXCHANGE_MAX_SLOTS; slot++) /* of no slot */
        post(exchange, slot, 77, 640, true);
    srand(3);
    for (uint32_t round = 0; round < N_REQUESTS; round++) {
        uint32_t slot = (uint32_t)rand() % N_SLOTS;
        if (rand() % 8 == 0)
            atomic_store(&ring->requests.count, (uint32_t)rand());
        if (rand() % 8 == 0)
            atomic_store(&ring->replies.n_waiting, (uint32_t)rand() % 3);
        if (rand() % 8 == 0)
            atomic_store(&ring->serving, (uint32_t)rand());
        atomic_store(&ring->posts[slot].request, (uint64_t)rand());
        bell_ring(&ring->requests);
    }
    exchanges_revoke(&bench->exchanges, 1);
    assert_int_equal(exchanges_grant(&bench->exchanges, 1, bench->store), 0);
    id = UINT64_MAX;
    post(exchange, 0, id, write_request(exchange, 0, id, 0, (uint32_t)(id % N_KINDS)), true);
    assert_true(wait_for(exchange, 0, id, PATIENCE_US));
    assert_int_equal(reply_of(exchange, 0)->status, 0);
}

/* An exchange that goes, or is replaced, takes its ring along, also in the middle of work. */
static void exchanges_take_their_rings_along(void **state)
{
    struct bench *bench = *state;
    for (uint32_t round = 0; round < 50; round++) {
        const struct exchange *exchange = exchanges_find(&bench->exchanges, 1);
        assert_int_equal(exchanges_grant(&bench->exchanges, 1, bench->store), 0);
        for (uint32_t slot = 0; slot < N_SLOTS; slot++)
            post(exchange, slot, slot + 1, write_request(exchange, slot, slot + 1, 0, 0), true);
        if (round % 3 == 0)
            exchanges_remove(&bench->exchanges, 1);
        if (round % 3 == 1)
            exchanges_clear(&bench->exchanges);
        add_exchange(bench, 1);
        assert_null(exchanges_find(&bench->exchanges, 1)->ring);
    }
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(requests_are_served),
        TEST(two_workers_take_turns),
        TEST(oldest_comes_first),
        TEST(revoked_and_granted_under_fire),
        TEST(revocation_drains),
        TEST(a_worker_that_does_not_ring_is_found),
        TEST(nothing_is_served_twice),
        TEST(garbage_is_answered),
        TEST(exchanges_take_their_rings_along),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
