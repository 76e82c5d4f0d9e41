"""Backward in halves: the gradients of inputs when the engine asks for these alone, others later.

``torch.autograd.grad(loss, inputs)`` does not need the gradients of weights. The schedules of
PyTorch's pipelines without bubbles ask for the gradients of a stage's inputs so, with
``retain_graph=True``, and for the gradients of its weights later, with the same cotangents. Then
what the first half has computed is not computed again.
"""

from __future__ import annotations

import enum
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.compiler.backward_code import placed
from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.compiler.halves import CompiledHalves, Halves
from tvmbridge.core.profiling import region
from tvmbridge.core.set_within import set_within
from tvmbridge.core.torch_private import backward_keeps_graph, will_engine_execute
from tvmbridge.core.types import InputKind
from tvmbridge.core.writes import version_of

Gradients = Sequence[torch.Tensor | None]

_weights_follow = ContextVar("tvmbridge_weights_follow", default=False)


def weights_follow_inputs() -> AbstractContextManager[object]:
    """Let backward free residuals between its halves, for the forward calls in this context.

    After the gradients of inputs alone, the caller may ask once for the gradients of weights alone,
    with the same cotangents, and for nothing else.
    """
    return set_within(_weights_follow, True)


def weights_follow() -> bool:
    """Whether the calling thread is inside of :func:`weights_follow_inputs`."""
    return _weights_follow.get()


class Asked(enum.Enum):
    """The gradients that the engine asks a node for."""

    ALL = enum.auto()
    INPUTS = enum.auto()
    WEIGHTS = enum.auto()


@dataclass(frozen=True)
class Waiting:
    """The first half of a backward is done, and the gradients of weights are not asked for yet.

    The step holds this, and an output's autograd node holds the step. A reference to a tensor of
    the same graph would be a cycle, which Python cannot free.

    - ``cotangents``: weak references to the cotangents of the first half; None for absent ones.
    - ``marks``: the versions and addresses of these cotangents.
    - ``layouts``: their shapes and dtypes; None for absent ones.
    - ``values``: what the gradients of weights are computed from; None if they are computed.
    - ``gradients``: the gradients of weights, if they are computed.
    """

    cotangents: tuple[weakref.ref[torch.Tensor] | None, ...]
    marks: tuple[tuple[int, int], ...]
    layouts: tuple[tuple[torch.Size, torch.dtype] | None, ...]
    values: list[Any] | None
    gradients: Gradients

    @classmethod
    def after(
        cls, cotangents: Gradients, values: Sequence[Any] | None, gradients: Gradients
    ) -> Waiting:
        """Return the state after the first half; arguments are the attributes of this class."""
        return cls(
            cotangents=tuple(None if c is None else weakref.ref(c) for c in cotangents),
            marks=_marks(cotangents),
            layouts=_layouts(cotangents),
            values=None if values is None else [_outside_graph(v) for v in values],
            gradients=gradients,
        )

    def fits(self, cotangents: Gradients) -> bool:
        """Whether these are the same cotangents, which nobody has written since."""
        before = (None if c is None else c() for c in self.cotangents)
        if not all(a is b for a, b in zip(before, cotangents, strict=True)):
            return False
        return _marks(cotangents) == self.marks

    def equals(self, cotangents: Gradients) -> bool:
        """Whether the cotangents of the first half live, are unwritten, and have these values.

        This waits for a GPU.
        """
        before = [None if c is None else c() for c in self.cotangents]
        if _marks(before) != self.marks or _layouts(cotangents) != self.layouts:
            return False
        pairs = zip(before, cotangents, strict=True)
        return all(b is None or _are_equal(a, b) for a, b in pairs if a is not None)


class BackwardHalves:
    """Runs the backward of a compiled module in halves, if the engine asks for them.

    Args:
        compiled: the compiled halves; None: they cannot be compiled, and a whole backward runs.
        inputs: the numbers of the gradients that belong to inputs.

    Attributes:
        runs: how often the code for the gradients of ``inputs`` and of ``weights`` ran, and how
            often a ``whole`` backward ran although the engine asked for a part.
    """

    def __init__(
        self, compiled: CompiledHalves | None, inputs: Sequence[int], weights: Sequence[int]
    ) -> None:
        self.inputs = tuple(inputs)
        self.weights = tuple(weights)
        self.runs: Counter[str] = Counter()
        self._compiled = compiled
        # Whether a backward came in halves before. The first one may be a lone gradient of inputs.
        self._both_came = False
        # Whether the caller's copies of cotangents were compared, and had the same values.
        self._copies_agree = False

    @classmethod
    def of(cls, compiled: CompiledModule, gradient_of: Sequence[int]) -> BackwardHalves | None:
        """Return the halves of a module; None if all gradients are of inputs, or of weights.

        Args:
            gradient_of: for each gradient, the number of its primal.
        """
        users = sum(d.kind is InputKind.USER for d in compiled.captured.inputs)
        inputs = [i for i, position in enumerate(gradient_of) if position < users]
        weights = [i for i, position in enumerate(gradient_of) if position >= users]
        partial = compiled.partial_backwards
        if not inputs or not weights or partial is None:
            return None
        return cls(partial.halves, inputs, weights)

    def compile(self) -> bool:
        """Compile the halves now; return whether that was possible."""
        return self._known(at_once=True) is not None

    def gradients(self, ctx: Any, cotangents: Gradients, whole: Callable[[], Gradients]) -> Any:
        """Return the gradients that the engine asks for, and None for the others.

        Raises:
            RuntimeError: the values are freed that the gradients would be computed from.
        """
        step, waiting = ctx.step, ctx.step.waiting
        asked = self._asked(ctx.next_functions, weights_first=waiting is None)
        second = asked is Asked.WEIGHTS and waiting is not None
        if second and self._fits(step, waiting, cotangents) and step.rereads_unwritten():
            return self._second(ctx, cotangents, waiting)
        step.refuse_freed()
        step.waiting = None
        if asked is Asked.INPUTS:
            return self._first(ctx, cotangents, whole)
        return whole()

    def _fits(self, step: Any, waiting: Waiting, cotangents: Gradients) -> bool:
        """Whether these are the cotangents of the first half.

        Schedules of PyTorch 2.11 hand on copies. In a :class:`ZeroBubbleStage` the values of copies
        are compared once for this code, since each comparison waits for a GPU.
        """
        if waiting.fits(cotangents):
            return True
        if not step.frees:
            return False
        if self._copies_agree:
            return _layouts(cotangents) == waiting.layouts
        self._copies_agree = waiting.equals(cotangents)
        return self._copies_agree

    def _asked(self, following: Sequence[tuple[Any, int]], *, weights_first: bool) -> Asked:
        """Return which gradients the engine will pass on.

        Args:
            following: for each gradient, the node that takes it.
            weights_first: whether to look at the weights first. PyTorch raises an error, which
                takes 90 us, for a leaf that it returns the gradient of.
        """
        groups = [(self.weights, Asked.INPUTS), (self.inputs, Asked.WEIGHTS)]
        for numbers, others in groups if weights_first else reversed(groups):
            if not any(_takes(following[i][0]) for i in numbers):
                return others
        return Asked.ALL

    def _first(self, ctx: Any, cotangents: Gradients, whole: Callable[[], Gradients]) -> Gradients:
        """Return the gradients of inputs; note what the gradients of weights need, if they come."""
        step = ctx.step
        # Hooks on saved tensors have the residuals, or a cotangent is absent: one whole backward.
        simple = step.residuals is not None and _all_arrive(step, cotangents)
        halves = self._known(at_once=step.frees or self._both_came) if simple else None
        values: list[Any] | None = None
        ready: Gradients = ()
        if halves is None:
            self.runs["whole"] += 1
            gradients = whole()
            found = [gradients[i] for i in self.inputs]
            ready = [gradients[i] for i in self.weights]
        else:
            self.runs["inputs"] += 1
            found, values = self._compute(ctx, halves, cotangents)
        if backward_keeps_graph():
            step.waiting = Waiting.after(cotangents, values, ready)
            if step.frees and halves is not None:
                step.free_residuals()
        return self._placed(self.inputs, found)

    def _known(self, *, at_once: bool) -> Halves | None:
        if self._compiled is None:
            return None
        return self._compiled.known(self.inputs, at_once=at_once)

    def _compute(
        self, ctx: Any, halves: Halves, cotangents: Gradients
    ) -> tuple[list[Any], list[Any]]:
        """Run the code for the gradients of inputs."""
        step = ctx.step
        call = step.call
        step.refuse_written(cotangents)
        with region(f"{call.compiled.origin} backward of inputs"), call.packing:
            *values, residuals = call.as_read(step.restored(ctx.saved_tensors))
            return halves.of_inputs([*values, *residuals, *call.filled(cotangents)])

    def _second(self, ctx: Any, cotangents: Gradients, waiting: Waiting) -> Gradients:
        """Return the gradients of weights from what the first half has left."""
        step = ctx.step
        call = step.call
        self._both_came = True
        step.refuse_written(cotangents)
        if waiting.values is not None or step.residuals is not None:
            step.restored(ctx.saved_tensors)  # raises if a tensor that autograd saved was written
        if waiting.values is None:
            # The caller may write into the gradients, so they are returned once.
            step.waiting = None
            return self._placed(self.weights, waiting.gradients)
        halves = self._known(at_once=True)
        assert halves is not None
        self.runs["weights"] += 1
        with region(f"{call.compiled.origin} backward of weights"), call.packing:
            return self._placed(self.weights, halves.of_weights(waiting.values))

    def _placed(self, numbers: Sequence[int], gradients: Gradients) -> Gradients:
        return placed(numbers, gradients, len(self.inputs) + len(self.weights))


def _all_arrive(step: Any, cotangents: Gradients) -> bool:
    return all(cotangents[number] is not None for number in step.call.parts.cotangent_of)


def _marks(cotangents: Gradients) -> tuple[tuple[int, int], ...]:
    return tuple((version_of(c), c.data_ptr()) for c in cotangents if c is not None)


def _layouts(cotangents: Gradients) -> tuple[tuple[torch.Size, torch.dtype] | None, ...]:
    return tuple(None if c is None else (c.shape, c.dtype) for c in cotangents)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same values, or NaNs, which overflowing gradients contain."""
    if torch.equal(one, other):
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _outside_graph(value: Any) -> Any:
    """Return ``value`` without its autograd node; a leaf is returned itself."""
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        return value
    return value.detach()


def _takes(node: Any) -> bool:
    """Whether the running backward passes a gradient on to ``node``, or returns it."""
    if node is None:
        return False
    try:
        return bool(will_engine_execute(node))
    except RuntimeError:  # the leaf of a tensor whose gradient torch.autograd.grad returns
        return True
