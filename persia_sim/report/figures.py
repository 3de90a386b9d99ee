"""The figures of a run for programs: one JSON document, of the numbers behind the screen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

from persia_sim.cluster.memory import fill_s
from persia_sim.report.measure import Estimate
from persia_sim.report.report import Report, borrowed, may_be, remedy, sent_bytes


def figures(
    result: Report,
    gains: Mapping[str, Mapping[str, Estimate]],
    compared: Any = None,
) -> dict[str, Any]:
    """What the screen says, in SI units and unrounded; ``gains``: relative ones, by kind of change;
    ``compared``: the record of what tables on the GPUs give.

    What a run does not have is None: staleness without a trace, memory that nobody asked about,
    the price of machines without one.
    """
    # The rate and what it is made of.
    run = result.run
    scenario = run.scenario
    cost = None
    if not scenario.cluster.unpriced and result.usd_per_hour:
        cost = {
            "usd_per_hour": result.usd_per_hour,
            "usd_per_million_samples": result.usd_per_million_samples,
        }
    return {
        "simulated": _simulated(result),
        "memory": _memory(result),
        "throughput": {
            "samples_per_s": result.samples_per_s.mean,
            "half_width": result.samples_per_s.half_width,
            "steps": result.samples_per_s.values,
            "range": asdict(may_be(result)),
        },
        "step": {
            "seconds": result.step_s.mean,
            "bound_s": result.bound.step_s,
            "bound_by": result.bound.binds,
        },
        # What binds, what would help, what it costs.
        "critical_path": {"by_resource": result.blame, "by_stage": result.stages},
        "exposed_s": result.exposed_s,
        "use": result.use,
        "advice": remedy(result) or None,
        "gains": {
            change: {name: asdict(gain) for name, gain in by_resource.items()}
            for change, by_resource in gains.items()
        },
        "compared": None if compared is None else asdict(compared),
        "cost": cost,
        # How late rows are, and what else happened.
        "staleness": None if result.staleness is None else asdict(result.staleness),
        "most_batches_in_flight": run.max_in_flight,
        "sent_bytes_per_step": sent_bytes(run) / scenario.steps,
        "borrowed": borrowed(result),
        "extrapolated": list(run.need.extrapolated),
    }


def as_json(content: Mapping[str, Any]) -> str:
    """The document: every number of it finite, and no character of a name that a terminal obeys."""
    return json.dumps(_finite(content), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    """Content with None in place of what is infinite (an interval of too few values) or NaN."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value if not isinstance(value, float) or isfinite(value) else None


def _simulated(result: Report) -> dict[str, Any]:
    """The cluster, the workload, the mode and the run."""
    # The scenario, as it was asked for and completed.
    scenario = result.run.scenario
    cluster = scenario.cluster
    work = scenario.workload

    # Who takes part, what is trained, and how.
    return {
        "cluster": cluster.name,
        "gpus": [{"name": cluster.gpu.name, "count": cluster.ranks}],
        "embedding_workers": cluster.embedding_workers.processes,
        "embedding_servers": cluster.servers.processes,
        "server_hosts": cluster.servers.hosts,
        "workload": work.name,
        "rows": work.rows,
        "dim": work.kept_dim,
        "dense_params": work.weights,
        "batch": scenario.batch,
        "batch_per_rank": work.batch_per_rank,
        "mode": str(scenario.mode),
        "tau": scenario.tau if scenario.mode.reads_late_rows else None,
        "ahead": scenario.steps_ahead if not scenario.mode.reads_late_rows else None,
        "permits": scenario.permits,
        "discipline": str(scenario.discipline),
        "costs": scenario.costs.source,
        "steps": scenario.steps,
        "seed": scenario.seed,
        "makespan_s": result.run.makespan_s,
    }


def _memory(result: Report) -> dict[str, Any] | None:
    """What the servers hold."""
    held = result.capacity
    if held is None:
        return None
    rate = result.samples_per_s.mean
    full_s = fill_s(result.run.scenario.workload, rate, 0.9 * held.resident_rows)
    return asdict(held) | {
        "fits": held.fits,
        "evicted_rows": held.evicted_rows,
        "seconds_until_90_percent_full": full_s,
    }
