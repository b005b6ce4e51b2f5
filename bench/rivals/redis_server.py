#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Redis, the naive baseline: one string a page.

Modes:
  tcp        redis-py with hiredis over loopback, as most people would: replies become Python bytes,
             then a copy into the page buffer
  unix-into  a bare Unix socket that receives each reply straight into the page buffer: the least
             that the protocol allows
"""
import contextlib
import socket

import install
import measure
import processes

WINDOW = 8  # Pages in flight: bounds what client and server buffer.


@contextlib.contextmanager
def open_store(workload):
    """A server without persistence, and the mode's client."""
    port, path = processes.free_port(), measure.scratch(workload, "redis.sock")
    # The program takes the role that it is called by.
    command = ["redis-server", "--bind", processes.LOOPBACK, "--port", port, "--unixsocket", path,
               "--save", "", "--appendonly", "no", "--dir", workload.folder]
    with processes.running(command, measure.scratch(workload, "redis-server.log"), port=port,
                           ready_path=path, program=install.redis_program()) as server:
        kind = {"tcp": RedisPyStore, "unix-into": SocketStore}[workload.mode]
        yield kind(workload, server.pid, port, str(path))


class RedisPyStore(measure.Store):
    """Pages through redis-py, in pipelines of WINDOW commands."""

    def __init__(self, workload, server_pid, port, path):
        import redis
        self._pages = workload.pages
        self._server_pid = server_pid
        self._client = (redis.Redis(unix_socket_path=path) if workload.mode.startswith("unix")
                        else redis.Redis(host=processes.LOOPBACK, port=port))
        self._version = f"redis {self._client.info()['redis_version']}, redis-py {redis.__version__}"

    def version(self):
        return self._version

    def put(self, prefix, source):
        keys = self._keys(prefix)
        for first in range(0, len(keys), WINDOW):
            pipeline = self._client.pipeline(transaction=False)
            for key, page in zip(keys[first:first + WINDOW], source[first:]):
                pipeline.set(key, memoryview(page))
            pipeline.execute()

    def drop(self, prefix):
        self._client.delete(*self._keys(prefix))

    def get(self, prefix, target):
        keys = self._keys(prefix)
        for first in range(0, len(keys), WINDOW):
            values = self._client.mget(keys[first:first + WINDOW])
            for page, value in zip(target[first:], values):
                memoryview(page)[:] = value

    def exists(self, prefix):
        return self._client.exists(*self._keys(prefix))

    def held_bytes(self):
        return processes.resident_bytes(self._server_pid)

    def _keys(self, prefix):
        return [b"page:%d:%d" % (prefix, index) for index in range(self._pages)]


class SocketStore(RedisPyStore):
    """As its parent, but pages go straight between the socket and the page buffers."""

    def __init__(self, workload, server_pid, port, path):
        super().__init__(workload, server_pid, port, path)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(60)
        self._socket.connect(path)
        self._buffered = b""

    def put(self, prefix, source):
        for key, page in zip(self._keys(prefix), source):
            self._socket.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n"
                                 % (len(key), key, page.nbytes))
            self._socket.sendall(page)
            self._socket.sendall(b"\r\n")
            self._expect_line(b"+OK")

    def get(self, prefix, target):
        keys = self._keys(prefix)
        for first in range(0, len(keys), WINDOW):
            window = keys[first:first + WINDOW]
            self._socket.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key)
                                          for key in window))
            for page in target[first:first + len(window)]:
                self._expect_line(b"$%d" % page.nbytes)
                self._receive_into(memoryview(page))
                self._expect_line(b"")

    def _expect_line(self, expected):
        while b"\r\n" not in self._buffered:
            received = self._socket.recv(4096)
            if not received:
                raise processes.BenchError("redis-server closed the connection")
            self._buffered += received
        line, self._buffered = self._buffered.split(b"\r\n", 1)
        if line != expected:
            raise processes.BenchError(f"redis-server answered {line[:80]!r}, not {expected!r}")

    def _receive_into(self, view):
        ready = min(len(self._buffered), len(view))
        view[:ready], self._buffered = self._buffered[:ready], self._buffered[ready:]
        while ready < len(view):
            received = self._socket.recv_into(view[ready:])
            if not received:
                raise processes.BenchError("redis-server closed the connection")
            ready += received


if __name__ == "__main__":
    measure.main(open_store)
