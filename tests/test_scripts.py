"""The console scripts of pyproject.toml are the commands of `python -m`."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from tests.tree import ROOT

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
PACKAGES = {"persia-runtime": "runtime", "persia-sim": "persia_sim"}
PACKAGES["persia-experiments"] = "experiments"


def ended(*words: str) -> tuple[int, str, str]:
    found = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    return found.returncode, found.stdout, found.stderr


def test_there_is_a_script_for_every_command():
    assert set(SCRIPTS) == set(PACKAGES)


@pytest.mark.multiproc
@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("--no-such", 2)])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_and_returns_what_python_m_does(script, word, code):
    module, _, function = SCRIPTS[script].partition(":")
    # What an installer writes into the script.
    text = f"import sys; from {module} import {function}; sys.exit({function}())"
    found = ended("-c", text, word)
    assert found[0] == code
    assert found == ended("-m", PACKAGES[script], word)
