"""Run a rewritten graph on the sample, and compare it with the module, before it may serve calls.

All runs use copies of tensors and restore the random generators, so the module stays unchanged.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from tvmbridge.calls.generators import Generators
from tvmbridge.core.errors import PassError
from tvmbridge.core.torch_private import pytree
from tvmbridge.fx.entry import Binding
from tvmbridge.graph_capture.observe.outside_tensors import WritesUndone

# A pass is undone if the sample takes more than this ratio of its former time. Timings vary by 5%.
_MARGIN = 1.05
_ROUNDS = 7
# The error allowed, relative to the largest element, in units of the dtype's epsilon; at most 5%.
_ULPS = 1 << 14
_MOST = 0.05


class Trial:
    """Runs a graph, or the module, on the sample."""

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
        self._held = {n for n, _ in (*module.named_parameters(), *module.named_buffers())}
        self._graph_module = graph_module
        self._tensors = list(tensors)
        self._leaves = list(leaves)
        self._needs_grad = needs_grad

    def slower(self, before: Trial) -> str | None:
        """Return both times as a text if the graph takes longer than the one of ``before``.

        Return None if it does not, or if it communicates with other processes: then it is not
        timed.
        """
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
        """Return the leaves of the result of ``call``, and the gradients of the given tensors."""
        with torch.set_grad_enabled(self._needs_grad):
            results = pytree.tree_leaves(call())
            flowing = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
            wanted = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
            if not flowing or not wanted:
                return results, []
            loss = sum((_weighted(r) for r in flowing), start=torch.zeros(()))
            return results, list(torch.autograd.grad(loss, wanted, allow_unused=True))

    def compare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare the graph with the module's own forward, called with these arguments.

        Raises:
            PassError: results, gradients or written tensors differ by more than rounding.
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
            with WritesUndone(self._outside()):
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
        """Call the module's forward with copies in place of its tensors."""
        positional, named = pytree.tree_unflatten(list(leaves), spec)
        names = zip(self.binding.names, tensors, strict=True)
        replaced = {name: t for name, t in names if name in self._held}
        return torch.func.functional_call(self._module, replaced, positional, named)

    def _outside(self) -> list[torch.Tensor]:
        """Return the tensors outside the module, which its own forward reads without a copy."""
        names = zip(self.binding.names, self._tensors, strict=True)
        return [t for name, t in names if name not in self._held and isinstance(t, torch.Tensor)]


def _copied(values: Sequence[Any]) -> list[Any]:
    """Return ``values`` with tensors copied; a tensor that occurs twice is copied once."""
    memo: dict[int, torch.Tensor] = {}
    for value in values:
        if isinstance(value, torch.Tensor) and id(value) not in memo:
            made = value.detach().clone(memory_format=torch.preserve_format)
            memo[id(value)] = made.requires_grad_(value.requires_grad)
    return [memo.get(id(value), value) for value in values]


def _weighted(tensor: torch.Tensor) -> torch.Tensor:
    """Return a weighted sum of all elements, so that each element has its own gradient."""
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
