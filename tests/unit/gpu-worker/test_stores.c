/* test_stores.c - segments, handles and slots as a worker sees them. */
#include "tests/unit/gpu-worker/cmocka_all.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "gpu-worker/stores.h"

static const struct row_shape shape = {.n_layers = 1, .n_kv_heads = 2, .head_dim = 8, .codec = ROW_CODEC_F16};

/* A segment of 3 blocks as a store would have formatted it; block 1 belongs to session 77 as its number 5. */
static int make_segment(const struct row_shape *rows, struct segment_mapping *ret_mapping)
{
    uint64_t block = layout_block_bytes(rows), n_bytes = 2 * LAYOUT_PAGE_BYTES + 3 * block;
    int fd;
    assert_int_equal(segment_create("test", n_bytes, &fd), 0);
    assert_int_equal(segment_map(fd, n_bytes, true, ret_mapping), 0);
    struct segment_header *header = ret_mapping->address;
    *header = (struct segment_header){.magic = SEGMENT_MAGIC,
                                      .layout = LAYOUT_VERSION,
                                      .n_bytes = n_bytes,
                                      .session_capacity = 4,
                                      .sessions_offset = LAYOUT_PAGE_BYTES,
                                      .blocks_offset = 2 * LAYOUT_PAGE_BYTES,
                                      .block_bytes = block,
                                      .n_blocks = 3,
                                      .shape = *rows};
    for (uint32_t i = 0; i < 3; i++) {
        struct block_header *b = layout_block(header, i);
        b->magic = BLOCK_MAGIC;
        b->handle = (struct block_handle){i, i};
    }
    struct block_header *b = layout_block(header, 1);
    b->handle.generation = 4;
    b->session = 77;
    b->number = 5;
    atomic_store(&b->state, BLOCK_OPEN);
    atomic_store(&header->ready, 1);
    return fd;
}

static void a_handle_reaches_only_its_own_block(void **state)
{
    (void)state;
    struct stores stores;
    struct segment_mapping segment;
    stores_init(&stores, &shape, 1, 4096, 4096);
    int fd = make_segment(&shape, &segment), exchange = -1;
    assert_int_equal(stores_up(&stores, 2, 11, 12, fd, &exchange), 0);
    const struct block_header *block = stores_block(&stores, 2, (struct block_handle){1, 4}, 77, 5);
    assert_non_null(block);
    assert_int_equal(block->number, 5);
    assert_null(stores_block(&stores, 2, (struct block_handle){1, 3}, 77, 5));
    assert_null(stores_block(&stores, 2, (struct block_handle){1, 5}, 77, 5));
    assert_null(stores_block(&stores, 2, (struct block_handle){1, 4}, 78, 5));
    assert_null(stores_block(&stores, 2, (struct block_handle){1, 4}, 77, 6));
    assert_null(stores_block(&stores, 2, (struct block_handle){0, 0}, 0, 0)); /* free */
    assert_null(stores_block(&stores, 2, (struct block_handle){3, 1}, 77, 5));
    assert_null(stores_block(&stores, 2, (struct block_handle){UINT32_MAX, 1}, 77, 5));
    assert_null(stores_block(&stores, 3, (struct block_handle){1, 4}, 77, 5));
    close(exchange);
    close(fd);
    segment_unmap(&segment);
    stores_fini(&stores);
}

static void a_segment_that_is_none_is_refused(void **state)
{
    (void)state;
    struct stores stores;
    struct segment_mapping segment;
    stores_init(&stores, &shape, 1, 4096, 4096);
    struct row_shape other = shape;
    other.head_dim = 16;
    int fd = make_segment(&other, &segment), exchange = -1;
    assert_int_equal(stores_up(&stores, 0, 1, 1, fd, &exchange), -EINVAL);
    segment_unmap(&segment);
    close(fd);
    fd = make_segment(&shape, &segment);
    struct segment_header *header = segment.address;
    header->n_blocks = 1000;
    assert_int_equal(stores_up(&stores, 0, 1, 1, fd, &exchange), -EPROTO);
    assert_int_equal(stores_up(&stores, STORES_MAX, 1, 1, fd, &exchange), -EINVAL);
    assert_true(stores_up(&stores, 0, 1, 1, -1, &exchange) < 0);
    assert_int_equal(exchange, -1);
    assert_null(stores_get(&stores, 0));
    segment_unmap(&segment);
    close(fd);
    stores_fini(&stores);
}

static void a_quarantined_slot_comes_back_when_it_is_answered(void **state)
{
    (void)state;
    struct stores stores;
    struct segment_mapping segment;
    stores_init(&stores, &shape, 1, 4096, 8192);
    int fd = make_segment(&shape, &segment), exchange = -1;
    assert_int_equal(stores_up(&stores, 0, 11, 12, fd, &exchange), 0);
    struct store *store = stores_get(&stores, 0);
    assert_false(store->is_ready);
    assert_false(stores_ready(&stores, 0, 10));
    assert_true(stores_ready(&stores, 0, 11));
    uint32_t slots[STORES_N_SLOTS], slot;
    for (uint64_t i = 0; i < STORES_N_SLOTS; i++) {
        assert_int_equal(stores_take_slot(store, 100 + i, &slots[i]), 0);
        for (uint64_t k = 0; k < i; k++)
            assert_int_not_equal(slots[k], slots[i]);
        memset(stores_request(store, slots[i]), 0xaa,
               4096); /* areas do not overlap, or ASan and the check below tell */
        memset(stores_reply(store, slots[i]), 0, 8192);
    }
    for (uint32_t i = 0; i < STORES_N_SLOTS; i++)
        assert_int_equal(*stores_request(store, slots[i]), 0xaa);
    assert_int_equal(stores_take_slot(store, 200, &slot), -EAGAIN);
    stores_quarantine_slot(store, slots[1]);
    stores_quarantine_slot(store, slots[2]);
    assert_int_equal(stores_take_slot(store, 200, &slot), -EAGAIN);
    atomic_store(&stores_reply(store, slots[2])->answered, 99); /* of an earlier request */
    assert_int_equal(stores_take_slot(store, 200, &slot), -EAGAIN);
    atomic_store(&stores_reply(store, slots[2])->answered, 102);
    assert_int_equal(stores_take_slot(store, 200, &slot), 0);
    assert_int_equal(slot, slots[2]);
    close(exchange);
    /* another life: a new exchange with free slots, under the new route only */
    assert_int_equal(stores_up(&stores, 0, 21, 22, fd, &exchange), 0);
    store = stores_get(&stores, 0);
    assert_non_null(store);
    assert_int_equal(store->incarnation, 21);
    assert_int_equal(store->route, 22);
    assert_int_equal(stores_take_slot(store, 300, &slot), 0);
    stores_down(&stores, 0, 11);
    assert_true(store->is_up);
    stores_down(&stores, 0, 21);
    assert_false(store->is_up);
    close(exchange);
    close(fd);
    segment_unmap(&segment);
    stores_fini(&stores);
}

/* A device that reaches all but the last page of what it is shown; knows what it has, and that the exchange is mapped. */
struct fake_device {
    struct {
        uint8_t *memory;
        size_t n_bytes;
    } has[4];
    uint32_t n_shown, n_hidden;
};

static size_t show(void *context, void *memory, size_t n_bytes)
{
    struct fake_device *device = context;
    for (uint32_t i = 0; i < 4; i++)
        if (device->has[i].memory == NULL) {
            device->has[i].memory = memory;
            device->has[i].n_bytes = n_bytes;
            device->n_shown++;
            return n_bytes - 4096;
        }
    fail();
    return 0;
}

static void hide(void *context, void *memory, size_t n_bytes)
{
    struct fake_device *device = context;
    for (uint32_t i = 0; i < 4; i++)
        if (device->has[i].memory == memory && device->has[i].n_bytes == n_bytes) {
            assert_int_equal(((const struct exchange_header *)memory)->magic, EXCHANGE_MAGIC); /* or it crashes here */
            device->has[i].memory = NULL;
            device->n_hidden++;
            return;
        }
    fail();
}

static void a_device_knows_of_every_exchange(void **state)
{
    (void)state;
    struct stores stores;
    struct segment_mapping segment;
    struct fake_device device = {0};
    stores_init(&stores, &shape, 1, 4096, 8192);
    stores.device = (struct stores_device){.show = show, .hide = hide, .context = &device};
    int fd = make_segment(&shape, &segment), exchange = -1;
    assert_true(stores_up(&stores, 0, 1, 1, -1, &exchange) < 0);
    assert_int_equal(device.n_shown, 0);
    for (uint64_t i = 0; i < 3; i++) {
        assert_int_equal(stores_up(&stores, (uint32_t)i, 10 + i, 20 + i, fd, &exchange), 0);
        close(exchange);
        const struct store *store = stores_get(&stores, (uint32_t)i);
        assert_int_equal(store->shown_bytes, store->exchange.n_bytes - 4096);
    }
    assert_int_equal(stores_up(&stores, 1, 31, 32, fd, &exchange), 0); /* another life */
    close(exchange);
    assert_int_equal(device.n_shown, 4);
    assert_int_equal(device.n_hidden, 1);
    stores_down(&stores, 2, 12); /* stays mapped */
    stores_remove(&stores, 2, 11);
    assert_int_equal(device.n_hidden, 1);
    stores_remove(&stores, 2, 12);
    assert_int_equal(device.n_hidden, 2);
    stores_fini(&stores);
    assert_int_equal(device.n_hidden, 4);
    close(fd);
    segment_unmap(&segment);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_handle_reaches_only_its_own_block),
        cmocka_unit_test(a_segment_that_is_none_is_refused),
        cmocka_unit_test(a_quarantined_slot_comes_back_when_it_is_answered),
        cmocka_unit_test(a_device_knows_of_every_exchange),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
