"""Trace the functions that a higher-order operator calls as separate graphs.

A graph is traced on fake tensors of a fake-tensor mode that no other trace uses. Tensors that the
function reads in addition to its operands, such as weights and tensors from enclosing scopes,
become further inputs of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from tvmbridge.calls.custom_functions import custom_functions_told
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import (
    DisablePythonDispatcher,
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    disable_current_modes,
    function_mode_count,
    is_in_transform,
    out_of_transform,
    pop_function_mode,
    push_function_mode,
    pytree,
    storage_key,
)
from tvmbridge.core.writes import version_of
from tvmbridge.graph_capture.hoist import is_random
from tvmbridge.graph_capture.trace.region_graphs import TENSOR, Graph, RegionTensor, constants_of

# Modules of the modes with which PyTorch records calls in the surrounding trace.
_OF_TRACES = ("torch.fx", "torch.export", "torch._export")
# The autograd functions of operators from torch.library, which stay whole in the graph.
_BY_LIBRARY = "GeneratedBackwardFor_"
# PyTorch's autograd function for ``tensor[i]`` in flex_attention: its gradient is that of indexing.
_INDEXING = "ModIndex"


class Captures:
    """The tensors that the functions of one operator read in addition to their operands.

    - ``mode``: the fake-tensor mode of all graphs of the operator
    - ``tensors``, ``fakes``: the captured tensors, and a fake tensor for each
    - ``places``: the index of each captured tensor, by its id
    - ``functions``: the functions that are traced

    Args:
        watched: whether the modes that watch forward watch these functions too.
    """

    def __init__(self, *, watched: bool = True) -> None:
        self._watched = watched
        self.mode = FakeTensorMode()
        self.tensors: list[torch.Tensor] = []
        self.fakes: list[torch.Tensor] = []
        self.functions: list[TracedFunction] = []
        self.places: dict[int, int] = {}
        self._modes: list[Any] = []

    def __enter__(self) -> Captures:
        return self

    def __exit__(self, *_: object) -> None:
        # Graphs and their functions refer to each other, which would keep the tensors alive.
        self.tensors, self.places = [], {}
        for function in self.functions:
            function.forget()

    def fake_of(self, layout: RegionTensor) -> torch.Tensor:
        return layout.empty()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the context, operators run on this operator's fakes, unseen by other traces."""
        modes = _taken_aside(0)
        own = [m for m in modes if not isinstance(m, _Reads) and not _is_of_trace(m)]
        self._modes = own if self._watched else []
        try:
            with disable_current_modes(), DisablePythonDispatcher(), self.mode:
                yield
        finally:
            _put_back(modes)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Restore the modes that watch forward, so that they watch a function in the context."""
        count = function_mode_count()
        _put_back(self._modes)
        try:
            yield
        finally:
            _taken_aside(count)

    def place_of(self, tensor: torch.Tensor) -> int:
        """Return the index of a captured tensor, and add it if it is new."""
        if id(tensor) not in self.places:
            self.places[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            self.fakes.append(self.fake_of(RegionTensor.of(tensor)))
        return self.places[id(tensor)]


class TracedFunction:
    """A function of a higher-order operator, which is called with fake operands.

    The first call with new shapes, strides, dtypes or devices of the operands traces a graph.

    - ``graphs``: the graph for each description of the operands
    """

    def __init__(self, name: str, function: Callable[..., Any], captures: Captures) -> None:
        self.graphs: dict[tuple[RegionTensor, ...], Graph] = {}
        self._name = name
        self._function = function
        self._captures = captures
        captures.functions.append(self)

    def forget(self) -> None:
        """Delete the function, so that only the graphs are kept."""
        del self._function

    def __call__(self, *operands: Any) -> Any:
        leaves, structure = pytree.tree_flatten(operands)
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise UnsupportedOperatorError(f"{self._name} carries a value that is no tensor")
        layouts = tuple(map(RegionTensor.of, leaves))
        if layouts not in self.graphs:
            self.graphs[layouts] = self._traced(layouts, structure)
        graph = self.graphs[layouts]
        return graph(leaves, [self._captures.fakes[i] for i in graph.captured])

    def _traced(self, layouts: tuple[RegionTensor, ...], structure: pytree.TreeSpec) -> Graph:
        given = [self._captures.fake_of(layout) for layout in layouts]
        reads = _Reads(self._captures, self._name, given)
        with self._captures.calling(), _custom_functions_refused(self._name), reads:
            results = self._function(*pytree.tree_unflatten(given, structure))
        found, described = pytree.tree_flatten(results)
        captured = tuple(reads.places)
        fakes = [self._captures.fakes[i] for i in captured]
        self._refuse_effects(found, [*given, *fakes])

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            own = dict(zip(captured, tensors[len(given) :], strict=True))
            operands = pytree.tree_unflatten(list(tensors[: len(given)]), structure)
            with _Reads(self._captures, self._name, tensors, own):
                leaves = pytree.tree_leaves(self._function(*operands))
            return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        inputs = [self._captures.fake_of(RegionTensor.of(t)) for t in (*given, *fakes)]
        with self._captures.calling():
            # Without a table, PyTorch 2.15 traces a detach as an alias, and gradients pass it.
            module = make_fx(run, {})(*inputs)
        module.graph.eliminate_dead_code()
        module.recompile()
        self._refuse_operators(module)
        leaves = [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in found]
        return Graph(module, captured, described, tuple(leaves))

    def _refuse_effects(self, results: Sequence[Any], inputs: Sequence[torch.Tensor]) -> None:
        """Refuse a function whose effects a graph would lose.

        It must not write into its inputs or turn gradients on. Its results must be tensors,
        numbers, or None, but no operand, and no two views of one tensor.
        """
        if any(t._version for t in inputs):
            raise _refusal(self._name, "writes into a tensor from outside of it")
        seen = {storage_key(t) for t in inputs}
        for result in results:
            if isinstance(result, torch.Tensor):
                if storage_key(result) in seen:
                    raise _refusal(
                        self._name, "returns an operand, or two views of one tensor: clone it"
                    )
                seen.add(storage_key(result))
                if result.requires_grad and not torch.is_grad_enabled():
                    raise _refusal(self._name, "turns gradients on")
            elif not (result is None or type(result) in (bool, int, float)):
                raise _refusal(self._name, f"returns a {type(result).__name__}")

    def _refuse_operators(self, module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            target = node.target
            if isinstance(target, OpOverload) and is_random(target, node.args, node.kwargs):
                raise _refusal(self._name, f"draws random numbers, by {target}")
            if isinstance(target, HigherOrderOperator):
                raise _refusal(self._name, f"calls {target}")
        if any(isinstance(value, FakeTensor) for value in constants_of(module).values()):
            raise _refusal(self._name, "keeps a tensor of its trace")


class _Reads(TorchFunctionMode):
    """A mode that replaces captured tensors by fakes, or by inputs of the function's graph.

    Args:
        captures: the captured tensors and their fakes.
        name: the name of the higher-order operator.
        given: the operands of the function.
        inputs: the graph's inputs for captured tensors, by index; None: their fakes are used, and
            new captured tensors are recorded in ``places``.
    """

    def __init__(
        self,
        captures: Captures,
        name: str,
        given: Sequence[torch.Tensor],
        inputs: dict[int, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.places: dict[int, None] = {}
        self._captures = captures
        self._name = name
        self._inputs = inputs
        self._records = torch.is_grad_enabled()
        self._own = {id(t) for t in given}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._found, (args, kwargs or {}))
        if self._records is torch.is_grad_enabled():
            return func(*args, **kwargs)
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        # Python 3.12 inlines comprehensions: forward itself would seem to read the versions.
        versions = list(map(version_of, given))
        results = func(*args, **kwargs)
        if not self._records and torch.is_grad_enabled():
            raise _refusal(self._name, "turns gradients on")
        if versions != list(map(version_of, given)):
            raise _refusal(self._name, "writes into a tensor without gradients")
        # The graph has no no_grad regions, so results of such a region are detached.
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, results)

    def _found(self, tensor: torch.Tensor) -> torch.Tensor:
        innermost = tensor
        while is_in_transform(innermost):
            innermost = out_of_transform(innermost)
        if isinstance(innermost, FakeTensor) and innermost.fake_mode is self._captures.mode:
            return tensor
        if self._inputs is not None:
            # A tensor that was not captured before is a constant of the graph.
            return self._inputs.get(self._captures.places.get(id(tensor), -1), tensor)
        place = self._captures.place_of(tensor)
        self.places[place] = None
        return self._captures.fakes[place]


def _refusal(name: str, what: str) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"a function that {name} calls {what}, which compiled code would not repeat there"
    )


def _is_of_trace(mode: Any) -> bool:
    return type(mode).__module__.startswith(_OF_TRACES)


def _taken_aside(count: int) -> list[Any]:
    """Pop function modes until ``count`` are left, and return them, the outermost first."""
    return [pop_function_mode() for _ in range(function_mode_count() - count)][::-1]


def _put_back(modes: Sequence[Any]) -> None:
    for mode in modes:
        push_function_mode(mode)


@contextmanager
def _custom_functions_refused(name: str) -> Iterator[None]:
    """Refuse custom autograd functions within the context.

    A graph has only the operators of their forward, and would lose their backward.
    """
    records = torch.is_grad_enabled()

    def applied(kind: type[Any]) -> None:
        applying = getattr(kind, "__name__", "unnamed")
        known = applying.startswith(_BY_LIBRARY) or _INDEXING in applying
        if records and not known:
            raise _refusal(name, f"applies the custom autograd function {applying}")

    with custom_functions_told(applied):
        yield
