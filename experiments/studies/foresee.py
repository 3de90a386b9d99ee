"""What late rows may cost on your log, told before anything is trained late.

Counted in the log: the share of lookups whose id is young, in its own order and behind shuffle
buffers. Measured in 100 updates of sync: the squared gradients that Adagrad's start is held
against. Beside both stands what the study of lateness lost where it measured the same.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

from experiments.lateness.hypotheses import MARGIN
from experiments.lateness.logs import LATENESSES, bursts_of, mean_square_gradient
from experiments.lateness.streams import BUFFERS, PERSIA_START, RANKS
from experiments.options import Count, Positive, StudyOptions
from experiments.paper.record import STORED
from experiments.tables import Column, table, write_csv
from persia_sim.base.vocabulary import Mode
from runtime.config import DataConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.embedding.config import RowOptimizer, TableConfig

STARTS = {"torch's default": 0.0, "PERSIA's": PERSIA_START, "Keras' default": 0.1}
"""Accumulators that Adagrad starts from (source: torch.optim.Adagrad, persia/embedding/optim.py,
keras.optimizers.Adagrad)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(StudyOptions):
    """Bursts and gradients of your log, and what the study lost at such values."""

    data: str = "kuairand-pure-14d"
    """A ready data set, or the path of your own schema (.toml); its rows in the order in which you
    train them."""
    data_dir: Path | None = None
    """Folder with the real data; else PERSIA_DATA_DIR, else what `data get` downloaded."""
    rows: Count = 500_000
    """Count in so many first training rows."""
    batch: Count = 128
    """Samples of a dense update: with larger ones an id is young for fewer updates."""
    row_lr: Positive = 0.05
    """Learning rate of the rows in the 100 updates of sync."""
    lr: Positive = 1e-3
    """Learning rate of the dense weights there."""


def run(options: Options) -> None:
    """Count, measure, print both beside the study's losses, and say what follows."""
    plain = config_of(options)
    orders = {"as it is": plain} | {
        f"buffer of {size:,}": replace(plain, data=replace(plain.data, shuffle_buffer=size))
        for size in BUFFERS
        if size < options.rows
    }
    orders["shuffled"] = replace(plain, data=replace(plain.data, shuffle=True))
    lines = []
    for order, config in orders.items():
        bursts = bursts_of(config)
        shares = {f"b_{late}": bursts.of_all[late] for late in LATENESSES}
        lines.append(
            {"order": order, **shares, "field": bursts.field, "field_b_16": bursts.of_field[16]}
        )
    print(f"{options.data}: share of lookups whose id was first seen fewer than R updates before\n")
    print(f"{table(lines, BURSTS)}\n")

    points = study_points(STORED / "lateness.csv")
    here = {"data": "your log", "order": "as it is", "b_16": lines[0]["b_16"], "loss": nan}
    if points:
        print("what rows 16 updates late lost in the study, by that share [thousandths of AUC]\n")
        print(f"{table(sorted([*points, here], key=lambda line: line['b_16']), POINTS)}\n")
    gradient = mean_square_gradient(plain)
    print(
        f"mean squared row gradient of the first updates: {gradient:.2g}; Adagrad's start over it"
    )
    for name, start in STARTS.items():
        print(f"  {name:<16} {start:<5g} s = {start / gradient:.3g}")
    print()
    for sentence in advice(lines, points, gradient):
        print(sentence)
    path = write_csv(options.out / "foresee.csv", lines)
    print(f"table: {path}")


def config_of(options: Options) -> TrainConfig:
    """The synchronous run whose log is counted."""
    is_path = options.data.endswith(".toml") or options.data.startswith("synthetic")
    return TrainConfig(
        sync=SyncConfig(mode=Mode.HYBRID, ranks=RANKS, tau=0),
        batch=options.batch,
        data=DataConfig(
            name=options.data, dir=None if is_path else options.data_dir, rows=options.rows
        ),
        model=ModelConfig(lr=options.lr),
        rows=TableConfig(optimizer=RowOptimizer(lr=options.row_lr)),
    )


def study_points(path: Path) -> list[dict[str, Any]]:
    """The losses of rows 16 late of the stored study, each stream and order; none without it."""
    if not path.is_file():
        return []
    points: dict[tuple[str, str], dict[str, Any]] = {}
    with path.open() as file:
        for line in csv.DictReader(file):
            cell = line["rows_late"], line["dense_late"], line["rates"], line["window"]
            usual = cell == ("16", "0", "of sync", "test") and float(line["optimizer_start"]) == 0
            if usual and line["b_16"] not in ("", "nan"):
                points.setdefault(
                    (line["data"], line["order"]),
                    {
                        "data": line["data"],
                        "order": line["order"],
                        "b_16": float(line["b_16"]),
                        "loss": -float(line["gap_to_sync"]),
                        "half_width": float(line["gap_to_sync_half_width_95"]),
                    },
                )
    return list(points.values())


def advice(lines: list[dict[str, Any]], points: list[dict[str, Any]], gradient: float) -> list[str]:
    """What follows for somebody who trains on this log, in sentences."""
    b_16 = lines[0]["b_16"]
    lost = [p for p in points if p["loss"] - p["half_width"] > MARGIN]
    first_loss = min((p["b_16"] for p in lost), default=None)
    sentences = []
    if first_loss is None:
        sentences.append("No stored loss is surely above 1.0: the study has not been stored here.")
    elif b_16 < first_loss:
        sentences.append(
            f"b(16) is {b_16:.3f}; the study lost surely more than 1.0 with rows 16 late from"
            f" {first_loss:.3f} on: take hybrid up to tau 16, and check it on validation rows."
        )
    else:
        small = [line for line in lines[1:] if line["b_16"] < first_loss]
        remedy = (
            f"train through a shuffle ({small[0]['order']}: b(16) {small[0]['b_16']:.3f})"
            if small
            else "shuffle more than was tried here"
        )
        sentences.append(
            f"b(16) is {b_16:.3f}; where it was {first_loss:.3f} or more, rows 16 late lost more"
            f" than 1.0 in the study: {remedy}, or keep tau at 4 or below and measure."
        )
    sentences.append(
        f"Start Adagrad's accumulator at or below {gradient:.1g} (s at most 1): from a start far"
        " above the squared gradients sync itself learns slowly, and late rows cost more."
    )
    return sentences


BURSTS: dict[str, Column] = {
    "order": "{order}",
    **{f"b({late})": f"{{b_{late}:.3f}}" for late in LATENESSES},
    "burstiest field": "{field}",
    "its b(16)": "{field_b_16:.3f}",
}
POINTS: dict[str, Column] = {
    "stream": "{data}",
    "order": "{order}",
    "b(16)": "{b_16:.3f}",
    "lost with rows 16 late": lambda line: (
        "<-- here"
        if line["data"] == "your log"
        else f"{1e3 * line['loss']:+.1f} ± {1e3 * line['half_width']:.1f}"
    ),
}
