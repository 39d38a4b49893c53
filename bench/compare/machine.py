"""The machine: what it is, which cores we may use, and who else used them while something was measured."""

import os
import pathlib
import platform
import resource
import time

TICKS = os.sysconf("SC_CLK_TCK")
# What matters to matrix products, best first; the rest of a processor's flags is left out.
ISA_FLAGS = ("amx_int8", "amx_bf16", "avx512_vnni", "avx512_bf16", "avx512f", "avx_vnni", "avx2", "f16c", "fma",
             "sve2", "sve", "i8mm", "asimddp", "asimd")


def cores():
    """The processors that this process may run on, in order."""
    return sorted(os.sched_getaffinity(0))


def use_cores(n_cores):
    """Binds this process, and so all that it starts, to the first n_cores of the processors it may run on."""
    os.sched_setaffinity(0, cores()[:n_cores])


def _cpuinfo(*names):
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""


def describe():
    flags = set(_cpuinfo("flags", "Features").split())
    return {
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cores": len(cores()),
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
    }


def _busy_seconds():
    """Time that our cores did not idle, by whomever; stolen time counts: a neighbour of this virtual machine had it."""
    names = {f"cpu{core}" for core in cores()}
    busy = 0
    for line in pathlib.Path("/proc/stat").read_text().splitlines():
        fields = line.split()
        if fields and fields[0] in names:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[1:9])
            busy += user + nice + system + irq + softirq + steal
    return busy / TICKS


def _process_seconds(pid):
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _own_seconds(pids):
    total = sum(_process_seconds(pid) for pid in pids)
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total


class Meter:
    """Wall time, and how many cores others kept busy meanwhile: not this process, its ended children or `pids`."""

    def __init__(self, pids=()):
        self._pids = tuple(pids)
        self._busy, self._own, self._start = _busy_seconds(), _own_seconds(self._pids), time.monotonic()

    def stop(self):
        """(seconds, cores used by others)"""
        seconds = time.monotonic() - self._start
        others = (_busy_seconds() - self._busy) - (_own_seconds(self._pids) - self._own)
        return seconds, max(0.0, others) / max(seconds, 1e-3)


def others_now(seconds=1.0):
    meter = Meter()
    time.sleep(seconds)
    return meter.stop()[1]
