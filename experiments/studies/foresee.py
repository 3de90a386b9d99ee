"""What late rows may cost on your log, told before anything is trained late.

Counted in the log: the share of lookups whose id is young, in its own order and behind shuffle
buffers. Measured in 100 updates of sync: the squared gradients that Adagrad's start is held
against. Beside both stands what the study of lateness lost where it measured the same.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from math import log, nan
from pathlib import Path
from typing import Any

from experiments.lateness.hypotheses import MARGIN
from experiments.lateness.logs import LATENESSES, bursts_of, mean_square_gradient
from experiments.lateness.streams import BUFFERS, PERSIA_START, RANKS
from experiments.options import Count, Planned, Positive
from experiments.paper.record import STORED
from experiments.tables import Column, table, write_csv
from persia_sim.base.vocabulary import Mode
from runtime.config import DataConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.embedding.config import RowOptimizer, TableConfig

STARTS = {
    "torch's default": 0.0,
    f"PERSIA's on {RANKS} ranks": PERSIA_START / RANKS**2,
    "Keras' default": 0.1,
}
"""Accumulators that Adagrad starts from (source: torch.optim.Adagrad, persia/embedding/optim.py,
keras.optimizers.Adagrad). PERSIA adds gradients up over ranks, where those here are means: a
squared one is smaller here by the square of the number of ranks, and so is a start that weighs as
much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """Bursts and gradients of your log, and what the study lost at such values."""

    data: str = "kuairand-pure-14d"
    """A ready data set, or the path of your own schema (.toml); its rows in the order in which you
    train them."""
    data_dir: Path | None = None
    """Folder with the real data, as ~/data; else PERSIA_DATA_DIR, else what `data get`
    downloaded."""
    rows: Count = 500_000
    """Count in so many first training samples."""
    batch: Count = 128
    """Samples of a dense update: with larger ones an id is young for fewer updates."""
    row_lr: Positive = 0.05
    """Learning rate of the rows in the 100 updates of sync."""
    lr: Positive = 1e-3
    """Learning rate of the dense weights there."""


def run(options: Options) -> None:
    """Count, measure, print both beside the study's losses, and say what follows."""
    # The log as it is, through buffers of several sizes, and shuffled.
    plain = config_of(options)
    orders = {"as it is": plain} | {
        f"buffer of {size:,}": replace(plain, data=replace(plain.data, shuffle_buffer=size))
        for size in BUFFERS
        if size < options.rows
    }
    orders["shuffled"] = replace(plain, data=replace(plain.data, shuffle=True))
    if options.dry_run:
        time = options.duration("rows")
        print(
            f"counts the first {options.rows:,} training samples of {options.data} in {len(orders)}"
            f" orders, and trains 100 updates of sync; {time}"
        )
        return
    lines = []
    for order, config in orders.items():
        bursts = bursts_of(config)
        shares = {f"b_{late}": bursts.of_all[late] for late in LATENESSES}
        lines.append(
            {"order": order, **shares, "field": bursts.field, "field_b_16": bursts.of_field[16]}
        )
    print(f"{options.data}: share of lookups whose id was first seen fewer than R updates before\n")
    print(f"{table(lines, BURSTS)}\n")

    # Its share of bursts among those of the study, whose losses are known.
    points = study_points(STORED / "lateness.csv")
    here: dict[str, Any] = {"data": "your log", "order": "as it is", "window": ""}
    here |= {"b_16": lines[0]["b_16"], "loss": nan}
    if points:
        print("what rows 16 updates late lost in the study, by that share [thousandths of AUC],")
        print("in the test window where they lost most\n")
        print(f"{table(sorted([*points, here], key=lambda line: line['b_16']), POINTS)}\n")
    # The start of Adagrad, in the scale of this log's gradients, among those of the study.
    gradient = mean_square_gradient(plain)
    starts = start_points(STORED / "lateness_moderator.csv")
    print(f"s: Adagrad's start over the mean squared row gradient of sync, {gradient:.2g} here\n")
    of_log = [
        {"data": f"your log, {name}", "start": start, "s": start / gradient}
        for name, start in STARTS.items()
    ]
    print(f"{table(sorted([*starts, *of_log], key=lambda line: line['s']), STARTS_OF_STUDY)}\n")

    for sentence in [*advice(lines, points), *advice_on_start(starts, gradient)]:
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
    """The losses of rows 16 late of the stored study, each stream and order, in the test window
    where they lose most; none without it."""
    # Without the stored study there is nothing to compare with.
    if not path.is_file():
        return []
    points: dict[tuple[str, str], dict[str, Any]] = {}
    tasks: dict[str, str] = {}
    with path.open() as file:
        # First tasks, rows 16 late, at sync's rates: the cell that the bound speaks of.
        for line in csv.DictReader(file):
            is_first_task = tasks.setdefault(line["data"], line["task"]) == line["task"]
            cell = line["rows_late"], line["dense_late"], line["rates"]
            usual = cell == ("16", "0", "of sync") and float(line["optimizer_start"]) == 0
            if not usual or not is_first_task or line["b_16"] in ("", "nan"):
                continue

            # Of all windows the one that lost most.
            point = {
                "data": line["data"],
                "order": line["order"],
                "window": line["window"],
                "b_16": float(line["b_16"]),
                "loss": -float(line["gap_to_sync"]),
                "half_width": float(line["gap_to_sync_half_width_95"]),
            }
            worst = points.setdefault((line["data"], line["order"]), point)
            if point["loss"] > worst["loss"]:
                points[line["data"], line["order"]] = point
    return list(points.values())


def start_points(path: Path) -> list[dict[str, Any]]:
    """The losses of rows 7 late of the stored study, each stream and start of Adagrad, with those
    where dense weights are 7 late, too; none without it."""
    if not path.is_file():
        return []
    points: dict[tuple[str, str], dict[str, Any]] = {}
    with path.open() as file:
        for line in csv.DictReader(file):
            key = line["data"], line["optimizer_start"]
            point = points.setdefault(
                key, {"data": key[0], "start": float(key[1]), "s": float(line["s"])}
            )
            cell = {("7", "0"): "rows", ("7", "7"): "both"}.get(
                (line["rows_late"], line["dense_late"])
            )
            if cell is not None:
                point[cell] = float(line["loss"]), float(line["loss_half_width_95"])
    return list(points.values())


def advice(lines: list[dict[str, Any]], points: list[dict[str, Any]]) -> list[str]:
    """What follows from the bursts of a log for somebody who trains on it, in sentences.

    It is held against the real stream of the study whose share of young ids is nearest, since that
    share says how much lateness may change, and not in which direction.
    """
    b_16 = lines[0]["b_16"]
    real = [p for p in points if not p["data"].startswith("synthetic")]
    if not real or b_16 <= 0:
        return [f"b(16) is {b_16:.3f}; the study has no stored stream to hold it against."]
    nearest = min(real, key=lambda point: abs(log(point["b_16"] / b_16)))
    loss = nearest["loss"], nearest["half_width"]
    sentences = [
        f"b(16) is {b_16:.3f}. The nearest real stream of the study is {nearest['data']}, order"
        f" {nearest['order']} ({nearest['b_16']:.3f}): rows 16 updates late lost"
        f" {_thousandths(loss)} in the test window where they lost most."
    ]
    if nearest["loss"] <= MARGIN:
        sentences.append("Take hybrid up to tau 16, and check it on validation samples.")
        return sentences

    # What loses there has a remedy where ids are young because they come in bursts.
    lower = [line for line in lines[1:] if line["b_16"] <= b_16 / 2]
    if lower:
        remedy = f"Train through a shuffle ({lower[0]['order']}: b(16) {lower[0]['b_16']:.3f}), or"
    else:
        remedy = "No shuffle halves it, so ids are young because the log is short:"
    sentences.append(
        f"{remedy} take lookahead, whose rows are not late, and measure hybrid on validation"
        " samples."
    )
    return sentences


def advice_on_start(points: list[dict[str, Any]], gradient: float) -> list[str]:
    """What follows from the study for the accumulator that Adagrad starts from, in sentences."""
    sentences = ["Start Adagrad's accumulator at 0, as torch does."]
    lost = [point for point in points if _surely_above(point.get("rows"))]
    if not lost:
        return sentences

    # From where on the study saw a loss, and where this log's starts lie.
    least = min(lost, key=lambda point: point["s"])
    names = sorted({point["data"] for point in lost})
    without = sorted({point["data"] for point in points} - set(names))
    but = f"; on {', '.join(without)} no start did" if without else ""
    sentences.append(
        f"With s = {least['s']:.2g} or more, rows 7 updates late surely lost more than 1.0"
        f" thousandths on {', '.join(names)}{but}."
    )
    above = [name for name, start in STARTS.items() if start / gradient >= least["s"]]
    if above:
        sentences.append(f"On your log s is as high with {' and with '.join(above)}.")
    return sentences


def _surely_above(loss: tuple[float, float] | None) -> bool:
    """Whether the whole interval of a loss lies above the study's margin."""
    return loss is not None and loss[0] - loss[1] > MARGIN


def _thousandths(loss: tuple[float, float] | None) -> str:
    return "" if loss is None else f"{1e3 * loss[0]:+.1f} ± {1e3 * loss[1]:.1f}"


BURSTS: dict[str, Column] = {
    "order": "{order}",
    **{f"b({late})": f"{{b_{late}:.3f}}" for late in LATENESSES},
    "burstiest field": "{field}",
    "its b(16)": "{field_b_16:.3f}",
}
POINTS: dict[str, Column] = {
    "stream": "{data}",
    "order": "{order}",
    "window": "{window}",
    "b(16)": "{b_16:.3f}",
    "lost with rows 16 late": lambda line: (
        "<-- here"
        if line["data"] == "your log"
        else f"{1e3 * line['loss']:+.1f} ± {1e3 * line['half_width']:.1f}"
    ),
}
STARTS_OF_STUDY: dict[str, Column] = {
    "stream": "{data}",
    "start": "{start:g}",
    "s": "{s:.2g}",
    "lost with rows 7 late [1e-3]": lambda line: _thousandths(line.get("rows")),
    "with dense weights 7 late, too": lambda line: _thousandths(line.get("both")),
}
