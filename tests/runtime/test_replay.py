"""What a replay refuses: other tables, unseen draws, an order that leads elsewhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from persia_sim.base.trace import ALL, Kind, Trace
from persia_sim.base.vocabulary import Mode
from runtime.config import ModelConfig
from runtime.run.session import train
from tests.runtime.worlds import ArraySource, TwoTables, changed, config, run

SOURCE = ArraySource(300)


def replay_of(chosen, path):
    return changed(chosen, executor="replay", trace=path)


def test_replay_refuses_a_trace_of_tables_that_were_configured_in_python(tmp_path):
    source, chosen = TwoTables(100), config(mode=Mode.HYBRID, tau=1)
    wide = {"items": replace(chosen.rows, dim=6)}
    recorded = train(chosen, source, tables=wide)
    recorded.trace.save(tmp_path / "t.npz")
    again = train(replay_of(chosen, tmp_path / "t.npz"), source, tables=wide)
    assert again.losses == recorded.losses
    with pytest.raises(ValueError, match=r"rows\.items: trace .*dim=6.*, this run .*dim=4"):
        train(replay_of(chosen, tmp_path / "t.npz"), source)
    other = {"items": replace(wide["items"], optimizer=replace(chosen.rows.optimizer, lr=0.2))}
    with pytest.raises(ValueError, match=r"rows\.items: trace .*lr=0\.1.*, this run .*lr=0\.2"):
        train(replay_of(chosen, tmp_path / "t.npz"), source, tables=other)


class Functional(torch.nn.Module):
    """Dropout by a function: no module tells of it."""

    first_step = 0

    def __init__(self, shape, hidden):
        super().__init__()
        self.linear, self.forwards = torch.nn.Linear(shape.width, 2), 0

    def forward(self, dense, embeddings):
        inputs = torch.cat([embeddings.pooled, dense], 1)
        if self.training:
            self.forwards += 1
            if self.forwards > self.first_step:
                inputs = torch.nn.functional.dropout(inputs, 0.5)
        return self.linear(inputs)


class Late(Functional):
    """Draws from its fifth batch on."""

    first_step = 5


def named(model):
    return ModelConfig(name=f"tests.runtime.test_replay:{model}")


@pytest.mark.parametrize("executor", ["constant_lag", "concurrent"])
@pytest.mark.law6
def test_a_model_that_draws_by_functions_is_noticed_and_its_trace_refused(executor, tmp_path):
    chosen = config(model=named("Late"), ranks=2, executor=executor)
    outcome = train(chosen, SOURCE)
    assert any("draws_random_numbers = True" in w for w in outcome.warnings)
    outcome.trace.save(tmp_path / "t.npz")
    with pytest.raises(ValueError, match="cannot be replayed: model tests"):
        train(replay_of(chosen, tmp_path / "t.npz"), SOURCE)


CHOSEN = config(mode=Mode.HYBRID, tau=1, ranks=2, shards=2, merge_pushes=False)


@pytest.mark.parametrize(
    "kind", [Kind.LOOKUP, Kind.PUSH, Kind.DENSE_UPDATE], ids=lambda kind: kind.name
)
@pytest.mark.law6
def test_replay_names_the_first_event_that_finds_another_version(kind):
    events = list(run(CHOSEN, SOURCE).trace)
    seq = [k for k, e in enumerate(events) if e.kind == kind][5]
    changed = events[seq]._replace(version=events[seq].version + 7)
    where = "the dense weights" if kind is Kind.DENSE_UPDATE else f"shard {changed.shard}"
    words = (
        f"event {seq} of the order, {kind.name.lower()} of rank {changed.rank},"
        f" step {changed.step}, found {where} at version {events[seq].version},"
        f" but at {changed.version} when it was recorded"
    )
    with pytest.raises(ValueError, match=words):
        run(CHOSEN, SOURCE, order=[*events[:seq], changed, *events[seq + 1 :]])


@pytest.mark.parametrize("left_out", [[0], [0, 1]], ids=["of one rank", "of both"])
def test_replay_refuses_a_mean_of_weights_that_were_not_read(left_out):
    chosen = config(mode=Mode.ASYNC_AVERAGING, tau=1, ranks=2, average_every_steps=2)
    events = [
        event for event in run(chosen, SOURCE).trace
        if not (event.kind == Kind.AVERAGE_READ and event.version == 0 and event.rank in left_out)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="take in the mean of round 0 before the weights of every"):
        run(chosen, SOURCE, order=events)


def test_replay_refuses_a_batch_that_is_read_after_its_last_push():
    chosen = config(mode=Mode.LOOKAHEAD, ranks=2)
    events = [event._replace(version=ALL) for event in run(chosen, SOURCE).trace]
    last = next(event for event in events if event.kind == Kind.REFRESH and event.step == 3)
    with pytest.raises(ValueError, match="rank 0, step 3 behind its last push"):
        run(chosen, SOURCE, order=[*events, last])


def test_replay_of_an_order_without_some_pushes_names_the_first_step_that_lacks_one():
    left_out = {(1, 3), (0, 4), (0, 6)}
    events = [
        event._replace(version=ALL) for event in run(CHOSEN, SOURCE).trace
        if not (event.kind == Kind.PUSH and (event.rank, event.step) in left_out)
    ]  # fmt: skip
    told = "ends with 3 batches not pushed, first rank 1, step 3; it is cut short"
    with pytest.raises(ValueError, match=told):
        run(CHOSEN, SOURCE, order=events)


def test_replay_notices_a_lookup_that_was_moved_before_a_push():
    events = list(run(CHOSEN, SOURCE).trace)
    read = next(k for k, e in enumerate(events) if e.kind == Kind.LOOKUP and e.step == 5)
    write = max(
        k for k, e in enumerate(events[:read])
        if e.kind == Kind.PUSH and e.shard == events[read].shard
    )  # fmt: skip
    moved = [*events[:write], events[read], *events[write:read], *events[read + 1 :]]
    with pytest.raises(ValueError, match=f"event {write} of the order, lookup of rank 0, step 5"):
        run(CHOSEN, SOURCE, order=moved)


def test_replay_notices_a_push_to_a_shard_that_the_batch_does_not_touch():
    lone = config(steps=2)
    events = list(run(lone, SOURCE).trace)
    last = events[-1]
    assert last.kind == Kind.PUSH
    twice = [*events, last._replace(version=last.version + 1)]
    with pytest.raises(ValueError, match="at version none, but at 2 when it was recorded"):
        run(lone, SOURCE, order=twice)


def test_replay_refuses_a_trace_whose_last_steps_are_missing(tmp_path):
    """Every event that is left fits: only the number of updates tells."""
    chosen = config(ranks=2)
    whole = train(chosen, SOURCE).trace
    kept = whole.events[whole.events[:, 2] < 10]
    Trace(kept, whole.meta).save(tmp_path / "t.npz")
    with pytest.raises(ValueError, match="made by 13 dense updates and holds 10; it is cut short"):
        train(replay_of(chosen, tmp_path / "t.npz"), SOURCE)
    bare = {k: v for k, v in whole.meta.items() if k != "updates"}
    Trace(kept, bare).save(tmp_path / "t.npz")
    assert train(replay_of(chosen, tmp_path / "t.npz"), SOURCE).figures.updates == 10


def test_a_replay_takes_tau_from_its_trace_and_refuses_another(tmp_path):
    chosen = config(mode=Mode.HYBRID, tau=2)
    recorded = train(chosen, SOURCE)
    recorded.trace.save(tmp_path / "t.npz")
    free = config(mode=Mode.HYBRID, executor="replay", trace=tmp_path / "t.npz")
    again = train(free, SOURCE)
    assert again.losses == recorded.losses
    assert again.trace.meta["tau"] == 2
    other = config(mode=Mode.HYBRID, tau=1, executor="replay", trace=tmp_path / "t.npz")
    with pytest.raises(ValueError, match="was made with tau 2, not 1"):
        train(other, SOURCE)


@pytest.mark.parametrize("lost_at", [[1], [0, 1]])
def test_a_push_is_lost_where_no_server_has_applied_it(tmp_path, lost_at):
    """Whichever of them lost its part; a part alone is counted at its server."""
    chosen = config(mode=Mode.HYBRID, tau=1, ranks=2, merge_pushes=False, shards=2)
    trace = train(chosen, SOURCE).trace
    events = trace.events.copy()
    events[:, 4] = -1
    of_batch = (events[:, :3] == [Kind.PUSH, 0, 3]).all(1) & np.isin(events[:, 3], lost_at)
    events[of_batch, 0] = Kind.LOST_PUSH
    Trace(events, trace.meta).save(tmp_path / "t.npz")
    found = train(replay_of(chosen, tmp_path / "t.npz"), SOURCE).figures
    assert found.pushes_lost == (len(lost_at) == 2)
    assert found.pushes_lost_at == [int(shard in lost_at) for shard in (0, 1)]
