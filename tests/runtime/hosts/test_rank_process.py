"""The laws with ranks, and servers, as processes: against the same runs with ranks as threads."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from persia_sim.base.chrome import Span
from persia_sim.base.staleness import summary_of
from persia_sim.base.trace import ALL, Kind, Trace
from persia_sim.base.vocabulary import Mode, Stage
from runtime.config import CheckpointConfig, DataConfig, TrainConfig
from runtime.dense import averaging, buckets
from runtime.executors.open import assemble_for
from runtime.executors.threads import ConcurrentRun
from runtime.hosts import rank_process
from runtime.hosts.dense.group import RankGroup
from runtime.hosts.rank_process import GroupedRank
from runtime.hosts.ranks import follow, meet_as_leader
from runtime.run.record import run_into
from runtime.stop import Interrupted, Stop
from tests.runtime.spawned import Processes
from tests.runtime.worlds import (
    TUNED,
    TwoTables,
    World,
    changed,
    config,
    predictions_in,
    run,
    trace_of,
)

RANKS, SERVERS = 3, 2
SOURCE = TwoTables(24 * 17 + 7)
"""18 steps; of the last one's 7 samples every rank has a few."""
SETTINGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync, ring": {},
    "lookahead": {"mode": Mode.LOOKAHEAD},
    "hybrid, tau 0": {"mode": Mode.HYBRID, "tau": 0},
    "merged": {"mode": Mode.HYBRID, "tau": 3},
    "on arrival": {"mode": Mode.HYBRID, "tau": 3, "merge_pushes": False},
    "fresh": {"mode": Mode.HYBRID, "tau": 3, "merge_pushes": False, "fresh": ("item",)},
    "all fresh": {"mode": Mode.HYBRID, "tau": 3, "fresh": ("all",)},
    "losing": {"mode": Mode.HYBRID, "tau": 3, "merge_pushes": False, "fresh": ("item",)},
    "permits": {"mode": Mode.RAW_HYBRID, "tau": None, "permits": 2, "merge_pushes": False},
    "async": {"mode": Mode.ASYNC, "tau": 2},
    "async, shares": {"mode": Mode.ASYNC, "tau": 2, "match": "global"},
    "averaging": {"mode": Mode.ASYNC_AVERAGING, "tau": 2},
}
WORKERS = ["sync", "lookahead", "merged", "losing", "async"]
SETTINGS |= {f"{name}, workers": SETTINGS[name] | {"workers": 2} for name in WORKERS}
LOST = {(1, 4), (2, 4), (1, 13)}
"""Rank and step of the pushes that are lost in `losing`, which trains in two legs."""
EQUAL_TO_SYNC = ["sync", "lookahead", "hybrid, tau 0", "all fresh"]
EQUAL_TO_SYNC += ["sync, workers", "lookahead, workers"]


def settings_of(name: str) -> TrainConfig:
    chosen: dict[str, Any] = {"ranks": RANKS, "servers": SERVERS, "executor": "concurrent"}
    chosen["model"] = replace(TUNED, dropout=0.2)
    return config(**(chosen | SETTINGS[name]))


def on_one_host(rank: int, ranks: int, store: dist.Store) -> GroupedRank:
    return GroupedRank(RankGroup(rank, ranks, store, torch.device("cpu")))


def train_all(
    rank: int,
    ranks: int,
    store: dist.Store,
    folder: Path,
    names: Iterable[str] = SETTINGS,
    join: Callable[[int, int, dist.Store], GroupedRank] = on_one_host,
    **more: Any,
) -> None:
    averaging.PERIOD_S = 0.01
    for name in names:
        buckets.RING_FROM_BYTES = -1 if name == "sync, ring" else 2**40
        # On a busy machine a round of averaging takes longer than so few steps: they get slower.
        for latency_s in (0.0, 0.05, 0.5) if name == "averaging" else (0.0,):
            here = join(rank, ranks, dist.PrefixStore(f"{name} {latency_s}", store))
            settings = changed(settings_of(name), latency_s=latency_s, ranks=ranks, **more)
            world = train_one(settings, here, LOST if name.startswith("losing") else set())
            rounds = ""
            if world is not None:
                write_down(folder / name, world)
                rounds = str(len(world.trace.of_kind(Kind.AVERAGE_WRITE)) // ranks)
            enough = int(here.group.gather("rounds", rounds)[0])
            here.close()
            if enough:
                break


def train_one(
    settings: TrainConfig, here: GroupedRank, losing: set[tuple[int, int]]
) -> World | None:
    """As one rank; where pushes get lost, in two legs. What came of it, at rank 0."""
    components = assemble_for(settings, SOURCE, rank=here)
    components.meter.start()
    run = ConcurrentRun(components, lose_push=lambda *push: push in losing)
    for end in [9, None] if losing else [None]:
        components.feed.begin_leg(end)
        run.run()
    if not here.leads:
        return None
    model = run.rule.snapshot()
    return World(
        components.worker, components.learner, trace_of(components), components.meter, model
    )


def write_down(folder: Path, world: World) -> None:
    folder.mkdir(exist_ok=True)
    np.savez(folder / "state.npz", **world.state())
    world.trace.save(folder / "trace.npz")
    meter = world.meter
    told = {"losses": meter.losses, "samples": meter.samples, "updates": meter.updates}
    told |= {"lost": meter.pushes_lost}
    (folder / "told.json").write_text(json.dumps(told))


def state_in(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "state.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def sync():
    return run(config(ranks=RANKS, model=replace(TUNED, dropout=0.2)), SOURCE)


@pytest.mark.first_case
@pytest.mark.parametrize("name", EQUAL_TO_SYNC)
@pytest.mark.law1
@pytest.mark.law2
@pytest.mark.law12
def test_sync_over_processes_is_sync_over_threads_in_bytes(name, found, sync):
    """Laws 1, 2 and 12; the loss of every step is that of all ranks."""
    state, expected = state_in(found / name), sync.state()
    assert state.keys() == expected.keys()
    for key, array in expected.items():
        assert state[key].tobytes() == array.tobytes(), key
    told = json.loads((found / name / "told.json").read_text())
    assert told["losses"] == sync.meter.losses


@pytest.mark.law12
def test_a_ring_sums_in_another_order_and_no_more(found, sync):
    state = state_in(found / "sync, ring")
    for key, array in sync.state().items():
        if key.endswith(".ids"):
            assert np.array_equal(state[key], array)
        else:
            gap = np.linalg.norm(state[key] - array) / np.linalg.norm(array)
            assert gap < 1e-5, key


BOUNDED = ["merged", "on arrival", "fresh", "async", "merged, workers"]
ONE_OF_EACH = [
    pytest.param(name, marks=pytest.mark.long if name.endswith(", workers") else ())
    for name in SETTINGS
]


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.law6
@pytest.mark.law9
@pytest.mark.law12
def test_a_run_of_processes_replays_in_one_process(name, found):
    """Laws 6, 9 and 12: merged to one order, its events give the same bytes, each batch once."""
    check_replay(found, name)


def check_replay(found: Path, name: str, ranks: int = RANKS) -> None:
    order = Trace.load(found / name / "trace.npz")
    told = json.loads((found / name / "told.json").read_text())
    assert told["samples"] == 24 * 17 + 7
    assert told["updates"] == 18 * (ranks if name == "async, shares" else 1)
    pushes = order.of_kind(Kind.PUSH)
    pairs = {tuple(row) for row in pushes[:, [2, 3, 4]].tolist()}
    assert len(pairs) == len(pushes), "a push was applied twice"
    if name == "sync, ring":
        return
    settings = changed(settings_of(name), ranks=ranks)
    again = replace(
        settings,
        sync=replace(settings.sync, permits=None),
        engine=replace(
            settings.engine,
            executor="replay",
            trace=found / name / "trace.npz",
            servers=0,
            workers=0,
            shards=SERVERS,
        ),
    )
    replayed = run(again, SOURCE, order=order)
    state = state_in(found / name)
    for key, array in replayed.state().items():
        assert state[key].tobytes() == array.tobytes(), key
    if name == "averaging":
        assert len(order.of_kind(Kind.AVERAGE_WRITE)) >= ranks


@pytest.mark.parametrize("name", [one for one in ONE_OF_EACH if one.values[0] in BOUNDED])
@pytest.mark.law5
@pytest.mark.law12
def test_no_lookup_misses_more_than_tau_steps(name, found):
    """Law 5; and something is late, else there would be nothing to bound."""
    order = Trace.load(found / name / "trace.npz")
    most = summary_of(order).max_steps
    assert 0 < most <= SETTINGS[name]["tau"]
    of_fresh = summary_of(order.of_fresh_tables())
    assert of_fresh.max_steps == 0 and not of_fresh.mean_pushes


@pytest.mark.law13
def test_what_any_rank_loses_is_counted_once_and_all_else_is_applied(found):
    """Law 13: at each server, sent = applied + lost, also of ranks that rank 0 only hears of."""
    trained = [name for name in SETTINGS if (found / name).exists()]
    losing = [name for name in trained if name.startswith("losing")]
    assert "losing" in losing
    for name in losing:
        check_losses(found / name, LOST)
    counted = {n: json.loads((found / n / "told.json").read_text())["lost"] for n in trained}
    assert counted == dict.fromkeys(trained, 0) | dict.fromkeys(losing, len(LOST))


def check_losses(found: Path, expected: set[tuple[int, int]], ranks: int = RANKS) -> None:
    order = Trace.load(found / "trace.npz")
    for shard in range(SERVERS):
        lost, applied, lost_fresh, applied_fresh = (
            sorted((e.rank, e.step) for e in order if e.kind == kind and e.shard == shard)
            for kind in (Kind.LOST_PUSH, Kind.PUSH, Kind.FRESH_LOST_PUSH, Kind.FRESH_PUSH)
        )
        assert lost == sorted(expected)
        assert sorted(lost + applied) == [(r, s) for r in range(ranks) for s in range(18)]
        if order.meta.get("fresh"):  # what else there is of a step is applied as one
            assert (lost_fresh, applied_fresh) == (lost, [(ALL, s) for s in range(18)])


STEPS, MORE_STEPS, EVERY = 45, 60, 15


def run_of(mode: str, **engine: Any) -> TrainConfig:
    """Small steps, written down every 15."""
    return replace(
        config(mode=mode, ranks=RANKS, steps=STEPS, executor="concurrent", **engine),
        data=DataConfig(name="synthetic", rows=24 * MORE_STEPS),
        checkpoint=CheckpointConfig(checkpoint_every=str(EVERY)),
    )


ATTEMPTS: dict[str, list[tuple[int, int]]] = {
    "sync": [(RANKS, STEPS), (RANKS, STEPS)],
    "async": [(RANKS, STEPS), (RANKS, STEPS), (RANKS - 1, MORE_STEPS)],
}
"""Per mode, ranks and steps; the last rank of the first attempt is told to end by a signal."""


class Signalled(RankGroup):
    """A rank that a signal meets at one instant of its run, whatever the machine's speed."""

    when, leg = "", ""

    def wait(self, work: dist.Work, what: str) -> None:
        """In the middle of a leg: this step ends when every rank has said how far it will go."""
        if what == self.when:
            os.kill(os.getpid(), signal.SIGUSR1)
            while not all(self.is_announced(f"{self.leg}/{rank}") for rank in range(self.ranks)):
                time.sleep(0.01)
        super().wait(work, what)

    def gather(self, name: str, text: str, *more: Any, **limits: Any) -> list[str]:
        """Between two legs: this rank has said already that nobody has asked it to end."""
        if name == self.when:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().gather(name, text, *more, **limits)


INSTANTS = {
    "sync": ("gradients of step 22", "leg 1 has promised"),
    "async": ("leg 1 by", ""),
}


def interrupted_and_resumed(rank: int, ranks: int, store: dist.Store, folder: Path) -> None:
    for mode, attempts in ATTEMPTS.items():
        run = folder / f"{mode}, resumed"
        for number, (members, steps) in enumerate(attempts):
            if rank >= members:
                break
            chosen = changed(run_of(mode, servers=1), ranks=members, steps=steps)
            words = dist.PrefixStore(f"{mode} {number}", store)
            group = Signalled(rank, members, words, torch.device("cpu"))
            if rank == RANKS - 1 and number == 0:
                group.when, group.leg = INSTANTS[mode]
            here = GroupedRank(group)
            if rank:
                with contextlib.suppress(Interrupted):
                    follow(chosen, here)
            else:
                told: list[str] = []
                with contextlib.suppress(Interrupted):
                    run_into(
                        run,
                        chosen,
                        on_warning=told.append,
                        resume=number > 0,
                        rank=here,
                        meet=partial(meet_as_leader, here, chosen, run),
                    )
                shutil.copytree(run, folder / f"{mode}-{number}")
                (folder / f"{mode}-{number}" / "told.txt").write_text("\n".join(told))
            here.close()


def with_a_timeline(rank: int, ranks: int, store: dist.Store, folder: Path) -> None:
    """In two legs; each rank's clock is 7 s ahead of the one before, as other hosts' may be."""
    here = on_one_host(rank, ranks, store)
    components = assemble_for(changed(settings_of("merged"), timeline=True), SOURCE, rank=here)
    components.spans._zero_s -= 7.0 * rank
    components.meter.start()
    training = ConcurrentRun(components)
    for end in (9, None):
        components.feed.begin_leg(end)
        training.run()
    if here.leads:
        told = {"spans": components.spans.spans, "moments": components.spans.moments}
        (folder / "timeline.json").write_text(json.dumps(told))
    here.close()


def everything(
    rank: int, ranks: int, store: dist.Store, folder: Path, names: Iterable[str]
) -> None:
    train_all(rank, ranks, dist.PrefixStore("all", store), folder, names)
    interrupted_and_resumed(rank, ranks, dist.PrefixStore("resumed", store), folder)
    with_a_timeline(rank, ranks, dist.PrefixStore("timeline", store), folder)


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """Runs of what the chosen tests ask for, each of them once."""
    here = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params.get("name") for item in here if hasattr(item, "callspec")}
    names = [name for name in SETTINGS if name in asked | {"sync, ring", "losing", "merged"}]
    folder = tmp_path_factory.mktemp("ranks")
    Processes(RANKS, partial(everything, names=names), folder).join_well()
    return folder


def test_rank_0_has_the_timeline_of_all_by_its_own_clock(found):
    """And says how far off that may be: no exchange ends before all have begun what it sums."""
    told = json.loads((found / "timeline.json").read_text())
    spans = [Span(*span) for span in told["spans"]]
    expected = {(r, stage, s) for r in range(RANKS) for stage in Stage for s in range(18)}
    expected = {one for one in expected if one[1] in {span.stage for span in spans}}
    assert {(s.rank, s.stage, s.step) for s in spans if s.step < 18} == expected
    off_s = [float(re.search(r"within (.*) ms", name)[1]) / 1e3 for _, name, _ in told["moments"]]
    assert len(off_s) == RANKS - 1 and max(off_s) < 3.5
    for step in range(18):
        begun_s = [s.start_s for s in spans if (s.stage, s.step) == (Stage.BACKWARD, step)]
        ended_s = [s.end_s for s in spans if (s.stage, s.step) == (Stage.DENSE_SYNC, step)]
        assert len(begun_s) == len(ended_s) == RANKS
        assert max(begun_s) <= min(ended_s) + 2 * max(off_s)


@pytest.mark.law11
@pytest.mark.law12
def test_a_signal_to_any_rank_ends_all_at_one_cut_and_they_go_on(found, tmp_path):
    """Laws 11 and 12: to the bytes of threads that nobody disturbed."""
    told = json.loads((found / "sync-0" / "ending.json").read_text())
    assert told["by"] == "SIGUSR1"
    summary = json.loads((found / "sync-1" / "summary.json").read_text())
    (at,) = summary["resumed_at_samples"]
    assert at in (24 * 23, 24 * 24), "step 22 is trained; another rank may have begun the next one"
    run_into(tmp_path / "threads", run_of("sync"))
    assert predictions_in(found / "sync-1") == predictions_in(tmp_path / "threads")


def test_a_signal_between_two_legs_ends_the_next_one_at_all_ranks(found):
    """The rank that it meets has told the others already that they go on: so must it."""
    assert json.loads((found / "async-0" / "ending.json").read_text())["by"] == "SIGUSR1"
    (at,) = json.loads((found / "async-1" / "summary.json").read_text())["resumed_at_samples"]
    assert 24 * EVERY <= at <= 24 * 2 * EVERY


@pytest.mark.law12
def test_async_that_was_interrupted_is_one_order_of_events_each_batch_once(found, tmp_path):
    summary = json.loads((found / "async-1" / "summary.json").read_text())
    assert summary["samples"] == 24 * STEPS
    trace = found / "async-1" / "trace.npz"
    pushes = Trace.load(trace).of_kind(Kind.PUSH)
    assert len({tuple(row) for row in pushes[:, [2, 3]].tolist()}) == len(pushes) == STEPS
    plain = replace(run_of("async"), checkpoint=CheckpointConfig())
    again = changed(plain, executor="replay", trace=trace)
    run_into(tmp_path / "again", again)
    assert predictions_in(found / "async-1") == predictions_in(tmp_path / "again")


def test_another_number_of_ranks_goes_on_and_says_what_becomes_of_the_order(found):
    summary = json.loads((found / "async-2" / "summary.json").read_text())
    assert (summary["samples"], summary["ranks"]) == (24 * MORE_STEPS, RANKS - 1)
    assert "trace.npz begins where this does" in (found / "async-2" / "told.txt").read_text()
    order = Trace.load(found / "async-2" / "trace.npz")
    assert len(order.of_kind(Kind.PUSH)) == MORE_STEPS - STEPS
    assert "ranks: before 3, now 2" in order.meta["not_replayable"]


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.HYBRID, Mode.ASYNC_AVERAGING, Mode.ASYNC])
@pytest.mark.parametrize(("rank", "ranks_here"), [(0, 1), (0, 2), (1, 1)])
def test_the_leader_of_a_run_over_hosts_says_that_dense_gradients_are_plain(
    rank, ranks_here, mode, monkeypatch, capsys
):
    """gloo and NCCL neither encrypt nor check them; async's dense weights travel as rows do."""
    group = SimpleNamespace(rank=rank, ranks=2, attach=lambda stop: None)
    for name in ("DistributedReplicas", "DistributedWeights"):
        monkeypatch.setattr(rank_process, name, lambda *_, **__: SimpleNamespace(close=None))
    monkeypatch.setattr(GroupedRank, "_async_rule", lambda *_: None)
    learner = SimpleNamespace(model=None, scale=None)
    components = SimpleNamespace(
        config=config(mode=mode, ranks=2), learner=learner, stop=Stop(), recorder=None,
        overlaps_dense_sync=False,
    )  # fmt: skip
    GroupedRank(group, ranks_here=ranks_here).open_rule(components, None)
    is_plain = "dense gradients travel between hosts in plain" in capsys.readouterr().err
    assert is_plain == (rank == 0 and ranks_here < 2 and not mode.has_dense_server)
