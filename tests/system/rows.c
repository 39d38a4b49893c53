#include "tests/system/rows.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/layout.h"

/* Maps the segment that a store's process holds; NULL: this descriptor is none. */
static const struct segment_header *map_if_segment(const char *path)
{
    struct stat status;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    const struct segment_header *header = NULL;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && (size_t)status.st_size > LAYOUT_PAGE_BYTES) {
        void *address = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, fd, 0);
        assert_ptr_not_equal(address, MAP_FAILED);
        if (layout_check_segment(address, (uint64_t)status.st_size) == 0)
            header = address;
        else
            munmap(address, (size_t)status.st_size);
    }
    close(fd);
    return header;
}

static const struct segment_header *map_store(struct service *service, uint32_t store)
{
    char directory[64], path[384], link[128];
    snprintf(directory, sizeof(directory), "/proc/%d/fd", (int)service_process(service, "hc-value-store", store));
    DIR *entries = opendir(directory);
    assert_non_null(entries);
    const struct segment_header *header = NULL;
    for (struct dirent *entry; header == NULL && (entry = readdir(entries)) != NULL;) {
        snprintf(path, sizeof(path), "%s/%s", directory, entry->d_name);
        ssize_t n = readlink(path, link, sizeof(link) - 1);
        if (n > 0 && strncmp(link, "/memfd:", 7) == 0)
            header = map_if_segment(path);
    }
    closedir(entries);
    assert_non_null(header);
    return header;
}

uint8_t *rows_of_session(struct service *service, uint32_t n_stores, uint64_t session, uint32_t n_tokens,
                         size_t *ret_n_bytes)
{
    uint32_t n_blocks = (n_tokens + LAYOUT_BLOCK_TOKENS - 1) / LAYOUT_BLOCK_TOKENS, n_found = 0;
    uint8_t *rows = NULL;
    size_t token_bytes = 0;
    for (uint32_t store = 0; store < n_stores; store++) {
        const struct segment_header *header = map_store(service, store);
        const struct row_shape *shape = &header->shape;
        uint64_t row = layout_row_bytes(shape);
        token_bytes = shape->n_layers * shape->n_kv_heads * row;
        if (rows == NULL)
            rows = calloc((size_t)n_blocks * LAYOUT_BLOCK_TOKENS, token_bytes);
        for (uint32_t i = 0; i < header->n_blocks; i++) {
            const struct block_header *block = layout_block(header, i);
            if (block->magic != BLOCK_MAGIC || block->session != session || atomic_load(&block->state) == BLOCK_FREE ||
                block->number >= n_blocks)
                continue;
            uint32_t n = n_tokens - block->number * LAYOUT_BLOCK_TOKENS;
            n = n < LAYOUT_BLOCK_TOKENS ? n : LAYOUT_BLOCK_TOKENS;
            uint8_t *to = rows + (size_t)block->number * LAYOUT_BLOCK_TOKENS * token_bytes;
            for (uint32_t layer = 0; layer < shape->n_layers; layer++) {
                assert_true(atomic_load(&block->n_rows[layer]) >= n);
                for (uint32_t head = 0; head < shape->n_kv_heads; head++, to += n * row)
                    memcpy(to, (const uint8_t *)block + layout_head_rows_offset(shape, layer, head), n * row);
            }
            n_found++;
        }
        munmap((void *)(uintptr_t)header, header->n_bytes);
    }
    assert_int_equal(n_found, n_blocks);
    *ret_n_bytes = (size_t)n_blocks * LAYOUT_BLOCK_TOKENS * token_bytes;
    return rows;
}

uint32_t rows_n_used_blocks(struct service *service, uint32_t n_stores)
{
    uint32_t n = 0;
    for (uint32_t store = 0; store < n_stores; store++) {
        const struct segment_header *header = map_store(service, store);
        for (uint32_t i = 0; i < header->n_blocks; i++)
            n += atomic_load(&layout_block(header, i)->state) != BLOCK_FREE;
        munmap((void *)(uintptr_t)header, header->n_bytes);
    }
    return n;
}
