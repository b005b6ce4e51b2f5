# SPDX-License-Identifier: Apache-2.0
"""From the records of one run of one store to a row of the comparison."""
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "report"))
import table

TIMED = ("put", "get", "attach", "release", "exists", "exists_absent")
MOVES_BYTES = ("put", "get")
HEADER = ["store", "pages", "put GB/s", "tokens/s", "get GB/s", "tokens/s", "attach us",
          "tokens/s", "release us", "exists us", "held MB", "B/token"]


def row_of(title, mode, page_format, page_bytes, pages, tokens, output):
    """A row out of a store's standard output: one JSON record a line. Absent: not measured."""
    row = {"store": title, "mode": mode, "version": "", "format": page_format,
           "page_bytes": page_bytes}
    for line in output.splitlines():
        record = json.loads(line)
        op = record["op"]
        if op == "version":
            row["version"] = record["text"]
        elif op == "memory":
            row["held_bytes"] = record["held_bytes"]  # The last one counts: all copies are made.
            row["held_bytes_per_token"] = round(record["held_bytes"] / tokens, 1)
        elif op in TIMED:
            row[op] = _timing(op, record, record.get("bytes", page_bytes * pages), tokens)
    return row


def _timing(op, record, data_bytes, tokens):
    seconds = record["seconds"]
    timing = {
        "microseconds": round(seconds * 1e6, 2),
        "microseconds_min": round(record["seconds_min"] * 1e6, 2),
        "microseconds_p99": round(record["seconds_p99"] * 1e6, 2),
        "samples": record["samples"],
        "tokens_per_s": round(tokens / seconds),
    }
    if op in MOVES_BYTES:
        timing["bytes"] = data_bytes
        timing["gb_per_s"] = round(data_bytes / seconds / 1e9, 3)
    return timing


def as_table(rows):
    """All rows as text, in the order given."""
    return table.render([_cells(row) for row in rows], HEADER, "ll" + "r" * (len(HEADER) - 2))


def summary(row):
    """A few words about a row, for the progress line."""
    parts = [f"{op} {row[op]['gb_per_s']:.2f} GB/s" for op in MOVES_BYTES if op in row]
    parts += [f"{op} {row[op]['microseconds']:.0f} us" for op in ("attach", "exists") if op in row]
    return ", ".join(parts) or "nothing measured"


def _cells(row):
    def cell(op, field, scale=1.0):
        return table.number(row[op][field] * scale) if op in row else "-"

    return [
        f"{row['store']}, {row['mode']}", row["format"],
        cell("put", "gb_per_s"), cell("put", "tokens_per_s"),
        cell("get", "gb_per_s"), cell("get", "tokens_per_s"),
        cell("attach", "microseconds"), cell("attach", "tokens_per_s"),
        cell("release", "microseconds"), cell("exists", "microseconds"),
        table.number(row["held_bytes"] / 1e6) if "held_bytes" in row else "-",
        table.number(row["held_bytes_per_token"]) if "held_bytes" in row else "-",
    ]
