#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The include check finds what it is there for."""
import pathlib
import tempfile
import unittest

import include_graph


class IncludeGraphTest(unittest.TestCase):
    def check(self, files):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in files.items():
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return include_graph.check(root)

    def test_downward_edge_is_fine(self):
        self.assertEqual([], self.check({"daemon/store/a.cc": '#include "proto/base/ids.h"\n'}))

    def test_upward_edge_is_found_with_its_line(self):
        problems = self.check({"proto/base/a.h": '\n#include "daemon/store/b.h"\n'})
        self.assertEqual(1, len(problems))
        self.assertIn("proto/base/a.h:2", problems[0])

    def test_public_headers_count_as_their_module(self):
        self.assertEqual(1, len(self.check({"daemon/index/a.h": '#include "crumb/client.h"\n'})))
        self.assertEqual([], self.check({"daemon/store/a.h": '#include "crumb/cuda/profile.h"\n'}))

    def test_library_outside_of_its_module_is_found(self):
        problems = self.check({"daemon/store/a.cc": "#include <ucp/api/ucp.h>\n"})
        self.assertIn("UCX", problems[0])
        self.assertEqual(1, len(self.check({"client/session/a.cc": '#include "rocksdb/db.h"\n'})))

    def test_module_outside_of_the_table_is_found(self):
        self.assertIn("daemon/extra", self.check({"daemon/extra/a.cc": "\n"})[0])


if __name__ == "__main__":
    unittest.main()
