#!/usr/bin/env python3
"""Tests of bench/roofline: docs/cuda.md has its table as it is now, and a report of a device is put beside it.

usage: test_roofline.py
"""
import json
import pathlib
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def roofline(*arguments):
    return subprocess.run([ROOT / "bench/roofline", *arguments], capture_output=True, text=True, timeout=60)


class Roofline(unittest.TestCase):
    def report(self, **fields):
        file = tempfile.NamedTemporaryFile("w", suffix=".json")
        self.addCleanup(file.close)
        case = {"kernel": "dequantize_f16", "type": "F16", "shape": "4096x4096", "us": 28.0}
        json.dump({"device": {"name": "NVIDIA H200"}, "times_mean_something": True, "times": [case], **fields}, file)
        file.flush()
        return file.name

    def test_the_document_has_the_tables(self):
        document = (ROOT / "docs/cuda.md").read_text()
        for arguments in ([], ["--contexts"]):
            ended = roofline(*arguments)
            self.assertEqual(ended.returncode, 0, ended.stderr)
            self.assertIn(ended.stdout, document, "bench/roofline says otherwise by now")

    def test_a_report_beside_it(self):
        # 67.1 MB at 4.8 TB/s are 13.98 us: half of the measured time
        lines = [line for line in roofline(self.report()).stdout.splitlines() if "| dequantize_f16 | F16 " in line]
        self.assertEqual([line.split(" | ")[-2:] for line in lines], [["28.00", "50% |"]])

    def test_a_device_that_is_not_in_the_table(self):
        ended = roofline("--all", self.report(device={"name": "NVIDIA L4"}))
        self.assertEqual(ended.returncode, 0)
        self.assertIn("| 28.00 | - |", ended.stdout)

    def test_times_of_the_emulation_are_refused(self):
        ended = roofline(self.report(times_mean_something=False))
        self.assertEqual((ended.returncode, ended.stdout), (1, ""))


if __name__ == "__main__":
    unittest.main()
