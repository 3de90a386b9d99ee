"""A whole run over server processes: its curve, figures and files are those of threads."""

from __future__ import annotations

import numpy as np
import pytest

from persia_sim.words.trace import Trace
from persia_sim.words.vocabulary import Mode
from runtime.commands import main
from runtime.engines.processes import segments
from runtime.run.session import train
from tests.runtime.worlds import ArraySource, config, on_engine

SOURCE = ArraySource(600)


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.LOOKAHEAD])
def test_curve_and_figures_of_an_exact_mode_are_those_of_threads(mode):
    """Snapshots on the way hold the servers; the last evaluation finds every push applied."""
    here, there = (
        train(config(mode=mode, ranks=2, evaluate_every_steps=7, **on_engine(engine, 2)), SOURCE)
        for engine in ("threads", "processes")
    )
    assert len(there.curve) == len(here.curve) == 3
    for one, other in zip(here.curve, there.curve, strict=True):
        assert np.array_equal(one.evaluation.predictions, other.evaluation.predictions)
    assert np.array_equal(here.final.predictions, there.final.predictions)
    assert here.losses == there.losses
    assert here.staleness == there.staleness
    assert here.store.row_staleness.tolist() == there.store.row_staleness.tolist()
    same = ("samples", "updates", "rows", "resident_bytes", "pushes_lost")
    for name in same:
        assert getattr(here.figures, name) == getattr(there.figures, name), name
    if mode is Mode.SYNC:  # what a prefetch finds depends on the instant
        assert sorted(here.trace.events.tolist()) == sorted(there.trace.events.tolist())


WORDS = [
    "--data.name", "synthetic", "--data.rows", "3000", "--steps", "8", "--batch", "64",
    "--test-rows", "500", "--mode", "hybrid", "--ranks", "2",
]  # fmt: skip


def test_the_run_folder_of_servers_replays_in_one_process(tmp_path, capsys):
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    over = ["--executor", "concurrent", "--servers", "2", "--out", str(recorded)]
    assert main(["train", *WORDS, *over]) == 0
    trace = recorded / "trace.npz"
    again = ["--executor", "replay", "--trace", str(trace), "--shards", "2"]
    assert main(["train", *WORDS, *again, "--out", str(replayed)]) == 0
    assert Trace.load(trace).meta["shards"] == 2
    found = [np.load(f / "predictions.npz")["predictions"] for f in (recorded, replayed)]
    assert np.array_equal(*found)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--servers", "2"], "servers is not used by mode hybrid with executor lag"),
        (["--servers", "65", "--executor", "concurrent"], "servers must be <= 64, got 65"),
        (
            ["--servers", "2", "--shards", "2", "--executor", "concurrent"],
            "shards 2 is not used with servers 2, which are processes of one shard each",
        ),
    ],
)
def test_options_that_do_not_fit_servers_are_refused(options, sentence, capsys, tmp_path):
    assert main(["train", *WORDS, *options, "--out", str(tmp_path / "x")]) == 2
    assert sentence in capsys.readouterr().err


def test_a_run_without_room_for_its_segments_ends_in_a_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(segments, "room_bytes", lambda: 1000)
    over = ["--executor", "concurrent", "--servers", "1", "--out", str(tmp_path / "x")]
    assert main(["train", *WORDS, *over]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(
        "error: no room for a segment of 0.1 MB of shared memory (0 MB are free)"
    )
    assert told.endswith("lower --batch, --tau or --queue-batches, or run with --servers 0")
