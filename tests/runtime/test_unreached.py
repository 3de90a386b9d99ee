"""Options that a run was too short for are said, and those that it came to are not."""

from __future__ import annotations

import re
from typing import Any

import pytest

from runtime.config import EvaluationConfig, SyncConfig, TrainConfig
from runtime.run.record import unreached


def told(updates: int = 32, samples: int = 4096, whole: bool = True, **sync: Any) -> list[str]:
    return unreached(TrainConfig(sync=SyncConfig(**sync)), updates, samples, whole=whole)


@pytest.mark.parametrize(
    ("sync", "reached", "says"),
    [
        ({"mode": "hybrid", "tau": 32}, 33, "tau 32 was never reached: the run has 32 updates"),
        ({"mode": "async", "tau": 8, "ranks": 4}, 33, "tau 8 .* each rank has 8 updates"),
        ({"mode": "hybrid", "sync_steps": 32}, 33, "--sync-steps 32 outlasted the run of 32"),
        ({"mode": "sync", "dense_lag": 32}, 33, "--dense-lag 32 was never reached: 32 dense"),
        (
            {"mode": "async_averaging", "ranks": 2, "tau": 2, "average_every_steps": 17},
            33,
            "--average-every-steps 17 was never reached: each rank has 16",
        ),
    ],
)
def test_a_bound_is_said_until_the_run_is_long_enough(
    sync: dict[str, Any], reached: int, says: str
) -> None:
    (note,) = told(**sync)
    assert re.search(says, note), note
    assert told(updates=reached, **sync) == []


def test_the_steps_that_the_data_did_not_give_are_said() -> None:
    config = TrainConfig(steps=1000)
    assert unreached(config, 1000, 1000 * 128 - 5) == []
    (note,) = unreached(config, 32, 4096)
    assert note.startswith(
        "--steps 1,000 asked for, the data gave 32; more come with --data.passes"
    )
    assert unreached(config, 32, 4096, whole=False) == [], "some were skipped: not the data's doing"


def test_a_batch_that_holds_all_the_data_and_a_snapshot_that_never_came_are_said() -> None:
    (note,) = unreached(TrainConfig(batch=100_000), 1, 4000)
    assert note.startswith("--batch 100,000 is more than all 4,000 samples: the run was one step")
    often = TrainConfig(evaluation=EvaluationConfig(evaluate_every_steps=33))
    (note,) = unreached(often, 32, 4096)
    assert "--evaluate-every-steps 33 was never reached: the run has 32 steps" in note
    assert unreached(often, 33, 4224) == []
