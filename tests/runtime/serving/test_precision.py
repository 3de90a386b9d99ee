"""A model computes in the precision in which it was trained and judged, opened or exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtime.config import ModelConfig
from runtime.inference import open_model
from tests.runtime.serving.test_inference import SOURCE, expected, exported, predicted
from tests.runtime.serving.trained_runs import checkpoint_of
from tests.runtime.worlds import changed, config, run

WEIGHTS = ModelConfig(name="tests.runtime.serving.trained_runs:Branches", hidden=(4,))
"""A network whose export is its weights alone, which this project then computes."""


@pytest.mark.first_case
@pytest.mark.parametrize("model", [ModelConfig(hidden=(8,)), WEIGHTS], ids=["program", "weights"])
@pytest.mark.parametrize("precision", ["bfloat16", "float64"])
def test_a_run_and_its_export_predict_in_the_precision_of_the_training(
    precision: str, model: ModelConfig, tmp_path: Path
) -> None:
    """In float32 the same weights predict otherwise, by more than what is allowed here."""
    chosen = {"dtype": "float64"} if precision == "float64" else {"precision": precision}
    world = run(config(steps=6, model=model, **chosen), SOURCE)
    checkpoint_of(world, tmp_path / "run")
    exported(tmp_path / "run", tmp_path / "out")
    judged = expected(world)
    within = 1e-12 if precision == "float64" else 1e-6
    for folder in ("run", "out"):
        found = predicted(open_model(tmp_path / folder))
        np.testing.assert_allclose(found, judged, rtol=0, atol=within)
    if precision != "float64":
        world.learner.config = changed(world.learner.config, precision="float32")
        assert np.abs(expected(world) - judged).max() > 20 * within
    else:
        assert np.abs(judged - judged.astype(np.float32)).max() > 20 * within
