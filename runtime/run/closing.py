"""The report at the end of a run, from its summary: one fact on a line, or as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from persia_sim.base.facts import Facts, column, on_screen
from persia_sim.base.rules import counted
from persia_sim.base.staleness import StalenessSummary
from persia_sim.base.vocabulary import Mode
from runtime.config.training_file import Predicted
from runtime.run.folder import plain

Summary = Mapping[str, Any]
"""What `run_into` returns, and `summary.json` holds."""


def as_json(summary: Summary, folder: str) -> str:
    """The summary, and the folder of the run, as one document; NaN becomes null."""
    return json.dumps(plain({"folder": folder, **summary}), indent=2, allow_nan=False)


def whole(summary: Summary) -> str:
    """Every fact on a line, with its name in full."""
    # What was trained, and how well it predicts each label.
    part = summary["evaluated_on"].split()[0]
    trained = _trained(summary)
    questions = {"What was trained?": trained}
    for task, score in summary["tasks"].items():
        is_number = "rmse" in score
        question = f"How well is {task} predicted on the {part} part?"
        questions[question] = _of_numbers(score) if is_number else _of_clicks(score)

    # What one must know to judge these scores.
    questions |= {
        f"Do the ids of the {part} part have rows?": _rows(summary),
        "How late were the rows?": _staleness(summary),
        "What held it up?": _held_up(summary),
        "What was left out?": [(c.name, f"{c.number:,}{c.more}") for c in _left_out(summary)],
    }
    if summary["best_reachable_auc"] is not None:
        reachable = f"{summary['best_reachable_auc']:.4f}, of this synthetic stream"
        trained.append(("best reachable AUC", reachable))
    screen = on_screen(questions)
    remarks = _remarks(summary)
    return "\n\n".join([screen, "\n".join(remarks)]) if remarks else screen


def beside_prediction(predicted: Predicted, summary: Summary) -> str:
    """What was simulated of the run beside what was measured in it."""
    ends = (predicted.samples_per_s_low, predicted.samples_per_s_high)
    low, high = (f"{each:,.0f}" for each in ends)
    late = summary["staleness"]
    missed = late.mean_steps if Mode(summary["mode"]).has_barrier else late.mean_pushes
    where = f"{predicted.cluster} with {counted(predicted.ranks, 'rank')}"
    here = f"{summary['executor']} with {counted(summary['ranks'], 'rank')}"
    facts = [
        ("samples/s", f"{predicted.samples_per_s:,.0f} ({low} to {high}) on {where}"),
        ("samples/s here", f"{summary['samples_per_s']:,.0f}, executor {here}"),
        ("updates missed", f"{predicted.updates_missed:.1f} by a mean lookup"),
        ("updates missed here", "not known" if missed is None else f"{missed:.1f}"),
    ]
    return on_screen({"What was predicted, and what was measured?": facts})


def _trained(summary: Summary) -> Facts:
    """The mode, who trained, how much and how fast."""
    tau = "unbounded" if summary["tau"] is None else summary["tau"]
    fused = ", ranks of a step as one batch" if summary["ranks_fused"] else ""
    return [
        ("mode", f"{summary['mode']}, tau {tau}"),
        ("ranks", f"{summary['ranks']:,}"),
        ("executor", f"{summary['executor']}{fused}"),
        ("samples", f"{summary['samples']:,}"),
        ("updates", f"{summary['updates']:,} of the dense weights"),
        ("throughput", f"{summary['samples_per_s']:,.0f} samples/s"),
        ("rows", f"{summary['rows']:,}"),
    ]


def _of_clicks(score: Mapping[str, Any]) -> Facts:
    """The scores of a task whose labels are 0 and 1."""
    # Over all samples, each beside what it is to be compared with.
    facts = [
        ("AUC", f"{score['auc']:.4f}"),
        ("log-loss", f"{score['log_loss']:.4f}"),
        (
            "log-loss of the rate",
            f"{score['trivial_log_loss']:.4f}, of always saying {score['label_rate']:.3f}",
        ),
        (
            "normalised entropy",
            f"{score['normalized_entropy']:.4f}, log-loss over that of the rate",
        ),
        ("calibration", f"{score['calibration']:.3f}, mean prediction over mean label"),
    ]
    if score.get("without_group"):
        anonymous = f"{score['without_group']:,} samples, in no group"
        facts.append(("without a group", anonymous))
    if score.get("gauc_groups"):
        groups = counted(score["gauc_groups"], "group")
        facts += [
            ("GAUC", f"{score['gauc']:.4f}, mean of the AUC within {groups}"),
            ("groups of one label", f"{score['gauc_groups_left_out']:,}, left out of GAUC"),
            *((name, f"{score[name]:.4f}") for name in score if "@" in name),
        ]
    return facts


def _of_numbers(score: Mapping[str, Any]) -> Facts:
    """The scores of a regression."""
    trivial = math.sqrt(score["trivial_mse"])
    return [
        ("RMSE", f"{score['rmse']:.4g}"),
        ("RMSE of the mean", f"{trivial:.4g}, of always saying {score['label_rate']:.4g}"),
        ("MAE", f"{score['mae']:.4g}"),
    ]


def _rows(summary: Summary) -> Facts:
    """The shares of ids that have a row, the smallest first."""
    shares = sorted(summary["ids_with_row"].items(), key=lambda item: item[1])
    entries = [(f"{100 * share:.3g} %", f"of {name}") for name, share in shares]
    if len(entries) > _MOST_TABLES:
        rest = f"or more of {len(entries) - _MOST_TABLES} other tables"
        entries[_MOST_TABLES:] = [(entries[_MOST_TABLES][0], rest)]
    return [("ids with a row", column(entries))]


_MOST_TABLES = 6


def _staleness(summary: Summary) -> Facts:
    """How many steps a lookup missed."""
    late = summary["staleness"]
    if late.mean_steps is None:
        return [("staleness", _UNKNOWN)]
    whose = "" if Mode(summary["mode"]).has_barrier else " of the rank's own"  # W times the updates
    told = [("staleness", _missed(late, whose))]
    if (fresh := summary.get("staleness_of_fresh_tables")) is not None:
        told.append(("of fresh tables", _missed(fresh)))
    return told


def _missed(late: StalenessSummary, whose: str = "") -> str:
    mean = f"{late.mean_steps:.2f} steps{whose} on average"
    return f"{mean}; no lookup missed more than {late.max_steps}"


_UNKNOWN = "not known: the order of the servers' reads and writes is not here"


def _held_up(summary: Summary) -> Facts:
    """What the run waited for, and its checkpoints."""
    facts = [("bound by", summary["bound_by"] or "")]
    if summary["checkpoints_written"]:
        facts += [
            ("checkpoints", f"{summary['checkpoints_written']:,} written"),
            ("longest pause for one", f"{summary['longest_pause_s']:.3f} s"),
        ]
    if summary["best_checkpoint"]:
        facts.append(("best checkpoint", f"{summary['best_checkpoint']}, which evaluate takes"))
    return facts


class _Count(NamedTuple):
    """What was not trained, or was lost."""

    name: str
    """In full, in the column of names."""
    number: int
    more: str = ""
    """What the report says behind the number."""


def _left_out(summary: Summary) -> list[_Count]:
    """What was not trained, or was lost; only what there was."""
    data = summary["data"]

    # What was there and was not used; then what was on its way and got lost.
    counts = [
        _Count("bad rows", data.rows_skipped, f" skipped: {data.skipped_where}"),
        _Count("rows evicted", summary["rows_evicted"]),
        _Count("rows expired", summary["rows_expired"]),
        _Count(
            "lookups without row",
            summary["lookups_not_admitted"],
            ", which admission gave none",
        ),
        _Count(
            "gradients dropped",
            summary["row_gradients_dropped"],
            ", whose row was not there",
        ),
        _Count("batches skipped", summary["batches_skipped"]),
        _Count("pushes lost", summary["pushes_lost"]),
        _Count("checkpoints failed", summary["checkpoints_failed"]),
        _Count(
            "pushes lost in part",
            sum(summary["pushes_lost_at"]),
            ", at servers, with those left out",
        ),
    ]
    return [count for count in counts if count.number]


def _remarks(summary: Summary) -> list[str]:
    """What is to be said in a sentence."""
    from runtime.run.evaluate import row_share_lines  # late: torch

    part = summary["evaluated_on"].split()[0]
    rare = row_share_lines(summary["ids_with_row"], part)[1:]
    notes = [f"note: {text}" for text in summary["notes"]]
    return [*rare, *notes, *(f"warning: {text}" for text in summary["warnings"])]
