/* Who is alive, who is known dead and by what, and which process is in the way of another. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "coordinator/registry.h"

#define HANG_US 1000000u

static struct registry *registry;
static char error[REGISTRY_ERROR_BYTES];
static int connection; /* any address */

static int setup(void **state)
{
    (void)state;
    return registry_new(6, &registry);
}

static int teardown(void **state)
{
    (void)state;
    registry = registry_free(registry);
    return 0;
}

static int add_process(enum process_role role, uint32_t index, uint64_t incarnation, int pidfd, struct process **ret)
{
    struct process given = {.role = role,
                            .index = index,
                            .incarnation = incarnation,
                            .pidfd = pidfd,
                            .own_pid = 4711,
                            .connection = &connection};
    return registry_add(registry, &given, 1000, ret, error);
}

static int add_supervisor(enum process_role supervises, uint32_t index, uint64_t incarnation, struct process **ret)
{
    struct process given = {.role = PROCESS_SUPERVISOR,
                            .supervises = supervises,
                            .index = index,
                            .incarnation = incarnation,
                            .pidfd = -1,
                            .connection = &connection};
    return registry_add(registry, &given, 1000, ret, error);
}

static void second_one_is_refused_by_name(void **state)
{
    (void)state;
    struct process *first, *second = NULL;
    assert_int_equal(add_process(PROCESS_STORE, 3, 11, -1, &first), 0);
    assert_int_equal(first->state, PROCESS_STARTING);
    assert_int_equal(add_process(PROCESS_STORE, 3, 12, -1, &second), -EEXIST);
    assert_null(second);
    assert_non_null(strstr(error, "value-store 3"));
    assert_non_null(strstr(error, "4711"));
    assert_int_equal(add_process(PROCESS_WORKER, 3, 12, -1, &second), 0); /* another role is another place */
    assert_ptr_equal(registry_find(registry, PROCESS_STORE, 3), first);
    assert_ptr_equal(registry_find_incarnation(registry, PROCESS_WORKER, 12), second);
}

static void what_is_no_process(void **state)
{
    (void)state;
    struct process *process;
    assert_int_equal(add_process(PROCESS_STORE, 0, 0, -1, &process), -EINVAL);
    assert_int_equal(add_process(PROCESS_STORE, REGISTRY_MAX_INDEX + 1, 1, -1, &process), -EINVAL);
    assert_int_equal(add_process(PROCESS_COORDINATOR, 0, 1, -1, &process), -EINVAL);
    for (uint32_t i = 0; i < 6; i++)
        assert_int_equal(add_process(PROCESS_STORE, i, i + 1, -1, &process), 0);
    assert_int_equal(add_process(PROCESS_STORE, 6, 7, -1, &process), -ENOSPC);
}

static void every_move_is_in_the_table(void **state)
{
    (void)state;
    static const bool legal[5][5] = {
        /* to:            starting ready  lost   fencing dead */
        [PROCESS_STARTING] = {false, true, true, true, true}, [PROCESS_READY] = {true, false, true, true, true},
        [PROCESS_LOST] = {true, false, false, true, true},    [PROCESS_FENCING] = {false, false, false, false, true},
        [PROCESS_DEAD] = {false, false, false, false, false},
    };
    for (int from = 0; from < 5; from++)
        for (int to = 0; to < 6; to++) {
            struct process process = {.state = (enum process_state)from};
            int expected = to < 5 && legal[from][to] ? 0 : -EPROTO;
            assert_int_equal(registry_move(&process, (enum process_state)to, 5), expected);
            assert_int_equal(process.state, expected == 0 ? to : from);
        }
}

static void hang_up_alone_is_death(void **state)
{
    (void)state;
    struct process *process, *next;
    assert_int_equal(add_process(PROCESS_STORE, 0, 1, -1, &process), 0);
    assert_int_equal(registry_hang_up(registry, process, 2000), PROCESS_DEAD);
    assert_null(process->connection);
    assert_int_equal(add_process(PROCESS_STORE, 0, 1, -1, &next), -EINVAL); /* its segment may be somebody else's now */
    assert_int_equal(add_process(PROCESS_STORE, 0, 2, -1, &next), 0);
    assert_false(registry_predecessor_alive(registry, next));
}

static void hang_up_is_not_death_with_a_pidfd(void **state)
{
    (void)state;
    struct process *process, *next;
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    close(ends[1]);
    assert_int_equal(add_process(PROCESS_STORE, 0, 1, ends[0], &process), 0);
    assert_int_equal(registry_hang_up(registry, process, 2000), PROCESS_LOST);
    /* a later life may come, but must wait */
    assert_int_equal(add_process(PROCESS_STORE, 0, 2, -1, &next), 0);
    assert_true(registry_predecessor_alive(registry, next));
    assert_ptr_equal(registry_find(registry, PROCESS_STORE, 0), next);
    assert_true(process->replaced);
    assert_true(registry_died(process, 3000));
    assert_false(registry_died(process, 3000)); /* known already */
    assert_false(registry_predecessor_alive(registry, next));
    registry_remove(registry, process);
    assert_null(registry_find_incarnation(registry, PROCESS_STORE, 1));
}

static void hang_up_is_not_death_with_a_supervisor(void **state)
{
    (void)state;
    struct process *process, *supervisor, *other;
    assert_int_equal(add_supervisor(PROCESS_WORKER, 1, 90, &supervisor), 0);
    assert_int_equal(add_supervisor(PROCESS_STORE, 1, 91, &other), 0); /* of another process: no conflict */
    assert_int_equal(add_process(PROCESS_WORKER, 1, 1, -1, &process), 0);
    assert_ptr_equal(registry_supervisor_of(registry, process), supervisor);
    assert_int_equal(registry_hang_up(registry, process, 2000), PROCESS_LOST);
    assert_null(registry_next_orphan(registry, 2500));
    /* the supervisor goes as well: the hang-up is what there is */
    assert_int_equal(registry_hang_up(registry, supervisor, 3000), PROCESS_DEAD);
    assert_ptr_equal(registry_next_orphan(registry, 3000), process);
    assert_int_equal(process->state, PROCESS_DEAD);
    assert_null(registry_next_orphan(registry, 3000));
}

static void same_life_comes_back(void **state)
{
    (void)state;
    struct process *supervisor, *process, *again, *next;
    assert_int_equal(add_supervisor(PROCESS_WORKER, 0, 90, &supervisor), 0);
    assert_int_equal(add_process(PROCESS_WORKER, 0, 1, -1, &process), 0);
    assert_int_equal(registry_move(process, PROCESS_READY, 1500), 0);
    assert_int_equal(registry_hang_up(registry, process, 2000), PROCESS_LOST);
    assert_int_equal(add_process(PROCESS_WORKER, 0, 1, -1, &again), 0);
    assert_ptr_equal(again, process);
    assert_int_equal(again->state, PROCESS_STARTING);
    /* but not once a later life has its place, nor once it is fenced */
    assert_int_equal(registry_hang_up(registry, again, 3000), PROCESS_LOST);
    assert_int_equal(add_process(PROCESS_WORKER, 0, 2, -1, &next), 0);
    assert_int_equal(add_process(PROCESS_WORKER, 0, 1, -1, &again), -EINVAL);
    assert_int_equal(registry_move(next, PROCESS_FENCING, 4000), 0);
    assert_int_equal(add_process(PROCESS_WORKER, 0, 2, -1, &again), -EINVAL);
    assert_non_null(strstr(error, "fencing"));
}

static void silence_is_a_hang(void **state)
{
    (void)state;
    struct process *process;
    assert_int_equal(add_process(PROCESS_WORKER, 0, 1, -1, &process), 0);
    assert_null(registry_judge(process, 1000 + HANG_US, HANG_US));
    assert_string_equal(registry_judge(process, 1001 + HANG_US, HANG_US), "no heartbeat");
    struct heartbeat idle = {.progress = 5, .phase = "idle"};
    registry_heard(process, &idle, 1000 + HANG_US);
    assert_null(registry_judge(process, 1000 + 2 * HANG_US, HANG_US));
}

static void work_without_progress_is_a_hang(void **state)
{
    (void)state;
    struct process *process;
    assert_int_equal(add_process(PROCESS_WORKER, 0, 1, -1, &process), 0);
    struct heartbeat step = {.progress = 5, .busy = true, .phase = "step"};
    uint64_t now = 1000;
    registry_heard(process, &step, now);
    for (int i = 0; i < 4; i++)
        registry_heard(process, &step, now += HANG_US / 4);
    assert_null(registry_judge(process, now, HANG_US));
    registry_heard(process, &step, now += HANG_US / 4);
    assert_string_equal(registry_judge(process, now, HANG_US), "busy without progress");
    step.progress++;
    registry_heard(process, &step, now);
    assert_null(registry_judge(process, now, HANG_US));
    /* idle time is no time without progress */
    struct heartbeat idle = {.progress = 6, .phase = "idle"};
    registry_heard(process, &idle, now += HANG_US);
    registry_heard(process, &step, now += HANG_US);
    assert_null(registry_judge(process, now, HANG_US));
}

static void loading_is_given_time(void **state)
{
    (void)state;
    struct process *process;
    assert_int_equal(add_process(PROCESS_WORKER, 0, 1, -1, &process), 0);
    struct heartbeat loading = {.progress = 1, .busy = true, .phase = "loading weights 42 %"};
    uint64_t now = 1000;
    registry_heard(process, &loading, now);
    uint64_t begin = now;
    for (uint32_t i = 0; i < REGISTRY_PATIENCE; i++)
        registry_heard(process, &loading, now += HANG_US);
    assert_int_equal(now - begin, REGISTRY_PATIENCE * HANG_US);
    assert_null(registry_judge(process, now, HANG_US));
    registry_heard(process, &loading, now += HANG_US);
    assert_non_null(registry_judge(process, now, HANG_US));
}

static void lost_for_long_is_fenced(void **state)
{
    (void)state;
    struct process *process, *supervisor;
    assert_int_equal(add_supervisor(PROCESS_STORE, 0, 90, &supervisor), 0);
    assert_int_equal(add_process(PROCESS_STORE, 0, 1, -1, &process), 0);
    assert_int_equal(registry_hang_up(registry, process, 5000), PROCESS_LOST);
    assert_null(registry_judge(process, 5000 + HANG_US, HANG_US));
    assert_non_null(registry_judge(process, 5001 + HANG_US, HANG_US));
    assert_null(registry_judge(supervisor, UINT64_MAX, HANG_US)); /* supervisors send no heartbeats */
}

static void bytes_are_counted_per_second(void **state)
{
    (void)state;
    struct process *process;
    uint64_t now = 5000000;
    assert_int_equal(add_process(PROCESS_STORE, 0, 11, -1, &process), 0);
    struct heartbeat heartbeat = {.phase = "idle", .bytes_served = 700};
    registry_heard(process, &heartbeat, now);
    assert_int_equal(process->bytes_per_s, 0); /* what it read before is of no known time */
    for (int i = 1; i <= 4; i++) {
        heartbeat.bytes_served += 3000;
        registry_heard(process, &heartbeat, now += 1000000);
    }
    assert_int_equal(process->bytes_per_s, 3000);
    for (int i = 0; i < 6; i++)
        registry_heard(process, &heartbeat, now += 1000000);
    assert_int_equal(process->bytes_per_s, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(bytes_are_counted_per_second, setup, teardown),
        cmocka_unit_test_setup_teardown(second_one_is_refused_by_name, setup, teardown),
        cmocka_unit_test_setup_teardown(what_is_no_process, setup, teardown),
        cmocka_unit_test(every_move_is_in_the_table),
        cmocka_unit_test_setup_teardown(hang_up_alone_is_death, setup, teardown),
        cmocka_unit_test_setup_teardown(hang_up_is_not_death_with_a_pidfd, setup, teardown),
        cmocka_unit_test_setup_teardown(hang_up_is_not_death_with_a_supervisor, setup, teardown),
        cmocka_unit_test_setup_teardown(same_life_comes_back, setup, teardown),
        cmocka_unit_test_setup_teardown(silence_is_a_hang, setup, teardown),
        cmocka_unit_test_setup_teardown(work_without_progress_is_a_hang, setup, teardown),
        cmocka_unit_test_setup_teardown(loading_is_given_time, setup, teardown),
        cmocka_unit_test_setup_teardown(lost_for_long_is_fenced, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
