"""A small file with the columns of the demo's clicks, drawn at random."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from runtime.data.catalogue import CATALOGUE


def clicks_file(data_dir: Path, rows: int = 400) -> Path:
    """``rows`` clicks where the data set of the demo is looked for; the last quarter tests."""
    draw = np.random.default_rng(0)
    schema = CATALOGUE["kuairand-pure-14d"]()
    frame: dict[str, np.ndarray] = {c.name: draw.integers(0, 9, rows) for c in schema.columns}
    tags = np.array(["1,2", "3", None, "4,1,7"], object)
    frame |= {
        "tag": tags[draw.integers(0, 4, rows)],
        "duration_ms": draw.integers(1_000, 90_000, rows),
        "date": np.where(np.arange(rows) < 3 * rows // 4, 20220425, 20220505),
        "label": draw.integers(0, 2, rows),
        "long_view": draw.integers(0, 2, rows),
    }
    path = data_dir / schema.name / schema.file
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(frame).to_parquet(path)
    return path
