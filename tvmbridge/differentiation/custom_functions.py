"""Mark the backwards of custom autograd functions in the recorded gradient of a module.

PyTorch calls a function's backward if a gradient arrives for at least one of its outputs. For the
other outputs it passes zeros, or None if the function asked for that. Backward may do anything
with these values: multiply a zero by infinity, or branch. Boundaries in the recorded gradient
therefore mark where each backward begins and ends, so that it runs exactly when PyTorch runs it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from tvmbridge.calls.custom_functions import custom_functions_told
from tvmbridge.calls.patches import patched_here
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.differentiation.saved import nodes_behind
from tvmbridge.kernels.borders import enters, leaves

# The operators of tvmbridge, whose backward has PyTorch's formulas.
_OURS = "GeneratedBackwardFor_tvmbridge_"
_Edge = tuple[Any, int]


@dataclass(frozen=True)
class AppliedFunction:
    """One call of a custom autograd function.

    - ``reads``: for each output that can get a gradient, the numbers of the cotangents that its
      gradient comes from.
    - ``zeros``: whether zeros replace gradients that do not arrive; otherwise None does.
    - ``cut_off``: a function between the outputs and this one may return no gradient to it.
    - ``unfed``: no gradient reaches this function, or one between the outputs and this one, even
      if all cotangents arrive.
    """

    name: str
    reads: tuple[frozenset[int], ...]
    zeros: bool
    cut_off: bool = False
    unfed: bool = False

    def is_called(self, absent: Collection[int]) -> bool:
        """Whether PyTorch calls the backward if the ``absent`` cotangents do not arrive."""
        return bool(frozenset().union(*self.reads) - frozenset(absent))


class FunctionWatch:
    """Records the custom autograd functions that forward applies.

    ``reasons`` receives a sentence for each function: TVM's Gradient does not know its backward.
    """

    def __init__(self, reasons: dict[str, None]) -> None:
        self._reasons = reasons
        self._bare: list[BackwardCFunction] = []

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Record the functions applied in this context, also by a stored reference to ``apply``."""

        def applied(kind: type[Any]) -> None:
            name = getattr(kind, "__name__", "unnamed")
            self._reasons[f"the custom autograd function {name} has a backward of its own"] = None

        def told(genuine: Any, ctx: BackwardCFunction, name: str, value: Any) -> None:
            genuine(ctx, name, value)
            if name == "materialize_grads":
                self._bare = [known for known in self._bare if known is not ctx]
                self._bare += [] if value else [ctx]

        with (
            custom_functions_told(applied),
            patched_here(BackwardCFunction, "__setattr__", told),
        ):
            yield

    def bordered(self, outputs: Sequence[torch.Tensor]) -> Bordered:
        """Find the functions behind ``outputs``, and mark boundaries when their backwards run."""
        return Bordered(outputs, set(map(id, self._bare)))


class Bordered:
    """The custom functions behind outputs, with hooks that mark the boundaries of their backwards.

    Args:
        outputs: the outputs whose gradient will be recorded.
        bare: the ids of the nodes that get None for gradients that do not arrive.
    """

    def __init__(self, outputs: Sequence[torch.Tensor], bare: Collection[int]) -> None:
        self._bare = bare
        self._reads: dict[Any, dict[int, set[int]]] = {}
        self._cutting: set[int] = set()
        self._unfed: set[int] = set()
        for number, output in enumerate(outputs):
            for node, place in _edges_behind((output.grad_fn, output.output_nr)):
                if isinstance(node, BackwardCFunction) and not _name(node).startswith(_OURS):
                    self._reads.setdefault(node, {}).setdefault(place, set()).add(number)
        for number, node in enumerate(self._reads):
            self._put_borders(number, node)

    def _put_borders(self, number: int, node: Any) -> None:
        wanted = [other is not None for other, _ in node.next_functions]

        def enter(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
            if all(g is None for g in gradients):
                self._unfed.add(number)
            return tuple(None if g is None else enters(g, number) for g in gradients)

        def leave(results: tuple[Any, ...], gradients: tuple[Any, ...]) -> tuple[Any, ...]:
            if any(r is None and w for r, w in zip(results, wanted, strict=False)):
                self._cutting.add(number)
            entered = [g for g in gradients if g is not None]
            return tuple(None if r is None else leaves(r, entered) for r in results)

        node.register_prehook(enter)
        node.register_hook(leave)

    def functions(self) -> tuple[AppliedFunction, ...]:
        """Return the functions by number; valid only once the gradient has been recorded."""
        cut_off = {other for node in self._nodes(self._cutting) for other in _behind(node)}
        unfed = self._nodes(self._unfed)
        unfed += [other for node in unfed for other in _behind(node)]
        return tuple(
            AppliedFunction(
                name=_name(node),
                reads=tuple(map(frozenset, places.values())),
                zeros=id(node) not in self._bare,
                cut_off=node in cut_off,
                unfed=node in unfed,
            )
            for node, places in self._reads.items()
        )

    def _nodes(self, numbers: Collection[int]) -> list[Any]:
        return [node for number, node in enumerate(self._reads) if number in numbers]


def _name(node: Any) -> str:
    return type(node).__name__.removesuffix("Backward")


def _behind(node: Any) -> set[Any]:
    return {other for other, _ in _edges_behind((node, 0)) if other is not node}


def _edges_behind(edge: _Edge) -> set[_Edge]:
    """Return the edges of autograd's graph that backward may visit: (node, number of an output)."""
    nodes = nodes_behind(edge[0])
    return {edge, *(following for node in nodes for following in node.next_functions)}


def called(functions: Sequence[AppliedFunction], absent: Collection[int]) -> frozenset[int]:
    """Return the numbers of the functions whose backward runs without the ``absent`` cotangents.

    Raises:
        UnsupportedOperatorError: a function gets None for a gradient that does not arrive; or it
            is unknown whether a gradient arrives; or a function got no gradient in the recording,
            so that its effect is unknown.
    """
    numbers = {i for i, function in enumerate(functions) if function.is_called(absent)}
    for number, function in enumerate(functions):
        if function.unfed and number not in numbers:
            raise UnsupportedOperatorError(
                f"the custom autograd function {function.name} gets no gradient even where all "
                "outputs do, so that it is not known what it adds to others"
            )
    for function in (functions[i] for i in numbers if not functions[i].zeros):
        reads = function.reads
        missing = any(r <= set(absent) for r in reads)
        if missing or (function.cut_off and any(r & set(absent) for r in reads)):
            raise UnsupportedOperatorError(
                f"the custom autograd function {function.name} gets None for an output that no "
                "gradient arrives for, which its compiled backward does not do"
            )
    return frozenset(numbers)
