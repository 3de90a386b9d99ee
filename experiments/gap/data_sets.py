"""The data sets of the gap: five real ones and four synthetic, each with batch and reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.checks import known
from experiments.data_sets import readable
from runtime.config import DataConfig, EvaluationConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.embedding.config import RowOptimizer, TableConfig

VALIDATION_FRACTION = 0.1
"""Of the training rows of a real set, the last of them (source: choice; as large as tennis' test
part). A synthetic stream draws its validation rows anew."""
RANKS = 8
"""W, as in the demo: eight batches of async are in flight at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The two learning rates of a run."""

    row_lr: float = 0.05
    """Of the rows: row-wise Adagrad (source: the measured baselines of the data sets)."""
    lr: float = 1e-3
    """Of the dense weights: Adam (source: as above)."""


def is_schema(name: str) -> bool:
    """Whether a name is the path of a schema file of the reader's own."""
    return name.endswith(".toml")


FIXED = Rates()
"""What every mode has before anything is tuned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapData:
    """A data set as this study trains on it: one pass unless said, an MLP 256-128, rows of 8."""

    name: str
    batch: int
    """Samples of a dense update."""
    source: str
    """Where the choices come from."""
    passes: int = 1
    shuffle: bool = False
    rows: int | None = None
    """Samples of a synthetic stream, which has no end."""

    @property
    def is_synthetic(self) -> bool:
        """Whether it is there on every machine."""
        return self.name.partition(":")[0] == "synthetic"

    @property
    def label(self) -> str:
        """Its name without what only a command line needs; part of a file's name."""
        return Path(self.name).stem if is_schema(self.name) else self.name.replace(":", "-")

    def config(
        self,
        *,
        data_dir: Path | None,
        samples: int | None,
        test_rows: int | None,
        rates: Rates = FIXED,
        validate: bool = False,
        snapshots: int = 0,
        train_rows: int = 0,
    ) -> TrainConfig:
        """A run of it in mode sync. ``samples``: of the training part only the first; ``validate``:
        judged on its validation part; ``snapshots``: evaluations on the way of ``train_rows``."""
        rows = self.rows if samples is None else min(samples, self.rows or samples)
        share = VALIDATION_FRACTION if validate and not self.is_synthetic else None
        every = None
        if snapshots:
            every = max(1, self.steps(train_rows) // (snapshots + 1))
        return TrainConfig(
            sync=SyncConfig(ranks=RANKS),
            batch=self.batch,
            data=DataConfig(
                name=self.name,
                dir=None if self.is_synthetic else data_dir,
                rows=rows,
                passes=self.passes,
                shuffle=self.shuffle,
                validation_fraction=share,
            ),
            model=ModelConfig(lr=rates.lr),
            rows=TableConfig(optimizer=RowOptimizer(lr=rates.row_lr)),
            evaluation=EvaluationConfig(
                part="validation" if validate else "test",
                evaluate_every_steps=every,
                test_rows=test_rows,
            ),
        )

    def steps(self, train_rows: int) -> int:
        """Dense updates of a run over so many rows."""
        return self.passes * math.ceil(train_rows / self.batch)


_SCALED = (
    "a hundredth of the workload's distinct ids, so that 300,000 samples meet about as many ids a"
    " sample as one pass of the public log (26 to 46 million samples); batch: choice"
)

DATA_SETS: dict[str, GapData] = {
    data.name: data
    for data in (
        GapData(
            name="kuairand-pure-14d",
            batch=128,
            source="the demo's; in time order, one pass: a second overfits the ids",
        ),
        GapData(
            name="census-income-kdd",
            batch=128,
            shuffle=True,
            source="parts as published, no order of time; batch as in the demo",
        ),
        GapData(
            name="adult",
            batch=128,
            passes=3,
            shuffle=True,
            source="parts as published; three passes, as its baseline of AUC 0.9135 had",
        ),
        GapData(
            name="nycflights13",
            batch=128,
            passes=2,
            shuffle=True,
            source="random split, as advised for gaps; two passes, after which AUC still rises",
        ),
        GapData(
            name="tennis-random",
            batch=512,
            shuffle=True,
            source="random split, as advised for gaps; the largest set and the largest batch",
        ),
        GapData(
            name="synthetic",
            batch=256,
            rows=300_000,
            source="planted truth; batch of synthetic-gap, a tenth of its samples",
        ),
        GapData(name="synthetic:taobao-ad:0.01", batch=256, rows=300_000, source=_SCALED),
        GapData(name="synthetic:avazu-ad:0.01", batch=256, rows=300_000, source=_SCALED),
        GapData(name="synthetic:criteo-ad:0.01", batch=256, rows=300_000, source=_SCALED),
    )
}
"""Name -> data set of the study."""


def data_set(name: str) -> GapData:
    """The data set of a name, or of the reader's own schema. Raises ValueError for other names."""
    if is_schema(name):
        return GapData(name=name, batch=128, source="the reader's own; batch as in the demo")
    known(DATA_SETS, data_sets=name, or_else="or the path of a schema (.toml)")
    return DATA_SETS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A data set that is on this machine."""

    data: GapData
    train_rows: int
    """Of one pass, as many as are asked for."""

    @property
    def steps(self) -> int:
        """Dense updates of a run."""
        return self.data.steps(self.train_rows)

    @property
    def samples(self) -> int:
        """Samples of a run."""
        return self.data.passes * self.train_rows


def find(
    names: Sequence[str],
    data_dir: Path | None,
    samples: int | None = None,
    batch: int | None = None,
) -> tuple[list[Found], list[str]]:
    """The data sets that can be read, and a line for each that cannot; ``batch`` in place of each
    one's own."""
    chosen = [data_set(name) for name in names]
    chosen = [one if batch is None else replace(one, batch=batch) for one in chosen]
    wanted = {
        one.name: one.config(data_dir=data_dir, samples=samples, test_rows=None).data
        for one in chosen
    }
    facts, missing = readable(wanted.values())
    found = []
    for one in chosen:
        if one.name in facts:
            counted = facts[one.name].train_rows
            rows = wanted[one.name].rows if counted is None else counted
            found.append(Found(data=one, train_rows=rows or 0))
    return found, missing
