"""What compose-for-this-host writes for hosts that this machine is not."""

import os
import subprocess
import sys
import tempfile
import unittest

SCRIPT = os.path.join(os.path.dirname(os.path.realpath(__file__)), "../../docker/compose-for-this-host")
GIB_KB = 1 << 20


class Hosts(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def node(self, number, cpus, free_gib, of_files_gib=0):
        """A node with twice the memory that is free."""
        path = os.path.join(self.folder.name, f"node{number}")
        os.mkdir(path)
        kib = {"MemTotal": 2 * free_gib * GIB_KB, "MemFree": free_gib * GIB_KB, "Active(file)": of_files_gib * GIB_KB}
        with open(os.path.join(path, "cpulist"), "w", encoding="ascii") as file:
            file.write(cpus + "\n")
        with open(os.path.join(path, "meminfo"), "w", encoding="ascii") as file:
            file.writelines(f"Node {number} {name}: {size:8} kB\n" for name, size in kib.items())

    def script(self, *words, status=0):
        done = subprocess.run([sys.executable, SCRIPT, "--sysfs", self.folder.name, "--output", "-", *words],
                              capture_output=True, text=True, check=False, timeout=30)
        self.assertEqual(done.returncode, status, done.stderr)
        return done.stdout if status == 0 else done.stderr

    def stores(self, text):
        """(index, cpus, node, memory, limit) of each store."""
        found = []
        for part in text.split("\n  value-store-")[1:]:
            words = dict(line.strip().split(": ", 1) for line in part.splitlines() if ": " in line)
            found.append((int(words["HCATTN_INDEX"].strip('"')), words["cpuset"].strip('"'), words["HCATTN_NODE"].strip('"'),
                          words["HCATTN_MEMORY"], words["mem_limit"]))
            self.assertEqual(words["memswap_limit"], words["mem_limit"])
        return found

    def test_store_for_each_node(self):
        self.node(0, "0-3,8-11", 8)
        self.node(1, "4-7,12-15", 4, of_files_gib=4)
        text = self.script("--cpus", "0-15")
        self.assertEqual(self.stores(text), [(0, "0-3,8-11", "0", "6144MiB", "6656m"), (1, "4-7,12-15", "1", "6144MiB", "6656m")])
        self.assertIn('HCATTN_STORES: "2"', text)
        self.assertIn("value-store:\n    scale: 0\n", text)

    def test_numbers_with_gaps_and_interleaved_cpus(self):
        self.node(0, "0,2,4,6", 8)
        self.node(8, "1,3,5,7", 8)
        self.assertEqual([store[:3] for store in self.stores(self.script("--cpus", "0-7"))],
                         [(0, "0,2,4,6", "0"), (1, "1,3,5,7", "8")])

    def test_nodes_without_memory_or_cpus_get_none(self):
        self.node(0, "0-1", 8)
        self.node(1, "2-3", 0)
        self.node(2, "", 8)
        self.node(3, "4-5", 8)
        self.assertEqual([store[2] for store in self.stores(self.script("--cpus", "0-5"))], ["0", "3"])
        self.assertEqual([store[2] for store in self.stores(self.script("--cpus", "0-3"))], ["0"])

    def test_cpus_that_are_not_ours_are_left_out(self):
        self.node(0, "0-7", 8)
        self.assertEqual(self.stores(self.script("--cpus", "2-3,6"))[0][1], "2-3,6")

    def test_choices(self):
        self.node(0, "0", 8)
        self.node(1, "1", 8)
        self.assertEqual(self.stores(self.script("--cpus", "0-1", "--nodes", "1", "--memory", "2GiB")),
                         [(0, "1", "1", "2048MiB", "2560m")])

    def test_workers_for_gpus(self):
        self.node(0, "0", 8)
        text = self.script("--cpus", "0", "--gpus", "2")
        self.assertEqual(len(self.stores(text.split("  gpu-worker:")[0])), 1)
        for index in range(2):
            part = text.split(f"\n  gpu-worker-{index}:\n")[1].split("\n  gpu-worker-")[0]
            self.assertIn(f'HCATTN_INDEX: "{index}"\n      HCATTN_BACKEND: cuda\n', part)
            self.assertIn(f'device_ids: ["{index}"]\n', part)
        self.assertIn('HCATTN_WORKERS: "2"', text)
        self.assertNotIn("gpu-worker", self.script("--cpus", "0"))
        for number in ("0", "17", "all", "-1", "1.5"):
            self.assertIn("is no number from 1 to 16", self.script("--cpus", "0", f"--gpus={number}", status=2))

    def test_refusals(self):
        self.assertIn("no NUMA node", self.script(status=1))
        self.node(0, "0", 8)
        self.assertIn("node 3 does not exist", self.script("--cpus", "0", "--nodes", "0,3", status=1))
        self.assertIn("too little for a store of 9216 MiB", self.script("--cpus", "0", "--memory", "9GiB", status=1))
        self.assertIn("'lots' is no size", self.script("--memory", "lots", status=2))
        self.assertIn("'0,,2' is no list", self.script("--nodes", "0,,2", status=2))
        self.assertIn("'x' is no list", self.script("--cpus", "x", status=2))


if __name__ == "__main__":
    unittest.main()
