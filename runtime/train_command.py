"""`python -m runtime train`: what was typed becomes a config, the run, and the lines at its end."""

from __future__ import annotations

import io
import math
import re
import sys
import time
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import tyro

from persia_sim.words.rules import counted
from runtime.config import TrainConfig, read_config
from runtime.config.options import as_typed, option_kinds
from runtime.config.presets import PRESETS, PresetName, told_of, with_preset
from runtime.config.train import UnreadOptionError
from runtime.data.errors import DataError
from runtime.stop import PeerError
from runtime.torchrun import (
    Launch,
    as_launched,
    launched,
    refuse_executor,
    refuse_other,
    started_s,
)

if TYPE_CHECKING:
    from runtime.engines.processes.ranks import ProcessRank

MOST_ROLLBACKS = 8
"""Times that a run of one process goes back to its last checkpoint by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Train one model in one mode, evaluate it on the test part, and keep the run's folder."""

    run: Annotated[TrainConfig, tyro.conf.arg(name="")]
    config: Path | None = None
    """Options from a file: the config.json of a run, or TOML with the same groups (sync, engine,
    evaluation, data, model, rows). Options on the command line come after it and win."""
    preset: PresetName | None = None
    """What others run: sets mode, tau and what goes with them. Comes after a file; options on the
    command line come after it and win. Each is told in docs/training.md."""
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
        own: dict[str, object] = {"--out": self.out, "--config": self.config}
        own |= {"--preset": self.preset, "--auto": self.auto}
        for name in [name for name, value in own.items() if value and self.resume]:
            raise ValueError(f"--resume goes on in its folder with its config; remove {name}")


def train(arguments: list[str]) -> None:
    """The command, from its words on the command line."""
    try:
        _train(arguments)
    except DataError:  # names what stands in a schema, or an option as it is typed
        raise
    except ValueError as error:
        file = _value_of("--config", arguments)
        if file and file in str(error):  # names what stands in that file
            raise
        raise ValueError(as_typed(str(error))) from error


def _train(arguments: list[str]) -> None:
    launch = launched()
    command = read_train(arguments, launch)
    began = time.localtime(None if launch is None else started_s())
    if command.preset is not None and launch is None:
        print(f"preset {command.preset}: {told_of(command.preset, command.run)}")
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
    preset = _value_of("--preset", arguments)
    if preset in PRESETS and run is None:
        config = with_preset(config, cast(PresetName, preset), _value_of("--executor", arguments))
    try:
        command = _parsed(arguments, config)
    except UnreadOptionError as error:
        given = {f"--{error.option}", f"--{error.option.replace('_', '-')}"}
        if given & typed or not (preset or file):
            raise
        setter = f"--preset {preset}" if preset else f"--config {file}"
        raise ValueError(
            f"{str(error).removesuffix('; remove it')}; {setter} sets it, for another mode or"
            " executor: leave that out, or --mode and --executor"
        ) from None
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
    if command.run.engine.trace is not None:
        _refuse_other_trace(command.run.engine.trace, command.run, typed)
    return command


def _parsed(arguments: list[str], config: TrainConfig) -> Train:
    """What tyro makes of the words; a ValueError of ours is raised, which tyro would frame."""
    told = io.StringIO()
    try:
        with redirect_stderr(told):
            return tyro.cli(
                Train,
                args=arguments,
                default=Train(run=config),
                prog="python -m runtime train",
                config=(tyro.conf.EnumChoicesFromValues,),
            )
    except SystemExit as left:
        if (own := _own_error(left)) is not None:
            raise own from None
        sys.stderr.write(told.getvalue())
        raise


def _own_error(left: SystemExit) -> ValueError | None:
    """What made tyro leave, if it was raised by code that is not tyro's."""
    found = left.__context__ and left.__context__.__context__
    frame = found.__traceback__ if isinstance(found, ValueError) else None
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None or frame.tb_frame.f_globals["__name__"].startswith("tyro."):
        return None
    return cast(ValueError, found)


def _refuse_other_trace(file: Path, config: TrainConfig, typed: set[str]) -> None:
    """Before any data is read: whether the file is a trace, and of such a run. A replay takes tau
    from it; who types another one is mistaken about the trace."""
    from persia_sim.words.trace import Trace
    from runtime.order.replayable import config_facts, refuse_other_run  # loads torch

    trace = Trace.load(file)
    recorded = trace.meta.get("tau")
    if "--tau" in typed and recorded != config.sync.tau:
        raise ValueError(
            f"--tau is {config.sync.tau}, but trace {file} was made with tau {recorded} and a"
            " replay takes it from there; remove --tau"
        )
    refuse_other_run(trace, config_facts(config), str(file))


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
    if config.engine.executor == "replay":
        print("the trained model is not kept: a replay writes no checkpoints")
    elif not config.checkpoint.at_end:
        print(
            "the trained model is not kept; --checkpoint-every end keeps it, for evaluate, export"
        )
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
    part = summary["evaluated_on"].split()[0]
    for task, score in summary["tasks"].items():
        lines.append(
            f"  {task:<12} {part} AUC {score['auc']:.4f}   log-loss {score['log_loss']:.4f}"
            f"   (always saying {score['label_rate']:.3f}: {score['trivial_log_loss']:.4f})"
        )
        more = f"normalised entropy {score['normalized_entropy']:.4f}"
        more += f"   calibration {score['calibration']:.3f}"
        if score.get("gauc_groups"):
            more += f"   GAUC {score['gauc']:.4f} of {score['gauc_groups']:,} groups"
            more += f" ({score['gauc_groups_left_out']:,} of one label left out)"
        lines.append(f"  {'':<12} {more}")
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
        "rows evicted": summary["rows_evicted"],
        "rows expired": summary["rows_expired"],
        "lookups that admission gave no row": summary["lookups_not_admitted"],
        "row gradients dropped, whose row was not there": summary["row_gradients_dropped"],
        "batches skipped": summary["batches_skipped"],
        "pushes lost": summary["pushes_lost"],
        "checkpoints not written": summary["checkpoints_failed"],
        "pushes lost at servers, and left out ones": sum(summary["pushes_lost_at"]),
    }
    lines += [f"  {what}: {count:,}" for what, count in left_out.items() if count]
    lines += [f"  note: {text}" for text in summary["notes"]]
    lines += [f"  warning: {text}" for text in summary["warnings"]]
    return "\n".join(lines)
