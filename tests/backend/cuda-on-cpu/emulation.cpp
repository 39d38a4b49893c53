/*
 * emulation.cpp - launches, fibres, barriers and warp operations; see emulation.h.
 *
 * Threads    one host thread launches; the state below is its own.
 * Invariant  a fibre is ready, or waits at a barrier, or waits in its warp, or is done; the scheduler runs until all are done,
 *            and a state from which none can go on is an error of the kernel.
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

#include <vector>

#define MAX_THREADS 1024u
#define PAGE_BYTES  4096u
#if defined(__SANITIZE_ADDRESS__)
#define STACK_BYTES (256u * 1024u)
#else
#define STACK_BYTES (64u * 1024u)
#endif

enum state { READY, AT_BARRIER, IN_WARP, DONE };

struct fibre {
    struct emulation_thread thread; /* first: emulation_thread points here */
    enum state state;
    unsigned int number, warp;
    const char *file; /* where it waits */
    int line;
    int predicate;
    unsigned int mask;
    uint64_t value, argument, result;
    emulation_combine *combine;
    unsigned char *stack; /* STACK_BYTES, a page below that cannot be touched */
#if defined(__x86_64__)
    void *stack_pointer;
#else
    ucontext_t context;
#endif
    void *fake_stack; /* of the address sanitizer */
};

struct emulation_place emulation_place;
struct emulation_thread *emulation_thread;

static struct fibre fibres[MAX_THREADS];
static std::vector<unsigned int> ready; /* fibres that can go on */
static size_t first_ready;              /* those before it have been taken (in order only) */
static unsigned int n_threads, n_done, n_at_barrier;
static unsigned int lanes_waiting[MAX_THREADS / 32];
static uint64_t random_state; /* 0: in order */
static const char *kernel_name;
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

/* ---- fibres: the scheduler switches to one, it switches back ---- */

#if defined(__SANITIZE_ADDRESS__)
static const void *scheduler_stack;
static size_t scheduler_stack_bytes;
static void *scheduler_fake_stack;
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

static void switch_to_fibre(struct fibre *fibre)
{
    emulation_thread = &fibre->thread;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&scheduler_fake_stack, fibre->stack, STACK_BYTES);
#endif
#if defined(__x86_64__)
    emulation_switch(&scheduler_stack_pointer, fibre->stack_pointer);
#else
    swapcontext(&scheduler_context, &fibre->context);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(scheduler_fake_stack, NULL, NULL);
#endif
    emulation_thread = NULL;
}

static void switch_to_scheduler(struct fibre *fibre)
{
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(fibre->state == DONE ? NULL : &fibre->fake_stack, scheduler_stack,
                                   scheduler_stack_bytes);
#endif
#if defined(__x86_64__)
    emulation_switch(&fibre->stack_pointer, scheduler_stack_pointer);
#else
    swapcontext(&fibre->context, &scheduler_context);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fibre->fake_stack, &scheduler_stack, &scheduler_stack_bytes);
#endif
}

/* Not instrumented: it never returns, and what it left marked on the stack would be found by the fibre's next life. */
__attribute__((no_sanitize_address)) static void fibre_main(void)
{
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(NULL, &scheduler_stack, &scheduler_stack_bytes);
#endif
    thread_call(thread_context);
    struct fibre *fibre = (struct fibre *)emulation_thread;
    fibre->state = DONE;
    n_done++;
    switch_to_scheduler(fibre);
    abort(); /* nobody goes on with what is done */
}

static void fibre_start(struct fibre *fibre)
{
    if (!fibre->stack) {
        unsigned char *memory = (unsigned char *)mmap(NULL, PAGE_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, PAGE_BYTES, PROT_NONE) != 0)
            emulation_fail("no memory for the stack of a thread");
        fibre->stack = memory + PAGE_BYTES;
    }
#if defined(__x86_64__)
    /* as a call of fibre_main() would leave it, under six registers of any content */
    void **top = (void **)(void *)(fibre->stack + STACK_BYTES);
    top[-1] = NULL;
    top[-2] = (void *)fibre_main;
    memset(top - 8, 0, 6 * sizeof *top);
    fibre->stack_pointer = top - 8;
#else
    getcontext(&fibre->context);
    fibre->context.uc_stack.ss_sp = fibre->stack;
    fibre->context.uc_stack.ss_size = STACK_BYTES;
    fibre->context.uc_link = NULL;
    makecontext(&fibre->context, fibre_main, 0);
#endif
    fibre->state = READY;
    fibre->fake_stack = NULL;
}

/* ---- barriers and warps ---- */

static struct fibre *wait_in(enum state state, const char *file, int line)
{
    struct fibre *fibre = (struct fibre *)emulation_thread;
    fibre->state = state;
    fibre->file = file;
    fibre->line = line;
    return fibre;
}

static void wake(struct fibre *fibre)
{
    fibre->state = READY;
    ready.push_back(fibre->number);
}

static const char *base_name(const char *file)
{
    const char *slash = strrchr(file, '/');
    return slash ? slash + 1 : file;
}

unsigned int emulation_barrier(int predicate, const char *file, int line)
{
    struct fibre *self = wait_in(AT_BARRIER, file, line);
    self->predicate = predicate;
    if (++n_at_barrier == n_threads) {
        unsigned int n = 0;
        for (unsigned int i = 0; i < n_threads; i++) {
            if (fibres[i].line != line || strcmp(fibres[i].file, file) != 0)
                emulation_fail("threads of one block are at different barriers: this one at %s:%d, thread %u at %s:%d",
                               base_name(file), line, i, base_name(fibres[i].file), fibres[i].line);
            n += fibres[i].predicate != 0;
        }
        n_at_barrier = 0;
        for (unsigned int i = 0; i < n_threads; i++) {
            fibres[i].result = n;
            wake(&fibres[i]);
        }
    }
    switch_to_scheduler(self);
    return (unsigned int)self->result;
}

uint64_t emulation_warp(unsigned int mask, uint64_t value, uint64_t argument, emulation_combine *combine,
                        const char *file, int line)
{
    struct fibre *self = wait_in(IN_WARP, file, line);
    struct fibre *lanes = &fibres[self->warp * 32];
    self->mask = mask;
    self->value = value;
    self->argument = argument;
    self->combine = combine;
    if (!(mask >> self->thread.lane & 1))
        emulation_fail("a warp operation at %s:%d by a lane that is not in its mask %08x", base_name(file), line, mask);
    unsigned int *waiting = &lanes_waiting[self->warp];
    *waiting |= 1u << self->thread.lane;
    if ((*waiting & mask) == mask) {
        uint64_t values[32];
        for (unsigned int lane = 0; lane < 32; lane++) {
            if (!(mask >> lane & 1))
                continue;
            const struct fibre *other = &lanes[lane];
            if (other->line != line || other->mask != mask || strcmp(other->file, file) != 0)
                emulation_fail(
                    "lanes of mask %08x are at different warp operations: this one at %s:%d, lane %u at %s:%d "
                    "with mask %08x",
                    mask, base_name(file), line, lane, base_name(other->file), other->line, other->mask);
            values[lane] = other->value;
        }
        *waiting &= ~mask;
        for (unsigned int lane = 0; lane < 32; lane++) {
            if (!(mask >> lane & 1))
                continue;
            lanes[lane].result = combine(values, mask, lane, lanes[lane].argument);
            wake(&lanes[lane]);
        }
    }
    switch_to_scheduler(self);
    return self->result;
}

/* No fibre can go on: say who waits for whom. */
[[noreturn]] static void fail_stuck(void)
{
    for (unsigned int i = 0; i < n_threads; i++) {
        const struct fibre *fibre = &fibres[i];
        if (fibre->state == IN_WARP)
            emulation_fail(
                "thread %u waits at %s:%d for lanes of mask %08x that do not come (%u of %u threads are done, "
                "%u at a barrier)",
                i, base_name(fibre->file), fibre->line, fibre->mask, n_done, n_threads, n_at_barrier);
    }
    for (unsigned int i = 0; i < n_threads; i++) {
        const struct fibre *fibre = &fibres[i];
        if (fibre->state == AT_BARRIER)
            emulation_fail("thread %u waits at the barrier %s:%d, which %u of %u threads do not reach", i,
                           base_name(fibre->file), fibre->line, n_threads - n_at_barrier, n_threads);
    }
    abort();
}

static unsigned int take_ready(void)
{
    if (!random_state) {
        const unsigned int number = ready[first_ready++];
        if (first_ready == ready.size()) {
            ready.clear();
            first_ready = 0;
        }
        return number;
    }
    const size_t at = next_random() % ready.size();
    const unsigned int number = ready[at];
    ready[at] = ready.back();
    ready.pop_back();
    return number;
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
    const dim3 block = emulation_place.block;
    n_done = n_at_barrier = 0;
    ready.clear();
    first_ready = 0;
    memset(lanes_waiting, 0, sizeof lanes_waiting);
    for (unsigned int i = 0; i < n_threads; i++) {
        struct fibre *fibre = &fibres[i];
        fibre_start(fibre);
        fibre->number = i;
        fibre->warp = i / 32;
        fibre->thread.lane = i % 32;
        fibre->thread.index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
        ready.push_back(i);
    }
    while (n_done < n_threads) {
        if (ready.empty())
            fail_stuck();
        switch_to_fibre(&fibres[take_ready()]);
    }
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
    emulation_check_guards("after the launch");
    kernel_name = NULL;
}
