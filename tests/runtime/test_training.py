"""What a run does beside the laws: non-finite values, scaling, evaluation, errors, interruption."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from persia_sim.words.vocabulary import Mode
from runtime.config import ModelConfig
from runtime.dense import rules
from runtime.dense.averaging import AveragingRound
from runtime.dense.rules import LossScale
from runtime.embedding.config import RowOptimizer
from runtime.engines.threads import ConcurrentRun
from runtime.order.executor import OrderedRun
from runtime.order.lag import lag_order
from runtime.rank import learner
from runtime.rank.learner import NonFiniteError
from runtime.rank.parts import assemble
from runtime.run.choose import fastest
from runtime.run.session import train
from tests.runtime.worlds import ArraySource, assert_same_bytes, changed, config, run

SOURCE = ArraySource(300)
TEST = next(iter(SOURCE.chunks("test")))


class Poisoned(torch.nn.Module):
    """Returns NaN whenever a sample's first dense feature is above 2."""

    def __init__(self, shape, hidden):
        super().__init__()
        self.linear = torch.nn.Linear(shape.width, shape.tasks)

    def forward(self, dense, embeddings):
        logits = self.linear(torch.cat([embeddings.pooled, dense], 1))
        return torch.where(dense[:, :1] > 2, torch.nan, logits)


POISONED = ModelConfig(name="tests.runtime.test_training:Poisoned")


@pytest.mark.parametrize("executor", ["lag", "concurrent"])
def test_non_finite_gradients_stop_the_run_and_say_where(executor):
    with pytest.raises(NonFiniteError, match=r"rank \d, step \d+.*--nonfinite skip"):
        run(config(model=POISONED, executor=executor, ranks=2), SOURCE)


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.HYBRID, Mode.ASYNC])
def test_skipped_batches_are_left_out_of_rows_and_weights_alike(mode):
    kinds = {"tau": 1} if mode.reads_late_rows else {}
    chosen = config(mode=mode, model=POISONED, nonfinite="skip", ranks=2, **kinds)
    world = run(chosen, SOURCE)
    assert 0 < world.meter.batches_skipped < 26
    assert all(np.isfinite(array).all() for array in world.state().values())
    threads = run(config(mode=mode, model=POISONED, nonfinite="skip", ranks=2,
                         executor="concurrent", **kinds), SOURCE)  # fmt: skip
    assert threads.meter.batches_skipped == world.meter.batches_skipped


def test_a_loss_scale_that_is_a_power_of_two_changes_no_byte(monkeypatch):
    class Scaled(LossScale):
        def of(self, step):
            return 1024.0

    plain = run(config(), SOURCE)
    monkeypatch.setattr(learner, "LossScale", Scaled)
    assert_same_bytes(plain, run(config(), SOURCE))


def test_short_precision_trains_and_stays_near_float32():
    full = run(config(), SOURCE)
    short = run(config(precision="bfloat16"), SOURCE)
    assert short.meter.losses[-1] == pytest.approx(full.meter.losses[-1], abs=0.05)


def test_row_gradients_sum_is_ranks_times_mean_for_sgd():
    sgd = RowOptimizer(kind="sgd", lr=0.1)
    one_step = {"optimizer": sgd, "steps": 1, "ranks": 4}
    mean, total = run(config(**one_step), SOURCE), run(config(row_gradients="sum", **one_step),
                                                       SOURCE)  # fmt: skip
    start = run(config(**one_step), SOURCE, order=[]).store
    batch = next(iter(SOURCE.chunks("train"))).rows(0, 24)
    fresh = start.peek(batch).values["rows"]
    moved = mean.store.peek(batch).values["rows"] - fresh
    moved_by_sum = total.store.peek(batch).values["rows"] - fresh
    assert np.allclose(moved_by_sum, 4 * moved, atol=1e-6)


def test_evaluation_creates_no_row_and_sees_initial_values():
    world = run(config(steps=1), SOURCE)
    unseen = ArraySource(50, seed=9, ids_per_field=10**6)
    batch = next(iter(unseen.chunks("test")))
    before = len(world.store)
    world.learner.predict(world.learner.model, batch, world.worker.peek(batch))
    assert len(world.store) == before
    other = run(config(steps=2), SOURCE)
    assert (world.store.peek(batch).values["rows"] == other.store.peek(batch).values["rows"]).all()


def test_a_model_that_returns_the_wrong_shape_is_named():
    wrong = ModelConfig(name="tests.runtime.test_training:OneLogit")
    with pytest.raises(ValueError, match=r"shape \(24, 1\), expected \(24, 2\)"):
        run(config(model=wrong), SOURCE)


class OneLogit(torch.nn.Module):
    """Forgets the second task."""

    def __init__(self, shape, hidden):
        super().__init__()
        self.linear = torch.nn.Linear(shape.width, 1)

    def forward(self, dense, embeddings):
        return self.linear(torch.cat([embeddings.pooled, dense], 1))


@pytest.mark.parametrize("name", ["ffnn", "dlrm", "deepfm", "dcn"])
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.HYBRID])
def test_every_model_learns_in_sync_and_hybrid(name, mode):
    source = ArraySource(1500)
    source._all.labels[:] = (source._all.dense[:, :1] + 0.3 > 0) * 1.0
    bound = {"tau": 2} if mode is Mode.HYBRID else {}
    model = ModelConfig(name=name, hidden=(16,), lr=0.01)
    losses = run(config(mode=mode, model=model, **bound), source).meter.losses
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:5])


def test_an_error_in_one_thread_ends_all_and_is_told():
    def explode(rank: int, step: int) -> bool:
        if (rank, step) == (1, 4):
            raise OSError("disk on fire")
        return False

    chosen = config(mode=Mode.HYBRID, tau=2, ranks=4, executor="concurrent")
    with pytest.raises(OSError, match="disk on fire"):
        run(chosen, SOURCE, lose_push=explode)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tau": 3}, "tau is not used by mode sync"),
        ({"mode": Mode.HYBRID, "ahead": 2}, "ahead is not used by mode hybrid"),
        ({"mode": Mode.ASYNC, "merge_pushes": False}, "merge_pushes is not used by mode async"),
        ({"mode": Mode.HYBRID, "match": "global"}, "match is not used by mode hybrid"),
        ({"executor": "replay"}, "add --trace FILE"),
        ({"ranks": 0}, "ranks must be >= 1, got 0"),
        ({"mode": Mode.HYBRID, "tau": -1}, "tau must be >= 0, got -1"),
        ({"mode": Mode.HYBRID, "tau": None}, "give tau a number"),
        ({"latency_s": 0.1}, "belongs to the concurrent executor"),
        ({"loss_scale": 8.0}, "loss_scale is not used"),
    ],
)
def test_an_option_that_nothing_would_read_is_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_a_mode_may_be_given_by_its_name():
    assert config(mode="hybrid").sync.mode is Mode.HYBRID
    with pytest.raises(ValueError, match="mode must be one of sync, lookahead"):
        config(mode="hybird")


def test_float16_halves_its_scale_on_overflow_and_goes_on():
    world = run(config(precision="float16", loss_scale=2.0**27), SOURCE)
    assert world.meter.batches_skipped > 0
    assert world.learner.scale.value < 2.0**27
    assert all(np.isfinite(array).all() for array in world.state().values())
    assert world.meter.losses[-1] == pytest.approx(run(config(), SOURCE).meter.losses[-1], abs=0.1)


def scales_by_step(monkeypatch, **changes) -> tuple[dict[int, set[float]], object]:
    """The loss scale that each batch of a float16 run was given, by step."""
    given: dict[int, set[float]] = {}

    class Watched(LossScale):
        def of(self, step):
            found = super().of(step)
            given.setdefault(step, set()).add(found)
            return found

    monkeypatch.setattr(learner, "LossScale", Watched)
    world = run(config(precision="float16", loss_scale=2.0**27, **changes), SOURCE)
    return given, world


@pytest.mark.parametrize("executor", ["lag", "concurrent"])
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.HYBRID])
def test_all_ranks_of_a_step_share_one_loss_scale_and_halve_it_once(monkeypatch, mode, executor):
    given, world = scales_by_step(monkeypatch, ranks=8, mode=mode, executor=executor)
    assert all(len(scales) == 1 for scales in given.values())
    in_turn = [given[step].pop() for step in sorted(given)]
    in_turn.append(world.learner.scale.value)
    falls = [before / after for before, after in itertools.pairwise(in_turn)]
    assert set(falls) == {1.0, 2.0}
    lone, _ = scales_by_step(monkeypatch, ranks=1, mode=mode, executor=executor)
    # An eighth of the sum overflows a little earlier or later than all of it: a halving, not six.
    assert in_turn[-1] / min(lone[max(lone)]) in (0.5, 1.0, 2.0)
    assert world.meter.batches_skipped > falls.count(2.0)


def test_in_async_every_batch_is_an_update_of_the_loss_scale():
    world = run(config(precision="float16", loss_scale=2.0**27, mode=Mode.ASYNC, ranks=4), SOURCE)
    assert world.meter.batches_skipped > 0
    assert world.learner.scale.value == 2.0 ** (27 - world.meter.batches_skipped)


def test_a_calm_loss_scale_is_doubled_up_to_where_it_began(monkeypatch):
    monkeypatch.setattr(rules, "_GROWTH_UPDATES", 3)
    scale = LossScale(config(precision="float16", loss_scale=64.0, ranks=2))
    seen = []
    for step in range(12):
        seen.append(scale.of(step))
        for rank in range(2):
            if step in (1, 2) or (step == 5 and rank == 1):
                assert scale.note_overflow(step)
            else:
                scale.note_finite(step)
    #                 0   1   2   3   4   5   6  7  8  9 10  11: doubled after three calm steps
    assert seen == [64, 64, 32, 16, 16, 16, 8, 8, 8, 16, 16, 16]
    assert scale.value == 32


def test_a_loss_scale_of_one_is_not_to_blame_for_an_overflow():
    assert not LossScale(config(precision="float16", loss_scale=1.0)).note_overflow(0)
    assert not LossScale(config()).note_overflow(0)


def test_a_timeline_has_every_stage_of_every_step():
    from persia_sim.words.chrome import chrome_events
    from runtime.rank.spans import SpanRecorder

    spans = SpanRecorder(enabled=True)
    run(config(mode=Mode.HYBRID, tau=1, ranks=2, executor="concurrent"), SOURCE, spans=spans)
    found = {(s.rank, s.stage, s.step) for s in spans.spans if s.step < 13}
    stages = ("load", "lookup", "forward", "backward", "dense_sync", "push")
    assert found == {(r, stage, s) for r in range(2) for stage in stages for s in range(13)}
    events = chrome_events(spans.spans)
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")


def test_a_profile_law_is_the_line_through_its_points():
    from runtime.run.profile import Measurement, fit

    law = fit([Measurement(n, 1e-5 + 2e-8 * n) for n in (10, 100, 1000)])
    assert law["fixed_s"] == pytest.approx(1e-5, rel=1e-6)
    assert law["per_item_s"] == pytest.approx(2e-8, rel=1e-6)
    assert law["spread"] == pytest.approx(0, abs=1e-9)
    assert law["fitted_items"] == [10, 1000]


def test_auto_chooses_the_fastest_and_says_what_hybrid_would_gain():
    chosen = config(mode=Mode.HYBRID, tau=2, executor="concurrent", ranks=2)
    choice = fastest(chosen, ArraySource(800))
    assert choice.config.sync.mode is max(choice.samples_per_s, key=choice.samples_per_s.get)
    assert choice.config.sync.window == (2 if choice.config.sync.mode is Mode.HYBRID else 0)
    assert "of the best exact schedule: training in" in choice.describe()


class Dropping(torch.nn.Module):
    """A tower with dropout."""

    def __init__(self, shape, hidden):
        super().__init__()
        linear = torch.nn.Linear(shape.width, 16)
        self.tower = torch.nn.Sequential(linear, torch.nn.Dropout(0.5), torch.nn.Linear(16, 2))

    def forward(self, dense, embeddings):
        return self.tower(torch.cat([embeddings.pooled, dense], 1))


def test_dropout_is_a_function_of_seed_rank_and_step():
    chosen = config(model=ModelConfig(name="tests.runtime.test_training:Dropping"), ranks=3)
    torch.manual_seed(1)
    one = run(chosen, SOURCE)
    torch.manual_seed(2)
    assert_same_bytes(one, run(chosen, SOURCE))
    assert_same_bytes(one, run(changed(chosen, executor="concurrent"), SOURCE))
    assert one.meter.losses != run(replace(chosen, seed=1), SOURCE).meter.losses


def test_every_seed_rank_and_step_has_draws_of_its_own():
    def draw(seed, rank, step):
        with rules.seeded_draws(seed, rank, step):
            return tuple(torch.rand(4).tolist())

    torch.manual_seed(9)
    state = torch.random.get_rng_state()
    places = list(itertools.product(range(3), range(3), range(3)))
    draws = [draw(*place) for place in places]
    assert len(set(draws)) == len(places)
    assert draws == [draw(*place) for place in places]
    assert torch.equal(torch.random.get_rng_state(), state), "the user's own draws were disturbed"


class Normed(torch.nn.Module):
    """A tower with batch norm."""

    def __init__(self, shape, hidden):
        super().__init__()
        self.tower = torch.nn.Sequential(
            torch.nn.BatchNorm1d(shape.width), torch.nn.Linear(shape.width, 2)
        )

    def forward(self, dense, embeddings):
        return self.tower(torch.cat([embeddings.pooled, dense], 1))


def test_running_statistics_are_refused_where_ranks_would_not_share_them():
    normed = ModelConfig(name="tests.runtime.test_training:Normed")
    assert run(config(model=normed), SOURCE).meter.updates == 13
    for changes in ({"ranks": 2}, {"mode": Mode.ASYNC}):
        with pytest.raises(ValueError, match=r"running statistics \(tower.0.running_mean"):
            run(config(model=normed, **changes), SOURCE)


def test_a_frozen_parameter_stays_and_the_others_learn():
    frozen = ModelConfig(name="tests.runtime.test_training:Frozen")
    for executor in ("lag", "concurrent"):
        world = run(
            config(mode=Mode.HYBRID, tau=0, ranks=3, model=frozen, executor=executor), SOURCE
        )
        assert (world.state()["fixed.weight"] == 1).all()
        assert not (world.state()["free.weight"] == 1).all()


class Frozen(torch.nn.Module):
    """Two layers of ones, the first of which is fixed."""

    def __init__(self, shape, hidden):
        super().__init__()
        self.fixed, self.free = torch.nn.Linear(shape.width, 4), torch.nn.Linear(4, 2)
        for layer in (self.fixed, self.free):
            torch.nn.init.ones_(layer.weight)
        self.fixed.requires_grad_(False)

    def forward(self, dense, embeddings):
        return self.free(self.fixed(torch.cat([embeddings.pooled, dense], 1)))


def test_a_round_of_averaging_moves_every_replica_by_mean_minus_what_it_put_in():
    models = [torch.nn.Linear(1, 1, bias=False) for _ in range(3)]
    for model, weight in zip(models, (1.0, 2.0, 6.0), strict=True):
        torch.nn.init.constant_(model.weight, weight)
    round_ = AveragingRound(3)
    for rank, model in enumerate(models):
        assert not round_.is_complete
        round_.read(rank, model)
    torch.nn.init.constant_(models[0].weight, 1.5)  # rank 0 has learned meanwhile
    for rank, model in enumerate(models):
        round_.write(rank, model)
    assert [m.weight.item() for m in models] == [3.5, 3.0, 3.0]
    assert round_.is_over


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.HYBRID, Mode.ASYNC, Mode.ASYNC_AVERAGING])
def test_a_snapshot_in_the_middle_of_threads_sees_rows_and_weights_that_stand_still(mode):
    chosen = config(mode=mode, ranks=3, executor="concurrent",
                    **({"tau": 3} if mode.reads_late_rows else {}))  # fmt: skip
    parts = assemble(chosen, ArraySource(600))
    batch = next(iter(SOURCE.chunks("test")))
    changed = []

    def look_twice(updates: int, samples: int, model: torch.nn.Module) -> None:
        first = parts.learner.predict(model, batch, parts.worker.peek(batch))
        time.sleep(0.03)
        second = parts.learner.predict(model, batch, parts.worker.peek(batch))
        changed.append(not np.array_equal(first, second))

    parts.meter.start(every=5, evaluate=look_twice)
    ConcurrentRun(parts).run()
    assert len(changed) >= 5
    assert not any(changed)


def test_snapshots_of_threads_in_sync_are_those_of_the_lag_executor():
    scores = []
    for executor in ("lag", "concurrent"):
        parts = assemble(config(ranks=2, executor=executor), SOURCE)
        seen: list[float] = []
        parts.meter.start(
            every=4, evaluate=lambda u, s, m, p=parts, out=seen: out.append(
                float(p.learner.predict(m, TEST, p.worker.peek(TEST)).sum())
            )
        )  # fmt: skip
        if executor == "concurrent":
            ConcurrentRun(parts).run()
        else:
            OrderedRun(parts).run(lag_order(parts.config, parts.feed))
        scores.append(seen)
    assert scores[0] == scores[1]
    assert len(scores[0]) == 3


def test_global_batches_train_on_as_many_samples_for_the_same_steps():
    worlds = [run(config(mode=Mode.ASYNC, ranks=4, steps=10, match=m), SOURCE)
              for m in ("update", "global")]  # fmt: skip
    assert [w.meter.samples for w in worlds] == [240, 240]
    assert [w.meter.updates for w in worlds] == [10, 40]


def test_a_schema_with_two_tables_of_different_width_trains():
    class TwoTables(ArraySource):
        @property
        def layout(self):
            first, second, third = super().layout.fields
            return replace(super().layout, fields=(first, replace(second, table="items"), third))

    wide = replace(config().rows, dim=6)
    outcome = train(config(mode=Mode.HYBRID, tau=1), TwoTables(300), tables={"items": wide})
    widths = {name: values.shape[1] for name, (_, values, _) in outcome.store.export().items()}
    assert widths == {"rows": 4, "items": 6}
    with pytest.raises(ValueError, match=r"tables \['users'\] are used by no field"):
        train(config(), TwoTables(300), tables={"users": wide})
