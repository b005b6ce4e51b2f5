# SPDX-License-Identifier: Apache-2.0
"""Statistics of a model's attention, which a profile is fitted to.

    python -m crumb.calibrate collect --model FOLDER --text FILES --tokens 32768 --out stats.safetensors
    crumb-calibrate fit stats.safetensors --out profile.safetensors

Needs the extra `models`: pip install 'crumb[models]'.
"""
from crumb.calibrate.collector import Collected, collect

__all__ = ["Collected", "collect"]
