#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The collector of benchmark figures: from a program's report to table, JSON and picture."""
import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest
import xml.etree.ElementTree

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench/report"))
import figures
import plot
import run_bench
import table

LABEL = "unit=GB/s;better=higher;limit=memcpy, same = bytes"


def iteration(name="BM_Copy/1024/iterations:1/manual_time", **fields):
    return {"name": name, "run_name": name, "run_type": "iteration", "real_time": 2.5,
            "time_unit": "ms", **fields}


def read(*runs):
    return figures.from_google_benchmark("copy_bench", {"benchmarks": list(runs)})


class FiguresTest(unittest.TestCase):
    def test_label_says_unit_direction_and_limit(self):
        (figure,), problems = read(iteration(value=9.0, limit=10.0, target=9.5, label=LABEL))
        self.assertEqual([], problems)
        self.assertEqual(("Copy/1024", "GB/s", "higher", "memcpy, same = bytes"),
                         (figure.name, figure.unit, figure.better, figure.limit_name))
        self.assertAlmostEqual(0.9, figure.ratio)
        self.assertFalse(figure.meets_target)

    def test_where_lower_is_better_ratio_and_target_turn_round(self):
        (figure,), _ = read(iteration(value=80.0, limit=40.0, target=100.0,
                                      label="unit=us;better=lower;limit=reading the tokens"))
        self.assertAlmostEqual(0.5, figure.ratio)
        self.assertTrue(figure.meets_target)

    def test_repetition_with_the_median_ratio_stands_with_its_own_limit(self):
        (figure,), _ = read(iteration(value=9.0, limit=10.0, label=LABEL),
                            iteration(value=2.0, limit=4.0, label=LABEL),
                            iteration(value=7.0, limit=10.0, label=LABEL))
        self.assertEqual((7.0, 10.0, 3), (figure.value, figure.limit, figure.repetitions))
        self.assertEqual((2.0, 9.0), (figure.value_min, figure.value_max))

    def test_aggregates_are_not_counted_as_repetitions(self):
        (figure,), _ = read(iteration(value=9.0, limit=10.0, label=LABEL),
                            dict(iteration(value=1.0), run_type="aggregate"))
        self.assertEqual((9.0, 1), (figure.value, figure.repetitions))

    def test_benchmark_without_a_figure_gives_its_rate_or_its_time(self):
        (rate,), _ = read(iteration(bytes_per_second=3e9))
        (time,), _ = read(iteration())
        self.assertEqual((3.0, "GB/s", None), (rate.value, rate.unit, rate.ratio))
        self.assertEqual((2500.0, "us", "lower"), (time.value, time.unit, time.better))

    def test_skipped_benchmark_is_a_problem_with_its_reason_once(self):
        found, problems = read(*2 * [iteration(error_occurred=True, error_message="no crumbd")])
        self.assertEqual([], found)
        self.assertEqual(["copy_bench Copy/1024: no crumbd"], problems)


class RunBenchTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        (self.folder / "bin").mkdir()

    def program(self, name, script):
        path = self.folder / "bin" / name
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)

    def run_all(self):
        sys.argv = ["run_bench.py", f"--bin-dir={self.folder / 'bin'}", "--timeout=20",
                    f"--json={self.folder / 'b.json'}", f"--svg={self.folder / 'b.svg'}"]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            status = run_bench.main()
        return status, printed.getvalue(), json.loads((self.folder / "b.json").read_text())

    def test_failing_program_is_named_and_the_others_go_on(self):
        self.program("a_bench", "echo no crumbd at hand; exit 3\n")
        report = json.dumps({"benchmarks": [iteration(value=9.0, limit=10.0, label=LABEL)]})
        self.program("b_bench", 'for a; do case $a in --benchmark_out=*) out=${a#*=};; esac; done\n'
                                f"cat > $out <<'END'\n{report}\nEND\n")
        status, printed, written = self.run_all()
        self.assertEqual(1, status)
        self.assertEqual(["Copy/1024"], [figure["name"] for figure in written["figures"]])
        self.assertEqual(0.9, written["figures"][0]["ratio"])
        self.assertIn("a_bench: exit status 3; no crumbd at hand", written["not_measured"][0])
        self.assertIn("a_bench: exit status 3", printed)
        for field in ("cpu", "cores", "copy_gb_per_s", "date", "commit"):
            self.assertIn(field, written["machine"])
        self.assertGreater(written["machine"]["copy_gb_per_s"], 0)

    def test_program_that_writes_nothing_is_a_problem(self):
        self.program("silent_bench", "exit 0\n")
        status, _, written = self.run_all()
        self.assertEqual(1, status)
        self.assertIn("silent_bench: wrote no report", written["not_measured"][0])


class OutputTest(unittest.TestCase):
    def test_picture_is_well_formed_and_escapes_names(self):
        found = [figures.Figure("p", "a<b & c", 3.0, "GB/s", limit=1.0, target=0.5),
                 figures.Figure("p", "no limit", 3.0, "GB/s")]
        text = plot.draw(found, "a machine <x>")
        self.assertEqual("svg", xml.etree.ElementTree.fromstring(text).tag.split("}")[1])
        self.assertIn("a&lt;b &amp; c", text)
        self.assertIn("3.00 (cut off)", text)
        self.assertNotIn("no limit", text)

    def test_numbers_keep_three_digits(self):
        self.assertEqual(["0.123", "1.23", "12.3", "123", "12,346", "1.23M", "1.23G", "0", ""],
                         [table.number(value) for value in
                          (0.1234, 1.234, 12.34, 123.4, 12345.6, 1.234e6, 1.234e9, 0, None)])

    def test_columns_line_up(self):
        self.assertEqual("n    v\n--  --\na    1\nbb  22",
                         table.render([["a", "1"], ["bb", "22"]], ["n", "v"], "lr"))


if __name__ == "__main__":
    unittest.main()
