"""The commands of `python -m runtime`; heavy imports wait until a command needs them."""

from __future__ import annotations

import errno
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import tyro

from persia_sim.words.rules import counted
from runtime.config import TrainConfig, read_config
from runtime.config.options import option_kinds
from runtime.data.errors import nearest
from runtime.stop import PeerError
from runtime.torchrun import (
    Launch,
    as_launched,
    launched,
    refuse_executor,
    refuse_other,
    started_s,
    tell_torchrun,
)

if TYPE_CHECKING:
    from runtime.engines.processes.ranks import ProcessRank

MOST_ROLLBACKS = 8
"""Times that a run of one process goes back to its last checkpoint by itself."""

USAGE = """usage: python -m runtime COMMAND [options]

  train      train one model and write its run folder     (train --help lists every option)
  evaluate   judge a trained model again, on its test part or on other data
  export     write a trained model as files: rows as parquet, the network by torch.export
  profile    measure what each stage costs here, for the simulator
  data list  the data sets, and where each was found
  data get   download a data set from its publisher

  python -m experiments list shows the studies built on this; the README tells the words.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Train one model in one mode, evaluate it on the test part, and keep the run's folder."""

    run: Annotated[TrainConfig, tyro.conf.arg(name="")]
    config: Path | None = None
    """Options from a file: the config.json of a run, or TOML with the same groups (sync, engine,
    evaluation, data, model, rows). Options on the command line come after it and win."""
    out: Path | None = None
    """Folder to fill; else runs/train/<time>-<mode>."""
    resume: Path | None = None
    """Folder of a run that was interrupted or killed: go on in it from its newest checkpoint, with
    its config.json. Ranks, shards, engine, device, steps and checkpoints may be given anew."""
    auto: bool = False
    """With --mode hybrid --executor concurrent: first time sync, lookahead and hybrid on a few
    batches, say what hybrid would gain, and train in the fastest."""

    def __post_init__(self) -> None:
        chosen = self.run.sync.mode, self.run.engine.executor
        if self.auto and chosen != ("hybrid", "concurrent"):
            raise ValueError("auto chooses for --mode hybrid --executor concurrent; add both")
        own = {"--out": self.out, "--config": self.config, "--auto": self.auto}
        for name in [name for name, value in own.items() if value and self.resume]:
            raise ValueError(f"--resume goes on in its folder with its config; remove {name}")


def main(arguments: Sequence[str]) -> int:
    """Run one command; the exit code is 0, 2 for a mistake of the user, 130 after Ctrl-C."""
    if not arguments or arguments[0] in ("-h", "--help"):
        return guarded(lambda: print(USAGE, end=""))
    name, rest = arguments[0], list(arguments[1:])
    if name == "--version":
        print(f"persia-testbed {_version()}")
        return 0
    if name not in COMMANDS:
        print(f"error: no command {name!r}; {nearest(name, COMMANDS)}", file=sys.stderr)
        return 2
    return guarded(lambda: COMMANDS[name](rest))


def _version() -> str:
    try:
        return metadata.version("persia-testbed")
    except metadata.PackageNotFoundError:
        return "(not installed: runs from its source folder)"


def leave(code: int) -> NoReturn:
    """End the process. After a failure at once: a rank's thread may still be tidying its native
    thread-locals, which must not meet an interpreter that is being taken down."""
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(0)


def guarded(work: Callable[[], None]) -> int:
    """Turn the errors that users can mend into one clear message instead of a traceback."""
    try:
        try:
            work()
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is no error
    except KeyboardInterrupt:
        print(
            "\ninterrupted; what was finished is kept: a run with checkpoints goes on with"
            " --resume, others start anew",
            file=sys.stderr,
        )
        return 130
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        tell_torchrun(f"error: {error}")
        return 2
    except MemoryError as error:
        print(f"error: {error or 'out of memory'}", file=sys.stderr)
        tell_torchrun(f"error: {error or 'out of memory'}")
        return 2
    except BrokenPipeError:
        # The reader of our output has gone, as `| head` does; what is left is for nobody.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "; the disk is full: free some space and run again" if full else ""
        where = f"{error.filename}: " if error.filename else ""
        sentence = f"error: {where}{error.strerror or error}{hint}"
        print(sentence, file=sys.stderr)
        tell_torchrun(sentence, comes_second=isinstance(error, PeerError))
        return 2
    except Exception as error:
        tell_torchrun(f"{type(error).__name__}: {error}")
        raise
    return 0


def _train(arguments: list[str]) -> None:
    launch = launched()
    command = read_train(arguments, launch)
    began = time.localtime(None if launch is None else started_s())
    fresh = f"{time.strftime('%Y%m%d-%H%M%S', began)}-{command.run.sync.mode}"
    folder = command.resume or command.out or Path("runs/train") / fresh
    if launch is not None:
        _train_as_rank(command, launch, folder, arguments)
        return
    from runtime.run.claim import claimed

    with claimed(folder, resume=command.resume is not None):
        work(command, folder, arguments)


def _train_as_rank(command: Train, launch: Launch, folder: Path, arguments: list[str]) -> None:
    """Rank 0 trains as a single process does, and the others follow it."""
    from runtime.checkpoint.whole import complete_checkpoints
    from runtime.run.claim import claimed
    from runtime.run.ranks import follow, joined

    if launch.restarts and complete_checkpoints(folder):
        command = replace(command, resume=folder, out=None)  # all were lost, and go on
    with joined(command.run, launch) as rank:
        if not rank.leads:
            follow(command.run, rank)
            return
        with claimed(folder, resume=command.resume is not None):
            work(command, folder, arguments, rank)


def read_train(arguments: list[str], launch: Launch | None = None) -> Train:
    """What was asked for: the file's options, and over them those of the command line.

    ``launch``: as which of torchrun's processes; None: as the only one.
    """
    typed = {word.split("=")[0] for word in arguments if word.startswith("--")}
    for option in ("--out", "--config", "--resume", "--trace", "--data.dir", "--data.name"):
        if _value_of(option, arguments) == "":
            raise ValueError(f"{option} is empty; give a path or leave it out")
    flags = {f"--{name}" for name, kind in option_kinds(TrainConfig) if kind is bool}
    for word in arguments:
        flag, equals, value = word.partition("=")
        if equals and re.sub(r"(--|\.)no-", r"\1", flag.replace("_", "-")) in flags:
            raise ValueError(f"{flag} takes no value, got {value!r}; write the option alone")
    file, run = (_value_of(option, arguments) for option in ("--config", "--resume"))
    if run is not None:
        file = str(Path(run) / "config.json")
        if not Path(file).is_file():
            raise ValueError(f"--resume {run}: there is no run, it holds no config.json")
    config = read_config(Path(file)) if file else TrainConfig()
    if launch is not None:
        refuse_executor(_value_of("--executor", arguments))
        config = as_launched(config, launch, f"sync.ranks in {file}", resumes=run is not None)
    if run is not None and int(_value_of("--servers", arguments) or 0):
        config = replace(config, engine=replace(config.engine, shards=1))  # servers replace them
    start = Train(run=config)
    command = tyro.cli(
        Train,
        args=arguments,
        default=start,
        prog="python -m runtime train",
        config=(tyro.conf.EnumChoicesFromValues,),
    )
    if launch is not None:
        refuse_other(command.run, launch)
        if command.auto:
            raise ValueError("auto times threads of one process; start it without torchrun")
    unread = command.run.unread()
    if launch is None:
        unread["dense_sum"] = "ranks that torchrun has started as processes"
    for name, where in unread.items():
        flag = name.replace("_", "-")
        if typed & {f"--{flag}", f"--no-{flag}", f"--{name}", f"--no-{name}"}:
            raise ValueError(command.run.not_used(name, where))
    trace = command.run.engine.trace
    if trace is not None and "--tau" in typed:
        _refuse_other_tau(trace, command.run.sync.tau)
    return command


def _refuse_other_tau(trace: Path, tau: int | None) -> None:
    """A replay takes tau from its trace; who types another one is mistaken about the trace."""
    from persia_sim.words.trace import Trace

    recorded = Trace.load(trace).meta.get("tau")
    if recorded != tau:
        raise ValueError(
            f"--tau is {tau}, but trace {trace} was made with tau {recorded} and a replay takes it"
            " from there; remove --tau"
        )


def _value_of(option: str, arguments: list[str]) -> str | None:
    """The word after ``option``, or after its equals sign."""
    for number, word in enumerate(arguments):
        if word == option and number + 1 < len(arguments):
            return arguments[number + 1]
        if word.startswith(f"{option}="):
            return word.removeprefix(f"{option}=")
    return None


def work(
    command: Train, folder: Path, arguments: list[str], rank: ProcessRank | None = None
) -> None:
    """Train in the folder that was claimed; ``rank``: as rank 0 of several processes."""
    from tqdm import tqdm

    from runtime.checkpoint.whole import complete_checkpoints
    from runtime.run.ending import Ending, Interrupted
    from runtime.run.record import run_into

    config = _choose(command.run) if command.auto else command.run
    total = None if config.steps is None else config.steps * config.batch
    mode = str(config.sync.mode)
    resume, rollbacks, ending = command.resume is not None, 0, Ending()
    with tqdm(total=total, unit=" samples", unit_scale=True, desc=mode, disable=None) as bar:
        while True:
            try:
                summary = run_into(
                    folder,
                    config,
                    on_samples=bar.update,
                    on_warning=lambda t: bar.write(f"warning: {t}"),
                    on_start=bar.write,
                    resume=resume,
                    ending=ending,
                    typed=() if rollbacks else arguments,
                    rank=rank,
                )
                break
            except Interrupted as told:
                bar.close()
                print(told)
                return
            except PeerError as error:
                rollbacks += 1
                alone = rank is None  # else torchrun starts all ranks again, and they go on
                if not alone or rollbacks > MOST_ROLLBACKS or not complete_checkpoints(folder):
                    raise
                bar.write(f"warning: {error}; the run goes back to its last checkpoint")
                bar.reset()
                resume = True
    print(describe(summary))
    print(f"run folder: {folder}")


def _choose(config: TrainConfig) -> TrainConfig:
    import torch

    from runtime.data.open import open_source
    from runtime.run.choose import fastest

    torch.set_num_threads(config.engine.threads)
    data = config.data
    choice = fastest(config, open_source(data.name, data.dir, skip_bad_rows=data.skip_bad_rows))
    print(choice.describe())
    return choice.config


def _tau_word(tau: int | None) -> str:
    return "unbounded" if tau is None else str(tau)


def describe(summary: dict) -> str:  # type: ignore[type-arg]
    """The few lines that a person reads after one run."""
    lines = [
        f"{summary['mode']}, tau {_tau_word(summary['tau'])}, {counted(summary['ranks'], 'rank')}:"
        f" {summary['samples']:,} samples in {summary['updates']:,} updates,"
        f" {summary['samples_per_s']:,.0f} samples/s ({summary['executor']} executor"
        f"{', ranks of a step as one batch' if summary['ranks_fused'] else ''})"
    ]
    for task, score in summary["tasks"].items():
        lines.append(
            f"  {task:<12} test AUC {score['auc']:.4f}   log-loss {score['log_loss']:.4f}"
            f"   (always saying {score['label_rate']:.3f}: {score['trivial_log_loss']:.4f})"
        )
    if summary["best_reachable_auc"] is not None:
        lines.append(
            f"  best reachable AUC of this synthetic stream {summary['best_reachable_auc']:.4f}"
        )
    stale = summary["staleness"]
    late = f"{stale.mean_steps:.2f} steps on average, {stale.max_steps} at most"
    if math.isnan(stale.mean_steps):
        late = "not known: the order of the servers' reads and writes is not here"
    lines.append(f"  staleness    {late}; {summary['rows']:,} rows")
    if summary["checkpoints_written"]:
        pause_s = summary["longest_pause_s"]
        written = counted(summary["checkpoints_written"], "checkpoint")
        lines.append(f"  {written} written; training paused for {pause_s:.3f} s at most")
    data = summary["data"]
    bad_rows = f"bad rows skipped: {data.skipped_where}; in all" if data.skipped_where else ""
    left_out = {
        bad_rows: data.rows_skipped,
        "batches skipped": summary["batches_skipped"],
        "pushes lost": summary["pushes_lost"],
        "checkpoints not written": summary["checkpoints_failed"],
        "pushes lost at servers, and left out ones": sum(summary["pushes_lost_at"]),
    }
    lines += [f"  {what}: {count:,}" for what, count in left_out.items() if count]
    lines += [f"  warning: {text}" for text in summary["warnings"]]
    return "\n".join(lines)


def _evaluate(arguments: list[str]) -> None:
    from runtime.serving.commands import evaluate

    evaluate(arguments)


def _export(arguments: list[str]) -> None:
    from runtime.serving.commands import export

    export(arguments)


def _profile(arguments: list[str]) -> None:
    from runtime.run.profile_command import run

    run(arguments)


def _data(arguments: list[str]) -> None:
    from runtime.data.commands import run

    run(arguments)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": _train,
    "evaluate": _evaluate,
    "export": _export,
    "profile": _profile,
    "data": _data,
}
