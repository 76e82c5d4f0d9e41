"""Second derivatives: compiled backward is not differentiable, so the module's own forward is run.

With ``create_graph=True`` (gradient penalties, training on forces, Hessians) backward itself must
be differentiable. The module's own forward then runs again on the arguments of the call, and
PyTorch differentiates it to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.backends import backend_of
from tvmbridge.calls.bases import WithBases
from tvmbridge.calls.surroundings import refused_now
from tvmbridge.compiler.pack import is_at
from tvmbridge.core.autocast import under_autocast, without_autocast
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.errors import BridgeError
from tvmbridge.core.number_inputs import marked
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.structure import opened, unflatten
from tvmbridge.core.torch_private import left_to_python, pytree
from tvmbridge.core.types import InputKind, OutputKind
from tvmbridge.runtime.guards.mode import Mode
from tvmbridge.runtime.guards.state import ModuleState
from tvmbridge.runtime.guards.watch import versions_of
from tvmbridge.runtime.replay import Replay

_Mismatch = Callable[[Sequence[Any], Sequence[Any]], Reason | None]


class SecondOrder:
    """Differentiates a module's own forward in place of the compiled code of one entry.

    - ``draws``: whether forward draws random numbers.
    - ``backwards``: how often the own forward has run for a backward.

    Args:
        mismatch: a function of the arguments' leaves and the module's tensors, which returns why
            the code would not serve such a call now, or None.
    """

    def __init__(self, state: ModuleState, captured: CapturedGraph, mismatch: _Mismatch) -> None:
        users = [d.position or 0 for d in captured.inputs if d.kind is InputKind.USER]
        place = iter(range(len(captured.outputs)))
        places = [(o, next(place) if o.kind is OutputKind.USER else None) for o in captured.outputs]
        self._state = state
        self._captured = captured
        self._mismatch = mismatch
        self._positions = users
        # Positions of the computed outputs among the leaves of forward's return value; None for
        # what a call writes.
        self._places = [i for o, i in places if o.is_computed]
        self.replay = Replay(state, captured)
        self._refused = _refused(captured, self.replay)
        self.draws = bool(captured.noise)
        self.backwards = 0

    def call(
        self, leaves: Sequence[Any], tensors: Sequence[Any], pinned: Pinned | None = None
    ) -> SecondOrderCall | Reason:
        """Record a call, so that forward can run again for its backward; or return why it must not.

        Args:
            pinned: addresses and mode that a fast guard has checked; None: read them now.
        """
        return self._refused or SecondOrderCall(self, leaves, tensors, pinned or self.pin(tensors))

    def pin(self, tensors: Sequence[Any]) -> Pinned:
        """Return the addresses of ``tensors`` and the mode, which a fast guard keeps fixed."""
        return Pinned([t.data_ptr() for t in tensors], self.mode())

    def changed(self, leaves: Sequence[Any], tensors: Sequence[Any]) -> Reason | None:
        """Return why forward would compute something else now than at the call; or None."""
        if not self.replay.can_replace(tensors):
            return Reason(Kind.AGAIN_EXCHANGED)
        return refused_now() or self._mismatch(leaves, tensors)

    def mode(self) -> Mode:
        """Return the mode of a call made now, with the autocast state of the capture.

        Backward runs outside of autocast, so its present state says nothing about the call.
        """
        autocast = self._captured.assumptions.autocast
        return Mode.of_now(self._state.module.training, True, autocast)

    def primals(self, leaves: Sequence[Any], tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Return the primals that may have gradients: user inputs, then the module's tensors."""
        return (*[leaves[p] for p in self._positions], *tensors)

    def outputs(
        self,
        leaves: Sequence[Any],
        tensors: Sequence[Any],
        kept: Mapping[int, torch.Tensor],
        generator: torch.Tensor | None,
    ) -> list[torch.Tensor | None]:
        """Run the module's own forward; return the outputs that compiled code computes.

        Values that forward writes are None: no gradient arrives at them.

        Args:
            kept: copies of tensors that the call has written.
            generator: the state of PyTorch's random generator to start from; None: forward draws
                no random numbers.
        """
        convention = self._captured.convention
        args, kwargs = unflatten(marked(leaves, convention.numbers), convention.in_spec)
        with ExitStack() as stack:
            own = stack.enter_context(self.replay.forward(tensors, kept))
            forward = WithBases(lambda *a, **k: opened(own(*a, **k)), convention.bases)
            stack.enter_context(without_autocast())
            stack.enter_context(under_autocast(self._captured.assumptions.autocast))
            stack.enter_context(torch.enable_grad())
            if generator is not None:
                stack.enter_context(torch.random.fork_rng(devices=[]))
                torch.set_rng_state(generator)
            results = pytree.tree_leaves(forward(*args, **kwargs))
        self.backwards += 1
        return [None if place is None else results[place] for place in self._places]


@dataclass(frozen=True)
class Pinned:
    """The addresses of the module's tensors at a call, and its mode."""

    pointers: Sequence[int]
    mode: Mode


class SecondOrderCall:
    """One recorded call, which can compute gradients that can be differentiated.

    Args:
        pinned: the addresses of the tensors and the mode at the call.
    """

    def __init__(
        self,
        own: SecondOrder,
        leaves: Sequence[Any],
        tensors: Sequence[Any],
        pinned: Pinned,
    ) -> None:
        self._own = own
        self._leaves = leaves
        self._tensors = tensors
        self._primals = own.primals(leaves, tensors)
        self._pinned = pinned
        self._kept = own.replay.keep(tensors)
        first = len(self._primals) - len(tensors)
        self._unwritten = [
            i for i in range(len(self._primals)) if i - first not in own.replay.renewed
        ]
        self._versions = self._versions_now()
        self._given = [t.data_ptr() for t in self._primals[: len(self._primals) - len(tensors)]]
        self._generator = torch.get_rng_state() if own.draws else None

    def _versions_now(self) -> tuple[int, ...] | None:
        """Return the versions of the primals that no call writes; None if a primal has none."""
        try:
            return versions_of(tuple(self._primals[i] for i in self._unwritten))
        except RuntimeError:  # tensors created in inference mode have no version
            return None

    def _is_written(self) -> bool:
        if self._versions is None or self._versions != self._versions_now():
            return True
        before = [*self._given, *self._pinned.pointers]
        return not all(is_at(self._primals[i], before[i]) for i in self._unwritten)

    def refused(self, wanted: Sequence[int]) -> Reason | None:
        """Return why forward cannot run again for gradients of the primals ``wanted``; or None."""
        if self._is_written():
            return Reason(Kind.AGAIN_WRITTEN)
        if self._pinned.mode != self._own.mode():
            return Reason(Kind.AGAIN_MODE)
        first = len(self._primals) - len(self._tensors)
        held = [self._primals[i] for i in wanted if i >= first]
        if any(t._backward_hooks or t.retains_grad for t in held):
            return Reason(Kind.AGAIN_HOOK)
        return self._own.changed(self._leaves, self._tensors)

    def gradients(
        self, wanted: Sequence[int], cotangents: Mapping[int, torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return differentiable gradients of the primals ``wanted``; None if none reaches one."""
        primals = self._primals
        kept = {id(t) for t in self._tensors}
        with torch.enable_grad():
            # The inner differentiation ends at views, so that hooks of arguments run only once.
            views = {id(t): t.view_as(t) for t in primals if id(t) not in kept and t.requires_grad}
        leaves = [views.get(id(leaf), leaf) for leaf in self._leaves]
        outputs = self._own.outputs(leaves, self._tensors, self._kept, self._generator)
        sources = {id(primals[i]): views.get(id(primals[i]), primals[i]) for i in wanted}
        pairs = [(outputs[n], c) for n, c in cotangents.items()]
        arriving = [(o, c) for o, c in pairs if o is not None and o.requires_grad]
        found = torch.autograd.grad(
            [output for output, _ in arriving],
            list(sources.values()),
            [cotangent for _, cotangent in arriving],
            create_graph=True,
            allow_unused=True,
        )
        gradients = dict(zip(sources, found, strict=True))
        # If a tensor was passed twice, only its first position gets the gradient.
        return [gradients.pop(id(primals[i]), None) for i in wanted]


def _refused(captured: CapturedGraph, replay: Replay) -> Reason | None:
    """Return why the own forward cannot repeat the computation of a call; None if it can."""
    if captured.noise and not backend_of(captured.device).redraws:
        return Reason(Kind.AGAIN_DRAWS)
    if captured.convention.changed_arguments or any(
        o.kind is OutputKind.INPUT_MUTATION for o in captured.outputs
    ):
        return Reason(Kind.AGAIN_WRITES)
    if replay.keeps_too_much:
        return Reason(Kind.AGAIN_LARGE)
    if captured.epilogue is not None:
        return Reason(Kind.AGAIN_EPILOGUE)
    if any(d.spec.dtype.is_complex for d in captured.inputs):
        return Reason(Kind.AGAIN_COMPLEX)
    return None


def refuse(
    gradients: Sequence[torch.Tensor | None], sources: Sequence[torch.Tensor], reason: Reason
) -> Sequence[torch.Tensor | None]:
    """Return ``gradients`` that raise an error with ``reason`` when they are differentiated.

    ``sources`` are the tensors that the gradients depend on.
    """
    if not any(s.requires_grad for s in sources):
        return gradients
    present = [g for g in gradients if g is not None]
    refused = iter(_Refused.apply(len(present), reason, *present, *sources))  # type: ignore[no-untyped-call]
    return [None if g is None else next(refused) for g in gradients]


class _Refused(torch.autograd.Function):
    """The identity of the first ``count`` tensors; its backward raises an error."""

    @staticmethod
    def forward(
        ctx: Any, count: int, reason: Reason, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.reason = reason
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    @left_to_python
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        raise BridgeError(
            "tvmbridge does not support double backward here: its compiled backward has no "
            f"derivative, and the module's own forward cannot be run again, because {ctx.reason}. "
            f"For create_graph=True, {ctx.reason.advice}"
        )
