#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The rules find what they are there for."""
import unittest

import source_rules


class SourceRulesTest(unittest.TestCase):
    def check(self, text, name="daemon/store/a.cc"):
        return list(source_rules.check_code(name, text))

    def test_clean_code_passes(self):
        self.assertEqual([], self.check("int x = 0;  // A comment that says throw.\n"))

    def test_long_line_and_long_file_are_found(self):
        self.assertIn("columns", self.check("x" * 101)[0])
        self.assertIn("split", self.check("\n" * 601)[0])

    def test_todo_needs_a_number(self):
        self.assertEqual(1, len(self.check("// TO" "DO: later\n")))
        self.assertEqual([], self.check("// TO" "DO(#12): later\n"))

    def test_sleep_needs_its_reason(self):
        self.assertEqual(1, len(self.check("sleep_for(x);\n")))
        self.assertEqual([], self.check("// sleeps: the back-off itself.\nsleep_for(x);\n"))

    def test_shared_ownership_needs_its_reason(self):
        self.assertEqual(1, len(self.check("std::shared_ptr<int> p;\n")))
        self.assertEqual([], self.check("std::shared_ptr<int> p;  // shared: with the other.\n"))

    def test_header_needs_pragma_once(self):
        self.assertEqual(1, len(self.check("int x;\n", "proto/base/a.h")))

    def test_messages_name_keys_that_are_there(self):
        def named(text):
            return list(source_rules.check_messages("daemon/a.cc", text, {"store": {"capacity", "gpu_chunk"}}))

        self.assertEqual([], named('"set [store] "\n    "capacity, or lower gpu_chunk"'))
        self.assertIn("[store] capcity", named('"raise [store] capcity"')[0])
        self.assertIn("max_namespaces", named('"; evict some, or raise "\n  "max_namespaces"')[0])

    def test_configuration_keys_are_read_from_the_deployed_file(self):
        keys = source_rules.config_keys(source_rules.pathlib.Path(__file__).parents[2])
        self.assertIn("capacity", keys["store"])
        self.assertEqual({"listen", "store", "demote", "ucx", "log"}, set(keys))

    def test_tests_may_do_what_the_product_may_not(self):
        self.assertEqual([], self.check("std::shared_ptr<int> p;\n", "tests/a_test.cc"))


if __name__ == "__main__":
    unittest.main()
