"""The stage functions forward and backward: from one rank's vectors to all its gradients.

Both executors call them, so what differs between modes is only the order of reads and writes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.nn.modules.dropout import _DropoutNd

from persia_sim.base.vocabulary import Stage
from runtime.config import TrainConfig
from runtime.data.batch import Batch, Layout
from runtime.dense.optimizer import DenseGradients
from runtime.dense.rules import Loss
from runtime.embedding.batch_rows import FieldVectors, Handle, VectorGradients
from runtime.models.inputs import Embeddings, InputShape, predictions
from runtime.models.networks import BUILT_IN, ModelError, blamed_on, build_model, is_imported
from runtime.rank.staging import Coming, Staged, StreamStaging, open_staging

StageSpan = Callable[[str], AbstractContextManager[object]]
"""Times the body as one stage; `nullcontext` times nothing."""


class NonFiniteError(ValueError):
    """A loss or a gradient is NaN or infinite."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """What the backward pass of one (rank, step) gives."""

    loss: Loss
    """The rank's share of the step's mean loss; of a GPU it may be on its way."""
    dense: DenseGradients
    vectors: VectorGradients | None
    """For the embedding worker; None of a batch without samples."""
    finite: bool
    """Whether loss and all gradients are; if not, nothing of them is applied. True also where that
    is on its way: then the loss raises it."""


class LateLoss:
    """A loss on its way from a GPU, and beside it the largest gradient; any thread may ask."""

    def __init__(self, coming: Coming, refuse: Callable[[float], None]) -> None:
        """``refuse`` raises the error of a loss or gradient that is not finite."""
        self._coming = coming
        self._refuse = refuse
        self._facts: tuple[float, float] | None = None
        self._lock = threading.Lock()
        self.known_s: float | None = None
        """When it was here, by `time.perf_counter`: whoever waits for it first notes that."""

    def is_known(self) -> bool:
        """Whether nobody needs to wait for it."""
        return self._facts is not None or self._coming.is_here()

    def __float__(self) -> float:
        """Wait for it; raises NonFiniteError."""
        with self._lock:
            if self._facts is None:
                self._coming.wait()
                self.known_s = time.perf_counter()
                assert self._coming.facts is not None
                self._facts = tuple(self._coming.facts.tolist())
                self._coming.release_facts()
        value, largest = self._facts
        if not (math.isfinite(value) and math.isfinite(largest)):
            self._refuse(value)
        return value


class Learner:
    """The dense model and its loss; of the rows it knows the pooled vectors only."""

    def __init__(self, config: TrainConfig, layout: Layout, dims: dict[str, int]) -> None:
        self.config = config
        self.layout = layout

        # The network, on its device and in its arithmetic; the seed alone decides its first
        # weights.
        shape = InputShape(layout=layout, dims=dims)
        network = config.model
        self.model = build_model(network.name, shape, network.hidden, config.seed, network.dropout)
        self.dtype = torch.float64 if config.engine.precision == "float64" else torch.float32
        self.device = open_device(config.engine.device)
        enter_device(config.engine.device)
        round_products(config.engine.precision)
        self.model.to(self.device, self.dtype)

        # How vectors reach the device and gradients come back.
        self._staging = open_staging(self.device, self.dtype)
        self.allocate = self._staging.allocate
        """Makes the arrays of vectors that will be staged; None: any memory does."""
        # What must be looked at in every step: a mean over ranks, numbers drawn at random.
        self._reads_late = config.nonfinite == "stop"
        self._is_alone = config.sync.ranks == 1 and config.sync.mode.has_barrier
        self._keeps_buffers = is_imported(network.name) and not (
            self._is_alone and self._reads_late
        )
        self.drew_unseeded = False
        """Whether the model has drawn from torch's generator without saying that it does."""
        self._draws = draws_random_numbers(self.model)
        self._parameters: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()
        self._row_factor = float(config.sync.ranks) if config.sync.row_gradients == "sum" else 1.0

    def stage(self, batch: Batch, vectors: FieldVectors) -> Staged | None:
        """Start a batch on its way to the device; None for one without samples."""
        return self._staging.send(batch, vectors) if batch.size else None

    def gradients(
        self,
        model: nn.Module,
        where: Handle,
        staged: Staged | None,
        samples: int,
        span: StageSpan = nullcontext,
    ) -> Gradients:
        """Forward and backward of one (rank, step); leaves ``parameter.grad`` set to None.

        The loss is the sum over the batch over ``samples`` (of the whole step), mean over tasks:
        gradients are those of the step's mean loss, so those of all ranks only need to be summed.
        ``span`` is entered around each of the two stages. Gradients that are not finite end the
        run, or come back marked so, as the config says.
        """
        # A rank without samples (of a short last step) has no part in the sum.
        parameters = self._parameters_of(model)
        if staged is None:
            return Gradients(0.0, [None] * len(parameters), None, True)

        # Forward; copies of the buffers where it matters that this may change them.
        buffers: dict[str, Tensor] = {}
        if self._keeps_buffers:
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with span(Stage.FORWARD), self._drawing(where.rank, where.step):
            logits = self._logits(model, staged)
            loss = self._loss(logits, staged.labels, samples)
        if buffers and not self._is_alone:  # what the first forward pass leaves stays as it is
            refuse_running_statistics(model, buffers, self.config)
            self._keeps_buffers = False

        # Backward; the gradients of the weights are handed over, not added up.
        name = self.config.model.name
        with span(Stage.BACKWARD), blamed_on(name, "failed in the backward pass"):
            loss.backward()  # type: ignore[no-untyped-call]
        dense = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        if self._reads_late and isinstance(self._staging, StreamStaging):
            return self._late_gradients(self._staging, where, staged.embeddings, dense, loss)

        # The gradients of the vectors are held until they are scattered onto the rows.
        held = ExitStack()
        embeddings = held.enter_context(self._staging.receive(staged.embeddings))
        vectors = VectorGradients(embeddings, self._row_factor, held=held)

        # What is not finite ends the run, or is left out; then nothing of it stays.
        value = loss.item()
        finite = _all_finite(value, dense, embeddings)
        if not finite:
            held.close()
            self._refuse_or_skip(where, value)
            for name, was in buffers.items():
                model.get_buffer(name).copy_(was)
        return Gradients(value, dense, vectors, finite)

    def _parameters_of(self, model: nn.Module) -> list[nn.Parameter]:
        """Those of a rank's model, listed once: to walk its modules takes as long as a layer."""
        known = self._parameters.get(model)
        if known is None:
            known = self._parameters[model] = list(model.parameters())
        return known

    def _late_gradients(
        self,
        staging: StreamStaging,
        where: Handle,
        embeddings: Embeddings,
        dense: DenseGradients,
        loss: Tensor,
    ) -> Gradients:
        """The host waits for nothing: not for the loss, nor for whether all is finite.

        Only where that ends the run: what later steps have made of it does not matter then.
        """
        leaves = [embeddings.pooled, *embeddings.sequences.values()]
        given = [*dense, *(leaf.grad for leaf in leaves)]
        known = [g for g in given if g is not None and g.numel()]
        norms = torch._foreach_norm(known, math.inf)
        coming = staging.begin_receiving(embeddings, loss, torch.stack(norms).max())
        late = LateLoss(coming, lambda value: self._refuse_or_skip(where, value))
        held = ExitStack()
        held.callback(coming.release)
        vectors = VectorGradients(coming.vectors, self._row_factor, late.__float__, held)
        return Gradients(late, dense, vectors, True)

    def _refuse_or_skip(self, where: Handle, loss: float) -> None:
        """Gradients are not finite: raise, or go on without this batch."""
        if self.config.nonfinite == "stop":
            raise NonFiniteError(
                f"loss {loss} or a gradient is not finite at rank {where.rank},"
                f" step {where.step}; lower --model.lr or --rows.optimizer.lr,"
                " or leave such batches out with --nonfinite skip"
            )

    def predict(self, model: nn.Module, batch: Batch, vectors: FieldVectors) -> np.ndarray:
        """What is predicted of a batch, [B, T], given its vectors."""
        staged = self._staging.send(batch, vectors)
        # Not inference_mode: training may go on with what a model keeps.
        with torch.no_grad(), self._drawing(0, 0):
            return predictions(self._logits(model, staged), self.layout)

    def _drawing(self, rank: int, step: int) -> AbstractContextManager[None]:
        """Around a forward pass: its draws are seeded, or noticed; those built in have none."""
        if self._draws:
            return seeded_draws(self.config.seed, rank, step, self.device)
        return nullcontext() if self.config.model.name in BUILT_IN else self._watched_draws()

    @contextmanager
    def _watched_draws(self) -> Iterator[None]:
        """Notice a model that draws by functions, such as torch.nn.functional.dropout."""
        before = generator_states(self.device)
        yield
        self.drew_unseeded |= not all(map(torch.equal, before, generator_states(self.device)))

    def _logits(self, model: nn.Module, staged: Staged) -> Tensor:
        self._staging.arrive(staged)
        cast = autocast(self.device.type, self.config.engine.precision)
        with cast, blamed_on(self.config.model.name, "failed in forward"):
            logits = model(staged.dense, staged.embeddings)
        return self._checked(logits, (staged.dense.shape[0], len(self.layout.tasks)))

    def _checked(self, value: object, expected: tuple[int, int]) -> Tensor:
        """What a model returned, if it is what the loss takes."""
        if not isinstance(value, Tensor):
            what = f"a {type(value).__name__}" if value is not None else "None"
        elif value.shape != expected:
            what = f"logits of shape {tuple(value.shape)}"
        elif not value.is_floating_point():
            what = f"logits of {value.dtype}"
        else:
            return value
        raise ModelError(
            f"model {self.config.model.name} returned {what}, expected {expected}:"
            " a tensor of floats, one logit per sample and task"
        )

    def _loss(self, logits: Tensor, labels: Tensor, samples: int) -> Tensor:
        """The step's mean loss over samples and tasks, this batch's part of it; a weight multiplies
        its sample's loss, and does not change the number of samples, nor does an absent label."""
        layout = self.layout
        logits = logits.to(self.dtype)
        tasks = len(self.layout.tasks)
        if not (layout.regression or layout.weighted or layout.optional):
            total = binary_cross_entropy_with_logits(logits, labels, reduction="sum")
            return total / (samples * tasks)

        # Task by task, where labels are numbers, weigh something, or may be absent.
        total = logits.new_zeros(())
        for k, task in enumerate(layout.tasks):
            of_task = mse_loss if task in layout.regression else binary_cross_entropy_with_logits
            of_samples = labels[:, k]
            predicted = logits[:, k]
            if task in layout.optional:  # an absent label has no loss, and gives no gradient
                known = ~torch.isnan(of_samples)
                losses = of_task(predicted, of_samples.nan_to_num(), reduction="none")
                losses = torch.where(known, losses, 0.0)
            else:
                losses = of_task(predicted, of_samples, reduction="none")
            total = total + (losses * labels[:, tasks] if layout.weighted else losses).sum()
        return total / (samples * tasks)


def _all_finite(loss: float, dense: DenseGradients, vectors: FieldVectors) -> bool:
    """A sum is finite only if its terms are; one by one they are checked only if it is not."""
    sums = [g.sum() for g in dense if g is not None]
    total = torch.stack(sums).sum().item() if sums else 0.0  # one answer, one wait for the device
    # Of torch, whose sum is three times as fast as numpy's where the cache still has them.
    here = [torch.from_numpy(g) for g in (vectors.pooled, *vectors.sequences.values())]
    total += sum(g.sum().item() for g in here)
    if math.isfinite(loss + total):
        return True
    given = [*here, *(g for g in dense if g is not None)]
    return math.isfinite(loss) and all(bool(torch.isfinite(g).all()) for g in given)


_DRAWING = threading.Lock()  # torch's global generator is one for all threads


def open_device(name: str) -> torch.device:
    """The device of the dense network, or ValueError when there is none such here."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} cannot be used: {reason}; try --device cpu") from None
    return device


def enter_device(name: str) -> None:
    """What the calling thread now does on a GPU it does on this one.

    Every thread begins on GPU 0, and would open a context of some hundred MB there: for a pinned
    buffer, an event, a stream.
    """
    device = torch.device(name)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def autocast(device: str, precision: str) -> AbstractContextManager[Any]:
    """Around a forward pass: torch's autocast in bfloat16, else nothing.

    ``device``: cpu, cuda, cuda:1 and so on.
    """
    if precision != "bfloat16":
        return nullcontext()
    return torch.autocast(device.partition(":")[0], torch.bfloat16)


def round_products(precision: str) -> None:
    """Whether float32 matrix products of this process's GPUs round their factors (tf32).

    Not `torch.set_float32_matmul_precision`, which changes the CPU's products, too.
    """
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


def refuse_running_statistics(
    model: nn.Module, before: Mapping[str, Tensor], config: TrainConfig
) -> None:
    """Ranks do not share buffers: what a forward pass changes in them would differ by mode."""
    buffers = model.named_buffers()
    names = [n for n, b in buffers if n not in before or not torch.equal(b, before[n])]
    if names:
        raise ValueError(
            f"model {config.model.name} keeps running statistics ({', '.join(names[:3])}), which"
            " ranks do not share: train it with one rank in a barrier mode, or use layer norm"
        )


def draws_random_numbers(model: nn.Module) -> bool:
    """Whether training it draws from torch's generator, as dropout does.

    Found by its modules; a model that draws by functions says so with an attribute
    ``draws_random_numbers = True``.
    """
    if getattr(model, "draws_random_numbers", False):
        return True
    return any(isinstance(m, _DropoutNd) and m.p > 0 for m in model.modules())


@contextmanager
def seeded_draws(seed: int, rank: int, step: int, device: torch.device) -> Iterator[None]:
    """Make what the body draws a function of (seed, rank, step), whichever thread it runs in.

    Behind it the generators of the CPU and of the device stand where they stood.
    """
    words = np.random.SeedSequence([seed, rank, step]).generate_state(2)
    drawn = int(words[0]) << 32 | int(words[1])
    of_gpu = [device] if device.type == "cuda" else []
    with _DRAWING, torch.random.fork_rng(devices=of_gpu):
        torch.default_generator.manual_seed(drawn)
        for gpu in of_gpu:  # this one alone: torch.manual_seed moves those of all GPUs
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(drawn)
        yield


def generator_states(device: torch.device) -> list[Tensor]:
    """Where torch's generators stand from which a model on this device may draw."""
    states: list[Tensor] = [torch.random.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states
