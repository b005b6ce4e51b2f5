#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the comparison with other stores stands on: servers that never stay, and its arithmetic."""
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import unittest

RIVALS = pathlib.Path(__file__).resolve().parents[2] / "bench/rivals"
sys.path.insert(0, str(RIVALS))
import comparison
import install
import processes

SERVER = """
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    listener.accept()
"""
# Starts a server as a rival's script does, says its process id, and then hangs.
PARENT = f"""
import signal, sys
sys.path.insert(0, {str(RIVALS)!r})
import processes
processes.exit_on_sigterm()
port = processes.free_port()
with processes.running([sys.executable, "-c", {SERVER!r}, port], sys.argv[1], port=port) as server:
    print(server.pid, flush=True)
    signal.pause()
"""


def wait_for_end(pid, timeout_s=20):
    """Whether a process, of whoever's, ends in time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


class ProcessesTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.log = pathlib.Path(scratch.name) / "log"

    def test_server_answers_within_the_block_and_is_gone_after_it(self):
        port = processes.free_port()
        with processes.running([sys.executable, "-c", SERVER, port], self.log,
                               port=port) as server:
            self.assertIsNone(server.poll())
        self.assertIsNotNone(server.poll())
        with self.assertRaises(ConnectionRefusedError):
            socket.create_connection((processes.LOOPBACK, port), timeout=5)

    def test_server_that_ends_is_an_error_with_its_last_words(self):
        with self.assertRaisesRegex(processes.BenchError, "ended with 3: port is taken"):
            with processes.running(["sh", "-c", "echo port is taken; exit 3"], self.log,
                                   port=processes.free_port()):
                self.fail("it never was ready")

    def test_server_that_is_never_ready_is_an_error_and_is_stopped(self):
        with self.assertRaisesRegex(processes.BenchError, "not ready within 0.2 s"):
            with processes.running(["sh", "-c", "echo $$; exec sleep 600"], self.log,
                                   port=processes.free_port(), timeout_s=0.2):
                self.fail("it never was ready")
        self.assertTrue(wait_for_end(int(self.log.read_text())))

    def end_parent_by(self, number):
        parent = subprocess.Popen([sys.executable, "-c", PARENT, str(self.log)],
                                  stdout=subprocess.PIPE)
        server = int(parent.stdout.readline())
        parent.stdout.close()
        self.assertFalse(wait_for_end(server, 0))
        parent.send_signal(number)
        parent.wait()
        return server

    def test_server_ends_with_a_parent_that_is_terminated(self):
        self.assertTrue(wait_for_end(self.end_parent_by(signal.SIGTERM)))

    def test_server_ends_with_a_parent_that_is_killed(self):
        self.assertTrue(wait_for_end(self.end_parent_by(signal.SIGKILL)))

    def test_group_is_killed_with_what_it_left_behind(self):
        output, problem = processes.run_group(["sh", "-c", "sleep 600 >/dev/null & echo $!"],
                                              self.log, timeout_s=20)
        self.assertEqual("", problem)
        self.assertTrue(wait_for_end(int(output)))

    def test_group_that_takes_too_long_keeps_what_it_said(self):
        output, problem = processes.run_group(
            ["sh", "-c", "echo first; echo waiting >&2; exec sleep 600"], self.log, timeout_s=0.5)
        self.assertEqual("first\n", output)
        self.assertRegex(problem, "took longer than .* waiting")


class InstallTest(unittest.TestCase):
    def test_environment_that_cannot_be_filled_says_why(self):
        with tempfile.TemporaryDirectory() as folder:
            rival = install.Rival("x", "X", "x.py", (), (f"{folder}/no-such-package.whl",), "0")
            with self.assertRaisesRegex(processes.BenchError, "(pip could not install it|no virtual "
                                        "environment).*exit status"):
                install.python_of(rival, pathlib.Path(folder))
            self.assertFalse((pathlib.Path(folder) / "venv-x/installed.txt").exists())


class ComparisonTest(unittest.TestCase):
    def row(self, *records):
        return comparison.row_of("A store", "tcp", "int2", 1000, 128, 8192,
                                 "\n".join(json.dumps(record) for record in records))

    def timing(self, op, seconds):
        return {"op": op, "samples": 3, "seconds": seconds, "seconds_min": seconds / 2,
                "seconds_p99": seconds * 2}

    def test_times_become_rates_of_bytes_and_tokens(self):
        row = self.row(self.timing("get", 0.001), self.timing("attach", 0.0005))
        self.assertEqual((0.128, 8_192_000, 1000.0),
                         tuple(row["get"][field]
                               for field in ("gb_per_s", "tokens_per_s", "microseconds")))
        self.assertEqual(16_384_000, row["attach"]["tokens_per_s"])
        self.assertNotIn("gb_per_s", row["attach"])

    def test_last_record_of_memory_counts(self):
        row = self.row(*({"op": "memory", "held_bytes": held} for held in (8192, 16384)))
        self.assertEqual((16384, 2.0), (row["held_bytes"], row["held_bytes_per_token"]))

    def test_what_was_not_measured_is_a_dash(self):
        text = comparison.as_table([self.row(self.timing("get", 0.001))])
        self.assertEqual(["A", "store,", "tcp", "int2", "-", "-", "0.128", "8.19M"] + 6 * ["-"],
                         text.splitlines()[-1].split())


if __name__ == "__main__":
    unittest.main()
