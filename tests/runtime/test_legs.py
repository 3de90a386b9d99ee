"""A run in legs: the stream is cut where nobody is in flight, and each sample is trained once."""

from __future__ import annotations

import threading
import time
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_sim.base.vocabulary import Mode
from runtime.config import DataConfig
from runtime.data.source import rebatch
from runtime.hosts.rank_process import LegWatch
from runtime.rank.feed import Feed, StepEnds, stream_from, training_stream
from runtime.rank.progress import Thinned
from runtime.stop import Stop
from tests.runtime.worlds import ArraySource, config

SAMPLES = 100


def numbered(samples=SAMPLES) -> ArraySource:
    source = ArraySource(samples, seed=4)
    source._all.dense[:, 0] = np.arange(samples)
    return source


def numbers(batch) -> list[int]:
    return batch.dense[:, 0].astype(int).tolist()


def feed_of(ranks, barrier, samples=0, **changes):
    chosen = config(ranks=ranks, mode=Mode.SYNC if barrier else Mode.ASYNC, **changes)
    first, stream = stream_from(chosen, numbered(), samples)
    return Feed(stream, ranks, barrier, Stop(), first)


def train_leg(feed: Feed, ranks: int) -> list[int]:
    """All batches of a leg, one rank after the other as far as it gets; the sample numbers."""
    found = []
    for rank, step in enumerate(feed.first_steps()):
        while (work := feed.take(rank, step)) is not None:
            found += numbers(work.batch)
            step += 1
    return found


@pytest.mark.parametrize("barrier", [True, False])
def test_legs_one_after_the_other_give_the_whole_stream(barrier):
    feed = feed_of(3, barrier, batch=8)
    cuts = []
    seen = []
    for end in (5, 6, 11, None):
        feed.begin_leg(end)
        seen.append(sorted(train_leg(feed, 3)))
        cuts.append(feed.next_number)
    assert list(chain(*seen)) == list(range(SAMPLES))
    assert [len(leg) for leg in seen] == [40, 8, 40, 12]
    assert cuts == [5, 6, 11, 13]
    assert feed.is_at_the_end()


def test_the_first_steps_of_a_leg_are_those_behind_its_cut():
    feed = feed_of(3, False, batch=8)
    feed.begin_leg(5)
    train_leg(feed, 3)
    feed.begin_leg(None)
    assert feed.first_steps() == [2, 2, 1]  # batches 6, 7 and 5
    assert numbers(feed.take(2, 1).batch) == list(range(40, 48))


@pytest.mark.parametrize("barrier", [True, False])
def test_a_leg_that_ends_early_gives_slower_ranks_what_faster_ones_made_due(barrier):
    asked = False
    feed = feed_of(2, barrier, batch=4)
    feed.begin_leg(20, lambda: asked)
    taken = {0: [], 1: []}
    for step in range(4):
        taken[0] += numbers(feed.take(0, step).batch)
    asked = True
    assert feed.take(0, 4) is None
    step = 0
    while (work := feed.take(1, step)) is not None:
        taken[1] += numbers(work.batch)
        step += 1
    # Barrier: four steps of four samples. Async: rank 0 has batches 0, 2, 4 and 6, so 1, 3, 5 go.
    cut = 16 if barrier else 28
    assert sorted(taken[0] + taken[1]) == list(range(cut))
    assert feed.next_number == cut // 4
    asked = False
    feed.begin_leg(None)
    assert sorted(train_leg(feed, 2)) == list(range(cut, SAMPLES))


def test_ranks_that_race_for_the_end_of_a_leg_stop_at_one_cut():
    asked = threading.Event()
    feed = feed_of(4, True, batch=4)
    feed.begin_leg(None, asked.is_set)
    steps = [0] * 4

    def rank(own):
        while feed.take(own, steps[own]) is not None:
            if steps[own] == 12:
                asked.wait(60)  # a slow rank asks, too, before all is over
            steps[own] += 1
            time.sleep(0.001)
            if own == 2 and steps[own] == 6:
                asked.set()

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert set(steps) == {feed.next_number} and 6 <= steps[0] < 25


class Meeting:
    """What `RankGroup` does for the ranks of a leg, among threads of one process."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._told: list[str] = []
        self.said = threading.Event()
        self.agrees = [threading.Event() for _ in range(ranks)]

    def as_rank(self, rank: int) -> SimpleNamespace:
        return SimpleNamespace(
            say=lambda name: self.said.set(),
            is_announced=lambda name: self.said.is_set(),
            gather=lambda name, text, stop: self._gather(rank, text),
            fail=pytest.fail,
        )

    def _gather(self, rank: int, text: str) -> list[str]:
        self.agrees[rank].set()
        self._told.append(text)
        self._barrier.wait(60)
        return self._told


class OneLoader:
    """Gives each chunk to both processes, and waits for one that is two chunks behind."""

    def __init__(self) -> None:
        self._taken, self._changed = [0, 0], threading.Condition()
        self.waits = threading.Event()

    def chunks(self, process: int, batches):
        for batch in batches:
            with self._changed:
                if self._taken[process] == self._taken[1 - process] + 2:
                    self.waits.set()
                    while self._taken[process] == self._taken[1 - process] + 2:
                        assert self._changed.wait(60)
                self._taken[process] += 1
                self._changed.notify_all()
            yield batch


@pytest.mark.parametrize("chunk", [4, 2, 1])
@pytest.mark.law9
@pytest.mark.law12
def test_a_leg_ends_while_a_loader_waits_for_the_slower_of_two_processes(chunk):
    """async: the fast one waits for a chunk, which comes when the slow one has taken its own."""
    loader, meeting = OneLoader(), Meeting(2)
    taken: list[list[int]] = [[], []]
    feeds, watches = [], []
    for rank in (0, 1):
        chosen = config(ranks=2, mode=Mode.ASYNC, batch=4)
        stream = rebatch(loader.chunks(rank, rebatch(numbered().chunks("train"), chunk)), 4)
        feeds.append(Feed(stream, chosen.sync.ranks, False, Stop(), local_ranks=[rank]))
        feeds[rank].begin_leg(None)

    def train(rank: int) -> None:
        step = 0
        while (work := feeds[rank].take(rank, step)) is not None:
            taken[rank] += numbers(work.batch)
            step += 1

    threads = [threading.Thread(target=train, args=(r,), daemon=True) for r in (0, 1)]
    threads[0].start()
    assert loader.waits.wait(60)
    for rank in (0, 1):
        watches.append(LegWatch(meeting.as_rank(rank), 0, feeds[rank], lambda: True))
    assert meeting.agrees[1].wait(60)
    threads[1].start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank waits for ever"
    cut = 4 * feeds[0].next_number
    assert feeds[1].next_number == feeds[0].next_number
    assert sorted(taken[0] + taken[1]) == list(range(cut))
    for watch in watches:
        watch.over()


STEPS_OF_24 = [*range(0, 100, 24), *range(100, 200, 24)]
"""The first samples of the steps of two passes over 100, each with a short one at its end."""


@given(
    cursor=st.integers(0, 220),
    ranks=st.integers(1, 5),
    match=st.sampled_from(["update", "global"]),
    shuffle=st.booleans(),
)
def test_the_stream_goes_on_behind_any_sample_whatever_cuts_it(cursor, ranks, match, shuffle):
    data = DataConfig(epochs=2, shuffle=shuffle)
    chosen = config(mode=Mode.ASYNC, ranks=ranks, match=match, batch=24, data=data)
    whole = list(training_stream(chosen, numbered()))
    every = list(chain(*map(numbers, whole)))
    ends = StepEnds()
    number, rest = stream_from(chosen, numbered(), cursor, ends=ends)
    assert ends.begun(min(cursor, 200)) == sum(first < cursor for first in STEPS_OF_24)
    rest = list(rest)
    assert ends.whole(200) == ends.begun(200) == len(STEPS_OF_24)
    assert list(chain(*map(numbers, rest))) == every[cursor:]
    assert len(rest) == len(whole) - number  # no more batches than there would have been
    assert list(map(numbers, rest[1:])) == list(map(numbers, whole[number + 1 :]))


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 4))
def test_points_of_a_curve_are_thinned_alike_whether_a_run_goes_on_or_was_never_cut(
    before, behind, most
):
    whole, first, second = (Thinned(most_points=most) for _ in range(3))
    for number in range(before + behind):
        whole.append(number, float(number))
    for number in range(before):
        first.append(number, float(number))
    second.load_state_dict(first.state_dict(), 0.0)
    for number in range(before, before + behind):
        second.append(number, float(number))
    assert second.state_dict() == whole.state_dict()
    assert len(second) == before + behind
