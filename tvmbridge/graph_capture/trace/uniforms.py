"""Trace branches on uniform random draws whose outcome is certain.

``if torch.rand([]) < self.layerdrop:`` (LayerDrop) branches on a random number. But a draw is in
[0, 1): it is never below 0, and always below 1. During a trace, a comparison with such a bound has
the truth value that it has at each call. The draw itself stays in the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tvmbridge.core.torch_private import pytree
from tvmbridge.graph_capture.dependence import DependenceError

_DRAWS = (torch.rand, torch.rand_like)
_SHORT = {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}
_COMPARISONS = {
    getattr(owner, name): short
    for owner in (torch, torch.Tensor)
    for short, long in _SHORT.items()
    for name in (short, long)
}


class UniformComparisons(TorchFunctionMode):
    """A mode in which forward may branch on a uniform draw if every draw gives the same branch.

    A draw is known until a function other than a comparison takes it, because that function might
    write into it. The mode is a separate one because it must see every function.

    Raises:
        DependenceError: the branch that forward takes depends on the draw.
    """

    def __init__(self) -> None:
        super().__init__()
        # By id. The tensors are held, so that no other tensor gets their ids.
        self._draws: dict[int, torch.Tensor] = {}
        self._outcomes: dict[int, tuple[torch.Tensor, bool | None]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is torch.Tensor.__bool__ and id(args[0]) in self._outcomes:
            return self._truth(args[0])
        draw = args[0] if args else named.get("input")
        compares = func in _COMPARISONS and id(draw) in self._draws
        if not compares or named.get("out") is not None:
            self._forget((args, named))
        result = func(*args, **named)
        if func in _DRAWS and named.get("out") is None:
            self._draws[id(result)] = result
        elif compares and id(draw) in self._draws:
            bound = args[1] if len(args) > 1 else named.get("other")
            self._outcomes[id(result)] = result, _outcome(_COMPARISONS[func], bound)
        return result

    def _truth(self, outcome: torch.Tensor) -> bool:
        _, truth = self._outcomes[id(outcome)]
        if truth is None or outcome.numel() != 1:
            raise DependenceError(
                "takes a way that a random draw decides (LayerDrop, stochastic depth): set its "
                "probability to 0, or dispatch the layers instead of the module that skips them"
            )
        return truth

    def _forget(self, arguments: Any) -> None:
        if self._draws:
            for leaf in pytree.tree_leaves(arguments):
                self._draws.pop(id(leaf), None)
                self._outcomes.pop(id(leaf), None)


def _outcome(comparison: str, bound: Any) -> bool | None:
    """Return how a number in [0, 1) compares with ``bound``; None if it depends on the number."""
    if type(bound) not in (bool, int, float):
        return None
    if bound >= 1:
        return comparison in ("lt", "le")
    if bound < 0 or (bound == 0 and comparison in ("lt", "ge")):
        return comparison in ("gt", "ge")
    return None
