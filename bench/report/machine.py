# SPDX-License-Identifier: Apache-2.0
"""What a measurement was made on: processor, memory, copy rate, date and commit."""
import ctypes
import datetime
import mmap
import os
import pathlib
import platform
import statistics
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
COPY_BYTES = 256 << 20  # Far beyond any cache, as page images of a long prompt are.
COPY_ROUNDS = 7


def describe():
    """The machine as a dictionary; bench/README.md says what each field is. Takes about a second."""
    info = _cpu_info()
    commit = _git("rev-parse", "HEAD")
    return {
        "cpu": info.get("model name", platform.processor() or platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "vector_extensions": [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16")
                              if name in info.get("flags", "").split()],
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "copy_gb_per_s": round(copy_rate() / 1e9, 2),
        "load_average": round(os.getloadavg()[0], 2),
        "os": _os_name(),
        "kernel": platform.release(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "commit_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def headline(machine):
    """One line about the machine, for the top of a table."""
    commit = (machine["commit"] or "no commit")[:12] + ("+" if machine["commit_dirty"] else "")
    return (f"{machine['cpu']}, {machine['cores']} cores, "
            f"{machine['memory_bytes'] / (1 << 30):.0f} GiB, {machine['os']}; "
            f"memory copy {machine['copy_gb_per_s']} GB/s (one thread), "
            f"load {machine['load_average']}; {machine['date'][:16]}Z, {commit}")


def copy_rate():
    """Bytes/s that one thread copies between touched buffers (libc's memmove); a median.

    Of the thread's own time, so that other processes' turns are not counted.
    """
    source, target = mmap.mmap(-1, COPY_BYTES), mmap.mmap(-1, COPY_BYTES)
    addresses = []
    for number, buffer in enumerate((source, target)):
        view = (ctypes.c_char * COPY_BYTES).from_buffer(buffer)
        addresses.append(ctypes.addressof(view))
        ctypes.memset(addresses[number], number + 1, COPY_BYTES)
        del view
    rates = []
    for _ in range(COPY_ROUNDS):
        start = time.thread_time()
        ctypes.memmove(addresses[1], addresses[0], COPY_BYTES)
        rates.append(COPY_BYTES / (time.thread_time() - start))
    return statistics.median(rates)


def _cpu_info():
    info = {}
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        info.setdefault(name.strip(), value.strip())
    return info


def _os_name():
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def _git(*arguments):
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
