"""`python -m experiments`: the studies, by name."""

from __future__ import annotations

import sys

from experiments.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
