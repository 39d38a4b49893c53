"""HCAttn's side: a service of real processes, started for one measurement and stopped after it, asked by its clients."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
import time

from compare import machine

TIMEOUT_S = 1800


class ServiceError(Exception):
    """The service did not do what was asked; the text says what."""


class Service:
    """`with Service(...) as service`: one running service, in a runtime directory of its own."""

    def __init__(self, bin_dir, model, memory, threads, up_args):
        self._bin = pathlib.Path(bin_dir)
        self._program = str(self._bin / "hcattn")
        given = shlex.split(up_args)
        self._up = [*given]
        for name, value in (("--transport", "ring"), ("--memory", memory), ("--model", model), ("--threads", threads),
                            ("--log-level", "warning")):
            if value is not None and not any(word == name or word.startswith(name + "=") for word in given):
                self._up += [name, str(value)]
        self.pids = []
        self.status = {}

    @property
    def command(self):
        """How it was started, without folders."""
        return " ".join(["hcattn", "up", *(os.path.basename(word) for word in self._up)])

    def __enter__(self):
        self._runtime = tempfile.mkdtemp(prefix="hcattn-bench-")  # mode 0700; a short path: it holds sockets
        # Nothing of the user's own settings: what is measured is what the command line says.
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("HCATTN_")}
        try:
            done = self._run("up", "--runtime-dir", self._runtime, "--bin-dir", str(self._bin), "--detach", *self._up)
            if done.returncode != 0:
                raise ServiceError(f"'hcattn up' failed:\n{done.stderr.strip()}\n{self._log()}")
            self.status = json.loads(self._call("status", "--json"))
            self.pids = [process["pid"] for process in self.status["processes"]]
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, ServiceError):
            error.args = (f"{error}\n{self._log()}".rstrip(),)
        self._stop()

    def _stop(self):
        self._run("down", "--runtime-dir", self._runtime, "--timeout", "20s")
        shutil.rmtree(self._runtime, ignore_errors=True)

    def _log(self):
        try:
            lines = (pathlib.Path(self._runtime) / "hcattn.log").read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(["the end of its log:", *lines[-12:]]) if lines else ""

    def _run(self, *arguments, text=None):
        return subprocess.run([self._program, *arguments], input=text, capture_output=True, text=True, env=self._env,
                              timeout=TIMEOUT_S, check=False)

    def _call(self, command, *arguments, text=None):
        done = self._run(command, "--runtime-dir", self._runtime, *arguments, text=text)
        if done.returncode != 0:
            raise ServiceError(f"'hcattn {command}' failed: {done.stderr.strip()}")
        return done.stdout

    def count_tokens(self, text):
        return len(self._call("tokenize", "--ids", "-", text=text).split())

    def achieved(self):
        """What each process says of itself, one line each."""
        return [f"{process['program']} {process['index']}: {process['achieved']}"
                for process in self.status["processes"]]

    # ---- generations ----

    def _start(self, session, n_tokens, text):
        process = subprocess.Popen(
            [self._program, "generate", "--runtime-dir", self._runtime, "--raw", "--ignore-end", "--json",
             "--session", session, "--max-tokens", str(n_tokens), "-"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._env)
        process.stdin.write(text)
        process.stdin.close()
        process.stdin = None
        return process

    @staticmethod
    def _finish(process):
        """(session id or None, the answer)"""
        out, messages = process.communicate(timeout=TIMEOUT_S)
        if process.returncode != 0:
            raise ServiceError(f"'hcattn generate' failed: {messages.strip()}")
        opened = re.search(r"^session ([0-9a-f]{16})$", messages, re.MULTILINE)
        return (opened.group(1) if opened else None), json.loads(out)

    def _all(self, requests):
        """Runs (session, n_tokens, text) requests at once. (seconds from the first start to the last end, results)"""
        start = time.monotonic()
        processes = []
        try:
            for request in requests:
                processes.append(self._start(*request))
            results = [self._finish(process) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return time.monotonic() - start, results

    def warm_up(self):
        """A few tokens through all layers, as the peer's program does too before it measures."""
        self._all([("new", 4, "A few words, so that all memory has been touched once.")])

    def single(self, prompt, n_prompt, n_decode):
        """One session alone: prefill and decode by the service's own clock, checked against the client's."""
        meter = machine.Meter(self.pids)
        # The first token comes with the prompt's last position: n_decode steps make one token more.
        wall, [(session, answer)] = self._all([("new", n_decode + 1, prompt)])
        seconds, others = meter.stop()
        times = answer["timings"]
        if (times["n_prefill"], times["n_decode"]) != (n_prompt, n_decode):
            raise ServiceError(f"computed {times['n_prefill']} + {times['n_decode']} tokens instead of "
                               f"{n_prompt} + {n_decode}")
        timed = (times["queued_ms"] + times["prefill_ms"] + times["decode_ms"]) / 1e3
        return {
            "prefill": 1e3 * n_prompt / times["prefill_ms"],
            "decode": 1e3 * n_decode / times["decode_ms"],
            "store_wait_share": times["store_wait_ms"] / times["decode_ms"],
            **self._describe(session),
            "untimed_s": wall - timed,  # client, messages, and whatever the service's clock missed
            "seconds": seconds,
            "others": others,
        }

    def batch(self, prompts, n_prompt, n_decode):
        """Sessions at once: first all take their prompts, then all decode; decode by the wall clock of the clients."""
        meter = machine.Meter(self.pids)
        prefill_wall, opened = self._all([("new", 1, prompt) for prompt in prompts])
        # A session that goes on computes the token it was given last: n_decode steps make n_decode tokens.
        wall, results = self._all([(session, n_decode, "") for session, _ in opened])
        seconds, others = meter.stop()
        for _, answer in results:
            times = answer["timings"]
            if times["n_prefill"] + times["n_decode"] != n_decode or answer["session_tokens"] < n_prompt + n_decode:
                raise ServiceError(f"computed {times['n_prefill']} + {times['n_decode']} tokens instead of {n_decode}")
        timings = [answer["timings"] for _, answer in results]
        decode_ms = max(1e-3, *(times["decode_ms"] for times in timings))
        described = [self._describe(session) for session, _ in opened]
        kept = [one["kept"] for one in described if one["kept"] is not None]
        read = [one["bytes_read"] for one in described if one["bytes_read"] is not None]
        return {
            "decode": len(prompts) * n_decode / wall,
            "prefill_together": len(prompts) * n_prompt / prefill_wall,
            "decode_by_service": 1e3 * sum(times["n_decode"] for times in timings) / decode_ms,
            "store_wait_share": max(times["store_wait_ms"] for times in timings) / decode_ms,
            "kept": sum(kept) / len(kept) if kept else None,
            "bytes_read": sum(read) if read else None,
            "time_ms": described[0]["time_ms"],  # of steps that it shared with the others
            "seconds": seconds,
            "others": others,
        }

    # ---- for bench/drain ----

    def open(self, prompt):
        """A session that holds the prompt and one token more."""
        return self._finish(self._start("new", 1, prompt))[0]

    def stream(self, session, n_tokens):
        """The running client, whose output comes token by token."""
        return subprocess.Popen(
            [self._program, "generate", "--runtime-dir", self._runtime, "--raw", "--ignore-end", "--session", session,
             "--max-tokens", str(n_tokens), ""],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self._env)

    def drain(self, store):
        return self._call("drain", str(store))

    def _describe(self, session):
        """What the worker counted in a session's decode steps; None each: a version that cannot tell."""
        try:
            counts = json.loads(self._call("sessions", session, "--json"))["counts"] or {}
        except (ServiceError, ValueError, KeyError):
            counts = {}
        times = counts.get("time_ms", {})
        return {
            "kept": counts.get("kept_mean"),
            "bytes_read": sum(read["bytes"] for read in counts["reads"]) if "reads" in counts else None,
            "time_ms": times or None,
        }
