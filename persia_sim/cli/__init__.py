"""The command: its options, the scenario that they describe, and what it prints."""

from persia_sim.cli.build import scenario_of
from persia_sim.cli.options import Options
from persia_sim.cli.run import run

__all__ = ["Options", "run", "scenario_of"]
