"""TIR functions for 3x3 convolutions and their gradients, and the sizes that they support."""

from __future__ import annotations

from tvm import tirx

from tvmbridge.kernels.convolution_form import ConvolutionResult, SameConvolution
from tvmbridge.schedules import scheduled_function
from tvmbridge.schedules.indexing import integer
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.product_operands import DTYPE
from tvmbridge.schedules.product_tiles import width_of
from tvmbridge.schedules.winograd import convolution_body, multiplications_of_core
from tvmbridge.schedules.winograd_rows import tile_of
from tvmbridge.schedules.winograd_weight import weight_gradient_body

_FEWEST_CHANNELS, _NARROWEST = 8, 4
_KERNEL = 9


def fits(form: SameConvolution, machine: Machine) -> bool:
    """Whether the generated loops support this convolution or gradient.

    Images must not be too narrow, nor channels and filters too few. A tile's height must divide the
    filters (for the data's gradient: the channels). The weight's gradient needs as many channels as
    a tile is wide.
    """
    if form.width < _NARROWEST or min(form.channels, form.filters) < _FEWEST_CHANNELS:
        return False
    tile = tile_of(form.channels if form.part is ConvolutionResult.DATA else form.filters, machine)
    if tile is None:
        return False
    return form.part is not ConvolutionResult.WEIGHT or form.channels >= tile.width


def is_faster_than_product(form: SameConvolution, machine: Machine) -> bool:
    """Whether a convolution takes less time than the product of its weight and gathered columns.

    It does not for small images, because each block of rows transforms all kernels.
    """
    ours = multiplications_of_core(form, machine)
    if ours is None:
        return False
    width = width_of(machine)
    columns = -(-form.batch * form.height * form.width // width) * width
    return ours * machine.cores < _KERNEL * columns


def convolution(form: SameConvolution, machine: Machine) -> tirx.PrimFunc:
    """Return the TIR function (operands, result) of a convolution or gradient that :func:`fits`."""
    names = [f"operand{i}" for i in range(len(form.shapes) - 1)]
    buffers = [
        tirx.decl_buffer([integer(n) for n in shape], DTYPE, name)
        for shape, name in zip(form.shapes, [*names, "out"], strict=True)
    ]
    emit = weight_gradient_body if form.part is ConvolutionResult.WEIGHT else convolution_body
    return scheduled_function(buffers, emit(form, machine, *buffers))
