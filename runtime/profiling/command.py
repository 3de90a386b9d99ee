"""`persia-runtime profile`: its options, and the lines that a person reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from persia_sim.base.command_line import read_options
from persia_sim.base.schema import Within, check_fields
from runtime.config import EngineConfig, ModelConfig
from runtime.embedding.config import MOST_DIM
from runtime.files import ensure_place


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measure every stage of training; persia-sim --profile reads it.

    Loading is that of the data: with files, their parsing. Of a GPU also copies to it and back are
    measured; on a processor there are none, and the file says so.
    """

    dim: Annotated[int, Within(1, MOST_DIM)] = 16
    """Floats in a row, 1 to 65536."""
    hidden: tuple[int, ...] = (1024, 512, 256)
    """Widths of the MLP."""
    data: str = "synthetic:criteo-ad:0.01"
    """Where the ids come from; its training part needs 4096 samples."""
    device: str = "cpu"
    """Device of the dense network: cpu, or cuda, cuda:1, ..."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """What the dense network computes in; tf32 asks for a GPU."""
    threads: Annotated[int, Within(1, 1024)] = 1
    """Threads of each stage; with more than one its times are those of so many cores together."""
    processes: bool = True
    """Measure calls of a server process and sums over two ranks that are processes, too."""
    out: Path = Path("runs/profile.json")
    """The file to write; an earlier profile in its place is replaced."""

    def __post_init__(self) -> None:
        check_fields(self)
        ModelConfig(hidden=self.hidden)
        EngineConfig(device=self.device, precision=self.precision, threads=self.threads)


def profile(arguments: Sequence[str]) -> None:
    """Measure, write the file, and print a line for each law."""
    # The file's place is looked at before minutes are spent.
    options = read_options(Profile, arguments, "persia-runtime profile")
    ensure_place(options.out, "profile", {"schema"}, {"laws", "gpu"})
    from persia_sim.base.progress import Progress
    from runtime.profiling.profile import measure_profile, measurements
    from runtime.run.folder import write_json

    # Measure, with a bar; then the laws, for a person and for the simulator.
    total = measurements(options.processes, options.device)
    with Progress(total=total, desc="profile", unit=" stages") as bar:
        measured = measure_profile(
            options.dim,
            options.hidden,
            options.data,
            bar.update,
            processes=options.processes,
            device=options.device,
            precision=options.precision,
            threads=options.threads,
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, measured)
    print(describe_profile(measured))
    print(f"profile: {options.out}   (load {measured['provenance']['load_1min']:.1f} cores)")


def describe_profile(profile: dict[str, Any]) -> str:
    """One line a law: seconds of a call, of an item, how well it fits and where."""
    laws = dict(profile["laws"])
    if "all_reduce" in profile:
        laws["all_reduce"] = profile["all_reduce"]
    lines = []
    for name, law in laws.items():
        unit, one = ("byte", "a byte") if "per_byte_s" in law else ("item", "an item")
        each = 1e9 * law.get(f"per_{unit}_s", 0.0)
        low, high = law.get(f"fitted_{unit}s", (0, 0))
        within = f", {low:,.0f} to {high:,.0f} {unit}s" if high else ""
        lines.append(
            f"  {name:<15} {1e6 * law['fixed_s']:8.1f} us + {each:7.1f} ns {one}"
            f"   (+-{100 * law['spread']:.0f} %{within})"
        )
    return "\n".join([*lines, f"  copies: {profile['copies']}"])
