"""`python -m experiments`: the studies, by name."""

from __future__ import annotations

import sys

from experiments.commands import main
from runtime.commands import leave

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
