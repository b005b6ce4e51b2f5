# SPDX-License-Identifier: Apache-2.0
"""Crumb's two-bit KV caches from Python.

``crumb.codec``      rows of K and V to two-bit pages and back, and attention over such pages
``crumb.profile``    what a codec needs to know of a model: read, check, fit, write
``crumb.calibrate``  statistics of your own model (``python -m crumb.calibrate collect``)
``crumb.evaluate``   what two bits cost it (``python -m crumb.evaluate``)

The first two need NumPy alone and also take PyTorch's CPU tensors; the others need the extra
``models``.
"""
from crumb._native import PAGE_TOKENS

__version__ = "0.1.0"
__all__ = ["PAGE_TOKENS", "__version__"]
