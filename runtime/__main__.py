"""`persia-runtime`: train one model, and look after data."""

from __future__ import annotations

import sys
from typing import NoReturn

from runtime.commands import main
from runtime.guarded import before_torch, find_modules_here, leave


def run() -> NoReturn:
    """Carry out the command line and end the process; the console script calls this too."""
    before_torch()
    find_modules_here()
    leave(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
