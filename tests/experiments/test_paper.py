"""The paper's claims: every number of ours comes from a stored table; the command runs them all."""

from __future__ import annotations

import base64
import csv
import importlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments.__main__ import main, module_of
from experiments.catalogue import PIECES, STUDIES, Study, chosen
from experiments.paper.claims import (
    PAIRED,
    Claim,
    Number,
    answers,
    markdown,
    read_claims,
    screen,
    verdict,
)
from experiments.paper.record import STORED, read_rows
from persia_sim.base.command_line import read_options

ANSWERS = answers(Path("no run at all"))
BY_CELLS = {(a.claim.value, a.claim.against): a for a in ANSWERS if a.claim.file == PAIRED}


def the_claim(**changes) -> Claim:
    return replace(read_claims()[0], **changes)


@pytest.mark.parametrize("claim", read_claims(), ids=lambda claim: claim.claim[:40])
def test_a_claim_names_a_stored_table_and_a_command_that_makes_it(claim, tmp_path):
    if not claim.file:
        assert not claim.command and not claim.value
        return
    assert (STORED / claim.file).is_file()
    name, *words = claim.command.split()
    options = importlib.import_module(module_of(name)).Options
    read_options(options, [*words, "--out", str(tmp_path)], name)
    assert claim.file in (*STUDIES[name].csv, PAIRED) and claim.low < claim.high


def test_every_claim_has_a_number_of_ours_or_says_which_run_it_lacks():
    lacking = {a.claim.claim: a.lacks for a in ANSWERS if not a.here}
    private, untrained = "the paper's data, which are private", "39/0 late beside 39/7"
    assert private in lacking.values()
    assert set(lacking.values()) <= {private, f"runs of rows / dense {untrained}"}
    assert all(not a.lacks and np.isfinite([n.value for n in a.here]).all()
               for a in ANSWERS if a.claim.claim not in lacking)  # fmt: skip
    for text in (screen(ANSWERS), markdown(ANSWERS)):
        assert all(a.claim.claim in text for a in ANSWERS)
        assert all(why in text for why in lacking.values())


def test_gaps_to_sync_are_those_of_the_stored_table_of_the_study():
    """To every digit: by another road through the same runs."""
    table = {}
    for row in read_rows(STORED / "lateness.csv"):
        if row["chosen"] == "True" and row["order"] == "time" and row["optimizer_start"] == "0.0":
            cell = f"{row['rows_late']}/{row['dense_late']}"
            label = f"{row['data']}, {row['task']}, {row['window']}"
            table[cell, label] = row
    for cells in (("16/0", "0/0"), ("7/7", "0/0"), ("39/7", "0/0")):
        assert len(BY_CELLS[cells].here) >= 5
        for number in BY_CELLS[cells].here:
            row = table[cells[0], number.label]
            gap, half = (1e3 * float(row[f"gap_to_sync{end}"]) for end in ("", "_half_width_95"))
            assert number.value == pytest.approx(gap, abs=1e-9)
            assert (number.high - number.low) / 2 == pytest.approx(half, rel=1e-9)
            assert number.seeds == int(row["seeds"])


def paired(label: str, cell: tuple[str, str], other: tuple[str, str]) -> tuple[float, float]:
    """Mean and half width of the 95 % interval of one cell minus another, in thousandths, from the
    stored files alone: the variance over seeds of their mean, and the part of the users' sums that
    all seeds share; degrees of freedom after Satterthwaite, where only the first is estimated."""
    data, task, window = label.split(", ")
    rates = {}
    for row in read_rows(STORED / "lateness.csv"):
        place = row["data"], row["window"], row["order"], row["optimizer_start"], row["chosen"]
        if place == (data, window, "time", "0.0", "True"):
            rates[row["rows_late"], row["dense_late"]] = row["row_lr"], row["lr"], row["batch"]

    # By seed the score of each side, and what every group of users adds to it.
    csv.field_size_limit(10**9)
    sums = {(r["hash"], r["task"]): r["sums"] for r in read_rows(STORED / "lateness_users.csv")}
    sides = []
    for late in (cell, other):
        wanted = (data, "time", window, "0.0", *late)
        of_seed = {}
        for row in read_rows(STORED / PAIRED):
            place = tuple(row[n] for n in ("stream", "order", "window", "start", "rows_late",
                                           "dense_late"))  # fmt: skip
            if place != wanted or (row["row_lr"], row["dense_lr"], row["batch"]) != rates[late]:
                continue
            score = dict(pair.split("=") for pair in row["auc"].split(";"))[task]
            users = np.frombuffer(base64.b64decode(sums[row["hash"], task]), np.float16)
            of_seed[row["seed"]] = 1e3 * float(score), users.astype(float)
        sides.append(of_seed)

    seeds = sorted(set(sides[0]) & set(sides[1]))
    gaps = np.array([sides[0][seed][0] - sides[1][seed][0] for seed in seeds])
    users = np.array([sides[0][seed][1] - sides[1][seed][1] for seed in seeds])
    n, groups = users.shape
    of_seeds = gaps.var(ddof=1) / n
    products = users @ users.T * groups / (groups - 1)
    of_users = max(0.0, (products.sum() - np.trace(products)) / (n * (n - 1)))
    freedom = (n - 1) * ((of_seeds + of_users) / of_seeds) ** 2
    return gaps.mean(), stats.t.ppf(0.975, freedom) * math.sqrt(of_seeds + of_users)


@pytest.mark.parametrize(
    ("cells", "label"),
    [
        (("39/7", "7/7"), "movielens-latest-small-2016, label, test"),
        (("39/7", "7/7"), "kuairand-pure-14d, click, test"),
        (("39/7", "7/7"), "kuairand-pure-14d, long_view, test"),
        (("39/7", "7/7"), "tennis, label, test"),
        (("7/0", "7/7"), "movielens-latest-small-2016, label, test"),
        (("7/0", "7/7"), "oulad-assessments, label, origin-1"),
        (("7/0", "7/7"), "tennis, label, origin-2"),
    ],
)
def test_two_modes_are_compared_over_the_same_seeds_and_users(cells, label):
    [number] = [n for n in BY_CELLS[cells].here if n.label == label]
    cell, other = (tuple(text.split("/")) for text in cells)
    mean, half_width = paired(label, cell, other)
    assert number.value == pytest.approx(mean, abs=1e-6)
    assert (number.high - number.low) / 2 == pytest.approx(half_width, rel=1e-3)


def test_pairing_decides_what_two_separate_gaps_leave_open():
    """The gaps to sync of both are wide, as users differ; those users are the same in both."""
    [both] = [n for n in BY_CELLS["39/7", "7/7"].here if n.label.startswith("movielens")]
    apart = [n for cell in ("39/7", "7/7") for n in BY_CELLS[cell, "0/0"].here
             if n.label.startswith("movielens")]  # fmt: skip
    as_if_apart = math.hypot(*((n.high - n.low) / 2 for n in apart))
    assert (both.high - both.low) / 2 < as_if_apart / 3 and both.high < 0


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(-0.9, 0.2, "inside"), (-1.1, 0.2, "open"), (-3.0, -1.1, "outside"), (math.nan, 1.0, "open")],
)
def test_a_verdict_is_by_the_whole_interval(low, high, word):
    number = Number(label="", value=0.0, low=low, high=high)
    claim = the_claim(low=-1.0, high=math.inf)
    assert verdict(claim, number) == word
    assert verdict(claim, replace(number, is_fitted=True)) == "fitted"


def test_a_throughput_that_was_fitted_to_the_papers_own_is_no_evidence():
    of_rates = [a for a in ANSWERS if a.claim.file.startswith("scale_")]
    assert of_rates and all(word == "fitted" for a in of_rates for _, word in a.judged)
    rows = {(r["series"], r["gpus"]): r for r in read_rows(STORED / "scale_workers.csv")}
    ours, sync = (rows[f"kwai-video {mode}", "64"] for mode in ("hybrid", "sync"))
    [answer] = [a for a in of_rates if a.claim.paper == "2.6" and "Kwai" in a.claim.claim]
    for numbers, column in ((answer.here, "model"), (answer.plots, "published")):
        expected = float(ours[column]) / float(sync[column])
        assert [n.value for n in numbers] == [pytest.approx(expected)]


def test_a_table_of_this_run_counts_before_the_stored_one(tmp_path):
    rows = read_rows(STORED / "scale_workers.csv")
    for row in rows:
        if row["series"] == "kwai-video hybrid":
            row["model"] = str(2 * float(row["model"]))
    (tmp_path / "scale").mkdir()
    lines = [",".join(rows[0]), *(",".join(f'"{x}"' for x in row.values()) for row in rows)]
    (tmp_path / "scale" / "scale_workers.csv").write_text("\n".join(lines))
    fresh, stored = (
        next(a for a in found if a.claim.paper == "2.6") for found in (answers(tmp_path), ANSWERS)
    )
    assert fresh.here[0].value == pytest.approx(2 * stored.here[0].value)
    assert "scale_workers.csv (of this run)" in screen([fresh])


# The pieces, and the command.

GOOD = Study(name="ablation", says="-", minutes=1, title="Good",
             quick="--places Kwai --ranks 2 --steps 8")  # fmt: skip
BAD = Study(name="scale", says="-", minutes=1, title="Bad",
            quick="--steps 7")  # fmt: skip


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.name)
def test_a_piece_is_a_study_whose_options_are_accepted(piece, tmp_path):
    options = importlib.import_module(module_of(piece.name)).Options
    assert piece.name in STUDIES and piece.caption and piece.csv
    for size in ("quick", "full"):
        words = [
            *filter(None, [piece.file]),
            *piece.arguments(size),
            "--out",
            str(tmp_path / "out"),
        ]
        read_options(options, words, piece.name)


def test_pieces_and_their_tables_have_names_of_their_own():
    assert len({piece.name for piece in PIECES}) == len(PIECES)
    tables = [name for piece in PIECES for name in piece.csv]
    assert len(set(tables)) == len(tables)


def test_the_quick_report_is_planned_for_under_20_minutes():
    assert sum(piece.minutes_of("quick") for piece in PIECES) < 20


def test_pieces_are_chosen_in_the_order_of_the_report():
    first, last = PIECES[0].name, PIECES[-1].name
    assert [piece.name for piece in chosen([last, first])] == [first, last]
    assert chosen([]) == list(PIECES)
    with pytest.raises(ValueError, match=r"only must name pieces \(.*demo.*\), got 'dmeo'"):
        chosen(["dmeo"])


@pytest.mark.long
@pytest.mark.multiproc
def test_a_failed_piece_stops_no_other_and_the_claims_are_printed(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("experiments.studies.paper.chosen", lambda only: [BAD, GOOD])
    assert main(["paper", "--out", str(tmp_path)]) == 2
    told = capfd.readouterr()
    assert "steps must be >= 8, got 7" in told.err
    assert "error: 1 of 2 pieces failed (scale)" in told.err
    assert (tmp_path / GOOD.name / GOOD.csv[0]).is_file()
    assert told.out.endswith(f"{screen(answers(tmp_path))}\n")


def test_a_dry_run_prints_the_commands_and_runs_none(tmp_path, capsys):
    words = ["paper", "--dry-run", "--size", "full", "--only", "demo", "--out", str(tmp_path / "a")]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert told.startswith("1 pieces, some 4 minutes")
    assert f"persia-experiments demo --out {tmp_path / 'a' / 'demo'}" in told
    assert not (tmp_path / "a").exists()
