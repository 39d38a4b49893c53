/*
 * no-policy.c - no-policy PROGRAM [ARGUMENT]...: runs a program that has no right to memory policies, as in a container with
 * docker's default filter and without CAP_SYS_NICE: the kernel answers EPERM to the calls below, and all others work.
 */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REFUSED(number)                                                                                                \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (number), 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM)

int main(int argc, char **argv)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        REFUSED(SYS_mbind),
        REFUSED(SYS_set_mempolicy),
        REFUSED(SYS_get_mempolicy),
        REFUSED(SYS_migrate_pages),
        REFUSED(SYS_move_pages),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof(filter) / sizeof(filter[0]), .filter = filter};
    if (argc < 2) {
        fprintf(stderr, "usage: no-policy PROGRAM [ARGUMENT]...\n");
        return 2;
    }
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0) {
        perror("no-policy: seccomp");
        return 1;
    }
    execvp(argv[1], argv + 1);
    perror(argv[1]);
    return 127;
}
