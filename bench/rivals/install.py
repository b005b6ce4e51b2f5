# SPDX-License-Identifier: Apache-2.0
"""Rivals as their makers publish them: pinned packages, a virtual environment each."""
import dataclasses
import pathlib
import shutil
import subprocess
import sys

import processes

PIP_TIMEOUT_S = 1800
# Debian's redis-server is redis-check-rdb by another name, and only the latter's package starts no
# service on the machine.
REDIS_PROGRAMS = ("redis-server", "redis-check-rdb")
BUILD = pathlib.Path(__file__).resolve().parents[2] / "build/release"
CRUMBD = BUILD / "bin/crumbd"
CRUMB_ENGINE = BUILD / "bench-bin/rivals/crumb_engine"


@dataclasses.dataclass(frozen=True)
class Rival:
    """A store to run: its script, its ways in, and what it is installed from."""
    key: str
    title: str
    script: str
    modes: tuple
    packages: tuple
    size: str  # Of the installation, for people.
    formats: tuple = ("int2", "bf16")  # Of pages.


CRUMB = Rival("crumb", "Crumb", "crumb_store.py", ("map", "ucx"), (), "0", ("int2",))
RIVALS = (
    CRUMB,
    Rival("mooncake", "Mooncake Store", "mooncake_store.py", ("tcp", "shm", "attach", "local"),
          ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy==2.4.6"), "500 MB"),
    Rival("lmcache", "LMCache server", "lmcache_server.py", ("shm",),
          ("lmcache==0.5.6",), "6 GB, it brings PyTorch"),
    Rival("redis", "Redis", "redis_server.py", ("tcp", "unix-into"),
          ("redis==8.1.0", "hiredis==3.5.0", "numpy==2.4.6"), "100 MB"),
)


def python_of(rival, folder):
    """The interpreter of the rival's environment, made now if need be. Raises BenchError."""
    if rival.key == "redis":
        redis_program()
    if not rival.packages:
        _expect_built()
        return pathlib.Path(sys.executable)
    venv = folder / f"venv-{rival.key}"
    python, marker = venv / "bin/python", venv / "installed.txt"
    wanted = "\n".join(rival.packages)
    if marker.exists() and marker.read_text() == wanted and python.exists():
        return python
    print(f"installing {', '.join(rival.packages)} ({rival.size}) in {venv}", flush=True)
    log = folder / f"install-{rival.key}.log"
    _run([sys.executable, "-m", "venv", "--clear", venv], log,
         "no virtual environment; on Debian and Ubuntu: apt-get install python3-venv")
    _run([python, "-m", "pip", "install", "--disable-pip-version-check", *rival.packages], log,
         "pip could not install it")
    marker.write_text(wanted)
    return python


def _expect_built():
    for program in (CRUMBD, CRUMB_ENGINE):
        if not program.exists():
            raise processes.BenchError(f"{program} is not there; build it first: make build")


def redis_program():
    """Path of the Redis server's program. Raises BenchError with what to install."""
    for name in REDIS_PROGRAMS:
        path = shutil.which(name)
        if path:
            return path
    raise processes.BenchError("no redis-server here; on Debian and Ubuntu: "
                               "apt-get install redis-tools")


def _run(command, log_path, otherwise):
    with open(log_path, "ab") as log:
        try:
            done = subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL,
                                  stdout=log, stderr=subprocess.STDOUT, check=False,
                                  timeout=PIP_TIMEOUT_S, preexec_fn=processes.die_with_parent)
            reason = None if done.returncode == 0 else f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"took longer than {PIP_TIMEOUT_S} s"
    if reason:
        last = processes.last_line(pathlib.Path(log_path))
        raise processes.BenchError(f"{otherwise} ({reason}: {last}; {log_path})")
