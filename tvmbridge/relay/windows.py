"""Facts about windows that convolutions and pools move over their operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvmbridge.legalize.aten.windows import each


@dataclass(frozen=True)
class Windows:
    """The windows of a pool, with a number for each spatial dimension.

    - ``sizes``, ``strides``, ``dilation``: of the windows.
    - ``before``, ``behind``: the padding at both ends of the dimension.
    """

    sizes: list[int]
    strides: list[int]
    dilation: list[int]
    before: list[int]
    behind: list[int]

    @classmethod
    def of(
        cls,
        extents: Sequence[int],
        counts: Sequence[int],
        numbers: Sequence[Sequence[int] | int],
        *,
        ceil_mode: bool,
    ) -> Windows:
        """Return the windows of a pool.

        Args:
            numbers: PyTorch's arguments kernel_size, stride, padding and dilation.
            ceil_mode: whether windows may reach beyond the padding; they are then padded further,
                because Relay counts such windows in another way.
        """
        rank = len(extents)
        kernel, stride, padding, gaps = numbers
        sizes, pads, dilation = each(kernel, rank), each(padding, rank), each(gaps, rank)
        strides = sizes if stride in ((), []) else each(stride, rank)
        ends = [
            (count - 1) * step + gap * (size - 1) + 1
            for count, step, gap, size in zip(counts, strides, dilation, sizes, strict=True)
        ]
        reached = [
            max(end - extent - pad, pad)
            for end, extent, pad in zip(ends, extents, pads, strict=True)
        ]
        return cls(sizes, strides, dilation, pads, reached if ceil_mode else pads)

    @property
    def padding(self) -> list[int]:
        """Relay's padding: first before each dimension, then behind."""
        return [*self.before, *self.behind]

    @property
    def pairs(self) -> list[int]:
        """PyTorch's padding: a pair for each dimension, from the last one."""
        pairs = zip(reversed(self.before), reversed(self.behind), strict=True)
        return [number for pair in pairs for number in pair]
