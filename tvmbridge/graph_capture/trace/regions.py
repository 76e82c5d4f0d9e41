"""Higher-order operators, whose operands are functions: ``torch.cond``, ``while_loop``, ``scan``.

A call of one becomes a call of ``tvmbridge.region``, an opaque operator: PyTorch runs the graphs of
the functions within the compiled code. Its gradient is autograd's, of the same graphs.
``flex_attention`` is traced as the operators that it consists of in eager PyTorch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import DispatchKey, HigherOrderOperator, pytree
from tvmbridge.graph_capture.trace.patches import patches
from tvmbridge.graph_capture.trace.region_functions import Captures, Layout, TracedFunction
from tvmbridge.graph_capture.trace.region_ops import KERNELS, REGIONS, Function, Region

_DECOMPOSED = ("flex_attention",)


@patches(HigherOrderOperator, "__call__")
def _called(genuine: Any, operator: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
    name = operator.name()
    if name in _DECOMPOSED:
        return operator.py_kernels[DispatchKey.CompositeExplicitAutograd](*args, **kwargs)
    if name not in KERNELS:
        return genuine(operator, *args, **kwargs)
    if name == "cond" and not isinstance(args[0], torch.Tensor):
        return args[1 if args[0] else 2](*args[3])
    return _call(name, args, kwargs)


def _call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the region of the functions among ``args``, which are traced."""
    captures = Captures()
    given, structure = pytree.tree_flatten((args, dict(kwargs)))
    leaves = [TracedFunction(name, v, captures) if callable(v) else v for v in given]
    tensors = [v for v in given if isinstance(v, torch.Tensor)]
    layouts = {id(t): Layout.of(t) for t in tensors}
    stand_ins = [
        captures.fake_of(layouts[id(v)]) if isinstance(v, torch.Tensor) else v for v in leaves
    ]
    fake_args, fake_kwargs = pytree.tree_unflatten(stand_ins, structure)
    with captures.alone():
        results, described = pytree.tree_flatten(_FAKES[name](*fake_args, **fake_kwargs))
    region = Region(
        name,
        structure,
        tuple(
            Function(v.graphs)
            if isinstance(v, TracedFunction)
            else layouts[id(v)]
            if isinstance(v, torch.Tensor)
            else v
            for v in leaves
        ),
        tuple(map(Layout.of, captures.tensors)),
        tuple(Layout.of(r) for r in results if isinstance(r, torch.Tensor)),
    )
    key = _key_of(region)
    REGIONS.setdefault(key, region)
    found = iter(torch.ops.tvmbridge.region(key, [*tensors, *captures.tensors]))
    return pytree.tree_unflatten(
        [next(found) if isinstance(r, torch.Tensor) else r for r in results], described
    )


def _key_of(region: Region) -> str:
    """A digest of all that a region computes."""
    parts: list[Any] = [region.name, str(region.structure), region.captured, region.results]
    for leaf in region.leaves:
        if isinstance(leaf, Function):
            parts += [(layouts, graph.content()) for layouts, graph in leaf.graphs.items()]
        else:
            parts.append(leaf)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _one_of_both(pred: Any, true: Any, false: Any, operands: Any = ()) -> Any:
    """What both branches return, which must be alike."""
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
    """What the body of a loop returns, which must be as what it is given."""
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
    return [Layout.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


# What the operators return for fake tensors.
_FAKES = {**KERNELS, "cond": _one_of_both, "while_loop": _carried}
