"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` when the body ends, and only if it ends well.

    A reader never sees a part; after an error, and after a crash of the machine, the old content
    is still there. The folder must exist. The file gets the mode that any new file gets.
    """
    fresh = path.parent / f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        with fresh.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
