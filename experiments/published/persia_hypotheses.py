"""What Persia's points can tell: which parts they test, and hypotheses by their likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import hypot, log, pi, sqrt
from pathlib import Path

from experiments.published.descriptions import number, read_csv
from experiments.published.persia_fit import Edit, SharedFit, rate
from experiments.published.persia_points import DATA, Point
from persia_sim.model.costs import Costs


def without_sync_fixed(cluster: str, costs: Costs) -> Costs:
    """The fixed cost of an all-reduce only where peer-to-peer was off (the 2021 machines)."""
    if cluster == "v100-2021-09":
        return costs
    return replace(costs, dense_sync=replace(costs.dense_sync, overhead_s=0.0))


def moves(known: Sequence[Point], found: SharedFit) -> dict[str, list[tuple[Point, float]]]:
    """Part made 10 % faster -> points whose predicted rate gains 1 % or more by it."""

    def faster(*laws: str) -> Edit:
        def edit(_: str, costs: Costs) -> Costs:
            return replace(
                costs,
                **{
                    law: replace(
                        getattr(costs, law),
                        fixed_s=getattr(costs, law).fixed_s / 1.1,
                        per_item_s=getattr(costs, law).per_item_s / 1.1,
                        per_byte_s=getattr(costs, law).per_byte_s / 1.1,
                    )
                    for law in laws
                },
            )

        return edit

    def gpu(_: str, costs: Costs) -> Costs:
        ((batch, share),) = costs.gpu_efficiency
        return replace(costs, gpu_efficiency=((batch, min(1.0, 1.1 * share)),),
                       gpu_fixed_s=costs.gpu_fixed_s / 1.1)  # fmt: skip

    def dense_sync(_: str, costs: Costs) -> Costs:
        sync = costs.dense_sync
        quicker = replace(
            sync, intra_bytes_per_s=1.1 * sync.intra_bytes_per_s,
            inter_bytes_per_s=1.1 * sync.inter_bytes_per_s, overhead_s=sync.overhead_s / 1.1,
        )  # fmt: skip
        return replace(costs, dense_sync=quicker)

    edits = {
        "GPUs": gpu, "all-reduce": dense_sync, "loaders": faster("load"),
        "embedding workers": faster("worker_forward", "worker_rpc", "worker_pool",
                                    "worker_scatter"),
        "servers": faster("server_lookup", "server_update"),
    }  # fmt: skip
    gained: dict[str, list[tuple[Point, float]]] = {}
    for part, edit in edits.items():
        gained[part] = []
        for point in known:
            before, after = (rate(point, found.values, found.batches, e)[0] for e in (None, edit))
            if before and after / before >= 1.01:
                gained[part].append((point, after / before - 1.0))
    return gained


def divided_bar(bar: float, other: float, divisor: int, reading: float, model: float) -> float:
    """Log likelihood ratio: a bar is another one divided, against both were measured.

    ``reading`` is the relative error of reading a bar off the plot, ``model`` how well the ratio of
    two measurements could have been predicted (relative standard deviation), by which the chance
    that it comes out as the divisor is spread.

    >>> divided_bar(50.0, 100.0, 2, 0.01, 0.2) > 2, divided_bar(45.0, 100.0, 2, 0.01, 0.2) < -10
    (True, True)
    """
    away = log(bar * divisor / other)

    def density(spread: float) -> float:
        return -0.5 * (away / spread) ** 2 - log(spread * sqrt(2 * pi))

    return density(reading * sqrt(2.0)) - density(hypot(model, reading * sqrt(2.0)))


def divided_bars(data: Path = DATA) -> dict[str, float]:
    """Log likelihood ratio of each bar that may be another one divided."""
    found = {}
    bars: dict[tuple[str, str], dict[int, float]] = {}
    for line in read_csv(data / "throughput_public.csv", "published"):
        if line["system"] == "Persia" and "dashed" not in line["note"]:
            key = line["dataset"], "hybrid"
            bars.setdefault(key, {})[int(line["gpus"])] = number(line, "samples_per_s")
    for (name, mode), rates in bars.items():
        reading = 150 / rates[2]
        found[f"{name} {mode}: 1 GPU = 2 GPUs / 2"] = divided_bar(
            rates[1], rates[2], 2, reading, 0.3
        )
    kwai: dict[str, dict[int, float]] = {}
    for line in read_csv(data / "throughput_kwai.csv", "published"):
        kwai.setdefault(line["mode"], {})[int(line["gpus"])] = number(line, "samples_per_s")
    for mode, rates in kwai.items():
        for gpus in (1, 4):
            reading = 4000 / rates[gpus]
            found[f"kwai-video {mode}: {gpus} GPUs = 8 GPUs / {8 // gpus}"] = divided_bar(
                rates[gpus], rates[8], 8 // gpus, reading, 0.3
            )
    return found
