# SPDX-License-Identifier: Apache-2.0
"""The same measurements for every store, in a process of its own.

A store's script implements `Store` and calls `main`. Each measurement is printed at once as one
JSON record a line, so that what was measured before a failure is not lost.
"""
import abc
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time

import processes


@dataclasses.dataclass
class Workload:
    """What to measure; travels to the process as JSON in its first argument."""
    mode: str
    page_bytes: int
    pages: int
    repeat: int  # Timed puts and gets.
    calls: int   # Timed attaches, releases and existence checks.
    folder: str  # Scratch, for logs and sockets.

    @property
    def data_bytes(self):
        return self.page_bytes * self.pages


class Store(abc.ABC):
    """One way into one store. A prefix is all pages of one number, in order."""

    @abc.abstractmethod
    def version(self):
        """Of all that takes part, for people."""

    def buffer(self, workload):
        """A touched byte array [pages, page_bytes] in the memory that this store needs."""
        import numpy
        return numpy.ones((workload.pages, workload.page_bytes), numpy.uint8)

    @abc.abstractmethod
    def put(self, prefix, source):
        """Stores every page of `source` (from buffer()) as the prefix."""

    @abc.abstractmethod
    def drop(self, prefix):
        """Removes a prefix, so that its memory can be used again; may remove every other, too."""

    @abc.abstractmethod
    def get(self, prefix, target):
        """Copies every page of the prefix to `target` (from buffer()), from names to bytes."""

    @abc.abstractmethod
    def exists(self, prefix):
        """How many pages of the prefix are there, asked for all of them at once."""

    @abc.abstractmethod
    def held_bytes(self):
        """Memory that the store holds now."""

    def settle(self):
        """Called after each timed call: what an engine would do later, or beside its work."""

    # A store whose pages can be read in place, without a copy, has these as well.
    def attach(self, prefix):
        """Handles to all pages of the prefix; None: this store cannot."""
        del prefix
        return None

    def view(self, handles, page):
        """The bytes of one attached page, as a one-dimensional array."""
        raise NotImplementedError

    def release(self, handles):
        """Gives attached pages back."""
        raise NotImplementedError


def main(open_store):
    """Runs all measurements of the store that the context manager `open_store(workload)` opens."""
    processes.exit_on_sigterm()
    # Records go to the real standard output; what libraries print goes to the log.
    records = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    workload = Workload(**json.loads(sys.argv[1]))
    try:
        with open_store(workload) as store:
            _measure(store, workload, lambda **record: print(json.dumps(record), file=records))
    except processes.BenchError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


def timed(action):
    """(seconds, result) of a call."""
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def _measure(store, workload, emit):
    emit(op="version", text=store.version())
    source, target = store.buffer(workload), store.buffer(workload)
    fill(source)
    empty = store.held_bytes()
    store.put(0, source)
    store.settle()
    emit(op="memory", held_bytes=store.held_bytes() - empty, stored_bytes=workload.data_bytes)

    _emit_times(emit, "get", _get_times(store, workload, source, target))
    for op, prefix, expected in (("exists", 0, workload.pages), ("exists_absent", 1 << 20, 0)):
        times = []
        for _ in range(workload.calls):
            seconds, found = timed(lambda: store.exists(prefix))
            store.settle()
            _expect(found == expected, f"{op}: {found} pages there, not {expected}")
            times.append(seconds)
        _emit_times(emit, op, times)

    first = store.attach(0)
    if first is not None:
        store.release(first)
        store.settle()
        # Again, because reading in place may need a second copy.
        emit(op="memory", held_bytes=store.held_bytes() - empty, stored_bytes=workload.data_bytes)
        attaches, releases = _attach_times(store, workload, source)
        _emit_times(emit, "attach", attaches)
        _emit_times(emit, "release", releases)
    # Last, because a store may be able to drop only everything.
    _emit_times(emit, "put", _put_times(store, workload, source))


def _put_times(store, workload, source):
    times = []
    for prefix in range(1, workload.repeat + 2):
        seconds, _ = timed(lambda: store.put(prefix, source))
        store.settle()
        store.drop(prefix)
        times.append(seconds)
    return times[1:]  # The first of them touched fresh memory.


def _get_times(store, workload, source, target):
    times = []
    for _ in range(workload.repeat + 1):
        target.fill(0)
        seconds, _ = timed(lambda: store.get(0, target))
        store.settle()
        _expect((target == source).all(), "get returned other bytes than were put")
        times.append(seconds)
    return times[1:]


def _attach_times(store, workload, source):
    attaches, releases = [], []
    for call in range(workload.calls):
        seconds, handles = timed(lambda: store.attach(0))
        attaches.append(seconds)
        page = call % workload.pages
        _expect((store.view(handles, page) == source[page]).all(),
                "an attached page shows other bytes than were put")
        seconds, _ = timed(lambda: store.release(handles))
        store.settle()
        releases.append(seconds)
    return attaches, releases


def fill(pages):
    """Distinct, incompressible content for each page."""
    import numpy
    pattern = numpy.random.default_rng(1).integers(0, 256, pages.shape[1], numpy.uint8)
    for index, page in enumerate(pages):
        numpy.bitwise_xor(pattern, index & 0xFF, out=page)
        page[:4] = numpy.frombuffer(index.to_bytes(4, "little"), numpy.uint8)


def _emit_times(emit, op, seconds):
    ordered = sorted(seconds)
    emit(op=op, samples=len(ordered), seconds=statistics.median(ordered),
         seconds_min=ordered[0], seconds_p99=ordered[round(0.99 * (len(ordered) - 1))])


def _expect(condition, otherwise):
    if not condition:
        raise processes.BenchError(otherwise)


def expect_all(answers, expected, what):
    """Raises BenchError unless every answer is the expected one."""
    wrong = [answer for answer in answers if answer != expected]
    _expect(not wrong and len(answers) > 0,
            f"{what}: {len(wrong)} of {len(answers)} answers were {wrong[:1]}, not {expected}")


def scratch(workload, name):
    """A path in the run's scratch folder."""
    return pathlib.Path(workload.folder) / name
