"""Throughput against the size of the model at 6.25 to 100 trillion parameters, and what binds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from experiments.options import Planned, SimulatedSteps
from experiments.published.descriptions import published_rates
from experiments.published.persia import MODES
from experiments.studies import scale_workers as workers
from experiments.tables import leave, table
from persia_sim.presets.catalogue import CLUSTERS, costs_of, workloads
from persia_sim.presets.costs import BATCHES, CATALOGUE, FITS

PUBLISHED = "throughput_model_size.csv"
WITHOUT_SUSPECTS = 0.4
"""Share of the time that is not spent on suspects."""
SUSPECT_STEPS = 60  # a run of each suspect, batch and mode; enough for a rate within a per cent


SUSPECTS = {
    "suspect": "{suspect}",
    "batch a rank": "{batch_per_rank}",
    "would need": "{would_need}",
    "async (fit)": "{error_async:+.1%}",
    "hybrid": "{error_hybrid:+.1%}",
    "sync": "{error_sync:+.1%}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """Five sizes in hybrid, three modes at 100T, and suspects for what binds there."""

    steps: SimulatedSteps = 160
    """Simulated steps of a point."""
    suspects: bool = True
    """Also slow one resource at a time until it explains the published async rate."""


def run(options: Options) -> None:
    """Simulate, write the tables and the figure, print the signed errors."""
    if options.dry_run:
        points = len(published_rates(PUBLISHED))
        share = 1.0 if options.suspects else WITHOUT_SUSPECTS
        more = ", then the suspects" if options.suspects else ""
        print(
            f"{points} published points of {options.steps} simulated steps each{more};"
            f" {options.duration('steps', share=share)}"
        )
        return
    rows = list(model_size(steps=options.steps))
    print(table(rows, workers.COLUMNS))
    print(workers.summary(rows))

    # The flatness was put in by one level: so each size against the mean of the others.
    rates = [row["published"] for row in rows if row["series"].endswith("hybrid")]
    levels = [(sum(rates) - rate) / (len(rates) - 1) for rate in rates]
    held_out = [abs(level / rate - 1) for level, rate in zip(levels, rates, strict=True)]
    print(f"one level fitted to four sizes, the fifth held out: {workers.within(held_out)}")
    print(f"fitted constants: {len(FITS)} of every cluster ({', '.join(FITS)})")
    print(f"and the batch of this one ({BATCHES['gcp-100t']:,} a rank)")

    # Which single resource, made slow, would explain the published rate.
    tables: dict[str, list[dict[str, Any]]] = {"": rows}
    if options.suspects:
        tables["_suspects"] = candidates(steps=min(options.steps, SUSPECT_STEPS))
        print("\none resource alone slowed until async fits; the rest nominal")
        print(table(tables["_suspects"], SUSPECTS))
    leave(options, tables, drawn_first=1)


def model_size(steps: int = 100) -> Iterator[workers.Row]:
    """Five sizes on 64 A100, and three modes at 100T."""
    for row in published_rates(PUBLISHED):
        mode = MODES[row["mode"]]
        model = workers.simulated("gcp-100t", row["workload"], mode, 64, steps)
        label = f"{float(row['params']) / 1e12:g}T"
        published = float(row["samples_per_s"])
        yield workers.row_of(f"100T cluster {row['mode']}", label, 64, published, model, "fit")


def candidates(steps: int = 60, per_rank: tuple[int, ...] = (1024, 8192)) -> list[dict[str, Any]]:
    """Suspects for what binds the 100T run: each alone slow enough to explain the published async
    rate, the rest nominal, at several batches; errors are model over published, minus one."""
    rates = {"async": 2.16e6, "hybrid": 1.92e6, "sync": 0.733e6}
    cluster = CLUSTERS["gcp-100t"]()
    per_rank_s = cluster.ranks / rates["async"]  # seconds a sample at a rank

    # Nominal NICs and NVLink; the GPU as it was fitted, its kernels with its multiplications.
    fitted = costs_of("gcp-100t")
    nominal = replace(
        CATALOGUE,
        gpu_efficiency=fitted.gpu_efficiency,
        gpu_fixed_s=fitted.gpu_fixed_s,
        launching=fitted.launching,
        reach=replace(fitted.reach, nic=0.97),
    )
    speed = cluster.nn.host.core_speed
    load_s = cluster.loaders / rates["async"] * speed

    lines: list[dict[str, Any]] = []
    for batch_per_rank in per_rank:
        # The constant that makes each suspect alone as slow as the published rate.
        work = replace(workloads()["criteo-syn5"], batch_per_rank=batch_per_rank)
        copy = speed * per_rank_s * batch_per_rank / work.activation_bytes
        load = replace(nominal.load, fixed_s=0.0, per_item_s=load_s / work.columns)
        multiplying_s = per_rank_s * batch_per_rank - nominal.gpu_fixed_s
        share = work.flops_per_sample * batch_per_rank / (multiplying_s * cluster.gpu.fp32_flops)
        suspects = {
            "nothing (nominal)": ("-", nominal),
            "loaders": (f"{load_s * 1e6:.0f} us a sample on a core", replace(nominal, load=load)),
            "copy threads": (
                f"{speed / copy / 1e6:.0f} MB/s each way",
                replace(
                    nominal,
                    copy_in=replace(nominal.copy_in, per_byte_s=copy),
                    copy_out=replace(nominal.copy_out, per_byte_s=copy),
                ),
            ),
            "GPU": (
                f"{share:.0%} of float32 peak",
                replace(nominal, gpu_efficiency=((512, share),)),
            ),
        }

        # With it, how far the three published modes are from the simulated ones.
        for name, (constant, costs) in suspects.items():
            line: dict[str, Any] = {
                "suspect": name,
                "batch_per_rank": batch_per_rank,
                "would_need": constant,
            }
            for label, rate in rates.items():
                simulated = workers.rate_of(cluster, work, costs, MODES[label], steps)
                line[f"error_{label}"] = simulated / rate - 1
            lines.append(line)
    return lines
