"""ATen calls: PyTorch's own kernel for an operator, called from inside Relax.

In the graph an ATen call is ``call_pure_packed("tvmbridge.aten", spec, *tensors)``. Its spec is
JSON with these fields:

- ``op``: the name of the overload.
- ``args``, ``kwargs``: the arguments. ``{"tensor": i}`` is the i-th tensor; ``{"complex": i}`` is
  the complex tensor that the i-th tensor holds as pairs of real numbers. ``{"channels_last": i}``
  is a view, with channels second, of the i-th tensor, which has them last. ``{"view": [i, shape,
  strides, offset]}`` is a view of the i-th tensor. Dtypes, layouts, memory formats and devices are
  tagged strings.
- ``results``: the positions of the operator's results that the graph uses; null if the operator
  returns a single tensor.
- ``declared``: the shapes and dtypes of the results, which the pass ``DeclareResults`` adds.
- ``promises``: for custom operators, the strides that the fake kernel gives the results.
- ``channels_last``: the positions of the operator's results that the graph has with channels last;
  true if all of them.
- ``compiled``: true if loops of :mod:`tvmbridge.legalize.aten` replace the call before the module
  is compiled.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import tvm
from torch import fx
from tvm import relax

from tvmbridge.core.custom_operator import is_foreign
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import OpOverload
from tvmbridge.kernels.dtypes import from_relax_dtype, tensor_type
from tvmbridge.kernels.keys import spec_named
from tvmbridge.kernels.results import promises_of, taker_of
from tvmbridge.kernels.tensors import run_on
from tvmbridge.kernels.true_dtypes import true_dtype

ATEN_CALL = "tvmbridge.aten"
FIRST_TENSOR = 2
"""Where the tensors of a call begin: after the name of the packed function, and the spec."""

_TAGS: dict[type, str] = {
    torch.dtype: "dtype",
    torch.memory_format: "memory_format",
    torch.layout: "layout",
}


def emit_aten_call(
    builder: relax.BlockBuilder,
    node: fx.Node,
    values: Mapping[fx.Node, Any],
    *,
    compiled: bool = False,
) -> Any:
    """Emit the ATen call of an fx node.

    Args:
        compiled: whether loops replace the call before the module is compiled.

    Returns:
        The Relax variable of the result, or a tuple of variables. The tuple has None for results
        that ATen returns as None or that nothing reads.

    Raises:
        UnsupportedOperatorError: an argument has no JSON form, or the operator copies a tensor to
            another device.
    """
    tensors: list[relax.Expr] = []
    results = node.meta["val"]
    several = isinstance(results, tuple | list)
    fakes = _results_read(node) if several else [results]
    _refuse_other_devices(node, fakes)
    content = {
        "op": str(node.target),
        "args": [_encode(a, node, tensors, values) for a in node.args],
        "kwargs": {k: _encode(v, node, tensors, values) for k, v in node.kwargs.items()},
        "results": [i for i, f in enumerate(fakes) if f is not None] if several else None,
    }
    if is_foreign(node.target):  # type: ignore[arg-type]
        operands = [n.meta["val"] for n in node.all_input_nodes]
        content["promises"] = promises_of(operands, results)
    spec = json.dumps({**content, "compiled": True} if compiled else content)
    types = [tensor_type(f.shape, true_dtype(node, f)) for f in fakes if f is not None]
    call = packed_call(ATEN_CALL, spec, tensors, relax.TupleType(types) if several else types[0])
    bound = builder.emit(call)
    if not several:
        return bound
    fields = iter(range(len(types)))
    return tuple(
        None if f is None else builder.emit(relax.TupleGetItem(bound, next(fields))) for f in fakes
    )


def _refuse_other_devices(node: fx.Node, fakes: Sequence[torch.Tensor | None]) -> None:
    """Raise if the operator copies between devices, because compiled code is for one device."""
    operands = {n.meta["val"].device for n in node.all_input_nodes if _is_tensor(n)}
    for fake in fakes:
        if fake is not None and fake.dim() and operands and fake.device not in operands:
            raise UnsupportedOperatorError(
                f"{node.target} makes a tensor on {fake.device}, where its operands are on "
                f"{', '.join(sorted(map(str, operands)))}: compiled code is for one device"
            )


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _results_read(node: fx.Node) -> list[torch.Tensor | None]:
    """Return the fake results of a node, with None for results that nothing reads.

    An operator may return None for an unread result although its fake kernel returns a tensor: a
    backward skips the gradients that its output mask excludes.
    """
    fakes = list(node.meta["val"])
    read = {user.args[1] for user in node.users if user.target is operator.getitem}
    if not read or any(user.target is not operator.getitem for user in node.users):
        return fakes
    return [fake if i in read else None for i, fake in enumerate(fakes)]


def packed_call(
    callee: str, spec: str, tensors: Sequence[relax.Expr], type_: relax.Type
) -> relax.Call:
    """Return a pure call of the registered kernel ``callee``, which allocates its results."""
    return relax.op.call_pure_packed(callee, tvm.ir.StringImm(spec), *tensors, ty_args=[type_])


def call_overload(
    overload: str,
    args: Sequence[Any],
    tensors: Sequence[relax.Expr],
    type_: relax.Type,
    **flags: bool,
) -> relax.Call:
    """Return an ATen call with one result; ``{"tensor": i}`` in ``args`` is ``tensors[i]``.

    ``flags`` are fields of the spec, such as ``compiled``; a false one is left out.
    """
    content: dict[str, Any] = {"op": overload, "args": list(args), "kwargs": {}, "results": None}
    content |= {name: True for name, is_set in flags.items() if is_set}
    return packed_call(ATEN_CALL, json.dumps(content), tensors, type_)


def zeros_call(shape: Sequence[int], dtype: str, device: str) -> relax.Call:
    """Return an ATen call that creates zeros, which no pass recognises and folds as zeros."""
    kwargs = {"dtype": {"dtype": dtype}, "device": {"device": device}}
    spec = {"op": "aten.full.default", "args": [list(shape), 0], "kwargs": kwargs, "results": None}
    return packed_call(ATEN_CALL, json.dumps(spec), [], relax.TensorType(list(shape), dtype))


def _encode(
    value: Any, node: fx.Node, tensors: list[relax.Expr], values: Mapping[fx.Node, Any]
) -> Any:
    if isinstance(value, fx.Node):
        tensors.append(values[value])
        kind = "complex" if value.meta["val"].is_complex() else "tensor"
        return {kind: len(tensors) - 1}
    if isinstance(value, list | tuple):
        return [_encode(v, node, tensors, values) for v in value]
    if isinstance(value, torch.device):
        return {"device": str(value)}
    tag = _TAGS.get(type(value))
    if tag is not None:
        return {tag: str(value).removeprefix("torch.")}
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return {"float": repr(value)}
    if isinstance(value, complex):
        return {"number": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedOperatorError(
        f"{node.target} has an argument of type {type(value).__name__}, which an ATen call "
        "cannot carry"
    )


def _decode(value: Any) -> Callable[[tuple[torch.Tensor, ...]], Any]:
    """Return a function that builds the argument encoded in ``value`` from a call's tensors."""
    if isinstance(value, list):
        parts = [_decode(v) for v in value]
        return lambda tensors: [p(tensors) for p in parts]
    if not isinstance(value, dict):
        return lambda tensors: value
    ((tag, content),) = value.items()
    if tag == "tensor":
        return lambda tensors: tensors[content]
    if tag == "complex":
        return lambda tensors: torch.view_as_complex(tensors[content])
    if tag == "view":
        number, *place = content
        return lambda tensors: tensors[number].as_strided(*place)
    if tag == "channels_last":
        return lambda tensors: tensors[content].permute(0, 3, 1, 2)
    if tag == "device":
        fixed: Any = torch.device(content)
    elif tag == "float":
        fixed = float(content)
    elif tag == "number":
        fixed = complex(content)
    else:
        fixed = getattr(torch, content)
    return lambda tensors: fixed


def resolve_overload(name: str) -> OpOverload:
    """Return the overload with the dotted name ``namespace.operator.overload``."""
    namespace, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload)


def foreign_among(names: Iterable[str]) -> list[str]:
    """Return the names of custom overloads: neither PyTorch nor tvmbridge defines the operator."""
    return [name for name in names if is_foreign(resolve_overload(name))]


def aten_call_operator(call: relax.Call) -> str | None:
    """Return the overload's name if ``call`` is an ATen call, else None."""
    if call.op != tvm.ir.Op.get("relax.call_pure_packed"):
        return None
    callee = call.args[0]
    if not isinstance(callee, relax.ExternFunc) or callee.global_symbol != ATEN_CALL:
        return None
    return str(spec_of(call)["op"])


def spec_of(call: relax.Call) -> dict[str, Any]:
    """Return the parsed JSON spec of an ATen call."""
    content: dict[str, Any] = json.loads(call.args[1].value)
    return content


def tensors_of(call: relax.Call) -> list[relax.Expr]:
    """Return the tensors of an ATen call, as the numbers in its spec count them."""
    return list(call.args[FIRST_TENSOR:])


def compiled_call(call: relax.Call) -> dict[str, Any] | None:
    """Return the parsed JSON spec if loops will replace the ATen call ``call``, else None."""
    if aten_call_operator(call) is None:
        return None
    content = spec_of(call)
    return content if content.get("compiled") else None


@functools.lru_cache(maxsize=4096)
def _program(key: str) -> Callable[[tuple[torch.Tensor, ...]], Any]:
    content = json.loads(spec_named(key))
    op = resolve_overload(content["op"])
    args = [_decode(a) for a in content["args"]]
    kwargs = {k: _decode(v) for k, v in content["kwargs"].items()}
    take = taker_of(content)
    channels_last = content.get("channels_last", False)

    def run(tensors: tuple[torch.Tensor, ...]) -> Any:
        out = op(*[a(tensors) for a in args], **{k: v(tensors) for k, v in kwargs.items()})
        return take(_with_channels_last(out, channels_last) if channels_last else out, tensors)

    return run


def described_call(key: str) -> tuple[Any, ...] | None:
    """Describe the ATen call whose spec has the key ``key`` to the compiled half.

    Returns:
        The names of operator and overload; each argument of the schema, as a tuple of its form and
        content; whether the results are a tuple; and of each result its position, whether its
        channels move last, its shape, and its dtype. None if Python has to run the call: it also
        checks the conduct of custom operators.
    """
    content = json.loads(spec_named(key))
    op = resolve_overload(content["op"])
    declared, places = content.get("declared"), content["results"]
    if declared is None or is_foreign(op):
        return None
    positional, named = content["args"], content["kwargs"]
    arguments = [
        _form(positional[i] if i < len(positional) else named.get(a.name, a.default_value))
        for i, a in enumerate(op._schema.arguments)
    ]
    moved = content.get("channels_last", False)
    results = [
        (place, moved if isinstance(moved, bool) else place in moved, shape, from_relax_dtype(name))
        for place, (shape, name) in zip(places or [0], declared, strict=True)
    ]
    names = op._schema.name, op._schema.overload_name
    return (*names, tuple(arguments), places is not None, tuple(results))


def _form(value: Any) -> tuple[Any, ...]:
    """Return an encoded argument as its form and content: a place of a tensor, or a constant."""
    if isinstance(value, dict):
        ((tag, content),) = value.items()
        if tag == "view":
            return (tag, *content)
        if tag in ("tensor", "complex", "channels_last"):
            return tag, content
    elif isinstance(value, list) and any(isinstance(v, dict) and "tensor" in v for v in value):
        return "list", tuple(_form(v) for v in value)
    return "constant", _decode(value)(())


def _with_channels_last(out: Any, positions: Literal[True] | list[int]) -> Any:
    """Return results with the channels of those at ``positions`` (True: of all) moved last."""
    if isinstance(out, torch.Tensor):
        return out.permute(0, 2, 3, 1)
    moved = range(len(out)) if positions is True else positions
    return tuple(
        tensor.permute(0, 2, 3, 1) if i in moved and tensor is not None else tensor
        for i, tensor in enumerate(out)
    )


def run_aten_call(key: str, *tensors: Any) -> Any:
    """Run the ATen call whose spec has the key ``key``; registered in TVM as :data:`ATEN_CALL`."""
    program = _program(key)
    return run_on(lambda *given: program(given), tensors)
