"""The constant-lag loop as one writes it in plain torch: what a point of a sweep has to beat.

One file, nothing of this project: pandas reads and numbers the ids, rows lie in one dense table,
the pushes of the last ``tau`` steps wait in a queue. Same clicks, fields, model, optimisers and
evaluations as a point of the demo. With a constant lag all ranks of a step read the same rows, so
nobody would compute them one by one: the loop is the same for every number of ranks.

    persia-experiments.benching.plain_loop data.parquet --taus 0 4 --seeds 0 1
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding_bag

LABELS = ["label", "long_view"]
FIRST_TEST_DATE = 20220505
NOT_FEATURES = {*LABELS, "date", "time_ms", "tag", "duration_ms"}
BUCKETS_PER_E = 3.0
DIM = 8
HIDDEN = (256, 128)
DENSE_LR = 1e-3
ROW_LR = 0.05
ROW_EPS = 1e-10
ROW_SCALE = 0.01
TEST_BATCH = 8192


@dataclass(frozen=True, slots=True)
class Samples:
    """Clicks with their ids as numbers of rows; a bag is the ids of one field of one sample."""

    ids: Tensor
    """int64 [N], sorted by (sample, field)."""
    offsets: Tensor
    """int64 [B * F + 1]: where each bag starts."""
    labels: Tensor
    """float32 [B, T]"""

    def batches(self, size: int) -> Iterator[Batch]:
        """In order; the last may be shorter."""
        fields = (len(self.offsets) - 1) // len(self.labels)
        for start in range(0, len(self.labels), size):
            stop = min(start + size, len(self.labels))
            bounds = self.offsets[start * fields : stop * fields + 1]
            ids = self.ids[bounds[0] : bounds[-1]]
            distinct, inverse = torch.unique(ids, return_inverse=True)
            starts = bounds[:-1] - bounds[0]
            yield Batch(distinct, inverse, starts, self.labels[start:stop])


@dataclass(frozen=True, slots=True)
class Batch:
    """One dense update's samples, their ids merged."""

    distinct: Tensor
    """int64 [U]: numbers of rows."""
    inverse: Tensor
    """int64 [N]: which distinct row each id is."""
    starts: Tensor
    """int64 [B * F]: where each bag starts."""
    labels: Tensor

    def vectors(self, rows: Tensor) -> Tensor:
        """[B, F * d]: the mean of each bag, zero for an empty one."""
        pooled = embedding_bag(self.inverse, rows, self.starts, mode="mean")
        return pooled.reshape(len(self.labels), -1)


def read_clicks(path: Path) -> tuple[Samples, Samples, int]:
    """Training part, test part, and how many rows their ids need."""
    import pandas as pd

    # Columns as the schema has them: buckets of duration, a bag of tags.
    frame = pd.read_parquet(path)
    frame["duration_ms"] = np.floor(BUCKETS_PER_E * np.log1p(frame["duration_ms"]))
    tags = frame["tag"].fillna("").str.split(",").explode()
    lengths = np.bincount(tags.index, minlength=len(frame))

    # Each column's values are numbered behind those of the columns before.
    total = 0
    columns = []
    plain = [name for name in frame.columns if name not in NOT_FEATURES]
    for values in [*(frame[name] for name in plain), tags, frame["duration_ms"]]:
        codes, distinct = pd.factorize(values, use_na_sentinel=False)
        columns.append(codes + total)
        total += len(distinct)

    # The last days are the test part.
    is_test = (frame["date"] >= FIRST_TEST_DATE).to_numpy()
    labels = frame[LABELS].to_numpy(np.float32)
    parts = [_part(columns, lengths, labels, rows) for rows in (~is_test, is_test)]
    return parts[0], parts[1], total


def _part(
    columns: list[np.ndarray], tag_lengths: np.ndarray, labels: np.ndarray, chosen: np.ndarray
) -> Samples:
    """The samples of one part; the tags stand second to last among the columns."""
    *plain, tags, last = columns
    many = np.ones((int(chosen.sum()), len(columns)), np.int64)
    many[:, -2] = tag_lengths[chosen]
    offsets = np.concatenate([[0], np.cumsum(many)])
    field = np.repeat(np.tile(np.arange(len(columns)), len(many)), many.ravel())
    ids = np.empty(len(field), np.int64)
    for number, codes in enumerate([*plain, tags, last]):
        is_here = chosen if codes is not tags else np.repeat(chosen, tag_lengths)
        ids[field == number] = codes[is_here]
    return Samples(
        torch.from_numpy(ids), torch.from_numpy(offsets), torch.from_numpy(labels[chosen])
    )


def make_model(width: int, tasks: int, seed: int, hidden: Sequence[int] = HIDDEN) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for out in hidden:
        layers += [nn.Linear(width, out), nn.ReLU()]
        width = out
    return nn.Sequential(*layers, nn.Linear(width, tasks))


def train(
    batches: Sequence[Batch],
    test: Sequence[Batch],
    rows: Tensor,
    model: nn.Module,
    *,
    tau: int,
    evaluate_every: int | None = None,
) -> list[dict[str, list[float]]]:
    """Train ``rows`` and ``model`` in place; the scores of each snapshot and of the end.

    A lookup misses the pushes of the last ``tau`` steps.
    """
    # Adagrad a row, Adam for the network, and the pushes on their way.
    squares = torch.zeros(len(rows), 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=DENSE_LR, fused=True)
    waiting: deque[tuple[Tensor, Tensor]] = deque()
    curve = []

    # A row's step: its gradient over the root of its mean squares so far.
    def push(distinct: Tensor, gradient: Tensor) -> None:
        squares.index_add_(0, distinct, gradient.square().mean(1, keepdim=True))
        length = ROW_LR / (squares[distinct].sqrt() + ROW_EPS)
        rows.index_add_(0, distinct, gradient * length, alpha=-1)

    # Forward, backward, the dense step at once; the rows' step tau batches later.
    for step, batch in enumerate(batches, start=1):
        leaf = rows[batch.distinct].requires_grad_()
        loss = binary_cross_entropy_with_logits(model(batch.vectors(leaf)), batch.labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if evaluate_every and step % evaluate_every == 0:
            curve.append(scores(test, rows, model))
        waiting.append((batch.distinct, leaf.grad))
        if len(waiting) > tau:
            push(*waiting.popleft())
    while waiting:
        push(*waiting.popleft())
    return [*curve, scores(test, rows, model)]


def predict(batches: Sequence[Batch], rows: Tensor, model: nn.Module) -> Tensor:
    """Logits [B, T] of all samples."""
    with torch.inference_mode():
        return torch.cat([model(b.vectors(rows[b.distinct])) for b in batches])


def scores(batches: Sequence[Batch], rows: Tensor, model: nn.Module) -> dict[str, list[float]]:
    """AUC and log-loss of each task."""
    from sklearn.metrics import log_loss, roc_auc_score

    predictions = torch.sigmoid(predict(batches, rows, model).double()).numpy().T
    labels = torch.cat([b.labels for b in batches]).numpy().T
    pairs = list(zip(labels, predictions, strict=True))
    return {
        "auc": [float(roc_auc_score(y, p)) for y, p in pairs],
        "log_loss": [float(log_loss(y, p)) for y, p in pairs],
    }


def main() -> None:
    """Train every (seed, tau) in this one process; prints a JSON list of their final scores."""
    # As little as a loop needs.
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--taus", type=int, nargs="+", default=[4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--evaluate-every", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clicks, test_part, count = read_clicks(arguments.data)
    batches = list(clicks.batches(arguments.batch))  # once for all points of this process
    test = list(test_part.batches(TEST_BATCH))
    width = DIM * (len(batches[0].starts) // len(batches[0].labels))

    # Every point in this process: the data are read once.
    points = []
    for seed in arguments.seeds:
        for tau in arguments.taus:
            model = make_model(width, len(LABELS), seed)
            rows = (2 * torch.rand(count, DIM) - 1) * ROW_SCALE
            every = arguments.evaluate_every
            curve = train(batches, test, rows, model, tau=tau, evaluate_every=every)
            points.append({"seed": seed, "tau": tau, **curve[-1]})
    print(json.dumps(points))


if __name__ == "__main__":
    main()
