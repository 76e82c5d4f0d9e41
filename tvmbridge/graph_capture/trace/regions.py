"""Trace higher-order operators, which take functions: ``torch.cond``, ``while_loop``, ``scan``.

A call becomes a call of ``tvmbridge.region``, an opaque operator within the compiled code, for
which PyTorch runs the graphs of the functions. Autograd computes its gradient from the same graphs.
``associative_scan`` and ``flex_attention`` are traced as the operators of their eager kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.attention import flex_attention

from tvmbridge.calls.patches import patches
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import DispatchKey, HigherOrderOperator, pytree
from tvmbridge.graph_capture.trace.region_functions import Captures, TracedFunction
from tvmbridge.graph_capture.trace.region_graphs import RegionTensor
from tvmbridge.graph_capture.trace.region_ops import KERNELS, REGIONS, Function, Region

# Operators whose parts are compiled, instead of becoming a region.
_INLINED = ("associative_scan", "flex_attention")

# PyTorch's message for a higher-order operator that a dispatch mode does not handle.
_NO_RULE = "There was no rule registered for HigherOrderOperator"


# ``cond`` has a class of its own, whose ``__call__`` refuses operands that TorchDynamo flattens.
@patches(type(torch.ops.higher_order.cond), "__call__")
@patches(HigherOrderOperator, "__call__")
def _called(genuine: Any, operator: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
    name = operator.name()
    if name in _INLINED:
        kernel = operator.py_kernels[DispatchKey.CompositeExplicitAutograd]
        return _inlined(name, kernel, args, kwargs)
    if name not in KERNELS:
        try:
            return genuine(operator, *args, **kwargs)
        except NotImplementedError as error:
            if _NO_RULE not in str(error):
                raise
            raise UnsupportedOperatorError(
                f"forward calls torch.ops.higher_order.{name}, which a trace cannot follow: write "
                "its operators in forward, or dispatch the submodules around it"
            ) from error
    if name == "cond" and not isinstance(args[0], torch.Tensor):
        return args[1 if args[0] else 2](*args[3])
    return _call(name, args, kwargs)


def _call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Trace the functions among the arguments of an operator, and call its region."""
    with Captures() as captures:
        return _called_in(captures, name, *pytree.tree_flatten((args, dict(kwargs))))


def _called_in(captures: Captures, name: str, given: list[Any], structure: Any) -> Any:
    with captures.alone():
        leaves = [_leaf(name, value, captures) for value in given]
        fakes = [captures.fake_of(v) if isinstance(v, RegionTensor) else v for v in leaves]
        fake_args, fake_kwargs = pytree.tree_unflatten(fakes, structure)
        results, described = pytree.tree_flatten(_FAKES[name](*fake_args, **fake_kwargs))
        region = Region(
            name,
            structure,
            tuple(Function(v.graphs) if isinstance(v, TracedFunction) else v for v in leaves),
            tuple(map(RegionTensor.of, captures.tensors)),
            tuple(RegionTensor.of(r) for r in results if isinstance(r, torch.Tensor)),
        )
    key = _key_of(region)
    REGIONS.setdefault(key, region)
    operands = [v for v in given if isinstance(v, torch.Tensor)]
    found = iter(torch.ops.tvmbridge.region(key, [*operands, *captures.tensors]))
    return pytree.tree_unflatten(
        [next(found) if isinstance(r, torch.Tensor) else r for r in results], described
    )


# Masks of flex_attention are computed by functions that PyTorch also calls by vmap.
@patches(flex_attention, "create_mask")
@patches(flex_attention, "_ordered_to_dense")
def _mask_made(genuine: Any, *args: Any, **kwargs: Any) -> Any:
    return _inlined("flex_attention", genuine, args, kwargs)


def _inlined(name: str, kernel: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Trace ``kernel`` of PyTorch, and its functions, in the surrounding trace, and run it."""
    given, structure = pytree.tree_flatten((args, dict(kwargs)))
    places = [i for i, value in enumerate(given) if isinstance(value, torch.Tensor)]

    def whole(*operands: torch.Tensor) -> Any:
        filled = dict(enumerate(given)) | dict(zip(places, operands, strict=True))
        own_args, own_kwargs = pytree.tree_unflatten(list(filled.values()), structure)
        return kernel(*own_args, **own_kwargs)

    # The kernels call functions within vmap, where the modes that watch forward do not work.
    with Captures(watched=False) as captures:
        traced = TracedFunction(name, whole, captures)
        with captures.alone():
            traced(*(captures.fake_of(RegionTensor.of(given[i])) for i in places))
        (graph,) = traced.graphs.values()
        return graph([given[i] for i in places], [captures.tensors[i] for i in graph.captured])


def _leaf(name: str, value: Any, captures: Captures) -> Any:
    if isinstance(value, torch.Tensor):
        return RegionTensor.of(value)
    return TracedFunction(name, value, captures) if callable(value) else value


def _key_of(region: Region) -> str:
    """Return a digest of everything that a region computes."""
    parts: list[Any] = [region.name, str(region.structure), region.captured, region.results]
    for leaf in region.leaves:
        if isinstance(leaf, Function):
            parts += [(layouts, graph.content()) for layouts, graph in leaf.graphs.items()]
        else:
            parts.append(leaf)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _one_of_both(pred: Any, true: Any, false: Any, operands: Any = ()) -> Any:
    """Return the fake results of ``torch.cond``.

    Raises:
        UnsupportedOperatorError: the results of the branches differ in shape, strides or dtype.
    """
    found = [pytree.tree_flatten(branch(*operands)) for branch in (true, false)]
    (ours, structure), (others, other_structure) = found
    if structure != other_structure or _described(ours) != _described(others):
        raise UnsupportedOperatorError(
            "the branches of torch.cond return tensors of other shapes, strides or dtypes"
        )
    return pytree.tree_unflatten(ours, structure)


def _carried(
    condition: Any, body: Any, carried: Any, additional: Any = (), mutated_arg_indices: str = ""
) -> Any:
    """Return the fake results of ``while_loop``.

    Raises:
        UnsupportedOperatorError: the condition is no scalar boolean tensor, or the results of the
            body differ from its operands in shape, strides or dtype.
    """
    decided = condition(*carried, *additional)
    if not isinstance(decided, torch.Tensor) or decided.shape or decided.dtype is not torch.bool:
        raise UnsupportedOperatorError(
            "the condition of while_loop does not return a boolean tensor without dimensions"
        )
    results = body(*carried, *additional)
    if _described(pytree.tree_leaves(results)) != _described(list(carried)):
        raise UnsupportedOperatorError(
            "the body of while_loop returns tensors of other shapes, strides or dtypes than it is "
            "given"
        )
    return results


def _described(leaves: list[Any]) -> list[Any]:
    return [RegionTensor.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


# The operators on fake tensors, by name.
_FAKES: dict[str, Callable[..., Any]] = {**KERNELS, "cond": _one_of_both, "while_loop": _carried}
