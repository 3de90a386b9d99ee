"""The measures of late rows: a problem with known constants, frequencies, missed pushes, drift."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd
import pytest

from experiments.staleness.drift import measured
from experiments.staleness.frequency import (
    first_samples,
    frequencies,
    gap_lines,
    missed_lines,
    rarest,
    row_reads,
    sample_of_each_id,
)
from experiments.staleness.logistic import (
    RIDGE,
    Logistic,
    exponents,
    largest_stable_step,
    looked_at,
    made,
    train,
)
from persia_sim.base.trace import ALL, Event, Kind, Trace
from persia_sim.base.vocabulary import Mode
from runtime.config import DataConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.data.batch import Batch
from runtime.data.open import open_source
from runtime.embedding.batch_rows import STALENESS_BINS
from runtime.order.executor import OrderedRun, constant_lag_order
from runtime.rank.feed import training_stream
from runtime.rank.parts import assemble
from runtime.run.folder import Predictions
from runtime.run.session import train as train_run
from tests.persia_sim.oracles import constant_lag_trace


@pytest.fixture(scope="module")
def problem() -> Logistic:
    return made((7, 3), 1.0, 60)


def drawn_weights(problem: Logistic, seeds: int, number: int) -> np.ndarray:
    return np.random.default_rng(number).normal(size=problem.start(seeds).shape)


def one_gradient(problem: Logistic, sample: int, weights: np.ndarray, seed: int) -> np.ndarray:
    """Of one sample's loss, written out: rows, then dense weights."""
    rows, dense = np.split(weights[seed], [problem.rows])
    own, x = problem.ids[sample], problem.dense[sample]
    error = 1 / (1 + np.exp(-(rows[own].sum() + x @ dense))) - problem.labels[sample]
    found = np.zeros(problem.rows)
    for row in own:
        found[row] += error + RIDGE * rows[row]
    return np.concatenate([found, error * x + RIDGE * dense])


def test_gradient_and_variance_are_those_of_the_samples_one_by_one(problem):
    weights = drawn_weights(problem, 2, 0)
    whole, variance = problem.gradient(weights), problem.variance(weights)
    for seed in range(2):
        each = np.array([one_gradient(problem, n, weights, seed) for n in range(60)])
        mean = each.mean(axis=0)
        assert whole[seed] == pytest.approx(mean, abs=1e-12)
        assert variance[seed] == pytest.approx(np.square(each - mean).sum(1).mean())
        assert problem.square_norm(whole)[seed] == pytest.approx(mean @ mean)
    drawn = np.array([[3, 3, 5], [0, 1, 2]])
    part = problem.gradient(weights, drawn)
    for seed in range(2):
        mean = np.mean([one_gradient(problem, n, weights, seed) for n in drawn[seed]], axis=0)
        assert part[seed] == pytest.approx(mean)


def test_the_gradient_is_the_slope_of_the_loss(problem):
    at, along = drawn_weights(problem, 1, 1), drawn_weights(problem, 1, 2)
    told = (problem.gradient(at) * along).sum()
    ahead, behind = (problem.loss(at + h * along)[0] for h in (1e-5, -1e-5))
    assert told == pytest.approx((ahead - behind) / 2e-5, rel=1e-6)


def test_no_sample_has_a_steeper_gradient_than_its_smoothness(problem):
    one, two = drawn_weights(problem, 1, 3), drawn_weights(problem, 1, 4)
    for scale in (1e-3, 1.0):
        two = one + scale * two
        for n in range(60):
            apart = one_gradient(problem, n, one, 0) - one_gradient(problem, n, two, 0)
            rows, dense = np.split((one - two)[0], [problem.rows])
            moved = np.concatenate([rows[problem.ids[n]], dense])
            limit = problem.smoothness * np.linalg.norm(moved)
            assert np.linalg.norm(apart) <= limit * (1 + 1e-9)


def test_no_point_has_a_lower_loss_than_the_least(problem):
    least = problem.least_loss()
    told = problem.problem()
    assert told.gap == pytest.approx(np.log(2) - least)
    assert (problem.loss(drawn_weights(problem, 20, 5)) > least).all()
    assert (problem.loss(drawn_weights(problem, 20, 6) * 1e-3) > least).all()


@pytest.mark.parametrize("dense_late", [False, True])
@pytest.mark.parametrize("tau", [0, 1, 3])
def test_late_weights_are_those_of_so_many_updates_ago(problem, tau, dense_late):
    """The same, with every past weight kept, one sample at a time."""
    updates, batch, step = 12, 2, 0.4
    found = train(
        problem, seeds=2, updates=updates, batch=batch, step=step, tau=tau, dense_late=dense_late
    )
    for seed in range(2):
        draw = np.random.default_rng([seed, batch])
        past = [np.zeros(problem.rows + problem.dense.shape[1])]
        norms = []
        for t in range(updates):
            old, now = past[max(0, t - tau)], past[t]
            read = np.concatenate(
                [old[: problem.rows], (old if dense_late else now)[problem.rows :]]
            )
            norms.append(float(problem.square_norm(problem.gradient(now[None]))[0]))
            samples = draw.integers(0, 60, batch)
            each = [one_gradient(problem, n, read[None], 0) for n in samples]
            past.append(now - step * np.mean(each, axis=0))
        assert found.loss[seed] == pytest.approx(problem.loss(past[-1][None])[0])
        assert looked_at(updates).tolist() == list(range(updates))
        mean = (sum(norms) - (norms[0] + norms[-1]) / 2) / (updates - 1)
        assert found.square_norm[seed] == pytest.approx(mean)


# Frequencies.


def bag_batch(bags: list[list[list[int]]]) -> Batch:
    """Samples of bags of ids."""
    flat = [bag for sample in bags for bag in sample]
    offsets = np.concatenate([[0], np.cumsum([len(bag) for bag in flat])])
    ids = np.array([i for bag in flat for i in bag], np.uint64)
    return Batch(ids, offsets, np.zeros((len(bags), 0)), np.zeros((len(bags), 1)))


def test_an_id_counts_once_a_sample():
    known = frequencies(bag_batch([[[1, 1, 2], [7]], [[2], []], [[2], [7]]]))
    assert known.to_dict() == {1: 1, 2: 3, 7: 2}


def test_the_rarest_id_of_a_sample():
    known = frequencies(bag_batch([[[1], [5]], [[1], [6]], [[1], [6]], [[2], [6]]]))
    tested = bag_batch([[[1, 6], [5, 2]], [[9], []], [[], []], [[6], [1]], [[1, 5], [9]]])
    assert rarest(known, tested).tolist() == [1, 0, 0, 3, 0]


def test_batches_of_one_id_a_field_and_of_bags_agree():
    one = first_samples(open_source("synthetic:taobao-ad:0.001"), "train", 200)
    fields = len(one.ids) // one.size
    bags = Batch(one.ids, np.arange(len(one.ids) + 1), one.dense, one.labels)
    assert one.size == 200 and one.offsets is None
    assert sample_of_each_id(one).tolist() == np.repeat(np.arange(200), fields).tolist()
    assert sample_of_each_id(bags).tolist() == sample_of_each_id(one).tolist()
    known = frequencies(one)
    assert Counter(one.ids.tolist()) == known.to_dict() == frequencies(bags).to_dict()


# Missed pushes.


def id_batch(*ids: int) -> Batch:
    """A batch of samples of one field."""
    return Batch(np.array(ids, np.uint64), None, np.zeros((len(ids), 0)), np.zeros((len(ids), 1)))


def test_missed_pushes_by_hand():
    """tau 2: step 2 misses 0 and 1; row 5 is in both, row 6 in one."""
    batches = [id_batch(5, 6), id_batch(5, 5), id_batch(5, 6), id_batch(7)]
    order = constant_lag_trace(Mode.HYBRID, ranks=1, steps=4, tau=2)
    found, histogram = row_reads(order, batches, 3)
    assert found.index.tolist() == [5, 6, 7]
    assert found.occurrences.tolist() == [4, 2, 1] and found.reads.tolist() == [3, 2, 1]
    assert found.missed.tolist() == [0 + 1 + 2, 0 + 1, 0]
    assert histogram.tolist() == [3, 2, 1]
    with pytest.raises(ValueError, match="several ranks"):
        row_reads([Event(Kind.LOOKUP, 1, 0, ALL)], batches, 3)


@pytest.mark.parametrize("gone", [Kind.PUSH, Kind.LOST_PUSH])
def test_a_push_that_is_lost_is_missed_by_those_before_it_alone(gone):
    """Behind it nobody waits for it any more: step 2 misses step 1, and not step 0."""
    batches = [id_batch(5), id_batch(5), id_batch(5)]
    kinds = [(Kind.LOOKUP, 0), (Kind.LOOKUP, 1), (gone, 0), (Kind.LOOKUP, 2), (gone, 1), (gone, 2)]
    found, histogram = row_reads([Event(kind, 0, step, ALL) for kind, step in kinds], batches, 4)
    assert (found.reads.tolist(), found.missed.tolist()) == ([3], [0 + 1 + 1])
    assert histogram.tolist() == [1, 2, 0, 0]


def test_the_model_of_missed_pushes_by_hand():
    """A read's own sample is no push that it missed; bins are means over reads, not over rows."""
    columns = {"occurrences": [1, 2, 3, 9], "reads": [1, 2, 1, 4], "missed": [0, 1, 2, 6]}
    known = {"tau": 3, "samples": 17, "batch": 2, "missed_steps": 2.5}
    rare, common = missed_lines(pd.DataFrame(columns, [4, 5, 6, 7]), **known)
    model = [2.5 * (1 - (1 - others / 16) ** 2) for others in (0, 1, 2, 8)]
    assert (rare["rows"], rare["reads"], rare["missed_pushes"]) == (3, 4, 3 / 4)
    expected = (1 * model[0] + 2 * model[1] + 1 * model[2]) / 4
    assert rare["missed_pushes_model"] == pytest.approx(expected)
    assert (common["count_from"], common["missed_pushes"]) == (4, 6 / 4)
    assert common["missed_pushes_model"] == pytest.approx(model[3])


def test_the_gap_of_a_bin_takes_each_row_as_often_as_it_counts(monkeypatch):
    """By rows of one user each that stand there once, twice or three times."""
    monkeypatch.setattr("experiments.staleness.frequency.LEAST_OF_EACH_LABEL", 5)
    draw, n = np.random.default_rng(3), 90
    labels, often = draw.integers(0, 2, n), 1 + np.arange(n) % 3
    counts = draw.choice([0, 2, 5], n)
    scores = {key: draw.random(n) for key in ((m, s) for m in ("sync", "hybrid") for s in (0, 1))}
    read = [{}, {}]
    for (mode, seed), own in scores.items():
        setting = mode, 3 if mode == "hybrid" else 0
        tasks = [np.column_stack([array, array[::-1]]) for array in (labels, own)]
        users = np.arange(n) // 2
        read[0][setting, seed] = Predictions(*tasks, users, often.astype(float))
        repeated = (np.repeat(array, often, axis=0) for array in (*tasks, users))
        read[1][setting, seed] = Predictions(*repeated)
    found = [
        list(gap_lines(own, (3,), 2, "rarest", by))
        for own, by in zip(read, (counts, np.repeat(counts, often)), strict=True)
    ]
    assert [line["count_from"] for line in found[0]] == [0, 1, 4]
    for weighed, repeated in zip(*found, strict=True):
        for name in ("auc_sync", "gap_to_sync", "gap_to_sync_half_width_95", "log_loss_gap",
                     "log_loss_gap_half_width_95"):  # fmt: skip
            assert weighed[name] == pytest.approx(repeated[name], rel=1e-9), name


def small(tau: int, **other: object) -> TrainConfig:
    return TrainConfig(
        sync=SyncConfig(mode=Mode.HYBRID, tau=tau, **other),
        batch=8,
        steps=30,
        data=DataConfig(name="synthetic:taobao-ad:0.001"),
        model=ModelConfig(hidden=(4,)),
    )


def test_the_order_says_of_rows_what_the_store_has_counted():
    config = small(5)
    source = open_source(config.data.name)
    outcome = train_run(config, source)
    order: Trace = outcome.trace
    _, histogram = row_reads(order, list(training_stream(config, source)), STALENESS_BINS)
    assert histogram.tolist() == outcome.store.row_staleness.tolist()
    assert histogram[1:6].all() and not histogram[6:].any()


# Drift.


@pytest.mark.first_case
@pytest.mark.parametrize(("tau", "updates"), [(0, 0), (3, 0), (0, 3), (2, 5)])
def test_drift_is_the_way_of_the_rows_between_two_pushes(tau, updates):
    """What a lookup missed; in a run that misses nothing, what so many more updates change."""
    config = small(tau)
    source = open_source(config.data.name)
    samples = first_samples(source, "test", 50)
    parts = assemble(config, source)
    after_push = [parts.store.peek(samples)]
    chances = []

    def watched():
        for event in constant_lag_order(config, parts.feed):
            yield event
            if event.kind == Kind.PUSH:
                after_push.append(parts.store.peek(samples))

    OrderedRun(parts).run(watched())
    for found in measured(config, (2, 10, 24), samples, (updates,)):
        fresh, late = after_push[found["step"] + updates], after_push[max(0, found["step"] - tau)]
        total = size = 0.0
        for occurrence in fresh.plans["rows"].inverse:
            new, old = fresh.values["rows"][occurrence], late.values["rows"][occurrence]
            total += float(np.square(new - old, dtype=float).sum()) / 50
            size += float(np.square(new, dtype=float).sum()) / 50
        assert found["drift"] == pytest.approx(total, rel=1e-5)
        assert found["relative"] == pytest.approx(total / size, rel=1e-5)
        assert (found["drift"] > 0) is (found["predictions"] > 0) is (tau + updates > 0)
        chances.append(found["step"])
    assert chances == [2, 10, 24]


def test_several_latenesses_are_measured_on_one_run():
    config = small(0)
    samples = first_samples(open_source(config.data.name), "test", 50)
    together = measured(config, (4, 20, 28), samples, (1, 6))
    alone = [d for n in (1, 6) for d in measured(config, (4, 20, 28), samples, (n,))]
    assert sorted(together, key=lambda d: (d["updates"], d["step"])) == alone
    assert [d["step"] for d in alone] == [4, 20, 28, 4, 20], (
        "from 28 on there are no 6 updates more"
    )


def test_looking_on_changes_no_byte():
    config = small(3, ranks=2)
    source = open_source(config.data.name)
    samples = first_samples(source, "test", 20)
    plain = train_run(config, source).store.export()["rows"]
    import experiments.staleness.drift as module

    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "assemble", lambda *a: kept.append(assemble(*a)) or kept[0])
        assert len(measured(config, (4, 8), samples)) == 2
    looked = kept[0].store.export()["rows"]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(plain, looked, strict=True))


def test_the_largest_stable_step_is_near_that_of_a_row_alone():
    """(2 / h) sin(pi / (4 tau + 2)) with the curvature h = alpha / 4 of an undecided sample."""
    for tau in (0, 4):
        problem = made((40, 40), 0.0, 400, popular=0.5)
        alone = 16.0 * np.sin(np.pi / (4 * tau + 2))
        assert 0.7 < largest_stable_step(problem, tau) / alone < 2.0


def test_exponents_are_those_that_made_the_steps():
    alphas, taus = (grid.ravel() for grid in np.meshgrid([0.01, 0.1, 0.9], [4.0, 16.0, 64.0]))
    found = exponents(np.log(3.0 * alphas**-0.5 * taus**-1.25), alphas, taus)
    assert found == pytest.approx((0.5, 1.25))


def test_turning_one_share_leaves_all_others_rare():
    shares = made((40, 40), 0.0, 400, popular=0.5).shares
    assert shares[40] == 0.5 and np.delete(shares, 40).max() <= 0.03
