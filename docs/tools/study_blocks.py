"""Tables of the studies that train at the rates of the demo."""

from __future__ import annotations

from page_tables import markdown, number, the

from experiments.paper.record import STORED, Row, read_rows


def _lines_of(file: str) -> list[Row]:
    """The lines of a study that are of the label click."""
    return [row for row in read_rows(STORED / file) if row["task"] == "click"]


def demo_table() -> str:
    """What each lateness costs at the rates of the demo."""
    lines = [
        [
            row["line"],
            row["rows_late"],
            row["dense_late"],
            f"{float(row['auc']):.4f}",
            number(row, "gap"),
        ]
        for row in _lines_of("demo.csv")
    ]
    return markdown(["line", "rows late", "dense late", "test AUC", "gap to sync [1e-3]"], lines)


_TREATMENTS = {
    "synchronous start": "synchronous start, 300 steps",
    "dense update late, too": "dense update 1 step late, too",
    "delay compensation": "delay compensation with strength 128: corrects a gradient by how far its"
    " row has moved since it was read",
    "row rate by steps missed": "row rate divided by the steps missed",
    "rows as float16": "rows that travel as float16 (`--wire half`)",
}
"""Treatment of the study -> what the page calls it."""


def treatments_table() -> str:
    """What each treatment changes: the gap to sync without one, then differences to that."""
    rows = _lines_of("treatments.csv")
    settings = ("hybrid tau 16", "hybrid tau 64", "async tau 4")
    lines = [["none: gap to sync", *(number(the(rows, line=one), "gap") for one in settings)]]
    for treatment, words in _TREATMENTS.items():
        found = (the(rows, line=f"{one}, {treatment}", versus=one) for one in settings)
        lines.append([words, *(number(row, "gap") or "not tried" for row in found)])
    heads = ["hybrid, rows 16 late", "hybrid, rows 64 late", "async, rows 39 and dense 7 late"]
    return markdown(["treatment", *(f"{head} [1e-3]" for head in heads)], lines)


_PRESETS = {
    "ascend-prefetch6": "Ascend's prefetching by six batches (exact)",
    "torchrec-semisync": "TorchRec's semi-synchronous pipeline",
    "torchrec-semisync-stash": "TorchRec's semi-synchronous pipeline with stashed gradients (the"
    " dense update is one step late, too)",
    "tfra-half-sync": "TFRA's half-synchronous mode",
    "persia-default": "PERSIA's defaults",
    "deeprec-async": "DeepRec's async, at tau 4",
}
"""Preset -> what it stands for."""


def presets_table() -> str:
    """The gap to sync of each preset, which makes rows as late as another system does."""
    lines = []
    for row in _lines_of("treatments.csv"):
        if row["line"] in _PRESETS:
            late = [row["rows_late"], row["dense_late"]]
            lines.append([_PRESETS[row["line"]], *late, number(row, "gap")])
    return markdown(["as run by", "rows late", "dense weights late", "gap to sync [1e-3]"], lines)
