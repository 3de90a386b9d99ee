"""Kernels of the embedding layer; see runtime.embedding.native.store."""

import enum
from collections.abc import Sequence
from typing import Annotated, Any

import numpy
from numpy.typing import NDArray

_Ids = Annotated[
    NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
]
_Words = Annotated[
    NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
]
_Rows = Annotated[
    NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)
]
_Int64s = Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu")]
_Offsets = Annotated[
    NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
]
_Inverse = Annotated[
    NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
]
_Spans = Annotated[
    NDArray[numpy.int64], dict(shape=(None, 3), order="C", device="cpu", writable=False)
]
_Starts = Annotated[
    NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
]
_Floats = Annotated[NDArray[Any], dict(order="C", device="cpu")]
_Read = Annotated[NDArray[Any], dict(order="C", device="cpu", writable=False)]
_Mask = Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu")]

class OptimizerKind(enum.Enum):
    sgd = 0
    adagrad = 1
    adagrad_row = 2
    adam = 3
    adam_row = 4
    ftrl = 5

class Initial(enum.Enum):
    uniform = 0
    normal = 1
    constant = 2

class Eviction(enum.Enum):
    none = 0
    lru = 1

class Options:
    def __init__(self) -> None: ...
    dim: int
    wide: bool
    optimizer: OptimizerKind
    initial_accumulator: float
    eps: float
    l1: float
    l2: float
    key: int
    initial: Initial
    initial_scale: float
    eviction: Eviction
    capacity_rows: int
    admission_probability: float
    expire_after_steps: int
    @property
    def row_bytes(self) -> int: ...

class Counters:
    @property
    def created(self) -> int: ...
    @property
    def evicted(self) -> int: ...
    @property
    def expired(self) -> int: ...
    @property
    def not_admitted(self) -> int: ...
    @property
    def gradients_not_admitted(self) -> int: ...
    @property
    def gradients_evicted(self) -> int: ...

class Table:
    def __init__(self, options: Options) -> None: ...
    def __len__(self) -> int: ...
    def rows(self) -> tuple[NDArray[numpy.uint64], NDArray[Any], NDArray[Any]]: ...
    def freeze(self) -> None: ...
    def copy_slice(self, slots: int) -> bool: ...
    def collect(self) -> dict[str, Any]: ...
    def drop_snapshot(self) -> None: ...
    def restore(
        self,
        ids: _Ids,
        words: _Words,
        stamps: _Words,
        rows: _Rows,
        latest_step: int,
        keep_present: bool = False,
    ) -> None: ...
    def forget(self, ids: _Ids) -> None: ...
    def lease(self, ids: _Ids, start: int, stop: int) -> dict[str, Any]: ...
    @property
    def state_floats(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def counters(self) -> Counters: ...

class PoolLayout:
    def __init__(
        self, fields: Sequence[tuple[int, int, int, int]], dims: Sequence[int]
    ) -> None: ...

def read(
    tables: Sequence[Table],
    ids: _Ids,
    spans: _Spans,
    handles: _Int64s,
    writes: _Int64s,
    values: _Floats,
    create: bool,
    step: int,
) -> None: ...
def refresh(
    tables: Sequence[Table],
    ids: _Ids,
    spans: _Spans,
    handles: _Int64s,
    writes: _Int64s,
    values: _Floats,
    step: int,
) -> int: ...
def push(
    tables: Sequence[Table],
    pushes: Sequence[tuple[_Ids, _Spans, _Int64s, _Int64s, _Read]],
    step: int,
    lrs: Sequence[float],
    staleness: _Int64s,
) -> None: ...
def plan_tables(
    ids: _Ids,
    offsets: _Offsets,
    table_of_field: _Inverse,
    dims: Sequence[int],
    value_mask: int,
    shards: int,
) -> tuple[Any, Any, Any, Any, Any, Any, list[bool]]: ...
def pool(
    layout: PoolLayout,
    samples: int,
    offsets: _Offsets,
    spans: _Spans,
    starts: _Starts,
    inverse: _Inverse,
    rows: _Floats,
    pooled: _Floats,
    sequences: Sequence[tuple[_Read, _Mask]],
) -> None: ...
def scatter(
    layout: PoolLayout,
    samples: int,
    offsets: _Offsets,
    spans: _Spans,
    starts: _Starts,
    inverse: _Inverse,
    rows: _Floats,
    pooled: _Read,
    sequences: Sequence[tuple[_Read, _Mask]],
    apart: Sequence[bool] = (),
) -> None: ...
def to_halves(
    numbers: _Read, sizes: _Int64s, scales: NDArray[Any], halves: NDArray[Any]
) -> None: ...
def from_halves(
    scales: NDArray[Any], halves: NDArray[Any], sizes: _Int64s, numbers: _Floats
) -> None: ...
def round_halves(numbers: _Read, sizes: _Int64s, rounded: _Floats) -> None: ...
def crc32c(data: bytes | bytearray | memoryview, before: int = 0) -> int: ...
def empty_float32(rows: int, columns: int) -> NDArray[numpy.float32]: ...
def empty_float64(rows: int, columns: int) -> NDArray[numpy.float64]: ...
def empty_int64(rows: int, columns: int) -> NDArray[numpy.int64]: ...
def idle_buffer_bytes() -> int: ...
def flush_denormals(on: bool) -> None: ...
def flushes_denormals() -> bool: ...
def set_threads(count: int) -> None: ...
def threads() -> int: ...
def set_memory_limit(bytes: int) -> None: ...
def memory_limit() -> int: ...
def prefetch_level() -> str: ...
def prefetch_probe_ns() -> tuple[float, float]: ...
def kernel_set() -> str: ...
def choose_kernel_set(arg: str, /) -> None: ...
