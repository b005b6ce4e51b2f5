#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The check of links finds those that are dead."""
import pathlib
import tempfile
import unittest

import doc_links


class DocLinksTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.root = pathlib.Path(self.folder.name).resolve()
        (self.root / "other.md").write_text("# The `words` we use: a [list](x.md)\n```\n# no heading\n```\n")

    def tearDown(self):
        self.folder.cleanup()

    def check(self, text):
        document = self.root / "page.md"
        document.write_text(text)
        return list(doc_links.check_document(document, self.root))

    def test_links_that_lead_somewhere_pass(self):
        self.assertEqual([], self.check("## Here\n[a](other.md) [b](other.md#the-words-we-use-a-list) [c](#here)\n"
                                        "[d](https://example.org/gone) [e](.)\n```\n[f](gone.md)\n```\n"))

    def test_dead_files_and_headings_are_named(self):
        self.assertIn("gone.md leads nowhere", self.check("[a](gone.md)")[0])
        self.assertIn("other.md#no-heading names no heading", self.check("[a](other.md#no-heading)")[0])
        self.assertEqual(1, len(self.check("[a](#nowhere)")))


if __name__ == "__main__":
    unittest.main()
