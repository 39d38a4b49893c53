/*
 * emulation.cpp - launches, fibres, barriers and warp operations; see emulation.h.
 *
 * Threads    one host thread launches; the state below is its own.
 * Invariant  a fibre has not started, or is ready, or waits at a barrier, or waits in its warp, or is done; a fibre that waits
 *            or is done switches to the next one, until all are done. A state from which none can go on is an error of the kernel.
 * Cost       a thread that never waits is a call: it leaves its stack to the next. One that waits costs a switch.
 */
#include "tests/backend/cuda-on-cpu/emulation.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define MAX_THREADS 1024u
#define WARP        32u
#define MAX_WARPS   (MAX_THREADS / WARP)
#define PAGE_BYTES  4096u
#if defined(__SANITIZE_ADDRESS__)
#define STACK_BYTES (256u * 1024u)
#else
#define STACK_BYTES (64u * 1024u)
#endif
/* Stacks begin at different lines of the first cache, which so many of them would share otherwise. */
#define N_COLOURS    16u
#define COLOUR_BYTES 256u

enum state { NOT_STARTED, READY, AT_BARRIER, IN_WARP, DONE };

/* What a fibre runs on; one that is done leaves it to the next that starts. */
struct stack {
    unsigned char *memory; /* STACK_BYTES, a page below that cannot be touched */
    unsigned char *top;
};

/* A barrier or a warp operation in the source. */
struct place {
    const char *file;
    int line;

    bool operator==(const place &other) const
    {
        return line == other.line && (file == other.file || strcmp(file, other.file) == 0);
    }
};

struct fibre {
    struct emulation_thread thread; /* first: emulation_thread points here */
    enum state state;
    unsigned int number;
    struct place at; /* where it waits */
    unsigned int mask;
    struct stack *stack;
#if defined(__x86_64__)
    void *stack_pointer;
#else
    ucontext_t context;
#endif
    void *fake_stack; /* of the address sanitizer */
};

/* The warp operation of the lanes that wait: values that they brought, results that they get. */
struct warp {
    unsigned int ready, waiting; /* lanes */
    bool is_one;                 /* all that wait do so at one place with one mask */
    unsigned int mask;           /* of the first one */
    struct place at;
    uint64_t values[WARP], arguments[WARP], results[WARP];
};

struct emulation_place emulation_place;
struct emulation_thread *emulation_thread;

static struct fibre fibres[MAX_THREADS];
static struct warp warps[MAX_WARPS];
static unsigned int ready_warps; /* those with ready lanes */
static unsigned int n_threads, n_done;
static struct {
    unsigned int n_waiting, n_true, result, first; /* first: the thread that came first */
    struct place at;
} barrier;
static struct stack stacks[MAX_THREADS], *free_stacks[MAX_THREADS];
static unsigned int n_stacks, n_free_stacks;
static uint64_t random_state;                 /* 0: in order */
static const char *kernel_name, *last_kernel; /* that runs; that ran last since somebody waited */
static void (*thread_call)(const void *call);
static const void *thread_context;

extern "C" void emulation_set_seed(uint64_t seed)
{
    random_state = seed;
}

/* xorshift64* */
static uint64_t next_random(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (random_state * 2685821657736338717u) >> 20;
}

extern "C" void emulation_fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "cuda-on-cpu: ");
    if (kernel_name) {
        const uint3 b = emulation_place.block_index;
        fprintf(stderr, "kernel %s, block (%u, %u, %u)", kernel_name, b.x, b.y, b.z);
        if (emulation_thread) {
            const uint3 t = emulation_thread->index;
            fprintf(stderr, ", thread (%u, %u, %u)", t.x, t.y, t.z);
        }
        fprintf(stderr, ": ");
    }
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    abort();
}

/* ---- which fibre is next ---- */

static void wake(unsigned int number)
{
    warps[number / WARP].ready |= 1u << number % WARP;
    ready_warps |= 1u << number / WARP;
}

static unsigned int random_bit(unsigned int bits)
{
    for (unsigned int n = (unsigned int)next_random() % (unsigned int)__builtin_popcount(bits); n; n--)
        bits &= bits - 1;
    return (unsigned int)__builtin_ctz(bits);
}

static const char *base_name(const char *file)
{
    const char *slash = strrchr(file, '/');
    return slash ? slash + 1 : file;
}

/* No fibre can go on: say who waits for whom. */
[[noreturn]] static void fail_stuck(void)
{
    emulation_thread = NULL;
    for (unsigned int i = 0; i < n_threads; i++) {
        const struct fibre *fibre = &fibres[i];
        if (fibre->state == IN_WARP)
            emulation_fail(
                "thread %u waits at %s:%d for lanes of mask %08x that do not come (%u of %u threads are done, "
                "%u at a barrier)",
                i, base_name(fibre->at.file), fibre->at.line, fibre->mask, n_done, n_threads, barrier.n_waiting);
    }
    emulation_fail("thread %u waits at the barrier %s:%d, which %u of %u threads do not reach", barrier.first,
                   base_name(barrier.at.file), barrier.at.line, n_threads - barrier.n_waiting, n_threads);
}

/* In order, the warp that ran goes on as long as it can: its stacks are in the cache. */
static struct fibre *take_ready(unsigned int last_warp)
{
    if (!ready_warps)
        fail_stuck();
    unsigned int w = last_warp;
    if (random_state)
        w = random_bit(ready_warps);
    else if (!(ready_warps >> w & 1))
        w = (unsigned int)__builtin_ctz(ready_warps);
    struct warp *warp = &warps[w];
    const unsigned int lane = random_state ? random_bit(warp->ready) : (unsigned int)__builtin_ctz(warp->ready);
    warp->ready &= ~(1u << lane);
    if (!warp->ready)
        ready_warps &= ~(1u << w);
    return &fibres[w * WARP + lane];
}

/* ---- fibres: one switches to the next, the last one to the scheduler ---- */

#if defined(__SANITIZE_ADDRESS__)
static const void *scheduler_stack;
static size_t scheduler_stack_bytes;
static void *scheduler_fake_stack;
static bool from_scheduler;
#endif

#if defined(__x86_64__)
static void *scheduler_stack_pointer;
/* Saves the registers that a call keeps on the stack, whose end it leaves in *save; goes on from `to`. */
extern "C" void emulation_switch(void **save, void *to);
asm(".text\n"
    ".p2align 4\n"
    ".type emulation_switch, @function\n"
    "emulation_switch:\n"
    "    pushq %rbp\n"
    "    pushq %rbx\n"
    "    pushq %r12\n"
    "    pushq %r13\n"
    "    pushq %r14\n"
    "    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n"
    "    popq %r14\n"
    "    popq %r13\n"
    "    popq %r12\n"
    "    popq %rbx\n"
    "    popq %rbp\n"
    "    ret\n"
    ".size emulation_switch, . - emulation_switch\n");
#else
static ucontext_t scheduler_context;
#endif

static void fibre_main(void);

static struct stack *take_stack(void)
{
    if (n_free_stacks)
        return free_stacks[--n_free_stacks];
    struct stack *stack = &stacks[n_stacks];
    unsigned char *memory = (unsigned char *)mmap(NULL, PAGE_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, PAGE_BYTES, PROT_NONE) != 0)
        emulation_fail("no memory for the stack of a thread");
    stack->memory = memory + PAGE_BYTES;
    stack->top = stack->memory + STACK_BYTES - n_stacks % N_COLOURS * COLOUR_BYTES;
    n_stacks++;
    return stack;
}

/* It begins on a stack of its own. */
static void fibre_start(struct fibre *fibre)
{
    fibre->stack = take_stack();
    fibre->fake_stack = NULL;
#if defined(__x86_64__)
    /* as a call of fibre_main() would leave it, under six registers of any content */
    void **top = (void **)(void *)fibre->stack->top;
    top[-1] = NULL;
    top[-2] = (void *)fibre_main;
    fibre->stack_pointer = top - 8;
#else
    getcontext(&fibre->context);
    fibre->context.uc_stack.ss_sp = fibre->stack->memory;
    fibre->context.uc_stack.ss_size = (size_t)(fibre->stack->top - fibre->stack->memory);
    fibre->context.uc_link = NULL;
    makecontext(&fibre->context, fibre_main, 0);
#endif
}

/* From a fibre (NULL: the scheduler) to another (NULL: the scheduler); comes back when somebody switches here. */
static void switch_fibres(struct fibre *from, struct fibre *to)
{
    if (to && to->state == NOT_STARTED)
        fibre_start(to);
    if (to)
        to->state = READY;
    emulation_thread = to ? &to->thread : NULL;
#if defined(__SANITIZE_ADDRESS__)
    void **fake_stack = !from ? &scheduler_fake_stack : from->state == DONE ? NULL : &from->fake_stack;
    from_scheduler = !from;
    if (to)
        __sanitizer_start_switch_fiber(fake_stack, to->stack->memory, STACK_BYTES);
    else
        __sanitizer_start_switch_fiber(fake_stack, scheduler_stack, scheduler_stack_bytes);
#endif
#if defined(__x86_64__)
    emulation_switch(from ? &from->stack_pointer : &scheduler_stack_pointer,
                     to ? to->stack_pointer : scheduler_stack_pointer);
#else
    swapcontext(from ? &from->context : &scheduler_context, to ? &to->context : &scheduler_context);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from ? from->fake_stack : scheduler_fake_stack, NULL, NULL);
#endif
}

/* Threads one after the other on one stack, as long as the next has not begun on another. Not instrumented: it never returns,
 * and what it left marked on the stack would be found by the stack's next life. */
__attribute__((no_sanitize_address)) static void fibre_main(void)
{
#if defined(__SANITIZE_ADDRESS__)
    const void *stack;
    size_t n_bytes;
    __sanitizer_finish_switch_fiber(NULL, &stack, &n_bytes);
    if (from_scheduler) {
        scheduler_stack = stack;
        scheduler_stack_bytes = n_bytes;
    }
#endif
    for (;;) {
        thread_call(thread_context);
        struct fibre *fibre = (struct fibre *)emulation_thread, *next = NULL;
        fibre->state = DONE;
        if (++n_done < n_threads)
            next = take_ready(fibre->number / WARP);
        if (next && next->state == NOT_STARTED) {
            next->stack = fibre->stack;
            next->state = READY;
            next->fake_stack = NULL;
            emulation_thread = &next->thread;
            continue;
        }
        free_stacks[n_free_stacks++] = fibre->stack;
        switch_fibres(fibre, next); /* and nobody comes back to what is done */
    }
}

/* ---- barriers and warps ---- */

static struct fibre *wait_in(enum state state, struct place at)
{
    struct fibre *fibre = (struct fibre *)emulation_thread;
    fibre->state = state;
    fibre->at = at;
    return fibre;
}

/* The last one that came; the others were woken. At random it is one of them; in order it goes on at once. */
static void go_on(struct fibre *self)
{
    if (random_state) {
        wake(self->number);
        struct fibre *next = take_ready(0);
        if (next != self)
            switch_fibres(self, next);
    }
    self->state = READY;
}

static void wait_for_others(struct fibre *self)
{
    switch_fibres(self, take_ready(self->number / WARP));
}

unsigned int emulation_barrier(int predicate, const char *file, int line)
{
    struct fibre *self = wait_in(AT_BARRIER, {file, line});
    if (!barrier.n_waiting++) {
        barrier.first = self->number;
        barrier.at = self->at;
        barrier.n_true = 0;
    } else if (!(barrier.at == self->at)) {
        emulation_fail("threads of one block are at different barriers: this one at %s:%d, thread %u at %s:%d",
                       base_name(file), line, barrier.first, base_name(barrier.at.file), barrier.at.line);
    }
    barrier.n_true += predicate != 0;
    if (barrier.n_waiting < n_threads) {
        wait_for_others(self);
        return barrier.result;
    }
    barrier.n_waiting = 0;
    barrier.result = barrier.n_true; /* all read it before they come to the next one */
    for (unsigned int i = 0; i < n_threads; i++)
        if (i != self->number)
            wake(i);
    go_on(self);
    return barrier.result;
}

/* The lanes are at one place with one mask, or it is the kernel's mistake. */
static void check_lanes(const struct fibre *lanes, const struct fibre *self)
{
    for (unsigned int lane = 0; lane < WARP; lane++) {
        const struct fibre *other = &lanes[lane];
        if ((self->mask >> lane & 1) && (!(other->at == self->at) || other->mask != self->mask))
            emulation_fail("lanes of mask %08x are at different warp operations: this one at %s:%d, lane %u at %s:%d "
                           "with mask %08x",
                           self->mask, base_name(self->at.file), self->at.line, lane, base_name(other->at.file),
                           other->at.line, other->mask);
    }
}

uint64_t emulation_warp(unsigned int mask, uint64_t value, uint64_t argument, emulation_combine *combine,
                        const char *file, int line)
{
    struct fibre *self = wait_in(IN_WARP, {file, line});
    const unsigned int lane = self->thread.lane, me = 1u << lane, number = self->number / WARP;
    struct warp *warp = &warps[number];
    if (!(mask & me))
        emulation_fail("a warp operation at %s:%d by a lane that is not in its mask %08x", base_name(file), line, mask);
    self->mask = mask;
    warp->values[lane] = value;
    warp->arguments[lane] = argument;
    if (!warp->waiting) {
        warp->is_one = true;
        warp->mask = mask;
        warp->at = self->at;
    } else if (warp->is_one) {
        warp->is_one = warp->mask == mask && warp->at == self->at;
    }
    warp->waiting |= me;
    if ((warp->waiting & mask) != mask) {
        wait_for_others(self);
        return warp->results[lane];
    }
    if (!warp->is_one)
        check_lanes(&fibres[number * WARP], self);
    warp->waiting &= ~mask;
    combine(warp->values, warp->arguments, mask, warp->results);
    if (mask != me) {
        warp->ready |= mask & ~me;
        ready_warps |= 1u << number;
    }
    go_on(self);
    return warp->results[lane];
}

/* ---- launches ---- */

#if !defined(__SANITIZE_ADDRESS__)
extern unsigned char shared_begin[] asm("__start_emulated_shared") __attribute__((weak));
extern unsigned char shared_end[] asm("__stop_emulated_shared") __attribute__((weak));
#endif

static void run_block(size_t dynamic_bytes)
{
#if !defined(__SANITIZE_ADDRESS__)
    if (shared_begin)
        memset(shared_begin, 0xff, (size_t)(shared_end - shared_begin));
#endif
    memset(emulation_place.dynamic_shared, 0xff, dynamic_bytes);
    n_done = barrier.n_waiting = 0;
    for (unsigned int i = 0; i < n_threads; i++)
        fibres[i].state = NOT_STARTED;
    for (unsigned int first = 0; first < n_threads; first += WARP) {
        struct warp *warp = &warps[first / WARP];
        warp->waiting = 0;
        warp->ready = n_threads - first < WARP ? (1u << (n_threads - first)) - 1 : ~0u;
        ready_warps |= 1u << first / WARP;
    }
    switch_fibres(NULL, take_ready(0));
}

cudaError_t emulation_check_launch(const struct emulation_kernel *kernel)
{
    const dim3 grid = kernel->grid, block = kernel->block;
    if (kernel_name)
        emulation_fail("a kernel launches %s", kernel->name);
    if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z ||
        (uint64_t)block.x * block.y * block.z > MAX_THREADS || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
        return cudaErrorInvalidConfiguration;
    return kernel->shared_bytes > emulation_shared_limit(kernel->function) ? cudaErrorInvalidValue : cudaSuccess;
}

void emulation_run(const struct emulation_kernel *kernel, const void *call)
{
    const dim3 grid = kernel->grid, block = kernel->block;
    const uint64_t n_blocks = (uint64_t)grid.x * grid.y * grid.z;
    const size_t shared_bytes = kernel->shared_bytes;
    n_threads = block.x * block.y * block.z;
    for (unsigned int i = 0; i < n_threads; i++) {
        fibres[i].number = i;
        fibres[i].thread.lane = i % WARP;
        fibres[i].thread.index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
    }
    kernel_name = kernel->name;
    thread_call = kernel->thread;
    thread_context = call;
    emulation_place.grid = grid;
    emulation_place.block = block;
    emulation_place.dynamic_shared = (unsigned char *)emulation_guarded_alloc(shared_bytes);

    /* at random: from a random block on, by a random odd step through a power of two */
    uint64_t n_places = 1;
    while (n_places < n_blocks)
        n_places *= 2;
    const uint64_t first = random_state ? next_random() : 0, step = random_state ? next_random() | 1 : 1;
    for (uint64_t place = 0; place < n_places; place++) {
        const uint64_t i = (first + place * step) % n_places;
        if (i >= n_blocks)
            continue;
        emulation_place.block_index = {(unsigned int)(i % grid.x), (unsigned int)(i / grid.x % grid.y),
                                       (unsigned int)(i / grid.x / grid.y)};
        run_block(shared_bytes);
    }
    emulation_guarded_free(emulation_place.dynamic_shared, "dynamic shared memory");
    emulation_place.dynamic_shared = NULL;
    emulation_check_guards(false, "after the launch");
    last_kernel = kernel_name;
    kernel_name = NULL;
}

void emulation_waited(void)
{
    char when[256];
    if (!last_kernel)
        return;
    snprintf(when, sizeof when, "after launches, the last of them of kernel %s", last_kernel);
    emulation_check_guards(true, when);
    last_kernel = NULL;
}
