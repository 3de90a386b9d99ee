"""What must hold for every run: conservation, order, and no resource busier than time allows."""

from __future__ import annotations

import numpy as np

from persia_sim.engine.run import Run
from persia_sim.model.stamps import Mark
from persia_sim.oracle.closed_form import cycles
from persia_sim.words.vocabulary import Mode


def check(run: Run) -> None:
    """Conservation and bounds, on every run: nothing is busier than time allows."""
    stamps, scenario = run.stamps, run.scenario
    if not np.isfinite(stamps).all():
        raise AssertionError("a batch has not passed every stage")
    order = np.diff(stamps, axis=0)
    if (order < -1e-9 * run.makespan_s).any():
        mark = Mark(int(np.argwhere((order < -1e-9 * run.makespan_s).any((1, 2)))[0, 0]))
        raise AssertionError(f"a batch reached the stage after {mark.name} before {mark.name}")
    slack = run.makespan_s * (1 + 1e-9)
    for name, busy in run.busy_s.items():
        if busy > slack and not (scenario.infinite_cpus and not name.startswith(("GPU", "copy"))):
            raise AssertionError(f"{name} was busy {busy:.6g} s of {run.makespan_s:.6g} s")
    if scenario.discipline != "unshared":
        averages = scenario.dense_on_nics and scenario.mode is Mode.ASYNC_AVERAGING
        open_bytes = run.need.averaging_nic_bytes if averages else 0.0  # of the unfinished round
        for name, sent in run.link_bytes.items():
            if sent - open_bytes > slack * run.link_capacity[name]:
                raise AssertionError(f"NIC {name} carried more than its capacity")
    if run.losses.lost_pushes:
        return  # they were quicker than a push is
    for name, seconds in cycles(scenario, run.need).items():
        lag = _LAGS.get(name, 0)
        if name == "window":
            lag = (scenario.window or 0) + 1
        elif name == "permits":
            lag = scenario.permits or 1
        rounds = scenario.steps // lag if lag else 0
        if rounds:
            seconds = cycles(scenario, run.drawn(0, rounds * lag))[name]
        if slack < rounds * lag * seconds:
            raise AssertionError(f"{run.makespan_s:.6g} s is faster than the {name} allows")


_LAGS = {"training loop": 1, "copy to the GPU": 1, "copy from the GPU": 1, "refresh": 1}
"""Steps between the two ends of a cycle of constraints, where it does not depend on a knob."""
