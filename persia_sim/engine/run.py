"""What a simulation hands back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from persia_sim.engine.rollback import Losses
from persia_sim.model.demand import Demand
from persia_sim.model.scenario import Scenario
from persia_sim.words.trace import Trace


@dataclass(frozen=True, slots=True)
class Run:
    """What happened."""

    scenario: Scenario
    need: Demand
    stamps: np.ndarray
    """float64 [marks, ranks, steps]: simulated seconds of each `Mark`."""
    trace: Trace | None
    """The order of events, all shards as one unless `Scenario.trace_shards`; None when it was not
    asked for."""
    events: int
    """Events that the engine handled."""
    makespan_s: float
    """Simulated time from start to the last push."""
    busy_s: dict[str, float]
    """Busy seconds of each kind of resource, divided by its number of units."""
    link_bytes: dict[str, float]
    """Payload bytes of each direction of each NIC."""
    link_capacity: dict[str, float]
    """Payload bytes per second of the same."""
    losses: Losses
    """What crashes and checkpoints cost."""
    max_in_flight: int
    """Most batches between the start of their lookup and the end of their push, all ranks."""
