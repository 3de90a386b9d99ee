"""A ranker whose tables lie on GPUs: its tables, their optimiser, and its dense network."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from persia_sim.base.rules import NUMBERS, require, require_within
from persia_sim.base.schema import hold_choices
from persia_sim.cluster.tables import RowUpdate, Storage, Table
from persia_sim.cluster.workload import FEATURES, MOST_LAYERS

_WIDTHS = 4.0
"""Sum of the dense network's widths over the square root of its multiplications: 3.7 to 6 for the
networks of DLRM, DCNv2 and Wide & Deep."""
_DLRM_LAYERS = 8.0
_DLRM_MACS = 2.46e6
_DEEPER = 0.25
"""Layers and multiplications of DLRM, and the power by which networks with more of these have more
of those, since their layers are wider, too: DCNv2 with 6.5 times as many has 14."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranker:
    """A model: its tables and what comes after them."""

    name: str
    """The preset's name."""
    tables: tuple[Table, ...]
    """The tables, at least one."""
    dense_macs: float
    """Multiplications of one sample's forward pass, > 0."""
    dense_params: float
    """Weights of the dense network, > 0."""
    dense_widths: float | None = None
    """Numbers of a sample that its layers hand on, the pooled ones among them; None: about as many
    as such networks have for their multiplications."""
    dense_layers: float | None = None
    """Layers of the dense network, in [1, 1000]; None: about as many as such networks have for
    their multiplications."""
    dense_features: int = 13
    """Numbers of a sample that need no table, >= 0."""
    update: RowUpdate = RowUpdate.SGD
    """The rows' optimiser."""
    source: str
    """Where these constants come from."""

    def __post_init__(self) -> None:
        hold_choices(self)
        require(len(self.tables) >= 1, "tables", len(self.tables), "there must be one")
        count = sum(table.count for table in self.tables)
        require(count <= NUMBERS[1], "tables", f"{count:,}", f"must be <= {NUMBERS[1]:,}")
        weights = (1, 1e15)
        require_within(
            self,
            dense_macs=weights,
            dense_params=weights,
            dense_features=FEATURES,
            dense_widths=weights,
            dense_layers=(1, MOST_LAYERS),
        )

    @property
    def ids(self) -> float:
        """Ids of one sample."""
        return sum(t.count * t.ids for t in self.tables)

    @property
    def pooled(self) -> float:
        """Numbers of one sample that enter the dense network from tables."""
        return sum(t.count * t.pooled for t in self.tables)

    @property
    def widths(self) -> float:
        """Numbers of a sample that the layers of the dense network hand on."""
        return self.dense_widths or self.pooled + _WIDTHS * sqrt(self.dense_macs)

    @property
    def layers(self) -> float:
        """Layers of the dense network."""
        return self.dense_layers or _DLRM_LAYERS * (self.dense_macs / _DLRM_MACS) ** _DEEPER

    @property
    def table_count(self) -> int:
        """All tables."""
        return sum(table.count for table in self.tables)

    @property
    def table_widths(self) -> int:
        """Different widths of tables."""
        return len({table.dim for table in self.tables})

    @property
    def features(self) -> int:
        """Pooled vectors of one sample."""
        return sum(t.count * len(t.ids_per_sample) for t in self.tables)

    @property
    def table_bytes(self) -> float:
        """All rows with their optimiser state, float32."""
        each = sum(t.count * t.rows * t.dim for t in self.tables)
        return 4.0 * self.update.values_per_value * each

    @property
    def host_bytes(self) -> float:
        """Bytes of tables in the hosts' memory."""
        each = sum(t.count * t.rows * t.dim for t in self.tables if t.storage is not Storage.HBM)
        return 4.0 * self.update.values_per_value * each
