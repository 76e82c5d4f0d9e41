"""Control flow on uniform draws whose outcome is certain.

``if torch.rand([]) < self.layerdrop:`` (LayerDrop) branches on a random number. But a draw lies in
[0, 1): it is never below 0, and always below 1. While forward is traced such a comparison has the
truth value that it has at each call; the draw itself stays in the graph.
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
    """Within it forward may branch on a uniform draw where the draw decides nothing.

    A draw counts until any function but a comparison takes it, for that might write into it: hence
    a mode of its own, which sees every function.

    Raises:
        DependenceError: the draw does decide which way forward takes.
    """

    def __init__(self) -> None:
        super().__init__()
        # By identity; the tensors are held, so that no other one has their id.
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
    """How a number in [0, 1) compares with ``bound``; None where that depends on the number."""
    if type(bound) not in (bool, int, float):
        return None
    if bound >= 1:
        return comparison in ("lt", "le")
    if bound < 0 or (bound == 0 and comparison in ("lt", "ge")):
        return comparison in ("gt", "ge")
    return None
