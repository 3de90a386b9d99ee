"""The gradients of one row that several ranks push: where they become one update.

The same with whole runs: tests/runtime/test_laws_of_equality.py (threads),
tests/runtime/hosts/test_rank_process.py (processes), tests/runtime/test_fused_ranks.py (ranks
computed as one batch).
"""

from __future__ import annotations

import numpy as np
import pytest

from runtime.embedding.config import RowOptimizer

SGD = RowOptimizer(kind="sgd", lr=1.0)


@pytest.mark.law6
def test_merged_gradients_are_summed_in_the_order_of_the_ranks(one_table):
    """In float32 (1e8 + 1) - 1e8 is 0 and (1e8 - 1e8) + 1 is 1; the next push starts anew."""
    table = one_table(dim=1, optimizer=SGD, initial="constant", initial_scale=0.0)
    for gradients, expected in (([1e8, 1.0, -1e8], 0.0), ([1e8, -1e8, 1.0], -1.0)):
        ids = np.arange(40)
        pushes = []
        for rank, gradient in enumerate(gradients):
            handle = table.look_up(np.roll(ids, rank), rank)
            one = np.full((40, 1), gradient, np.float32)
            pushes.append((handle, {"rows": one}))
        before = table.values(ids)
        table.store.servers[0].apply(pushes, merged=True)
        np.testing.assert_array_equal(table.values(ids) - before, np.full((40, 1), expected))
