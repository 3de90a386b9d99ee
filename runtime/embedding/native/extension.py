"""The compiled kernels, or one clear sentence about how to get them."""

from __future__ import annotations


class MissingExtensionError(ImportError):
    """The kernels of the native engine were never built in this environment."""


try:
    from runtime.embedding.native import _kernels as native
except ImportError as error:
    raise MissingExtensionError(
        f"the native embedding engine is not built for this Python ({error}): run"
        " `pip install -e .` in the repository (it needs a C++20 compiler such as g++ >= 11)"
    ) from error

__all__ = ["MissingExtensionError", "native"]
