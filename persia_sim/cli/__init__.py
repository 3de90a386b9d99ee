"""The command: its options, the scenario that they describe, and what it prints."""

from persia_sim.cli.command import Options, run, scenario_of

__all__ = ["Options", "run", "scenario_of"]
