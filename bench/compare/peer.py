"""The peer's side: llama.cpp by its own llama-batched-bench, and the search for its best setting."""

import json
import pathlib
import re
import subprocess

from compare import machine

TIMEOUT_S = 1800
TOOLS = ("llama-batched-bench", "llama-bench")
BUILD = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "build-llama"

# What is tried: flash attention and KV cache. Without flash attention llama.cpp takes no quantized values.
SETTINGS = {
    "fa-f16": ("on", "f16"),
    "nofa-f16": ("off", "f16"),
    "fa-q8_0": ("on", "q8_0"),
}
CLOSE = 0.03  # a setting this close to the best one in both halves of a test serves both: nearer than a probe can tell
PROBE_TOKENS = (512, 2048)
PROBE_DECODE = 16


class PeerError(Exception):
    """llama.cpp is not there or failed; the text says how."""


def build(directory):
    """Builds the tools in `directory` unless they are there. Returns their folder. Takes 10 minutes and more."""
    folder = pathlib.Path(directory).expanduser() / "build" / "bin"
    if not all((folder / tool).exists() for tool in TOOLS):
        done = subprocess.run([str(BUILD), str(folder.parent.parent), *TOOLS], check=False)
        if done.returncode != 0:
            raise PeerError(f"{BUILD.name} failed")
    return folder


class Peer:
    def __init__(self, folder, model, threads):
        self._program = pathlib.Path(folder) / TOOLS[0]
        self._model = model
        self._threads = threads
        if not self._program.exists():
            raise PeerError(f"{self._program} is not there")
        self.version = self._version(pathlib.Path(folder) / TOOLS[1])

    @staticmethod
    def _version(tool):
        try:
            done = subprocess.run([str(tool), "--version"], capture_output=True, text=True, timeout=60, check=False)
        except OSError:
            return "unknown"
        found = re.search(r"version: (.*)", done.stdout + done.stderr)
        return found.group(1).strip() if found else "unknown"

    def run(self, setting, prompts, n_decode, n_sequences=1, shared=False):
        """One process. A list, one entry for each number of prompt tokens, and the meter's readings.

        shared: the prompt is computed once and copied to all sequences: the same decode for a shorter wait.
        """
        flash, cache = SETTINGS[setting]
        n_ctx = n_sequences * (max(prompts) + n_decode)
        command = [str(self._program), "-m", str(self._model), "-c", str(-(-n_ctx // 256) * 256),
                   "-npp", ",".join(map(str, prompts)), "-ntg", str(n_decode), "-npl", str(n_sequences),
                   "-t", str(self._threads), "-tb", str(self._threads), "-fa", flash, "-ctk", cache, "-ctv", cache,
                   "-ngl", "0", "--output-format", "jsonl", *(["-pps"] if shared else [])]
        meter = machine.Meter()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise PeerError(f"{TOOLS[0]} took more than {TIMEOUT_S} s") from error
        seconds, others = meter.stop()
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode != 0 or [row["pp"] for row in rows] != list(prompts):
            raise PeerError(f"{TOOLS[0]} failed (status {done.returncode}):\n" + done.stderr.strip()[-800:])
        return [{"prefill": row["speed_pp"], "decode": row["speed_tg"], "seconds": seconds, "others": others}
                for row in rows]


def probe_single(peer, setting):
    return peer.run(setting, PROBE_TOKENS, PROBE_DECODE)


def probe_batch(peer, setting, n_sequences, n_prompt):
    return peer.run(setting, (n_prompt,), PROBE_DECODE, n_sequences, shared=True)


def expected(rows, n_prompt):
    """Rates at n_prompt tokens from a probe at PROBE_TOKENS: a token costs a constant and a part for each token before."""
    (n0, n1) = PROBE_TOKENS
    seconds0, seconds1 = (n / row["prefill"] for n, row in zip(PROBE_TOKENS, rows))
    square = max(0.0, (seconds1 / n1 - seconds0 / n0) / (n1 - n0))
    prefill = (seconds0 / n0 - square * n0) + square * n_prompt
    token0, token1 = (1 / row["decode"] for row in rows)
    slope = max(0.0, (token1 - token0) / (n1 - n0))
    decode = token0 + slope * (n_prompt - n0)
    return {"prefill": 1 / max(prefill, 1e-9), "decode": 1 / max(decode, 1e-9)}


def choose(rates):
    """The best setting for each half of a test, from {setting: {"prefill": rate, "decode": rate}}.

    One setting for both when one is close to the best in both; then one run measures both.
    """
    halves = list(next(iter(rates.values())))
    best = {half: max(rates, key=lambda setting: rates[setting][half]) for half in halves}
    top = {half: rates[best[half]][half] for half in halves}
    for setting in sorted(rates, key=lambda setting: -min(rates[setting][half] / top[half] for half in halves)):
        if all(rates[setting][half] >= (1 - CLOSE) * top[half] for half in halves):
            return {half: setting for half in halves}
    return best
