"""--check: a service of its own on this machine; predicted against measured bytes, and times of long contexts from short ones.

Learnt from the short contexts: what a step takes whatever the context (products, and the rest), the rate of scoring and
selecting keys and that at which the store's rows are read; of a prompt, the rate of matrix products and that of attention.
Predicted by these: decode steps and first token of the long ones. Bytes are computed from the shape in the model's header
alone, kept shares are those of docs/quality.md; what was seen of either here is only compared.
"""

import dataclasses
import json
import math
import sys
import time

from capacity_plan import hosts, plan, presets, shapes
from compare import machine, prompts
from compare.service import Service, ServiceError

MAX_TOKENS = 1 << 20  # a session whose exact set is sinks and window
LEAST_S = 1e-13  # for what took no time that could be seen


class Measured(Service):
    """A service whose sessions are looked at after each measurement."""

    def bytes_settled(self):
        """bytes_now() once it stays: processes tell of themselves now and then."""
        seen, deadline = self.bytes_now(), time.monotonic() + 20
        while time.monotonic() < deadline:
            time.sleep(2.5)
            before, seen = seen, self.bytes_now()
            if seen == before:
                return seen
        raise ServiceError("the service's memory does not settle: does something else use it?")

    def bytes_now(self):
        """(device, weights, stores): as the processes count them"""
        status = json.loads(self._call("status", "--json"))
        of = {process["program"]: process for process in status["processes"]}
        return (of["hc-gpu-worker"]["device_bytes"], of["hc-gpu-worker"]["weight_bytes"],
                sum(process["bytes_used"] for process in status["processes"] if process["program"] == "hc-value-store"))

    def measure(self, n_prompt, n_decode):
        """One session of n_prompt tokens and n_decode steps, and what it holds. It is closed when the service is."""
        before = self.bytes_settled()
        prompt = prompts.of_tokens(n_prompt, 1, self.count_tokens)
        meter = machine.Meter(self.pids)
        _, [(session, answer)] = self._all([("new", n_decode + 1, prompt)])
        seconds, others = meter.stop()
        after = self.bytes_settled()
        described = json.loads(self._call("sessions", session, "--json"))
        counts, times = described["counts"], answer["timings"]
        if (times["n_prefill"], times["n_decode"]) != (n_prompt, n_decode):
            raise ServiceError(f"computed {times['n_prefill']} + {times['n_decode']} tokens in place of "
                               f"{n_prompt} + {n_decode}")
        steps = counts["steps"]  # none are counted while no token is old
        return {
            "context": n_prompt, "n_decode": n_decode, "others": others, "seconds": seconds,
            "decode_ms": times["decode_ms"] / n_decode, "prefill_s": times["prefill_ms"] / 1e3,
            "kept": counts["kept_mean"],
            "read_bytes": sum(read["bytes"] for read in counts["reads"]) / steps if steps else 0,
            "exact_bytes": counts["exact_bytes"], "key_bytes": counts["key_bytes"],
            "device_bytes": after[0] - before[0], "store_bytes": after[2] - before[2],
            "parts_ms": {name: ms / steps for name, ms in counts["time_ms"].items()} if steps else None,
        }


def line(points):
    """Least squares through (x, y) with neither slope nor start below 0: (start, slope)"""
    n = len(points)
    mx, my = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mx) ** 2 for x, _ in points)
    slope = sum((x - mx) * (y - my) for x, y in points) / spread if spread else 0.0
    start = my - slope * mx
    if slope < 0:
        return my, 0.0
    if start < 0:
        return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    return start, slope


def calibrate(shape, preset, terms, runs):
    """The host that short runs tell of."""
    blank = hosts.Host("this machine", 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1)
    made = plan.Plan(shape, preset, blank, terms)
    exact = shape.exact_bytes(MAX_TOKENS, terms.rows)
    with_old = [(run["context"] + run["n_decode"] // 2, run) for run in runs if run["kept"]]
    fixed = sum(run["parts_ms"]["matmul"] + run["parts_ms"]["other"] for _, run in with_old) / len(with_old) / 1e3
    key = preset.key_token_bytes(shape)
    scan = line([(shapes.old_tokens(n, terms.exact_tokens) * key, run["parts_ms"]["select"] / 1e3) for n, run in with_old])
    read = line([(run["read_bytes"] + made.read_bytes(n)[1],
                  (run["parts_ms"]["store_wait"] + run["parts_ms"]["attention"]) / 1e3) for n, run in with_old])
    # A prompt's seconds a token: products, and half as many pairs as it has tokens.
    start, slope = line([(run["context"] / 2, run["prefill_s"] / run["context"]) for run in runs])
    pairs = 4 * shape.n_layers * shape.n_heads * shape.head_dim
    return hosts.Host(
        "this machine", device_bytes=0, device_reserve=0, device_rate=(shape.step_bytes + exact) / max(fixed, LEAST_S),
        key_rate=1 / max(scan[1], LEAST_S), arithmetic=2 * shape.layer_params / max(start, LEAST_S),
        attention=pairs / max(slope, LEAST_S), link_rate=0, layer_s=(scan[0] + read[0]) / shape.n_layers, step_s=0, n_nodes=1,
        node_bytes=machine.describe()["memory_bytes"], node_share=0.8, node_rate=1 / max(read[1], LEAST_S)).check()


class Result:
    """Lines of predicted beside measured."""

    def __init__(self, within):
        self.within, self.rows = within, []

    def add(self, what, predicted, measured, unit, is_checked=True):
        off = predicted / measured - 1 if measured else (0.0 if not predicted else math.inf)
        self.rows.append({"what": what, "predicted": predicted, "measured": measured, "unit": unit, "off": off,
                          "checked": is_checked, "holds": not is_checked or abs(off) <= self.within})

    @property
    def holds(self):
        return all(row["holds"] for row in self.rows)

    def show(self):
        print(f"{'':<44} {'PREDICTED':>12} {'MEASURED':>12}      OFF")
        for row in self.rows:
            mark = "" if row["holds"] else "  !"
            print(f"{row['what']:<44} {row['predicted']:12,.2f} {row['measured']:12,.2f} {row['off']:+8.1%}  "
                  f"{row['unit']}{'' if row['checked'] else ' (context that was learnt from)'}{mark}")


def compare(shape, preset, host, terms, runs, calibrated, base, within):
    result, mib = Result(within), 1 << 20
    made = plan.Plan(shape, preset, host, terms)
    device, weights = base
    result.add("weights", shape.weight_bytes / mib, weights / mib, "MiB")
    result.add("device without sessions", made.base_bytes() / mib, device / mib, "MiB")
    for run in runs:
        n, name = run["context"], f"{run['context']:,} tokens: "
        most = n + run["n_decode"] + 1
        middle = n + run["n_decode"] // 2
        seen = run["context"] in calibrated
        result.add(name + "exact set", made.shape.exact_bytes(most, terms.rows) / mib, run["exact_bytes"] / mib, "MiB")
        result.add(name + "keys", preset.key_bytes(shape, most) / mib, run["key_bytes"] / mib, "MiB")
        result.add(name + "device, of the session", made.session_bytes(most) / mib, run["device_bytes"] / mib, "MiB")
        result.add(name + "stores", made.host_bytes(most) / mib, run["store_bytes"] / mib, "MiB")
        if run["kept"]:
            result.add(name + "kept", 100 * preset.kept(middle), 100 * run["kept"], "%", not seen)
            result.add(name + "read from the stores", made.read_bytes(middle)[0] / mib, run["read_bytes"] / mib, "MiB/token",
                       not seen)
        result.add(name + "decode", 1e3 / made.rate(middle)[0], run["decode_ms"], "ms/token", not seen)
        result.add(name + "first token", made.first_token(n)[0], run["prefill_s"], "s", not seen)
    return result


def run(given):
    shape = shapes.of_gguf(given.model)
    preset = presets.built_in(given.policy)
    terms = plan.Terms()
    contexts = sorted({*given.calibrate, *given.predict})
    if contexts[0] < 128 or contexts[-1] + given.decode + 1 >= shape.n_ctx:
        raise ValueError(f"contexts of 128 to {shape.n_ctx - given.decode - 2} tokens can be measured")
    if sum(n > terms.exact_tokens for n in given.calibrate) < 2:
        raise ValueError(f"--calibrate takes at least two contexts above {terms.exact_tokens} tokens: below none are old")
    room = sum(shape.host_bytes(n + given.decode + 1) for n in contexts) + (256 << 20)
    before = machine.others_now()
    if before > 0.15:
        print(f"warning: others use {before:.1f} of {len(machine.cores())} cores: times will say little", file=sys.stderr)
    runs = []
    with Measured(given.bin_dir, given.model, f"{room >> 20}M", None, f"--policy {given.policy}") as service:
        device, weights, _ = service.bytes_settled()
        service.warm_up()
        for n in contexts:
            print(f"measures {n:,} tokens", file=sys.stderr, flush=True)
            runs.append(service.measure(n, given.decode))
        command = service.command
    host = calibrate(shape, preset, terms, [run for run in runs if run["context"] in given.calibrate])
    result = compare(shape, preset, host, terms, runs, given.calibrate, (device, weights), given.within)
    others = max(run["others"] for run in runs)
    report = {"command": command, "machine": machine.describe(), "others": others, "host": dataclasses.asdict(host),
              "rows": result.rows, "runs": runs, "holds": result.holds}
    if given.save:
        given.save.parent.mkdir(parents=True, exist_ok=True)
        given.save.write_text(json.dumps(report, indent=2) + "\n")
    if given.json:
        print(json.dumps(report, indent=2))
        return 0 if result.holds else 1
    print(f"{command}\nothers used up to {others:.2f} of {len(machine.cores())} cores; learnt from {given.calibrate}:")
    print(f"  weights {host.device_rate / 1e9:.2f} GB/s, keys {host.key_rate / 1e6:.1f} MB/s, rows of the store "
          f"{host.node_rate / 1e9:.2f} GB/s, prefill {host.arithmetic / 1e9:.1f} Gop/s, its attention "
          f"{host.attention / 1e9:.1f} Gop/s, round trip of a layer {host.layer_s * 1e6:.0f} us\n")
    result.show()
    return 0 if result.holds else 1
