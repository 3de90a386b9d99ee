"""Paired ratios and the refusal of loaded windows, on which every claim of speed rests."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from scipy import stats

from experiments import result_cache
from experiments.benching import windows
from experiments.benching.windows import (
    Ratio,
    Window,
    drift,
    interleave,
    ratio_of,
    summarize,
    verdict,
)

OURS = [110.0, 130.0, 90.0, 150.0]
BASE = [100.0, 100.0, 95.0, 120.0]


def pairs(loaded: set[tuple[int, str]] = frozenset(), rounds: int = 4) -> list[Window]:
    """Four rounds, in each a window of `ours` and one of `base`; some of them loaded."""
    return [
        Window(r, name, value, 0.9 if (r, name) in loaded else 0.1, (r, name) not in loaded)
        for r in range(rounds)
        for name, value in (("ours", OURS[r]), ("base", BASE[r]))
    ]


def test_the_paired_ratio_is_a_paired_t_test_of_logarithms():
    found = ratio_of(pairs(), "ours", "base")
    test = stats.ttest_rel(np.log(OURS), np.log(BASE)).confidence_interval(0.95)
    assert found.mean == pytest.approx(math.exp(np.mean(np.log(OURS) - np.log(BASE))))
    assert found.low == pytest.approx(math.exp(test.low))
    assert found.high == pytest.approx(math.exp(test.high))
    assert (found.pairs, found.clean) == (4, True)


def test_windows_are_paired_by_round_and_not_by_place():
    mixed = pairs()
    mixed.reverse()
    mixed[0], mixed[5] = mixed[5], mixed[0]
    assert ratio_of(mixed, "ours", "base") == ratio_of(pairs(), "ours", "base")


@pytest.mark.parametrize("name", ["ours", "base"])
def test_a_pair_with_a_loaded_window_does_not_count(name):
    found = ratio_of(pairs({(3, name)}), "ours", "base")
    assert found.mean == pytest.approx((1.1 * 1.3 * 90 / 95) ** (1 / 3))
    assert (found.pairs, found.clean) == (3, True)


def test_with_fewer_than_three_quiet_pairs_all_count_and_the_ratio_says_so():
    found = ratio_of(pairs({(0, "ours"), (1, "base")}), "ours", "base")
    assert found.mean == pytest.approx((1.1 * 1.3 * 90 / 95 * 1.25) ** (1 / 4))
    assert (found.pairs, found.clean) == (4, False)


def test_a_summary_is_of_quiet_windows_where_there_are_three():
    found = summarize(pairs({(3, "ours")}), "ours")
    assert (found.median, found.low, found.high) == (110.0, 90.0, 130.0)
    assert (found.quiet, found.windows, found.clean) == (3, 4, True)
    assert found.foreign_cores == 0.1
    few = summarize(pairs({(3, "ours"), (2, "ours")}), "ours")
    assert (few.median, few.low, few.high) == (120.0, 90.0, 150.0)
    assert (few.quiet, few.clean) == (2, False)
    assert few.foreign_cores == pytest.approx(0.5), "the median of 0.1, 0.1, 0.9, 0.9"


@pytest.mark.parametrize(
    ("low", "high", "clean", "said"),
    [
        (1.40, 1.50, True, "met"),
        (1.39, 1.50, True, "not decided"),
        (1.30, 1.40, True, "not decided"),
        (1.30, 1.39, True, "MISSED"),
        (1.45, 1.50, False, "not decided, the machine was loaded (would be met)"),
    ],
)
def test_a_goal_is_met_only_by_the_whole_interval_on_a_quiet_machine(low, high, clean, said):
    assert verdict(Ratio((low * high) ** 0.5, low, high, 9, clean), goal=1.4) == said


class Loads:
    """Foreign loads as told in advance, in the place of the machine's."""

    def __init__(self, *cores: float) -> None:
        self.left = list(cores)

    def __call__(self) -> Loads:
        return self

    def __enter__(self) -> Loads:
        return self

    def __exit__(self, *_: object) -> None:
        self.cores = self.left.pop(0)


def test_every_candidate_is_measured_once_a_round_in_turn(monkeypatch):
    monkeypatch.setattr(windows, "ForeignLoad", Loads(*[0.0] * 6))
    order: list[str] = []
    candidates = {n: (lambda n=n: order.append(n) or float(len(order))) for n in ("a", "b")}
    found = interleave(candidates, 3, 0.15)
    assert order == ["a", "b", "a", "b", "a", "b"]
    assert [(w.round, w.name, w.value) for w in found] == [
        (0, "a", 1.0), (0, "b", 2.0), (1, "a", 3.0), (1, "b", 4.0), (2, "a", 5.0), (2, "b", 6.0),
    ]  # fmt: skip
    assert all(w.quiet for w in found)


def test_a_warm_up_is_one_measurement_of_each_that_does_not_count(monkeypatch):
    monkeypatch.setattr(windows, "ForeignLoad", Loads(0.0, 0.0))
    values = {"a": iter([100.0, 1.0]), "b": iter([100.0, 2.0])}
    candidates = {name: of.__next__ for name, of in values.items()}
    found = interleave(candidates, 1, 0.15, warm_up=True)
    assert [(w.name, w.value) for w in found] == [("a", 1.0), ("b", 2.0)]


def test_each_window_is_given_away_as_soon_as_it_is_there(monkeypatch):
    """What was measured before a candidate fails or a limit ends all is kept."""
    monkeypatch.setattr(windows, "ForeignLoad", Loads(0.0, 0.0))
    kept: list[float] = []
    with pytest.raises(ZeroDivisionError):
        candidates = {"a": lambda: 7.0, "b": lambda: 1 / 0}
        interleave(candidates, 1, 0.15, on_window=lambda w: kept.append(w.value))
    assert kept == [7.0]


def test_a_loaded_window_is_measured_once_more_and_then_kept_as_loaded(monkeypatch):
    monkeypatch.setattr(windows, "ForeignLoad", Loads(0.9, 0.15, 0.9, 0.16, 0.0))
    values = iter([1.0, 2.0, 3.0, 4.0, 5.0])
    found = interleave({"a": lambda: next(values)}, 3, most_foreign_cores=0.15)
    assert [(w.value, w.foreign_cores, w.quiet) for w in found] == [
        (2.0, 0.15, True), (4.0, 0.16, False), (5.0, 0.0, True),
    ]  # fmt: skip


def foreign(monkeypatch, busy: tuple[float | None, float | None], own=(10.0, 11.0)) -> float:
    """The load over two seconds of wall time with these CPU seconds before and after."""
    for name, values in (("_busy_s", busy), ("cpu_s_of_this", own)):
        monkeypatch.setattr(windows, name, iter(values).__next__)
    monkeypatch.setattr(windows.time, "perf_counter", iter((100.0, 102.0)).__next__)
    monkeypatch.setattr(windows.os, "getloadavg", lambda: (2.5, 9.0, 9.0))
    with windows.ForeignLoad() as load:
        pass
    return load.cores


@pytest.mark.parametrize(
    ("busy", "cores"),
    [((50.0, 54.0), (4.0 - 1.0) / 2.0), ((50.0, 50.5), 0.0), ((None, None), 1.5)],
)
def test_foreign_load_is_what_others_used_a_second_or_else_the_load_average(
    monkeypatch, busy, cores
):
    assert foreign(monkeypatch, busy) == pytest.approx(cores)


def test_busy_seconds_leave_out_idling_and_waiting(monkeypatch, tmp_path):
    counters = tmp_path / "stat"
    counters.write_text("cpu  100 10 50 100000 7777 3 2 0 0 0\ncpu0 1 1 1 1 1 1 1 0 0 0\n")
    monkeypatch.setattr(windows, "Path", lambda _: counters)
    monkeypatch.setattr(windows, "_TICKS_PER_S", 100)
    assert windows._busy_s() == pytest.approx(1.65)
    counters.unlink()
    assert windows._busy_s() is None


WORK = "while True: pass"


@pytest.mark.parametrize(
    "words", [WORK, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORK!r}])"],
    ids=["a child", "its child"],
)  # fmt: skip
def test_the_work_of_a_descendant_that_goes_on_is_our_own(words):
    before = windows.cpu_s_of_this()
    child = subprocess.Popen([sys.executable, "-c", words], start_new_session=True)
    try:
        ends_s = time.monotonic() + 120
        while windows.cpu_s_of_this() - before < 0.3:
            assert time.monotonic() < ends_s
            time.sleep(0.05)  # works nothing itself
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_a_process_that_ends_while_its_threads_are_listed_has_no_children(monkeypatch):
    """So a server that closes does not end the bench that counts its work."""
    read = []

    def gone(folder):
        read.append(folder)
        raise FileNotFoundError(2, "No such file or directory", folder)

    monkeypatch.setattr(os, "listdir", gone)
    monkeypatch.setattr(os, "scandir", gone)
    assert result_cache.children_of(os.getpid()) == []
    assert read


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([32, 31, 33, 30, 24, 18, 12, 8, 6], "its last third is 0.25 of its first"),
        ([10, 10, 10, 11, 12, 12, 13, 13, 13], "its last third is 1.30 of its first"),
        ([30, 33, 31, 29, 32, 30, 31, 32, 29], ""),
        ([32, 6], ""),
    ],
)
def test_a_candidate_that_becomes_slower_or_faster_is_said_to_drift(values, told):
    rounds = [Window(r, "ours", float(v), 0.0, True) for r, v in enumerate(values)]
    others = [Window(r, "base", 1.0, 0.0, True) for r in range(len(values))]
    found = drift([*others, *reversed(rounds)], "ours")
    assert told in found and bool(told) == bool(found)


def test_a_window_counts_the_pages_that_it_touches():
    def touch() -> float:
        return float(np.ones(8_000_000).sum())  # 64 MB of fresh pages

    (touching,) = interleave({"touch": touch}, 1, math.inf)
    (idle,) = interleave({"idle": lambda: 1.0}, 1, math.inf)
    assert touching.faults > idle.faults and touching.faults > 15  # huge pages: 2 MB each
