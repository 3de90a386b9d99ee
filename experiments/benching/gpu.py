"""All work for a GPU in one command: tests, sanitizers, speeds, feed, profiler, stage times.

Each part is one or more commands of this testbed, a process each with a limit of its own. What a
command found is written as soon as it ends, so that a kill keeps the rest, and a second run does
what has not succeeded yet. With ``device cpu`` the same commands run in small: what
breaks there would have cost time of a GPU.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from experiments.benching.bench_peers import CEILING, MERGED, ONE_STEP_LATE, OURS
from experiments.options import OneOf, Planned, hold
from experiments.paper.record import read_rows
from experiments.result_cache import ResultCache, ends_in_time
from experiments.tables import table
from persia_sim.base.files import atomic_write

GPU_TESTS = "tests/runtime/test_gpu.py"
RECORDS = "gpu.jsonl"
"""Record of each command: where, how long, its last words, the tables that it wrote."""
PASSED = "passed"
TABLE = "gpu.txt"
"""The table of all parts, and what their commands printed last."""
LAST_LINES = 60
PARTS = ("tests", "sanitizers", "peers", "hbm", "feed", "profile", "stages")
PROFILE = "profile.json"  # what `persia-sim --profile` reads
IN_SMALL_S = 600.0  # limit of a command where no GPU's time is lost
Device = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """Everything that a GPU is to tell, within ten minutes."""

    device: Device = "cuda"
    """cpu: the same commands in small, to see that they run."""
    only: tuple[str, ...] = ()
    """Parts to run, such as tests; else all."""

    def _check(self) -> None:
        for name in self.only:
            hold("only", name, OneOf(PARTS))


@dataclass(frozen=True, slots=True)
class Command:
    """One process of a part."""

    words: tuple[str, ...]
    limit_s: float
    name: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""
    """A program that must be installed, or a folder that must be here."""
    keeps: str = ""
    """Pattern of files that are kept beside the JSON."""
    out: str = "out"
    """Its ``--out``, below a folder of its own; empty: it takes none."""

    @property
    def shown(self) -> str:
        """The command as typed, without the environment's own paths."""
        words = ["python" if w == sys.executable else w for w in self.words]
        before = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*before, *(f'"{w}"' if " " in w else w for w in words)])


def run(options: Options) -> None:
    """Print the plan, do what is missing of it, print the table."""
    # The plan, with the most that it may take.
    plan = {
        part: commands
        for part, commands in plan_of(options.device).items()
        if part in (options.only or PARTS)
    }
    for part, commands in plan.items():
        for command in commands:
            print(f"{part:<11}{command.limit_s:>5.0f} s  {command.shown}")
    limit_s = sum(command.limit_s for commands in plan.values() for command in commands)
    print(f"{limit_s:.0f} s at most", flush=True)
    if options.dry_run:
        return
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():  # which opens no context
        raise ValueError("device 'cuda' cannot be used: no GPU is found; try --device cpu")

    # Run what has not passed yet; each record is written as soon as its command has ended.
    results = ResultCache(options.out / RECORDS)
    records = []
    for part, commands in plan.items():
        for command in commands:
            label = f"{part}: {command.shown}"
            if label not in results or results[label]["outcome"] != PASSED:
                print(f"{part}: {command.name} ...", flush=True)
                record = _carried_out(command, options.out)
                results.add(label, {"part": part, "machine": _machine(), **record})
                print(f"{part}: {command.name}: {record['outcome']} in {record['seconds']:.0f} s")
            records.append(results[label])

    # The table of all, and the last words of each.
    columns = {"part": "{part}", "command": "{name}", "s": "{seconds:.0f}", "outcome": "{outcome}"}
    overview = table(records, columns)
    outputs = [f"\n== {r['part']} {r['name']}\n{r['output']}" for r in records]
    with atomic_write(options.out / TABLE) as file:
        file.write("\n".join([overview, *outputs, ""]).encode())
    print(f"\n{overview}\n{options.out / TABLE}")


def plan_of(device: Device) -> dict[str, list[Command]]:
    """The commands of each part; their limits are the part's seconds."""
    # On a CPU everything is tried in small, so that a rented GPU is not wasted on a typo.
    sizes = _SMALL if device == "cpu" else _FULL
    first = sizes.workloads[0]
    batch = sizes.batches[0]
    feed = _module("experiments", "bench-embedding --what feed --device", device, sizes.feed)
    precision = sizes.precisions.split()[-1]
    traced = f"{precision} --where-time-goes {sizes.profile}"
    profile = _peers(device, first, batch, traced, (CEILING, OURS[0], OURS[2]))

    def speeds(workload: str, batch: int, limit_s: float, systems: Sequence[str]) -> Command:
        words = _peers(device, workload, batch, f"{sizes.precisions} {sizes.peers}", systems)
        return Command(words, limit_s, f"{workload}, {batch}")

    # Tests first, then what is measured.
    stages = _module("runtime", f"profile --no-processes --device {device}", sizes.stages)
    plan = {
        "tests": [
            Command(  # on a CPU each is skipped with its reason
                (*_module("pytest"), "-m", marked, "-p", "no:cacheprovider", GPU_TESTS),
                limit_s,
                marked,
                needs="tests/runtime",
                out="",
            )
            for marked, limit_s in sizes.tests
        ],
        "sanitizers": list(_sanitizers(device)),
        "peers": [
            speeds(workload, batch, 40 if batch < 10_000 else 60, sizes.systems)
            for batch in sizes.batches
            for workload in sizes.workloads
        ],
        "hbm": [speeds(first, sizes.batches[-1], 60, (CEILING, *MERGED))],
        "feed": [Command(feed, 60, "fetch, push, copies")],
        "profile": [Command(profile, 30, "20 steps", keeps="trace_*.json.gz")],
        "stages": [Command(stages, 30, "stage times", keeps=PROFILE, out=f"out/{PROFILE}")],
    }
    if device == "cuda":
        return plan
    return {
        part: [replace(command, limit_s=IN_SMALL_S) for command in commands]
        for part, commands in plan.items()
    }


class _Sizes(NamedTuple):
    workloads: tuple[str, ...]
    batches: tuple[int, ...]
    precisions: str
    peers: str
    feed: str
    profile: str
    stages: str
    systems: tuple[str, ...] = (CEILING, *OURS, ONE_STEP_LATE[0])
    tests: tuple[tuple[str, int], ...] = (("gpu and not multiproc", 45), ("gpu and multiproc", 60))


_FULL = _Sizes(
    workloads=("paper", "wide"),
    batches=(4096, 16384),
    precisions="float32 tf32 bfloat16",
    peers="--threads 8 --rounds 4 --window-steps 12",
    feed="--rounds 3",
    profile="--threads 8 --window-steps 20",
    stages="--hidden 4096 2048 1024 512 256",
)
_SMALL = _Sizes(
    workloads=("small",),
    batches=(32,),
    precisions="float32 bfloat16",
    peers="--rows 2600 --threads 1 --rounds 1 --window-steps 3 --most-foreign-cores 1000",
    feed="--rows 2600 --dim 4 --batch 32 --threads 1 2 --rounds 1 --most-foreign-cores 1000",
    profile="--rows 2600 --threads 1 --window-steps 3",
    stages="--dim 4 --hidden 8 --data synthetic:criteo-ad:0.0001",
    systems=(CEILING, OURS[0], OURS[2], ONE_STEP_LATE[0]),
    tests=(("gpu", 105),),
)


def _module(module: str, *words: str) -> tuple[str, ...]:
    """A command line of this Python."""
    return (sys.executable, "-m", module, *" ".join(words).split())


def _sanitizers(device: Device) -> Iterator[Command]:
    """torch's own sanitizer watches streams, NVIDIA's tools memory.

    torch's sees one thread only, so it gets the executor constant_lag, which has no other but
    uses the same streams; on a CPU it cannot start, and its command runs without it.
    """
    # torch's: who reads what another stream still writes.
    small = "--data.name synthetic --batch 64 --test-rows 200 --model.hidden 16"
    watched = {"TORCH_CUDA_SANITIZER": "1"} if device == "cuda" else {}
    for mode in ("hybrid",) if device == "cpu" else ("sync", "hybrid"):
        words = _module("runtime", f"train --device {device} --mode {mode} --steps 20 {small}")
        yield Command(words, 20, f"torch, {mode}", watched)

    # NVIDIA's: bytes outside of an array, and bytes that nobody wrote.
    late = f"train --device {device} --mode hybrid --steps 5 --executor concurrent {small}"
    for tool in ("memcheck", "initcheck"):
        words = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "99")
        alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else one allocation holds all tensors
        yield Command(
            (*words, *_module("runtime", late)),
            25,
            f"compute-sanitizer {tool}",
            alone,
            needs="compute-sanitizer",
        )


def _peers(
    device: Device, workload: str, batch: int, precision_and_more: str, systems: Sequence[str]
) -> tuple[str, ...]:
    words = f"bench-peers --workloads {workload} --batch {batch} --device {device} --precision"
    return (*_module("experiments", words, precision_and_more), "--systems", *systems)


def _carried_out(command: Command, out: Path) -> dict[str, Any]:
    """Run one command in a folder of its own, and bring back what it left."""
    record: dict[str, Any] = {"name": command.name, "seconds": 0.0, "output": "", "tables": {}}
    if command.needs and not (shutil.which(command.needs) or Path(command.needs).is_dir()):
        return record | {"outcome": f"skipped: {command.needs} is not here"}
    with tempfile.TemporaryDirectory(prefix="persia-gpu-") as folder:
        # Run it, for as long as it may.
        results = Path(folder) / "out"
        log = Path(folder) / "output"
        out_option = ("--out", str(Path(folder) / command.out)) if command.out else ()
        began = time.perf_counter()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **command.environment}
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command.words, *out_option],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            ended = ends_in_time(process, command.limit_s)  # else killed with its children

        # Its exit code (None where it was killed), last words, tables and files.
        code = process.returncode if ended else None
        output = log.read_text(errors="replace")
        record["seconds"] = time.perf_counter() - began
        record["exit_code"] = code
        record["output"] = "\n".join(output.splitlines()[-LAST_LINES:])
        record["tables"] = {p.stem: read_rows(p) for p in sorted(results.glob("*.csv"))}
        if command.keeps:
            for path in results.glob(command.keeps):
                shutil.copy(path, out / path.name)
    outlasted = f"outlasted {command.limit_s:.0f} s"
    outcomes = {0: PASSED, None: outlasted}
    return record | {"outcome": outcomes.get(code, f"failed with exit code {code}")}


def _machine() -> dict[str, str]:
    """Where and when, without which a table is worth nothing."""
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
    }
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    if shutil.which(query[0]):
        answer = subprocess.run(query, capture_output=True, text=True, check=False)
        facts["gpu"] = answer.stdout.strip()
    return facts
