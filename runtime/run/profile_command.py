"""`persia-runtime profile`: its options, the checks of its file, its progress and its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from persia_sim.words.command_line import read_options
from persia_sim.words.schema import Within, check_fields
from runtime.config import ModelConfig
from runtime.embedding.config import MOST_DIM
from runtime.files import ensure_place


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measure every stage of training on one core; persia-sim --profile reads it.

    Loading is that of the data: with files, their parsing. Copies to a device are not measured:
    on a processor there are none, and the file says so.
    """

    dim: Annotated[int, Within(1, MOST_DIM)] = 16
    """Floats in a row, 1 to 65536."""
    hidden: tuple[int, ...] = (1024, 512, 256)
    """Widths of the MLP."""
    data: str = "synthetic:criteo-ad:0.01"
    """Where the ids come from; its training part needs 4096 samples."""
    processes: bool = True
    """Measure calls of a server process and sums over two ranks that are processes, too."""
    out: Path = Path("runs/profile.json")
    """The file to write; an earlier profile in its place is replaced."""

    def __post_init__(self) -> None:
        check_fields(self)
        ModelConfig(hidden=self.hidden)


def run(arguments: Sequence[str]) -> None:
    """Measure, write the file, and print a line for each law."""
    options = read_options(Profile, arguments, "persia-runtime profile")
    ensure_place(options.out, "profile", {"schema"}, {"laws", "gpu"})
    from tqdm import tqdm

    from runtime.run.profile import measure_profile, measurements, write_profile

    total = measurements(options.processes)
    with tqdm(total=total, desc="profile", unit=" stages", disable=None) as bar:
        profile = measure_profile(
            options.dim, options.hidden, options.data, bar.update, processes=options.processes
        )
    write_profile(options.out, profile)
    print(describe(profile))
    print(f"profile: {options.out}   (load {profile['provenance']['load_1min']:.1f} cores)")


def describe(profile: dict[str, Any]) -> str:
    """One line a law: seconds of a call, of an item, how well it fits and where."""
    lines = [
        _line(stage, law, 1e9 * law.get("per_item_s", 0.0), "ns an item", law["fitted_items"])
        for stage, law in profile["laws"].items()
    ]
    if "all_reduce" in profile:
        law = profile["all_reduce"]
        per_byte_ns = 1e9 * law["per_byte_s"]
        lines.append(_line("all_reduce", law, per_byte_ns, "ns a byte", law["fitted_bytes"]))
    lines.append(f"  copies: {profile['copies']}")
    return "\n".join(lines)


def _line(name: str, law: dict[str, Any], each: float, unit: str, at: Sequence[float]) -> str:
    low, high = at
    return (
        f"  {name:<15} {1e6 * law['fixed_s']:8.1f} us + {each:7.1f} {unit}"
        f"   (+-{100 * law['spread']:.0f} %, {low:,.0f} to {high:,.0f} {unit.split()[-1]}s)"
    )
