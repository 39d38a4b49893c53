"""engine.py - a docker engine of a test's own, in namespaces that nothing of it outlives.

enter() starts the test again as the first process of new pid, mount and network namespaces: when it ends, however it ends,
the kernel ends all that it started, and mounts, bridges and firewall rules go with it. There is no registry and no way out
of that network: the base image is what debootstrap makes, with the packages that the Dockerfile asks for, before entering.
"""

import fcntl
import hashlib
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time

PROGRAMS = ("unshare", "debootstrap", "dockerd", "docker-compose")
INSIDE = "HCATTN_DOCKER_INSIDE"
DOCKER = "/usr/bin/docker"  # Debian's: of the same version as the engine
BASE = "hcattn-test-base"
START_S = 60
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


class Unavailable(Exception):
    """No engine can run here: the test is skipped."""


class Failed(Exception):
    pass


def run(command, timeout, status=0, **options):
    """Runs a command to its end and returns what it wrote to standard output, as bytes."""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    if "input" in options:
        del options["stdin"]
    try:
        done = subprocess.run(command, timeout=timeout, check=False, **options)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(command)}: not done after {timeout} s\n{(error.stdout or b'').decode()[-4000:]}") from None
    if done.returncode != status:
        raise Failed(f"{' '.join(command)}: status {done.returncode}, not {status}\n"
                     f"{(done.stdout or b'').decode()[-6000:]}{(done.stderr or b'').decode()[-6000:]}")
    return done.stdout


def packages_of(dockerfile):
    with open(dockerfile, encoding="utf-8") as file:
        return re.search(r'^ARG RUN_PACKAGES="(.*)"$', file.read(), re.MULTILINE)[1].split()


def make_base(cache, packages):
    """The path of an archive with Debian and these packages, made if it is not in the cache."""
    if os.geteuid() != 0:
        raise Unavailable("only root can start an engine")
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if not shutil.which(name)] + [DOCKER] * (not os.path.exists(DOCKER))
    if missing:
        raise Unavailable(f"no {', '.join(missing)}: scripts/install-dependencies --tests")
    name = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:12]
    kept = os.path.join(cache, f"base-{name}.tar")
    if os.path.exists(kept):
        return kept
    os.makedirs(cache, exist_ok=True)
    tree = os.path.join(cache, f"making-{os.getpid()}")
    try:
        run(["debootstrap", "--variant=minbase", f"--include={','.join(packages)}", "bookworm", tree], 600)
        shutil.rmtree(os.path.join(tree, "var/cache/apt"), ignore_errors=True)
        run(["tar", "-C", tree, "-cf", f"{tree}.tar", "."], 120)
        os.rename(f"{tree}.tar", kept)
    except Failed as error:
        raise Unavailable(f"no base image: debootstrap failed: {str(error)[-300:]}") from None
    finally:
        shutil.rmtree(tree, ignore_errors=True)
    return kept


def enter(arguments):
    """Never returns outside: ends with the status of the process inside. Inside it readies the network."""
    if INSIDE not in os.environ:
        command = ["unshare", "--pid", "--mount", "--net", "--fork", "--kill-child", "--mount-proc"]
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode != 0:
            raise Unavailable("new namespaces are not permitted")
        sys.stdout.flush()
        sys.exit(subprocess.run([*command, sys.executable, "-B", *arguments], check=False,
                                env={**os.environ, INSIDE: "1"}).returncode)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = bytearray(struct.pack("16sh22x", b"lo", 0))
        fcntl.ioctl(any_socket, SIOCGIFFLAGS, request)
        flags = struct.unpack_from("h", request, 16)[0]
        struct.pack_into("h", request, 16, flags | IFF_UP)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, request)


class Engine:
    """dockerd with all that it writes under one folder."""

    def __init__(self, folder, base):
        self.folder = folder
        self.program = DOCKER
        self.parent = f"hcattn-test-{os.path.basename(folder)}"
        self.environment = {name: value for name, value in os.environ.items()
                            if not name.startswith(("HC_", "HCATTN_", "DOCKER_", "COMPOSE_"))}
        self.environment.update(DOCKER_HOST=f"unix://{folder}/docker.sock", DOCKER_BUILDKIT="0",
                                COMPOSE_HTTP_TIMEOUT="120", HOME=folder)
        self.log = open(os.path.join(folder, "dockerd.log"), "wb")  # as long as the engine lives
        self.process = subprocess.Popen(
            ["dockerd", "--host", f"unix://{folder}/docker.sock", "--data-root", f"{folder}/data", "--exec-root",
             f"{folder}/exec", "--pidfile", f"{folder}/docker.pid", "--cgroup-parent", f"/{self.parent}"],
            stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while subprocess.run([DOCKER, "version"], env=self.environment, capture_output=True, check=False).returncode:
            if self.process.poll() is not None or time.monotonic() > deadline:
                last = self.last_words()
                self.stop()
                raise Unavailable(f"the docker engine does not start here: {last}")
            time.sleep(0.2)
        self.docker("import", base, BASE)

    def last_words(self):
        self.log.flush()
        with open(self.log.name, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
        return "; ".join([line for line in lines if "level=error" in line or "failed" in line][-3:] or lines[-1:])

    def docker(self, *words, timeout=120, **options):
        return run([DOCKER, *words], timeout, env=self.environment, **options).decode().strip()

    def inspect(self, container, template):
        return self.docker("inspect", "--format", template, container)

    def stop(self):
        """Ends the engine. Returns the control groups that it left, which are removed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()
        left = []
        for top in ["/sys/fs/cgroup", *(entry.path for entry in os.scandir("/sys/fs/cgroup") if entry.is_dir())]:
            group = os.path.join(top, self.parent)
            if not os.path.isdir(group):
                continue
            left += [entry.name for entry in os.scandir(group) if entry.is_dir()]
            for path, _, _ in os.walk(group, topdown=False):
                try:
                    os.rmdir(path)
                except OSError:
                    left.append(path)
        return left
