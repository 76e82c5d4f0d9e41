"""Convolutions with weights that were packed once, on images in channels-last layout.

In the graph such a convolution is ``call_pure_packed("tvmbridge.packed_convolution", spec, x,
ticket[, bias])`` with ``x`` and the result as (batch, height, width, channels). The ticket stands
for the packed weight (see :mod:`.packed`), and ``spec`` has the fields of :class:`PackedForm` as
JSON.

oneDNN's channels-last kernels add a long sum in one chain; its channels-first kernels use several
chains and are more precise. If the error would be many times eager PyTorch's, the convolution
converts its own data to channels-first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from tvmbridge.kernels.choice import as_precise, operands_to_measure, race
from tvmbridge.kernels.convolution_form import ConvolutionResult, SameConvolution
from tvmbridge.kernels.convolution_loops import Maker, faster_in_loops
from tvmbridge.kernels.packed import Packed
from tvmbridge.kernels.table import choice

PACKED_CONVOLUTION = "tvmbridge.packed_convolution"
# Only a clear gain pays for converting a whole network to channels-last.
_GAIN = 0.95
_SAME = ((3, 3), (1, 1), (1, 1), (1, 1), 1, False)


@dataclass(frozen=True)
class PackedForm:
    """The sizes and parameters of a convolution of images, named as in ``Convolution``.

    If ``transposed`` or ``alone``, PyTorch's kernel computes it and the weight is not packed.

    - ``data``: the shape (batch, channels, height, width).
    - ``weight``: the shape of the weight.
    - ``alone``: whether the data is converted to channels-first for this convolution.
    """

    data: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = (0, 0)
    alone: bool = field(default=False, compare=False)

    @property
    def settings(self) -> tuple[Any, ...]:
        """Stride, padding, dilation, groups, and whether the convolution is transposed."""
        return self.stride, self.padding, self.dilation, self.groups, self.transposed

    @property
    def work(self) -> int:
        """The number of multiplications of the direct method, of a stride of one."""
        return prod(self.data) * prod(self.weight[2:]) * self.weight[0] // self.groups

    @property
    def spec(self) -> str:
        """The JSON spec that calls of this convolution have in the graph."""
        return json.dumps(asdict(self))

    def of_images(self, most: int) -> PackedForm:
        """Return the convolution of at most ``most`` images."""
        return replace(self, data=(min(self.data[0], most), *self.data[1:]))

    def pack(self, weight: torch.Tensor) -> Packed:
        """Pack ``weight``, or wrap it unpacked if the convolution is transposed or alone."""
        if self.alone:
            own = weight.detach()
            return Packed(lambda x, bias: self.plain(x.contiguous(), own, bias))
        own = weight.detach().to(memory_format=torch.channels_last)
        if self.transposed:
            return Packed(lambda x, bias: self.plain(x, own, bias))
        packed = torch.ops.mkldnn._reorder_convolution_weight(
            own, self.padding, self.stride, self.dilation, self.groups, self.data
        )
        kernel = torch.ops.mkldnn._convolution_pointwise.default
        sizes = (self.padding, self.stride, self.dilation, self.groups)

        def convolve(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            result: torch.Tensor = kernel(x, packed, bias, *sizes, "none", [], "")
            return result

        return Packed(convolve)

    def plain(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the result of PyTorch's own convolution."""
        sizes = self.stride, self.padding
        if self.transposed:
            more, groups, spread = self.output_padding, self.groups, self.dilation
            return torch.conv_transpose2d(x, weight, bias, *sizes, more, groups, spread)
        return torch.conv2d(x, weight, bias, *sizes, self.dilation, self.groups)


def run_packed_convolution(key: str, *tensors: Any) -> torch.Tensor:
    """Run one packed convolution; registered in TVM as :data:`PACKED_CONVOLUTION`."""
    del key  # The packed weight has the form; the key is in the graph for people.
    x, ticket, *rest = (from_dlpack(t) for t in tensors)
    with torch.no_grad():
        bias = rest[0] if rest else None
        result = Packed.of(ticket).run(x.permute(0, 3, 1, 2), bias)
        return result.permute(0, 2, 3, 1).contiguous()


def faster_packed(
    forms: Sequence[PackedForm], measure: bool, make: Maker
) -> tuple[PackedForm, ...]:
    """Return the forms to pack a network's convolutions by; () if packing is not clearly faster.

    Args:
        measure: whether kernels may be measured; otherwise nothing is packed.
        make: compiles loops, which compete with PyTorch's kernels for the unpacked convolutions.

    Returns:
        ``forms`` with ``alone`` set, if the sum of the packed times is clearly smaller.
    """
    if not measure or not forms or not torch.backends.mkldnn.is_available():
        return ()
    found = {form: replace(form, alone=_is_alone(form)) for form in dict.fromkeys(forms)}
    question = f"packed convolutions beside loops {sorted(form.spec for form in found.values())}"
    chosen = tuple(found[form] for form in forms)
    faster = choice(question, ("packed", ""), partial(_faster, chosen, make)) == "packed"
    return chosen if faster else ()


def _is_alone(form: PackedForm) -> bool:
    if form.transposed:
        return False  # PyTorch uses the same kernel for both layouts
    question = f"precision of a packed convolution {form.spec}"
    return choice(question, ("precise", ""), partial(_precision, form)) == ""


def _faster(forms: Sequence[PackedForm], make: Maker) -> str:
    measured = {form: _seconds(form, make) for form in dict.fromkeys(forms)}
    usual, packed = (sum(measured[form][i] for form in forms) for i in (0, 1))
    return "packed" if packed < _GAIN * usual else ""


def _precision(form: PackedForm) -> str:
    """Return "precise" if the packed kernel is about as precise as PyTorch's, else ""."""
    return precision_of(form, lambda last, weight: form.pack(weight).run(last, None))


def precision_of(
    form: PackedForm, convolve: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> str:
    """Return "precise" if a kernel for channels last is about as precise as PyTorch's, else "".

    Args:
        convolve: computes the convolution of data, which has channels last, and weight.
    """
    x, last, weight = operands_of_form(form)
    with torch.no_grad():
        try:
            found = convolve(last, weight)
        except RuntimeError:
            return ""
        exact = form.plain(x[:1].double(), weight.double())
        return "precise" if as_precise(found, form.plain(x, weight), exact) else ""


def _seconds(form: PackedForm, make: Maker) -> list[float]:
    """Return two times: of the unpacked convolution (PyTorch's kernel or loops), and packed."""
    x, last, weight = operands_of_form(form)
    with torch.no_grad():
        packed = form.pack(weight)

        def run_packed() -> torch.Tensor:
            return packed.run(last, None).contiguous(memory_format=torch.channels_last)

        return race([not_packed(form, make, x, weight), run_packed])


def not_packed(
    form: PackedForm, make: Maker, x: torch.Tensor, weight: torch.Tensor
) -> Callable[[], object]:
    """Return the unpacked convolution of ``x`` with channels second, by PyTorch or in loops."""
    if (form.weight[2:], *form.settings) == _SAME:
        # The form has a bias: folding a batch norm leaves one.
        same = SameConvolution.of(ConvolutionResult.RESULT, form.data, form.weight, biased=True)
        loops = make(same) if faster_in_loops(same, make) else None
        if loops is not None:
            bias, out = (torch.zeros(s, device="cpu") for s in same.shapes[2:])
            return partial(loops, x, weight, bias, out)
    return lambda: form.plain(x, weight)


def operands_of_form(form: PackedForm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random data, the same data in channels-last layout, and a weight."""
    x, weight = operands_to_measure([form.data, form.weight], torch.float32)
    x, weight = x - 0.5, weight - 0.5
    return x, x.contiguous(memory_format=torch.channels_last), weight
