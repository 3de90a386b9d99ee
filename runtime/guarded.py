"""How the process of a command begins and ends: where the user's modules lie, errors that users can
mend as one sentence, and the exit code."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from persia_sim.base.files import (
    MORE_FILES,
    NO_FOLDER,
    TOO_MANY_OPEN,
    flush_output,
    usual_streams,
)
from persia_sim.base.rules import left_out, printable
from runtime.process import enter_process
from runtime.stop import (
    BY_HAND,
    UNFINISHED,
    Interrupted,
    NotStored,
    PeerError,
    StoreError,
    Terminated,
    Unfinished,
)


def find_modules_here() -> None:
    """Import the user's modules from the current folder, as `python -m` does and a console script
    would not; but behind all that is installed, whose place nothing takes that lies in a folder
    into which one goes to look at what somebody has sent."""
    if not sys.flags.safe_path and "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def begin() -> None:
    """What every command does first. Ends the process where nothing can be found by its name."""
    usual_streams()
    enter_process()
    try:
        find_modules_here()
    except FileNotFoundError:
        print(f"error: {NO_FOLDER}", file=sys.stderr)
        sys.exit(2)


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
    errno.EEXIST: "; name another place",
    **dict.fromkeys(TOO_MANY_OPEN, f"; {MORE_FILES}"),
    errno.ENOTDIR: "; a file stands where a folder should: correct the path",
}
"""What to do about what the system says."""
NOT_STORED = 3
"""Exit code of a run that was trained, and whose results or checkpoint the disk did not keep."""


def leave(code: int) -> NoReturn:
    """End the process. After a failure at once: a rank's thread may still be tidying its native
    thread-locals, which must not meet an interpreter that is being taken down."""
    if code:
        flush_output()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(0)


def run_as_process(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Carry out the words of this process's command line, and end it with the code of ``main``."""
    begin()
    leave(main(sys.argv[1:]))


def guarded(work: Callable[[], None]) -> int:
    """Turn the errors that users can mend into one clear message instead of a traceback."""
    # The command itself; below, each kind of end with its exit code.
    try:
        try:
            work()
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is no error
    except KeyboardInterrupt as interruption:
        print(f"\n{str(interruption) or 'interrupted'}", file=sys.stderr)
        return UNFINISHED if isinstance(interruption, Terminated) else BY_HAND
    except Interrupted as interruption:
        if str(interruption):
            print(interruption, flush=True)
            tell_torchrun(str(interruption))
        else:  # of a rank that follows rank 0 says it; without a time torchrun would take it first
            tell_torchrun("interrupted, as rank 0 says", comes_second=True)
        return interruption.status
    except (ValueError, MemoryError) as error:
        # A mistake of the user's: one sentence, code 2.
        _tell(str(error) or "out of memory")
        return 2
    except NotStored as error:
        _tell(str(error))
        return NOT_STORED
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        flush_output()
        return 0
    except OSError as error:
        # What the system says, and what to do about it.
        hint = _REMEDIES.get(error.errno or 0, "")
        where = f"{error.filename}: " if error.filename else ""
        comes_second = isinstance(error, PeerError)
        _tell(f"{where}{error.strerror or error}{hint}", comes_second=comes_second)
        return UNFINISHED if isinstance(error, Unfinished | StoreError) else 2
    except Exception as error:
        # Anything else is a mistake of ours, with its traceback; but for a part that was left out.
        if isinstance(error, ModuleNotFoundError) and (reason := left_out(error)):
            _tell(reason)
            return 2
        tell_torchrun(f"{type(error).__name__}: {error}")
        raise
    return 0


def _tell(reason: str, *, comes_second: bool = False) -> None:
    if (stores := sys.modules.get("runtime.object_store")) is not None:  # it loads numpy
        reason = stores.by_url(reason)
    sentence = "error: " + printable(reason, keep="\n")  # it may quote a file
    print(sentence, file=sys.stderr)
    tell_torchrun(sentence, comes_second=comes_second)


def tell_torchrun(sentence: str, *, comes_second: bool = False) -> None:
    """Put an error where torchrun looks for it, so that its report shows the sentence.

    ``comes_second``: it only follows from what another rank will say; that one is to be told first,
    and torchrun goes by the time, in whole seconds.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    if comes_second:
        time.sleep(1.5)
    extra = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
    extra["follows"] = str(comes_second)
    Path(file).write_text(json.dumps({"message": {"message": sentence, "extraInfo": extra}}))
