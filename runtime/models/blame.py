"""What goes wrong inside the user's own network, as one sentence instead of a traceback."""

from __future__ import annotations

import errno
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_OURS = Path(__file__).resolve().parents[1]
_MODELS = Path(__file__).resolve().parent
_LIBRARIES = Path(sysconfig.get_path("stdlib")).resolve(), Path(torch.__file__).resolve().parent
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of packages, of this environment or of another one that it builds upon."""


class ModelError(ValueError):
    """The user's own network failed; the text names the model, the error, its file and line."""


def is_own(name: str) -> bool:
    """Whether the network is the user's (``package.module:Class``) and not built in."""
    return ":" in name


@contextmanager
def blamed_on(name: str, what: str, remedy: str = "") -> Iterator[None]:
    """Turn an error of the user's network into a ModelError: "model NAME WHAT: ...; REMEDY".

    Errors of built-in networks pass as they are: they are ours. So does an error that was raised in
    this package outside of the networks, as a hook of ours may do during a backward pass, and a
    full disk, which is nobody's mistake and ends a whole sweep.
    """
    try:
        yield
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or not is_own(name) or _is_ours(traceback.extract_tb(error.__traceback__)[-1]):
            raise
        hint = f"; {remedy}" if remedy else ""
        raise ModelError(f"model {name} {what}: {told_error(error)}{hint}") from error


def told_error(error: Exception) -> str:
    """Type and text of an error on one line, and the user's line that it came from.

    That is the deepest one outside of Python, of the installed packages and of this one; where
    there is none, as in C++ code of a backward pass, no line is named.

    >>> told_error(KeyError("dense"))
    "KeyError: 'dense'"
    """
    text = " ".join(str(error).split())
    told = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError):  # the line lies in a file that never ran
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f)]
    return f"{told} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else told


def _is_ours(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename).resolve()
    return path.is_relative_to(_OURS) and not path.is_relative_to(_MODELS)


def _is_users(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename)
    if not path.is_file():  # "<frozen importlib>", "<string>"
        return False
    found = path.resolve()
    known = any(found.is_relative_to(place) for place in (_OURS, *_LIBRARIES))
    return not known and _INSTALLED.isdisjoint(found.parts)
