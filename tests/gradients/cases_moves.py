"""Cases of the rules of ATen calls: indexing, sorting, scans and powers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tvm import relax

from tests.gradients.cases import NAN, Case, integers, normal
from tvmbridge.kernels.aten_call import ATEN_CALL, packed_call, resolve_overload
from tvmbridge.kernels.dtypes import to_relax_dtype

# Placeholders of tensors among an operator's arguments, by the number of the case's input.
_X, _Y, _PLACES = {"tensor": 0}, {"tensor": 1}, {"tensor": 2}

# Some indices occur two or three times, some never.
_INDEX = torch.tensor([[0, 2, 2, 1], [2, 2, 0, 0]])


def _case(rule: str, name: str, inputs: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Case:
    """Return the case of an ATen call with ``args`` on ``inputs``; it uses the first result."""
    overload = resolve_overload(rule)

    def filled(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
        if isinstance(value, list):
            return [filled(v, tensors) for v in value]
        return tensors[value["tensor"]] if isinstance(value, dict) else value

    def by_torch(*tensors: torch.Tensor) -> torch.Tensor:
        result = overload(*[filled(a, tensors) for a in args], **kwargs)
        first: torch.Tensor = result if isinstance(result, torch.Tensor) else result[0]
        return first

    result = by_torch(*inputs)
    several = rule.startswith(("aten.sort", "aten.topk"))
    type_ = relax.TensorType(tuple(result.shape), to_relax_dtype(result.dtype))
    content = {
        "op": rule,
        "args": list(args),
        "kwargs": kwargs,
        "results": [0] if several else None,
    }
    called = relax.TupleType([type_]) if several else type_

    def by_relax(*tensors: relax.Expr) -> relax.Expr:
        call = packed_call(ATEN_CALL, json.dumps(content), list(tensors), called)
        if not several:
            return call
        return relax.TupleGetItem(relax.BlockBuilder.current().emit(call), 0)

    return Case(rule, name, by_relax, by_torch, tuple(inputs))


def _reading() -> Iterator[Case]:
    x = normal(3, 4)
    for dim in (0, -1):
        yield _case("aten.gather.default", f"along {dim}", (x, _INDEX), _X, dim, _Y)
        one = torch.ones(3, 4, dtype=torch.int64).narrow(dim, 0, 1).contiguous()
        yield _case("aten.gather.default", f"one along {dim}", (x, one), _X, dim, _Y)
        row = _INDEX[0]
        yield _case("aten.index_select.default", f"along {dim}", (x, row), _X, dim, _Y)
        yield _case("aten.cumsum.default", f"along {dim}", (x,), _X, dim)
    yield _case("aten.index.Tensor", "rows", (x, _INDEX - 3), _X, [_Y])
    yield _case("aten.index.Tensor", "columns", (x, _INDEX), _X, [None, _Y])
    yield _case("aten.index.Tensor", "elements", (x, _INDEX, _INDEX[0]), _X, [_Y, _PLACES])


def _writing() -> Iterator[Case]:
    x, source = normal(3, 4), normal(2, 4, seed=1)
    for dim in (0, 1):
        for name in ("scatter.src", "scatter_add.default"):
            operands = (x, source, _INDEX)
            yield _case(f"aten.{name}", f"along {dim}", operands, _X, dim, _PLACES, _Y)
        yield _case("aten.scatter.value", f"along {dim}", (x, _INDEX), _X, dim, _Y, 2.5)
    rule, once, twice = "aten.index_put.default", torch.tensor([2, -3]), torch.tensor([1, 1])
    yield _case(rule, "replaced", (x, source, once), _X, [_PLACES], _Y, False)
    yield _case(rule, "added", (x, source, twice), _X, [_PLACES], _Y, True)
    yield _case(rule, "broadcast", (x, source[:1], once), _X, [_PLACES], _Y, True)
    columns = normal(3, 2)
    yield _case(rule, "columns", (x, columns, once), _X, [None, _PLACES], _Y, True)
    yield _case(rule, "elements", (x, normal(2), once, twice), _X, [_PLACES, {"tensor": 3}], _Y)


def _ordering() -> Iterator[Case]:
    ties = integers(4, 5)
    ties[1, 2], ties[2, 2] = NAN, -0.0
    for name in ("along 0", "along -1"):
        dim = int(name.split()[1])
        yield _case("aten.sort.default", name, (normal(4, 5),), _X, dim, True)
        yield _case("aten.topk.default", name, (normal(4, 5),), _X, 2, dim)
    yield _case("aten.sort.stable", "ties", (ties,), _X, stable=True, dim=0)
    yield _case("aten.sort.stable", "descending", (ties,), _X, stable=True, descending=True)


def _powers() -> Iterator[Case]:
    base, exponent = normal(3, 4).abs(), normal(3, 4, seed=1)
    base[0, :3], exponent[0, 1], exponent[0, 2], exponent[1, 0] = 0.0, 0.0, 2.0, 0.0
    yield _case("aten.pow.Tensor_Tensor", "plain", (base, exponent), _X, _Y)
    yield _case("aten.pow.Tensor_Tensor", "broadcast", (base, exponent[:1]), _X, _Y)
    yield _case("aten.pow.Scalar", "two", (exponent,), 2.0, _X)
    yield _case("aten.pow.Scalar", "zero", (base,), 0.0, _X)
    for number in (2.5, -1.5, 0.0, 3, 1):
        yield _case("aten.pow.Tensor_Scalar", str(number), (base,), _X, number)


def move_cases() -> tuple[Case, ...]:
    return (*_reading(), *_writing(), *_ordering(), *_powers())
