"""`python -m runtime`: train one model, and look after data."""

from __future__ import annotations

import sys

from runtime.commands import leave, main
from runtime.openmp import let_idle_threads_sleep

if __name__ == "__main__":
    let_idle_threads_sleep()
    leave(main(sys.argv[1:]))
