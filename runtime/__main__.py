"""`python -m runtime`: train one model, and look after data."""

from __future__ import annotations

import sys

from runtime.commands import leave, main

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
