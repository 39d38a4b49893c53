/*
 * merger.c - a linked list of symbols and a binary heap of candidate pairs; out-of-date pairs are dropped when popped.
 */
#include "gpu-worker/model/merger.h"

#include <errno.h>
#include <stdlib.h>

void merger_fini(struct merger *merger)
{
    free(merger->symbols);
    free(merger->heap);
    *merger = (struct merger){0};
}

void merger_clear(struct merger *merger)
{
    merger->n_symbols = 0;
    merger->n_pairs = 0;
}

static int grow(void **memory, size_t *capacity, size_t element_bytes)
{
    size_t larger = *capacity ? *capacity * 2 : 64;
    void *moved = reallocarray(*memory, larger, element_bytes);
    if (!moved)
        return -ENOMEM;
    *memory = moved;
    *capacity = larger;
    return 0;
}

int merger_add(struct merger *merger, uint32_t n_bytes, uint32_t id)
{
    uint32_t index = (uint32_t)merger->n_symbols, start = 0;
    if (merger->n_symbols == merger->symbols_capacity &&
        grow((void **)&merger->symbols, &merger->symbols_capacity, sizeof merger->symbols[0]))
        return -ENOMEM;
    if (index > 0) {
        struct merger_symbol *last = &merger->symbols[index - 1];
        last->next = index;
        start = last->start + last->n_bytes;
    }
    merger->symbols[index] = (struct merger_symbol){
        .start = start,
        .n_bytes = n_bytes,
        .id = id,
        .previous = index > 0 ? index - 1 : MERGER_NONE,
        .next = MERGER_NONE,
    };
    merger->n_symbols++;
    return 0;
}

static bool comes_before(const struct merger_pair *a, const struct merger_pair *b)
{
    return a->priority != b->priority ? a->priority < b->priority : a->left < b->left;
}

static int push(struct merger *merger, struct merger_pair pair)
{
    if (merger->n_pairs == merger->heap_capacity &&
        grow((void **)&merger->heap, &merger->heap_capacity, sizeof merger->heap[0]))
        return -ENOMEM;
    size_t hole = merger->n_pairs++;
    while (hole > 0) {
        size_t parent = (hole - 1) / 2;
        if (!comes_before(&pair, &merger->heap[parent]))
            break;
        merger->heap[hole] = merger->heap[parent];
        hole = parent;
    }
    merger->heap[hole] = pair;
    return 0;
}

static struct merger_pair pop(struct merger *merger)
{
    struct merger_pair *heap = merger->heap;
    struct merger_pair first = heap[0], last = heap[--merger->n_pairs];
    size_t hole = 0, n = merger->n_pairs;
    for (;;) {
        size_t child = 2 * hole + 1;
        if (child >= n)
            break;
        if (child + 1 < n && comes_before(&heap[child + 1], &heap[child]))
            child++;
        if (!comes_before(&heap[child], &last))
            break;
        heap[hole] = heap[child];
        hole = child;
    }
    heap[hole] = last;
    return first;
}

struct rule {
    merger_rule applies;
    const void *context;
    const char *word;
};

static int note(struct merger *merger, const struct rule *rule, uint32_t left, uint32_t right)
{
    if (left == MERGER_NONE || right == MERGER_NONE)
        return 0;
    const struct merger_symbol *a = &merger->symbols[left], *b = &merger->symbols[right];
    struct merger_pair pair = {.left = left, .right = right, .n_bytes = a->n_bytes + b->n_bytes};
    if (!rule->applies(rule->context, rule->word, a, b, &pair.priority, &pair.id))
        return 0;
    return push(merger, pair);
}

int merger_run(struct merger *merger, const char *word, merger_rule applies, const void *context)
{
    struct rule rule = {applies, context, word};
    for (uint32_t i = 1; i < merger->n_symbols; i++)
        if (note(merger, &rule, i - 1, i))
            return -ENOMEM;
    while (merger->n_pairs) {
        struct merger_pair pair = pop(merger);
        struct merger_symbol *left = &merger->symbols[pair.left], *right = &merger->symbols[pair.right];
        if (left->n_bytes == 0 || right->n_bytes == 0 || left->n_bytes + right->n_bytes != pair.n_bytes)
            continue;
        left->n_bytes = pair.n_bytes;
        left->id = pair.id;
        left->next = right->next;
        right->n_bytes = 0;
        if (right->next != MERGER_NONE)
            merger->symbols[right->next].previous = pair.left;
        if (note(merger, &rule, left->previous, pair.left) || note(merger, &rule, pair.left, left->next))
            return -ENOMEM;
    }
    return 0;
}
