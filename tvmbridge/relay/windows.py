"""Facts about windows that convolutions and pools move over their operands."""

from __future__ import annotations

from collections.abc import Sequence


def spread(values: Sequence[int] | int, rank: int) -> list[int]:
    """Return one number for each spatial dimension."""
    listed = [values] if isinstance(values, int) else list(values)
    return listed * rank if len(listed) == 1 else listed


def every_side(padding: Sequence[int] | int, rank: int) -> list[int]:
    """Return Relay's padding: first the sides at the start of each dimension, then at the end."""
    return spread(padding, rank) * 2


def reach(size: int, padding: int, window: tuple[int, int, int], count: int) -> int:
    """Return the padding behind a dimension that ``count`` windows reach, at least ``padding``.

    Args:
        size: the size of the dimension.
        padding: the padding before the dimension, and the least behind it.
        window: its extent, stride and dilation.
        count: the number of windows.
    """
    extent, stride, dilation = window
    last = (count - 1) * stride + dilation * (extent - 1) + 1
    return max(last - size - padding, padding)
