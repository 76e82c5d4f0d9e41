"""Convolutions with weights that were packed once, on pictures whose channels lie last.

In the graph such a convolution is ``call_pure_packed("tvmbridge.packed_convolution", spec, x,
ticket[, bias])`` with ``x`` and the result as (batch, height, width, channels); the ticket stands
for the packed weight (see :mod:`.packed`), and ``spec`` is JSON: the fields of
:class:`PackedForm`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from tvmbridge.kernels.choice import as_precise, operands_to_measure, race
from tvmbridge.kernels.packed import Packed
from tvmbridge.kernels.table import choice

PACKED_CONVOLUTION = "tvmbridge.packed_convolution"
# All of a network is converted; only a clear gain pays for that.
_GAIN = 0.95


@dataclass(frozen=True)
class PackedForm:
    """A convolution of pictures: ``data`` (batch, channels, height, width) by ``weight``."""

    data: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def spec(self) -> str:
        """The spec of its calls."""
        return json.dumps(asdict(self))

    def pack(self, weight: torch.Tensor) -> Packed:
        """``weight``, packed."""
        own = weight.detach().to(memory_format=torch.channels_last)
        packed = torch.ops.mkldnn._reorder_convolution_weight(
            own, self.padding, self.stride, self.dilation, self.groups, self.data
        )
        kernel = torch.ops.mkldnn._convolution_pointwise.default
        sizes = (self.padding, self.stride, self.dilation, self.groups)

        def convolve(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            result: torch.Tensor = kernel(x, packed, bias, *sizes, "none", [], "")
            return result

        return Packed(convolve)


def run_packed_convolution(key: str, *tensors: Any) -> torch.Tensor:
    """Run one; registered with TVM under :data:`PACKED_CONVOLUTION`."""
    del key  # for people: the packed weight knows it
    x, ticket, *rest = (from_dlpack(t) for t in tensors)
    with torch.no_grad():
        bias = rest[0] if rest else None
        result = Packed.of(ticket).run(x.permute(0, 3, 1, 2), bias)
        return result.permute(0, 2, 3, 1).contiguous()


def packed_is_faster(forms: Sequence[PackedForm], measure: bool) -> bool:
    """Whether the convolutions of a network are clearly faster packed, measured in sum."""
    if not measure or not forms or not torch.backends.mkldnn.is_available():
        return False
    question = f"packed convolutions {sorted(map(str, forms))}"
    return choice(question, ("packed", ""), partial(_faster, tuple(forms))) == "packed"


def _faster(forms: Sequence[PackedForm]) -> str:
    usual, packed = 0.0, 0.0
    measured = {form: _seconds(form) for form in dict.fromkeys(forms)}
    for form in forms:
        seconds = measured[form]
        if seconds is None:
            return ""
        usual, packed = usual + seconds[0], packed + seconds[1]
    return "packed" if packed < _GAIN * usual else ""


def _seconds(form: PackedForm) -> list[float] | None:
    """The times of PyTorch's kernel and of the packed one; None where this one is less precise."""
    x, weight = operands_to_measure([form.data, form.weight], torch.float32)
    x, weight = x - 0.5, weight - 0.5
    last = x.contiguous(memory_format=torch.channels_last)
    options = (None, form.stride, form.padding, form.dilation, form.groups)
    convolve: Callable[..., torch.Tensor] = torch.nn.functional.conv2d
    with torch.no_grad():
        try:
            packed = form.pack(weight)
            found = packed.run(last, None)
        except RuntimeError:
            return None
        exact = convolve(x[:1].double(), weight.double(), *options)
        if not as_precise(found, convolve(x, weight, *options), exact):
            return None
        return race([lambda: convolve(x, weight, *options), lambda: packed.run(last, None)])
