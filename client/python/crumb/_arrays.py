# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays and PyTorch CPU tensors, told apart without importing PyTorch."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, Union

import numpy as np

if TYPE_CHECKING:
    import torch

    Array = Union[np.ndarray, torch.Tensor]
else:
    Array = Any
ArrayT = TypeVar("ArrayT", bound=Array)

_NUMPY_TYPES = {"float32": np.float32, "bfloat16": np.uint16, "uint8": np.uint8}


def is_torch(array: Any) -> bool:
    return type(array).__module__.split(".")[0] == "torch"


def readable(name: str, array: Any) -> Any:
    """`array` as the extension reads it, in place: a tensor without its gradient.

    ValueError: neither an array nor a tensor, or a tensor that is not in the CPU's memory.
    """
    if is_torch(array):
        if array.device.type != "cpu":
            raise ValueError(f"{name} is on {array.device}; the codec reads CPU tensors: pass {name}.cpu()")
        return array.detach()
    if isinstance(array, np.ndarray):
        return array
    raise ValueError(f"{name} is a {type(array).__name__}; a NumPy array or a PyTorch CPU tensor is expected")


def shape3(name: str, array: Any) -> tuple[int, int, int]:
    """The shape of an array that has three axes; ValueError for one that has not."""
    if array.ndim != 3:
        raise ValueError(f"{name} has the shape {list(array.shape)}; [heads, rows, columns] is expected")
    a, b, c = array.shape
    return a, b, c


def empty(like: Any, shape: tuple[int, ...], element: str) -> Any:
    """An array of `like`'s library: float32, bfloat16 (uint16 in NumPy, which has none) or uint8."""
    if is_torch(like):
        import torch
        return torch.empty(shape, dtype=getattr(torch, element))
    return np.empty(shape, _NUMPY_TYPES[element])
