#!/usr/bin/env python3
"""bench/capacity: sizes against those of the headers and of docs, limits at their edges, times, files, options."""

import dataclasses
import json
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from capacity_plan import check, hosts, plan, presets, shapes  # noqa: E402

SMALL = shapes.BUILT_IN["smollm2-135m"]
LLAMA = shapes.BUILT_IN["llama-3-8b"]
GPU = hosts.BUILT_IN["gpu-80g"]


def run(*arguments):
    return subprocess.run([str(ROOT / "bench/capacity"), *arguments], capture_output=True, text=True, timeout=60, check=False)


class Sizes(unittest.TestCase):
    def test_worked_example(self):
        """README.md, Memory: one session of 8,192 tokens of SmolLM2-135M."""
        self.assertEqual(SMALL.token_bytes(), 23040)
        self.assertEqual(SMALL.block_bytes(), 1527808)
        self.assertEqual(SMALL.host_bytes(8191), 128 * 1527808)
        self.assertEqual(SMALL.host_bytes(8192), 129 * 1527808)
        self.assertEqual(SMALL.exact_bytes(8192), 132 * 23040)
        self.assertEqual(SMALL.token_bytes("q8_0"), 90 * 2 * (64 + 4))
        self.assertEqual(SMALL.exact_bytes(1000), (4 + 16 * 64) * 23040)

    def test_constants_of_the_headers(self):
        def number(path, name):
            return int(re.search(name + r"\s*(?:=\s*)?(\d+)", (ROOT / path).read_text()).group(1))
        self.assertEqual(shapes.BLOCK_TOKENS, number("proto/layout.h", "LAYOUT_BLOCK_TOKENS"))
        self.assertEqual(shapes.N_LANES, number("proto/layout.h", "LAYOUT_N_LANES"))
        self.assertEqual(shapes.N_SINKS, number("proto/layout.h", "LAYOUT_N_SINKS"))
        self.assertEqual(shapes.PAGE_BYTES, number("proto/layout.h", "LAYOUT_PAGE_BYTES"))
        self.assertEqual(shapes.CHUNK_BLOCKS, number("gpu-worker/keys/key_cache.h", "KEY_CACHE_CHUNK_BLOCKS"))
        self.assertEqual(shapes.WINDOW_BLOCKS, number("gpu-worker/policy/exact_set.h", "EXACT_SET_WINDOW_BLOCKS"))
        self.assertEqual(plan.MAX_SESSIONS, number("value-store/blocks.h", "BLOCKS_SESSION_CAPACITY"))

    def test_presets_are_as_measured(self):
        """docs/quality.md, DEVICE at 4,096 tokens; and key_bytes of that run."""
        f16 = 4 * 64 * 64
        for name, fraction in (("default", 0.0393066406), ("quality", 0.133056641), ("small", 0.0248535156), ("full", 0)):
            self.assertAlmostEqual(presets.built_in(name).tile_bytes(64) / f16, fraction, places=6)
        self.assertEqual(presets.built_in("default").key_bytes(SMALL, 4096), 3709440)
        self.assertEqual(presets.built_in("quality").key_bytes(SMALL, 4096), 12556800)
        self.assertEqual(presets.built_in("full").key_bytes(SMALL, 4096), 0)

    def test_old_tokens(self):
        self.assertEqual(shapes.old_blocks(1023), 0)
        self.assertEqual(shapes.old_blocks(1024), 15)
        self.assertEqual(shapes.old_tokens(1024), 15 * 64 - 4)
        self.assertEqual(shapes.old_tokens(100), 0)
        self.assertEqual(shapes.old_blocks(127, 0), 0)
        self.assertEqual(shapes.old_blocks(128, 0), 1)

    def test_parameters(self):
        """What the models' names say."""
        for name, billions in (("smollm2-135m", 0.1345), ("llama-3-8b", 8.03), ("llama-3-70b", 70.55), ("qwen3-32b", 32.76)):
            self.assertAlmostEqual(shapes.BUILT_IN[name].params / 1e9 / billions, 1, delta=0.005)

    def test_bad_shapes(self):
        for change in ({"n_layers": 0}, {"n_kv_heads": 7}, {"head_dim": 512}, {"weights": "q1"}, {"n_layers": 513}):
            with self.assertRaises(shapes.ShapeError):
                dataclasses.replace(LLAMA, **change).check()


class Limits(unittest.TestCase):
    def test_longest_is_the_edge(self):
        for name in presets.MEASURED:
            for host in hosts.BUILT_IN.values():
                made = plan.Plan(LLAMA, presets.built_in(name), host)
                device, by_host, least, limit = made.longest()
                self.assertEqual(least, min(n for n in (device, by_host) if n is not None))
                self.assertEqual(limit, "device memory" if least == device else "host memory")
                for n, fits in ((device, made._fits_device), (by_host, made._fits_host)):
                    if n:
                        self.assertTrue(fits(n))
                        self.assertFalse(fits(n + 64))

    def test_full_is_not_limited_by_the_device(self):
        made = plan.Plan(LLAMA, presets.built_in("full"), dataclasses.replace(GPU, n_nodes=12, node_bytes=1e15))
        self.assertIsNone(made.longest()[0])

    def test_weights_that_do_not_fit(self):
        made = plan.Plan(dataclasses.replace(LLAMA, weights="f32"), presets.built_in("default"), hosts.BUILT_IN["gpu-24g"])
        self.assertEqual(made.longest()[2:], (0, "device memory"))
        self.assertEqual(made.sessions(4096)[:2], (0, "device memory"))

    def test_lanes_are_whole(self):
        for nodes, share in ((1, 1), (2, 1 / 2), (5, 3 / 12), (8, 2 / 12), (12, 1 / 12)):
            made = plan.Plan(LLAMA, presets.built_in("default"), dataclasses.replace(GPU, n_nodes=nodes))
            self.assertAlmostEqual(made.lanes_share(), share)

    def test_sessions(self):
        made = plan.Plan(LLAMA, presets.built_in("quality"), GPU)
        n, limit, held = made.sessions(32768)
        self.assertEqual(limit, "device memory")
        self.assertTrue(made._fits_device(32768, n) and not made._fits_device(32768, n + 1))
        self.assertGreater(held, n)
        self.assertEqual(plan.Plan(SMALL, presets.built_in("default"), GPU).sessions(1024)[1], "session records")

    def test_processors_alone(self):
        """Without a device its part lies in the nodes' memory."""
        host = dataclasses.replace(GPU, device_bytes=0, link_rate=0, n_nodes=1)
        made = plan.Plan(LLAMA, presets.built_in("default"), host)
        self.assertIsNone(made.longest()[0])
        self.assertLess(made.longest()[1], plan.Plan(LLAMA, presets.built_in("full"), host).longest()[1])


class Times(unittest.TestCase):
    def test_kept(self):
        preset = presets.built_in("default")
        self.assertAlmostEqual(preset.kept(4096), 0.1668)
        self.assertAlmostEqual(preset.kept(8192), 0.106)
        self.assertAlmostEqual(preset.kept(16384), 0.106 ** 2 / 0.1668)
        self.assertAlmostEqual(preset.kept(1 << 20, "flat"), 0.106)
        self.assertAlmostEqual(preset.kept(2048), 0.1668 ** 2 / 0.106)
        self.assertEqual(preset.kept(100), 1)
        self.assertEqual(presets.built_in("full").kept(1 << 20), 1)

    def test_a_step_by_hand(self):
        made = plan.Plan(LLAMA, presets.built_in("full"), dataclasses.replace(GPU, n_nodes=4))
        terms = made.step_terms(65536)
        old = (1024 - 1) * 64 - 4
        self.assertAlmostEqual(terms["store memory rate"], old * 131072 / 4 / GPU.node_rate)
        self.assertAlmostEqual(terms["round trips"], 32 * GPU.layer_s)
        self.assertEqual(terms["key scan"], 0)
        rate, limit = made.rate(65536)
        self.assertAlmostEqual(rate, 1 / sum(terms.values()))
        self.assertEqual(limit, "store memory rate")

    def test_more_of_anything_is_no_faster(self):
        for name in presets.MEASURED:
            made = plan.Plan(LLAMA, presets.built_in(name), GPU)
            for how in ("power", "flat"):
                made = plan.Plan(LLAMA, presets.built_in(name), GPU, plan.Terms(kept=how))
                rates = [made.rate(n)[0] for n in (2048, 8192, 65536, 1 << 20)]
                self.assertEqual(rates, sorted(rates, reverse=True))
            self.assertLess(made.rate(65536)[0], made.rate(65536, 16)[0])
            first = [made.first_token(n)[0] for n in (1, 1024, 8192, 65536, 1 << 20)]
            self.assertEqual(first, sorted(first))

    def test_small_sessions_read_nothing(self):
        terms = plan.Plan(LLAMA, presets.built_in("default"), GPU).step_terms(1000)
        self.assertEqual((terms["store memory rate"], terms["key scan"], terms["round trips"]), (0, 0, 0))

    def test_first_token_by_hand(self):
        made = plan.Plan(LLAMA, presets.built_in("default"), GPU, plan.Terms(prefill_chunk=256))
        terms = made.prefill_terms(1024)
        self.assertAlmostEqual(terms["link rate"], (256 * (1 + 2 + 3) + 1024) * 131072 / GPU.link_rate)
        self.assertAlmostEqual(terms["attention arithmetic"], 4 * 1024 * 1025 / 2 * 32 * 4096 / GPU.attention)
        longer = plan.Plan(LLAMA, presets.built_in("default"), GPU, plan.Terms(prefill_chunk=4096))
        self.assertLess(longer.prefill_terms(65536)["link rate"], made.prefill_terms(65536)["link rate"] / 8)

    def test_calibration_finds_what_made_the_times(self):
        """Times made by known rates give the rates back, and a longer context is predicted."""
        true = hosts.Host("made", 0, 0, 5e9, 4e8, 9e10, 6e10, 0, 3e-5, 0, 1, 8e9, 0.8, 7e9)
        preset = presets.built_in("default")
        made = plan.Plan(SMALL, preset, true)

        def measured(n):
            middle = n + 32
            terms = made.step_terms(middle)
            return {"context": n, "n_decode": 64, "kept": preset.kept(n) if n > 1024 else None,
                    "read_bytes": made.read_bytes(middle)[0], "prefill_s": made.first_token(n)[0],
                    "parts_ms": {"matmul": 1e3 * terms["device memory rate"], "other": 0.0, "select": 1e3 * terms["key scan"],
                                 "store_wait": 1e3 * (terms["store memory rate"] + terms["round trips"]), "attention": 0.0}}
        host = check.calibrate(SMALL, preset, plan.Terms(), [measured(1536), measured(3072)])
        found = plan.Plan(SMALL, preset, host)
        for n in (1536, 3072, 6144):
            self.assertAlmostEqual(found.rate(n)[0] / made.rate(n)[0], 1, delta=0.05)
            self.assertAlmostEqual(found.first_token(n)[0] / made.first_token(n)[0], 1, delta=0.05)
        self.assertAlmostEqual(host.key_rate / true.key_rate, 1, delta=0.02)

    def test_line(self):
        self.assertEqual(check.line([(1, 3), (2, 5)]), (1, 2))
        self.assertEqual(check.line([(1, 5), (2, 3)]), (4, 0))
        start, slope = check.line([(1, 1), (2, 3)])
        self.assertEqual(start, 0)
        self.assertAlmostEqual(slope, 7 / 5)

    def test_off_by_more_is_seen(self):
        result = check.Result(0.25)
        result.add("near", 1.2, 1.0, "s")
        self.assertTrue(result.holds)
        result.add("learnt", 2.0, 1.0, "s", False)
        self.assertTrue(result.holds)
        result.add("far", 0.7, 1.0, "s")
        self.assertFalse(result.holds)


def gguf(values, tensors, magic=b"GGUF", version=3):
    def text(word):
        return struct.pack("<Q", len(word)) + word.encode()

    def value(item):
        if isinstance(item, str):
            return struct.pack("<I", 8) + text(item)
        if isinstance(item, list):
            return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(text, item))
        return struct.pack("<II", 4, item)
    return (magic + struct.pack("<IQQ", version, len(tensors), len(values)) +
            b"".join(text(name) + value(item) for name, item in values.items()) +
            b"".join(text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, 0) for name, dims, kind in tensors))


class Files(unittest.TestCase):
    VALUES = {"general.architecture": "llama", "general.name": "tiny", "llama.block_count": 2, "llama.embedding_length": 64,
              "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.feed_forward_length": 96,
              "llama.context_length": 512, "tokenizer.ggml.tokens": ["a", "b", "c"]}
    TENSORS = [("token_embd.weight", (64, 3), 0), ("blk.0.ffn_up.weight", (64, 96), 8)]

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.file = pathlib.Path(folder.name) / "file"

    def of(self, data):
        self.file.write_bytes(data)
        return shapes.of_gguf(self.file)

    def test_gguf(self):
        shape = self.of(gguf(self.VALUES, self.TENSORS))
        self.assertEqual((shape.name, shape.n_layers, shape.head_dim, shape.n_vocab, shape.tied), ("tiny", 2, 16, 3, True))
        self.assertEqual(shape.weight_bytes, 64 * 3 * 4 + 64 * 96 // 32 * 34)

    def test_bad_gguf(self):
        good = gguf(self.VALUES, self.TENSORS)
        without = {name: item for name, item in self.VALUES.items() if name != "llama.block_count"}
        for data in (b"", b"GGUF", good[:-1], good[:60], gguf(self.VALUES, self.TENSORS, b"GGML"),
                     gguf(self.VALUES, self.TENSORS, version=9), gguf(without, self.TENSORS),
                     gguf(self.VALUES, [("x", (64, 3), 99)]), b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60)):
            with self.assertRaises(shapes.ShapeError):
                self.of(data)
        for n in range(0, len(good), 7):  # wherever it is cut
            with self.assertRaises(shapes.ShapeError):
                self.of(good[:n])

    def test_eval(self):
        mean = {"preset": "default", "baseline": False, "kept": 0.2, "device_bytes_fraction": 0.05, "table_bytes": 7}
        row = {"preset": "default", "text": "prose", "context": 16384}
        self.file.write_text(json.dumps({"rows": [row], "means": [mean]}))
        default, small = presets.of_evals([self.file], ["default", "small"])
        self.assertEqual(default.points, ((4096, 0.1668), (8192, 0.106), (16384, 0.2)))
        self.assertAlmostEqual(default.key_token_bytes(SMALL), 0.05 * 23040)
        self.assertEqual(small, presets.built_in("small"))
        for text in ("", "{}", "[]", '{"rows": [{}], "means": []}', json.dumps({"rows": [row], "means": [{**mean, "kept": 0}]})):
            self.file.write_text(text)
            with self.assertRaises(presets.PresetError):
                presets.of_evals([self.file], ["default"])

    def test_saved_host(self):
        self.file.write_text(json.dumps({"host": dataclasses.asdict(GPU)}))
        self.assertEqual(hosts.of_file(self.file), GPU)
        for host in ({}, {**dataclasses.asdict(GPU), "n_nodes": 13}, {**dataclasses.asdict(GPU), "device_rate": "fast"}):
            self.file.write_text(json.dumps({"host": host}))
            with self.assertRaises(hosts.HostError):
                hosts.of_file(self.file)


class Command(unittest.TestCase):
    def test_json_and_tables(self):
        done = run("--json", "--shape", "all", "--context", "32k")
        self.assertEqual(done.returncode, 0, done.stderr)
        said = json.loads(done.stdout)
        self.assertEqual(len(said["longest"]), 4 * 5)
        self.assertEqual(len(said["at_context"]), 4 * 5)
        made = plan.Plan(LLAMA, presets.built_in("default"), GPU)
        [one] = [one for one in said["longest"] if (one["shape"], one["preset"]) == ("Llama-3-8B", "default")]
        self.assertEqual(one["longest_by_device"], made.longest()[0])
        done = run("--n-layers", "16", "--context", "8k", "--presets", "default", "--device-memory", "24GB", "--nodes", "3")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("shape of options", done.stdout)
        self.assertEqual(run("--device-memory", "4GB", "--context", "8k").returncode, 0)  # nothing fits; it says so

    def test_refusals_are_one_line(self):
        for arguments in (("--shape", "gpt"), ("--host", "/nowhere"), ("--presets", "best"), ("--gguf", "/dev/null"),
                          ("--nodes", "13"), ("--node-rate", "0"), ("--eval", "/nowhere"), ("--n-kv-heads", "5")):
            done = run(*arguments)
            self.assertEqual(done.returncode, 2, arguments)
            self.assertEqual((done.stdout, done.stderr.count("\n")), ("", 1), done.stderr)
        for arguments in (("--context", "0"), ("--device-memory", "much"), ("--check", "--calibrate", "1536"),
                          ("--check", "--model", "/nowhere"), ("--max-batch", "0")):
            self.assertEqual(run(*arguments).returncode, 2, arguments)


if __name__ == "__main__":
    unittest.main()
