"""What late rows cost: the tables of the study of lateness, and of the one of models."""

from __future__ import annotations

import math

from page_tables import NAMES, first_task, markdown, number, rows_of, the

from experiments.lateness.streams import STREAMS, WHOLE_TENNIS
from experiments.paper.record import STORED, read_rows

CELLS = ((7, 0), (16, 0), (64, 0), (0, 7), (7, 7), (39, 7))
HEADS = {
    (7, 0): "rows 7 late [1e-3]", (16, 0): "rows 16 late [1e-3]", (64, 0): "rows 64 late [1e-3]",
    (0, 7): "dense 7 late [1e-3]", (7, 7): "both 7 late [1e-3]",
    (39, 7): "rows 39, dense 7 late [1e-3]",
}  # fmt: skip


def order_table() -> str:
    """Time order, shuffled, and behind buffers, at sync's rates."""
    rows, lines = first_task(rows_of("")), []
    plain = [r for r in rows if r["window"] == "test" and float(r["optimizer_start"]) == 0
             and r["rates"] == "of sync" and r["redrawn"] == "False"]  # fmt: skip
    for data in STREAMS:
        orders = dict.fromkeys(r["order"] for r in plain if r["data"] == data)
        for order in orders:
            own = [r for r in plain if (r["data"], r["order"]) == (data, order)]
            sync = the(own, rows_late=0, dense_late=0)
            if sync is None:
                continue
            words = {"time": "time order", "shuffled": "shuffled"}.get(
                order, f"shuffle buffer of {order.removeprefix('buffer-')} samples"
            )
            lines.append(
                [
                    NAMES.get(data, data),
                    words,
                    f"{float(sync['test_auc']):.4f}",
                    *(number(the(own, rows_late=r, dense_late=d)) for r, d in CELLS),
                ]
            )
    return markdown(
        ["stream", "order", "AUC of sync", *(HEADS[cell] for cell in CELLS)],
        lines,
    )


def chosen_table() -> str:
    """Every stream in its own order, at the rates that the rule chose."""
    rows, lines = first_task(rows_of("")), []
    for data, stream in STREAMS.items():
        for start in stream.starts:
            own = [
                r
                for r in rows
                if r["data"] == data
                and math.isclose(float(r["optimizer_start"]), start)
                and (r["order"], r["window"]) == ("time", "test")
                and int(r["updates"]) != stream.long_updates
            ]
            sync = the(own, rows_late=0, dense_late=0, batch=stream.batch)
            if sync is None:
                continue
            doubled = the(own, rows_late=0, dense_late=0, batch=2 * stream.batch)
            chosen = [r for r in own if r["chosen"] == "True"]
            cells = [number(the(chosen, rows_late=r, dense_late=d)) for r, d in CELLS]
            if any(cells):
                name = NAMES.get(data, data) + (f", Adagrad starts at {start:.3g}" if start else "")
                rates = f"{float(sync['row_lr']):g} / {float(sync['lr']):g}"
                lines.append([name, rates, f"{float(sync['test_auc']):.4f}", *cells,
                              number(doubled)])  # fmt: skip
    head = ["stream", "sync's rates, rows / dense", "AUC of sync"]
    return markdown([*head, *(HEADS[c] for c in CELLS), "twice the batch [1e-3]"], lines)


WINDOWS = {
    "origin-1": "the sixth before the last",
    "origin-2": "the last sixth",
    "test": "the test part",
}
"""What a stream's test windows are called, in the order of time."""


def window_table() -> str:
    """The test windows of each stream, in time order at the rules' rates, and shuffled."""
    rows = [r for r in first_task(rows_of("")) if r["chosen"] == "True"]
    rows = [r for r in rows if float(r["optimizer_start"]) == 0]
    cells = ((7, 0), (16, 0), (0, 7), (7, 7))
    lines = []
    for data, stream in STREAMS.items():
        if not stream.has_windows:
            continue
        for window, words in WINDOWS.items():
            here = [r for r in rows if (r["data"], r["window"]) == (data, window)]
            in_time = [r for r in here if r["order"] == "time"]
            shuffled = [r for r in here if r["order"] == "shuffled"]
            sync = the(in_time, rows_late=0, dense_late=0, batch=stream.batch)
            if sync is not None:
                lines.append(
                    [
                        NAMES.get(data, data),
                        words,
                        sync["updates"],
                        f"{float(sync['test_auc']):.4f}",
                        *(number(the(in_time, rows_late=r, dense_late=d)) for r, d in cells),
                        number(the(shuffled, rows_late=16, dense_late=0)),
                    ]
                )
    head = ["stream", "tested on", "updates", "AUC of sync", *(HEADS[cell] for cell in cells)]
    return markdown([*head, "shuffled, rows 16 late [1e-3]"], lines)


def length_table() -> str:
    """A drawn stream, short and long, at sync's rates."""
    rows = [r for r in first_task(rows_of("")) if r["rates"] == "of sync"]
    lines = []
    for data, stream in STREAMS.items():
        if stream.long_updates is None:
            continue
        here = [r for r in rows if r["data"] == data and float(r["optimizer_start"]) == 0]
        for updates in sorted({int(r["updates"]) for r in here if r["batch"] == str(stream.batch)}):
            of_length = [r for r in here if int(r["updates"]) == updates]
            sync = the(of_length, rows_late=0, dense_late=0)
            gaps = [number(the(of_length, rows_late=r, dense_late=0)) for r in (16, 64)]
            if sync is not None:
                auc = f"{float(sync['test_auc']):.4f}"
                lines.append([NAMES.get(data, data), f"{updates:,}", auc, *gaps])
    head = ["stream", "updates", "AUC of sync"]
    return markdown([*head, HEADS[16, 0], HEADS[64, 0]], lines)


HYPOTHESES = {
    "F1": "Where rows 16 late lose more than 2.0, the burstiest field alone fresh gives back at"
    " least half of it.",
    "F2": "Another field fresh in its place gives back less than a fifth.",
    "F3": "With a second pass rows 16 late lose less than half of what they lose with one.",
    "F4": "The larger b(4) of a field, the more its freshness gives back.",
    "F5": "The more lookups of a field miss at least half of their row's updates, times what the"
    " field is worth, the more its freshness gives back.",
}
"""What each hypothesis of the plan says, in whole sentences."""


def fresh_table() -> str:
    """One field fresh, all others late: what it gives back of what all of them late lose."""
    lines = []
    for row in first_task(rows_of("_fresh")):
        if row["seeds"] != row["seeds_planned"]:
            continue
        lines.append(
            [
                NAMES.get(row["data"], row["data"]),
                row["rows_late"],
                row["fresh"],
                number(row, "gap_of_all_late"),
                number(row),
                number(row, "gap_to_all_late"),
            ]
        )
    heads = ["rows late", "fresh field", "all late [1e-3]", "with it fresh [1e-3]", "given back"]
    return markdown(["stream", *heads], lines)


TAU_CELLS = ((1, 0), (2, 0), (4, 0), (16, 0), (39, 0), (64, 0), (39, 7))
TAUS = {
    ("time", "1", "own"): "one pass, time order",
    ("shuffled", "1", "own"): "one pass, shuffled",
    ("time", "2", "own"): "two passes",
    ("time", "4", "own"): "four passes",
    ("time", "1", "time"): "judged on the last fifth of all",
    ("time", "1", "user"): "judged on each user's last fifth",
}
"""What a line of the second plan says of order, passes and split."""


def tau_table() -> str:
    """The lateness that one takes, in both orders; passes, and another split."""
    rows, lines = first_task(rows_of("_tau")), []
    for data in (*STREAMS, WHOLE_TENNIS.key):
        for (order, passes, split), words in TAUS.items():
            own = [r for r in rows if (r["data"], r["order"]) == (data, order)
                   and (r["passes"], r["split"]) == (passes, split)]  # fmt: skip
            sync = the(own, rows_late=0, dense_late=0)
            cells = [the(own, rows_late=late, dense_late=dense) for late, dense in TAU_CELLS]
            whole = [one if one and one["seeds"] == one["seeds_planned"] else None for one in cells]
            if sync is not None and any(whole):
                auc = f"{float(sync['test_auc']):.4f}"
                lines.append([NAMES.get(data, data), words, auc, *(number(one) for one in whole)])
    late = ["1 late", "2 late", "4 late", "16 late", "39 late", "64 late", "39 late, dense 7"]
    return markdown(["stream", "how", "AUC of sync", *(f"{each} [1e-3]" for each in late)], lines)


FIELD_LINES = 6
"""Fields of a stream that the page shows: those that give back most, either way."""


def field_table() -> str:
    """The fields of each stream whose freshness changes most, beside what was foreseen of them."""
    lines = []
    rows = [r for r in rows_of("_fields") if r["seeds"] == r["seeds_planned"]]
    for data in STREAMS:
        mine = [r for r in rows if r["data"] == data]
        mine.sort(key=lambda row: -abs(float(row["given_back"])))
        for row in mine[:FIELD_LINES]:
            lines.append(
                [
                    NAMES.get(data, data),
                    row["field"],
                    f"{float(row['b_4']):.3f}",
                    f"{float(row['missed_half_16']):.3f}",
                    number(row, "worth"),
                    number(row, "given_back"),
                ]
            )
    heads = ["b(4)", "lookups that miss half", "worth [1e-3]", "given back [1e-3]"]
    return markdown(["stream", "fresh field", *heads], lines)


def hypothesis_table() -> str:
    """Those of both plans with their outcomes."""
    lines = [
        [r["hypothesis"], HYPOTHESES[r["hypothesis"]], f"**{r['outcome']}**", r["missing"]]
        for r in rows_of("_hypotheses")
        if r["outcome"]
    ]
    return markdown(["hypothesis", "what it says", "outcome", "not run yet"], lines)


def models_table() -> str:
    """By stream and model: its rates, AUC of sync, what late rows change, and how far that lies
    from the first model's change."""
    lines = []
    for row in read_rows(STORED / "models.csv"):
        rates = f"{float(row['row_lr']):g}, {float(row['dense_lr']):.3g}"
        if row["late_rates"] == "of its own":
            late = f"{float(row['late_row_lr']):g}, {float(row['late_dense_lr']):.3g}"
            rates = f"{rates}; late {late}"
        is_first = float(row["beside_first_half_width_95"]) == 0
        lines.append(
            [
                NAMES.get(row["data"], row["data"]),
                row["model"],
                rates,
                f"{float(row['sync_auc']):.4f}",
                number(row),
                "" if is_first else number(row, "beside_first"),
            ]
        )
    head = ["stream", "model", "learning rates of rows, of dense weights", "AUC of sync"]
    return markdown([*head, HEADS[16, 0], "minus mlp's"], lines)
