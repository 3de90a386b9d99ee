"""Which samples are trained, in which order: read off from what reaches the dense network."""

from __future__ import annotations

import threading
import time
from collections import Counter

import numpy as np
import pytest

from persia_sim.base.vocabulary import Mode
from runtime.config import DataConfig
from runtime.data.fingerprints import fingerprints
from runtime.rank import feed as feed_module
from runtime.rank.feed import Feed, TrainedRows, training_stream
from runtime.rank.learner import Learner
from runtime.run.session import train
from runtime.stop import Stop
from tests.runtime.worlds import ArraySource, config

SAMPLES = 100


@pytest.fixture
def trained(monkeypatch):
    """Train on numbered samples; gives the numbers of each (rank, step), and the outcome."""
    compute = Learner.gradients

    def train_on(samples=SAMPLES, **changes):
        source = ArraySource(samples, seed=4)
        source._all.dense[:, 0] = np.arange(samples)
        seen: dict[tuple[int, int], tuple[list[int], int]] = {}

        def spied(self, model, handle, staged, step_samples, *args):
            numbers = handle.batch.dense[:, 0].astype(int).tolist()
            if numbers:
                assert (handle.rank, handle.step) not in seen
                seen[handle.rank, handle.step] = numbers, step_samples
            return compute(self, model, handle, staged, step_samples, *args)

        monkeypatch.setattr(Learner, "gradients", spied)
        return seen, train(config(**changes), source)

    return train_on


def in_order(seen) -> list[int]:
    """By step, then by rank: the stream's order, where all ranks share a step."""
    return [n for key in sorted(seen, key=lambda k: (k[1], k[0])) for n in seen[key][0]]


@pytest.mark.parametrize("ranks", [1, 3])
def test_behind_skipped_rows_only_the_last_samples_train_in_their_order(trained, ranks):
    seen, outcome = trained(mode=Mode.SYNC, ranks=ranks, data=DataConfig(rows=90, skip_rows=37))
    assert in_order(seen) == list(range(37, 90))
    assert outcome.figures.samples == 90 - 37


EXECUTORS = pytest.mark.parametrize("executor", ["constant_lag", "concurrent"])


@EXECUTORS
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.LOOKAHEAD, Mode.HYBRID])
def test_a_pass_takes_every_sample_once_in_the_sources_order(trained, mode, executor):
    seen, outcome = trained(mode=mode, executor=executor, ranks=3)
    assert in_order(seen) == list(range(SAMPLES))
    assert outcome.figures.samples == SAMPLES
    # 24 a step over 3 ranks; the last step has 4 samples, of which every rank's loss is a share
    sizes = {key: (len(numbers), of) for key, (numbers, of) in seen.items()}
    assert sizes == {(r, s): (8, 24) for r in range(3) for s in range(4)} | {
        (0, 4): (1, 4), (1, 4): (2, 4), (2, 4): (1, 4)
    }  # fmt: skip


@EXECUTORS
def test_a_rank_that_has_no_sample_of_the_last_step_takes_part_in_it(trained, executor):
    seen, outcome = trained(samples=25, ranks=3, executor=executor)
    assert in_order(seen) == list(range(25))
    assert [key for key in seen if key[1] == 1] in ([(0, 1)], [(1, 1)], [(2, 1)])
    assert (outcome.figures.samples, outcome.figures.updates) == (25, 2)


@EXECUTORS
def test_passes_repeat_the_part_and_rows_limit_it(trained, executor):
    data = DataConfig(rows=30, epochs=3)
    seen, outcome = trained(data=data, ranks=2, executor=executor)
    assert in_order(seen) == [*range(30)] * 3
    assert [len(numbers) for (rank, _), (numbers, _) in sorted(seen.items()) if rank == 0] == [
        12, 3, 12, 3, 12, 3
    ]  # fmt: skip
    assert outcome.figures.samples == 90
    assert outcome.figures.updates == 6


def test_shuffle_permutes_each_pass_anew_with_the_seed(trained):
    def orders(**changes):
        order = in_order(trained(data=DataConfig(shuffle=True, epochs=2), **changes)[0])
        return order[:SAMPLES], order[SAMPLES:]

    first, second = orders()
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != list(range(SAMPLES))
    assert first != second
    assert orders() == (first, second)
    assert orders(seed=1)[0] != first
    # Far from where they were: a permutation of the whole, not of neighbours.
    moved = np.abs(np.array(first) - np.arange(SAMPLES)).mean()
    assert abs(moved - SAMPLES / 3) < SAMPLES / 8


@EXECUTORS
def test_shuffled_training_is_the_same_in_both_executors(trained, executor):
    data = DataConfig(shuffle=True)
    seen, _ = trained(data=data, ranks=2, executor=executor)
    assert in_order(seen) == in_order(trained(data=data)[0])


@EXECUTORS
def test_async_batches_go_round_the_ranks_and_are_steps_of_their_own(trained, executor):
    seen, outcome = trained(mode=Mode.ASYNC, ranks=3, executor=executor)
    assert in_order(seen) == list(range(SAMPLES))
    assert {key: of for key, (_, of) in seen.items()} == {
        (0, 0): 24, (1, 0): 24, (2, 0): 24, (0, 1): 24, (1, 1): 4
    }  # fmt: skip
    assert all(len(numbers) == of for numbers, of in seen.values())
    assert outcome.figures.updates == 5


@EXECUTORS
@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.ASYNC_AVERAGING])
def test_global_batches_train_on_every_sample_that_the_other_modes_do(trained, executor, mode):
    """100 samples a step and 8 ranks: 12 or 13 each, not 8 times 12."""
    settings = {"batch": 100, "ranks": 8, "steps": 3, "test_rows": 64}
    seen, outcome = trained(samples=330, mode=mode, match="global", executor=executor, **settings)
    assert outcome.figures.samples == 300
    assert Counter(n for numbers, _ in seen.values() for n in numbers) == Counter(range(300))
    assert outcome.figures.updates == 24
    for step in range(3):
        sizes = [len(seen[rank, step][0]) for rank in range(8)]
        assert sum(sizes) == 100
        assert set(sizes) == {12, 13}
        assert all(seen[rank, step][1] == sizes[rank] for rank in range(8))


@pytest.mark.parametrize("match", ["update", "global"])
def test_a_source_is_told_of_each_batch_as_soon_as_all_of_it_was_asked_for(match):
    """It lets go of its samples then; what was not told would stay in memory for the whole pass."""

    class Told(ArraySource):
        stop = Stop()
        samples = 0

        def ask(self, part):
            return lambda: part

        def passed(self, batch):
            self.samples += batch.size

    source = Told(SAMPLES)
    chosen = config(mode=Mode.ASYNC, match=match, ranks=3, data=DataConfig(epochs=2))
    got = 0
    for batch in training_stream(chosen, source):
        assert source.samples == got - got % SAMPLES % 24  # of a step that is cut in three, none
        got += batch.size
    assert source.samples == got == 2 * SAMPLES


def test_a_rank_far_ahead_waits_for_the_others_batches_to_be_taken(monkeypatch):
    """Else one slow rank of many keeps a whole part of the data in memory."""
    monkeypatch.setattr(feed_module, "MAX_DRIFT_STEPS", 3)
    chosen = config(batch=4, ranks=2)
    feed = Feed(training_stream(chosen, ArraySource(SAMPLES)), 2, True, Stop())
    taken: list[int] = []

    def run_ahead():
        while (work := feed.take(0, len(taken))) is not None:
            taken.append(work.batch.size)

    ahead = threading.Thread(target=run_ahead)
    ahead.start()
    while len(taken) < 6:
        time.sleep(0.001)
    time.sleep(0.1)  # time to go too far
    assert len(taken) == 6
    for step in range(25):
        assert len(taken) <= step + 6
        assert feed.take(1, step).batch.size == 2
    ahead.join(timeout=30)
    assert taken == [2] * 25


def numbered(samples: int = SAMPLES) -> ArraySource:
    """Samples that know their place: no two of their rows are equal."""
    source = ArraySource(samples, seed=4)
    source._all.dense[:, 0] = np.arange(samples)
    return source


def test_trained_rows_are_those_of_the_first_pass_before_the_end_of_the_leg():
    """Batches that were read for the next leg have not trained yet; later passes bring none."""
    batches = list(training_stream(config(batch=10), numbered()))
    trained = TrainedRows()
    trained.begin_pass(0)
    for number, batch in enumerate(batches[:6]):
        trained.note(number, batch, promised=0)

    def samples(number: int) -> list[int]:
        noted = trained.rows(number).values
        return [n for n, batch in enumerate(batches) if np.isin(fingerprints(batch), noted).all()]

    assert samples(2) == [0, 1]
    assert samples(5) == [0, 1, 2, 3, 4]
    trained.begin_pass(1)
    trained.note(6, batches[6], promised=7)
    assert samples(10) == [0, 1, 2, 3, 4, 5]


class Names:
    """Asks for the samples of a batch of names; may be made to wait before one of them."""

    def __init__(self, waits_before: int | None = None) -> None:
        self.asked: list[int] = []
        self.may_go_on = threading.Event()
        self._waits_before = waits_before

    def __call__(self, batch):
        if len(self.asked) == self._waits_before:
            self.may_go_on.wait(30)
        self.asked.append(int(batch.dense[0, 0]))
        return lambda: batch


def readers_ahead() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "feed"]


def wait_for_readers() -> None:
    for thread in readers_ahead():
        thread.join(timeout=30)


def test_samples_of_later_steps_are_asked_for_ahead_and_again_when_half_are_used():
    names = Names()
    feed = Feed(training_stream(config(batch=2), numbered(400)), 1, True, Stop(), asks=names)
    asked = []
    for step in range(80):
        assert feed.take(0, step).batch.dense[0, 0] == 2 * step
        wait_for_readers()
        asked.append(len(names.asked))
    # Behind the first batch as many as a window; then anew whenever less than half of it is left.
    window = feed_module.AHEAD_STEPS
    used = window // 2 + 1
    assert asked == [1 + window + step // used * used for step in range(80)]
    assert names.asked == list(range(0, 2 * asked[-1], 2))


@pytest.mark.parametrize("notes", [True, False])
def test_of_samples_that_come_by_name_those_of_the_ranks_here_are_noted(notes):
    """Another process notes its own; without notes a run of names trains as well."""
    trained = TrainedRows() if notes else None
    batches = list(training_stream(config(batch=10), numbered()))
    feed = Feed(iter(batches), 2, True, Stop(), local_ranks=[1], asks=Names(), trained=trained)
    for step in range(3):
        assert feed.take(1, step).batch.size == 5
    wait_for_readers()
    mine = [batch.rows(5, 10) for batch in batches[:3]] if notes else []
    expected = sorted(value for batch in mine for value in fingerprints(batch))
    assert feed.trained_rows().values.tolist() == expected
