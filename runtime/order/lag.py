"""The order that the lag executor carries out: the constant lag of a config, leg by leg."""

from __future__ import annotations

from collections.abc import Iterator

from persia_sim.words.orders import constant_lag
from persia_sim.words.trace import Event
from persia_sim.words.vocabulary import Mode
from runtime.config import TrainConfig
from runtime.rank.feed import Feed


def lag_order(config: TrainConfig, feed: Feed) -> Iterator[Event]:
    """The constant lag of the config over the batches of the feed's leg."""
    sync = config.sync
    tau = 0 if sync.window is None else sync.window
    return constant_lag(
        sync.mode,
        ranks=sync.ranks,
        has_batch=feed.has_batch,
        tau=tau,
        ahead=sync.ahead,
        merge_pushes=sync.merges,
        average_every=sync.average_every_steps if sync.mode is Mode.ASYNC_AVERAGING else None,
        first=feed.first,
        sync_steps=sync.sync_steps,
    )
