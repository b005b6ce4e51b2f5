#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes small torch.save files without torch: good rotation checkpoints, and one of each way to be bad.

    torch_fixtures.py FOLDER

Pickles come from Python's own pickler, with stand-ins for the three globals of torch, so that opcodes and
memo are those of real files. Rotations are Hadamard matrices with their rows turned by layer + 3 * head:
rotation[r][c] = H[(r + layer + 3 * head) % d][c]. Deterministic.
"""
import collections
import io
import pathlib
import pickle
import struct
import sys
import types
import zipfile


def stand_in(module, name, value):
    value.__module__ = module
    value.__qualname__ = value.__name__ = name
    sys.modules.setdefault(module, types.ModuleType(module))
    setattr(sys.modules[module], name, value)
    return value


FLOAT_STORAGE = stand_in("torch", "FloatStorage", type("FloatStorage", (), {}))
HALF_STORAGE = stand_in("torch", "HalfStorage", type("HalfStorage", (), {}))
stand_in("torch._utils", "_rebuild_tensor_v2", lambda *arguments: None)
REBUILD = sys.modules["torch._utils"]._rebuild_tensor_v2


class Storage:
    def __init__(self, values, kind=FLOAT_STORAGE):
        self.bytes = struct.pack(f"<{len(values)}f", *values)
        self.count = len(values)
        self.kind = kind
        self.key = None


class Tensor:
    def __init__(self, storage, shape, stride, offset=0):
        self.storage, self.shape, self.stride, self.offset = storage, shape, stride, offset

    def __reduce__(self):
        return REBUILD, (self.storage, self.offset, self.shape, self.stride, False, collections.OrderedDict())


def tensor(values, shape):
    stride, step = [], 1
    for extent in reversed(shape):
        stride.insert(0, step)
        step *= extent
    return Tensor(Storage(values), tuple(shape), tuple(stride))


class Pickler(pickle.Pickler):
    def __init__(self, out, protocol):
        super().__init__(out, protocol)
        self.storages = []

    def persistent_id(self, value):
        if not isinstance(value, Storage):
            return None
        if value.key is None:
            value.key = str(len(self.storages))
            self.storages.append(value)
        return ("storage", value.kind, value.key, "cpu", value.count)


def entries_of(value, protocol=2):
    """name -> bytes, as torch.save would write them."""
    out = io.BytesIO()
    pickler = Pickler(out, protocol)
    pickler.dump(value)
    entries = {"archive/data.pkl": out.getvalue(), "archive/byteorder": b"little", "archive/version": b"3\n"}
    for storage in pickler.storages:
        entries[f"archive/data/{storage.key}"] = storage.bytes
    return entries


def zip_of(entries, method=zipfile.ZIP_STORED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in entries.items():
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.compress_type = method
            archive.writestr(info, data)
    return out.getvalue()


def rotation(dim, layer, head=0):
    size = dim ** -0.5
    rows = [[size if bin(r & c).count("1") % 2 == 0 else -size for c in range(dim)] for r in range(dim)]
    shift = (layer + 3 * head) % dim
    return [x for row in rows[shift:] + rows[:shift] for x in row]


def checkpoint(dim, layers=(3, 7), heads=None, objective="qqt_r_h_pbr"):
    """Version 1, or 2 with `heads` rotations a layer."""
    result = {"format_version": 1 if heads is None else 2, "objective": objective,
              "source_grouping": "layer" if heads is None else "per_kv_head", "layers": {}}
    for layer in layers:
        values = [x for head in range(heads or 1) for x in rotation(dim, layer, head)]
        lead = [] if heads is None else [heads]
        result["layers"][layer] = {"layer_id": layer, "rotation": tensor(values, lead + [dim, dim]),
                                   "eigenvalues": tensor([1.0] * (heads or 1) * dim, lead + [dim])}
    return result


def changed(change, **how):
    """A good checkpoint after `change`."""
    value = checkpoint(32, **how)
    change(value)
    return entries_of(value)


def with_rotation(new):
    return changed(lambda value: value["layers"][7].update(rotation=new))


def good_files():
    yield "v1_keys", entries_of(checkpoint(32))
    yield "v1_values", entries_of(checkpoint(64, objective="sst_r_h_pbr"))
    yield "v2_keys", entries_of(checkpoint(32, heads=2))
    yield "v2_values", entries_of(checkpoint(64, heads=2, objective="sst_r_h_pbr"))
    yield "unsorted_layers", entries_of(checkpoint(32, layers=(7, 3)))
    # Layer 7 is a view: a transposed matrix in the middle of a larger storage.
    padded = [9.0] * 5 + [rotation(32, 7)[c * 32 + r] for r in range(32) for c in range(32)] + [9.0] * 3
    yield "view", with_rotation(Tensor(Storage(padded), (32, 32), (1, 32), 5))


def bad_tensors():
    yield "half_floats", with_rotation(Tensor(Storage([0.0] * 1024, HALF_STORAGE), (32, 32), (32, 1)))
    yield "view_beyond_storage", with_rotation(Tensor(Storage([0.0] * 1024), (32, 32), (32, 1), 1))
    yield "view_beyond_all_memory", with_rotation(
        Tensor(Storage([0.0] * 1024), (32, 32), (2 ** 31 - 1, 2 ** 31 - 1), 2 ** 31 - 1))
    yield "view_of_one_element", with_rotation(Tensor(Storage([0.0]), (2 ** 20, 2 ** 20), (0, 0)))
    yield "negative_stride", with_rotation(Tensor(Storage([0.0] * 1024), (32, 32), (-32, 1), 992))
    yield "empty_tensor", with_rotation(Tensor(Storage([]), (0, 0), (1, 1)))
    yield "nan", with_rotation(tensor([float("nan")] + rotation(32, 7)[1:], [32, 32]))
    yield "other_shape", with_rotation(tensor(rotation(64, 7), [64, 64]))
    yield "not_square", with_rotation(tensor(rotation(32, 7), [16, 64]))
    entries = entries_of(checkpoint(32))
    entries["archive/data/2"] = entries["archive/data/2"][:-4]
    yield "truncated_tensor", entries
    entries = entries_of(checkpoint(32))
    del entries["archive/data/2"]
    yield "missing_storage", entries
    yield "not_orthogonal", with_rotation(tensor([2.0] + rotation(32, 7)[1:], [32, 32]))


def bad_checkpoints():
    yield "version_three", changed(lambda value: value.update(format_version=3))
    yield "version_text", changed(lambda value: value.update(format_version="1"))
    yield "other_grouping", changed(lambda value: value.update(source_grouping="per_kv_head"))
    yield "no_layers", changed(lambda value: value.update(layers={}))
    yield "layers_list", changed(lambda value: value.update(layers=[1, 2]))
    yield "negative_layer", changed(lambda value: value["layers"].update({-1: value["layers"][3]}))
    yield "other_layer_id", changed(lambda value: value["layers"][3].update(layer_id=4))
    yield "no_rotation", changed(lambda value: value["layers"][3].pop("rotation"))
    yield "odd_dim", entries_of(checkpoint(8))
    yield "not_a_dict", entries_of([1, 2, 3])


class RunsCode:
    def __reduce__(self):
        import os
        return os.system, ("echo executed",)


class Instance:
    def __init__(self):
        self.value = 1


def bad_pickles():
    yield "runs_code", changed(lambda value: value.update(objective=RunsCode()))
    stand_in("elsewhere", "Instance", Instance)
    yield "instance", changed(lambda value: value.update(objective=Instance()))
    yield "set", changed(lambda value: value.update(objective={1}))
    yield "big_integer", changed(lambda value: value.update(objective=2 ** 40))
    yield "protocol_four", entries_of(checkpoint(32), protocol=4)
    entries = entries_of(checkpoint(32))
    entries["archive/data.pkl"] = entries["archive/data.pkl"][:-20]
    yield "truncated_pickle", entries


def bad_archives():
    entries = entries_of(checkpoint(32))
    yield "compressed", zip_of(entries, zipfile.ZIP_DEFLATED)
    yield "bomb", zip_of(entries | {"archive/data/9": bytes(64 << 20)}, zipfile.ZIP_DEFLATED)
    good = zip_of(entries)
    at = good.index(entries["archive/data/2"]) + 100
    yield "wrong_crc", good[:at] + bytes([good[at] ^ 1]) + good[at + 1:]
    yield "cut_short", good[:-100]
    yield "empty", b""
    # Every name in the directory leads to one and the same large entry.
    names = [f"archive/data/{i}" for i in range(10)]
    copies = bytearray(zip_of({name: bytes([7]) * 5000 for name in names}))
    at = -1
    while (at := copies.find(b"PK\x01\x02", at + 1)) >= 0:
        copies[at + 42:at + 46] = struct.pack("<I", 0)
    yield "overlapping", bytes(copies)
    yield "two_pickles", zip_of(entries | {"other/data.pkl": entries["archive/data.pkl"]})
    yield "no_pickle", zip_of({"archive/version": b"3\n"})
    yield "big_endian", zip_of(entries | {"archive/byteorder": b"big"})
    yield "old_version", zip_of(entries | {"archive/version": b"1\n"})


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for group in (good_files, bad_tensors, bad_checkpoints, bad_pickles):
        for name, entries in group():
            (folder / f"{name}.pt").write_bytes(zip_of(entries))
    for name, data in bad_archives():
        (folder / f"{name}.pt").write_bytes(data)
    for name, entries in good_files():  # For the fuzzer, whose changes a zip's CRC would hide.
        (folder / f"{name}.pkl").write_bytes(entries["archive/data.pkl"])


if __name__ == "__main__":
    main()
