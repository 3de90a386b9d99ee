"""What sync, hybrid and async compute: 100 lines of plain PyTorch and numpy, and comments.

A recommender is one large table of rows, a row for each id, under a small dense network. W ranks
train the two together. The modes differ in how late a rank reads what the others have learned:

    sync    rows and dense weights are up to date: in every step all ranks wait for each other
    hybrid  rows are tau steps late, dense weights are up to date: only these are waited for
    async   rows and dense weights are late: nobody waits for anybody

On a cluster they are late because messages travel. Here lateness is a number and all ranks run in
one thread, so that the same seed gives the same figures. This is the algorithm of the testbed's
default executor, `constant_lag`; a test compares the two. To run it:
python examples/hybrid_in_100_lines.py
"""

import csv
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

RANKS = 8  # W, the workers that train together.
BATCH = 128  # Samples of one dense update, over all ranks.
DIM = 8  # Numbers in a row.
ROW_RATE, DENSE_RATE = 0.05, 1e-3  # Learning rates.

Samples = tuple[Tensor, Tensor, Tensor]  # ids [n, 2], price [n, 1], clicked [n, 1]


# The data, and the initial values.


def read_clicks() -> tuple[Samples, Samples, int]:
    """Read the training part, the test part, and the number of ids."""
    with Path(__file__).with_name("clicks.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    # Every user and every item is an id: the number of a row in one table for both. Columns that
    # hold several values (tags, history) are left out here.
    users, user = np.unique([line["user"] for line in lines], return_inverse=True)
    items, item = np.unique([line["item"] for line in lines], return_inverse=True)
    ids = torch.from_numpy(np.stack([user, len(users) + item], axis=1))
    price = torch.tensor([[float(line["price"] or 0)] for line in lines]).log1p()
    clicked = torch.tensor([[float(line["clicked"])] for line in lines])
    # The lines are in time order: what is tested comes last.
    end = sum(line["day"] < "2026-03-09" for line in lines)
    training_part = ids[:end], price[:end], clicked[:end]
    return training_part, (ids[end:], price[end:], clicked[end:]), len(users) + len(items)


def initial_values(ids: int) -> tuple[Tensor, nn.Module]:
    """Draw the table of rows and the dense network, the same ones for every mode."""
    torch.manual_seed(0)
    rows = torch.empty(ids, DIM).uniform_(-0.01, 0.01)
    layers = [nn.Linear(2 * DIM + 1, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)]
    return rows, nn.Sequential(*layers)


# What the modes differ in.


def updates_late(mode: str, tau: int) -> tuple[int, int]:
    """Count the updates that a batch misses in the rows that it reads, and in dense weights."""
    if mode == "sync":
        return 0, 0
    if mode == "hybrid":
        return tau, 0
    # In async the ranks take turns, each with a batch of its own. Between the instants at which a
    # rank reads and writes, the W - 1 others write. What it writes to rows waits for tau more steps
    # of its own, and during each of these all W ranks write.
    return (tau + 1) * RANKS - 1, RANKS - 1


# The parts of a step.


def forward_backward(
    network: nn.Module, vectors: Tensor, price: Tensor, clicked: Tensor, step_samples: int
) -> tuple[float, Tensor, list[Tensor]]:
    """Compute a rank's share of the step's mean loss, with its gradients of rows and weights."""
    vectors.requires_grad_()
    logits = network(torch.cat([vectors.flatten(1), price], dim=1))
    loss = binary_cross_entropy_with_logits(logits, clicked, reduction="sum") / step_samples
    row_gradients, *dense_gradients = torch.autograd.grad(loss, [vectors, *network.parameters()])
    return loss.item(), row_gradients, dense_gradients


def write_weights(adam: torch.optim.Adam, network: nn.Module, gradients: list[Tensor]) -> None:
    """Take one step of Adam with the gradients of all ranks."""
    for weight, gradient in zip(network.parameters(), gradients, strict=True):
        weight.grad = gradient
    adam.step()


def write_rows(rows: Tensor, squares: Tensor, ids: Tensor, gradients: Tensor) -> None:
    """Take one step of row-wise Adagrad with each row that the ranks of a step have read."""
    # Merge: many samples of many ranks may have read the same row. Their gradients are added up.
    distinct, place = ids.flatten().unique(return_inverse=True)
    merged = torch.zeros(len(distinct), DIM).index_add_(0, place, gradients.flatten(0, 1))
    # The state of row-wise Adagrad is one number a row: the sum of mean squares of its gradients.
    squares[distinct] += merged.square().mean(1)
    rows[distinct] -= ROW_RATE * merged / (squares[distinct].sqrt() + 1e-10)[:, None]


def due(waiting: deque, late: int) -> Iterator:
    """Take out, oldest first, what need not wait any longer: all but the newest ``late``."""
    while len(waiting) > late:
        yield waiting.popleft()


# The training loop.


def train(samples: Samples, rows: Tensor, network: nn.Module, mode: str, tau: int) -> list[float]:
    """Train on every sample once, changing rows and network; return the loss of each step."""
    rows_late, dense_late = updates_late(mode, tau)
    ranks = 1 if mode == "async" else RANKS  # Ranks that share the batch of a step.
    adam = torch.optim.Adam(network.parameters(), lr=DENSE_RATE)
    squares = torch.zeros(len(rows))
    waiting_pushes, waiting_updates, losses = deque(), deque(), []

    for batch in zip(*(column.split(BATCH) for column in samples), strict=True):
        # Take the batch: each rank of the step has its share.
        shares = zip(*(column.tensor_split(ranks) for column in batch), strict=True)

        # Look rows up, forward, backward, one rank after the other. All read rows and weights as
        # they are now. The newest updates still wait below, and this is all that being late means.
        results = [
            forward_backward(network, rows[ids], price, clicked, len(batch[0]))
            for ids, price, clicked in shares
        ]
        loss_shares, row_gradients, dense_gradients = zip(*results, strict=True)
        losses.append(sum(loss_shares))

        # Reduce over the ranks: their dense gradients are added up (the all-reduce), and their row
        # gradients become one merged push, beside the ids of the rows.
        waiting_updates.append([sum(gradients) for gradients in zip(*dense_gradients, strict=True)])
        waiting_pushes.append((batch[0], torch.cat(row_gradients)))

        # Write what is due. In sync nothing waits: the next step reads all of it.
        for gradients in due(waiting_updates, dense_late):
            write_weights(adam, network, gradients)
        for ids, gradients in due(waiting_pushes, rows_late):
            write_rows(rows, squares, ids, gradients)

    # The data has ended: write what still waits.
    for gradients in due(waiting_updates, 0):
        write_weights(adam, network, gradients)
    for ids, gradients in due(waiting_pushes, 0):
        write_rows(rows, squares, ids, gradients)
    return losses


# The test.


@torch.no_grad()
def evaluate(samples: Samples, rows: Tensor, network: nn.Module) -> tuple[float, float]:
    """Compute AUC and log-loss. A row that was never trained has its initial value."""
    ids, price, clicked = samples
    logits = network(torch.cat([rows[ids].flatten(1), price], dim=1))
    # AUC is the share of the pairs of a click and another sample in which the click has the higher
    # logit; a tie counts half.
    clicks, others = logits[clicked == 1].numpy(), np.sort(logits[clicked == 0].numpy())
    below = np.searchsorted(others, clicks, "left") + np.searchsorted(others, clicks, "right")
    auc = below.mean() / 2 / len(others)
    return auc, binary_cross_entropy_with_logits(logits, clicked).item()


def main() -> None:
    """Train in each mode and print a table.

    It is of one seed and a small test part, where gaps of a few thousandths may be chance.
    """
    torch.set_num_threads(1)  # The operations are too small to be worth sharing.
    training_part, test_part, ids = read_clicks()
    print("mode    rows late  dense late  test AUC  log-loss")
    for mode, tau in [("sync", 0), ("hybrid", 4), ("async", 0), ("async", 4)]:
        rows, network = initial_values(ids)
        train(training_part, rows, network, mode, tau)
        rows_late, dense_late = updates_late(mode, tau)
        auc, log_loss = evaluate(test_part, rows, network)
        print(f"{mode:6}{rows_late:11}{dense_late:12}{auc:10.4f}{log_loss:10.4f}")


if __name__ == "__main__":
    main()
