"""Checkpoints behind training: taken between two legs, written while the next leg runs; what a
server that died gets back of them; and going on with a run that was interrupted or killed: what may
change, and from where."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from persia_sim.base.command_line import option_values
from persia_sim.base.schema import field_types, parse
from persia_sim.base.trace import Trace
from runtime.checkpoint.places import STATE, complete_checkpoints
from runtime.checkpoint.rows import Taken
from runtime.checkpoint.sketches import Sketches
from runtime.checkpoint.whole import (
    Checkpoint,
    RunState,
    keep_newest,
    newest,
    read_checkpoint,
    write_checkpoint,
)
from runtime.config import (
    CheckpointConfig,
    EngineConfig,
    EvaluationConfig,
    TrainConfig,
    read_config,
)
from runtime.dense.state import DenseState
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.sharded import divided
from runtime.embedding.store import EmbeddingStore, SavedServer
from runtime.files import BrokenFileError
from runtime.models.imported import refuse_code_in
from runtime.object_store import address_of, give_up_stores, request_limit_s, store_behind
from runtime.run.folder import SUMMARY, read_summary
from runtime.stop import Ending, PeerError, StoreError


@dataclass(frozen=True, slots=True)
class Saving:
    """Where a run writes itself down."""

    run: Path | None = None
    """Its folder; None: nowhere."""
    start: Checkpoint | None = None
    """What it goes on from."""
    ending: Ending = field(default_factory=Ending)
    """Who may ask it to end."""
    on_warning: Callable[[str], None] = lambda text: None
    """Told of checkpoints that were not written; the outcome says it again."""

    def listening(self) -> AbstractContextManager[None]:
        """While it trains, somebody may ask it to end; a run without a folder keeps nothing."""
        return self.ending.listening() if self.run else nullcontext()


@dataclass(slots=True)
class Cut:
    """A whole run at one instant, not yet written."""

    state: RunState
    dense: DenseState
    trace: Callable[[], Trace] | None
    rows: Taken
    sketches: Sketches
    recordings: Sequence[np.ndarray] = ()
    """Recordings of server processes."""


class Saver:
    """One checkpoint at a time; the newest ones stay."""

    def __init__(
        self,
        run: Path,
        config: CheckpointConfig,
        on_warning: Callable[[str], None],
        start: Checkpoint | None = None,
        ending: Ending | None = None,
    ) -> None:
        """``start``: the checkpoint of this run that is on the disk already. ``ending``: who may
        ask the run to end; a store that does not answer then is soon given up."""
        self._run = run
        self._ending = ending
        self.is_store_silent = False
        """Whether a store failed when the run was asked to end."""
        self._config = config
        self._on_warning = on_warning
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.last = start
        """The newest one that is whole on the disk."""
        self.failed = 0 if start is None else start.state.history["checkpoints_failed"]

    def save(self, samples: int, take: Callable[[], Cut]) -> None:
        """Write the run at this cut; returns when it is taken, not when it is written.

        The checkpoint before is waited for. One that the disk refuses is told and counted; the one
        before it stays, and training goes on.
        """
        self.wait()
        if self.last is not None and self.last.state.samples == samples:
            return  # it is there already
        if self.is_store_silent:
            return
        cut = take()
        self._thread = threading.Thread(target=self._write, args=(cut,), name="checkpoint")
        self._thread.start()

    def wait(self) -> bool:
        """Return when nothing is being written; whether the last one asked for is on the disk."""
        # One checkpoint is written at a time.
        if self._thread is None:
            return not self.is_store_silent
        self._join(self._thread)
        self._thread = None

        # A full disk costs a checkpoint, not the run; any other error is one of ours.
        error = self._error
        self._error = None
        if error is None:
            return True
        if not isinstance(error, OSError | MemoryError):
            raise error
        self.failed += 1
        self.is_store_silent |= isinstance(error, StoreError) and bool(self._ending)

        # Say what there is to go on from now.
        last = self.last.state.samples if self.last else None
        stays = "there is none"
        if last is not None:
            stays = f"that at {last:,} samples stays, and older ones do until a newer one is whole"
        self._on_warning(f"a checkpoint was not written: {error}; {stays}")
        return False

    def _join(self, writer: threading.Thread) -> None:
        """Wait until a checkpoint is written; once the run was asked to end, no longer than a
        request to a store may take."""
        asked_s: float | None = None
        while writer.is_alive():
            writer.join(0.2)
            if not self._ending or store_behind(self._run) is None:
                continue
            now_s = time.monotonic()
            asked_s = asked_s or now_s
            if now_s - asked_s > request_limit_s() and writer.is_alive():
                give_up_stores("it does not answer, and this process is asked to end")
                writer.join(1.0)
                if self._error is None:
                    self._error = StoreError(f"{address_of(self._run)} does not answer")
                return

    def _write(self, cut: Cut) -> None:
        try:
            trace = cut.trace() if cut.trace else None
            rows = cut.rows.write
            self.last = write_checkpoint(
                self._run, cut.state, cut.dense, trace, rows, cut.recordings, cut.sketches
            )
            newest = self._config.keep_checkpoints
            best = self._config.keep_best
            keep_newest(self._run, self.last.folder, newest, best)
        except BaseException as error:  # told by the thread that waits
            self._error = error
        finally:
            cut.rows.drop()  # if they were not come to


class RunFailover:
    """What the servers of one run had at its cuts, and which of them have died."""

    def __init__(
        self, store: EmbeddingStore, rules: ServerRules, run: Path | None, *, warm: bool
    ) -> None:
        """``run``: the folder with the checkpoints; None: a server comes back empty. ``warm``: the
        run began with rows, so that an empty server is none of it."""
        self._store = store
        self._rules = rules
        self._run = run
        self._warm = warm
        self._first_steps: dict[int, list[int]] = {}
        self.notices: list[str] = []
        """A sentence for each server that came back."""

    def note_cut(self, samples: int, first_steps: list[int]) -> None:
        """From this cursor on the ranks go on with these steps."""
        self._first_steps[samples] = first_steps

    def allow(self, on_warning: Callable[[str], None]) -> None:
        """From now on the death of a server is no longer that of the run."""

        def notice(text: str) -> None:
            self.notices.append(text)
            on_warning(text)

        self._store.allow_failover(self.saved, notice)

    def saved(self, shard: int) -> Iterator[SavedServer]:
        """A server as the checkpoints have it, the newest first; empty when there is none."""
        # Checkpoints of this run alone: those of a run before it had other steps.
        run = self._run
        shards = self._store.shards
        rules = self._rules
        every = [] if run is None else complete_checkpoints(run)
        of_this_run = [folder for folder in every if int(folder.name) in self._first_steps]
        for folder in reversed(of_this_run):
            try:
                checkpoint = read_checkpoint(folder)
            except BrokenFileError:
                continue
            counters = divided(checkpoint.state.servers, shards)[shard]
            steps = self._first_steps[checkpoint.state.samples]
            yield SavedServer(rules, steps, counters, address_of(checkpoint.rows.absolute()))

        # None can be read: rows that were trained would silently begin anew.
        if of_this_run:
            raise PeerError(
                f"embedding server {shard} has died, and no checkpoint of this run can be read; go"
                " on with --resume"
            )
        if self._warm:
            raise PeerError(
                f"embedding server {shard} has died before the first checkpoint, and with it"
                " rows with which the run began; start the run again, with --checkpoint-every"
            )

        # Before the first checkpoint the server begins as the run did, empty.
        yield SavedServer(rules, self._first_steps[min(self._first_steps)])


_FIXED = {"precision", "trace", "trace_order", "eval_split", "test_rows"}
_MAY_CHANGE = {"ranks", "permits", "ahead", "lookahead", "steps", "data.dir"} | {
    name.replace("_", "-")
    for group in (EngineConfig, CheckpointConfig, EvaluationConfig)
    for name in field_types(group)
    if name not in _FIXED
}
"""Who trains, how fast, how far, and what is told of it; all else decides what is trained, or of
which rows its scores are, which are compared with each other."""


def going_on(
    run: Path, config: TrainConfig, written: TrainConfig, on_warning: Callable[[str], None]
) -> Checkpoint:
    """The newest checkpoint of a run's folder that can be trusted, to go on from with ``config``.

    ``written`` is what stands in its config.json, which anyone may have edited: the config that is
    sealed in the checkpoint counts. Raises ValueError naming an option that would make it another
    run, and for a run that is finished.
    """
    # The newest checkpoint whose files are whole, and the options that it was written under.
    if config.engine.executor == "replay":
        raise ValueError(f"the run in {run} is a replay, which is done from its start only")
    start = newest(run, on_warning)
    before = parse(TrainConfig, start.state.config, f"{start.folder / STATE}: config")
    _refuse_other_options(run, config, written, before)

    # The model's code may lie beside it, from somebody else.
    known = start.state.facts.get("model_code")
    refuse_code_in(run, config.model.name, on_warning, known, trust=True)  # the caller's config
    if (run / SUMMARY).exists() and (why := _why_finished(run, config, written)):
        raise ValueError(why)

    # What is left to do.
    done = start.state.meter["steps"]
    if config.steps is not None and config.steps < done:
        raise ValueError(
            f"--steps is {config.steps:,}, but {done:,} are done: give more to go on, or leave it"
            " out"
        )

    # An order is of one number of ranks and shards.
    engine = config.engine
    facts = start.state.facts
    same = (facts["ranks"], facts["shards"]) == (config.sync.ranks, engine.shard_count)
    if engine.trace_order and not same:
        on_warning("a trace is of one number of ranks and shards: trace.npz begins where this does")
    return start


def _refuse_other_options(
    run: Path, config: TrainConfig, written: TrainConfig, before: TrainConfig
) -> None:
    old = dict(option_values(before))
    there = dict(option_values(written))
    for name, value in option_values(config):
        if value == old[name] or name in _MAY_CHANGE:
            continue
        edited = value == there[name]
        raise ValueError(
            f"{f'{run}/config.json was edited: ' if edited else '--'}{name} is {value}, but the run"
            f" was begun with {old[name]}, which decides what is trained or judged:"
            f" {'put it back' if edited else 'leave it out'}, or start a new run"
        )


def is_finished(run: Path, config: TrainConfig) -> bool:
    """Whether the folder holds the result of a run, and nothing is left to train under these
    options. Raises ValueError naming an option that would make it another run: its result is not
    what was asked for."""
    if not (run / SUMMARY).exists():
        return False
    written = read_config(run / "config.json")
    finished = bool(_why_finished(run, config, written))
    if finished:
        _refuse_other_options(run, config, written, written)
    return finished


def _why_finished(run: Path, config: TrainConfig, written: TrainConfig) -> str:
    """Only a run that its steps have ended can go further: others have used up their data. Empty
    for one that can."""
    trained = (read_summary(run) or {}).get("steps")
    steps = written.steps
    if steps is None or (isinstance(trained, int) and trained < steps):
        return (
            f"the run in {run} is finished: stopped early, or it has trained on all of its data,"
            f" and a resume adds none; start a new run, such as with --data.epochs"
            f" {written.data.epochs + 1}"
        )
    if config.steps is not None and config.steps <= steps:
        return f"the run in {run} is finished; add --steps, more than {steps:,}, to go on"
    return ""
