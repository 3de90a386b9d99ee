"""The server from which points are forked: a Ctrl-C while it loads, and who starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.tree import ROOT

SLOW = """
import signal
import time
from pathlib import Path
from runtime.process import unblock_interrupts

Path("loads").touch()
time.sleep(3)

def work():
    unblock_interrupts()
    Path("works").write_text(str(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])))
"""
SCRIPT = """
from runtime.process import fork_server
from forking import work_in_a_fork

context = fork_server(["slow_to_load"])
while True:
    try:
        work_in_a_fork(context)
        break
    except KeyboardInterrupt:
        print("interrupted")
"""
LATE = """
def work():
    import slow_to_load
    slow_to_load.work()

def work_in_a_fork(context):
    process = context.Process(target=work)
    process.start()
    process.join()
"""


def test_a_ctrl_c_while_the_fork_server_loads_prints_no_traceback(tmp_path):
    (tmp_path / "slow_to_load.py").write_text(SLOW)
    (tmp_path / "forking.py").write_text(LATE)
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


ASKS_AT_ONCE = """
from concurrent.futures import ProcessPoolExecutor
from runtime.process import fork_server

print("the script runs", flush=True)
context = fork_server(["math"])
process = context.Process(target=print, args=("a process",), kwargs={"flush": True})
process.start()
process.join()
with ProcessPoolExecutor(1, mp_context=context) as pool:
    print(process.exitcode, pool.submit(abs, -7).result())
"""


def test_a_script_that_asks_for_processes_at_once_is_not_run_by_them(tmp_path):
    """As one does that calls `sweep` without a guard: once each process began the sweep anew."""
    script = tmp_path / "script.py"
    script.write_text(ASKS_AT_ONCE)
    done = subprocess.run(
        [sys.executable, script], env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["the script runs", "a process", "0 7"], done.stderr
    assert not done.stderr
