"""Cases of the rules of convolutions, of pooling and of interpolation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional
from tvm import relax

from tests.gradients.cases import INF, NAN, Case, integers, normal
from tvmbridge.kernels.aten_call import ATEN_CALL, packed_call, resolve_overload
from tvmbridge.kernels.convolution import Convolution
from tvmbridge.kernels.dtypes import to_relax_dtype

_PLAIN: tuple[Callable[..., torch.Tensor], ...] = (
    functional.conv1d,
    functional.conv2d,
    functional.conv3d,
)
_TRANSPOSED: tuple[Callable[..., torch.Tensor], ...] = (
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
)
# Stride, padding, dilation, groups, and output padding if transposed; three dimensions each.
_FORMS: dict[str, tuple[Sequence[int], Sequence[int], Sequence[int], int, Sequence[int]]] = {
    "plain": ((1, 1, 1), (0, 0, 0), (1, 1, 1), 1, (0, 0, 0)),
    "strided": ((2, 3, 1), (0, 1, 0), (1, 1, 1), 1, (1, 2, 0)),
    "dilated": ((1, 2, 1), (2, 1, 1), (2, 1, 2), 1, (0, 1, 0)),
    "grouped": ((1, 1, 2), (1, 0, 1), (1, 2, 1), 2, (0, 0, 1)),
    "depthwise": ((2, 1, 1), (1, 1, 1), (1, 1, 1), 4, (0, 0, 0)),
}
_EXTENTS, _WINDOW = (7, 6, 5), (3, 2, 2)


def convolution_cases() -> Iterator[Case]:
    for transposed, functions in ((False, _PLAIN), (True, _TRANSPOSED)):
        for rank, function in enumerate(functions, start=1):
            for name, (stride, padding, dilation, groups, output_padding) in _FORMS.items():
                convolution = Convolution(
                    stride=tuple(stride[:rank]),
                    padding=tuple(padding[:rank]),
                    dilation=tuple(dilation[:rank]),
                    transposed=transposed,
                    output_padding=tuple(output_padding[:rank]) if transposed else (0,) * rank,
                    groups=groups,
                )
                weight = (4, 8 // groups) if transposed else (8, 4 // groups)
                yield Case(
                    f"relax.nn.conv{rank}d{'_transpose' if transposed else ''}",
                    name,
                    convolution.of_operands,
                    lambda x, w, c=convolution, f=function: _by_torch(f, c, x, w),
                    (normal(2, 4, *_EXTENTS[:rank]), normal(*weight, *_WINDOW[:rank], seed=1)),
                )


def _by_torch(
    function: Callable[..., torch.Tensor],
    convolution: Convolution,
    x: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    options: dict[str, Any] = {
        "stride": convolution.stride,
        "padding": convolution.padding,
        "dilation": convolution.dilation,
        "groups": convolution.groups,
    }
    if convolution.transposed:
        options["output_padding"] = convolution.output_padding
    return function(x, weight, **options)


def _aten(rule: str, name: str, x: torch.Tensor, *args: Any, results: int = 1) -> Case:
    """Return the case of an ATen call on ``x`` and ``args``; it uses the first of ``results``."""
    overload = resolve_overload(rule)

    def by_torch(x: torch.Tensor) -> torch.Tensor:
        result = overload(x, *args)
        first: torch.Tensor = result if isinstance(result, torch.Tensor) else result[0]
        return first

    several = not isinstance(overload(x, *args), torch.Tensor)
    result = by_torch(x)
    shape = tuple(result.shape)
    types = [relax.TensorType(shape, d) for d in (to_relax_dtype(result.dtype), "int64")]
    content = {
        "op": rule,
        "args": [{"tensor": 0}, *args],
        "kwargs": {},
        "results": list(range(results)) if several else None,
    }

    def by_relax(x: relax.Expr) -> relax.Expr:
        called = relax.TupleType(types[:results]) if several else types[0]
        call = packed_call(ATEN_CALL, json.dumps(content), [x], called)
        if not several:
            return call
        return relax.TupleGetItem(relax.BlockBuilder.current().emit(call), 0)

    return Case(rule, name, by_relax, by_torch, (x,))


def pooling_cases() -> Iterator[Case]:
    for rank in (2, 3):
        x, window = normal(2, 3, *_EXTENTS[:rank]), [3] * rank
        overlapping = (window, [2] * rank, [1] * rank)
        rule = f"aten.avg_pool{rank}d.default"
        yield _aten(rule, "tiles", x, [2] * rank)
        yield _aten(rule, "overlapping", x, *overlapping)
        yield _aten(rule, "over-the-edge", x, *overlapping, True, False)
        yield _aten(rule, "other-divisor", x, *overlapping, False, True, 5)
        rule = f"aten.max_pool{rank}d_with_indices.default"
        ties = integers(2, 3, *_EXTENTS[:rank])
        odd = ties.clone()
        odd.view(-1)[::5], odd.view(-1)[::7] = NAN, -INF
        yield _aten(rule, "ties", ties, *overlapping)
        yield _aten(rule, "over-the-edge", ties, *overlapping, [1] * rank, True)
        yield _aten(rule, "dilated", x, [2] * rank, [1] * rank, [1] * rank, [2] * rank)
        yield _aten(rule, "not-finite", odd, *overlapping)
        yield _aten(rule, "with-indices", odd, *overlapping, results=2)
        uneven = [3, 4, 2][:rank]
        for name in ("_adaptive_avg_pool", "adaptive_max_pool"):
            yield _aten(f"aten.{name}{rank}d.default", "uneven", x, uneven)
            yield _aten(f"aten.{name}{rank}d.default", "unbatched", x[0], uneven)


def interpolation_cases() -> Iterator[Case]:
    for kind, rank in (
        ("nearest", 2),
        ("linear", 1),
        ("bilinear", 2),
        ("trilinear", 3),
        ("bicubic", 2),
    ):
        rule = f"aten.upsample_{kind}{rank}d.vec"
        x, sizes, factors = normal(2, 3, *_EXTENTS[:rank]), [9, 4, 8], [1.7, 0.6, 2.0]
        for corners in ([],) if kind == "nearest" else ([False], [True]):
            suffix = "-by-corners" if corners == [True] else ""
            yield _aten(rule, f"sizes{suffix}", x, sizes[:rank], *corners, None)
            yield _aten(rule, f"factors{suffix}", x, None, *corners, factors[:rank])


def window_cases() -> tuple[Case, ...]:
    return (*convolution_cases(), *pooling_cases(), *interpolation_cases())
