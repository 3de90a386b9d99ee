"""A Ctrl-C while the server loads from which points are forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.tree import ROOT

SLOW = """
import time
from pathlib import Path
Path("loads").touch()
time.sleep(3)
"""
SCRIPT = """
import signal
import time
from pathlib import Path
from runtime.process import fork_server, unblock_interrupts

def work():
    unblock_interrupts()
    Path("works").write_text(str(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])))

if __name__ == "__main__":
    context = fork_server(["slow_to_load"])
    while True:
        try:
            process = context.Process(target=work)
            process.start()
            process.join()
            break
        except KeyboardInterrupt:
            print("interrupted")
"""


def test_a_ctrl_c_while_the_fork_server_loads_prints_no_traceback(tmp_path):
    (tmp_path / "slow_to_load.py").write_text(SLOW)
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        while not (tmp_path / "loads").exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        told, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert told.splitlines() == ["interrupted"], told
    assert process.returncode == 0
    assert (tmp_path / "works").read_text() == "False"
