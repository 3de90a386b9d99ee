"""The command: its options, and what it prints."""

from persia_sim.cli.command import SimulateOptions, run
from persia_sim.presets.point import scenario_of

__all__ = ["SimulateOptions", "run", "scenario_of"]
