"""alpha of a data set: quantiles of the shares of samples that read its rows, by field."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.staleness.frequency import first_samples, frequencies
from persia_sim.theory import alpha

BATCHES = (128, 4096)
"""For which alpha of a batch is told: the demo's, and the paper's."""
_LEVELS = (*np.round(np.arange(0.05, 1.0, 0.05), 2).tolist(), 0.99, 0.999, 1.0)
_LEVELS_OF_A_FIELD = (0.5, 0.9, 0.99, 1.0)


def alpha_lines(name: str, samples: int) -> list[dict[str, Any]]:
    """A line per field and level, over rows and over lookups, of the first training samples."""
    from runtime.data.open import open_source  # late: a second to import

    source = open_source(name, rows=samples, keep=True)
    known = frequencies(first_samples(source, "train", samples))
    fields = source.layout.fields
    lines = []
    for number in (None, *range(len(fields))):
        own = known.shares if number is None else known.shares[known.fields == number]
        if not len(own):
            continue
        of_rows = alpha.quantiles(own, _LEVELS)
        of_lookups = alpha.quantiles(own, _LEVELS, own)
        lines += [
            {
                "data": name,
                "field": "all" if number is None else fields[number].name,
                "samples": known.samples,
                "rows": len(own),
                "level": level,
                "share_of_rows": float(of_rows[n]),
                "share_of_lookups": float(of_lookups[n]),
                **{f"of_lookups_in_batch_{b}": alpha.of_batch(float(of_lookups[n]), b)
                   for b in BATCHES},
                "mean_met": alpha.met(own),
            }
            for n, level in enumerate(_LEVELS)
            if number is None or level in _LEVELS_OF_A_FIELD
        ]  # fmt: skip
    return lines
