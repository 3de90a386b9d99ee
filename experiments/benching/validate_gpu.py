"""What the simulator says of a run beside a GPU, from a profile of that GPU, and what the run does.

The stages are measured alone (`persia-runtime profile`); the predictions are in a file before
anything is trained; then windows of whole steps are trained as `bench-peers` trains them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.benching import bench_peers
from experiments.benching.bench_peers import OURS, SHAPES
from experiments.benching.windows import Window, interleave, summarize
from experiments.tables import Column, table, toml_value, write_csv
from experiments.validating.cases import DATA
from experiments.validating.errors import error
from persia_sim.base.files import atomic_write
from persia_sim.base.vocabulary import DEFAULT_TAU, Mode

GOAL = 0.10
"""Error of the predicted throughput of hybrid, set before it ever ran on a GPU."""
SIMULATED_STEPS = 200
WORKLOAD: bench_peers.WorkloadName = "paper"
MODES = {OURS[0]: Mode.SYNC, OURS[2]: Mode.HYBRID}
ARITHMETIC = {"float32": "fp32", "tf32": "tf32", "bfloat16": "fp16"}
"""What the simulator calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRun:
    """What is profiled, predicted and run."""

    out: Path
    device: str
    precision: bench_peers.Precision
    threads: int
    batch: int = 4096
    rows: int = 2_600_000
    """Fewer than of `bench-peers`: to fill ten million takes longer than to measure with them."""
    rounds: int = 5
    window_steps: int = 42
    most_foreign_cores: float


def check(options: Any) -> None:
    """Refuse what nothing would read, and a device that cannot be."""
    from runtime.config import EngineConfig

    if options.device == "cpu" and (options.precision, options.threads) != ("float32", 8):
        raise ValueError("--precision and --threads are of a GPU: add --device cuda")
    if options.device != "cpu" and (options.hosts == 2 or options.fitted_to == "sync"):
        raise ValueError("--device is of one host's GPU alone: drop --hosts and --fitted-to")
    EngineConfig(device=options.device, precision=options.precision, threads=options.threads)


def run(options: Any) -> None:
    """A profile of the GPU, two predictions, two runs."""
    from runtime.rank.learner import open_device

    # What will be done; a plan that is only shown opens no device.
    print(f"profile of {options.device}, predictions of sync and hybrid, five rounds of both")
    if options.dry_run:
        return
    open_device(options.device)
    validate(
        GpuRun(
            out=options.out,
            device=options.device,
            precision=options.precision,
            threads=options.threads,
            most_foreign_cores=options.most_foreign_cores,
        )
    )


def validate(run: GpuRun) -> list[dict[str, Any]]:
    """Profile, predict, write the predictions, run, and print the table; a record a mode."""
    import torch

    # What the stages cost, measured alone.
    from runtime.run.folder import write_json
    from runtime.run.profile import measure_profile

    shape = SHAPES[WORKLOAD]
    costs = measure_profile(
        shape.dim,
        shape.hidden,
        DATA,
        processes=False,
        device=run.device,
        precision=run.precision,
        threads=run.threads,
    )
    profile = run.out / "profile.json"
    run.out.mkdir(parents=True, exist_ok=True)
    write_json(profile, costs)

    # What the simulator makes of them, in a file before anything is trained.
    on_gpu = run.device != "cpu"
    name = torch.cuda.get_device_name(run.device) if on_gpu else ""
    records = [
        {
            "device": name or "cpu",
            "precision": run.precision,
            "mode": str(mode),
            "system": system,
            "predicted": predicted(run, profile, cluster_of(name), mode),
            "measured": "",
            "error": "",
        }
        for system, mode in MODES.items()
    ]
    path = write_csv(run.out / "validate_gpu.csv", records)
    print(f"predictions: {path}", flush=True)

    # The runs.
    windows = _windows(run)
    for record in records:
        took = summarize(windows, record["system"])
        record["measured"] = took.median
        record["error"] = error(record["predicted"], took.median)
    write_csv(path, records)
    print(table(records, COLUMNS))
    of_hybrid = abs(float(records[-1]["error"]))
    word = "met" if of_hybrid <= GOAL else "MISSED"
    print(f"goal: hybrid is predicted within {GOAL:.0%}: {of_hybrid:.1%}: {word}")
    return records


COLUMNS: dict[str, Column] = {
    "samples/s": "{system}, {precision}",
    "predicted": "{predicted:,.0f}",
    "measured": "{measured:,.0f}",
    "error": "{error:+.1%}",
}


def cluster_of(gpu: str) -> str:
    """The preset of a machine with such a GPU; of none, this host."""
    if not gpu:
        return "this-host"
    return "h200-16-cores" if "H200" in gpu else "h100-16-cores"


def predicted(run: GpuRun, profile: Path, cluster: str, mode: Mode) -> float:
    """Samples a second of the workload of the run."""
    from persia_sim.engine.simulate import simulate
    from persia_sim.presets.point import Point, scenario_of
    from persia_sim.report.measure import throughput

    # The workload of `bench-peers`, as a file of the simulator.
    shape = SHAPES[WORKLOAD]
    document = {
        "name": f"bench-peers {WORKLOAD}",
        "fields": 26,
        "dim": shape.dim,
        "rows": run.rows,
        "zipf": 1.05,
        "dense_features": 13,
        "mlp": [*shape.hidden, 1],
        "batch_per_rank": run.batch,
        "precision": ARITHMETIC[run.precision],
        "wire": {"activation_value_bytes": 4},
        "source": "bench-peers",
    }
    workload = run.out / "workload.toml"
    with atomic_write(workload) as file:
        file.write("".join(f"{k} = {toml_value(v)}\n" for k, v in document.items()).encode())

    # One rank on that machine.
    point = Point(
        cluster=cluster,
        workload=str(workload),
        ranks=1,
        profile=profile,
        mode=mode,
        tau=DEFAULT_TAU if mode.reads_late_rows else None,
        steps=SIMULATED_STEPS,
    )
    return float(throughput(simulate(scenario_of(point))).mean)


def _windows(run: GpuRun) -> list[Window]:
    options = bench_peers.Options(
        workloads=(WORKLOAD,),
        device=run.device,
        precision=(run.precision,),
        systems=tuple(MODES),
        rows=run.rows,
        batch=run.batch,
        threads=run.threads,
        rounds=run.rounds,
        window_steps=run.window_steps,
        most_foreign_cores=run.most_foreign_cores,
        out=run.out,
    )

    # The first window of each loads and allocates what is needed once.
    shape = bench_peers.shape_of(options, WORKLOAD)
    systems = bench_peers.systems_of(options, shape)
    candidates = {system: measure for (system, _), measure in systems.items()}
    return interleave(candidates, run.rounds, run.most_foreign_cores, "runs", warm_up=True)
