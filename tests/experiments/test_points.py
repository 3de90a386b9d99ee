"""What makes a point of a sweep another one: every edit that changes a number, and no other."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from experiments import points
from experiments.__main__ import main
from experiments.points import Line, Point
from experiments.studies.sweep import points_of
from experiments.sweeping import print_plan
from persia_sim.base.trace import Trace
from persia_sim.base.vocabulary import Mode
from persia_sim.base.window import constant_lag
from runtime.config import DataConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.object_store import CACHE
from tests.runtime.clicks_of_a_user import EDITS, NO_EDITS, write_clicks
from tests.runtime.worlds import OPTIONS, with_another

MODEL = {
    "own_net.py": "from own_parts import layers\nclass Net: width = 8\n",
    "own_parts/__init__.py": "",
    "own_parts/layers.py": "from . import sizes\n",
    "own_parts/sizes.py": "WIDTH = 8\n",
    "own_parts/notes.py": "NOT_IMPORTED = 1\n",
}
FILES = {
    "a row more": ("clicks.csv", lambda text: text + "u1,2,3|4,0.5,p1,9,1\n"),
    "a label": ("clicks.csv", lambda text: text[:-2] + ("0" if text[-2] == "1" else "1") + "\n"),
    "the model": ("own_net.py", lambda text: text.replace("8", "9")),
    "the package": ("own_parts/__init__.py", lambda text: text + "more = 1\n"),
    "a helper's helper": ("own_parts/sizes.py", lambda text: text.replace("8", "9")),
    **{
        f"schema: {name}": ("clicks.toml", lambda text, edit=edit: text.replace(*edit, 1))
        for name, edit in EDITS.items()
        if name in ("modulo", "split")  # all of them: tests/runtime/test_resume_command.py
    },
}
NO_FILES = {
    "what nobody imports": ("own_parts/notes.py", lambda text: text + "# more\n"),
    **{
        f"schema: {name}": ("clicks.toml", lambda text, edit=edit: text.replace(*edit, 1))
        for name, edit in NO_EDITS.items()
        if name == "defaults"
    },
}


def plan(home: Path, config: TrainConfig) -> str:
    """What the same command says of a sweep, and leaves behind as if it had run."""
    late = replace(config, sync=SyncConfig(mode="hybrid"))
    lines = Line(name="sync", config=config), Line(name="hybrid", config=late, versus=("sync",))
    told = io.StringIO()
    asked = [point for of_line in points_of(lines, 2) for point in of_line]
    with contextlib.redirect_stdout(told):
        print_plan(asked, home / "runs", 1)
    for point in asked:
        point.folder(home / "runs").mkdir(parents=True, exist_ok=True)
        (point.folder(home / "runs") / "summary.json").write_text('{"tasks": {}}')
    return told.getvalue()


@contextlib.contextmanager
def home():
    """A user's folder with data, schema and model, and the sweep over them, which is done."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = DataConfig(name=str(write_clicks(folder)))
        for file, text in MODEL.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(text)
        config = TrainConfig(data=data, model=ModelConfig(name="own_net:Net"))
        with (
            mock.patch.dict(os.environ, {CACHE: str(folder / "cache")}),
            mock.patch.object(sys, "path", [name, *sys.path]),
        ):
            assert "4 points (0 done, 4 to run)" in plan(folder, config)
            yield folder, config


def edit(folder: Path, change) -> bool:
    """Whether the edit found what it replaces."""
    name, make = change
    before = (folder / name).read_text()
    (folder / name).write_text(make(before))
    return make(before) != before


@pytest.mark.parametrize("name", FILES)
def test_each_edit_alone_is_to_run_and_taken_back_it_is_done(name):
    with home() as (folder, config):
        file = folder / FILES[name][0]
        before = file.read_text()
        assert edit(folder, FILES[name])
        assert "4 points (0 done, 4 to run)" in plan(folder, config)
        file.write_text(before)
        assert "4 points (4 done, 0 to run)" in plan(folder, config)


@pytest.mark.parametrize("name", NO_FILES)
def test_each_edit_that_changes_no_number_leaves_the_points_done(name):
    with home() as (folder, config):
        assert edit(folder, NO_FILES[name])
        assert "4 points (4 done, 0 to run)" in plan(folder, config)


@pytest.mark.parametrize("option", OPTIONS)
def test_any_option_makes_another_point_but_for_where_the_data_lie(option, tmp_path):
    """Of all options there are: one that is added decides, too, until somebody says otherwise."""
    point = Point(label="one", config=TrainConfig())
    other = replace(point, config=with_another(point.config, option))
    same = point.folder(tmp_path) == other.folder(tmp_path)
    assert same == (option == "data.dir")


def test_a_model_that_is_trained_anew_makes_the_points_that_start_from_it_new(tmp_path):
    state = tmp_path / "before/checkpoints/10/state.json"
    state.parent.mkdir(parents=True)
    point = Point(label="one", config=TrainConfig(warm_start=tmp_path / "before"))
    names = []
    for text in ("first", "second", "first"):
        state.write_text(text)
        names.append(point.folder(tmp_path))
    assert names[0] == names[2] != names[1]


def test_a_replay_in_another_order_is_another_point(tmp_path):
    """A trace of the same name, in which two batches have changed places; however it is packed."""
    trace = tmp_path / "order.npz"
    options = SimpleNamespace(steps=12, snapshots=2, seeds=2, test_rows=100)
    sync, data = SyncConfig(mode="hybrid", tau=2), DataConfig(name="synthetic")

    def names(late: int, *, compress: bool = True) -> list[str]:
        has_batch = lambda batch: batch < 12  # noqa: E731
        order = list(constant_lag(Mode.HYBRID, ranks=1, has_batch=has_batch, tau=late))
        Trace.of(order, mode="hybrid", ranks=1, shards=1, tau=2).save(trace, compress=compress)
        made = points.replayed("hybrid", sync, 32, data, trace, options)
        return [point.folder(tmp_path).name for point in made]

    once = names(2)
    assert len(set(once)) == 2 and names(2, compress=False) == once
    assert not set(names(1)) & set(once)


def test_an_option_at_its_default_is_no_part_of_a_points_name(tmp_path, monkeypatch):
    """So an option that is added later leaves the points of before where they were."""
    name = "option_values"
    point, known = Point(label="one", config=TrainConfig(seed=3)), getattr(points, name)
    before = point.folder(tmp_path)
    monkeypatch.setattr(points, "option_values", lambda config: [("new", 0), *known(config)])
    assert point.folder(tmp_path) == before


READS = """
import pathlib

from torch import nn

SCALE = pathlib.Path(__file__).with_name("scale.txt")


class Net(nn.Module):
    def __init__(self, shape, hidden):
        super().__init__()
        self.scale, self.head = float(SCALE.read_text()), nn.Linear(shape.width, shape.tasks)

    def forward(self, dense, embeddings):
        from runtime.models.inputs import flatten

        return self.scale * self.head(flatten(dense, embeddings))
"""


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A folder with a model that reads a file of its own."""
    (tmp_path / "reads_scale.py").write_text(READS)
    (tmp_path / "scale.txt").write_text("1.0")
    (tmp_path / "study.toml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("reads_scale", None)


STUDY = """[base]
data.name = "synthetic"
steps = 2
sync.ranks = 2
evaluation.test_rows = 100
[[line]]
name = "sync"
"""
SWEEP = ["sweep", "study.toml", "--seeds", "1", "--out", "sweep", "--jobs", "1"]
OWN = [*SWEEP, "--set", "model.name=reads_scale:Net"]


def test_a_file_that_the_model_reads_makes_another_point_where_it_is_named(reader, capsys):
    named = [*OWN, "--also-hash", "scale.txt"]
    assert main(named) == 0
    assert "scale.txt" in capsys.readouterr().out
    assert main([*named, "--dry-run"]) == 0
    assert "1 points (1 done, 0 to run)" in capsys.readouterr().out
    (reader / "scale.txt").write_text("2.0")
    assert main([*named, "--dry-run"]) == 0
    assert "1 points (0 done, 1 to run)" in capsys.readouterr().out
    (reader / "scale.txt").write_text("1.0")
    assert main([*named, "--dry-run"]) == 0
    assert "1 points (1 done, 0 to run)" in capsys.readouterr().out


def test_a_sweep_of_a_model_of_ones_own_says_what_makes_a_point_anew(reader, capsys):
    assert main([*OWN, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert f"the code in {reader / 'reads_scale.py'};" in told
    assert "of the files that this code reads: none (--also-hash FILE ...)" in told
    assert main([*SWEEP, "--dry-run"]) == 0
    assert "runs anew" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*OWN, "--also-hash", "gone.txt"], "names files; gone.txt cannot be read: No such file"),
        ([*OWN, "--also-hash", "."], "not a regular file but a folder; correct its name"),
        ([*SWEEP, "--also-hash", "scale.txt"], "a built-in one reads none; remove it, or --set m"),
    ],
)
def test_a_file_that_cannot_count_is_refused_in_a_sentence(reader, words, told, capsys):
    assert main([*words, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert told in said and "Traceback" not in said


def test_the_order_of_named_files_does_not_matter_and_their_names_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, other = Path("one"), Path("other")
    one.write_text("1")
    other.write_text("2")
    both = points.files_digest([one, other])
    assert points.files_digest([other, one]) == both
    one.write_text("2")
    other.write_text("1")
    assert points.files_digest([one, other]) != both
    assert points.files_digest([]) == ""
