"""The command: its options, and what it prints."""

from persia_sim.cli.command import Options, run
from persia_sim.presets.point import scenario_of

__all__ = ["Options", "run", "scenario_of"]
