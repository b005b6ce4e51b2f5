#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The LMCache multiprocess server without a GPU, its L1 pool in shared memory.

Mode shm: a worker that maps the pool (LMCache's transfer mode engine_driven). A page is one chunk of
64 tokens, one slot of the pool, so a worker that was told the slots reads them in place. The worker
also writes into the pool itself; the server keeps the books. Times of get, attach and exists start
from token ids, and so include hashing them.
"""
import contextlib
import dataclasses
import importlib.metadata
import os
import pathlib
import sys

import measure
import processes

TOKENS_PER_PAGE = 64
LAYERS, HEADS, PLANES = 36, 8, 2
BYTES_PER_DIM = PLANES * LAYERS * HEADS * TOKENS_PER_PAGE  # Of a page, for each byte of a head row.
POOL_HEADROOM = 0.8  # The server evicts above this share of the pool.
GIB = 1 << 30
ANSWER_S = 60


@contextlib.contextmanager
def open_store(workload):
    """A server and one worker of it."""
    if workload.page_bytes % BYTES_PER_DIM:
        raise processes.BenchError(f"a page of {workload.page_bytes} bytes is no multiple of "
                                   f"{BYTES_PER_DIM}, as this geometry needs")
    port, shm_name = processes.free_port(), f"crumb_rival_{os.getpid()}"
    pool_gib = (2 * workload.data_bytes / POOL_HEADROOM + GIB / 4) / GIB
    command = [
        sys.executable, "-m", "lmcache.cli.main", "server",
        f"--host={processes.LOOPBACK}", f"--port={port}",
        f"--http-host={processes.LOOPBACK}", f"--http-port={processes.free_port()}",
        f"--prometheus-port={processes.free_port()}", f"--chunk-size={TOKENS_PER_PAGE}",
        f"--l1-size-gb={pool_gib:.3f}", "--eviction-policy=LRU",
        "--supported-transfer-mode=engine_driven", f"--shm-name={shm_name}",
    ]
    os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1")
    try:
        with processes.running(command, measure.scratch(workload, "lmcache-server.log"), port=port,
                               timeout_s=180) as server:
            store = LmcacheStore(workload, server.pid, shm_name)
            store.connect(port)
            yield store
            store.close()
    finally:
        for left in pathlib.Path("/dev/shm").glob(f"*{shm_name}*"):
            left.unlink(missing_ok=True)


class LmcacheStore(measure.Store):
    """A worker that maps the server's pool, by the classes of LMCache's own server benchmark."""

    def __init__(self, workload, server_pid, shm_name):
        self._workload = workload
        self._server_pid = server_pid
        self._shm_name = shm_name
        self._requests = 0
        self._open_keys = []  # Requests to be ended by settle().
        self._attached_key = None

    def connect(self, port):
        """Registers a paged KV cache of the workload's geometry and maps the pool."""
        from lmcache.cli.commands.bench.server_bench import client, config, helpers
        blocks = self._workload.pages + 1
        row_bytes = self._workload.page_bytes // BYTES_PER_DIM
        self._client = client.ServerBenchClient(
            config.BenchConfig(
                rpc_url=f"tcp://{processes.LOOPBACK}:{port}", http_url="", mode="cpu",
                transfer_mode="engine_driven", tp_size=1, use_mla=False,
                num_tokens=self._workload.pages * TOKENS_PER_PAGE,
                kvcache_shape_spec=f"(2,{blocks},64,{HEADS},{row_bytes}):uint8:{LAYERS}",
                num_blocks=blocks, block_size=TOKENS_PER_PAGE),
            lambda message: print(message, file=sys.stderr))
        self._client.start()
        self._make_key = helpers._make_key
        self._rpc = self._client._req_client
        worker = self._client._workers[0]
        self._pool = worker.transfer_context._engine_driven_context
        self._instance = worker.spec.instance_id
        if type(self._pool).__name__ != "EngineDrivenContextShm":
            raise processes.BenchError("the server's pool is not in shared memory")

    def close(self):
        self._client.close()

    def version(self):
        return f"lmcache {importlib.metadata.version('lmcache')}"

    def put(self, prefix, source):
        key = self._key(prefix)
        slots, indices = self._pool.prepare_store(key, self._instance)
        if len(indices) != len(source):
            raise processes.BenchError(f"{len(indices)} slots for {len(source)} pages")
        for slot, page in zip(slots, source):
            _flat(slot)[:] = page
        if not self._pool.commit_store(key, self._instance, []):
            raise processes.BenchError("commit_store refused the pages")

    def drop(self, prefix):
        """LMCache drops everything or nothing."""
        self._rpc.clear(True).result(timeout=ANSWER_S)

    def get(self, prefix, target):
        handles = self.attach(prefix)
        for page, slot in zip(target, handles):
            page[:] = _flat(slot)
        self.release(handles)

    def exists(self, prefix):
        key = self._key(prefix)
        return self._lookup(key)

    def attach(self, prefix):
        key = self._attached_key = self._key(prefix)
        if self._lookup(key) != self._workload.pages:
            raise processes.BenchError("lookup missed stored pages")
        slots = self._pool.prepare_retrieve(key, self._instance)
        if slots is None or len(slots) != self._workload.pages:
            raise processes.BenchError("prepare_retrieve missed pages")
        return slots

    def view(self, handles, page):
        return _flat(handles[page])

    def release(self, handles):
        self._pool.commit_retrieve(self._attached_key, self._instance)

    def settle(self):
        while self._open_keys:
            key = self._open_keys.pop()
            self._rpc.end_session(key.request_id).result(timeout=ANSWER_S)

    def held_bytes(self):
        """The server and what is touched of the pool, which it need not have mapped."""
        pools = list(pathlib.Path("/dev/shm").glob(f"*{self._shm_name}*"))
        if not pools:
            raise processes.BenchError(f"no pool named {self._shm_name} in /dev/shm")
        return (sum(pool.stat().st_blocks * 512 for pool in pools)
                + processes.private_bytes(self._server_pid))

    def _key(self, prefix):
        """A fresh request for the tokens of a prefix."""
        self._requests += 1
        tokens = self._workload.pages * TOKENS_PER_PAGE
        first = (prefix * 7 + 1) % 100_003
        key = self._make_key(tuple(range(first, first + tokens)), f"r{self._requests}", end=tokens,
                             worker_id=0, world_size=1)
        self._open_keys.append(key)
        return key

    def _lookup(self, key):
        """Leading pages that are there; they stay locked until the request's end."""
        self._rpc.lookup(dataclasses.replace(key, worker_id=None), 1).result(timeout=ANSWER_S)
        hits = None
        while hits is None:
            hits = self._rpc.query_prefetch_status(key.request_id).result(timeout=ANSWER_S)
        return hits


def _flat(slot):
    """A slot of the pool as a one-dimensional byte array."""
    return slot.flatten().numpy()


if __name__ == "__main__":
    measure.main(open_store)
