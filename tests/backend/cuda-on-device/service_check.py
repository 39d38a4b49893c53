"""The part of tests/backend/device-check that runs the service: its tokens on the device against the CPU's, then its speed.

Everything is asked of the programs as a user asks them; what they answer with --json is kept. A service has a runtime directory and
a process group of its own, which is ended whatever happens.
"""
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

PROGRAMS = ("hcattn", "hc-coordinator", "hc-value-store", "hc-gpu-worker")
START, STOP, TAIL = 90, 15, 4000
PROMPT_CHARACTERS = 400
# The device's products round otherwise than the CPU's: tokens may part where two are nearly as likely. More than this is wrong.
MOST_DIFFERENCE, LEAST_EQUAL = 0.5, 0.3
CPU_SHARE = 0.4  # of the time, at most


def library_path(libraries):
    """For a program's environment."""
    folders = [*map(str, libraries), os.environ.get("LD_LIBRARY_PATH")]
    return {"LD_LIBRARY_PATH": ":".join(filter(None, folders))} if libraries else {}


class Service:
    """One service. None of its methods raises; what went wrong is `error`."""

    def __init__(self, check, programs, model, backend, options):
        self.check, self.backend, self.error = check, backend, None
        self.programs, self.model = programs, model
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="hc-check-"))  # a short path: it holds sockets
        self.environment = {name: value for name, value in os.environ.items()
                            if not name.startswith("HCATTN_") or name.startswith("HCATTN_TEST_")}
        self.environment |= library_path(check.libraries)
        self.log = open(self.folder / "log", "w", encoding="utf-8")
        self.process = None
        self.options = options

    def __enter__(self):
        command = [self.programs / "hcattn", "up", "--model", self.model, "--backend", self.backend, "--runtime-dir",
                   self.folder, "--bin-dir", self.programs, "--start-timeout", f"{START}s", *self.options]
        began = time.monotonic()
        try:
            self.process = subprocess.Popen([str(word) for word in command], stdout=self.log, stderr=subprocess.STDOUT,
                                            stdin=subprocess.DEVNULL, env=self.environment, start_new_session=True)
        except OSError as error:
            self.error = str(error)
            return self
        until = began + min(START, max(1.0, self.check.left()))
        while not self.error:
            if self.process.poll() is not None:
                self.error = f"up ended with {self.process.returncode}: {self.said()}"
            elif (self.ask("status", seconds=5, quiet=True) or {}).get("ready"):
                break
            elif time.monotonic() > until:
                self.error = f"not ready in time: {self.said()}"
            else:
                time.sleep(0.2)
        self.check.step(f"service {self.backend} starts", time.monotonic() - began, 1 if self.error else 0)
        return self

    def __exit__(self, *_):
        began = time.monotonic()
        if self.process:
            try:
                self.process.send_signal(signal.SIGINT)
                self.process.wait(timeout=STOP)
            except (subprocess.TimeoutExpired, ProcessLookupError):
                pass
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                pass
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.check.step(f"service {self.backend} stops", time.monotonic() - began, 0)

    def said(self):
        self.log.flush()
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")[-TAIL:].strip()

    def ask(self, command, *arguments, text=None, seconds=60.0, quiet=False):
        """What the command answers with --json; None: nothing, and `error` is set unless quiet."""
        seconds = min(seconds, self.check.left())
        words = [self.programs / "hcattn", command, "--json", "--runtime-dir", self.folder, *arguments]
        try:
            done = subprocess.run([str(word) for word in words], input=text, capture_output=True, text=True,
                                  errors="replace", env=self.environment, timeout=max(seconds, 0.1), check=False)
            if done.returncode == 0:
                return json.loads(done.stdout)
            said = done.stderr.strip()
        except subprocess.TimeoutExpired:
            said = "deadline"
        except (OSError, ValueError) as error:
            said = str(error)
        if not quiet:
            self.error = f"{command}: {said[-TAIL:]}"
        return None

    def generate(self, case, n_tokens, seconds):
        return self.ask("generate", "--raw", "--ignore-end", "--max-tokens", str(n_tokens), "--policy", case["policy"],
                        "--exact-tokens", str(case["exact_tokens"]), "-", text=case["text"], seconds=seconds)


def cases_of(text, n_short, n_long):
    """Prompts: short ones, whose old tokens are read by the policy; a long one under two policies, and exactly."""
    cases = [{"name": f"short {i}", "policy": "default", "exact_tokens": 0,
              "text": text[i * len(text) // n_short:][:PROMPT_CHARACTERS]} for i in range(n_short)]
    long = (text * math.ceil(n_long / len(text)))[:n_long]
    cases += [{"name": f"long {name}", "policy": policy, "exact_tokens": exact, "text": long}
              for name, policy, exact in (("default", "default", 0), ("full", "full", 0), ("exact", "full", 100000))]
    return cases


def compare(ours, theirs):
    """How far two answers are the same: tokens before the first other one, largest difference of log-probabilities up to there."""
    n_equal = 0
    while n_equal < min(len(ours["tokens"]), len(theirs["tokens"])) and ours["tokens"][n_equal] == theirs["tokens"][n_equal]:
        n_equal += 1
    pairs = list(zip(ours["logprobs"], theirs["logprobs"]))[:n_equal]
    differences = [abs(a - b) if a is not None and b is not None else math.inf for a, b in pairs if a != b]
    return n_equal, max(differences, default=0.0)


def compare_all(check, cases, answers):
    """The report's lines, and whether that is as it should be."""
    lines, good = [], True
    for case, ours, theirs in zip(cases, answers["cuda"], answers["cpu"]):
        if ours is None or theirs is None:
            continue
        n_equal, difference = compare(ours, theirs)
        lines.append({"prompt": case["name"], "policy": case["policy"], "prompt_tokens": len(ours["prompt_tokens"]),
                      "tokens": len(theirs["tokens"]), "equal": n_equal, "largest_difference": round(difference, 6)})
        good &= difference <= MOST_DIFFERENCE
    n_equal, n_all = sum(line["equal"] for line in lines), sum(line["tokens"] for line in lines)
    largest = max((line["largest_difference"] for line in lines), default=0.0)
    check.say(f"service: {n_equal} of {n_all} tokens as the CPU's before the first other one, log-probabilities within {largest}")
    return lines, good and n_all > 0 and n_equal >= LEAST_EQUAL * n_all


def measure_speed(check, service, text, contexts, n_decode, until, label):
    """Prefill and decode of one session at each context."""
    counted = service.ask("tokenize", "-", text=text, seconds=30)
    n_all = len(counted.get("ids", counted.get("tokens", []))) if counted else 0
    lines = []
    for context in contexts:
        what = f"speed {label} at {context}"
        if not n_all or service.error:
            check.skip(what, "error")
            continue
        left = until - time.monotonic()
        # prefill's time grows with the square of the context at worst; decode's linearly
        expected = 4 * lines[-1]["seconds"] * (context / lines[-1]["context"]) / 2 if lines else 0
        if left < max(5, expected):
            check.skip(what, "deadline")
            continue
        n_characters = max(1, int(len(text) / n_all * (0.95 * context - n_decode)))
        prompt = (text * math.ceil(n_characters / len(text)))[:n_characters]
        began = time.monotonic()
        case = {"policy": "default", "exact_tokens": 0, "text": prompt}
        answer = service.generate(case, n_decode + 1, left)
        took = time.monotonic() - began
        check.step(what, took, 0 if answer else 1)
        if not answer:
            check.say(f"{what}: {service.error}")
            break
        times = answer["timings"]
        lines.append({"model": label, "backend": service.backend, "context": context, "n_prefill": times["n_prefill"],
                      "n_decode": times["n_decode"], "prefill_tokens_per_s": round(times["prefill_tokens_per_second"], 2),
                      "decode_tokens_per_s": round(times["decode_tokens_per_second"], 2),
                      "store_wait_ms_per_token": round(times["store_wait_ms"] / max(1, times["n_decode"]), 4),
                      "seconds": round(took, 2)})
        check.say(f"{what} ({service.backend}): prefill {lines[-1]['prefill_tokens_per_s']} tokens/s, decode "
                  f"{lines[-1]['decode_tokens_per_s']} tokens/s")
    return lines


def describe(service):
    """What its processes say that they achieved."""
    status = service.ask("status", seconds=10) or {}
    workers = [process for process in status.get("processes", []) if process.get("program") == "hc-gpu-worker"]
    return {"n_ctx": status.get("n_ctx"), "policy": status.get("policy"),
            "device_bytes_per_token": status.get("device_bytes_per_token"),
            "store_bytes_per_token": status.get("store_bytes_per_token"),
            "weight_bytes": sum(worker.get("weight_bytes", 0) for worker in workers),
            "device_bytes": sum(worker.get("device_bytes", 0) for worker in workers),
            "achieved": [f"{process['program']} {process['index']}: {process['achieved']}"
                         for process in status.get("processes", [])]}


def run_service(check, programs, model, text, sizes, until):
    """Tokens of the model on the device against the CPU's. False: something is wrong."""
    report = check.report["service"] = {"model": model.name, "backends": {}, "tokens": [], "speed": []}
    cases, answers, good = cases_of(text, sizes["prompts"], sizes["long"]), {"cuda": [], "cpu": []}, True
    ends = {"cpu": time.monotonic() + CPU_SHARE * (until - time.monotonic()), "cuda": until}
    for backend, until in ends.items():  # what is learnt from the model once is learnt by the CPU, whatever the device is
        with Service(check, programs, model, backend, sizes["options"]) as service:
            about = report["backends"][backend] = {"error": service.error} if service.error else describe(service)
            began = time.monotonic()
            for case in cases:
                answer = None
                if not service.error and time.monotonic() < until:
                    answer = service.generate(case, sizes["tokens"], until - time.monotonic())
                    if backend == "cpu" and service.error == "generate: deadline":
                        service.error = None  # it is slow: of the device alone that would be wrong
                        check.skip(f"tokens {backend} {case['name']}", "deadline")
                elif not service.error:
                    check.skip(f"tokens {backend} {case['name']}", "deadline")
                answers[backend].append(answer)
            check.step(f"tokens {backend}", time.monotonic() - began, 1 if service.error else 0)
            if not service.error:
                contexts = [context for context in sizes["contexts"] if context <= (about.get("n_ctx") or 0)]
                report["speed"] += measure_speed(check, service, text, contexts[:None if backend == "cuda" else 2],
                                                 sizes["decode"], until, model.name)
            if service.error:
                about["error"], about["log"] = service.error, service.said()
                check.say(f"service {backend}: FAILED: {service.error}")
                good = False
            for line in about.get("achieved", []):
                check.say(f"service {backend}: {line}")
        check.save()
    report["tokens"], equal = compare_all(check, cases, answers)
    check.save()
    return good and equal


def long_contexts(check, sizes):
    """Those that the model does not have."""
    return [context for context in sizes["long_contexts"]
            if context > (check.report["service"]["backends"]["cuda"].get("n_ctx") or 0)]


def run_long(check, programs, model, text, sizes, until):
    """The speed of a small model at such contexts."""
    with Service(check, programs, model, "cuda", sizes["options"]) as service:
        if not service.error:
            check.report["service"]["speed"] += measure_speed(check, service, text, long_contexts(check, sizes),
                                                              sizes["decode"], until, model.name)
        if service.error:
            check.say(f"service at long contexts: FAILED: {service.error}")
        return not service.error
