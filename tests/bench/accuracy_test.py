#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Joining evaluations of a model's texts, which several processes made, into one result."""
import contextlib
import io
import json
import math
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench/accuracy"))
import record_evaluate


def report(texts, count, *, profile="ab", model="m"):
    """As crumb.evaluate writes it for texts of these perplexities, `count` predictions each."""
    def cache(factor, kl):
        scaled = [factor * text for text in texts]
        return {"perplexity": math.exp(sum(map(math.log, scaled)) / len(scaled)), "gap_percent": 0.0, "kl": kl,
                "top1_agreement": 1 - kl, "num_predictions": count * len(texts), "seconds": 2.0, "texts": scaled}
    return {"model": model, "scored_from": 1024, "profiles": {"tilted": {"id": profile, "sink": 64, "recent": 256}},
            "caches": {"bf16": cache(1.0, 0.0), "tilted": cache(1.02, 0.1 * len(texts))}}


class RecordEvaluateTest(unittest.TestCase):
    def test_predictions_count_alike_whatever_file_they_are_in(self):
        bf16, tilted = record_evaluate.join([report([4.0], 100), report([9.0, 6.0], 100)])
        self.assertAlmostEqual((4 * 9 * 6) ** (1 / 3), bf16["perplexity"])
        self.assertAlmostEqual(0.02, tilted["gap"])
        self.assertAlmostEqual((0.1 + 2 * 0.2) / 3, tilted["kl"])
        self.assertAlmostEqual(1 - 0.5 / 3, tilted["top1_agreement"])
        self.assertEqual((300, 4.0, "ab", 256),
                         (tilted["num_predictions"], tilted["seconds"], tilted["profile_id"], tilted["recent_tokens"]))
        self.assertEqual([(0, 4.0), (1, 9.0), (2, 6.0)], [(t["text"], t["perplexity"]) for t in bf16["texts"]])

    def test_evaluations_of_other_profiles_or_models_are_not_joined(self):
        for other in (report([4.0], 100, profile="cd"), report([4.0], 100, model="n")):
            with self.assertRaisesRegex(ValueError, "differ in '(profiles|model)'"):
                record_evaluate.join([report([4.0], 100), other])

    def test_the_result_is_written_with_its_machine(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
            source, out = pathlib.Path(folder, "a.json"), pathlib.Path(folder, "out.json")
            source.write_text(json.dumps(report([4.0], 100)))
            self.assertEqual(0, record_evaluate.main(["--out", str(out), "--commit", "abc", str(source)]))
            result = json.loads(out.read_text())
        self.assertIn("cpu", result["machine"])
        self.assertEqual("abc", result["machine"]["commit"])
        self.assertEqual(["m bf16", "m tilted"], [figure["name"] for figure in result["figures"]])
        self.assertIn("+2.00 %", printed.getvalue())


if __name__ == "__main__":
    unittest.main()
