"""Which number run-value-store takes: the first that no other container has; and what it says when there is none."""

import contextlib
import fcntl
import os
import subprocess
import tempfile
import unittest

SCRIPT = os.path.join(os.path.dirname(os.path.realpath(__file__)), "../../docker/run-value-store")


class Numbers(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        # In place of hcattn: tells how it was started, and lives until its input ends.
        path = os.path.join(self.folder.name, "hcattn")
        with open(path, "w", encoding="ascii") as file:
            file.write('#!/bin/sh\necho "$@"\nread line || true\n')
        os.chmod(path, 0o700)

    def start(self, *words, index=None):
        """(process, its first line)"""
        environment = {"PATH": f"{self.folder.name}:{os.environ['PATH']}", "HCATTN_RUNTIME_DIR": self.folder.name}
        if index is not None:
            environment["HCATTN_INDEX"] = index
        process = subprocess.Popen([SCRIPT, *words], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True)
        self.addCleanup(self.end, process)
        return process, process.stdout.readline().strip()

    def end(self, process):
        if not process.stdin.closed:
            process.stdin.close()
        status = process.wait(10)
        process.stdout.close()
        return status

    def test_first_free_number(self):
        stores = [self.start("--", "--isa", "auto") for _ in range(3)]
        self.assertEqual([line for _, line in stores], [f"run --index {i} value-store -- --isa auto" for i in range(3)])
        self.end(stores[1][0])
        self.assertEqual(self.start()[1], "run --index 1 value-store")
        self.assertEqual(self.start()[1], "run --index 3 value-store")

    def test_number_that_is_given(self):
        self.assertEqual(self.start(index="1")[1], "run value-store")
        self.assertEqual([self.start()[1] for _ in range(2)], ["run --index 0 value-store", "run --index 2 value-store"])
        process, line = self.start(index="1")
        self.assertEqual(line, "run-value-store: another container has number 1")
        self.assertEqual(self.end(process), 2)

    def test_all_numbers_are_taken(self):
        with contextlib.ExitStack() as held:
            for index in range(64):
                file = held.enter_context(open(f"{self.folder.name}/value-store-{index}.lock", "wb"))
                fcntl.flock(file, fcntl.LOCK_EX)
            process, line = self.start()
            self.assertEqual(line, "run-value-store: all 64 numbers of stores are taken")
            self.assertEqual(self.end(process), 2)


if __name__ == "__main__":
    unittest.main()
