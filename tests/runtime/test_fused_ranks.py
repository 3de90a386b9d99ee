"""Law 14: the ranks of a step computed as one batch, where they read the same rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from persia_sim.base.staleness import summary_of
from persia_sim.base.trace import Trace
from persia_sim.base.vocabulary import Mode
from runtime.config import ModelConfig, TrainConfig
from runtime.embedding.config import Admission, Capacity, RowOptimizer, TableConfig
from runtime.models.networks import FeedForward
from runtime.rank.components import assemble, why_one_by_one
from runtime.run.session import train
from tests.runtime.worlds import ArraySource, assert_same_bytes, changed, config, difference, run

MODES = {
    "sync": {},
    "lookahead": {"mode": Mode.LOOKAHEAD, "ahead": 3},
    "raw_hybrid": {"mode": Mode.RAW_HYBRID, "tau": 2},
    "hybrid": {"mode": Mode.HYBRID, "tau": 5},
}
EACH = [("hybrid", kind) for kind in ("adagrad", "rowwise_adagrad", "adam", "sgd")]
EACH += [(mode, "adagrad") for mode in MODES if mode != "hybrid"]


def pair(source: ArraySource, **changes):
    """The same run with the ranks one by one, and as one batch."""
    one_by_one = config(ranks=4, shards=2, fuse_ranks=False, **changes)
    return run(one_by_one, source), run(changed(one_by_one, fuse_ranks=True), source)


@pytest.mark.first_case
@pytest.mark.parametrize(("mode", "kind"), EACH)
@pytest.mark.law14
def test_float64_is_the_same_within_1e_10_after_100_steps(mode, kind):
    source = ArraySource(24 * 100 - 7)  # the last step is short, and uneven among the ranks
    optimizer = RowOptimizer(kind=kind, lr=0.05)
    apart, fused = pair(source, dtype="float64", optimizer=optimizer, **MODES[mode])
    assert fused.meter.updates == 100
    largest, _ = difference(apart, fused)
    assert 0 < largest < 1e-10  # 0: nothing was fused


@pytest.mark.parametrize(("mode", "dense"), [one for one in EACH if one[1] != "rowwise_adagrad"])
@pytest.mark.law14
def test_float32_is_the_same_within_1e_6_in_norm_after_10_steps(mode, dense):
    model = ModelConfig(hidden=(8,), optimizer=dense, lr=0.01)
    apart, fused = pair(ArraySource(240), model=model, **MODES[mode])
    _, relative = difference(apart, fused)
    assert 0 < relative < 1e-6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.law14
def test_order_and_trace_are_those_of_the_ranks(mode):
    apart, fused = pair(ArraySource(24 * 20 - 7), **MODES[mode])
    assert (apart.trace.events == fused.trace.events).all()
    assert {e.rank for e in fused.trace} == {-1, 0, 1, 2, 3}
    assert summary_of(apart.trace) == summary_of(fused.trace)
    assert apart.meter.samples == fused.meter.samples
    assert fused.meter.losses == pytest.approx(apart.meter.losses, rel=1e-5)


@pytest.mark.parametrize("mode", ["hybrid", "raw_hybrid"])
def test_fused_ranks_at_tau_0_have_the_bytes_of_fused_sync_and_of_lookahead(mode):
    """Laws 1 and 2 hold among fused runs, too."""
    source = ArraySource(480)
    chosen = config(ranks=4, fuse_ranks=True)
    sync = run(chosen, source)
    assert_same_bytes(sync, run(changed(chosen, mode=Mode(mode), tau=0), source))
    assert_same_bytes(sync, run(changed(chosen, mode=Mode.LOOKAHEAD, ahead=3), source))


def test_a_fused_run_has_the_bytes_of_one_rank():
    """A batch is a batch: four fused ranks, and one rank."""
    source = ArraySource(480)
    fused = run(config(ranks=4, fuse_ranks=True, **MODES["hybrid"]), source)
    assert_same_bytes(fused, run(config(ranks=1, **MODES["hybrid"]), source))


def test_a_fused_run_replays_to_its_bytes(tmp_path):
    source = ArraySource(480)
    chosen = config(ranks=4, fuse_ranks=True, **MODES["hybrid"])
    first = train(chosen, source)
    assert first.figures.ranks_fused is True
    first.trace.save(tmp_path / "trace.npz")
    assert Trace.load(tmp_path / "trace.npz").meta["ranks_fused"] is True
    again = train(changed(chosen, executor="replay", trace=tmp_path / "trace.npz"), source)
    assert again.figures.ranks_fused is True
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name])
    for mine, theirs in zip(
        first.store.export()["rows"], again.store.export()["rows"], strict=True
    ):
        assert mine.tobytes() == theirs.tobytes()


def test_a_replay_of_ranks_one_by_one_computes_them_one_by_one(tmp_path):
    source = ArraySource(480)
    chosen = config(ranks=4, fuse_ranks=False, **MODES["hybrid"])
    first = train(chosen, source)
    first.trace.save(tmp_path / "trace.npz")
    replaying = changed(chosen, executor="replay", trace=tmp_path / "trace.npz", fuse_ranks=True)
    again = train(replaying, source)
    assert again.figures.ranks_fused is False
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name])


class Drawing(FeedForward):
    """Says that it draws."""

    draws_random_numbers = True


class Independent(FeedForward):
    """Says that it computes each sample by itself."""

    samples_are_independent = True


HERE = __name__
REASONS = {
    "asked": ({"fuse_ranks": False}, "asked for"),
    "one rank": ({"ranks": 1}, "one rank"),
    "threads": ({"executor": "concurrent"}, "executor constant_lag"),
    "async": ({"mode": Mode.ASYNC, "tau": 2}, "mode async"),
    "on arrival": ({"mode": Mode.HYBRID, "merge_pushes": False}, "on arrival"),
    "skip": ({"nonfinite": "skip"}, "nonfinite skip"),
    "short floats": ({"precision": "bfloat16"}, "precision bfloat16"),
    "draws": ({"model": ModelConfig(name=f"{HERE}:Drawing", hidden=(8,))}, "random numbers"),
    "own": ({"model": ModelConfig(name=f"{HERE}:FeedForward", hidden=(8,))}, "samples_are_indep"),
    "evicts": (
        {"rows": TableConfig(dim=4, capacity=Capacity(rows=1000))},
        "order of its lookups",
    ),
    "admits": (
        {"rows": TableConfig(dim=4, admission=Admission(probability=0.5))},
        "order of its lookups",
    ),
}


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.law14
def test_ranks_are_computed_one_by_one_where_more_than_sums_would_change(name):
    changes, words = REASONS[name]
    chosen = config(**{"ranks": 4, "fuse_ranks": True, **changes})
    components = assemble(chosen, ArraySource(48))
    tables = components.store.tables.values()
    assert words in why_one_by_one(chosen, components.learner.model, tables)
    assert not components.fused


def test_a_model_that_says_so_is_fused():
    model = ModelConfig(name=f"{HERE}:Independent", hidden=(8,))
    assert assemble(config(ranks=4, fuse_ranks=True, model=model), ArraySource(48)).fused


def test_ranks_are_fused_unless_asked_otherwise():
    assert TrainConfig().engine.fuse_ranks
    quiet = replace(config(ranks=4), engine=replace(config().engine, fuse_ranks=True))
    assert assemble(quiet, ArraySource(48)).fused
