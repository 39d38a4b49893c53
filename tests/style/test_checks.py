#!/usr/bin/env python3
"""The checkers themselves: each rule must be broken once by an example, and pass once."""
import unittest

import check_symbols
import check_tree


def problems(path, code, existing=()):
    text = "/* about */\n" + ("#pragma once\n" if path.endswith(".h") else "") + code + "\n"
    return list(check_tree.check_file(path, text, lambda name: name in existing))


class Includes(unittest.TestCase):
    def assert_refused(self, path, code, part, existing=()):
        found = problems(path, code, existing)
        self.assertEqual(len(found), 1, found)
        self.assertIn(part, found[0])

    def test_own_folder_and_allowed_folders(self):
        self.assertEqual(problems("value-store/blocks.c", '#include "value-store/blocks.h"\n#include "common/log.h"',
                                  ["value-store/blocks.h", "common/log.h"]), [])
        self.assertEqual(problems("tests/unit/x/test_x.c", '#include "gpu-worker/step.h"\n#include <cmocka.h>',
                                  ["gpu-worker/step.h"]), [])

    def test_processes_do_not_include_each_other(self):
        self.assert_refused("gpu-worker/step.c", '#include "value-store/blocks.h"', "may not include value-store",
                            ["value-store/blocks.h"])

    def test_kernels_and_common_include_nothing(self):
        self.assert_refused("kernels/plain.c", '#include "common/pool.h"', "kernels may not include",
                            ["common/pool.h"])
        self.assert_refused("common/log.c", '#include "proto/layout.h"', "common may not include", ["proto/layout.h"])

    def test_nothing_includes_tests(self):
        self.assert_refused("client/call.c", '#include "tests/unit/common/helpers.h"', "may not include tests",
                            ["tests/unit/common/helpers.h"])

    def test_includes_start_at_the_root(self):
        self.assert_refused("client/call.c", '#include "call.h"', "not written from")
        self.assert_refused("client/call.c", '#include "../common/log.h"', "not written from")
        self.assert_refused("client/call.c", '#include "client/gone.h"', "does not exist")
        self.assert_refused("client/call.c", '#include "client/message.c"', "includes a .c", ["client/message.c"])

    def test_outside_headers_have_their_file(self):
        self.assertEqual(problems("common/socket.c", "#include <zmq.h>"), [])
        self.assert_refused("coordinator/server.c", "#include <zmq.h>", "common/socket")
        self.assert_refused("common/segment.c", "#include <hwloc.h>", "common/topology")
        self.assert_refused("gpu-worker/backend/cpu/cpu.c", "#include <cublas_v2.h>", "backend/cuda")
        self.assert_refused("client/call.c", "#include <cmocka.h>", "tests only")
        self.assertEqual(problems("coordinator/server.c", "/* #include <zmq.h> */\n// #include <hwloc.h>"), [])

    def test_messages_stop_at_the_server(self):
        self.assertEqual(problems("value-store/server_peer.c", '#include "proto/work.pb-c.h"'), [])
        self.assert_refused("value-store/blocks.c", '#include "proto/work.pb-c.h"', "messages stop")
        self.assert_refused("gpu-worker/model/gguf.c", '#include "common/socket.h"', "messages stop",
                            ["common/socket.h"])

        self.assert_refused("coordinator/placement.c", '#include "proto/control.pb-c.h"', "messages stop")
        self.assertEqual(problems("coordinator/router.c", '#include "proto/control.pb-c.h"'), [])

    def test_the_environment_is_read_in_one_place(self):
        self.assertEqual(problems("common/options.c", 'x = getenv("HOME");'), [])
        self.assert_refused("client/call.c", 'x = getenv("HOME");', "common/options")
        self.assert_refused("client/call.c", "extern char **environ;", "common/options")


class Files(unittest.TestCase):
    def test_length(self):
        self.assertEqual(problems("client/call.c", "\n" * 598), [])
        self.assertIn("601 lines", problems("client/call.c", "\n" * 599)[0])

    def test_headers(self):
        text = "/* about */\n"
        self.assertEqual(list(check_tree.check_file("client/x.h", text, bool)), ["no #pragma once"])
        self.assertEqual(len(list(check_tree.check_file("client/x.c", "int x;\n", lambda name: False))), 1)
        self.assertEqual(list(check_tree.check_file("client/x.c", "int x;\n", lambda name: True)), [])


class Symbols(unittest.TestCase):
    def test_names(self):
        for member, symbol in [("pool.c.o", "pool_run"), ("options_value.c.o", "options_string"),
                               ("test-x.c.o", "test_x_y"), ("main.c.o", "main"), ("utf8.c.o", "utf8"),
                               ("socket.c.o", "__tsan_default_suppressions")]:
            self.assertTrue(check_symbols.allowed(member, symbol), (member, symbol))
        for member, symbol in [("pool.c.o", "run"), ("pool.c.o", "poolrun"), ("options_value.c.o", "value_read"),
                               ("pool.c.o", "my_pool_run")]:
            self.assertFalse(check_symbols.allowed(member, symbol), (member, symbol))


if __name__ == "__main__":
    unittest.main()
