"""``tvmbridge.region``: an operator by which PyTorch runs a higher-order operator and its graphs.

Its first argument is the key of a region, a digest of everything that the region computes. Regions
are kept in the process. Each process that compiles a module traces them, even if the compiled code
comes from a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.core.autocast import without_autocast
from tvmbridge.core.custom_operator import NAMESPACE
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import pytree, storage_key
from tvmbridge.graph_capture.trace.region_graphs import Graph, RegionTensor

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Function:
    """The graphs of one function, by the properties of its operands."""

    graphs: Mapping[tuple[RegionTensor, ...], Graph]

    def bound(self, captured: Tensors) -> Callable[..., Any]:
        """Return the function as a callable on operands.

        ``captured`` are the captured tensors of all functions of the operator. Operands with
        properties for which there is no graph are copied to those of the first graph.
        """

        def call(*operands: Any) -> Any:
            given = pytree.tree_leaves(operands)
            layouts = tuple(map(RegionTensor.of, given))
            if layouts not in self.graphs:
                layouts = next(iter(self.graphs))
                given = [each.fitted(t) for each, t in zip(layouts, given, strict=True)]
            graph = self.graphs[layouts]
            return graph(given, [captured[i] for i in graph.captured])

        return call


@dataclass(frozen=True)
class Region:
    """A call of a higher-order operator.

    - ``name``: the name of the operator
    - ``structure``: the structure of its arguments
    - ``leaves``: the leaves of its arguments: a Function, a RegionTensor for a tensor, or a value
    - ``captured``: the properties of the tensors that the functions read in addition to operands
    - ``results``: the properties of the tensors that it returns
    """

    name: str
    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]
    captured: tuple[RegionTensor, ...]
    results: tuple[RegionTensor, ...] = ()

    def run(self, tensors: Tensors) -> list[torch.Tensor]:
        """Run the operator on its operands and the captured ``tensors``; return its tensors."""
        operands = [leaf for leaf in self.leaves if isinstance(leaf, RegionTensor)]
        fitted = [
            layout.fitted(tensor)
            for layout, tensor in zip((*operands, *self.captured), tensors, strict=True)
        ]
        given, captured = iter(fitted[: len(operands)]), fitted[len(operands) :]
        leaves = [
            next(given)
            if isinstance(leaf, RegionTensor)
            else leaf.bound(captured)
            if isinstance(leaf, Function)
            else leaf
            for leaf in self.leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        results = pytree.tree_leaves(KERNELS[self.name](*args, **kwargs))
        return [r for r in results if isinstance(r, torch.Tensor)]


REGIONS: dict[str, Region] = {}


def _cond(pred: Any, true: Any, false: Any, operands: Any = ()) -> Any:
    return true(*operands) if pred else false(*operands)


def _while_loop(
    condition: Any, body: Any, carried: Any, additional: Any = (), mutated_arg_indices: str = ""
) -> Any:
    while condition(*carried, *additional):
        carried = body(*carried, *additional)
    return carried


def _scan(combine: Any, init: Any, xs: Any, additional_inputs: Any = ()) -> Any:
    carried, rows = list(init), []
    for number in range(xs[0].shape[0]):
        results = combine(*carried, *(x.select(0, number) for x in xs), *additional_inputs)
        carried, row = list(results[: len(carried)]), results[len(carried) :]
        rows.append(row)
    return (*carried, *_stacked(rows))


def _map(function: Any, xs: Any, operands: Any, *, mutated_arg_indices: str = "") -> Any:
    if mutated_arg_indices:  # an option since PyTorch 2.14
        raise UnsupportedOperatorError("the function of a map writes into its arguments")
    rows = [
        function(*(x.select(0, number) for x in xs), *operands) for number in range(xs[0].shape[0])
    ]
    return pytree.tree_unflatten(_stacked(rows), pytree.tree_structure(rows[0]))


def _stacked(rows: Sequence[Any]) -> list[Any]:
    columns = zip(*map(pytree.tree_leaves, rows), strict=True)
    return [torch.stack(column) if column[0] is not None else None for column in columns]


# The operators in eager PyTorch, by name.
KERNELS: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "map_impl": _map,
}


def _region(key: str) -> Region:
    if key not in REGIONS:
        raise UnsupportedOperatorError(
            "the code calls functions of a higher-order operator that this process has not traced"
        )
    return REGIONS[key]


def _run(key: str, tensors: Tensors) -> list[torch.Tensor]:
    region = _region(key)
    with torch.no_grad(), without_autocast():
        return _own(region.run(tensors), tensors)


def _own(results: Tensors, inputs: Tensors) -> list[torch.Tensor]:
    """Return ``results``, cloned if they share memory with each other or with ``inputs``."""
    seen = {storage_key(t) for t in inputs}
    found = []
    for result in results:
        found.append(result.clone() if storage_key(result) in seen else result)
        seen.add(storage_key(found[-1]))
    return found


def _run_backward(
    key: str, tensors: Tensors, gradients: Tensors, given: Sequence[int], wanted: Sequence[int]
) -> list[torch.Tensor]:
    leaves = [t.detach() for t in tensors]
    operands = [leaves[i].requires_grad_() for i in wanted]
    with torch.enable_grad(), without_autocast():
        results = _region(key).run(leaves)
    pairs = [
        (results[i], gradient)
        for i, gradient in zip(given, gradients, strict=True)
        if results[i].requires_grad
    ]
    found = (
        torch.autograd.grad(
            [result for result, _ in pairs],
            operands,
            [gradient for _, gradient in pairs],
            materialize_grads=True,
        )
        if pairs
        else [torch.zeros_like(t) for t in operands]
    )
    return _own(found, gradients)


_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define("region(str key, Tensor[] tensors) -> Tensor[]")
_LIBRARY.define(
    "region_backward(str key, Tensor[] tensors, Tensor[] gradients, int[] given, int[] wanted)"
    " -> Tensor[]"
)
_LIBRARY.impl("region", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("region_backward", _run_backward, "CompositeExplicitAutograd")


def _results(key: str, tensors: Tensors) -> list[torch.Tensor]:
    return [
        torch.empty_strided(r.shape, r.strides, dtype=r.dtype, device=r.device)
        for r in _region(key).results
    ]


def _gradients(
    key: str, tensors: Tensors, gradients: Tensors, given: Sequence[int], wanted: Sequence[int]
) -> list[torch.Tensor]:
    return [tensors[i].new_empty(tensors[i].shape) for i in wanted]


torch.library.register_fake(f"{NAMESPACE}::region", _results, lib=_LIBRARY)
torch.library.register_fake(f"{NAMESPACE}::region_backward", _gradients, lib=_LIBRARY)


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.key, tensors = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    given = [i for i, gradient in enumerate(gradients) if gradient is not None]
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad[1]) if needed]
    tensors = ctx.saved_tensors
    found = torch.ops.tvmbridge.region_backward(
        ctx.key, tensors, [gradients[i] for i in given], given, wanted
    )
    by_place = dict(zip(wanted, found, strict=True))
    return None, [by_place.get(i) for i in range(len(tensors))]


torch.library.register_autograd(
    f"{NAMESPACE}::region", _backward, setup_context=_set_up, lib=_LIBRARY
)
