"""`python -m experiments`: the studies, by name."""

from __future__ import annotations

import sys

from experiments.commands import main
from runtime.commands import leave
from runtime.openmp import let_idle_threads_sleep

if __name__ == "__main__":
    let_idle_threads_sleep()
    leave(main(sys.argv[1:]))
