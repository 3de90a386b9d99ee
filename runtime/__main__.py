"""`python -m runtime`: train one model, and look after data."""

from __future__ import annotations

import sys

from runtime.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
