"""The words behind `persia-runtime train`: a file's options, a preset's, and what was typed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from persia_sim.base.command_line import FLAT, options_of, read_words, with_changes
from persia_sim.base.schema import Unread, Within, unread
from persia_sim.base.vocabulary import with_unbounded
from runtime.config import EngineConfig, TrainConfig, read_config
from runtime.config.checkpoints import END
from runtime.config.presets import PresetName, with_preset
from runtime.config.train import HOST_PORT
from runtime.models.imported import refuse_code_in, refuse_code_named_in, refuse_urls_named_in
from runtime.object_store import REQUEST_S, USUAL_REQUEST_S, url_of

if TYPE_CHECKING:
    from runtime.rank.doors import Launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Train one model in one mode, evaluate it on the test part, and keep the run's folder."""

    run: Annotated[TrainConfig, FLAT]
    config: Path | None = None
    """Options from a file: the config.json of a run, or TOML with the same groups (sync, engine,
    evaluation, data, model, rows). Options on the command line come after it and win. Example:
    run.toml."""
    preset: PresetName | None = None
    """What others run: sets mode, tau and what goes with them. Comes after a file; options on the
    command line come after it and win. docs/training.md explains each."""
    out: Path | None = None
    """Folder to fill, as runs/mine, or its URL, as s3://bucket/runs/mine; else
    runs/train/<time>-<mode>."""
    resume: Path | None = None
    """Folder of a run that was interrupted or killed, as runs/mine: go on in it from its newest
    checkpoint, with its config.json. Ranks, shards, engine, device, steps and checkpoints may be
    given anew. Or `auto`, for who starts the same command again and again: begin the run in --out
    DIR, or go on where that has a checkpoint."""
    trust: bool = False
    """Run the code of a class of somebody's own that the file of --resume or --config names,
    although it lies beside that and may have come with it. It can do whatever you can: read it
    first. Who types --model.name has said so."""
    ray: str | None = None
    """Have Ray place each rank and server: local:N starts N nodes on this machine, auto or
    HOST:PORT joins a cluster that is there. With --ranks 2:8 the run has as many ranks from 2 to 8
    as find room, and others as hosts come and go; so it has servers with --servers 4:16.
    `pip install 'persia-testbed[cluster]'`."""
    cluster_wait_s: float = 300.0
    """Seconds to wait until the cluster has room for all of them, or for the least."""
    store_timeout: Annotated[float, Within(0.1, 3600)] = USUAL_REQUEST_S
    """Seconds that a request to the store of --out URL may go without an answer, from 0.1 to 3600;
    a call is given up after five times as long, and the run ends with 75 when it cannot go on."""
    log: str | None = None
    """Tell the scores as they come: tensorboard (in the run folder; `pip install tensorboard`), or
    a class of yours, as my_log:MyLog (docs/training.md has one for W&B). Its code is run; no file
    can ask for it."""
    dry_run: bool = False
    """Read no data and train nothing: print every option that the run would read, its value, and
    whether it was typed, or is a file's, a preset's or the default."""

    json: bool = False
    """Print the summary as one JSON document on stdout, and all sentences on stderr. Not with
    --ray: there it stands in the run folder's summary.json."""

    def __post_init__(self) -> None:
        # Two ways to print.
        for other in ("dry_run", "ray"):
            if self.json and getattr(self, other):
                name = other.replace("_", "-")
                raise ValueError(f"--json and --{name} do not go together; remove one of them")

        # A resume has its folder and config already.
        if self.resume == AUTO and self.out is None:
            raise ValueError("--resume auto begins a run, or goes on with it: add --out DIR")
        others = {"--out": self.out, "--config": self.config, "--preset": self.preset}
        others = {} if self.resume == AUTO else others
        for name in [name for name, value in others.items() if value and self.resume]:
            raise ValueError(f"--resume goes on in its folder with its config; remove {name}")

        # What has no meaning without another option.
        if self.trust and not (self.resume or self.config):
            raise ValueError(
                "--trust is of a model that --resume or --config names, and there is neither;"
                " remove it"
            )
        if self.ray is not None and not _CLUSTER.fullmatch(self.ray):
            raise ValueError(
                f"--ray must be local:N with N from 1 to 64, auto or HOST:PORT, got {self.ray!r}"
            )

    @property
    def folder(self) -> Path | None:
        """Folder of the run, where one was named."""
        return self.out if self.resume in (None, AUTO) else self.resume


AUTO = Path("auto")
"""In place of a run's folder: whether there is one to go on with shows at the start."""
_CLUSTER = re.compile(rf"local:([1-9]|[1-5]\d|6[0-4])|auto|(?!local:){HOST_PORT.pattern}", re.ASCII)
COMMON = (
    "data.name",
    "data.dir",
    "data.rows",
    "data.validation-fraction",
    "data.epochs",
    "model.name",
    "model.hidden",
    "model.lr",
    "rows.dim",
    "rows.optimizer.kind",
    "rows.optimizer.lr",
    "mode",
    "ranks",
    "tau",
    "batch",
    "steps",
    "executor",
    "device",
    "seed",
    "eval-split",
    "evaluate-every-steps",
    "checkpoint-every",
    "config",
    "preset",
    "out",
    "resume",
    "dry-run",
    "json",
)
"""What `--help` shows; `--help all` shows the rest."""


def read_train(arguments: list[str], launch: Launcher | None = None) -> Train:
    """What was asked for: the file's options, and over them those of the command line.

    ``launch``: as which of torchrun's processes; None: as the only one.
    """
    # Over the file's and the preset's options those that were typed.
    command, options = _read(arguments)
    config = _begun(command, options, launch)[-1][1]
    try:
        run = with_changes(config, options)
    except Unread as error:
        # An option that nothing reads: whoever set it is named.
        resumed = None if command.resume == AUTO else command.resume
        layers_below = {"preset": command.preset, "config": command.config, "resume": resumed}
        set_by = next((f"--{name} {value}" for name, value in layers_below.items() if value), None)
        if error.field in options or set_by is None:
            raise
        rule = error.rule.removesuffix("; remove it")
        raise Unread(
            error.field,
            f"{rule}; {set_by} sets it, for another mode or executor: leave that out, or --mode and"
            " --executor",
        ) from None

    # Code that somebody else may have written is not run unasked.
    if "model.name" not in options:
        _refuse_code_of_others(command, run.model.name)
    given = command.config if command.resume in (None, AUTO) else command.resume
    if "data.name" not in options and given is not None:
        refuse_urls_named_in(given, run.data.name, trust=command.trust)
    if launch is not None:
        launch.refuse_other(run, command.folder)

    # What was typed is read by somebody, or refused.
    unread = run.unread()
    if options.get("sync.tau") == 0 and not run.sync.mode.reads_late_rows:
        unread.pop("sync.tau", None)  # which is true of these modes
    for path in (path for path in options if path in unread):
        raise Unread(path, run.why_unread(unread[path]))
    if run.engine.trace is not None:
        _refuse_other_trace(run.engine.trace, run, options)
    return replace(command, run=with_best_checkpoint(run))


def with_best_checkpoint(run: TrainConfig) -> TrainConfig:
    """A run that may be stopped early, so that the model of its best evaluation stays: who stops
    after evaluations that were no better does not want the last one's."""
    checkpoint = run.checkpoint
    if run.evaluation.stop_after is None or checkpoint.keep_best is not None:
        return run
    every = END if checkpoint.checkpoint_every is None else checkpoint.checkpoint_every
    return replace(
        run, checkpoint=replace(checkpoint, checkpoint_every=every, keep_best="goodness")
    )


def _refuse_code_of_others(command: Train, name: str) -> None:
    """A file names the model, and perhaps somebody else has written both."""
    asked: dict[str, Any] = {
        "trust": command.trust,
        "remedy": f"type --model.name {name}, or add --trust",
    }
    if command.resume is not None:
        refuse_code_in(command.resume, name, **asked)
    elif command.config is not None:
        refuse_code_named_in(command.config, name, **asked)


def _read(arguments: list[str]) -> tuple[Train, dict[str, Any]]:
    """The command without its run, and what was typed of that."""
    typed = read_words(Train, with_unbounded(arguments), "persia-runtime train", COMMON)
    options = {path.removeprefix("run."): v for path, v in typed.items() if path.startswith("run.")}
    of_command = {path: value for path, value in typed.items() if not path.startswith("run.")}
    if "store_timeout" in of_command:  # before a store is asked for what there is
        os.environ[REQUEST_S] = str(of_command["store_timeout"])
    for name in ("out", "resume"):
        url = None if of_command.get(name) is None else url_of(of_command[name])
        _refuse_no_place(f"--{name}", of_command.get(name), url)
        of_command |= {} if url is None else {name: _working_folder(url)}
    return Train(run=TrainConfig(), **of_command), options


def _refuse_no_place(option: str, value: Path | None, url: str | None) -> None:
    """Raise ValueError for what looks like a URL and is none, and for a store that ends with this
    process."""
    text = str(value or "")
    is_none = url is None and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:(/|,|$)", text)
    if is_none or "::" in text:
        raise ValueError(
            f"{option} is {text}, which is no URL of a folder, as s3://bucket/runs/mine is; a"
            f" folder here of that name is ./{text}"
        )
    if url is not None and url.startswith("memory:"):
        raise ValueError(
            f"{option} is {url}, which is gone when this process ends; name a folder or another"
            " store"
        )


@cache
def _working_folder(url: str) -> Path:
    """The folder of this host for a run whose folder is a URL, as the store has it now."""
    from runtime.checkpoint.places import fetched  # late: numpy

    return fetched(url, "runs")


class Range(NamedTuple):
    """How many processes of a kind a run on a cluster has, as hosts come and go."""

    least: int
    """Fewer end the run."""
    most: int


class OnCluster(NamedTuple):
    """What Ray is to start."""

    where: str
    ranks: Range
    servers: Range
    words: list[str]
    """What was typed, without the numbers of ranks and of servers."""


def cluster_asked(arguments: list[str]) -> OnCluster | None:
    """What was typed for a cluster; None where it was not. Raises ValueError."""
    # The words without both numbers, which may be ranges here, and with the most of each.
    rest, ranks = _without(_RANKS, arguments)
    rest, servers = _without(_SERVERS, rest)
    typed = {"ranks": ranks, "servers": servers}
    most = {name: text.rpartition(":")[2] for name, text in typed.items() if text is not None}
    words = [word for name, number in most.items() for word in (f"--{name}", number)]
    command, options = _read([*rest, *words])
    if command.ray is None:
        return None
    if "engine.servers_at" in options:
        raise ValueError("--ray places the servers itself; remove --servers-at")

    # A number that was not typed is that of the file or the preset.
    begun = _begun(command, options, None)[-1][1]
    numbers = {
        "ranks": options.get("sync.ranks", begun.sync.ranks),
        "servers": options.get("engine.servers", max(1, begun.engine.servers)),
    }
    ranges = {name: _range(name, typed[name], number) for name, number in numbers.items()}
    return OnCluster(command.ray, ranges["ranks"], ranges["servers"], rest)


def _range(name: str, typed: str | None, most: int) -> Range:
    """LEAST:MOST as it was typed, or one number for both."""
    least, colon, _ = (typed or "").rpartition(":")
    if not colon:
        return Range(most, most)
    if not (least.isascii() and least.isdigit() and 1 <= int(least) <= most):
        raise ValueError(f"--{name} {typed} must be LEAST:MOST, whole numbers from 1 on")
    return Range(int(least), most)


_RANKS = re.compile(r"--(?:sync\.)?ranks(?:=(.*))?")
_SERVERS = re.compile(r"--(?:engine\.)?servers(?:=(.*))?")


def _without(option: re.Pattern[str], arguments: list[str]) -> tuple[list[str], str | None]:
    """The words but an option, and what stands behind that."""
    for at, word in enumerate(arguments):
        match = option.fullmatch(word)
        behind = arguments[at + 1 : at + 2]
        if match and match[1] is not None:
            return [*arguments[:at], *arguments[at + 1 :]], match[1]
        if match and behind and not behind[0].startswith("-"):
            return [*arguments[:at], *arguments[at + 2 :]], behind[0]
    return arguments, None


def options_report(arguments: list[str], launch: Launcher | None = None) -> str:
    """A line for each option of the run: its value and where it comes from, changed ones first."""
    # The config after each layer: defaults, file, preset, command line.
    command = read_train(arguments, launch)
    (_, typed) = _read(arguments)
    deciding = {path: typed[path] for path in typed if path in ("engine.executor", "sync.ranks")}
    layers = [*_begun(command, deciding, launch), ("typed", command.run)]
    unread = command.run.unread()
    changed = list[tuple[str, str, str]]()
    left = list[tuple[str, str, str]]()

    # The last layer that changed an option is where its value is from.
    for option in filter(lambda option: option.is_taken, options_of(TrainConfig)):
        values = [reduce(getattr, option.path.split("."), config) for _, config in layers]
        steps = [number for number in range(1, len(layers)) if values[number] != values[number - 1]]
        last = len(layers) - 1 if option.path in typed else max(steps, default=0)
        if option.path not in unread:
            value: Any = values[-1]
            as_typed = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            (changed if last else left).append((option.name, as_typed, layers[last][0]))

    # Changed ones first, in columns.
    lines = [*changed, *left]
    names, widths, _ = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join(f"--{name:<{names}}  {v:<{widths}}  {origin}" for name, v, origin in lines)


def _begun(
    command: Train, typed: Mapping[str, Any], launch: Launcher | None
) -> list[tuple[str, TrainConfig]]:
    """The configs that the typed options change: the defaults, a file's, and over it a preset's."""
    # The options of a file, or of the run that is gone on with.
    file = command.config
    resumed = None if command.resume == AUTO else command.resume
    if resumed is not None:
        file = resumed / "config.json"
        if not file.is_file():
            raise ValueError(f"--resume {resumed}: there is no run, it holds no config.json")

    # What another executor, or torchrun, does not read of them is left behind.
    layers = [("default", TrainConfig())]
    if file:
        layers.append((str(file), read_config(file)))
    config = layers[-1][1]
    executor = typed.get("engine.executor")
    if resumed is not None:
        config = _going_on(config, typed, executor if launch is None else "concurrent")
    if launch is not None:
        if executor not in (None, "concurrent"):
            raise ValueError(
                f"--executor {executor} runs in one process; start it without torchrun"
            )
        anew = resumed is not None or "sync.ranks" in typed
        config = launch.applied_to(config, f"sync.ranks in {file}", anew=anew)
    layers[-1] = layers[-1][0], config

    # A preset comes over the file.
    if command.preset is not None:
        preset = f"preset {command.preset}"
        layers.append((preset, with_preset(config, command.preset, executor)))
    return layers


def _going_on(config: TrainConfig, typed: Mapping[str, Any], executor: Any) -> TrainConfig:
    """A run's config without what servers, or another executor, do not read of who trains, how."""
    left: dict[str, Any] = {"engine.shards": 1} if typed.get("engine.servers") else {}
    if executor not in (None, "replay"):
        run = SimpleNamespace(sync=config.sync, engine=replace(config.engine, executor=executor))
        left |= {f"engine.{n}": getattr(EngineConfig(), n) for n in unread(config.engine, run)}
        left |= (
            {"sync.permits": None, "sync.lookahead": "reread"} if executor == "constant_lag" else {}
        )
    return with_changes(config, left)


def _refuse_other_trace(file: Path, config: TrainConfig, typed: Mapping[str, Any]) -> None:
    """Before any data is read: whether the file is a trace, and of such a run. A replay takes tau
    from it; who types another one is mistaken about the trace."""
    from runtime.executors.replayable import (  # loads torch
        config_facts,
        load_order,
        refuse_other_run,
    )

    facts = config_facts(config)
    trace = load_order(file, facts)
    recorded = trace.meta.get("tau")
    if "sync.tau" in typed and recorded != config.sync.tau:
        raise ValueError(
            f"--tau is {config.sync.tau}, but trace {file} was made with tau {recorded} and a"
            " replay takes it from there; remove --tau"
        )
    refuse_other_run(trace, facts, str(file))
