"""Errors that users can mend end a command in one sentence, and how its process then ends."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from persia_sim.words.rules import printable
from runtime.run.ending import NotKept
from runtime.stop import PeerError
from runtime.torchrun import tell_torchrun

_FULL = "; the disk is full: free some space and run again"
_NOT_ALLOWED = "; change its permissions, or name another place"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.ENOENT: "; correct the path",
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.EROFS: "; name a place that can be written",
    errno.EISDIR: "; name a file",
    errno.ENOTDIR: "; a file stands where a folder should: correct the path",
}
"""What to do about what the system says."""
NOT_KEPT = 3
"""Exit code of a run that was trained, and whose checkpoint was asked for and is not there."""


def leave(code: int) -> NoReturn:
    """End the process. After a failure at once: a rank's thread may still be tidying its native
    thread-locals, which must not meet an interpreter that is being taken down."""
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(0)


def guarded(work: Callable[[], None]) -> int:
    """Turn the errors that users can mend into one clear message instead of a traceback."""
    try:
        try:
            work()
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is no error
    except KeyboardInterrupt as told:
        print(f"\n{str(told) or 'interrupted'}", file=sys.stderr)
        return 130
    except (ValueError, MemoryError) as error:
        _tell(str(error) or "out of memory")
        return 2
    except NotKept as error:
        _tell(str(error))
        return NOT_KEPT
    except BrokenPipeError:
        # The reader of our output has gone, as `| head` does; what is left is for nobody.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        hint = _REMEDIES.get(error.errno or 0, "")
        where = f"{error.filename}: " if error.filename else ""
        comes_second = isinstance(error, PeerError)
        _tell(f"{where}{error.strerror or error}{hint}", comes_second=comes_second)
        return 2
    except Exception as error:
        tell_torchrun(f"{type(error).__name__}: {error}")
        raise
    return 0


def _tell(reason: str, *, comes_second: bool = False) -> None:
    sentence = "error: " + printable(reason, keep="\n")  # it may quote a file
    print(sentence, file=sys.stderr)
    tell_torchrun(sentence, comes_second=comes_second)
