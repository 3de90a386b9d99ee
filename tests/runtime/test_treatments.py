"""What is done about lateness: synchronous start, dense lag, delay compensation, rate by staleness.

Expected values come from plain training in float64 (`tests/runtime/plain.py`), from the rules
themselves, or from another executor.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_sim.base.staleness import staleness_in_steps
from persia_sim.base.vocabulary import Mode
from runtime.checkpoint.places import complete_checkpoints
from runtime.checkpoint.whole import find_checkpoint, read_checkpoint
from runtime.config import ModelConfig
from runtime.embedding.config import RowOptimizer
from runtime.serving.trained import open_trained
from tests.runtime import test_law_of_resume as resume
from tests.runtime import test_nonfinite as nonfinite
from tests.runtime.embedding.test_half import by_hand
from tests.runtime.plain import assert_equal_to, plain_training
from tests.runtime.worlds import (
    ENGINES,
    ArraySource,
    TwoTables,
    assert_same_bytes,
    changed,
    config,
    difference,
    on_engine,
    run,
)

SOURCE = ArraySource(300)  # 12 steps of 24 samples and one of 12
ROWS = RowOptimizer(kind="adagrad", lr=0.1, initial_accumulator=0.01)
UNMARKED = ArraySource(300)
UNMARKED._all.dense[:, 1] = 0  # plain training has one dense feature
LATE = {"mode": Mode.HYBRID, "tau": 3}
ALL_OF_THEM = {
    "sync_steps": 4, "dense_lag": 2, "delay_compensation": 1e5, "lr_by_staleness": True,
}  # fmt: skip


def exactly(optimizer="adam", **changes):
    """In float64, as plain training has it."""
    lr = {"adam": 0.01, "sgd": 0.3}[optimizer]
    model = ModelConfig(hidden=(6, 4), optimizer=optimizer, lr=lr)
    return config(model=model, optimizer=ROWS, dtype="float64", **changes)


def plain(ranks, **lags):
    """`exactly`'s steps without the testbed."""
    return plain_training(exactly(), UNMARKED, size=24, ranks=ranks, **lags)


# A synchronous start


@pytest.mark.parametrize("engine", ["constant_lag", "threads", "processes"])
@pytest.mark.law1
def test_a_synchronous_start_that_never_ends_is_sync_in_bytes(engine):
    late = {"mode": Mode.HYBRID, "tau": 3, "sync_steps": 13, **on_engine(engine, 2)}
    assert_same_bytes(run(config(ranks=3, shards=2), SOURCE), run(config(ranks=3, **late), SOURCE))


@settings(max_examples=10)
@given(
    tau=st.integers(0, 6), start=st.integers(0, 14), ranks=st.integers(1, 3), merge=st.booleans()
)
@pytest.mark.law5
def test_behind_a_synchronous_start_the_constant_lag_rises_as_behind_any_start(
    tau, start, ranks, merge
):
    """A lookup of step s misses 0 steps for s < N, and min(s - N, tau) from step N on."""
    chosen = config(mode=Mode.HYBRID, tau=tau, sync_steps=start, ranks=ranks, merge_pushes=merge)
    stale = staleness_in_steps(run(chosen, SOURCE).trace)
    expected = np.where(stale.step < start, 0, np.minimum(stale.step - start, tau))
    assert (stale.missing_steps == expected).all()
    assert (stale.oldest_missing_steps == expected).all()
    assert len(stale.step) == 13 * ranks


@pytest.mark.parametrize(("engine", "tau"), [("threads", 2), ("threads", None), ("processes", 2)])
@pytest.mark.law5
def test_threads_miss_nothing_before_the_start_is_over(engine, tau):
    late = {"mode": Mode.HYBRID, "tau": tau, "sync_steps": 6, **on_engine(engine, 2)}
    stale = staleness_in_steps(run(config(ranks=3, **late), SOURCE).trace)
    assert stale.oldest_missing_steps[stale.step < 6].max() == 0
    if tau is not None:
        assert stale.oldest_missing_steps.max() <= tau


# A dense lag


@pytest.mark.parametrize(
    "late", [{}, {"executor": "concurrent"}, LATE], ids=["sync", "threads", "hybrid"]
)
def test_a_step_computes_on_the_weights_after_update_s_1_lag(late):
    chosen = exactly("adam", ranks=3, dense_lag=3, **late)
    expected = plain_training(
        exactly("adam"), UNMARKED, size=24, ranks=3, dense_lag=3, row_lag=late.get("tau", 0)
    )
    assert_equal_to(expected, run(chosen, UNMARKED))


def test_a_step_that_is_left_out_leaves_its_place_empty():
    """The ranks and steps that are poisoned throw nothing else away, one lag later."""
    source = nonfinite.poisoned(nonfinite.POISONS["dense nan"])
    world = run(nonfinite.chosen(dense_lag=2, executor="concurrent"), source)
    steps = {"size": nonfinite.BATCH, "ranks": nonfinite.RANKS, "left_out": nonfinite.LEFT_OUT}
    assert_equal_to(plain_training(nonfinite.chosen(), source, dense_lag=2, **steps), world)


@pytest.mark.parametrize("name", ["hybrid", "threads"])
@pytest.mark.law11
def test_gradients_that_wait_are_part_of_a_checkpoint(name, tmp_path):
    late = {"sync": {}, "hybrid": {"mode": Mode.HYBRID, "tau": 2, "sync_steps": 4},
            "threads": {"executor": "concurrent"}}[name]  # fmt: skip
    chosen = resume.every(3, ranks=3, dense_lag=2, **late)
    whole = resume.run(chosen, tmp_path / "whole")
    cuts = complete_checkpoints(tmp_path / "whole")
    assert [len(read_checkpoint(cut).dense()["pending"]) for cut in cuts] == [2] * 5
    resumed = resume.run(chosen, tmp_path / "resumed", cuts[0])
    resume.assert_same_run(whole, resumed) if name != "threads" else None
    assert_same_bytes(whole, resumed)
    undisturbed = resume.run(replace(chosen, steps=9), tmp_path / "short")
    further = resume.run(chosen, tmp_path / "further", complete_checkpoints(tmp_path / "short")[-1])
    assert_same_bytes(whole, further)
    with pytest.raises(AssertionError):
        assert_same_bytes(undisturbed, whole)


def test_a_model_read_from_a_checkpoint_has_taken_what_waited(tmp_path):
    chosen = resume.every("end", dense_lag=3)
    outcome = resume.run(chosen, tmp_path / "run")
    opened = open_trained(find_checkpoint(tmp_path / "run"))
    for name, tensor in outcome.model.state_dict().items():
        assert tensor.equal(opened.learner.model.state_dict()[name])


# Delay compensation and the rate by staleness


@pytest.mark.first_case
@pytest.mark.parametrize(
    "late",
    [
        {"mode": Mode.HYBRID, "tau": 3, "ranks": 1},
        {"mode": Mode.HYBRID, "tau": 3, "ranks": 3},
        {"mode": Mode.HYBRID, "tau": 2, "ranks": 3, "merge_pushes": False},
        {"mode": Mode.HYBRID, "tau": 0, "ranks": 3, "merge_pushes": False},
    ],
    ids=["one rank", "merged", "on arrival", "on arrival, tau 0"],
)
@pytest.mark.parametrize("by", [(1e6, False), (0.0, True), (1e6, True)])
def test_rows_take_the_gradient_and_the_rate_of_the_rules(late, by):
    strength, by_staleness = by
    treated = {"delay_compensation": strength, "lr_by_staleness": by_staleness}
    world = run(exactly(**late, **treated, shards=2), UNMARKED)
    lags = {"row_lag": late["tau"], "merged": late.get("merge_pushes", True)}
    expected = plain(late["ranks"], **lags, compensation=strength, by_staleness=by_staleness)
    assert_equal_to(expected, world)
    if late["tau"] or strength:
        untreated = run(exactly(**late, shards=2), UNMARKED)
        assert difference(world, untreated)[1] > 1e-4, "the treatment shows"


def test_async_divides_by_whole_rounds_of_all_ranks():
    """A push of three ranks at tau 1 has missed 5 others, which is one round and 2 pushes."""
    source = ArraySource(12 * 24)
    source._all.dense[:, 1] = 0
    late = {"mode": Mode.ASYNC, "tau": 1, "ranks": 3}
    assert_same_bytes(
        run(exactly(**late), source), run(exactly(**late, lr_by_staleness=True), source)
    )
    halved = run(exactly(mode=Mode.ASYNC, tau=2, ranks=3, lr_by_staleness=True), source)
    assert difference(halved, run(exactly(mode=Mode.ASYNC, tau=2, ranks=3), source))[1] > 1e-4


@pytest.mark.parametrize("executor", ["constant_lag", "concurrent"])
@pytest.mark.law1
def test_where_nothing_is_late_nothing_is_changed(executor):
    """Merged pushes at tau 0: to the bit, also of rows whose gradients are zero."""
    late = {"mode": Mode.HYBRID, "tau": 0, "ranks": 3, "shards": 2, "executor": executor}
    treated = {"delay_compensation": 1e6, "lr_by_staleness": True}
    assert_same_bytes(
        run(config(ranks=3, shards=2), SOURCE), run(config(**late, **treated), SOURCE)
    )


# All of them together


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_run_of_threads_with_every_treatment_replays_to_its_bytes(engine):
    treated = {**ALL_OF_THEM, "delay_compensation": 1e5 if engine == "threads" else 0.0}
    late = {**LATE, "ranks": 3, "merge_pushes": True}
    recorded = run(config(**late, **treated, **on_engine(engine, 2)), SOURCE)
    replayed = run(config(**late, **treated, shards=2), SOURCE, order=recorded.trace)
    assert_same_bytes(recorded, replayed)


@pytest.mark.law14
def test_ranks_computed_as_one_batch_are_treated_as_ranks_one_by_one():
    """Law 14 with every treatment: nothing but the order of float sums is another."""
    apart = exactly(**LATE, **ALL_OF_THEM, ranks=4, shards=2)
    largest, _ = difference(run(apart, SOURCE), run(changed(apart, fuse_ranks=True), SOURCE))
    assert 0 < largest < 1e-10


# Rows that travel in half


HALF = {"wire": "half", "ranks": 2}


@pytest.mark.first_case
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "late",
    [
        {"mode": Mode.SYNC},
        {"mode": Mode.LOOKAHEAD, "ahead": 3},
        {"mode": Mode.HYBRID, "tau": 0},
        {"mode": Mode.RAW_HYBRID, "tau": 0},
    ],
    ids=lambda late: str(late["mode"]),
)
@pytest.mark.law1
@pytest.mark.law2
@pytest.mark.law12
def test_rows_that_travel_in_half_have_the_bytes_of_sync_in_every_engine(late, engine):
    source = TwoTables(300)
    sync = run(config(shards=2, **HALF), source)
    assert_same_bytes(sync, run(config(**HALF, **late, **on_engine(engine, 2)), source))
    assert difference(sync, run(config(ranks=2, shards=2), source))[1] > 1e-5, "nothing is rounded"


@pytest.mark.parametrize("engine", ["constant_lag", "network"])
@pytest.mark.law6
def test_late_rows_that_travel_in_half_replay_to_their_bytes(engine):
    late = {"mode": Mode.HYBRID, "tau": 3, "merge_pushes": False}
    found = run(config(**HALF, **late, **on_engine(engine, 2)), SOURCE)
    again = config(**HALF, **late, shards=2)
    assert_same_bytes(found, run(again, SOURCE, order=found.trace))


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.law4
def test_what_travels_in_half_is_what_plain_training_rounds(merged):
    plain = plain_training(
        exactly(), UNMARKED, size=24, ranks=3, row_lag=2, merged=merged,
        wire=lambda rows: np.array([by_hand(row) for row in rows.tolist()]),
    )  # fmt: skip
    late = {"mode": Mode.HYBRID, "tau": 2, "ranks": 3, "merge_pushes": merged}
    assert_equal_to(plain, run(exactly(wire="half", **late), UNMARKED))


@pytest.mark.parametrize("wire", ["full", "half"])
@pytest.mark.law9
def test_half_as_many_bytes_travel_and_a_scale_for_each_row(wire):
    late = {"mode": Mode.HYBRID, "tau": 2, "ranks": 2, "wire": wire}
    found = run(config(**late, **on_engine("network", 2)), SOURCE)
    rows = sum(
        len(np.unique(share.ids))
        for start in range(0, 300, 24)
        for share in in_two(SOURCE._all.rows(start, min(start + 24, 300)))
    )
    row_bytes = {"full": 4 * 4, "half": 2 + 2 * 4}[wire]
    travelled = found.store.statuses()
    assert sum(one["sent_bytes"] for one in travelled) == rows * row_bytes
    assert sum(one["received_bytes"] for one in travelled) == rows * (8 + row_bytes)


def in_two(batch):
    """The shares of two ranks."""
    return batch.rows(0, batch.size // 2), batch.rows(batch.size // 2, batch.size)
