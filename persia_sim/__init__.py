"""The cluster as a model: the testbed's words, its trace, and a discrete-event simulator.

Nothing here imports torch, and importing the package loads nothing heavy: a name is fetched from
its module when it is asked for.

>>> import persia_sim
>>> persia_sim.presets.cluster("gcp-100t").ranks
64
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persia_sim import presets
    from persia_sim.base.vocabulary import Mode
    from persia_sim.cluster.cluster import Cluster
    from persia_sim.cluster.costs import Costs
    from persia_sim.cluster.scenario import Scenario
    from persia_sim.cluster.workload import Workload
    from persia_sim.engine.simulate import simulate
    from persia_sim.presets.point import Point, scenario_of
    from persia_sim.report.measure import throughput
    from persia_sim.report.ranges import OnServers, range_of

__all__ = [
    "Cluster",
    "Costs",
    "Mode",
    "OnServers",
    "Point",
    "Scenario",
    "Workload",
    "presets",
    "range_of",
    "scenario_of",
    "simulate",
    "throughput",
]

_HOMES = {
    "Cluster": "cluster.cluster",
    "Costs": "cluster.costs",
    "Mode": "base.vocabulary",
    "Point": "presets.point",
    "OnServers": "report.ranges",
    "Scenario": "cluster.scenario",
    "Workload": "cluster.workload",
    "presets": "presets",
    "range_of": "report.ranges",
    "scenario_of": "presets.point",
    "simulate": "engine.simulate",
    "throughput": "report.measure",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module persia_sim has no attribute {name!r}; it has {__all__}")
    module = import_module(f"persia_sim.{_HOMES[name]}")
    return module if name == "presets" else getattr(module, name)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
