"""`persia-runtime train`: the run of what was typed, and the lines at its end."""

from __future__ import annotations

import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from persia_sim.base.command_line import as_typed
from persia_sim.base.rules import Refused, printable
from runtime.config import DataConfig, TrainConfig
from runtime.config.presets import preset_text
from runtime.config.training_file import PREDICTED, Predicted, predicted_in
from runtime.object_store import address_of
from runtime.process import COUNTS_OF_PROCESSES
from runtime.stop import (
    MOST_RESTARTS,
    UNFINISHED,
    Ending,
    Interrupted,
    PeerError,
    Terminated,
    Unfinished,
    pause_before,
)
from runtime.train_options import AUTO, Train, cluster_asked, options_report, read_train

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from runtime.checkpoint.whole import Checkpoint
    from runtime.data.source import Source
    from runtime.hosts.resize import WishListener
    from runtime.hosts.torchrun import Launch
    from runtime.rank.doors import JoinedRank

RANK_0_TELLS_WITHIN_S = 5.0
"""By then torchrun has ended the ranks that make the same mistake."""
LAST_WORDS_S = 300.0
"""Rank 0 of the attempt before may have lost its launcher alone, and be writing a checkpoint."""
_RESTARTS = "PERSIA_TESTBED_RESTARTS"
_RESIZED = "PERSIA_TESTBED_RESIZED"
"""Since when a run changes the number of its servers, that number, and the one from now on."""


def run_command(arguments: list[str]) -> None:
    """The command, from its words on the command line; signals are heard from its first moment to
    its last."""
    ending = Ending(at_once=True)
    try:
        with ending.listening(), ending.watched():
            _dispatch(arguments, ending)
    except Refused as error:
        raise ValueError(as_typed(error, TrainConfig)) from error


def _dispatch(arguments: list[str], ending: Ending) -> None:
    """Train on a cluster, as a rank that torchrun has started, or in this process alone."""
    launch: Launch | None = None
    is_one_of_several = any(name in os.environ for name in COUNTS_OF_PROCESSES)
    if is_one_of_several:
        from runtime.hosts.torchrun import is_rank, launched

    # A cluster has one driver, whoever has started it: in a step of Slurm, for one.
    asked = None if is_one_of_several and is_rank() else cluster_asked(arguments)
    if asked is not None:
        try:
            from runtime.hosts.ray.supervisor import train_on_cluster  # loads torch, and Ray
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise ValueError(
                "--ray needs Ray, which is not installed here: pip install"
                " 'persia-testbed[cluster]', or start the ranks by torchrun"
            ) from None
        train_on_cluster(asked)
        return

    # The options; a rank of torchrun has its number and its host from there.
    if is_one_of_several:
        launch = launched()
    try:
        command = read_train(arguments, launch)
    except (ValueError, OSError):
        if launch is not None and launch.rank:  # rank 0 says it once for all
            time.sleep(RANK_0_TELLS_WITHIN_S)
        raise
    if command.dry_run:
        print(options_report(arguments))
        return
    command = _with_data_that_is_here(command, arguments)
    from runtime.run.folder import fresh_folder

    # The folder is named by the launcher's clock, so that all ranks find the same one.
    began = time.localtime(None if launch is None else launch.started_s)
    if command.preset is not None and launch is None:
        print(
            f"preset {command.preset}: {preset_text(command.preset, command.run)}",
            file=_talk(command),
        )
    fresh = f"{time.strftime('%Y%m%d-%H%M%S', began)}-{command.run.sync.mode}"
    if launch is not None:  # a rank that is started anew must find the folder of its launcher
        folder = command.folder or Path("runs/train") / f"{fresh}-{os.getppid()}"
        ending.on_leaving = partial(_note_early_ending, launch, folder)
        try:
            _train_as_rank(command, launch, folder, arguments, ending)
        except (Terminated, PeerError) as ended:
            if not (ending.at_once and ending.why):
                raise
            ending.on_leaving(ending.why)
            raise Terminated(str(ended), ending.why) from None
        return

    # Alone: from start to end in this process.
    folder = command.folder or fresh_folder(Path("runs/train") / fresh)
    try:
        _train_alone(command, folder, arguments, ending)
    except KeyboardInterrupt as error:
        raise type(error)(_interrupted(folder)) from None


def _with_data_that_is_here(command: Train, arguments: list[str]) -> Train:
    """Where nobody has said which data: those of the default, else the synthetic stream, with a
    line that says so; as `persia-experiments demo` does."""
    from runtime.data.catalogue import CATALOGUE, DATA_DIR_VARIABLE, FIRST_DOWNLOAD, find_folder
    from runtime.data.errors import DataError

    # Whoever names data, or where they lie, means them.
    words = {word.partition("=")[0] for word in arguments}
    is_named = bool({"--data", "--data.name"} & words) or DATA_DIR_VARIABLE in os.environ
    from_file = command.config is not None or command.resume not in (None, AUTO)
    default = DataConfig()
    if is_named or from_file or command.run.data != default:
        return command
    with suppress(DataError):
        find_folder(CATALOGUE[default.name]())
        return command
    print(
        "no real data found: training on the synthetic stream; for real clicks run `persia-runtime"
        f" data get {FIRST_DOWNLOAD}`, or name yours: --data FILE.toml",
        file=_talk(command),
    )
    return replace(command, run=replace(command.run, data=replace(default, name="synthetic")))


def _train_alone(command: Train, folder: Path, arguments: list[str], ending: Ending) -> None:
    """In this process, with what it starts."""
    from runtime.run.folder import claimed, status_of

    if command.resume == AUTO:
        if _says_finished(command, folder):
            return
        command = _going_on(command, folder)
    # Train; with other servers, and after a death, this process becomes a resume.
    listener = None
    listening: AbstractContextManager[None] = nullcontext()
    if command.run.engine.servers and _is_whole_process(arguments):
        from runtime.hosts.resize import WishListener

        listener = WishListener(folder, command.run.engine.servers, ending)
        listening = listener.listening()
    try:
        with claimed(folder, resume=command.resume is not None, on_lost=ending.ask), listening:
            train_in_folder(command, folder, arguments, ending)
    except PeerError as error:
        _start_again(error, folder, arguments, ending)
        if status_of(folder) is None:  # it was not under way yet
            raise
        raise Unfinished(str(error)) from None
    except Interrupted:
        if listener is not None:
            _go_on_resized(listener, folder, arguments)
        raise


def _go_on_resized(listener: WishListener, folder: Path, arguments: list[str]) -> None:
    """Go on with other servers where the run has ended by somebody's wish for them; at every rank,
    as all know why it has ended."""
    from runtime.checkpoint.places import complete_checkpoints
    from runtime.hosts.resize import servers_wanted_by

    wanted = servers_wanted_by(listener.ending.why)
    if wanted is None or not complete_checkpoints(folder):  # it had not trained a step yet
        return
    if listener.wanted is not None:  # it was taken here
        os.environ[_RESIZED] = f"{listener.asked_s} {listener.servers} {wanted}"
    _become_resume(folder, arguments, "--servers", str(wanted))


def _going_on(command: Train, folder: Path) -> Train:
    """The command, going on from the folder's newest whole checkpoint; as it was without one."""
    from runtime.checkpoint.places import complete_checkpoints

    if not complete_checkpoints(folder):
        return replace(command, resume=None)
    return replace(command, resume=folder, out=None, config=None, preset=None)  # all read already


def _says_finished(command: Train, folder: Path) -> bool:
    """Whether the folder holds the finished run of these options, which then is told."""
    from runtime.run.folder import checked_summary
    from runtime.run.saver import is_finished

    finished = is_finished(folder, command.run)
    if finished:
        talk = _talk(command)
        print(f"the run in {folder} is finished: nothing is left to do", file=talk, flush=True)
    if finished and command.json:
        from runtime.run.closing import as_json

        print(as_json(checked_summary(folder), str(folder)), flush=True)
    return finished


def _talk(command: Train) -> TextIO:
    """Where sentences go: stdout, unless that is for one JSON document."""
    return sys.stderr if command.json else sys.stdout


def _note_early_ending(launch: Launch, folder: Path, by: str) -> None:
    """Write down that a signal has ended the ranks before they train: torchrun turns the exit code
    into its own, which says nothing of that."""
    from runtime.run.folder import SUMMARY, write_ending

    if launch.rank or (folder / SUMMARY).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_ending(folder, UNFINISHED, by, "ended before the ranks began to train")


def _interrupted(folder: Path) -> str:
    """What is left of a run that Ctrl-C has ended at once; torch may be half imported."""
    if (folder / "summary.json").exists():
        return f"interrupted: {folder} holds a finished run"
    if any((folder / "checkpoints").glob("[0-9]*/state.json")):
        return (
            "interrupted at once; go on with: persia-runtime train --resume"
            f" {quote(address_of(folder))}"
        )
    return "interrupted: there is nothing to go on from; the same command starts anew"


def _start_again(error: PeerError, folder: Path, arguments: list[str], ending: Ending) -> None:
    """Go on from the last checkpoint in a process that knows nothing of this attempt, a while
    later: a host may have to start.

    As torchrun does, but with the same process id. Returns where that cannot be: without a
    checkpoint, too often, or where this process was not started for this command alone. Raises
    Terminated where the run was asked to end, or is now.
    """
    from runtime.checkpoint.places import complete_checkpoints

    restarts = int(os.environ.get(_RESTARTS, "0")) + 1
    too_often = restarts > MOST_RESTARTS
    if not _is_whole_process(arguments) or too_often or not complete_checkpoints(folder):
        return

    # Say what happened, and wait: a host may have to start.
    pause_s = pause_before(restarts)
    back = f"the run goes back to its last checkpoint in {pause_s:.0f} s"
    print(f"warning: {error}; {'it was asked to end' if ending else back}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if ending:
        raise Terminated
    ending.at_once = True
    time.sleep(pause_s)

    os.environ[_RESTARTS] = str(restarts)
    _become_resume(folder, arguments)


def _is_whole_process(arguments: list[str]) -> bool:
    """Whether this process was started for this command alone."""
    return sys.argv[1:] == ["train", *arguments]


def _become_resume(folder: Path, arguments: list[str], *more: str) -> NoReturn:
    """This process becomes the same command again, from the newest checkpoint."""
    sys.stdout.flush()
    sys.stderr.flush()
    python = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]  # its options, us, "train"
    # Of this model this attempt has run code.
    again = ["--resume", address_of(folder), "--trust", *more]
    for place, word in enumerate(arguments):
        if word == "--log" or word.startswith("--log="):
            again += arguments[place : place + (2 if word == "--log" else 1)]
    form = [word for word in arguments if word == "--json"]
    os.execv(sys.executable, [sys.executable, *python, *form, *again])


def _train_as_rank(
    command: Train, launch: Launch, folder: Path, arguments: list[str], ending: Ending
) -> None:
    """Rank 0 trains as a single process does, and the others follow it."""
    from runtime.hosts.ranks import follow, joined, meet_as_leader
    from runtime.hosts.resize import WishListener
    from runtime.run.folder import claimed, wait_until_free

    # After a restart of all ranks the run goes on from its newest checkpoint. Rank 0 hears of a
    # wish for other servers, where nobody supervises the run who does.
    interrupted = None
    listener = WishListener(folder, command.run.engine.servers, ending)
    resizes = launch.is_of_torchrun and _is_whole_process(arguments)
    with joined(command.run, launch) as rank:
        is_finished = False
        if rank.leads and (rank.attempt > 1 or command.resume == AUTO):  # all were lost, and go on
            wait_until_free(folder, LAST_WORDS_S)
            is_finished = _says_finished(command, folder)
            command = _going_on(command, folder)
        # One that died while all parted has taken nothing with it.
        if rank.told("what is left to do", "" if is_finished else "all") == "":
            return
        try:
            if not rank.leads:
                follow(command.run, rank, ending)
                return
            listening = listener.listening() if resizes else nullcontext()
            with claimed(folder, resume=command.resume is not None, on_lost=ending.ask), listening:
                meet = partial(meet_as_leader, rank, command.run, folder)
                train_in_folder(command, folder, arguments, ending, rank, meet)
        except Interrupted as interruption:  # now all ranks part, as at the end
            interrupted = interruption

    # All ranks have parted; now the process may end as it was asked to.
    if interrupted is None:
        return
    if resizes:
        _go_on_resized(listener, folder, arguments)
    raise interrupted


def train_in_folder(
    command: Train,
    folder: Path,
    arguments: list[str],
    ending: Ending,
    rank: JoinedRank | None = None,
    meet: Callable[[Source, Checkpoint | None], None] | None = None,
) -> None:
    """Train in the folder that was claimed; ``rank``: as rank 0 of several processes, which all
    agree in ``meet``. Raises
    `Interrupted` where ``ending`` was asked for."""
    from persia_sim.base.progress import Progress
    from runtime.checkpoint.places import complete_checkpoints as kept
    from runtime.checkpoint.places import folder_of
    from runtime.run.record import run_into
    from runtime.stop import NotStored

    # Train, and show how far it is.
    config = command.run
    predicted = None if command.config is None else predicted_in(command.config)
    mode = str(config.sync.mode)
    log = None
    if command.log is not None:
        from runtime.run.loggers import logger_class

        log = logger_class(command.log)
    pause = None
    resized = os.environ.pop(_RESIZED, "")
    if resized:
        from runtime.hosts.resize import Pause

        pause = Pause.begun_by(resized)
    shown: dict[str, str] = {}  # beside the bar: the recent loss, the AUC of the last evaluation
    with Progress(unit=" samples", unit_scale=True, desc=mode) as bar:

        def on_samples(samples: int) -> None:
            bar.update(samples)
            if pause is not None:
                pause.note()

        def show(figures: Mapping[str, float]) -> None:
            shown.update((name, f"{value:.4f}") for name, value in figures.items())
            bar.set_postfix(shown, refresh=False)

        def expect(samples: int) -> None:
            bar.total = samples
            bar.refresh()

        def say(text: str) -> None:
            bar.write(printable(text, keep="\n"), file=_talk(command))  # it may quote a schema

        summary = run_into(
            folder,
            config,
            rank=rank,
            meet=meet,
            typed=arguments,
            resume=command.resume is not None,
            ending=ending,
            on_samples=on_samples,
            on_figures=show,
            on_warning=lambda t: say(f"warning: {t}"),
            on_start=say,
            on_total=expect,
            log=log,
        )

    # The report; a model that was to stay and could not be written is a failure.
    _print_report(command, folder, summary, predicted)
    asked = config.checkpoint.at_end
    replays = config.engine.executor == "replay"
    if asked and not replays and folder_of(folder, summary["samples"]) not in kept(folder):
        raise NotStored(
            f"the trained model is not kept: --checkpoint-every"
            f" {config.checkpoint.checkpoint_every} asked for it, and its checkpoint could not be"
            " written (a warning above says why); free some space, and train again"
        )


def _print_report(
    command: Train, folder: Path, summary: dict[str, Any], predicted: Predicted | None
) -> None:
    """The run's report in the form that was asked for, and where the run and its model are."""
    from runtime.run import closing

    config = command.run
    if command.json:
        beside = {} if predicted is None else {PREDICTED: asdict(predicted)}
        print(closing.as_json({**summary, **beside}, str(folder)), flush=True)
    else:
        print(printable(closing.whole(summary), keep="\n"))
        if predicted is not None:
            print()
            print(printable(closing.beside_prediction(predicted, summary), keep="\n"))
        print()

    # Who wants to go on needs to know what there is.
    talk = _talk(command)
    if config.engine.executor == "replay":
        print("the trained model is not kept: a replay writes no checkpoints", file=talk)
    elif not config.checkpoint.at_end:
        remedy = "--checkpoint-every end keeps it, for evaluate, export"
        print(f"the trained model is not kept; {remedy}", file=talk)
    print(f"run folder: {address_of(folder)}", file=talk)
