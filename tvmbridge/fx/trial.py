"""The trial: a rewritten graph runs on the sample, beside the module, before it may serve calls.

All runs are on copies of tensors, with the generators put back: the module is as it was.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from tvmbridge.core.errors import PassError
from tvmbridge.core.torch_private import pytree
from tvmbridge.fx.entry import Binding
from tvmbridge.graph_capture.trace.generators import Generators

# A pass may make a sample this much slower before it is undone: what timing varies by.
_MARGIN = 1.05
_ROUNDS = 7
# Of the largest element of a tensor, in units of its dtype's rounding.
_ULPS = 1 << 14
_MOST = 0.05


class Trial:
    """Runs graphs and the module on the sample.

    Args:
        module: that was traced.
        graph_module: the graph.
        binding: of its inputs.
        tensors: the module's.
        leaves: of the sample.
        needs_grad: whether gradients are computed too.
    """

    def __init__(
        self,
        module: nn.Module,
        graph_module: fx.GraphModule,
        binding: Binding,
        tensors: Sequence[Any],
        leaves: Sequence[Any],
        needs_grad: bool,
    ) -> None:
        self.binding = binding
        self._module = module
        self._graph_module = graph_module
        self._tensors = list(tensors)
        self._leaves = list(leaves)
        self._needs_grad = needs_grad

    def slower(self, before: Trial) -> str | None:
        """Why the graph is no gain on the one ``before`` it, with both times; None: it is one."""
        if any(_communicates(node) for node in self._graph_module.graph.nodes):
            return None
        taken: dict[str, list[float]] = {"before": [], "after": []}
        generators = Generators()
        try:
            for round_ in range(_ROUNDS + 2):
                for name, trial in (("before", before), ("after", self)):
                    seconds = trial._time()
                    if round_ >= 2:
                        taken[name].append(seconds)
        finally:
            generators.restore()
        old, new = (1e3 * statistics.median(taken[n]) for n in ("before", "after"))
        if new <= old * _MARGIN:
            return None
        return f"the sample takes {new:.3g} ms with it, {old:.3g} ms without"

    def _time(self) -> float:
        tensors, leaves = self._copies()
        _synchronize(tensors + leaves)
        start = time.perf_counter()
        self._results(lambda: self._run(tensors, leaves), tensors)
        _synchronize(tensors + leaves)
        return time.perf_counter() - start

    def _run(self, tensors: Sequence[Any], leaves: Sequence[Any]) -> Any:
        return self._graph_module.forward(*self.binding(tensors, leaves))

    def _copies(self) -> tuple[list[Any], list[Any]]:
        copies = _copied([*self._tensors, *self._leaves])
        return copies[: len(self._tensors)], copies[len(self._tensors) :]

    def _results(
        self, call: Callable[[], Any], given: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """The leaves of what ``call`` returns, and the gradients of all that requires one."""
        with torch.set_grad_enabled(self._needs_grad):
            results = pytree.tree_leaves(call())
            flowing = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
            wanted = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
            if not flowing or not wanted:
                return results, []
            loss = sum((_weighted(r) for r in flowing), start=torch.zeros(()))
            return results, list(torch.autograd.grad(loss, wanted, allow_unused=True))

    def compare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Hold the graph against the module's own forward, called with these arguments.

        Raises:
            PassError: results, gradients or what was written differ by more than rounding.
        """
        tensors, leaves = self._copies()
        given, spec = pytree.tree_flatten((args, dict(kwargs)))
        apart = [*self._tensors, *given]
        generators = Generators()
        try:
            made = self._results(lambda: self._run(tensors, leaves), tensors + leaves)
            generators.restore()
            copies = _copied(apart)
            own, passed = copies[: len(tensors)], copies[len(tensors) :]
            expected = self._results(lambda: self._own(own, passed, spec), copies)
        finally:
            generators.restore()
        pairs = {"results": (made[0], expected[0])}
        count = len(tensors) if self.binding.combines else len(copies)
        pairs["gradients"] = (made[1], expected[1])
        pairs["written tensors"] = ((tensors + leaves)[:count], copies[:count])
        for what, (ours, theirs) in pairs.items():
            alike = len(ours) == len(theirs) and all(map(_agree, ours, theirs))
            if not alike or (what == "results" and not all(map(_lie_alike, ours, theirs))):
                raise PassError(
                    f"the graph of {type(self._module).__name__} has other {what} than its own "
                    "forward on the sample"
                )

    def _own(self, tensors: Sequence[Any], leaves: Sequence[Any], spec: pytree.TreeSpec) -> Any:
        """The module's forward, with copies in the place of its tensors."""
        positional, named = pytree.tree_unflatten(list(leaves), spec)
        module = self._module
        held = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        replaced = {n: t for n, t in zip(self.binding.names, tensors, strict=True) if n in held}
        return torch.func.functional_call(module, replaced, positional, named)


def _copied(values: Sequence[Any]) -> list[Any]:
    """``values`` with copies of tensors; one for those that are one."""
    memo: dict[int, torch.Tensor] = {}
    for value in values:
        if isinstance(value, torch.Tensor) and id(value) not in memo:
            made = value.detach().clone(memory_format=torch.preserve_format)
            memo[id(value)] = made.requires_grad_(value.requires_grad)
    return [memo.get(id(value), value) for value in values]


def _weighted(tensor: torch.Tensor) -> torch.Tensor:
    """A scalar that all elements have different parts in."""
    weights = torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float64).to(tensor.real.dtype)
    flat = torch.view_as_real(tensor).sum(-1) if tensor.is_complex() else tensor
    return (flat.reshape(-1) * weights.to(tensor.device)).sum().cpu()


def _agree(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return type(ours) is type(theirs) and bool(ours == theirs)
    if ours.dtype is not theirs.dtype or ours.shape != theirs.shape:
        return False
    if not (ours.is_floating_point() or ours.is_complex()):
        return torch.equal(ours, theirs)
    largest = float(theirs.detach().abs().nan_to_num().max()) if theirs.numel() else 0.0
    bound = min(_ULPS * torch.finfo(ours.dtype).eps, _MOST) * max(largest, 1.0)
    return torch.allclose(ours, theirs, rtol=0, atol=bound, equal_nan=True)


def _lie_alike(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, torch.Tensor):
        return True
    return ours.numel() < 2 or ours.stride() == theirs.stride()


def _communicates(node: fx.Node) -> bool:
    return str(node.target).startswith("_c10d_functional")


def _synchronize(values: Sequence[Any]) -> None:
    if any(isinstance(v, torch.Tensor) and v.is_cuda for v in values):
        torch.cuda.synchronize()
