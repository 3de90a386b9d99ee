"""Kernels of the embedding engine; see runtime.embedding.native.store."""

import enum
from collections.abc import Sequence
from typing import Annotated, Any

import numpy
from numpy.typing import NDArray

class Storage(enum.Enum):
    f32 = 0

    f64 = 1

    f16 = 2

    bf16 = 3

class OptimizerKind(enum.Enum):
    sgd = 0

    momentum = 1

    adagrad = 2

    adagrad_row = 3

    adam = 4

    adam_row = 5

    ftrl = 6

class Initial(enum.Enum):
    uniform = 0

    normal = 1

    gamma = 2

    poisson = 3

    constant = 4

class Eviction(enum.Enum):
    none = 0

    lru = 1

    clock = 2

class Admission(enum.Enum):
    all = 0

    probability = 1

    frequency = 2

class Options:
    def __init__(self) -> None: ...
    @property
    def dim(self) -> int: ...
    @dim.setter
    def dim(self, arg: int, /) -> None: ...
    @property
    def storage(self) -> Storage: ...
    @storage.setter
    def storage(self, arg: Storage, /) -> None: ...
    @property
    def optimizer(self) -> OptimizerKind: ...
    @optimizer.setter
    def optimizer(self, arg: OptimizerKind, /) -> None: ...
    @property
    def initial_accumulator(self) -> float: ...
    @initial_accumulator.setter
    def initial_accumulator(self, arg: float, /) -> None: ...
    @property
    def eps(self) -> float: ...
    @eps.setter
    def eps(self, arg: float, /) -> None: ...
    @property
    def beta1(self) -> float: ...
    @beta1.setter
    def beta1(self, arg: float, /) -> None: ...
    @property
    def beta2(self) -> float: ...
    @beta2.setter
    def beta2(self, arg: float, /) -> None: ...
    @property
    def row_bias_correction(self) -> bool: ...
    @row_bias_correction.setter
    def row_bias_correction(self, arg: bool, /) -> None: ...
    @property
    def weight_decay(self) -> float: ...
    @weight_decay.setter
    def weight_decay(self, arg: float, /) -> None: ...
    @property
    def momentum(self) -> float: ...
    @momentum.setter
    def momentum(self, arg: float, /) -> None: ...
    @property
    def l1(self) -> float: ...
    @l1.setter
    def l1(self, arg: float, /) -> None: ...
    @property
    def l2(self) -> float: ...
    @l2.setter
    def l2(self, arg: float, /) -> None: ...
    @property
    def ftrl_beta(self) -> float: ...
    @ftrl_beta.setter
    def ftrl_beta(self, arg: float, /) -> None: ...
    @property
    def weight_bound(self) -> float: ...
    @weight_bound.setter
    def weight_bound(self, arg: float, /) -> None: ...
    @property
    def key(self) -> int: ...
    @key.setter
    def key(self, arg: int, /) -> None: ...
    @property
    def initial(self) -> Initial: ...
    @initial.setter
    def initial(self, arg: Initial, /) -> None: ...
    @property
    def initial_a(self) -> float: ...
    @initial_a.setter
    def initial_a(self, arg: float, /) -> None: ...
    @property
    def initial_b(self) -> float: ...
    @initial_b.setter
    def initial_b(self, arg: float, /) -> None: ...
    @property
    def eviction(self) -> Eviction: ...
    @eviction.setter
    def eviction(self, arg: Eviction, /) -> None: ...
    @property
    def capacity_rows(self) -> int: ...
    @capacity_rows.setter
    def capacity_rows(self, arg: int, /) -> None: ...
    @property
    def admission(self) -> Admission: ...
    @admission.setter
    def admission(self, arg: Admission, /) -> None: ...
    @property
    def admission_probability(self) -> float: ...
    @admission_probability.setter
    def admission_probability(self, arg: float, /) -> None: ...
    @property
    def admission_sightings(self) -> int: ...
    @admission_sightings.setter
    def admission_sightings(self, arg: int, /) -> None: ...
    @property
    def admission_counters(self) -> int: ...
    @admission_counters.setter
    def admission_counters(self, arg: int, /) -> None: ...
    @property
    def expire_after_steps(self) -> int: ...
    @expire_after_steps.setter
    def expire_after_steps(self, arg: int, /) -> None: ...
    @property
    def track_changes(self) -> bool: ...
    @track_changes.setter
    def track_changes(self, arg: bool, /) -> None: ...
    @property
    def state_floats(self) -> int: ...
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
    def read(
        self,
        ids: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        start: int,
        stop: int,
        create: bool,
        step: int,
        handles: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu")],
        values: Annotated[NDArray[Any], dict(order="C", device="cpu")],
        writes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu")],
    ) -> None: ...
    def refresh(
        self,
        ids: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        start: int,
        stop: int,
        step: int,
        handles: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu")],
        values: Annotated[NDArray[Any], dict(order="C", device="cpu")],
        writes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu")],
    ) -> int: ...
    def push(
        self,
        parts: Sequence[
            tuple[
                Annotated[
                    NDArray[numpy.uint64],
                    dict(shape=(None,), order="C", device="cpu", writable=False),
                ],
                int,
                int,
                Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu")],
                Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu")],
                Annotated[NDArray[Any], dict(order="C", device="cpu", writable=False)],
            ]
        ],
        step: int,
        lr: float,
        staleness: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu")],
    ) -> None: ...
    def rows(self) -> tuple[Any, ...]: ...
    def freeze(self, only_changed: bool, track: bool) -> None: ...
    def copy_slice(self, slots: int) -> bool: ...
    def collect(self) -> dict[str, Any]: ...
    def settle(self, kept: bool) -> None: ...
    def restore(
        self,
        ids: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        words: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        stamps: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        rows: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        removed: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        sightings: Annotated[
            NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        latest_step: int,
        keep_present: bool = False,
    ) -> None: ...
    def lease(
        self,
        ids: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        start: int,
        stop: int,
    ) -> dict[str, Any]: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def counters(self) -> Counters: ...

def plan(
    ids: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    shards: int,
    inverse: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu")],
) -> tuple[Any, ...]: ...
def plan_tables(
    ids: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    offsets: Annotated[
        NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    table_of_field: Annotated[
        NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    tables: Sequence[tuple[bool, int, int]],
    value_mask: int,
    shards: int,
) -> list[Any]: ...
def pool(
    fields: Sequence[
        tuple[
            int,
            int,
            int,
            Annotated[NDArray[Any], dict(order="C", device="cpu", writable=False)],
            Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu")],
        ]
    ],
    samples: int,
    offsets: Annotated[
        NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    inverse: Annotated[
        NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    rounds: int,
    pooled: Annotated[NDArray[Any], dict(order="C", device="cpu")],
    rows: Annotated[NDArray[Any], dict(order="C", device="cpu")],
    plain_copy: bool,
) -> None: ...
def scatter(
    fields: Sequence[
        tuple[
            int,
            int,
            int,
            Annotated[NDArray[Any], dict(order="C", device="cpu", writable=False)],
            Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu")],
        ]
    ],
    samples: int,
    offsets: Annotated[
        NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    inverse: Annotated[
        NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    rounds: int,
    pooled: Annotated[NDArray[Any], dict(order="C", device="cpu", writable=False)],
    rows: Annotated[NDArray[Any], dict(order="C", device="cpu")],
) -> None: ...
def empty_float32(rows: int, columns: int) -> NDArray[numpy.float32]: ...
def empty_float64(rows: int, columns: int) -> NDArray[numpy.float64]: ...
def empty_int64(rows: int, columns: int) -> NDArray[numpy.int64]: ...
def empty_int32(rows: int, columns: int) -> NDArray[numpy.int32]: ...
def idle_buffer_bytes() -> int: ...
def set_threads(count: int) -> None: ...
def threads() -> int: ...
def set_memory_limit(bytes: int) -> None: ...
def memory_limit() -> int: ...
def prefetch_level() -> str: ...
def choose_prefetch(level: str) -> None: ...
def prefetch_probe_ns() -> tuple[float, float]: ...
def kernel_set() -> str: ...
def choose_kernel_set(arg: str, /) -> None: ...
