"""`persia-experiments`: the studies, by name."""

from __future__ import annotations

import sys
from typing import NoReturn

from experiments.commands import main
from runtime.guarded import find_modules_here, leave, let_idle_threads_sleep


def run() -> NoReturn:
    """Carry out the command line and end the process; the console script calls this too."""
    let_idle_threads_sleep()
    find_modules_here()
    leave(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
