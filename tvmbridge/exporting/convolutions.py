"""Compute convolutions as matrix products and as loops, for code without PyTorch's kernels.

Before, with a weight of 1x1::

    lv = R.nn.conv2d(x, w)

After::

    a = R.reshape(w, (256, 64))
    b = R.reshape(x, (64, 3136))
    c = R.matmul(a, b)
    lv = R.reshape(c, (1, 256, 56, 56))

The forms of other convolutions are:

- A larger kernel: a generated function gathers columns of the image (im2col) for the product.
- A kernel of 3x3 that keeps the size of the image: Winograd's algorithm.
- A depthwise convolution: a sum over its kernel.
- A transposed convolution: a product of gathered columns as well.

Requires: nothing. Guarantees: no convolution is left that PyTorch's kernels would serve. Runs
after: FoldBatchNorm. Runs before: ProductsInLoops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.ir import Expr
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.kernels.convolution import Convolution, is_convolution
from tvmbridge.kernels.convolution_form import ConvolutionResult, SameConvolution
from tvmbridge.legalize.lets import constant
from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of, shape_of, with_functions
from tvmbridge.schedules import convolutions
from tvmbridge.schedules.depthwise import Depthwise, depthwise, fits
from tvmbridge.schedules.machine import Machine

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ConvolutionsAsProducts(RelaxPass):
    """Compute convolutions by products, by Winograd's algorithm, or by sums over the kernel.

    Args:
        machine: the processor that the loops are for.
    """

    machine: Machine

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        rewriter = _ConvolutionRewriter(mod, self.machine, report)
        rewritten = with_functions(mod, rewriter)
        return rewritten if report.rewrites else mod


@dataclass(frozen=True)
class _ConvolutionSizes:
    """The sizes of a convolution: the data are (batch, channels, *extents).

    The result is (batch, filters, *places), and ``kernel`` has the extents of the kernel.
    """

    batch: int
    channels: int
    filters: int
    extents: Shape
    places: Shape
    kernel: Shape
    groups: int

    @property
    def depth(self) -> int:
        """Return the number of products that each element of the result sums."""
        return self.channels // self.groups * prod(self.kernel)


@mutator
class _ConvolutionRewriter(PyExprMutator):
    def __init__(self, mod: tvm.IRModule, machine: Machine, report: PassReport) -> None:
        super().__init__(mod)
        self.machine = machine
        self.report = report

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.builder_.normalize(super().visit_call_(call))
        convolution = Convolution.of(call) if is_convolution(call) else None
        if convolution is None:
            return call
        data, weight = call.args
        shapes = [shape_of(e) for e in (data, weight, call)]
        if any(s is None for s in shapes):
            self.report.decline(call.op.name, "its shapes are not static")
            return call
        self.report.rewrote()
        x, w, y = (s or () for s in shapes)
        sizes = _ConvolutionSizes(x[0], x[1], y[1], x[2:], y[2:], w[2:], convolution.groups)
        same = self._same(convolution, sizes, dtype_of(call))
        if same is not None:
            callee = self.builder_.add_func(
                convolutions.convolution(same, self.machine), "convolution"
            )
            return relax.call_tir(callee, [data, weight], relax.TensorType(y, "float32"))
        if sizes.groups == sizes.channels and not convolution.transposed:
            return self._by_channel(convolution, sizes, data, weight)
        return self._product(convolution, sizes, data, weight)

    def _same(
        self, convolution: Convolution, sizes: _ConvolutionSizes, dtype: str
    ) -> SameConvolution | None:
        """Return the form for Winograd's algorithm; None if it does not apply, or is slower."""
        ones = (1, 1)
        settings = (convolution.stride, convolution.padding, convolution.dilation)
        if dtype != "float32" or convolution.transposed or sizes.groups != 1 or sizes_vary():
            return None
        if sizes.kernel != (3, 3) or settings != (ones, ones, ones):
            return None
        data = (sizes.batch, sizes.channels, *sizes.extents)
        form = SameConvolution.of(
            ConvolutionResult.RESULT, data, (sizes.filters, sizes.channels, 3, 3)
        )
        fits = convolutions.fits(form, self.machine)
        faster = fits and convolutions.is_faster_than_product(form, self.machine)
        return form if faster else None

    def _by_channel(
        self,
        convolution: Convolution,
        sizes: _ConvolutionSizes,
        data: relax.Expr,
        weight: relax.Expr,
    ) -> relax.Expr:
        """Return a depthwise convolution as a sum over the kernel."""
        each = sizes.filters // sizes.channels
        loops = self._depthwise(convolution, sizes, dtype_of(data))
        if loops is not None:
            callee = self.builder_.add_func(depthwise(loops, self.machine), "depthwise")
            return relax.call_tir(
                callee, [data, weight], relax.TensorType(loops.shapes[2], "float32")
            )

        def compute(x: te.Tensor, w: te.Tensor) -> te.Tensor:
            taken = padded(x, convolution.padding)
            axes = [te.reduce_axis((0, n), name=f"k{d}") for d, n in enumerate(sizes.kernel)]

            def element(n: Expr, f: Expr, *places: Expr) -> Expr:
                at = [
                    p * s + k * d
                    for p, s, k, d in zip(
                        places, convolution.stride, axes, convolution.dilation, strict=True
                    )
                ]
                channel = f // each if each > 1 else f
                return te.sum(taken(n, channel, *at) * w(f, 0, *axes), axis=axes)

            shape = (sizes.batch, sizes.filters, *sizes.places)
            return te.compute(shape, element, name="depthwise")

        return self.builder_.call_te(compute, data, weight, primfunc_name_hint="depthwise")

    def _depthwise(
        self, convolution: Convolution, sizes: _ConvolutionSizes, dtype: str
    ) -> Depthwise | None:
        """Return the form of a convolution of images; None if there are no loops for it."""
        if dtype != "float32" or len(sizes.kernel) != 2 or sizes_vary():
            return None
        settings = (convolution.stride, convolution.padding, convolution.dilation)
        pairs: list[Any] = [sizes.extents, sizes.kernel, *settings]
        form = Depthwise(sizes.batch, sizes.channels, sizes.filters // sizes.channels, *pairs)
        return form if fits(form) and form.places == sizes.places else None

    def _product(
        self,
        convolution: Convolution,
        sizes: _ConvolutionSizes,
        data: relax.Expr,
        weight: relax.Expr,
    ) -> relax.Expr:
        groups, dtype = sizes.groups, dtype_of(data)
        columns = self._columns(convolution, sizes, data)
        rows = self._rows(convolution, sizes, weight)
        number = prod(sizes.places)
        if sizes.batch * groups == 1:
            columns = self._emit(relax.op.reshape(columns, (sizes.depth, number)))
            rows = self._emit(relax.op.reshape(rows, (sizes.filters, sizes.depth)))
        else:
            columns = self._emit(
                relax.op.reshape(columns, (sizes.batch * groups, sizes.depth, number))
            )
            filters = sizes.filters // groups
            rows = self._emit(relax.op.reshape(rows, (groups, filters, sizes.depth)))
            if sizes.batch > 1 and (groups > 1 or sizes_vary()):
                whole = (sizes.batch, groups, filters, sizes.depth)
                rows = self._emit(relax.op.broadcast_to(rows, whole))
                rows = self._emit(relax.op.reshape(rows, (-1, filters, sizes.depth)))
        product = self._emit(relax.op.matmul(rows, columns))
        assert dtype_of(product) == dtype
        return relax.op.reshape(product, (sizes.batch, sizes.filters, *sizes.places))

    def _rows(
        self, convolution: Convolution, sizes: _ConvolutionSizes, weight: relax.Expr
    ) -> relax.Expr:
        """Return the weight as one matrix (filters of a group, depth) for each group."""
        if not convolution.transposed:
            return weight
        groups, kernel = sizes.groups, sizes.kernel
        shape = (groups, sizes.channels // groups, sizes.filters // groups, *kernel)
        split = self._emit(relax.op.reshape(weight, shape))
        order = [0, 2, 1, *range(3, 3 + len(kernel))]
        return self._emit(relax.op.permute_dims(split, order))

    def _columns(
        self, convolution: Convolution, sizes: _ConvolutionSizes, data: relax.Expr
    ) -> relax.Expr:
        """Return the gathered columns, of shape (batch, channels, *kernel, *places)."""
        plain = all(n == 1 for n in (*sizes.kernel, *convolution.stride))
        if plain and not any(convolution.padding) and sizes.extents == sizes.places:
            return data
        shape = (sizes.batch, sizes.channels, *sizes.kernel, *sizes.places)
        rank = len(sizes.kernel)

        def compute(x: te.Tensor) -> te.Tensor:
            taken = x if convolution.transposed else padded(x, convolution.padding)

            def element(n: Expr, c: Expr, *rest: Expr) -> Expr:
                taps = zip(rest[rank:], rest[:rank], strict=True)
                if convolution.transposed:
                    return _spread(taken, n, c, list(taps), convolution, sizes.extents)
                at = [
                    p * s + k * d
                    for (p, k), s, d in zip(
                        taps, convolution.stride, convolution.dilation, strict=True
                    )
                ]
                return taken(n, c, *at)

            return te.compute(shape, element, name="columns")

        return self._emit(self.builder_.call_te(compute, data, primfunc_name_hint="columns"))

    def _emit(self, value: relax.Expr) -> relax.Var:
        return self.builder_.emit(value)


def padded(x: te.Tensor, edges: Sequence[int]) -> te.Tensor:
    """Return ``x`` with edges of zeros around its last dimensions."""
    if not any(edges):
        return x
    extents = [int(n) for n in x.shape[2:]]

    def element(n: Expr, c: Expr, *places: Expr) -> Expr:
        inside = tirx.const(True, "bool")
        for place, edge, extent in zip(places, edges, extents, strict=True):
            if edge:
                inside = tirx.And(inside, tirx.And(place >= edge, place < extent + edge))
        at = [p - e if e else p for p, e in zip(places, edges, strict=True)]
        return tirx.if_then_else(inside, x(n, c, *at), constant(0.0, str(x.dtype)))

    shape = [*x.shape[:2], *(n + 2 * e for n, e in zip(extents, edges, strict=True))]
    return te.compute(shape, element, name="pad")


def _spread(
    x: te.Tensor,
    n: Expr,
    c: Expr,
    taps: Sequence[tuple[Expr, Expr]],
    convolution: Convolution,
    extents: Sequence[int],
) -> Expr:
    """Return the element that a transposed convolution multiplies at these ``taps``, or 0.

    ``taps`` has a pair for each dimension: a position in the result and one in the kernel.
    """
    inside, at = tirx.const(True, "bool"), []
    settings = (convolution.stride, convolution.padding, convolution.dilation)
    for (place, tap), stride, edge, spread, extent in zip(taps, *settings, extents, strict=True):
        offset = place + edge - tap * spread
        source = tirx.floordiv(offset, tirx.IntImm("int64", stride)) if stride > 1 else offset
        inside = tirx.And(inside, tirx.And(source >= 0, source < extent))
        if stride > 1:
            rest = tirx.floormod(offset, tirx.IntImm("int64", stride))
            inside = tirx.And(inside, tirx.EQ(rest, tirx.IntImm("int64", 0)))
        at.append(source)
    return tirx.if_then_else(inside, x(n, c, *at), constant(0.0, str(x.dtype)))
