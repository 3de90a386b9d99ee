"""Trace, window rule, orders and staleness statistics, on timelines short enough to read."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_sim.base.files import atomic_write, held, remove_abandoned
from persia_sim.base.rules import printable
from persia_sim.base.staleness import staleness_in_pushes, staleness_in_steps, summary_of
from persia_sim.base.trace import ALL, Event, Kind, Trace
from persia_sim.base.vocabulary import ENDLESS, Mode
from persia_sim.base.window import Watermarks, constant_lag
from tests.persia_sim.oracles import constant_lag_trace, mean_by_shard

SHORT = {
    Kind.LOOKUP: "L",
    Kind.REFRESH: "R",
    Kind.PUSH: "P",
    Kind.DENSE_UPDATE: "D",
    Kind.DENSE_PULL: "<",
    Kind.DENSE_PUSH: ">",
    Kind.AVERAGE_READ: "r",
    Kind.AVERAGE_WRITE: "w",
}


def words(events) -> str:
    """`L02` is the lookup of rank 0, step 2; a rank ALL is left out."""
    return " ".join(
        f"{SHORT[Kind(e.kind)]}{'' if e.rank == ALL else e.rank}{e.step}" for e in events
    )


def order(mode: Mode, batches: int, **changes) -> str:
    return words(constant_lag(mode, has_batch=lambda k: k < batches, **changes))


def test_sync_reads_after_every_earlier_push():
    assert order(Mode.SYNC, 2, ranks=2) == "L00 L10 D0 P0 L01 L11 D1 P1"


def test_hybrid_with_lag_one_reads_one_step_late_and_drains_at_the_end():
    assert order(Mode.HYBRID, 3, ranks=1, tau=1) == "L00 D0 L01 D1 P0 L02 D2 P1 P2"


def test_a_synchronous_start_pushes_at_once_and_then_the_lag_rises():
    found = order(Mode.HYBRID, 5, ranks=1, tau=2, sync_steps=2)
    assert found == "L00 D0 P0 L01 D1 P1 L02 D2 L03 D3 L04 D4 P2 P3 P4"
    assert order(Mode.HYBRID, 4, ranks=1, tau=1, sync_steps=1, first=2) == "L02 D2 L03 D3 P2 P3"


def test_hybrid_on_arrival_pushes_rank_by_rank():
    found = order(Mode.HYBRID, 2, ranks=2, tau=1, merge_pushes=False)
    assert found == "L00 L10 D0 L01 L11 D1 P00 P10 P01 P11"


def test_lookahead_prefetches_and_refreshes_at_the_logical_step():
    found = order(Mode.LOOKAHEAD, 3, ranks=1, ahead=1)
    assert found == "L00 L01 R00 D0 P0 L02 R01 D1 P1 R02 D2 P2"


def test_async_keeps_one_batch_of_every_rank_in_flight():
    found = order(Mode.ASYNC, 4, ranks=2)
    assert found == "<00 L00 <10 L10 >00 P00 <01 L01 >10 P10 <11 L11 >01 P01 >11 P11"


def test_averaging_lets_every_rank_in_and_then_out():
    found = order(Mode.ASYNC_AVERAGING, 4, ranks=2, average_every=1)
    assert found == "L00 L10 >00 P00 L01 >10 P10 r00 r10 w00 w10 L11 >01 P01 >11 P11"


def test_an_order_that_goes_on_begins_with_nothing_in_flight():
    assert order(Mode.HYBRID, 4, ranks=1, tau=1, first=2) == "L02 D2 L03 D3 P2 P3"
    assert order(Mode.LOOKAHEAD, 5, ranks=1, ahead=1, first=3) == (
        "L03 L04 R03 D3 P3 R04 D4 P4"
    )  # fmt: skip
    # Batches 3 to 5 of two ranks: rank 1 begins with its step 1, rank 0 with its step 2.
    assert order(Mode.ASYNC, 6, ranks=2, tau=0, first=3) == (
        "<11 L11 <02 L02 >11 P11 <12 L12 >02 P02 >12 P12"
    )


def test_averaging_at_a_cut_happens_when_the_last_rank_goes_on():
    """As without the cut: rank 1 has trained two steps, rank 0 is in its next."""
    whole = order(Mode.ASYNC_AVERAGING, 6, ranks=2, average_every=2)
    assert "L02 >11 P11 r01 r11 w01 w11 L12" in whole
    rest = order(Mode.ASYNC_AVERAGING, 6, ranks=2, average_every=2, first=4)
    assert rest == "L02 r01 r11 w01 w11 L12 >02 P02 >12 P12"


@given(
    first=st.integers(0, 9),
    batches=st.integers(1, 9),
    ranks=st.integers(1, 4),
    tau=st.integers(0, 4),
    mode=st.sampled_from(Mode),
    start=st.integers(0, 18),
)
def test_two_legs_take_each_batch_once_as_one_leg_does(first, batches, ranks, tau, mode, start):
    def taken(begin, end):
        found = constant_lag(
            mode, ranks=ranks, has_batch=lambda k: k < end, tau=tau, average_every=3, first=begin,
            sync_steps=start,
        )  # fmt: skip
        kinds = (Kind.LOOKUP, Kind.PUSH, Kind.DENSE_UPDATE, Kind.DENSE_PUSH)
        return [(e.kind, e.rank, e.step) for e in found if e.kind in kinds]

    end = first + batches
    assert sorted(taken(0, first) + taken(first, end)) == sorted(taken(0, end))


def test_averaging_without_a_period_is_refused():
    with pytest.raises(ValueError, match="average_every >= 1"):
        constant_lag(Mode.ASYNC_AVERAGING, ranks=2, has_batch=lambda k: k < 4)


@given(
    mode=st.sampled_from(list(Mode)),
    ranks=st.integers(1, 4),
    batches=st.integers(0, 20),
    tau=st.integers(0, 5),
    ahead=st.integers(1, 5),
    merge=st.booleans(),
)
def test_every_order_reads_updates_and_pushes_each_batch_once(
    mode, ranks, batches, tau, ahead, merge
):
    events = list(
        constant_lag(
            mode,
            ranks=ranks,
            has_batch=lambda k: k < batches,
            tau=tau,
            ahead=ahead,
            merge_pushes=merge,
            average_every=2 if mode.averages_replicas else None,
        )
    )
    if mode.has_barrier:
        expected = [(r, s) for s in range(batches) for r in range(ranks)]
    else:
        expected = [(k % ranks, k // ranks) for k in range(batches)]
    reads = [(e.rank, e.step) for e in events if e.kind == Kind.LOOKUP]
    pushes = [
        (rank, e.step)
        for e in events
        if e.kind == Kind.PUSH
        for rank in (range(ranks) if e.rank == ALL else [e.rank])
    ]
    assert sorted(reads) == sorted(expected) == sorted(pushes)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"not a trace"])
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path, content):
    path = tmp_path / "foreign.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"foreign\.npz is not a trace"):
        Trace.load(path)


def test_a_trace_cannot_smuggle_objects(tmp_path):
    np.savez(tmp_path / "evil.npz", kind=np.array([print], dtype=object))
    with pytest.raises(ValueError, match=r"evil\.npz is damaged; record it again"):
        Trace.load(tmp_path / "evil.npz")


def test_watermarks_wait_for_the_slowest_rank():
    marks = Watermarks(ranks=2)
    marks.close(0, 0)
    marks.close(0, 2)  # out of order: step 1 is still open
    assert (marks.closed_steps(0), marks.closed_steps()) == (1, 0)
    assert marks.may_start(0, 2, tau=2)
    assert not marks.may_start(0, 3, tau=2)
    assert marks.may_start(0, 3, tau=2, per_rank=True)
    marks.finish(1, steps=0)
    assert marks.closed_steps() == 1


@given(
    first=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    extra=st.integers(0, 4),
    data=st.data(),
)
def test_watermarks_that_go_on_are_those_of_which_all_was_closed(first, extra, data):
    """Every question, while steps close in any order."""
    ranks = len(first)
    going_on, whole = Watermarks(ranks, first), Watermarks(ranks)
    for rank, steps in enumerate(first):
        for step in range(steps):
            whole.close(rank, step)
    rest = [(r, s) for r, steps in enumerate(first) for s in range(steps, steps + extra)]
    for rank, step in data.draw(st.permutations(rest)):
        for marks in (going_on, whole):
            marks.close(rank, step)
        for tau in range(3):
            for per_rank in (False, True):
                asked = (rank, step + 1, tau, per_rank)
                assert going_on.may_start(*asked) == whole.may_start(*asked)
    going_on.finish(0, first[0] + extra)
    whole.finish(0, first[0] + extra)
    assert going_on.closed_steps() == whole.closed_steps()


def test_closing_a_step_twice_is_an_error():
    marks = Watermarks(ranks=1)
    marks.close(0, 0)
    with pytest.raises(ValueError, match="rank 0, step 0 is already closed"):
        marks.close(0, 0)


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 4))
@pytest.mark.law5
def test_the_window_rule_is_its_definition(ranks, tau):
    """Close steps in any interleaving of ranks; compare with the sentence of the contract."""
    marks, closed = Watermarks(ranks=3), {0: 0, 1: 0, 2: 0}
    for rank in ranks:
        marks.close(rank, closed[rank])
        closed[rank] += 1
        for step in range(8):
            all_closed = all(count >= step - tau for count in closed.values())
            assert marks.may_start(0, step, tau) == all_closed


def test_missing_steps_of_a_timeline_by_hand():
    """Step 2 reads before the pushes of 0 and 1 (two missing, oldest two back); 3 misses only 2."""
    events = [Event(Kind.LOOKUP, 0, s, 0, v) for s, v in ((0, 0), (1, 0), (2, 0))]
    events += [Event(Kind.PUSH, 0, 0, 0, 0), Event(Kind.PUSH, 0, 1, 0, 1)]
    events += [Event(Kind.LOOKUP, 0, 3, 0, 2)]
    events += [Event(Kind.PUSH, 0, 2, 0, 2), Event(Kind.PUSH, 0, 3, 0, 3)]
    trace = Trace.of(events, mode="hybrid", ranks=1)
    steps = staleness_in_steps(trace)
    assert steps.missing_steps.tolist() == [0, 1, 2, 1]
    assert steps.oldest_missing_steps.tolist() == [0, 1, 2, 1]
    pushes = staleness_in_pushes(trace)
    assert pushes.missed_pushes.tolist() == [0, 1, 2, 1]
    assert pushes.in_flight.tolist() == [2, 1, 1, 0]
    assert mean_by_shard(pushes) == {0: (1.0, 1.0)}


def test_another_ranks_open_push_counts_in_barrier_modes_and_not_in_async():
    events = [Event(Kind.LOOKUP, rank, 0, 0) for rank in (0, 1)]
    events += [Event(Kind.PUSH, 0, 0, 0), Event(Kind.LOOKUP, 0, 1, 0)]
    events += [Event(Kind.PUSH, 1, 0, 0), Event(Kind.PUSH, 0, 1, 0)]
    hybrid = staleness_in_steps(Trace.of(events, mode="hybrid", ranks=2))
    own = staleness_in_steps(Trace.of(events, mode="async", ranks=2))
    assert hybrid.missing_steps.max() == 1
    assert own.missing_steps.max() == 0


def test_an_order_has_no_versions_to_count_pushes_with():
    found = summary_of(constant_lag_trace(Mode.HYBRID, ranks=2, steps=10, tau=3))
    assert (found.max_steps, found.oldest_steps, found.mean_pushes) == (3, 3, None)


def test_a_step_that_any_shard_missed_is_missing_once():
    """Shard 0 misses step 0, shard 1 misses step 1: two steps are missing, the older two back."""
    pushes = [Event(Kind.PUSH, 0, 0, 1, 0), Event(Kind.PUSH, 0, 1, 0, 0)]
    reads = [Event(Kind.LOOKUP, 0, 2, 0, 1), Event(Kind.LOOKUP, 0, 2, 1, 1)]
    late = [Event(Kind.PUSH, 0, 0, 0, 1), Event(Kind.PUSH, 0, 1, 1, 1)]
    found = staleness_in_steps(Trace.of(pushes + reads + late, mode="hybrid", ranks=1))
    assert found.missing_steps.tolist() == [2]
    assert found.oldest_missing_steps.tolist() == [2]


def test_the_slowest_rank_that_still_has_steps_decides():
    """Against the definition: a rank that is through counts as if it had closed every step."""
    marks = Watermarks(ranks=3)
    ends, closed = (2, 5, 3), [0, 0, 0]
    for rank, steps in enumerate(ends):
        marks.finish(rank, steps)
    for rank in (1, 0, 1, 2, 0, 2, 1, 2, 1, 1):
        marks.close(rank, closed[rank])
        closed[rank] += 1
        open_ranks = [n for n, end in zip(closed, ends, strict=True) if n < end]
        assert marks.closed_steps() == (min(open_ranks) if open_ranks else ENDLESS)


@pytest.mark.parametrize(
    ("mode", "by_default", "unwanted"),
    [
        (Mode.SYNC, True, True),
        (Mode.LOOKAHEAD, True, True),
        (Mode.RAW_HYBRID, True, False),
        (Mode.HYBRID, True, False),
        (Mode.ASYNC, False, False),
        (Mode.ASYNC_AVERAGING, False, False),
    ],
)
def test_merging_is_a_choice_of_raw_hybrid_and_hybrid(mode, by_default, unwanted):
    assert (mode.merges(None), mode.merges(False)) == (by_default, unwanted)
    assert mode.may_merge == (by_default != unwanted)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "kept"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.write(b"half of the new")
        raise RuntimeError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with atomic_write(path) as file:
        file.write(b"new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    """The kernel names no file when its disk is full, and nobody knows the unfinished one."""

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError) as told, atomic_write(tmp_path / "absent" / "file"):
        pass
    assert told.value.filename == str(tmp_path / "absent" / "file")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as told, atomic_write(tmp_path / "file"):
        pass
    assert told.value.filename == str(tmp_path / "file") and not list(tmp_path.iterdir())


@given(st.text())
def test_what_is_printed_of_a_file_never_steers_a_terminal(text):
    shown = printable(text)
    assert shown.isprintable()
    shown.encode()  # no lone surrogate
    assert shown == text or not text.isprintable()


KILLED = """
import os, signal, sys
from pathlib import Path
from persia_sim.base.files import atomic_write, held, remove_abandoned
with atomic_write(Path(sys.argv[1])) as file:
    file.write(b"a part")
    file.flush()
    print("writes", flush=True)
    if sys.argv[2] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


def writer(path: Path, does: str) -> subprocess.Popen[bytes]:
    """A process in the middle of the file."""
    line = [sys.executable, "-c", KILLED, str(path), does]
    found = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert found.stdout.readline() == b"writes\n"
    return found


def test_what_a_killed_writer_left_goes_when_the_file_is_written_again(tmp_path):
    """And nothing that somebody still writes, nor another file's, nor what only looks alike."""
    path, other = tmp_path / "trace.npz", tmp_path / "trace.npz.other"
    writer(path, "dies").communicate()
    writer(other, "dies").communicate()
    alive = writer(path, "waits")
    (own := tmp_path / "trace.npz.12.of mine.tmp").touch()
    left = {file for file in tmp_path.iterdir() if file != own}
    assert len(left) == 3
    for file in (*left, own):
        os.utime(file, (0, 0))  # one that was just made may not be held yet
    with atomic_write(path) as file:
        file.write(b"whole")
    found = set(tmp_path.iterdir()) - {path, own}
    assert sorted(file.name.startswith("trace.npz.other.") for file in found) == [False, True]
    alive.communicate(b"")
    assert alive.returncode == 0, "its file was still there"
    remove_abandoned(tmp_path)
    assert set(tmp_path.iterdir()) == {path, own}


def test_a_folder_that_somebody_fills_is_not_abandoned(tmp_path):
    for name in (".model.7.0123abcd.tmp", ".other.7.0123abcd.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows").touch()
        os.utime(tmp_path / name, (0, 0))
    with held(tmp_path / ".model.7.0123abcd.tmp"):
        remove_abandoned(tmp_path)
        assert [entry.name for entry in tmp_path.iterdir()] == [".model.7.0123abcd.tmp"]
    remove_abandoned(tmp_path)
    assert not list(tmp_path.iterdir())
