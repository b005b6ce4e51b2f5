# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all."""
from __future__ import annotations

import os
import pathlib
import tempfile


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Replace `path` by a file of this text, or leave all as it was: written beside it, synced, renamed.

    OSError: the disk is full, the folder does not exist; names the path.
    """
    target = pathlib.Path(path)
    descriptor, temporary = tempfile.mkstemp(prefix=target.name + ".", dir=target.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
