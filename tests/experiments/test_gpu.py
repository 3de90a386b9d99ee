"""The command for a GPU, without one: what it keeps, what it does again, and what it types."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
import torch

from experiments.__main__ import main, module_of
from experiments.benching import gpu
from experiments.benching.device_time import covered
from persia_sim.base.command_line import read_options
from runtime.train_options import read_train

pytestmark = pytest.mark.multiproc


def python(code: str, name: str, limit_s: float = 60.0, **more) -> gpu.Command:
    words = (sys.executable, "-S", "-c", code)
    return gpu.Command(words, limit_s, name, **{"out": ""} | more)


WRITES = (
    "import sys, pathlib; out = pathlib.Path(sys.argv[2]); out.mkdir()\n"
    "(out / 'speed.csv').write_text('name,value\\na,1\\n'); (out / 'kept.gz').write_text('x')\n"
    "print('measured')"
)


def records(out) -> list[dict]:
    """In the order in which commands ended."""
    return [json.loads(line)["row"] for line in (out / gpu.RECORDS).read_text().splitlines()]


def test_a_part_that_fails_or_hangs_keeps_the_others_and_is_done_again(tmp_path, monkeypatch):
    marker = tmp_path / "may pass"
    plan = {
        "tests": [python(f"import os; assert os.path.exists({str(marker)!r})", "fails once")],
        "feed": [
            python(WRITES, "writes", keeps="*.gz", out="out"),
            python("import time; time.sleep(600)", "hangs", 0.2),
            python("", "needs a tool", needs="no-such-tool"),
        ],
    }
    monkeypatch.setattr(gpu, "plan_of", lambda device: plan)
    out = tmp_path / "out"
    options = gpu.Options(device="cpu", out=out)
    gpu.run(options)
    failed, written, hung, skipped = records(out)
    assert "date" in written["machine"]
    assert written["tables"] == {"speed": [{"name": "a", "value": "1"}]}
    assert (written["exit_code"], written["output"]) == (0, "measured")
    assert (out / "kept.gz").read_text() == "x"
    assert hung["outcome"] == "outlasted 0 s" and hung["exit_code"] is None
    assert skipped["outcome"] == "skipped: no-such-tool is not here"
    assert failed["outcome"] == "failed with exit code 1" and "AssertionError" in failed["output"]

    marker.touch()
    gpu.run(options)
    again = records(out)[4:]
    assert [r["outcome"] for r in again] == ["passed", hung["outcome"], skipped["outcome"]]
    assert "hangs" in (out / gpu.TABLE).read_text()


def test_the_plan_covers_the_goals_within_ten_minutes(capsys, tmp_path):
    assert main(["gpu", "--dry-run", "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert int(told.splitlines()[-1].split()[0]) <= 600
    paper = "--workloads paper --batch"
    for words in (f"{paper} 4096 --device cuda --precision float32", "ours hybrid tau 1",
                  f"{paper} 16384 --device cuda --precision tf32", "torch merged",
                  f"{paper} 16384 --device cuda --precision bfloat16"):  # fmt: skip
        assert words in told


def test_speeds_come_first_one_precision_a_command_and_the_slowest_tool_last():
    """What a machine that goes too early, or a limit, takes with it is what matters least."""
    plan = gpu.plan_of("cuda")
    assert tuple(plan) == gpu.PARTS and gpu.PARTS[0] == "peers"
    for command in plan["peers"]:
        after = command.words[command.words.index("--precision") + 1 :]
        assert after[1].startswith("--"), "one precision"
        assert int(after[after.index("--window-steps") + 1]) >= 40
    assert [c.name for c in plan[gpu.PARTS[-1]]][-1] == "compute-sanitizer memcheck"
    assert list(plan.values())[-1][-1].limit_s >= 90


def test_a_plan_that_is_only_shown_makes_nothing(capsys, tmp_path):
    assert main(["gpu", "--dry-run", "--out", str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_command_of_the_plan_is_one_that_its_parser_takes(device):
    """The bundle's test runs a part of them, on a CPU."""
    taken = 0
    for command in (command for part in gpu.plan_of(device).values() for command in part):
        module, name, *words = command.words[command.words.index("-m") + 1 :]
        if module == "experiments":
            read_options(importlib.import_module(module_of(name)).Options, words, name)
        elif name == "train":
            read_train(words)
        taken += module == "experiments" or name == "train"
    assert taken >= 7


def test_what_spans_cover_counts_overlaps_once():
    assert covered([]) == 0
    assert covered([(5, 6), (0, 4), (1, 2), (3, 5)]) == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_begun(tmp_path, capsys):
    assert main(["gpu", "--out", str(tmp_path / "out")]) == 2
    assert "try --device cpu" in capsys.readouterr().err and not any(
        (tmp_path / "out").glob("*.json*")
    )
