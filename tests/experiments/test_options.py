"""Options of every study: a bad value ends in exit 2 and one sentence, before anything runs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments import commands
from experiments.catalogue import BENCHES, STUDIES
from experiments.commands import main
from experiments.options import Parallel, Positive, Some, one_of, within
from experiments.studies.scale_workers import Options as ScaleWorkers

ZERO_OR_LESS = st.integers(-(10**20), 0).map(str)
ABSURD = st.integers(10**13, 10**20).map(str)
COUNT = ZERO_OR_LESS | ABSURD
NEGATIVE = st.integers(-(10**20), -1).map(str)
ODD_FLOAT = st.sampled_from(["nan", "inf", "-inf", "-1", "1e300"])
NOT_POSITIVE = ODD_FLOAT.filter(lambda text: text != "1e300") | st.just("0")
NO_FILE = st.sampled_from(["/no/such.csv", "/"])
UNKNOWN = st.text("abcdefxyz", min_size=2, max_size=6)

BAD = {
    "demo": {"seeds": COUNT | st.just("1"), "samples": COUNT, "jobs": COUNT},
    "staleness-sweep": {
        "seeds": COUNT, "ranks": COUNT, "batch": COUNT, "steps": COUNT, "taus": NEGATIVE | ABSURD,
        "row-lr": NOT_POSITIVE, "lr": NOT_POSITIVE, "initial-accumulator": ODD_FLOAT,
        "initial-scale": ODD_FLOAT, "evaluate-every-steps": COUNT, "test-rows": COUNT,
        "jobs": COUNT, "modes": UNKNOWN | st.just(""), "match": UNKNOWN,
        "sync-steps": NEGATIVE | ABSURD, "dense-lag": NEGATIVE | ABSURD | st.just("1001"),
        "delay-compensation": ODD_FLOAT, "lr-by-staleness": UNKNOWN, "part": UNKNOWN,
        "windows": COUNT | st.just("1"),
    },
    "treatments": {
        "taus": COUNT | st.just(""), "async-tau": NEGATIVE | ABSURD, "treatments": UNKNOWN,
        "presets": UNKNOWN, "sync-steps": COUNT, "dense-lag": COUNT | st.just("1001"),
        "delay-compensation": ODD_FLOAT | st.just("0"), "seeds": COUNT | st.just("1"),
        "ranks": COUNT, "batch": COUNT, "samples": COUNT, "jobs": COUNT,
    },
    "lateness": {
        "streams": UNKNOWN | st.just(""), "seeds": COUNT | st.just("1"), "share": COUNT,
        "jobs": COUNT,
    },
    "time-to-auc": {
        "cluster": UNKNOWN, "workload": UNKNOWN, "modes": UNKNOWN | st.just("hybrid"),
        "tau": NEGATIVE | ABSURD, "steps": COUNT, "batch-per-rank": COUNT,
        "snapshots": COUNT | st.just("401"), "seeds": COUNT, "test-rows": COUNT, "jobs": COUNT,
        "targets": ODD_FLOAT | st.sampled_from(["0", "1.5", ""]),
    },
    "convergence": {
        "data-sets": UNKNOWN | st.just(""), "modes": UNKNOWN | st.sampled_from(["", "hybrid"]),
        "tau": NEGATIVE | ABSURD, "match": UNKNOWN, "samples": COUNT | st.just("1023"),
        "seeds": COUNT | st.just("1"), "snapshots": COUNT | st.just("1281"), "test-rows": COUNT,
        "jobs": COUNT, "target": NOT_POSITIVE | st.just("1.5"),
    },
    "convergence-bound": {
        "seeds": COUNT | st.just("1"), "taus": COUNT | st.just(""), "updates": COUNT | st.just(""),
        "batch": COUNT | st.just(""), "cases": UNKNOWN | st.just(""), "samples": COUNT,
        "alphas": NOT_POSITIVE | st.sampled_from(["", "0.1", "1"]),
    },
    "row-frequency": {
        "seeds": COUNT | st.just("1"), "taus": COUNT | st.just(""), "samples": COUNT,
        "batch": COUNT, "test-rows": COUNT, "probes": COUNT, "jobs": COUNT,
    },
    "scale-workers": {"steps": COUNT | st.just("7")},
    "scale-model-size": {"steps": COUNT | st.just("7")},
    "cluster-sweep": {
        "cluster": UNKNOWN, "workloads": UNKNOWN | st.just(""), "modes": UNKNOWN | st.just(""),
        "ranks": COUNT, "workers": COUNT, "servers": COUNT, "batch-per-rank": COUNT,
        "taus": NEGATIVE | ABSURD, "rows": UNKNOWN, "latin": COUNT,
        "half-width": NOT_POSITIVE | st.sampled_from(["1", "1e300"]), "jobs": COUNT,
        "seed": NEGATIVE,
    },
    "modes-timeline": {
        "modes": UNKNOWN | st.just(""), "window": COUNT, "latency-s": ODD_FLOAT, "batch": COUNT,
        "rounds": COUNT, "steps": COUNT | st.just("9"), "shown": COUNT | st.just("65"),
        "cluster": UNKNOWN, "workload": UNKNOWN, "cluster-ranks": COUNT | st.just("1"),
    },
    "ablation": {
        "places": UNKNOWN, "ranks": COUNT, "steps": COUNT | st.just("7"), "tau": COUNT,
        "samples": COUNT, "test-rows": COUNT, "batch": COUNT, "train-ranks": COUNT,
        "seeds": NEGATIVE | ABSURD, "jobs": COUNT,
    },
    "sharded-map": {
        "gpus": UNKNOWN | st.just(""), "software": UNKNOWN | st.just(""),
        "nic-gbit-per-s": ODD_FLOAT | st.just(""), "parameters": ODD_FLOAT | st.just(""),
        "batch": COUNT | st.just("63"), "steps": COUNT | st.just("7"),
    },
    "checkpoint-interval": {
        "cluster": UNKNOWN, "workload": UNKNOWN, "modes": UNKNOWN | st.just(""), "ranks": COUNT,
        "steps": COUNT,
        "crashes": NOT_POSITIVE | st.sampled_from(["1e6", "1e300"]),
        "checkpoint-share": NOT_POSITIVE | st.just("1.5"), "back-share": ODD_FLOAT,
        "factors": NOT_POSITIVE | st.sampled_from(["1e3", ""]), "seeds": COUNT,
    },
    "simulator-speed": {"steps": COUNT, "most-ranks": COUNT | st.just("7"), "closed-forms": COUNT},
    "fault-drill": {
        "kills": COUNT, "in-checkpoint": NEGATIVE | ABSURD, "in-evaluation": NEGATIVE | ABSURD,
        "learning": NEGATIVE | ABSURD,
        "modes": UNKNOWN | st.just(""), "roles": UNKNOWN | st.just(""), "steps": COUNT,
        "ranks": COUNT | st.just("9"), "servers": COUNT | st.just("9"), "latency-s": ODD_FLOAT,
        "patience-s": NOT_POSITIVE | st.just("1e300"), "seed": NEGATIVE,
    },
    "predict-published": dict.fromkeys(
        ("rows", "workloads", "systems", "tables", "known"), NO_FILE
    ),
    "fit": dict.fromkeys(("rows", "workloads", "systems", "tables"), NO_FILE),
    "paper": {"size": UNKNOWN, "only": UNKNOWN, "measurements": st.just("/no/such")},
    "bench-engines": {
        "what": UNKNOWN | st.just(""), "rounds": COUNT, "window-steps": COUNT | st.just("3"),
        "batch": COUNT, "rows": COUNT | st.just("25"), "dim": COUNT,
        "hidden": COUNT | st.just(""), "threads": COUNT, "ranks": COUNT | st.just(""),
        "servers": COUNT | st.just(""), "latency-s": ODD_FLOAT | st.just(""),
        "windows": COUNT | st.just(""), "modes": UNKNOWN | st.just(""),
        "engines": UNKNOWN | st.just(""), "clock": UNKNOWN, "most-foreign-cores": ODD_FLOAT,
    },
    "bench-embedding": {
        "rows": COUNT, "dim": COUNT, "batch": COUNT, "rounds": COUNT,
        "most-foreign-cores": ODD_FLOAT,
    },
    "bench-snapshot": {
        "rows": COUNT, "dim": COUNT, "batch": COUNT, "rounds": COUNT, "around-s": ODD_FLOAT,
    },
    "bench-memory": {
        "steps": COUNT, "ranks": COUNT, "shards": COUNT, "batch": COUNT, "tau": NEGATIVE | ABSURD,
        "executor": UNKNOWN,
    },
    "bench-sweep": {
        "ranks": COUNT | st.just(""), "batch": COUNT | st.just(""), "tau": NEGATIVE | ABSURD,
        "seeds": COUNT, "rounds": COUNT, "jobs": COUNT, "most-foreign-cores": ODD_FLOAT,
    },
    "validate": {
        "modes": UNKNOWN | st.just(""), "ranks": COUNT | st.just(""),
        "rounds": COUNT, "steps": COUNT | st.just("29"), "most-foreign-cores": ODD_FLOAT,
    },
    "bench-peers": {
        "workloads": UNKNOWN | st.just("w"), "rows": COUNT, "batch": COUNT, "threads": COUNT,
        "latency-s": ODD_FLOAT, "rounds": COUNT, "window-steps": COUNT | st.just("2"),
        "clock": UNKNOWN, "most-foreign-cores": ODD_FLOAT,
    },
}  # fmt: skip


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a refused command said, on one line and without its frame."""
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    told = capsys.readouterr()
    text = told.out + told.err
    assert code == 2, (words, text)
    assert "Traceback" not in text
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("name", [*STUDIES, *BENCHES])
def test_bad_options_are_refused_with_name_and_value_before_anything_runs(
    name, capsys, monkeypatch, tmp_path
):
    def run(*_: object) -> None:
        raise AssertionError("a run was started")

    monkeypatch.setattr(f"{commands.module_of(name)}.run", run)

    @given(st.data())
    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def draw(data: st.DataObject) -> None:
        option = data.draw(st.sampled_from(sorted(BAD[name])))
        value = data.draw(BAD[name][option])
        given = [f"--{option}", value] if value else [f"--{option}"]
        told = refused([name, *given, "--out", str(tmp_path / "out")], capsys)
        word = option.replace("-", "_")
        # A list that is told by its length or a derived rule still names what was given.
        assert option in told or word in told, told
        assert not (tmp_path / "out").exists()

    draw()


def test_every_study_has_bad_options_drawn():
    assert set(BAD) == set(STUDIES | BENCHES)


@pytest.mark.parametrize("name", [*STUDIES, *BENCHES])
def test_no_option_of_a_number_is_forgotten(name):
    """A number or list that a later change adds must come with its rule, and stand above."""
    import dataclasses
    import importlib

    options = importlib.import_module(commands.module_of(name)).Options
    unchecked = {"data", "model", "rows", "out", "dry_run", "data_dir", "evict", "suspects",
                 "row_optimizer", "optimizer", "merge_pushes", "device", "held_out",
                 "profiles", "store", "tuned"}  # fmt: skip
    own = {f.name for f in dataclasses.fields(options)} - unchecked
    drawn = {option.replace("-", "_") for option in BAD[name]}
    assert own <= drawn, own - drawn


@dataclass(frozen=True, kw_only=True)
class Cup(Parallel):
    """Of a study that is none."""

    seeds: Annotated[int, within(1, 5)] = 1
    share: Annotated[float, within(1, 5)] | None = 2.0
    size: Positive = 1.0
    taus: tuple[Annotated[int, within(0, 9)], ...] = ()
    modes: Some[Annotated[str, one_of("ab")]] = ("a",)

    def check(self) -> None:
        if self.seeds == 2 and self.jobs == 3:
            raise ValueError("seeds 2 and jobs 3 contradict each other")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seeds": 0}, "seeds must be >= 1, got 0"),
        ({"seeds": 6}, "seeds must be <= 5, got 6"),
        ({"share": float("nan")}, "share must be >= 1, got nan"),
        ({"size": float("inf")}, "size must be > 0 and finite, got inf"),
        ({"taus": (3, 10)}, "taus must be <= 9, got 10"),
        ({"modes": ()}, "modes must hold one value or more, got none"),
        ({"modes": ("a", "c")}, "modes must be one of a, b, got 'c'"),
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
    assert ScaleWorkers().out == Path("runs/scale-workers")
    assert ScaleWorkers(out=tmp_path).out == tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cluster-sweep", "--modes", "sync", "--taus", "1", "2"], "taus is only used by"),
        (["cluster-sweep", "--ranks", *map(str, range(1, 400)), "--servers",
          *map(str, range(1, 400))], "the number of points must be <= 100,000"),
        (["staleness-sweep", "--row-optimizer", "adam", "--initial-accumulator", "0.1"],
         "initial_accumulator is only used by row optimiser adagrad"),
        (["staleness-sweep", "--modes", "sync", "--merge-pushes", "True"],
         "merge_pushes is only used by hybrid or raw_hybrid"),
        (["staleness-sweep", "--modes", "sync", "--match", "global"],
         "match is only used by async"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)  # fmt: skip
def test_options_that_nothing_would_read_are_refused(words, said, capsys):
    assert said in refused(words, capsys)


@pytest.mark.parametrize("out", ["", "a-file", "a-file/below"])
def test_a_folder_that_cannot_be_filled_is_told_before_the_work(out, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("not a folder")
    monkeypatch.setattr("experiments.studies.scale_workers.run", lambda _: 1 / 0)
    told = refused(["scale-workers", "--out", out], capsys)
    assert out in told and told.startswith("error: ")
    assert [p.name for p in tmp_path.iterdir()] == ["a-file"]


def test_a_reader_that_has_gone_is_no_error():
    """`python -m experiments list | head -0`, as it happens when head is the quicker one."""
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
            and f"({study.minutes or 'any'} min" in line
            for line in told.splitlines()
            if line.startswith("  ")
        )


def test_a_failed_study_is_exit_2(capsys, monkeypatch, tmp_path):
    def run(_: object) -> None:
        raise ValueError("3 of 9 points have no result")

    monkeypatch.setattr("experiments.studies.scale_workers.run", run)
    assert refused(["scale-workers", "--out", str(tmp_path)], capsys) == (
        "error: 3 of 9 points have no result"
    )
