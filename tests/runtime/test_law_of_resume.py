"""Law 11: a run that stops and goes on ends with the bytes of one that was not disturbed."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia_sim.base.vocabulary import DEFAULT_TAU, Mode
from runtime.checkpoint.places import complete_checkpoints
from runtime.checkpoint.whole import read_checkpoint
from runtime.config import DataConfig, TrainConfig
from runtime.dense import averaging
from runtime.embedding.config import Admission, Capacity, RowOptimizer
from runtime.rank.learner import Learner
from runtime.run.saver import Saving
from runtime.run.session import Outcome, train
from runtime.stop import Ending, Interrupted
from tests.runtime.worlds import TUNED, ArraySource, assert_same_bytes, changed, config, on_engine

SOURCE = ArraySource(300)  # 12 steps of 24 samples and one of 12


def run(
    settings: TrainConfig, folder: Path, start: Path | None = None, source: ArraySource = SOURCE
) -> Outcome:
    """Train with checkpoints in the folder; from the checkpoint ``start`` if given."""
    return train(settings, source, saving=Saving(folder, read_checkpoint(start) if start else None))


def every(steps: Any, **changes: Any) -> TrainConfig:
    return config(checkpoint_every=steps, keep_checkpoints=100, **changes)


def assert_same_run(one: Outcome, other: Outcome) -> None:
    """The same bytes, and the same counts of everything that has no clock."""
    assert_same_bytes(one, other)
    assert one.losses == other.losses
    assert one.final.predictions.tobytes() == other.final.predictions.tobytes()
    assert one.staleness == other.staleness
    assert (one.store.row_staleness == other.store.row_staleness).all()
    clocks = ("wall_s", "samples_per_s", "longest_pause_s", "resumed_at_samples", "resident_bytes")
    kept = [{k: v for k, v in asdict(o.figures).items() if k not in clocks} for o in (one, other)]
    assert kept[0] == kept[1]


ADAM = RowOptimizer(kind="adam", lr=0.05)
LAGGING = {
    "sync": {},
    "lookahead": {"mode": Mode.LOOKAHEAD, "ahead": 3},
    "raw_hybrid": {"mode": Mode.RAW_HYBRID, "tau": 2},
    "hybrid": {"mode": Mode.HYBRID, "tau": 2},
    "on arrival": {"mode": Mode.HYBRID, "tau": 2, "merge_pushes": False},
    "async": {"mode": Mode.ASYNC, "tau": 1},
    "async, shares": {"mode": Mode.ASYNC, "tau": 1, "match": "global"},
    "averaging": {"mode": Mode.ASYNC_AVERAGING, "tau": 1, "average_every_steps": 2},
    "averaging, shares": {"mode": Mode.ASYNC_AVERAGING, "average_every_steps": 3,
                          "match": "global"},
}  # fmt: skip


@pytest.mark.parametrize("name", LAGGING)
@pytest.mark.law11
def test_resumed_from_any_checkpoint_a_run_ends_with_the_same_bytes(name, tmp_path):
    tuned = replace(TUNED, dropout=0.2)
    chosen = every(3, ranks=3, shards=2, optimizer=ADAM, model=tuned, **LAGGING[name])
    whole = run(chosen, tmp_path / "whole")
    cuts = complete_checkpoints(tmp_path / "whole")
    assert [int(cut.name) for cut in cuts] == [72, 144, 216, 288, 300]
    for cut in (cuts[0], cuts[2]):
        resumed = run(chosen, tmp_path / cut.name, cut)
        assert_same_run(whole, resumed)
        assert (whole.trace.events == resumed.trace.events).all()
        assert resumed.figures.resumed_at_samples == [int(cut.name)]


CONCURRENT = {
    "sync": {},
    "lookahead": {"mode": Mode.LOOKAHEAD, "ahead": 3},
    "forwarded": {"mode": Mode.LOOKAHEAD, "ahead": 3, "lookahead": "forwarded"},
}


@pytest.mark.parametrize("name", CONCURRENT)
@pytest.mark.law11
def test_threads_of_exact_modes_go_on_to_the_same_bytes(name, tmp_path):
    chosen = every(4, ranks=3, shards=2, optimizer=ADAM, executor="concurrent", **CONCURRENT[name])
    whole = run(chosen, tmp_path / "whole")
    (cut, *_) = complete_checkpoints(tmp_path / "whole")
    resumed = run(chosen, tmp_path / "resumed", cut)
    assert_same_bytes(whole, resumed)
    assert whole.losses == resumed.losses
    # Their order, and the versions that prefetches see, are the threads' own.
    told = [sorted(o.trace.events[:, :4].tolist()) for o in (whole, resumed)]
    assert told[0] == told[1]


ALONE = (Mode.ASYNC, Mode.ASYNC_AVERAGING)
"""Modes without a common step, where a batch may be a rank's share of one."""
SHARES = {"match": "global"}
RECORDED = [(m, e, {}) for m in Mode if m.reads_late_rows for e in ("constant_lag", "threads")]
RECORDED += [(Mode.HYBRID, "processes", {})]
RECORDED += [(m, e, SHARES) for m in ALONE for e in ("constant_lag", "threads")]


@pytest.mark.first_case
@pytest.mark.parametrize(("mode", "engine", "shares"), RECORDED)
@pytest.mark.law11
def test_a_run_recorded_over_legs_and_a_resume_replays_to_its_bytes(
    mode, engine, shares, tmp_path, monkeypatch
):
    monkeypatch.setattr(averaging, "PERIOD_S", 0.002)
    period = {"average_every_steps": 2} if engine == "constant_lag" else {}
    averages = (period if mode.averages_replicas else {}) | shares
    chosen = every(4, ranks=3, mode=mode, tau=2, **averages, **on_engine(engine, 2))
    run(chosen, tmp_path / "whole")
    (_, cut, *_) = complete_checkpoints(tmp_path / "whole")
    resumed = run(chosen, tmp_path / "resumed", cut)
    resumed.trace.save(tmp_path / "trace.npz")
    again = config(ranks=3, shards=2, mode=mode, executor="replay", trace=tmp_path / "trace.npz",
                   tau=DEFAULT_TAU, **shares)  # fmt: skip
    assert_same_bytes(resumed, train(again, SOURCE))


FORGETFUL = {
    "lru": {"capacity": Capacity(rows=40)},
    "eviction and expiry": {"capacity": Capacity(rows=60, expire_after_steps=3)},
    "expiry at once": {"capacity": Capacity(rows=60, expire_after_steps=1)},
    "expiry alone": {"capacity": Capacity(expire_after_steps=2)},
    "probability": {"admission": Admission(probability=0.4)},
}


@pytest.mark.first_case
@pytest.mark.parametrize("mode", [Mode.LOOKAHEAD, Mode.ASYNC])
@pytest.mark.parametrize("name", FORGETFUL)
@pytest.mark.law11
def test_rows_that_are_evicted_expire_or_are_refused_do_so_alike(name, mode, tmp_path):
    chosen = every(3, ranks=2, shards=2, mode=mode)
    chosen = replace(chosen, rows=replace(chosen.rows, **FORGETFUL[name]))
    whole = run(chosen, tmp_path / "whole")
    (_, cut, *_) = complete_checkpoints(tmp_path / "whole")
    assert_same_run(whole, run(chosen, tmp_path / "resumed", cut))


@pytest.mark.parametrize(("mode", "shares"), [(Mode.SYNC, {}), (Mode.ASYNC, {}),
                                              (Mode.ASYNC, SHARES)])  # fmt: skip
def test_passes_and_their_shuffles_go_on(mode, shares, tmp_path):
    data = DataConfig(epochs=3, shuffle=True, rows=130)
    chosen = every(5, ranks=2, mode=mode, data=data, **shares)
    whole = run(chosen, tmp_path / "whole")
    cuts = complete_checkpoints(tmp_path / "whole")
    # A pass is five steps of 24 and one of 10; three of them are 18 steps.
    assert [int(cut.name) for cut in cuts] == [120, 226, 332, 390]
    for cut in cuts[:-1]:
        assert_same_run(whole, run(chosen, tmp_path / cut.name, cut))


OTHERS = {
    "fewer shards": {"shards": 1},
    "more shards": {"shards": 5},
    "threads": {"executor": "concurrent"},
    "lookahead forwarded": {"executor": "concurrent", "lookahead": "forwarded"},
    "all at once": {"executor": "concurrent", "shards": 3},
}


EXACT = [(name, mode) for name in OTHERS for mode in (Mode.SYNC, Mode.LOOKAHEAD)]


@pytest.mark.first_case
@pytest.mark.parametrize(("name", "mode"), [e for e in EXACT if e[0] != "lookahead forwarded"]
                         + [("lookahead forwarded", Mode.LOOKAHEAD)])  # fmt: skip
@pytest.mark.law11
@pytest.mark.law18
def test_on_other_shards_and_executors_it_ends_with_the_same_bytes(name, mode, tmp_path):
    chosen = every(4, ranks=2, shards=2, mode=mode, optimizer=RowOptimizer(kind="adam", lr=0.05))
    whole = run(chosen, tmp_path / "whole")
    (cut, *_) = complete_checkpoints(tmp_path / "whole")
    other = changed(chosen, **OTHERS[name])
    resumed = run(other, tmp_path / "resumed", cut)
    assert_same_bytes(resumed, whole)
    assert resumed.losses == whole.losses
    assert resumed.store.row_staleness.sum() == whole.store.row_staleness.sum()
    back = run(chosen, tmp_path / "back", complete_checkpoints(tmp_path / "resumed")[0])
    assert_same_bytes(back, whole)
    if other.engine.shards == 2:
        assert resumed.figures.trace_since_samples == 0
    else:
        assert resumed.figures.trace_since_samples == int(cut.name)
        assert resumed.trace.events[:, 2].min() == 4  # steps
        assert "shards: before 2, now" in resumed.trace.meta["not_replayable"]
        assert "not_replayable" in back.trace.meta


@pytest.mark.law11
@pytest.mark.law18
def test_on_other_ranks_sync_ends_as_law_3_says(tmp_path):
    """Two ranks, then four: the same sums in another order."""
    source = ArraySource(480)
    chosen = every(5, ranks=2, dtype="float64", optimizer=replace(ADAM, lr=0.01))
    whole = run(chosen, tmp_path / "whole", source=source)
    (cut, *_) = complete_checkpoints(tmp_path / "whole")
    resumed = run(changed(chosen, ranks=4), tmp_path / "resumed", cut, source)
    worst = 0.0
    for name, arrays in whole.store.export().items():
        for one, other in zip(arrays, resumed.store.export()[name], strict=True):
            worst = max(worst, float(np.abs(one.astype(float) - other.astype(float)).max()))
    for name, weights in whole.model.state_dict().items():
        worst = max(worst, float((weights - resumed.model.state_dict()[name]).abs().max()))
    assert 0 < worst < 1e-10
    assert resumed.figures.updates == whole.figures.updates == 20


SHARING = [
    {"mode": Mode.SYNC},
    {"mode": Mode.LOOKAHEAD},
    {"mode": Mode.HYBRID},
    {"mode": Mode.ASYNC},
    {"mode": Mode.ASYNC, "match": "global"},
    {"mode": Mode.ASYNC_AVERAGING, "match": "global"},
]


@pytest.mark.parametrize("own", SHARING, ids=lambda own: "-".join(own.values()))
@pytest.mark.law9
@pytest.mark.law11
@pytest.mark.law18
def test_each_sample_is_trained_once_whatever_number_of_ranks_goes_on(own, tmp_path, monkeypatch):
    """Law 9 over an interruption at any instant: it ends the leg, wherever the ranks are."""
    source = ArraySource(300)
    source._all.dense[:, 0] = np.arange(300)
    seen: list[int] = []
    ending = Ending()
    compute = Learner.gradients

    def spied(self, model, where, staged, *args):
        if staged is not None:
            seen.extend(np.asarray(staged.dense[:, 0]).astype(int).tolist())
        if len(seen) > 40:  # soon: a rank that gets no core lets others run ahead
            ending.ask("a test")
        return compute(self, model, where, staged, *args)

    monkeypatch.setattr(Learner, "gradients", spied)
    few = {}
    if own["mode"].reads_late_rows:
        few = {"queue_batches": 1}  # else all data is under way before the test asks
    chosen = config(executor="concurrent", ranks=3, batch=9, **own, **few)
    with pytest.raises(Interrupted, match="interrupted by a test after"):
        train(chosen, source, saving=Saving(tmp_path, None, ending))
    (cut,) = complete_checkpoints(tmp_path)
    assert 40 < len(seen) < 300
    assert sorted(seen) == list(range(int(cut.name)))
    resumed = run(changed(chosen, ranks=2), tmp_path / "on", cut, source)
    assert sorted(seen) == list(range(300))
    assert resumed.figures.samples == 300


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.HYBRID])
def test_ranks_computed_as_one_batch_go_on_to_the_same_bytes(mode, tmp_path):
    chosen = every(4, ranks=3, mode=mode, fuse_ranks=True)
    whole = run(chosen, tmp_path / "whole")
    (cut, *_) = complete_checkpoints(tmp_path / "whole")
    resumed = run(chosen, tmp_path / "resumed", cut)
    assert whole.figures.ranks_fused
    assert_same_run(whole, resumed)
    assert "not_replayable" not in resumed.trace.meta
    apart = run(changed(chosen, fuse_ranks=False), tmp_path / "apart", cut)
    assert "ranks_fused: before True, now None" in apart.trace.meta["not_replayable"]


SERVERS = {
    "sync": {"mode": Mode.SYNC},
    "forwarded": {"mode": Mode.LOOKAHEAD, "ahead": 3, "lookahead": "forwarded"},
}


@pytest.mark.long
@pytest.mark.multiproc
@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.law11
def test_rows_in_server_processes_go_on_to_the_same_bytes(name, tmp_path):
    """And from shards of this process to servers, in another number, and back."""
    chosen = every(4, ranks=2, executor="concurrent", optimizer=ADAM, **SERVERS[name])
    two, three = changed(chosen, servers=2), changed(chosen, servers=3)
    whole = run(two, tmp_path / "whole")
    assert_same_bytes(whole, run(changed(chosen, shards=2), tmp_path / "here"))
    (cut, other, *_) = complete_checkpoints(tmp_path / "whole")
    resumed = run(two, tmp_path / "resumed", cut)
    assert_same_bytes(resumed, whole)
    told = [sorted(o.trace.events[:, :4].tolist()) for o in (whole, resumed)]
    assert told[0] == told[1]
    assert_same_bytes(run(three, tmp_path / "three", other), whole)
    back = complete_checkpoints(tmp_path / "three")[0]
    assert_same_bytes(run(chosen, tmp_path / "back", back), whole)


@pytest.mark.parametrize("name", LAGGING)
def test_staleness_that_is_counted_on_the_way_goes_on(name, tmp_path):
    chosen = every(7, ranks=3, trace_order=False, **LAGGING[name])
    whole = run(chosen, tmp_path / "whole")
    (cut, *_) = complete_checkpoints(tmp_path / "whole")
    resumed = run(chosen, tmp_path / "resumed", cut)
    assert_same_run(whole, resumed)
    kept = run(changed(chosen, trace_order=True), tmp_path / "kept")
    assert kept.staleness == whole.staleness
