# SPDX-License-Identifier: Apache-2.0
"""Servers on the loopback address that never outlive the benchmark.

Three nets, so that nothing stays whatever happens: a `running` block stops its server on the way
out; SIGTERM unwinds such blocks; and the kernel kills a child whose parent died of something else.
"""
import contextlib
import ctypes
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

LOOPBACK = "127.0.0.1"
GRACE_S = 10  # Between SIGTERM and SIGKILL.
_PR_SET_PDEATHSIG = 1


class BenchError(Exception):
    """A measurement that could not be made; the message says why."""


def free_port():
    """A TCP port that was free on the loopback address just now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def exit_on_sigterm():
    """Turns SIGTERM into SystemExit, so that every block cleans up after itself."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def die_with_parent():
    """For preexec_fn: the kernel kills this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def running(command, log_path, *, port=None, ready_path=None, env=None, program=None,
            timeout_s=60):
    """A server for the length of the block, which starts once its port (or socket file) answers.

    `program` is the file to execute where that is not command[0]. Raises BenchError with the end of
    its log when it exits or is not ready in time.
    """
    with open(log_path, "wb") as log:
        process = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL,
                                   stdout=log, stderr=subprocess.STDOUT, env=env,
                                   executable=program,
                                   preexec_fn=die_with_parent)
    try:
        _wait_until_ready(process, port, ready_path, timeout_s, log_path)
        yield process
    finally:
        stop(process)


def stop(process):
    """Ends a child: SIGTERM first, SIGKILL when it is still there after GRACE_S."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_group(command, log_path, timeout_s, cwd=None):
    """Runs a child in a process group of its own to its end: (standard output, problem or "").

    Whatever the child left behind in its group is killed, also when this process is interrupted.
    """
    with open(log_path, "wb") as log:
        process = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=log, cwd=cwd,
                                   start_new_session=True, preexec_fn=die_with_parent)
    problem, output = "", b""
    try:
        output, _ = process.communicate(timeout=timeout_s)
        if process.returncode != 0:
            problem = f"exit status {process.returncode}: {last_line(log_path)}"
    except subprocess.TimeoutExpired:
        problem = f"took longer than {timeout_s:.0f} s: {last_line(log_path)}"
        stop(process)
        output, _ = process.communicate()
    finally:
        stop(process)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return output.decode(errors="replace"), problem


def last_line(path):
    """The last line of a log that says something."""
    lines = pathlib.Path(path).read_text(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def resident_bytes(pid):
    """Resident memory of a process, shared memory included."""
    return _status_bytes(pid, "VmRSS")


def private_bytes(pid):
    """Resident memory of a process that no file or shared memory is behind."""
    return _status_bytes(pid, "RssAnon")


def _status_bytes(pid, wanted):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == wanted:
            return int(value.split()[0]) * 1024
    raise BenchError(f"process {pid} has ended")


def _wait_until_ready(process, port, ready_path, timeout_s, log_path):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise BenchError(f"server ended with {process.returncode}: {last_line(log_path)}")
        if _is_ready(port, ready_path):
            return
        time.sleep(0.05)
    raise BenchError(f"server not ready within {timeout_s} s: {last_line(log_path)}")


def _is_ready(port, ready_path):
    if port is not None:
        try:
            socket.create_connection((LOOPBACK, port), timeout=1).close()
        except OSError:
            return False
    return ready_path is None or os.path.exists(ready_path)
