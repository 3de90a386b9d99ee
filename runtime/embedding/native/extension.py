"""The compiled kernels, or one clear sentence about how to get them."""

from __future__ import annotations

try:
    from runtime.embedding.native import _kernels as native
except ImportError as error:
    raise ImportError(
        f"the native kernels are not built for this Python ({error}): run"
        " `pip install -e .` in the repository (it needs a C++20 compiler such as g++ >= 11)"
    ) from error

__all__ = ["native"]
