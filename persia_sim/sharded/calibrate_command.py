"""`persia-sim calibrate`: what a program takes, from a trace of its steps, as files."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Annotated, Any

from persia_sim.base.command_line import Unset
from persia_sim.base.facts import column, on_screen
from persia_sim.base.files import atomic_write
from persia_sim.base.rules import require
from persia_sim.base.schema import hold_choices
from persia_sim.cluster.machine import Precision
from persia_sim.cluster.workload import Workload
from persia_sim.presets.catalogue import MACHINES, workloads
from persia_sim.presets.from_file import find, read_host, record_of, text_of
from persia_sim.sharded.command import JOINED, MOST_BATCH_PER_GPU
from persia_sim.sharded.presets import rankers, read_model
from persia_sim.sharded.ranker import Ranker
from persia_sim.sharded.software import band_ln
from persia_sim.sharded.stages import step_s
from persia_sim.sharded.step_trace import Steps, read_steps
from persia_sim.sharded.traced import Program, program_of, workload_of


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateOptions:
    """Read some steps of a training program from a trace of torch.profiler, and write what they
    take as the files that `sharded`, `size` and `persia-sim` read: software.toml; workload.toml,
    where the trace has shapes (record_shapes=True); and of a program on a CPU system.toml."""

    trace: Path
    """The trace of one rank, .json or .json.gz, with ProfilerStep marks. Example: step.json.gz."""
    steps: Annotated[tuple[int, int] | None, Unset("all but the first")] = None
    """First and last step, as the profiler numbered them, as 2 9."""
    system: Annotated[str | None, Unset("a CPU's is made from the trace")] = None
    """The machine whose GPU it ran on (dgx-a100, p5.48xlarge and so on), or a .toml file."""
    model: Annotated[str | None, Unset("from the shapes in the trace")] = None
    """The model that was trained: dlrm, any workload, or a .toml file."""
    batch: Annotated[int | None, Unset("from the shapes in the trace")] = None
    """Samples of a step of the rank."""
    precision: Precision = Precision.FP32
    """Arithmetic of its dense network."""
    out: Path = Path("calibrated")
    """The folder of the files, none of which may be there."""

    def __post_init__(self) -> None:
        hold_choices(self)


def run_calibrate(options: CalibrateOptions) -> str:
    """Read the trace, write the files, and say on one screen what is in them."""
    steps = read_steps(options.trace, options.steps)
    source = f"{len(steps.durations_s)} steps of {options.trace.name}"
    program, workload = _program(options, steps, source)

    # Each file says what it will be read as, before any is written.
    made: dict[str, Any] = {"software": program.software}
    made |= {} if options.model is not None else {"workload": workload}
    made |= {} if steps.on_gpu else {"system": program.host}
    texts = {options.out / f"{name}.toml": text_of(record) for name, record in made.items()}
    for path, record in zip(texts, made.values(), strict=True):
        record_of(type(record), tomllib.loads(texts[path]), "")
        require(not path.exists(), "--out", path, "it is there already", "name another folder")
    options.out.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        with atomic_write(path) as file:
            file.write(text.encode() + b"\n")
    return _screen(steps, program, list(texts), options)


def _program(
    options: CalibrateOptions, steps: Steps, source: str
) -> tuple[Program, Workload | Ranker]:
    """What the trace says, of the model that is named or that its shapes describe."""
    name = options.trace.name.partition(".")[0]
    presets: dict[str, Ranker | Workload] = {**rankers(), **workloads()}
    if options.model is None:
        model: Ranker | Workload = workload_of(steps, name, source, options.precision)
    else:
        model = find(options.model, "--model", presets, read_model)
    batch = options.batch or steps.batch
    remedy = "give it, or record with record_shapes=True"
    require(1 <= batch <= MOST_BATCH_PER_GPU, "--batch", batch, "samples of a step", remedy)

    # On a GPU its machine says what the kernels could have reached.
    host = None
    if steps.on_gpu:
        remedy = "name the machine, as dgx-a100 (`persia-sim machines list`), or a .toml file"
        rule = "kernels of a GPU are in the trace"
        require(options.system is not None, "--system", "not given", rule, remedy)
        hosts = {name: each for name, each in MACHINES.items() if each.gpus}
        host = find(str(options.system), "--system", hosts, read_host)
    elif options.system is not None:
        rule = "no kernel of a GPU is in the trace, and a CPU's system is made from it"
        require(False, "--system", options.system, rule, "leave it out")
    program = program_of(
        steps, model, batch, name=name, source=source, precision=options.precision, host=host
    )
    return program, model


_WORKED = {
    "products": "products of matrices",
    "tables": "rows of tables",
    "others": "what else samples are in",
    "constant": "what no sample is in",
    "copies": "copies from and to the host",
    "exchanges": "exchanges between ranks",
}


def _screen(steps: Steps, program: Program, paths: list[Path], options: CalibrateOptions) -> str:
    """What was read, how well the laws say it, and what to type next."""
    software = program.software
    device = "the GPU" if steps.on_gpu else "operators"
    worked = [(f"{1e3 * steps.work_s[kind]:,.3f}", text) for kind, text in _WORKED.items()]
    shown = [(ms, text) for ms, text in worked if float(ms.replace(",", ""))]
    by_law = 1e3 * step_s(program.job)
    times = exp(band_ln(program.job))
    given = " --model " + options.model if options.model else ""
    asked = f"persia-sim sharded --software {paths[0]} --gpus 1"
    asked += given or f" --model {options.out / 'workload.toml'}"
    asked += f" --system {options.system or options.out / 'system.toml'}"
    tried = "kernels of GPUs were never read from a real one here: hand-written traces alone"
    return on_screen(
        {
            f"What is in {options.trace.name}?": [
                ("steps", f"{len(steps.durations_s)}, {program.job.batch:,} samples each"),
                ("a step", f"{1e3 * steps.step_s:,.3f} ms, {steps.spread_ln:.1%} from one to next"),
                (f"{device} at work, ms", column(shown)),
                ("the host, ms", f"{1e3 * steps.host_s:,.3f}"),
                ("launched", f"{steps.kernels:,.0f}, {steps.table_kernels:,.0f} for tables"),
            ],
            "What is made of it?": [
                ("a step by the laws", f"{by_law:,.3f} ms"),
                ("like steps", f"within times or over {times:.2f} (90 %)"),
                ("host and device", JOINED[software.host_time]),
                ("never tried", tried * steps.on_gpu),
                ("files", ", ".join(map(str, paths))),
                ("next", asked),
            ],
        }
    )
