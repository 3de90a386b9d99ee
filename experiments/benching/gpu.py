"""All work for a GPU in one command: tests, sanitizers, speeds, feed, profiler, stage times.

Each part is one or more commands of this testbed, a process each with a limit of its own. What a
command found is written as soon as it ends, so that a kill keeps the rest, and a second run does
what has not succeeded yet. With ``device cpu`` the same commands run in small: what
breaks there would have cost time of a GPU.
"""

from __future__ import annotations

import os
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
PARTS = ("peers", "stages", "profile", "tests", "feed", "hbm", "sanitizers")
"""In this order: the speeds first, for a machine may go before all is done."""
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
    first = sizes.speeds[0][0]
    batch = sizes.speeds[0][1]
    feed = _module("experiments", "bench-embedding --what feed --device", device, sizes.feed)
    precision = sizes.speeds[-1][2]
    traced = f"{precision} --where-time-goes {sizes.profile}"
    profile = _peers(device, first, batch, traced, (CEILING, OURS[0], OURS[2]))

    def speeds(
        workload: str, batch: int, precision: str, limit_s: float, systems: Sequence[str]
    ) -> Command:
        """One precision a command: a limit that is outlasted takes no other with it."""
        words = _peers(device, workload, batch, f"{precision} {sizes.peers}", systems)
        return Command(words, limit_s, f"{workload}, {batch}, {precision}")

    # Tests first, then what is measured.
    stages = _module("runtime", f"profile --no-processes --device {device}", sizes.stages)
    plan = {
        "tests": [
            Command(  # on a CPU each is skipped with its reason
                (*_module("pytest"), "-v", "-m", marked, "-p", "no:cacheprovider", GPU_TESTS),
                limit_s,
                marked,
                needs="tests/runtime",
                out="",
            )
            for marked, limit_s in sizes.tests
        ],
        "sanitizers": list(_sanitizers(device)),
        "peers": [
            speeds(workload, batch, precision, 50, sizes.systems)
            for workload, batch, precision in sizes.speeds
        ],
        "hbm": [speeds(first, sizes.speeds[-1][1], precision, 30, (CEILING, *MERGED))],
        "feed": [Command(feed, 45, "fetch, push, copies")],
        "profile": [Command(profile, 30, "20 steps", keeps="trace_*.json.gz")],
        "stages": [Command(stages, 30, "stage times", keeps=PROFILE, out=f"out/{PROFILE}")],
    }
    if device == "cuda":
        return {part: plan[part] for part in PARTS}
    return {
        part: [replace(command, limit_s=IN_SMALL_S) for command in plan[part]] for part in PARTS
    }


class _Sizes(NamedTuple):
    speeds: tuple[tuple[str, int, str], ...]
    """(workload, batch, precision), in the order of how much they matter."""
    peers: str
    feed: str
    profile: str
    stages: str
    systems: tuple[str, ...] = (CEILING, *OURS, ONE_STEP_LATE[0])
    tests: tuple[tuple[str, int], ...] = (("gpu and not multiproc", 60), ("gpu and multiproc", 120))


_FULL = _Sizes(
    speeds=(("paper", 4096, "float32"), ("paper", 16384, "tf32"), ("paper", 16384, "bfloat16")),
    # Fewer rows than on a CPU: to fill ten million takes longer than to measure with them.
    peers="--rows 2600000 --threads 8 --rounds 4 --window-steps 42 --most-foreign-cores 2",
    feed="--rows 2600000 --rounds 3 --most-foreign-cores 2",
    profile="--rows 2600000 --threads 8 --window-steps 20",
    stages="--hidden 4096 2048 1024 512 256 --threads 8",
)
_SMALL = _Sizes(
    speeds=(("small", 32, "float32"), ("small", 32, "bfloat16")),
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
    # Not initcheck, which also reports cuBLAS' own reads. The libraries load slowly under the tool.
    words = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "99")
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else one allocation holds all tensors
    yield Command(
        (*words, *_module("runtime", late)),
        90,
        "compute-sanitizer memcheck",
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
        clocks = [_gpu_now(CLOCKS)]
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
        record["clocks"] = [*clocks, _gpu_now(CLOCKS)]
        record["exit_code"] = code
        record["output"] = "\n".join(output.splitlines()[-LAST_LINES:])
        record["tables"] = {p.stem: read_rows(p) for p in sorted(results.glob("*.csv"))}
        if command.keeps:
            for path in results.glob(command.keeps):
                shutil.copy(path, out / path.name)
    outlasted = f"outlasted {command.limit_s:.0f} s"
    outcomes = {0: PASSED, None: outlasted}
    return record | {"outcome": outcomes.get(code, f"failed with exit code {code}")}


def _machine() -> dict[str, Any]:
    """Where and when, without which a table is worth nothing."""
    from runtime.run.folder import environment

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "usable_cores": len(os.sched_getaffinity(0)),
        **environment(),
        "gpu": _gpu_now("name,memory.total,driver_version"),
    }


CLOCKS = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_throttle_reasons.active"


def _gpu_now(what: str) -> str:
    """What nvidia-smi says of these fields; empty where there is none."""
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    if not shutil.which(query[0]):
        return ""
    answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    return answer.stdout.strip()
