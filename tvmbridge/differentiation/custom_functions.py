"""Custom autograd functions: what backward of a module must know of those that forward applies.

A function with several outputs, of which a gradient arrives for some, gets zeros for the others,
or None if it asked for that. Its backward may do anything with them: multiply a zero by infinity,
or take another way. So it matters which outputs a gradient arrives for.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.utils
from torch.autograd.function import BackwardCFunction, FunctionCtx

from tvmbridge.errors import UnsupportedOperatorError
from tvmbridge.tracing.patches import patched_here


@dataclass(frozen=True)
class AppliedFunction:
    """One call of a custom autograd function with several outputs.

    ``reads`` says for each output from which cotangents (by number) a gradient arrives for it, and
    ``own`` which cotangent is that gradient as it is (None: it is computed). ``zeros``: zeros stand
    for gradients that do not arrive; otherwise None does.
    """

    name: str
    reads: tuple[frozenset[int], ...]
    own: tuple[int | None, ...]
    zeros: bool


class FunctionWatch:
    """Notes the custom autograd functions that are applied, and why in ``reasons``."""

    def __init__(self, reasons: dict[str, None]) -> None:
        self.custom = False
        self._reasons = reasons
        self._bare: list[FunctionCtx] = []

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Within it they are noted, also those whose ``apply`` was bound before."""

        def applied(unwrap: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            # The patch's call and its stub stand between this function and Function.apply.
            cls = sys._getframe(3).f_locals.get("cls")
            name = getattr(cls, "__name__", "unnamed")
            # Operators of ours have PyTorch's own formulas for a backward.
            self.custom |= not name.startswith("GeneratedBackwardFor_tvmbridge_")
            self._reasons[f"the custom autograd function {name} has a backward of its own"] = None
            return unwrap(args)

        def asked(genuine: Any, ctx: FunctionCtx, value: bool) -> None:
            genuine(ctx, value)
            if not value:
                self._bare.append(ctx)

        with (
            patched_here(torch._functorch.utils, "unwrap_dead_wrappers", applied),
            patched_here(FunctionCtx, "set_materialize_grads", asked),
        ):
            yield

    def applied(self, outputs: Sequence[torch.Tensor]) -> tuple[AppliedFunction, ...]:
        """Those with several outputs behind ``outputs``, whose cotangents are numbered so."""
        if not self.custom:
            return ()
        readers: dict[Any, dict[int, set[int]]] = {}
        for number, output in enumerate(outputs):
            for node, place in _edges_behind(output):
                readers.setdefault(node, {}).setdefault(place, set()).add(number)
        returned: dict[Any, int] = {(o.grad_fn, o.output_nr): i for i, o in enumerate(outputs)}
        bare = set(map(id, self._bare))
        return tuple(
            AppliedFunction(
                name=type(node).__name__.removesuffix("Backward"),
                reads=tuple(frozenset(numbers) for numbers in places.values()),
                own=tuple(
                    returned.get((node, place)) if len(numbers) == 1 else None
                    for place, numbers in places.items()
                ),
                zeros=id(node) not in bare,
            )
            for node, places in readers.items()
            if isinstance(node, BackwardCFunction) and len(places) > 1
        )


def _edges_behind(output: torch.Tensor) -> set[tuple[Any, int]]:
    """All nodes that backward from ``output`` may visit, with the output that it enters by."""
    edges: set[tuple[Any, int]] = {(output.grad_fn, output.output_nr)}
    waiting, visited = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        edges |= set(node.next_functions)
        waiting += [other for other, _ in node.next_functions]
    return edges


def zeros_to_pass(functions: Sequence[AppliedFunction], absent: Collection[int]) -> frozenset[int]:
    """Which of the ``absent`` cotangents are zeros that a function gets.

    Raises:
        UnsupportedOperatorError: what a function would get is not known.
    """
    passed: set[int] = set()
    for function in functions:
        missing = [i for i, reads in enumerate(function.reads) if reads <= set(absent)]
        if len(missing) == len(function.reads):
            continue  # PyTorch does not call it.
        own = [function.own[i] for i in missing]
        if missing and (not function.zeros or None in own):
            given = "zeros" if function.zeros else "None"
            raise UnsupportedOperatorError(
                f"the custom autograd function {function.name} gets {given} for an output that no "
                "gradient arrives for, which its compiled backward does not do"
            )
        passed |= {number for number in own if number is not None}
    return frozenset(passed)
