"""Which modes and bounds are compared on a data set, and the points of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.gap.data_sets import FIXED, RANKS, Found, Rates
from experiments.gaps import SYNC, Setting
from experiments.paired import setting_point
from experiments.points import Point, data_sha256
from persia_sim.words.vocabulary import Mode

EQUAL = {Mode.LOOKAHEAD: Mode.SYNC, Mode.RAW_HYBRID: Mode.HYBRID}
"""By law 2 lookahead has the bytes of sync; raw_hybrid and hybrid differ in when the dense weights
travel, which the lag executor has no clock for. One seed of each is run as a check."""


def settings_of(
    found: Found, modes: Sequence[Mode], taus: Sequence[int]
) -> tuple[list[Setting], list[str]]:
    """Every mode and bound for the data set, sync first, and a line for each that is left out.

    Modes that are equal to another by `EQUAL` are no setting of their own. Async has tau 0, too:
    its rows are written on arrival and its dense weights late even then. A window that is as long
    as the run is left out: nothing would be read before the end.
    """
    chosen: list[Setting] = [SYNC]
    left_out = []
    for mode in modes:
        if mode is Mode.SYNC or mode in EQUAL:
            continue
        for tau in (*(() if mode.has_barrier else (0,)), *sorted(set(taus) - {0})):
            window = tau * (1 if mode.has_barrier else RANKS)
            if window >= found.steps:
                left_out.append(
                    f"{found.data.name}: {mode} tau {tau} is left out, its window of {window} dense"
                    f" updates is as long as the run ({found.steps})"
                )
            else:
                chosen.append((str(mode), tau))
    return chosen, left_out


def checks_of(settings: Sequence[Setting], modes: Sequence[Mode]) -> list[tuple[Setting, Setting]]:
    """Settings that must equal another: lookahead with sync, raw_hybrid with hybrid's last tau."""
    pairs: list[tuple[Setting, Setting]] = []
    if Mode.LOOKAHEAD in modes:
        pairs.append(((str(Mode.LOOKAHEAD), 0), SYNC))
    late = [tau for mode, tau in settings if mode == Mode.HYBRID]
    if Mode.RAW_HYBRID in modes and late:
        pairs.append(((str(Mode.RAW_HYBRID), late[-1]), (str(Mode.HYBRID), late[-1])))
    return pairs


def points_of(
    found: Found,
    settings: Sequence[Setting],
    seeds: Sequence[int],
    *,
    data_dir: Path | None,
    samples: int | None,
    test_rows: int | None,
    rates: Mapping[Setting, Rates] | None = None,
    snapshots: int = 0,
) -> list[Point]:
    """A run on the whole training part, judged on the test part, per seed and setting."""
    points = []
    checksum = ""
    for seed in seeds:
        for setting in settings:
            base = found.data.config(
                data_dir=data_dir,
                samples=samples,
                test_rows=test_rows,
                rates=FIXED if rates is None else rates[setting],
                snapshots=snapshots,
                train_rows=found.train_rows,
            )
            checksum = checksum or data_sha256(base)
            points.append(setting_point(base, setting, seed, checksum, f"{found.data.label}-"))
    return points
