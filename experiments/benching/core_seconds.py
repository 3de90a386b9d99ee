"""What a command costs: core-seconds of it and of every process that it leaves behind.

    persia-experiments.benching.core_seconds COMMAND ...

runs the command, waits for all of them, and ends with its exit code; whoever waited for this
process is then told all their CPU time as its own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence


def core_seconds(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """User and system seconds of a command's whole tree of processes.

    Raises ValueError with the last words of a command that failed.
    """
    whole = [sys.executable, "-m", "experiments.benching.core_seconds", *command]
    with subprocess.Popen(
        whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        output = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise ValueError(f"{' '.join(command)} failed:\n{output[-2000:]}")
    return used.ru_utime + used.ru_stime


def main(command: Sequence[str]) -> int:
    """Run, then wait for orphans: a fork server outlives the sweep that asked it for processes."""
    if sys.platform == "linux":
        child_subreaper = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
        ctypes.CDLL(None).prctl(child_subreaper, 1)
    code = subprocess.run(command, check=False).returncode
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
