"""`python -m persia_sim`: simulate one configuration and print one screen about it."""

from __future__ import annotations

import os
import sys

from persia_sim.cli import Options, run


def main() -> int:
    """Parse, simulate, print; a user's mistake is one line on stderr."""
    import tyro  # only the command needs it

    config = (tyro.conf.EnumChoicesFromValues,)
    try:
        options = tyro.cli(Options, prog="python -m persia_sim", description=__doc__, config=config)
        print(run(options), flush=True)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone, as `| head` does
        os._exit(0)  # and nothing is left to be flushed
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
