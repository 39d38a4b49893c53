"""network - hosts of one machine: network namespaces with a link each to a switch between them."""

import os
import secrets
import signal
import subprocess
import time


class Failed(Exception):
    pass


class Unavailable(Exception):
    """There can be no namespaces here."""


def run(words, timeout=30, status=0, **options):
    """Returns what it prints; its status must be `status`."""
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=timeout,
                          check=False, **options)
    if done.returncode != status:
        raise Failed(f"{' '.join(words)}: status {done.returncode}, not {status}\n{done.stdout.decode(errors='replace')}"
                     f"{done.stderr.decode(errors='replace')}")
    return done.stdout


class Network:
    """Namespaces by name, 10.73.0.1, .2, ... in this order. Nothing of it is seen outside, and all goes with close()."""

    def __init__(self, names):
        self.prefix = f"hc{secrets.token_hex(3)}-"
        self.made = []
        self.addresses = {}
        try:
            self._make("switch")
            self._ip("switch", "link", "add", "name", "bridge", "type", "bridge")
            self._ip("switch", "link", "set", "bridge", "up")
            for i, name in enumerate(names):
                self._make(name)
                self.addresses[name] = f"10.73.0.{i + 1}"
                self._ip("switch", "link", "add", "name", f"to-{name}", "type", "veth",
                         "peer", "name", "wire", "netns", self.prefix + name)
                self._ip("switch", "link", "set", f"to-{name}", "master", "bridge", "up")
                self._ip(name, "addr", "add", f"{self.addresses[name]}/24", "dev", "wire")
                self._ip(name, "link", "set", "wire", "up")
        except (Failed, OSError) as reason:
            self.close()
            raise Unavailable(str(reason)) from None

    def _make(self, name):
        run(["ip", "netns", "add", self.prefix + name])
        self.made.append(name)
        self._ip(name, "link", "set", "lo", "up")

    def _ip(self, name, *words):
        run(["ip", "-n", self.prefix + name, *words])

    def words(self, name, *words):
        """The command line that runs something in a namespace."""
        return ["ip", "netns", "exec", self.prefix + name, *words]

    def cut(self, name, whole=False):
        """Takes the wire of a host away, or puts it back (`whole`). No end is told."""
        self._ip("switch", "link", "set", f"to-{name}", "up" if whole else "down")

    def processes(self, name):
        return [int(pid) for pid in run(["ip", "netns", "pids", self.prefix + name]).split()]

    def kill_all(self, name):
        """Every process of a host, as when its power is gone."""
        deadline = time.monotonic() + 10
        while (pids := self.processes(name)) and time.monotonic() < deadline:
            for number in (signal.SIGSTOP, signal.SIGKILL):  # none sees another die
                for pid in pids:
                    try:
                        os.kill(pid, number)
                    except ProcessLookupError:
                        pass
            time.sleep(0.05)
        if self.processes(name):
            raise Failed(f"processes of {name} do not die: {self.processes(name)}")

    def close(self):
        for name in reversed(self.made):
            try:
                self.kill_all(name)
            finally:
                subprocess.run(["ip", "netns", "del", self.prefix + name], check=False, stderr=subprocess.DEVNULL)
        self.made = []
