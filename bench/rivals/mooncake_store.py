#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Mooncake Store: a master, a provider of memory, and a client that measures.

Modes, from the most remote to the nearest:
  tcp     a provider daemon holds the memory; the client goes through the transfer engine's TCP
          transport over loopback
  shm     the client's buffers are shared memory that the daemon maps; the daemon copies pages
  attach  the daemon also keeps a hot cache in shared memory, a second copy of pages read before,
          which the client maps and reads in place
  local   the client contributes the memory itself, so that a get is a memcpy

Mooncake takes ready-made keys: hashing tokens to keys is left to the caller and is not in its times.
Its data port listens on all interfaces whatever address it is given; only loopback is a target here.
"""
import contextlib
import ctypes
import importlib.metadata
import os
import pathlib
import re
import sys
import time

import measure
import processes

PACKAGE = re.compile(r"mooncake-transfer-engine")
MIB = 1 << 20
STAGING_BYTES = 64 * MIB  # For calls that take or return Python bytes.
WARMUP_S = 60


@contextlib.contextmanager
def open_store(workload):
    """Master, provider daemon (but in mode local) and a client of them."""
    master = f"{processes.LOOPBACK}:{processes.free_port()}"
    # Twice the data and some: the master evicts above 90 %, and a put allocates before the pages of
    # the one before it are freed.
    segment_bytes = _round_up(2 * workload.data_bytes + 256 * MIB, 16 * MIB)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(_master(workload, master))]
        daemon = None
        if workload.mode != "local":
            daemon = f"{processes.LOOPBACK}:{processes.free_port()}"
            servers.append(stack.enter_context(_daemon(workload, master, daemon, segment_bytes)))
        store = MooncakeStore(workload, [server.pid for server in servers])
        store.connect(master, daemon, segment_bytes)
        stack.callback(store.close)
        yield store


def _master(workload, address):
    host, port = address.split(":")
    return processes.running(
        [sys.executable, "-m", "mooncake.cli", f"--rpc_address={host}", f"--rpc_port={port}",
         f"--metrics_host={host}", f"--metrics_port={processes.free_port()}", "--logtostderr"],
        measure.scratch(workload, "mooncake-master.log"), port=int(port))


def _daemon(workload, master, address, segment_bytes):
    env = dict(os.environ)
    if workload.mode == "attach":
        env["MC_STORE_LOCAL_HOT_BLOCK_SIZE"] = str(_hot_block_bytes(workload))
        env["MC_STORE_LOCAL_HOT_CACHE_SIZE"] = str(_hot_cache_bytes(workload))
        env["MC_STORE_LOCAL_HOT_CACHE_USE_SHM"] = "1"
    host, port = address.split(":")
    return processes.running(
        [sys.executable, "-m", "mooncake.cli_client", f"--host={host}", f"--port={port}",
         f"--master_server_address={master}", "--metadata_server=P2PHANDSHAKE", "--protocol=tcp",
         f"--global_segment_size={segment_bytes // MIB}MB", "--logtostderr"],
        measure.scratch(workload, "mooncake-daemon.log"), port=int(port), env=env)


def _hot_block_bytes(workload):
    return _round_up(workload.page_bytes, 4096)


def _hot_cache_bytes(workload):
    return _hot_block_bytes(workload) * (workload.pages + 8)


def _round_up(value, unit):
    return -(-value // unit) * unit


class MooncakeStore(measure.Store):
    """A client, by the mode's way to the memory."""

    def __init__(self, workload, server_pids):
        from mooncake.store import MooncakeDistributedStore
        self._store = MooncakeDistributedStore()
        self._workload = workload
        self._sizes = [workload.page_bytes] * workload.pages
        # In mode local the pages are in this process.
        self._holders = server_pids + ([os.getpid()] if workload.mode == "local" else [])
        self._shared_buffers = workload.mode in ("shm", "attach")
        self._target = None
        self._warm = False
        self._has_pages = False

    def connect(self, master, daemon, segment_bytes):
        """Joins the servers. Raises BenchError with the status of a refusal."""
        if self._shared_buffers:
            status = self._store.setup_dummy(segment_bytes, STAGING_BYTES, daemon)
        else:
            own_bytes = segment_bytes if self._workload.mode == "local" else 0
            status = self._store.setup(processes.LOOPBACK, "P2PHANDSHAKE", own_bytes,
                                       STAGING_BYTES, "tcp", "", master)
        if status != 0:
            raise processes.BenchError(f"the client's set-up returned {status}")

    def close(self):
        self._store.close()

    def version(self):
        return next(f"{distribution.metadata['Name']} {distribution.version}"
                    for distribution in importlib.metadata.distributions()
                    if PACKAGE.match(distribution.metadata["Name"] or ""))

    def buffer(self, workload):
        import numpy
        shape = (workload.pages, workload.page_bytes)
        if self._shared_buffers:
            address = self._store.alloc_from_mem_pool(workload.data_bytes)
            if not address:
                raise processes.BenchError("no shared memory for the client's buffers")
            memory = (ctypes.c_uint8 * workload.data_bytes).from_address(address)
            pages = numpy.frombuffer(memory, numpy.uint8).reshape(shape)
        else:
            pages = numpy.empty(shape, numpy.uint8)
        pages.fill(1)
        status = self._store.register_buffer(pages.ctypes.data, pages.nbytes)
        if status != 0:
            raise processes.BenchError(f"register_buffer returned {status}")
        self._target = pages  # The last one made: where warming up may write.
        return pages

    def put(self, prefix, source):
        self._has_pages = True
        measure.expect_all(
            self._store.batch_put_from(self._keys(prefix), _addresses(source), self._sizes),
            0, "put")

    def drop(self, prefix):
        measure.expect_all(self._store.batch_remove(self._keys(prefix), force=True), 0, "remove")

    def get(self, prefix, target):
        measure.expect_all(
            self._store.batch_get_into(self._keys(prefix), _addresses(target), self._sizes),
            self._workload.page_bytes, "get")

    def exists(self, prefix):
        return sum(answer == 1 for answer in self._store.batch_is_exist(self._keys(prefix)))

    def held_bytes(self):
        """The segment and the hot cache, without the buffers of ours that the daemon maps.

        The segment is anonymous memory. The hot cache is touched from the start, so it is counted
        from the first page on rather than found in the difference.
        """
        segment_bytes = sum(processes.private_bytes(pid) for pid in self._holders)
        in_use = self._workload.mode == "attach" and self._has_pages
        return segment_bytes + (_hot_cache_bytes(self._workload) if in_use else 0)

    def attach(self, prefix):
        if self._workload.mode != "attach":
            return None
        if not self._warm:
            self._warm_hot_cache(prefix)
        return self._store.batch_get_buffer(self._keys(prefix))

    def view(self, handles, page):
        import numpy
        return numpy.frombuffer(handles[page], numpy.uint8)

    def release(self, handles):
        handles.clear()

    def _keys(self, prefix):
        return [f"page/{prefix}/{index}" for index in range(self._workload.pages)]

    def _warm_hot_cache(self, prefix):
        """Reads the pages until every one is served from the shared hot cache."""
        deadline = time.monotonic() + WARMUP_S
        while time.monotonic() < deadline:
            self.get(prefix, self._target)
            time.sleep(0.2)
            handles = self._store.batch_get_buffer(self._keys(prefix))
            ranges = _read_only_shared_ranges()
            self._warm = all(handle and any(low <= handle.ptr() < high for low, high in ranges)
                             for handle in handles)
            handles.clear()
            if self._warm:
                return
        raise processes.BenchError(f"hot cache not filled within {WARMUP_S} s")


def _addresses(pages):
    return [page.ctypes.data for page in pages]


def _read_only_shared_ranges():
    """Address ranges that this process maps shared and read-only."""
    ranges = []
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        span, access = line.split()[:2]
        if access == "r--s":
            ranges.append(tuple(int(end, 16) for end in span.split("-")))
    return ranges


if __name__ == "__main__":
    measure.main(open_store)
