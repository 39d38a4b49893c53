"""guest.py - a small Linux machine with NUMA nodes under plain emulation, for a test.

Kernel: the package that Debian's linux-image-cloud-amd64 depends on, kept in a cache directory between runs. Root: an
initramfs of busybox, programs, and the libraries that ldd names. What a scenario finds comes back as facts (see init)
over a second serial port; the first is the console, kept as the guest's log. Every boot has a deadline.
"""

import os
import re
import shutil
import stat
import subprocess
import tempfile
import time

KERNEL_META_PACKAGE = "linux-image-cloud-amd64"
QEMU = "qemu-system-x86_64"
BUSYBOX = "/bin/busybox"
DEVICE_BUS = 0x20
DEVICE = f"0000:{DEVICE_BUS:02x}:00.0"


class Unavailable(Exception):
    """There is no emulator, busybox or kernel here: the tests are skipped."""


def run(command, **options):
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)


def find_kernel(cache):
    """The path of a kernel image, fetched into the cache if it is not there."""
    if not shutil.which(QEMU) or not os.path.exists(BUSYBOX):
        raise Unavailable(f"no {QEMU} or no {BUSYBOX}: scripts/install-dependencies --tests")
    kept = os.path.join(cache, "vmlinuz")
    if os.path.exists(kept):
        return kept
    if not shutil.which("apt-cache") or not shutil.which("dpkg"):
        raise Unavailable("no kernel: only Debian's packages are known here")
    depends = run(["apt-cache", "depends", "--important", KERNEL_META_PACKAGE], timeout=60).stdout
    package = re.search(r"Depends: (linux-image-\S+)", depends)
    if not package:
        raise Unavailable(f"no kernel: apt knows no {KERNEL_META_PACKAGE}")
    os.makedirs(cache, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        got = run(["apt-get", "download", package[1]], cwd=folder, timeout=300)
        files = [name for name in os.listdir(folder) if name.endswith(".deb")]
        if got.returncode != 0 or len(files) != 1:
            raise Unavailable(f"no kernel: {package[1]} could not be downloaded")
        run(["dpkg", "-x", files[0], "."], cwd=folder, timeout=120, check=True)
        images = [name for name in os.listdir(os.path.join(folder, "boot")) if name.startswith("vmlinuz")]
        os.rename(os.path.join(folder, "boot", images[0]), kept)
    return kept


def emulates_avx2():
    """QEMU does so from version 7.2 on."""
    version = re.search(r"version (\d+)\.(\d+)", run([QEMU, "--version"], timeout=60).stdout)
    return version is not None and (int(version[1]), int(version[2])) >= (7, 2)


def libraries(program):
    """Paths of the shared libraries of a program, its interpreter included."""
    return re.findall(r"(/\S+) \(0x", run(["ldd", program], timeout=60).stdout)


class Archive:
    """An initramfs: a cpio archive of format newc."""

    def __init__(self):
        self.parts = []
        self.names = set()

    def _entry(self, name, mode, data=b""):
        fields = [len(self.names) + 1, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0]
        head = ("070701" + "".join(f"{field:08x}" for field in fields) + name + "\0").encode()
        self.parts += [head, bytes(-len(head) % 4), data, bytes(-len(data) % 4)]
        self.names.add(name)

    def directory(self, path):
        path = path.strip("/")
        if path and path not in self.names:
            self.directory(os.path.dirname(path))
            self._entry(path, stat.S_IFDIR | 0o755)

    def file(self, path, data, mode=0o755):
        path = path.strip("/")
        if path not in self.names:
            self.directory(os.path.dirname(path))
            self._entry(path, stat.S_IFREG | mode, data)

    def link(self, path, target):
        path = path.strip("/")
        self.directory(os.path.dirname(path))
        self._entry(path, stat.S_IFLNK | 0o777, target.encode())

    def copy(self, path, source):
        with open(source, "rb") as file:
            self.file(path, file.read(), os.stat(source).st_mode & 0o777)

    def program(self, path, source):
        """A program without its debug information, and the libraries that it needs, where it looks for them."""
        with tempfile.NamedTemporaryFile() as stripped:
            subprocess.run(["strip", "-o", stripped.name, source], check=True, timeout=60)
            self.copy(path, stripped.name)
        for library in libraries(source):
            self.copy(library, os.path.realpath(library))

    def bytes(self):
        tail = Archive()
        tail.names = set(self.names)
        tail._entry("TRAILER!!!", 0)
        return b"".join(self.parts + tail.parts)


class Fact:
    def __init__(self, name, text, status):
        self.name, self.text, self.status = name, text, status

    def __repr__(self):
        return f"{self.name} (status {self.status}):\n{self.text}"


class Outcome:
    """What one boot left: facts by name, the log, and why it is not complete ('' if it is)."""

    def __init__(self, facts_text, log, seconds, trouble):
        self.log, self.seconds, self.trouble, self.facts = log, seconds, trouble, {}
        for name, text, status in re.findall(r"^@ begin (.*)\n((?:.*\n)*?)@ end (\d+)$", facts_text, re.MULTILINE):
            self.facts[name] = Fact(name, text.rstrip("\n"), int(status))
        if not self.trouble and not facts_text.endswith("@ done\n"):
            self.trouble = "the guest ended before its scenario did"

    def fact(self, name):
        return self.facts[name]

    def named(self, prefix):
        """Facts whose names start so: {rest of the name: fact}."""
        return {name[len(prefix):]: fact for name, fact in self.facts.items() if name.startswith(prefix)}


def boot(kernel, archive_bytes, nodes, deadline_s, device_node=None):
    """Runs a machine to its end. nodes: one (cpus, MiB) per NUMA node: a list of cpu numbers, and memory, 0 for none.
    device_node: a PCI device (DEVICE) is attached to it."""
    n_cpus = sum(len(cpus) for cpus, _ in nodes)
    n_mib = sum(mib for _, mib in nodes)
    command = [QEMU, "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-nodefaults", "-nographic",
               "-no-reboot", "-smp", f"{n_cpus},sockets={n_cpus}", "-m", str(n_mib)]
    for node, (cpus, mib) in enumerate(nodes):
        words = ["node", f"nodeid={node}"] + [f"cpus={cpu}" for cpu in cpus]
        if mib:
            command += ["-object", f"memory-backend-ram,id=m{node},size={mib}M"]
            words.append(f"memdev=m{node}")
        command += ["-numa", ",".join(words)]
    if device_node is not None:
        command += ["-device", f"pxb-pcie,id=far,bus=pcie.0,bus_nr={DEVICE_BUS},numa_node={device_node}",
                    "-device", "pcie-root-port,id=device,bus=far,chassis=1"]
    with tempfile.TemporaryDirectory(prefix="hcattn-guest-") as folder:
        paths = {name: os.path.join(folder, name) for name in ("initramfs", "log", "facts")}
        with open(paths["initramfs"], "wb") as file:
            file.write(archive_bytes)
        command += ["-serial", f"file:{paths['log']}", "-serial", f"file:{paths['facts']}", "-kernel", kernel,
                    "-initrd", paths["initramfs"], "-append", "console=ttyS0 loglevel=5 panic=-1 random.trust_cpu=on"]
        # A program of its own keeps the time: it does so too when we are killed.
        started, trouble = time.monotonic(), ""
        done = run(["timeout", "--foreground", "-s", "KILL", str(deadline_s), *command])
        seconds = time.monotonic() - started
        if seconds >= deadline_s:
            trouble = f"the guest was not done after {deadline_s} s"
        elif done.returncode != 0:
            trouble = f"{QEMU} ended with status {done.returncode}: {done.stderr.strip()}"
        texts = {}
        for name in ("log", "facts"):
            try:
                with open(paths[name], encoding="utf-8", errors="replace") as file:
                    texts[name] = file.read().replace("\r", "")
            except FileNotFoundError:
                texts[name] = ""
    return Outcome(texts["facts"], texts["log"], seconds, trouble)
