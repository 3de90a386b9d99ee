"""What a replay must match to give the same bytes, and refuses when it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from persia_sim.base.command_line import option_values
from persia_sim.base.trace import ALL, Event, Kind, Trace
from persia_sim.base.vocabulary import Mode
from runtime.config import TrainConfig
from runtime.data.source import Source, differences
from runtime.embedding.config import TableConfig
from runtime.files import table_beside
from runtime.models.imported import code_sha256
from runtime.rank.components import fresh_tables

_REASONS = table_beside(__file__).items()
DECIDES_NO_BYTE = {option: reason for reason, options in _REASONS for option in options}
"""Options that a replay may have otherwise than its trace, and why."""
FRESH = "fresh"
"""The fact that names the fresh tables; a trace without it has late ones alone."""
_DERIVED = ("mode", "ranks", "merge-pushes", "shards", FRESH)
"""Options whose fact says what came of them in this mode and engine."""

_WITHOUT_VERSION = (
    Kind.LOST_PUSH,
    Kind.FRESH_LOST_PUSH,
    Kind.AVERAGE_READ,
    Kind.AVERAGE_WRITE,
)
"""A lost push reads and writes nothing; the version of an averaging is the number of its round."""


def trace_meta(
    config: TrainConfig, source: Source, tables: Mapping[str, TableConfig]
) -> dict[str, Any]:
    """Everything beside the order that decides a byte; kept in the trace.

    ``tables``: every table as it is trained, whoever configured it.
    """
    data = source.provenance()
    fresh = fresh_tables(config.sync.fresh, source.layout)
    return {
        **config_facts(config),
        **({FRESH: list(fresh)} if fresh else {}),
        **{f"rows.{name}": f"{table}" for name, table in sorted(tables.items())},
        "torch": torch.__version__,
        "data": data.name,
        "data_sha256": data.sha256,
        "data_schema": data.schema,
        "model_code": code_sha256(config.model.name),
    }


def config_facts(config: TrainConfig) -> dict[str, Any]:
    """The facts of `trace_meta` that are known before any data is read."""
    sharing = config.sync.ranks if config.sync.mode.has_barrier else 1
    known = {**DECIDES_NO_BYTE, **dict.fromkeys(_DERIVED)}
    return {
        "mode": str(config.sync.mode),
        "ranks": config.sync.ranks,
        "tau": config.sync.window,
        "merge_pushes": config.sync.merges,
        "batch_per_rank": config.batch_per_push // sharing,
        "shards": config.engine.shard_count,
        **{
            name: list(value) if isinstance(value, tuple) else value
            for name, value in option_values(config)
            if name not in known and not name.startswith("rows.")  # tables are told as trained
        },
    }


def load_order(path: Path, meta: Mapping[str, Any]) -> Trace:
    """The order of a file, for a run of these facts: a simulated one is of batches of any size, as
    each sample stands for many."""
    trace = Trace.load(path)
    batch = meta["batch_per_rank"]
    scales = trace.is_simulated and trace.meta["batch_per_rank"] != batch
    return trace.with_batch_per_rank(batch) if scales else trace


def refuse_other_run(trace: Trace, meta: dict[str, Any], name: str) -> None:
    """Raise ValueError when the trace cannot be executed with these settings.

    A recorded trace must agree in everything that decides a byte. A simulated one knows neither
    seed nor data: its mode, its ranks and (after `load_order`) a rank's samples must agree.
    """
    # What drew numbers without a seed, say, can be done once only.
    reason = trace.meta.get("not_replayable")
    if reason:
        raise ValueError(f"trace {name} cannot be replayed: {reason}")

    # Which facts must agree: all of them, or of a simulated order the few that it knows.
    whole = meta
    recorded = trace.meta
    if trace.is_simulated:
        _refuse_too_short(trace, meta.get("steps"), name)
        known = ("mode", "ranks", "batch_per_rank", FRESH)
        meta = {key: meta[key] for key in known if key in meta}

    # Name every difference, and what to type so that there is none.
    named = dict.fromkeys([*meta, *([FRESH] if "data_sha256" in whole else [])])
    differing = [key for key in named if key != "tau" and recorded.get(key) != meta.get(key)]
    if differing:
        differences = [_difference(key, "trace", recorded, "this run", meta) for key in differing]
        remedy = _options_of(recorded, whole, differing)
        raise ValueError(
            f"trace {name} is of another run; {'; '.join(differences)}"
            + (f"\n  to replay it, give: {remedy}" if remedy else "")
        )


_NO_OPTION = ("batch_per_rank", "tau")
"""Facts that no single option gives; tau is taken from the trace."""


def _options_of(
    recorded: Mapping[str, Any], meta: Mapping[str, Any], differing: Sequence[str]
) -> str:
    """What to type for these facts to be as the trace has them; empty where no option does it."""
    words = []
    for name in differing:
        value = recorded.get(name)
        if value in (None, meta.get(name)) or name in _NO_OPTION or name not in _OF_OPTIONS:
            continue
        option = name.replace("_", "-")
        if isinstance(value, bool):
            group, dot, last = option.rpartition(".")
            words.append(f"--{option}" if value else f"--{group}{dot}no-{last}")
        else:
            texts = map(str, value) if isinstance(value, list) else [str(value)]
            words.append(" ".join([f"--{option}", *texts]))
    return " ".join(words)


_OF_OPTIONS = frozenset([*config_facts(TrainConfig()), FRESH])
"""The facts that options decide."""


def _refuse_too_short(trace: Trace, asked: int | None, name: str) -> None:
    """A run counts dense updates, an order the steps of each rank."""
    each = 1 if Mode(trace.meta["mode"]).has_barrier else int(trace.meta["ranks"])
    ordered = trace.meta.get("steps")
    if asked is not None and ordered is not None and ordered * each < asked:
        raise ValueError(
            f"trace {name} orders {ordered * each} dense updates, but steps is {asked}; simulate it"
            f" with --steps {-(-asked // each)}, or train with --steps {ordered * each}"
        )


_OF_ONE_PART = ("steps", "updates", "not_replayable", "first_step")


def other_facts(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """In words, what decides a byte and is not as it was; how far the run goes may differ."""
    return "; ".join(
        _difference(key, "before", before, "now", now)
        for key in {**before, **now}
        if key not in _OF_ONE_PART and before.get(key) != now.get(key)
    )


def _difference(
    key: str, one: str, first: Mapping[str, Any], other: str, second: Mapping[str, Any]
) -> str:
    """A fact that differs; of a schema, what of it."""
    was = first.get(key)
    is_ = second.get(key)
    if isinstance(was, Mapping) and isinstance(is_, Mapping):
        return f"{key}: {'; '.join(differences(was, is_))}"
    return f"{key}: {one} {was!r}, {other} {is_!r}"


def refuse_other_version(seq: int, event: Event, took_effect: Sequence[Event]) -> None:
    """Raise ValueError when an event found another version than the recorded run did.

    A version is the number of updates before it, so a difference is the first sign that this run
    has left the recorded one. ``took_effect`` are the events that carrying it out gave.
    """
    if event.kind in _WITHOUT_VERSION:
        return
    versions = [e.version for e in took_effect if e[:4] == event[:4]]
    if versions != [event.version]:
        where = "the dense weights" if event.shard == ALL else f"shard {event.shard}"
        raise ValueError(
            f"event {seq} of the order, {Kind(event.kind).name.lower()} of rank {event.rank}, step"
            f" {event.step}, found {where} at version {versions[0] if versions else 'none'}, but at"
            f" {event.version} when it was recorded: the trace was changed, or is of other data"
        )


def refuse_cut_short(trace: Trace, updates: int) -> None:
    """Raise ValueError when a recorded order ends before its run did."""
    recorded = trace.meta.get("updates")
    if recorded is not None and recorded != updates:
        raise ValueError(
            f"the trace was made by {recorded} dense updates and holds {updates}; it is cut short"
        )
