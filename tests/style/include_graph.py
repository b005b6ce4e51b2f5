#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the include graph against the table of allowed edges.

A module is a folder. An include from one module to another, or of a third-party library, that is not
in the tables below fails, with the file and line. Change a table only together with the design.

    include_graph.py ROOT
"""
import pathlib
import re
import sys

# Module -> modules that it may include besides itself and what those may include in their headers.
ALLOWED = {
    "proto/base": set(),
    "proto/page": {"proto/base"},
    "proto/wire": {"proto/base", "proto/page"},
    "proto/crumb/v1": set(),
    "cuda/include": {"proto/base", "proto/page"},
    "cuda": {"cuda/include", "proto/base", "proto/page"},
    "cuda/profile": {"cuda/include", "proto/base", "proto/page"},
    "cuda/reference": {"cuda/include", "cuda/profile", "proto/base", "proto/page"},
    "cuda/cpu": {"cuda/include", "cuda/profile", "cuda/reference", "proto/base", "proto/page"},
    "cuda/kernels": {"cuda/include", "cuda/launch", "proto/page"},
    "cuda/launch": {"cuda/include", "cuda/kernels"},
    "cuda/gpu": {"cuda/include", "cuda/launch", "cuda/reference", "proto/base", "proto/page"},
    "cuda/checkpoint": {"cuda/profile", "proto/base", "proto/page"},
    "cuda/calibrate": {"cuda/include", "cuda/checkpoint", "cuda/profile", "proto/base", "proto/page"},
    "client/include": {"cuda/include", "proto/base", "proto/page"},
    "client/sequence": {"client/include", "cuda/include", "proto/base", "proto/page"},
    "client/gpu": {"client/include", "client/sequence", "cuda/include", "proto/base", "proto/page"},
    "client/transport": {"client/include", "cuda/include", "proto/base", "proto/page", "proto/wire"},
    "client/session": {"client/include", "client/transport", "client/sequence", "cuda/include",
                       "proto/base", "proto/page", "proto/wire", "proto/crumb/v1"},
    "client/example": {"client/include", "cuda/include", "proto/base", "proto/page"},
    "client/python": {"cuda/include", "proto/base", "proto/page"},
    "daemon/log": {"proto/base"},
    "daemon/index": {"proto/base", "proto/page"},
    "daemon/policy": {"proto/base", "proto/page"},
    "daemon/tier": {"cuda/include", "proto/base", "proto/page"},
    "daemon/store": {"daemon/index", "daemon/policy", "daemon/tier", "cuda/include", "proto/base",
                     "proto/page"},
    "daemon/demote": {"daemon/store", "daemon/tier", "cuda/include", "proto/base", "proto/page", "proto/wire"},
    "daemon/promote": {"daemon/log", "daemon/store", "daemon/tier", "proto/base", "proto/page"},
    "daemon/transfer": {"daemon/log", "daemon/store", "daemon/tier", "client/transport", "cuda/include",
                        "proto/base", "proto/page", "proto/wire"},
    "daemon/metrics": {"daemon/store", "daemon/transfer", "proto/base", "proto/page"},
    "daemon/rpc": {"daemon/log", "daemon/store", "daemon/demote", "daemon/metrics", "daemon/transfer",
                   "cuda/include", "proto/base", "proto/page", "proto/wire", "proto/crumb/v1"},
    "daemon/server": {"daemon/log", "daemon/store", "daemon/demote", "daemon/metrics", "daemon/promote",
                      "daemon/tier", "daemon/transfer", "daemon/rpc", "cuda/include", "proto/base", "proto/page", "proto/wire"},
    "daemon/ctl": {"proto/base", "proto/page", "proto/crumb/v1"},
}

# Library -> (pattern of its includes, modules that may use it).
LIBRARIES = {
    "UCX": (r"uc[pstm]/", {"client/transport"}),
    "gRPC": (r"(grpc|grpcpp)/", {"client/session", "daemon/rpc", "daemon/ctl"}),
    "prometheus-cpp": (r"prometheus/", {"daemon/metrics"}),
    "libmicrohttpd": (r"microhttpd\.h", {"daemon/metrics"}),
    "libzip": (r"zip\.h", {"cuda/checkpoint"}),
    "RocksDB": (r"rocksdb/", set()),
    "CUDA": (r"cuda(_runtime|_fp16|_bf16)?\.h", {"cuda/kernels", "cuda/launch", "cuda/gpu"}),
    "toml++": (r"toml\+\+/", {"daemon/server"}),
    "CLI11": (r"CLI/", {"daemon/server", "daemon/ctl", "cuda/calibrate", "client/example"}),
    "Eigen": (r"Eigen/", {"cuda/calibrate", "client/example"}),
    "nlohmann-json": (r"nlohmann/", {"cuda/profile", "cuda/calibrate", "daemon/ctl", "client/example"}),
    "nanobind": (r"nanobind/", {"client/python"}),
    "OpenSSL": (r"openssl/", {"proto/page"}),
}

PRODUCT = ("proto", "cuda", "client", "daemon")
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]')


def module_of(path):
    """The module that a path relative to the root belongs to, or None outside of the product."""
    parts = pathlib.PurePosixPath(path).parts
    for depth in (3, 2):
        candidate = "/".join(parts[:depth])
        if candidate in ALLOWED:
            return candidate
    return "/".join(parts[:-1][:2]) if parts and parts[0] in PRODUCT else None


def included_module(name):
    """The module that an include's text names, or None for other libraries."""
    if name.startswith("crumb/cuda/"):
        return "cuda/include"
    if name.startswith("crumb/"):
        return "client/include"
    return module_of(name) if name.split("/")[0] in PRODUCT else None


def check(root):
    """Lines of what is wrong, one an edge."""
    problems = []
    for top in PRODUCT:
        for path in sorted((root / top).rglob("*")):
            if path.suffix not in (".h", ".cc", ".cu", ".cuh"):
                continue
            relative = path.relative_to(root).as_posix()
            source = module_of(relative)
            if source not in ALLOWED:
                problems.append(f"{relative}: module {source} is not in the table of include_graph.py")
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                match = INCLUDE.match(line)
                if match:
                    problems += _check_include(source, f"{relative}:{number}", match.group(2))
    return problems


def _check_include(source, where, name):
    target = included_module(name)
    if target is not None:
        if target != source and target not in ALLOWED[source]:
            yield f"{where}: {source} must not include {target} ({name})"
        return
    for library, (pattern, users) in LIBRARIES.items():
        if re.match(pattern, name) and source not in users:
            allowed = ", ".join(sorted(users)) or "no module in this version"
            yield f"{where}: {library} belongs in {allowed}, not in {source} ({name})"


def main():
    problems = check(pathlib.Path(sys.argv[1]))
    print("\n".join(problems) or "every include follows the table")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
