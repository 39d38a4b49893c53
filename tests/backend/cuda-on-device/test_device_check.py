#!/usr/bin/env python3
"""Tests of tests/backend/device-check without a device: programs that pretend to be the device's.

usage: test_device_check.py
"""
import json
import os
import pathlib
import subprocess
import tempfile
import time
import unittest

CHECK = pathlib.Path(__file__).resolve().parents[1] / "device-check"
DEVICE = '{"name": "pretended", "pci": "0000:01:00", "memory_peak_gb_s": 1000.0}'
CASE = '{"kernel": "add", "type": "f32", "shape": "T1 x 8", "bytes": 96, "operations": 8, "us": 2.5}'
LEFT_OUT = '{"kernel": "matvec", "type": "Q4_K", "shape": "8x64", "skipped": "shape"}'
LAYER = '{"policy": "default", "tokens": 131072, "layer_us": 10.5}'
LAYER_LEFT_OUT = '{"policy": "default", "tokens": 4194304, "skipped": "host-memory"}'
# A service that answers the same whatever its back end is; $1 is the command, $backend what `up` was given.
SERVICE = """
command=$1
while [ $# -gt 0 ]; do case $1 in --backend) backend=$2;; --runtime-dir) folder=$2;; esac; shift; done
case $command in
up) echo "up with $backend"; echo $backend >"$folder/backend"; trap 'exit 0' INT; while :; do sleep 0.1; done;;
status) echo '{"ready": true, "n_ctx": 131072, "policy": "default", "device_bytes_per_token": 21,
    "processes": [{"program": "hc-gpu-worker", "index": 0, "achieved": "pretended"}]}';;
tokenize) printf '{"ids": [1'; printf ', 1%.0s' {1..20000}; echo ']}';;
generate) cat >/dev/null; tokens="[1, 2]"; OTHER
    echo "{\\"prompt_tokens\\": [1], \\"tokens\\": $tokens, \\"logprobs\\": [-1.0, -2.0], \\"timings\\": {\\"n_prefill\\": 1,
        \\"n_decode\\": 2, \\"prefill_tokens_per_second\\": 10.0, \\"decode_tokens_per_second\\": 5.0, \\"store_wait_ms\\": 1.0}}";;
esac
"""
GOOD_TEST = "echo '[       OK ] rope'; echo '[       OK ] add'"


class DeviceCheck(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.programs, self.tools = self.root / "programs", self.root / "tools"
        self.write(self.programs / "timings",
                   f"if [ \"$1\" = --describe ]; then echo '{DEVICE}'; else echo '{CASE}'; echo '{LEFT_OUT}'; fi")
        self.write(self.programs / "test-ops", GOOD_TEST)
        self.write(self.programs / "layer", f"echo '{LAYER}'; echo '{LAYER_LEFT_OUT}'")
        for name in ("hc-coordinator", "hc-value-store", "hc-gpu-worker"):
            self.write(self.programs / "bin" / name, "exit 1")
        self.write(self.programs / "bin/hcattn", SERVICE.replace("OTHER", ""))
        (self.root / "model.gguf").write_text("pretended")
        self.tools.mkdir()

    @staticmethod
    def write(path, text):
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def check(self, *arguments):
        """(exit status, report, what it said)"""
        out = self.root / "out.json"
        environment = {"PATH": f"{self.tools}:/usr/bin:/bin", "CUDA_HOME": "/nowhere", "LC_ALL": "C.UTF-8"}
        ended = subprocess.run([CHECK, "--programs", self.programs, "--model", self.root / "model.gguf", "--out", out, *arguments],
                               env=environment,
                               capture_output=True, text=True, timeout=60)
        return ended.returncode, json.loads(out.read_text()) if out.exists() else None, ended.stdout + ended.stderr

    def test_all_is_well(self):
        self.write(self.tools / "nvidia-smi", '[[ "$*" == *name,* ]] && exit 2; echo "value of ${2#*=}"')
        self.write(self.tools / "compute-sanitizer", "echo '========= ERROR SUMMARY: 0 errors'")
        status, report, said = self.check()
        self.assertEqual(status, 0, said)
        self.assertTrue(report["passed"] and report["times_mean_something"])
        self.assertEqual(report["device"]["name"], "pretended")
        self.assertEqual(report["nvidia_smi"]["memory.total"], "value of memory.total")
        self.assertIn({"test": "ops", "passed": 2, "failed": 0, "status": 0}, report["tests"])
        self.assertIn({"test": "memcheck ops", "status": 0, "summary": "0 errors"}, report["tests"])
        self.assertEqual(report["times"], [json.loads(CASE)])
        self.assertEqual(report["skipped"], [{"what": "layer default at 4194304", "why": "host-memory"},
                                             {"what": "matvec Q4_K 8x64", "why": "shape"}])
        self.assertEqual(report["layer"], [json.loads(LAYER)])
        service = report["service"]
        self.assertEqual(service["backends"]["cuda"]["achieved"], ["hc-gpu-worker 0: pretended"])
        self.assertEqual({(line["equal"], line["largest_difference"]) for line in service["tokens"]}, {(2, 0.0)})
        self.assertEqual([line["backend"] for line in service["speed"]], 2 * ["cpu"] + 8 * ["cuda"])

    def test_other_tokens_than_the_cpus(self):
        other = '[ "$(cat "$folder/backend")" = cpu ] && tokens="[3, 2]"'
        self.write(self.programs / "bin/hcattn", SERVICE.replace("OTHER", other))
        status, report, _ = self.check()
        self.assertEqual((status, {line["equal"] for line in report["service"]["tokens"]}), (1, {0}))

    def test_a_service_that_does_not_start(self):
        self.write(self.programs / "bin/hcattn", "echo no device here; exit 1")
        status, report, said = self.check()
        self.assertEqual(status, 1)
        self.assertIn("no device here", report["service"]["backends"]["cuda"]["error"])
        self.assertEqual(len(report["times"]), 1, "what comes after is still done")

    def test_no_service(self):
        (self.programs / "bin/hc-gpu-worker").unlink()
        status, report, _ = self.check()
        self.assertEqual(status, 1)
        self.assertIn({"what": "service", "why": "missing"}, report["skipped"])

    def test_a_layer_fails(self):
        self.write(self.programs / "layer", f"echo '{LAYER}'; exit 1")
        self.assertEqual(self.check()[0], 1)

    def test_tests_of_cublas_without_it(self):
        self.write(self.programs / "test-product", "exit 1")
        status, report, said = self.check()
        left_out = {"what": "test product", "why": "cublas"} in report["skipped"]
        self.assertEqual((left_out, status), (True, 0) if report["cublas"] is None else (False, 1), said)

    def test_no_device(self):
        self.write(self.programs / "timings", "echo 'cudaErrorNoDevice: no CUDA-capable device is detected'; exit 1")
        status, report, said = self.check()
        self.assertEqual((status, report["passed"]), (1, False))
        self.assertIn("no device: cudaErrorNoDevice", said)
        self.assertEqual(report["tests"], [])

    def test_a_test_fails(self):
        self.write(self.programs / "test-attend", "echo '[       OK ] one'; echo '[  FAILED  ] two'; exit 1")
        status, report, _ = self.check()
        self.assertEqual((status, report["passed"]), (1, False))
        result = [test for test in report["tests"] if test["test"] == "attend"][0]
        self.assertEqual((result["passed"], result["failed"]), (1, 1))
        self.assertIn("FAILED", result["output"])
        self.assertEqual(len(report["times"]), 1, "what comes after is still done")

    def test_one_that_tests_nothing_fails(self):
        self.write(self.programs / "test-ops", "exit 0")
        self.assertEqual(self.check()[0], 1)

    def test_one_that_cannot_start_fails(self):
        self.write(self.programs / "test-ops", "echo 'libfoo.so: cannot open shared object file'; exit 127")
        status, report, _ = self.check()
        self.assertEqual(status, 1)
        self.assertIn("libfoo", report["tests"][0]["output"])

    def test_a_time_fails(self):
        self.write(self.programs / "timings", f"[ \"$1\" = --describe ] && echo '{DEVICE}' && exit\n"
                   'echo \'{"kernel": "add", "type": "f32", "shape": "8", "error": "cudaErrorLaunchFailure"}\'; exit 1')
        status, report, _ = self.check()
        self.assertEqual((status, report["times"][0]["error"]), (1, "cudaErrorLaunchFailure"))

    def test_the_sanitizer_finds_something(self):
        self.write(self.tools / "compute-sanitizer", '[ "$2" = memcheck ] || exec echo "RACECHECK SUMMARY: 0 hazards"\n'
                   "echo '========= Invalid __global__ write'; echo '========= ERROR SUMMARY: 1 error'; exit 99")
        status, report, _ = self.check()
        self.assertEqual(status, 1)
        self.assertIn("Invalid", [test for test in report["tests"] if test["test"] == "memcheck ops"][0]["output"])

    def test_tools_that_are_not_there(self):
        status, report, said = self.check()
        self.assertEqual(status, 0, said)
        self.assertIn({"what": "racecheck ops", "why": "missing"}, report["skipped"])

    def test_a_sanitizer_that_cannot_work_here(self):
        self.write(self.tools / "compute-sanitizer", "echo 'Error: Device not supported.'; exit 1")
        status, report, _ = self.check()
        self.assertEqual(status, 0)
        self.assertIn({"what": "memcheck ops", "why": "unsupported"}, report["skipped"])

    def test_the_deadline_ends_what_hangs(self):
        self.write(self.programs / "test-ops", "sleep 600 & sleep 600")
        began = time.monotonic()
        status, report, _ = self.check("--minutes", "0.1")
        self.assertLess(time.monotonic() - began, 40)
        self.assertEqual((status, report["tests"][0]["status"]), (1, "deadline"))
        self.assertIn({"what": "times", "why": "deadline"}, report["skipped"])

    def test_no_programs(self):
        (self.programs / "timings").unlink()
        status, report, said = self.check()
        self.assertEqual((status, report), (2, None))
        self.assertIn("scripts/build cuda", said)

    def test_pack(self):
        names = ("hcattn", "hc-coordinator", "hc-value-store", "hc-gpu-worker")
        for name in ("timings", "test-ops", "layer", *(f"bin/{name}" for name in names)):  # real programs, which have libraries
            (self.programs / name).unlink()
            os.symlink("/bin/ls", self.programs / name)
        packed = self.root / "packed"
        status, _, said = self.check("--pack", packed)
        self.assertEqual(status, 0, said)
        self.assertTrue((packed / "timings").is_file() and (packed / "bin/hcattn").is_file())
        self.assertFalse(list((packed / "lib").glob("libc.so*")), "the machine has its own")


if __name__ == "__main__":
    unittest.main()
