"""The dense optimiser, and the gradients that it is given: sums in rank order, late ones, buckets;
and the factor on a float16 loss.

The optimisers are torch's own by their functional form: the same bytes, without torch's compiler.
Making a `torch.optim.Optimizer` imports torch._dynamo and with it 800 modules, a second of every
process (source: measured, torch 2.13, November 2026); its functions need none of them.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from runtime.config import OF_TORCH, ModelConfig, TrainConfig

DenseGradients = list[Tensor | None]
"""One per parameter of the model, in its order; None where the loss does not reach."""

State = dict[str, Tensor]
"""What one parameter's past updates left behind; empty before the first."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
_NEW: dict[str, tuple[str, ...]] = {"adam": _MOMENTS, "adamw": _MOMENTS, "adagrad": ("sum",)}


class FunctionalOptimizer:
    """adam, adamw, adagrad or sgd with torch's defaults, over the given parameters.

    The schedule goes by the run's steps, so that it runs equally fast in every mode.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Iterable[Tensor],
        *,
        pushes_per_update: int = 1,
        pushes_per_step: int = 1,
    ) -> None:
        """``pushes_per_update``: how many ranks take an update at about the same time, each in an
        optimiser of its own; ``pushes_per_step``: of how many is a step of the run."""
        self._config = config
        self._kind = config.optimizer
        self._lr = config.lr
        self._parameters = list(parameters)
        self._states: list[State] = [{} for _ in self._parameters]
        self._per_update = pushes_per_update
        self._per_step = pushes_per_step
        self._pushes = 0

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None] | None) -> None:
        """One update; a parameter whose gradient is None stays as it is, and so does its state.

        The gradients are clipped together where the config says so. None: all of it is left out.
        """
        if gradients is None:
            return
        triples = zip(self._parameters, gradients, self._states, strict=True)
        present = [(p, g, state) for p, g, state in triples if g is not None]
        if present:
            parameters, known, states = (list(column) for column in zip(*present, strict=True))
            for parameter, state in zip(parameters, states, strict=True):
                if not state:
                    self._begin(parameter, state)
            step = self._pushes // self._per_step + 1
            self._lr = self._config.lr * self._config.schedule.factor(step)
            self._update(parameters, self._clipped(known), states)
        self._pushes += self._per_update

    def _clipped(self, gradients: list[Tensor]) -> list[Tensor]:
        """Scaled down to the bound on their common norm, as torch's `clip_grad_norm_` does."""
        if self._config.clip_norm is None:
            return gradients
        norm = torch.nn.utils.get_total_norm(gradients)
        factor = torch.clamp(self._config.clip_norm / (norm + 1e-6), max=1.0)
        return [gradient * factor for gradient in gradients]

    def state_dict(self) -> dict[str, Any]:
        """``state`` as torch writes it: by the parameter's number, tensors by torch's names; and
        where the schedule stands."""
        states = {n: dict(state) for n, state in enumerate(self._states) if state}
        return {"state": states, "pushes": self._pushes, "pushes_per_step": self._per_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; the tensors are copied.

        Raises ValueError when it is of another kind of optimiser or of other parameters.
        """
        # Whether the state is of this kind of optimiser and of these parameters, before anything
        # changes.
        saved: dict[int, State] = state_dict["state"]
        self._pushes = state_dict["pushes"] * self._per_step // state_dict["pushes_per_step"]
        names = {"step", *_NEW[self._kind]} if self._kind in _NEW else set()
        for number, state in saved.items():
            if number >= len(self._parameters) or set(state) != names:
                held = ", ".join(sorted(state))
                raise ValueError(f"{self._kind} cannot go on from {held} of parameter {number}")
            shape = self._parameters[number].shape
            for name in names - {"step"}:
                if state[name].shape != shape:
                    raise ValueError(
                        f"{name} of parameter {number} is {tuple(state[name].shape)}, the parameter"
                        f" {tuple(shape)}"
                    )

        # Copy it in place: graphs and hooks hold these tensors.
        for number, restored in enumerate(self._states):
            restored.clear()
            if number in saved:
                self._begin(self._parameters[number], restored)
                for name, tensor in restored.items():
                    tensor.copy_(saved[number][name])

    def _begin(self, parameter: Tensor, state: State) -> None:
        """Before a parameter's first update."""
        if self._kind == "sgd":
            return
        device = parameter.device if _NEW[self._kind] is _MOMENTS else torch.device("cpu")
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        for name in _NEW[self._kind]:
            state[name] = torch.zeros_like(parameter)

    def _update(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[State]
    ) -> None:
        # torch's own functions, each with the state that it wants.
        given: dict[str, Any] = {"lr": self._lr, "maximize": False}
        given["weight_decay"] = self._config.weight_decay
        of = {name: [state[name] for state in states] for name in states[0]}
        if self._kind == "sgd":
            none: list[Tensor | None] = [None] * len(parameters)
            sgd(parameters, gradients, none, momentum=0.0, dampening=0.0, nesterov=False, **given)
        elif self._kind == "adagrad":
            adagrad(parameters, gradients, of["sum"], of["step"], lr_decay=0.0, eps=1e-10, **given)
        elif self._kind == "adam" or self._kind == "adamw":
            moments = of["exp_avg"], of["exp_avg_sq"]
            update = adam if self._kind == "adam" else adamw
            update(
                parameters,
                gradients,
                *moments,
                [],
                of["step"],
                fused=True,
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                **given,
            )
        else:
            raise AssertionError(self._kind)  # one that is new trains by no other one's formula


class TorchOptimizer(FunctionalOptimizer):
    """Any class of torch.optim with its own defaults, whose ``step`` needs no closure."""

    def __init__(self, config: ModelConfig, parameters: Iterable[Tensor], **pushes: int) -> None:
        """As `FunctionalOptimizer`. Raises ValueError naming a class that is none, or that wants
        more than parameters, a rate and a decay."""
        super().__init__(config, parameters, **pushes)
        given: dict[str, Any] = {"lr": config.lr}
        if config.weight_decay:
            given["weight_decay"] = config.weight_decay
        made_by = _class_of_torch(config.optimizer)
        try:
            self._made = made_by(self._parameters, **given)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"model.optimizer {config.optimizer} cannot be made from"
                f" {', '.join(['parameters', *given])}: {error}"
            ) from None

    def state_dict(self) -> dict[str, Any]:
        """What torch's class gives, and where the schedule stands."""
        return super().state_dict() | self._made.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; ValueError when it is of other parameters or kinds."""
        pushes = state_dict["pushes"] * self._per_step // state_dict["pushes_per_step"]
        groups = state_dict.get("param_groups")
        if groups is None or [set(g) for g in groups] != [set(g) for g in self._made.param_groups]:
            raise ValueError(f"{self._kind} cannot go on from another optimiser's state")
        saved = {"state": state_dict["state"], "param_groups": groups}
        self._made.load_state_dict(copy.deepcopy(saved))  # torch keeps what it is given
        self._pushes = pushes

    def _begin(self, parameter: Tensor, state: State) -> None:
        """The class does so itself."""

    def _update(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[State]
    ) -> None:
        # The gradients stand in their parameters for this step alone: others keep none there.
        for group in self._made.param_groups:
            group["lr"] = self._lr
        held = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self._made.step()
        for parameter, before in zip(self._parameters, held, strict=True):
            parameter.grad = before


def _class_of_torch(name: str) -> Callable[..., torch.optim.Optimizer]:
    """The class behind torch.optim:NAME. Raises ValueError for what is no such class, and for one
    whose step wants a closure, which would compute a rank's gradients again."""
    found = getattr(torch.optim, name.removeprefix(OF_TORCH), None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(f"model.optimizer {name}: torch.optim has no optimiser of that name")
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"model.optimizer {name}: its step computes the loss several times, which no mode does;"
            " choose another"
        )
    return found


def make_optimizer(config: TrainConfig, model: nn.Module) -> FunctionalOptimizer:
    """The configured optimiser over the model's parameters: that of all ranks, or of a replica."""
    replicas = config.sync.ranks if config.sync.mode.averages_replicas else 1
    kind = TorchOptimizer if config.model.optimizer.startswith(OF_TORCH) else FunctionalOptimizer
    return kind(
        config.model,
        model.parameters(),
        pushes_per_update=replicas,
        pushes_per_step=config.dense_updates_per_step,
    )


def sum_in_rank_order(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum over ranks of one parameter's gradients: ((g0 + g1) + g2) + ... (law 6)."""
    known = [gradient for gradient in gradients if gradient is not None]
    return reduce(torch.add, known) if known else None


def sums_in_rank_order(of_ranks: Iterable[Sequence[Tensor | None]]) -> DenseGradients:
    """The sums of several parameters' gradients, which each rank gives in the same order."""
    return [sum_in_rank_order(gradients) for gradients in zip(*of_ranks, strict=True)]


class LateGradients:
    """Holds the sums of the last ``lag`` steps back, as TorchRec's stashed gradients.

    The weights that step s computes on are those after the update of step s - 1 - lag. What waits
    is part of a checkpoint, and applied when the run ends. A lag of 0 holds nothing.
    """

    def __init__(self, lag: int, optimizer: FunctionalOptimizer) -> None:
        self._lag = lag
        self._optimizer = optimizer
        self.waiting: deque[DenseGradients | None] = deque()
        """Oldest first; the tensors are not changed any more."""

    def take(self, sums: DenseGradients | None) -> None:
        """A step's gradients, None where all of it was left out: apply those that are due now.

        A copy is kept: the tensors may lie in buffers that are used again.
        """
        if self._lag:
            copies = None if sums is None else [None if g is None else g.clone() for g in sums]
            self.waiting.append(copies)
            if len(self.waiting) <= self._lag:
                return
            sums = self.waiting.popleft()
        self._optimizer.step(sums)

    def drain(self) -> None:
        """Apply all that wait, in their order: no step will follow."""
        while self.waiting:
            self._optimizer.step(self.waiting.popleft())


def replica(model: nn.Module, *, shared: bool) -> nn.Module:
    """A copy for one rank; ``shared`` weights are the same memory, gradients never are.

    Separate Parameters are needed even then: autograd's version counters would notice an optimiser
    step made through another rank's. Raises ValueError for a model that cannot be copied.
    """
    try:
        twin = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"model {type(model).__name__} cannot be copied, and this mode gives each rank its own:"
            f" {str(error).partition('. ')[0]}; keep nothing computed as an attribute"
            " (torch.nn.utils.parametrizations.weight_norm in place of torch.nn.utils.weight_norm)"
        ) from error
    if shared:
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            mine.data = theirs.data
    return twin


def copy_weights(weights: Iterable[Tensor], target: nn.Module) -> None:
    """Overwrite the target's parameters with these."""
    with torch.no_grad():
        for mine, theirs in zip(target.parameters(), weights, strict=True):
            mine.copy_(theirs)


MAX_BUCKET_BYTES = 25 * 2**20
"""Source: the default of torch's DistributedDataParallel."""
MIN_BUCKET_BYTES = 2**20
"""A smaller one costs the latency of a message and hides next to nothing. Source: the first bucket
of torch's DistributedDataParallel."""
LEAST_BUCKETS = 4
"""Of a network of four times ``MIN_BUCKET_BYTES`` or more, so that it overlaps, too."""


def bucket_plan(model: nn.Module) -> list[list[int]]:
    """Parameter numbers by bucket, in the order in which the backward pass finishes them.

    A small network is one bucket, so one message. Parameters that the user froze are in none.
    """
    sizes = {
        number: p.numel() * p.element_size()
        for number, p in enumerate(model.parameters())
        if p.requires_grad
    }
    share = -(-sum(sizes.values()) // LEAST_BUCKETS)
    limit = min(MAX_BUCKET_BYTES, max(MIN_BUCKET_BYTES, share))
    plan: list[list[int]] = []
    filled = limit + 1
    for number in reversed(sizes):
        if filled + sizes[number] > limit:
            plan.append([])
            filled = 0
        plan[-1].append(number)
        filled += sizes[number]
    return plan


RING_FROM_BYTES = 128 * 1024
"""What a network between hosts carries in the latency of a message: 10 Gbit/s for 0.1 ms
(assumed). With W ranks and a network of n bytes a ring takes 2 (W - 1) messages in turn and
2 (W - 1) / W n bytes, a gather W - 1 and (W - 1) n."""


def gathers(config: TrainConfig, model: nn.Module) -> bool:
    """Whether ranks that are processes gather the dense gradients and add them up in rank order.

    Unless the config says which, it follows from the network's bytes and the ranks' number alone,
    so that a run that goes on, or is done again, adds up alike: gather for two ranks, and for more
    where the messages that it saves take longer than the bytes that it adds.

    >>> from runtime.config import SyncConfig
    >>> two, eight = (TrainConfig(sync=SyncConfig(ranks=ranks)) for ranks in (2, 8))
    >>> small, large = nn.Linear(100, 100), nn.Linear(1000, 1000)
    >>> [gathers(config, model) for config in (two, eight) for model in (small, large)]
    [True, True, True, False]
    """
    if config.engine.dense_sum != "auto":
        return config.engine.dense_sum == "gather"
    if config.engine.device != "cpu":  # NCCL's messages take microseconds
        return False
    trained = [p for p in model.parameters() if p.requires_grad]
    size_bytes = sum(p.numel() * p.element_size() for p in trained)
    ranks = config.sync.ranks
    return size_bytes * (ranks - 2) <= RING_FROM_BYTES * ranks


class Buckets:
    """One rank's gradients of a step, bucket by bucket, as its backward pass finishes them."""

    def __init__(self, model: nn.Module) -> None:
        self.plan = bucket_plan(model)
        self.parameters = list(model.parameters())
        self.missing: list[int] = []
        """Per bucket, gradients that the backward pass has not given yet."""
        self.end_step(None)

    def end_step(self, gradients: DenseGradients | None) -> bool:
        """The backward pass is over, and gave these; None: the rank is left out of the step.

        Whether what was taken of full buckets does not count: then, and where a gradient has come
        again behind that (a layer used twice behind reentrant checkpoints).
        """
        spoilt = gradients is None or min(self.missing, default=0) < 0
        none: DenseGradients = [None] * len(self.parameters)
        # In one assignment: another rank's thread may be summing them.
        self.gradients = none if gradients is None else list(gradients)
        self.missing = [len(bucket) for bucket in self.plan]
        return spoilt

    def hook(self, full: Callable[[int], None]) -> None:
        """Have ``full`` called during every backward pass as soon as a bucket is."""

        # A parameter's hooks are out of the garbage collector's sight: what they held would live as
        # long as the process, and with a run's weights its store and its connections.
        living = weakref.ref(self)
        call = weakref.WeakMethod(full)

        def ready(number: int, bucket: int, parameter: Tensor) -> None:
            buckets, is_full = living(), call()
            if buckets is None or is_full is None:
                return
            buckets.gradients[number] = parameter.grad
            buckets.missing[bucket] -= 1
            if not buckets.missing[bucket]:
                is_full(bucket)

        for bucket, numbers in enumerate(self.plan):
            for number in numbers:
                hook = partial(ready, number, bucket)
                parameter = self.parameters[number]
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


_GROWTH_UPDATES = 2000  # source: the growth interval of torch.amp.GradScaler
_SCALE_STATE = ("value", "calm", "step", "found_finite", "found_overflow")


class LossScale:
    """The factor that keeps float16 gradients above zero: halved on overflow, doubled later.

    One decision per dense update, however many ranks share it: in barrier modes all ranks of a
    step have the factor that stood after the step before, and one overflow or many halve it once.
    In async every batch is an update.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._adapts = config.engine.precision == "float16"
        self._shared = config.sync.mode.has_barrier
        self._most = self._value = config.engine.loss_scale if self._adapts else 1.0
        self._calm = 0
        self._step = 0
        self._found_finite = self._found_overflow = False
        self._lock = threading.Lock()

    @property
    def value(self) -> float:
        """The factor of the next update."""
        with self._lock:
            return self._decided()[0]

    def of(self, step: int) -> float:
        """The factor of a step's loss; all ranks have reported the steps before."""
        if not self._adapts:
            return 1.0
        with self._lock:
            if step > self._step:
                self._step = step
                self._settle()
            return self._value

    def note_overflow(self, step: int) -> bool:
        """Scaled gradients of the step overflowed; False when that cannot be the scale's fault."""
        with self._lock:
            if not self._adapts or self._value <= 1.0:
                return False
            self._found_overflow = True
            if not self._shared:
                self._settle()
            return True

    def note_finite(self, step: int) -> None:
        """Gradients of the step were finite."""
        if self._adapts:
            with self._lock:
                self._found_finite = True
                if not self._shared:
                    self._settle()

    @property
    def reports(self) -> tuple[bool, bool]:
        """Whether ranks of this process saw finite gradients, and an overflow, in the open update:
        what ranks that are processes tell each other."""
        with self._lock:
            return self._found_finite, self._found_overflow

    def take_in(self, finite: bool, overflow: bool) -> None:
        """What all ranks saw in the open update, so that all processes decide the same."""
        with self._lock:
            self._found_finite = finite
            self._found_overflow = overflow

    def state(self) -> dict[str, Any]:
        """What `go_on` takes; plain JSON."""
        with self._lock:
            return {name: getattr(self, f"_{name}") for name in _SCALE_STATE}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Decide on from what `state` gave."""
        with self._lock:
            for name in _SCALE_STATE:
                setattr(self, f"_{name}", state[name])

    def _settle(self) -> None:
        self._value, self._calm = self._decided()
        self._found_finite = self._found_overflow = False

    def _decided(self) -> tuple[float, int]:
        """The factor and the calm updates before it, given what the open update reported."""
        if self._found_overflow:
            return self._value / 2, 0
        calm = self._calm + self._found_finite
        if calm >= _GROWTH_UPDATES and self._value < self._most:
            return self._value * 2, 0
        return self._value, calm
