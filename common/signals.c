/* signals.c - signalfd(2). */
#include "common/signals.h"

#include <errno.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

int signals_open(bool with_children, int *ret_fd)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    if (with_children)
        sigaddset(&set, SIGCHLD);
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    if (sigaction(SIGPIPE, &ignore, NULL) < 0)
        return -errno;
    int error = pthread_sigmask(SIG_BLOCK, &set, NULL);
    if (error)
        return -error;
    int fd = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
    if (fd < 0)
        return -errno;
    *ret_fd = fd;
    return 0;
}

int signals_close(int fd)
{
    if (fd >= 0)
        close(fd);
    return -1;
}

int signals_read(int fd, int *ret_signal)
{
    struct signalfd_siginfo info;
    ssize_t n = read(fd, &info, sizeof(info));
    if (n < 0)
        return -errno;
    if (n != (ssize_t)sizeof(info))
        return -EIO;
    *ret_signal = (int)info.ssi_signo;
    return 0;
}

int signals_start_thread(pthread_t *ret_thread, void *(*run)(void *context), void *context)
{
    sigset_t all, before;
    sigfillset(&all);
    int error = pthread_sigmask(SIG_SETMASK, &all, &before); /* a thread inherits the mask */
    if (error)
        return -error;
    error = pthread_create(ret_thread, NULL, run, context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return -error;
}

void signals_restore(void)
{
    struct sigaction standard = {.sa_handler = SIG_DFL};
    sigaction(SIGPIPE, &standard, NULL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}
