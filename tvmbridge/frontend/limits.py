"""Checks of nodes: whether compiled code can run them, and whether a converter may be used."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from tvmbridge.core.admission import is_proven
from tvmbridge.core.alone import runs_alone
from tvmbridge.core.decisions import Rule, decided
from tvmbridge.core.errors import DataDependentError, UnsupportedOperatorError
from tvmbridge.core.torch_private import OpOverload
from tvmbridge.core.types import TensorSpec
from tvmbridge.frontend.registry import Converter
from tvmbridge.graph_capture.trace.promotion import kernel_dtypes
from tvmbridge.kernels.dtypes import has_type, is_supported, to_relax_dtype
from tvmbridge.kernels.true_dtypes import true_dtype

# The most elements of a result that compiled code computes by one call of the C library each.
# PyTorch's kernels are vectorized, and faster for more elements.
FEW_CALLS = 4096

_STRIDE_DEPENDENT = frozenset(
    {"aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter", "aten::set_"}
)


def are_many_calls(node: fx.Node) -> bool:
    """Whether PyTorch's kernel, if there is one, computes a result faster than the C library."""
    return not runs_alone() and decided(
        Rule.MIDDLE, lambda: math.prod(node.meta["val"].shape) > FEW_CALLS
    )


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the fake tensors that a node returns, one or several."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def nbytes_of(node: fx.Node) -> int:
    """Return the bytes of all results of a node."""
    return sum(TensorSpec.of(v).nbytes for v in tensors_of(node))


def dtypes_of(node: fx.Node) -> frozenset[torch.dtype]:
    """Return the dtypes of all tensors that a node reads and returns.

    If a node has several results, only results that are read count: PyTorch leaves results empty
    that it does not need.
    """
    return frozenset(t.dtype for t in _operands_and_results(node))


def may_convert(node: fx.Node, converter: Converter) -> bool:
    """Whether ``converter`` claims the dtypes of a node, and was proven right for them.

    The conformance run proves converters (:mod:`tvmbridge.core.admission`). A node that reads or
    returns an empty tensor is not converted.
    """
    dtypes = dtypes_of(node)
    names = [to_relax_dtype(d) for d in dtypes if is_supported(d)]
    return (
        dtypes <= converter.dtypes
        and all(t.numel() for t in _operands_and_results(node))
        and is_proven("converters", str(node.target), names)
    )


def _operands_and_results(node: fx.Node) -> list[torch.Tensor]:
    return [t for n in node.all_input_nodes for t in tensors_of(n)] + _read_results(node)


def _read_results(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta["val"]
    one_by_one = all(user.target is operator.getitem for user in node.users)
    if not isinstance(value, tuple | list) or not one_by_one:
        return tensors_of(node)
    read = {user.args[1] for user in node.users}
    return [t for i, t in enumerate(value) if i in read and isinstance(t, torch.Tensor)]


def refuse_what_cannot_run(node: fx.Node) -> None:
    """Raise an error for a node that can be neither converted nor called.

    Raises:
        UnsupportedOperatorError: the operator writes its inputs, returns something that is no
            tensor of known shape, or cannot run in compiled code for another reason.
        DataDependentError: a shape depends on data, or a result is sparse.
    """
    target = node.target
    assert isinstance(target, OpOverload)
    if target._schema.name in _STRIDE_DEPENDENT and not _is_dense(node.args[0]):
        raise UnsupportedOperatorError(f"{target} depends on the strides of its input")
    if target._schema.is_mutable:
        raise UnsupportedOperatorError(
            f"{target} writes into its inputs and was not functionalised"
        )
    _refuse_kernels_with_faults(node)
    results = tensors_of(node)
    if not results or _returns_numbers(node):
        raise UnsupportedOperatorError(f"{target} returns something that is not a tensor")
    for tensor in results:
        if tensor.layout is not torch.strided:
            raise DataDependentError(
                f"{target} makes a tensor with the layout {tensor.layout}, which PyTorch alone "
                "computes with; sum over edges with index_add instead"
            )
        if not has_type(tensor.dtype):
            raise UnsupportedOperatorError(f"{target} makes a tensor of {tensor.dtype}")
        if not all(isinstance(s, int) for s in tensor.shape):
            raise DataDependentError(f"{target} has a result whose shape depends on data")
    _refuse_other_dtypes(node)


def _refuse_other_dtypes(node: fx.Node) -> None:
    """Refuse a node whose kernel returns another dtype than the trace has for its readers."""
    value = node.meta["val"]
    fakes = value if isinstance(value, tuple | list) else [value]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    made = kernel_dtypes(node.target, args, kwargs)  # type: ignore[arg-type]
    read = {id(t) for t in _read_results(node)}
    for fake, dtype in zip(fakes, made or (), strict=False):
        if id(fake) in read and dtype is not None and true_dtype(node, fake) is not dtype:
            raise UnsupportedOperatorError(
                f"{node.target} makes {dtype} of operands of several dtypes, where PyTorch's "
                f"trace has {fake.dtype}"
            )


def _refuse_kernels_with_faults(node: fx.Node) -> None:
    """Refuse calls that crash in PyTorch's kernels."""
    operands = [a.meta["val"] for a in node.args if isinstance(a, fx.Node)]
    name = node.target._schema.name  # type: ignore[union-attr]
    if name == "aten::_pdist_backward" and not all(o.numel() for o in operands[1:2]):
        raise UnsupportedOperatorError(f"{node.target} of no elements crashes in PyTorch")
    if name == "aten::mkldnn_rnn_layer_backward":
        raise UnsupportedOperatorError(
            f"{node.target} reads a workspace that its forward makes under autograd alone"
        )


def _is_dense(operand: Any) -> bool:
    """Whether a tensor is contiguous and fills its storage, as all tensors in compiled code do."""
    fake = operand.meta["val"]
    whole: bool = fake.untyped_storage().nbytes() == fake.numel() * fake.element_size()
    return whole and bool(fake.is_contiguous())


def _returns_numbers(node: fx.Node) -> bool:
    value = node.meta["val"]
    values = value if isinstance(value, tuple | list) else [value]
    return not all(v is None or isinstance(v, torch.Tensor) for v in values)
