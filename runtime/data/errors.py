"""The one error of the data layer, and how it names the nearest right word.

ValueError
  DataError   something in a file, a schema or a name is not what it must be
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DataError(ValueError):
    """Data that cannot be read as asked; the text says where, what, which rule and what to do."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt word: the nearest known one, or all of them.

    >>> nearest("clik", ["click", "user"])
    'did you mean click?'
    """
    words = sorted(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(words)}"
