"""What reaches the network beside pooled vectors: sequences, a second table, weights of samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from persia_sim.base.vocabulary import Mode
from runtime.config import ModelConfig
from runtime.executors.threads import ConcurrentRun
from runtime.inference import open_model
from runtime.rank import learner as learner_module
from runtime.rank.components import assemble
from runtime.rank.learner import NonFiniteError
from runtime.rank.staging import StreamStaging
from runtime.run.evaluate import evaluate
from runtime.serving import trained
from tests.runtime.serving.test_inference import exported
from tests.runtime.serving.trained_runs import checkpoint_of
from tests.runtime.test_nonfinite import Spoil
from tests.runtime.test_staging import LateStreams, WithSequence
from tests.runtime.worlds import ArraySource, TwoTables, config, run


class SpoilsASequence(torch.nn.Module):
    """In its third batch the gradient of one place of the sequence is infinite, and no other."""

    def __init__(self, shape, hidden):
        super().__init__()
        self.layer, self.batches = torch.nn.Linear(shape.width, shape.tasks), 0

    def forward(self, dense, embeddings):
        tags = embeddings.sequences["tags"]
        self.batches += self.training
        addition = torch.zeros_like(tags)
        if self.training and self.batches == 3:
            addition[5, 1, 2] = torch.inf
        spoilt = Spoil.apply(tags, addition)
        flat = torch.cat([dense, embeddings.pooled, spoilt.mean(1)], 1)
        return self.layer(flat)


SPOILT = ModelConfig(name=f"{__name__}:SpoilsASequence")


def test_a_gradient_of_a_sequence_alone_that_is_not_finite_is_noticed(monkeypatch):
    def stage(device, dtype):
        return StreamStaging(dtype, LateStreams())

    monkeypatch.setattr(learner_module, "open_staging", stage)
    with pytest.raises(NonFiniteError, match="at rank 0, step 2"):
        run(config(model=SPOILT), WithSequence(200))
    world = run(config(model=SPOILT, nonfinite="skip"), WithSequence(200))
    assert world.meter.batches_skipped == 1
    assert all(np.isfinite(array).all() for array in world.state().values())


def test_a_longer_run_needs_no_more_pinned_buffers(monkeypatch):
    """Also of losses, which come beside the gradients and are read some steps later."""
    needed = []
    for steps in (4, 12):
        streams = LateStreams()
        monkeypatch.setattr(
            learner_module,
            "open_staging",
            lambda device, dtype, own=streams: StreamStaging(dtype, own),
        )
        run(config(steps=steps), WithSequence(300))
        needed.append(streams.pinned_buffers)
    assert needed[0] == needed[1] > 0


def test_a_model_of_two_tables_reads_each_with_its_own_width_and_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened and exported, whose files are written in pieces here: as evaluation has it."""
    monkeypatch.setattr(trained, "_ROWS_AT_ONCE", 7)
    source = TwoTables(200, seed=1)
    chosen = replace(config(shards=2), tables={"items": {"dim": 6}})
    world = run(chosen, source)
    tables = world.store.tables
    assert (tables["rows"].dim, tables["items"].dim) == (4, 6)
    checkpoint_of(world, tmp_path / "run")
    exported(tmp_path / "run", tmp_path / "out")
    batches = list(source.chunks("test"))
    judged = evaluate(world.learner, world.model, world.worker, batches).predictions
    for folder in ("run", "out"):
        model = open_model(tmp_path / folder)
        found = np.concatenate([model.predict(batch) for batch in batches])
        np.testing.assert_allclose(found, judged, rtol=0, atol=1e-6)
        for name, (ids, values, _) in world.store.export().items():
            order = np.argsort(ids)
            assert np.array_equal(model.tables[name].ids, ids[order]) and len(ids) > 14
            assert np.array_equal(model.tables[name].values, values[order])


def test_a_run_again_over_the_same_rows_counts_its_waits_and_stages_anew():
    source = ArraySource(96)
    components = assemble(config(mode=Mode.HYBRID, ranks=2, executor="concurrent"), source)
    components.meter.start()
    ConcurrentRun(components).run()
    components.store.waited_s[0, 0] = 5.0
    assert components.spans.seconds
    again = components.again(source)
    assert again.spans.seconds == {} and again.store.waited_s == {}
    assert (again.meter.samples, components.meter.samples) == (0, 96)
    components.store.close()
