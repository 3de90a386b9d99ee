"""The words behind `python -m runtime train`: a file's options, a preset's, and what was typed."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, cast

import tyro

from persia_sim.words.rules import refuse_doubled
from persia_sim.words.vocabulary import with_unbounded
from runtime.config import TrainConfig, read_config
from runtime.config.options import option_kinds
from runtime.config.presets import PRESETS, PresetName, with_preset
from runtime.config.train import UnreadOptionError
from runtime.torchrun import Launch, as_launched, refuse_executor, refuse_other


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

    def __post_init__(self) -> None:
        own = {"--out": self.out, "--config": self.config, "--preset": self.preset}
        for name in [name for name, value in own.items() if value and self.resume]:
            raise ValueError(f"--resume goes on in its folder with its config; remove {name}")


def read_train(arguments: list[str], launch: Launch | None = None) -> Train:
    """What was asked for: the file's options, and over them those of the command line.

    ``launch``: as which of torchrun's processes; None: as the only one.
    """
    refuse_doubled(arguments)
    typed = {word.split("=")[0] for word in arguments if word.startswith("--")}
    for option in ("--out", "--config", "--resume", "--trace", "--data.dir", "--data.name"):
        if value_of(option, arguments) == "":
            raise ValueError(f"{option} is empty; give a path or leave it out")
    flags = {f"--{name}" for name, kind in option_kinds(TrainConfig) if kind is bool}
    for word in arguments:
        flag, equals, value = word.partition("=")
        if equals and re.sub(r"(--|\.)no-", r"\1", flag.replace("_", "-")) in flags:
            raise ValueError(f"{flag} takes no value, got {value!r}; write the option alone")
    file, run = (value_of(option, arguments) for option in ("--config", "--resume"))
    if run is not None:
        file = str(Path(run) / "config.json")
        if not Path(file).is_file():
            raise ValueError(f"--resume {run}: there is no run, it holds no config.json")
    config = read_config(Path(file)) if file else TrainConfig()
    if launch is not None:
        refuse_executor(value_of("--executor", arguments))
        config = as_launched(config, launch, f"sync.ranks in {file}", resumes=run is not None)
    if run is not None and int(value_of("--servers", arguments) or 0):
        config = replace(config, engine=replace(config.engine, shards=1))  # servers replace them
    preset = value_of("--preset", arguments)
    if preset in PRESETS and run is None:
        config = with_preset(config, cast(PresetName, preset), value_of("--executor", arguments))
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
                args=with_unbounded(arguments),
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


def value_of(option: str, arguments: list[str]) -> str | None:
    """The word after ``option``, or after its equals sign."""
    for number, word in enumerate(arguments):
        if word == option and number + 1 < len(arguments):
            return arguments[number + 1]
        if word.startswith(f"{option}="):
            return word.removeprefix(f"{option}=")
    return None
