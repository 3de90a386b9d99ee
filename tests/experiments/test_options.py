"""Options of every study: a bad value ends in exit 2 and one sentence, before anything runs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from experiments import __main__ as commands
from experiments.__main__ import main
from experiments.catalogue import BENCHES, STUDIES
from experiments.options import OneOf, Parallel, Positive, Some
from experiments.studies.scale import Options as Scale
from persia_sim.base.command_line import options_of
from persia_sim.base.schema import Within

EVERY = [*STUDIES, *BENCHES]
REFUSED = {
    "demo": ["seeds 0", "jobs 0", "set foo=1", "set model.lr=0"],
    "tune": ["seeds 0"],
    "models": ["seeds 0"],
    "treatments": ["seeds 0"],
    "lateness": ["streams", "streams abc", "seeds 1", "share 0"],
    "daily": ["modes", "seeds 0", "tau -1", "set foo=1"],
    "sweep": [],
    "which-mode": ["hosts abc", "minutes 0", "jobs 0"],
    "which-mode-oracle": ["draws 0", "truth 1"],
    "convergence": [
        "modes hybrid", "samples 1023", "seeds 1", "snapshots 0", "snapshots 1281", "target 0",
        "target 1.5",
    ],
    "convergence-bound": ["seeds 1", "taus", "alphas", "alphas 0.1", "alphas 1"],
    "scale": ["steps 7", "over gpus"],
    "modes-timeline": ["steps 9", "shown 65", "cluster-ranks 0"],
    "ablation": ["steps 7", "places"],
    "fault-drill": ["ranks 9", "servers 9", "patience-s 0", "roles host"],
    "predict-published": [
        f"{name} /no/such.csv" for name in ("rows", "workloads", "systems", "tables", "known")
    ],
    "paper": ["only abc", "size abc"],
    "bench-engines": ["window-steps 2", "rows 25", "what", "what latency", "ranks 0",
                      "around-s 0"],
    "validate": ["steps 29", "ranks 3"],
    "bench-peers": ["workloads w", "window-steps 2", "rows 25", "precision tf32", "systems abc"],
}  # fmt: skip
"""What hangs together with other options, and the bounds that a study would be wrong beyond."""
UNBOUNDED = {"snapshots", "steps"}
"""Numbers of a study's `check`."""


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a refused command said, on one line."""
    code = main(words)
    told = capsys.readouterr()
    text = told.out + told.err
    assert code == 2, (words, text)
    assert "Traceback" not in text
    return " ".join(text.split())


@pytest.fixture
def no_run(monkeypatch):
    """Nothing is run; call it with a study's name."""

    def run(*_: object) -> None:
        raise AssertionError("a run was started")

    def forbid(name: str) -> None:
        monkeypatch.setattr(f"{commands.module_of(name)}.run", run)

    return forbid


def parts(kind: Any) -> Iterator[Any]:
    """Types and notes of an annotation, those of its items too."""
    yield kind
    for part in get_args(kind) if get_origin(kind) is not Literal else ():
        yield from parts(part)


@pytest.mark.parametrize(("name", "words"), [(n, words) for n in EVERY for words in REFUSED[n]])
def test_what_a_study_cannot_be_run_with_is_refused_by_name(name, words, capsys, no_run, tmp_path):
    no_run(name)
    option, *value = words.split()
    told = refused([name, f"--{option}", *value, "--out", str(tmp_path / "out")], capsys)
    assert option in told or option.replace("-", "_") in told, told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", EVERY)
def test_no_option_of_a_number_is_without_bounds(name):
    """One that a later change adds comes with its rule, or stands in the study's `check`."""
    options = importlib.import_module(commands.module_of(name)).Options
    for option in options_of(options):
        held = [*parts(option.kind)]
        if {int, float} & {part for part in held if isinstance(part, type)}:
            bounded = any(isinstance(part, Within) for part in held)
            assert bounded or "." in option.path or option.path in UNBOUNDED, option.path


@dataclass(frozen=True, kw_only=True)
class Cup(Parallel):
    """Of a study that is none."""

    seeds: Annotated[int, Within(1, 5)] = 1
    share: Annotated[float, Within(1, 5)] | None = 2.0
    size: Positive = 1.0
    taus: tuple[Annotated[int, Within(0, 9)], ...] = ()
    modes: Some[Annotated[str, OneOf("ab")]] = ("a",)

    def _check(self) -> None:
        if self.seeds == 2 and self.jobs == 3:
            raise ValueError("seeds 2 and jobs 3 contradict each other")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seeds": 0}, "seeds must be >= 1, got 0"),
        ({"seeds": 6}, "seeds must be <= 5, got 6"),
        ({"share": float("nan")}, "share must be a finite number, got nan"),
        ({"size": 0}, "size must be > 0, got 0"),
        ({"taus": (3, 10)}, "taus[1] must be <= 9, got 10"),
        ({"modes": ()}, "modes must hold one value or more, got ()"),
        ({"modes": ("a", "c")}, "modes[1] must be one of a, b, got 'c'"),
        ({"jobs": 0}, "jobs must be >= 1, got 0"),
        ({"jobs": 3, "seeds": 2}, "seeds 2 and jobs 3 contradict each other"),
    ],
)
def test_an_option_that_breaks_its_rule_is_told_with_name_rule_and_value(given, said):
    with pytest.raises(ValueError) as caught:
        Cup(**given)
    assert str(caught.value) == said


def test_ends_of_a_range_and_options_that_are_not_given_pass():
    for seeds, taus in ((1, (0,)), (5, (9,))):
        Cup(seeds=seeds, taus=taus, share=None, size=1e-300)


def test_a_study_writes_into_a_folder_of_its_name_unless_told(tmp_path):
    assert Scale().out == Path("runs/scale")
    assert Scale(out=tmp_path).out == tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweep", "staleness.toml", "--set", "rows.optimizer.kind=adam",
          "rows.optimizer.initial_accumulator=0.1"],
         "rows.optimizer.initial_accumulator"),
        (["sweep", "staleness.toml", "--set", "sync.ahead=3"], "no line takes it"),
        (["sweep", "staleness.toml", "--set", f"model.lr={','.join(map(str, range(1, 1001)))}"],
         "combinations of base must be <= 1,000, got 3000"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)  # fmt: skip
def test_options_that_nothing_would_read_are_refused(words, said, capsys):
    assert said in refused(words, capsys)


@pytest.mark.parametrize("out", ["", "a-file", "a-file/below"])
def test_a_folder_that_cannot_be_filled_is_told_before_the_work(out, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("not a folder")
    monkeypatch.setattr("experiments.studies.scale.run", lambda _: 1 / 0)
    told = refused(["scale", "--out", out], capsys)
    assert out in told and told.startswith("error: ")
    assert [p.name for p in tmp_path.iterdir()] == ["a-file"]


def test_a_reader_that_has_gone_is_no_error():
    """`persia-experiments list | head -0`, as it happens when head is the quicker one."""
    read, write = os.pipe()
    os.close(read)
    found = subprocess.run(
        [sys.executable, "-m", "experiments", "list"], stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert found.stderr == b""
    assert found.returncode == 0


def test_the_list_names_every_study_with_its_minutes(capsys):
    assert main(["list"]) == 0
    told = capsys.readouterr().out
    for name, study in (STUDIES | BENCHES).items():
        assert any(
            line.split()[0] == name
            and study.says in line
            and (f"({study.minutes} min" in line or (not study.minutes and "(" not in line))
            for line in told.splitlines()
            if line.startswith("  ")
        )


def test_a_failed_study_is_exit_2(capsys, monkeypatch, tmp_path):
    def run(_: object) -> None:
        raise ValueError("3 of 9 points have no result")

    monkeypatch.setattr("experiments.studies.scale.run", run)
    assert refused(["scale", "--out", str(tmp_path)], capsys) == (
        "error: 3 of 9 points have no result"
    )
