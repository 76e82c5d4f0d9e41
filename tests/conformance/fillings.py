"""Special values of each dtype, and how they are written into random places of tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from tests.conformance.case import Case

_INFINITY = float("inf")
_TIES = (0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 6.0, 0.0)

# Numbers around which exp overflows or underflows in float32, or sigmoid rounds to 1.
_STEEP = (18.0, -18.0, 89.0, -89.0, -104.0, 1e4, -1e4, 1e-3, -1e-3)

# Integers just beyond the range of int32, of uint32, and of exact float32 and float64 integers.
_WIDE = (2**31, -(2**31) - 1, 2**32, 2**24 + 1, 2**53 + 1, -(2**53) - 1)


@dataclass(frozen=True)
class Filling:
    """A choice of special values that replace some elements of each tensor.

    - ``kinds``: the kinds of values, as :func:`special_values` names them.
    - ``share``: the share of the elements that are replaced.
    - ``seed``: the seed of the random places.
    - ``cotangents``: whether the cotangents are filled, and not the inputs.
    """

    label: str
    kinds: tuple[str, ...]
    share: float
    seed: int
    cotangents: bool = False

    @property
    def overflows(self) -> bool:
        """Whether sums, products or quotients of the values may overflow or underflow."""
        return bool({*_HUGE, "tiny"} & set(self.kinds))


_HUGE = frozenset({"largest", "lowest"})


def _fillings() -> tuple[Filling, ...]:
    everything = ("nan", "inf", "-inf", "zeros", "largest", "lowest", "tiny", "ties", "wide")
    finite = ("zeros", "largest", "lowest", "tiny", "ties", "steep", "wide")
    sparse = [(kind,) for kind in ("nan", "inf", "-inf", "largest", "lowest")]
    some = [("inf", "-inf"), ("zeros",), ("tiny",), ("wide",)]
    listed = [
        *((kinds, 0.1) for kinds in sparse),
        *((kinds, 0.3) for kinds in some),
        *[(everything, 0.6)] * 4,
        *[(finite, 0.6)] * 2,
        (("ties",), 1.0),
        (("ties", "zeros"), 1.0),
        (("steep",), 0.6),
        (("nan",), 1.0),
        (("-inf",), 1.0),
        (("zeros",), 1.0),
    ]
    return tuple(
        Filling(f"{seed}: {share:.0%} {' '.join(kinds)}", kinds, share, seed)
        for seed, (kinds, share) in enumerate(listed)
    )


def for_sums(filling: Filling) -> Filling:
    """Return ``filling`` without the largest numbers, for operators that sum elements.

    The order of summation would decide the value of a sum of several of them. A filling of the
    largest numbers alone stays as it is.
    """
    kinds = tuple(kind for kind in filling.kinds if kind not in _HUGE)
    return replace(filling, kinds=kinds) if kinds else filling


FILLINGS = _fillings()
COTANGENT_FILLINGS = tuple(
    replace(f, label=f"{f.label} of the cotangents", cotangents=True)
    for f in FILLINGS
    if "ties" not in f.kinds and "steep" not in f.kinds
)


def special_values(dtype: torch.dtype, kind: str) -> tuple[float, ...]:
    """Return the special numbers of one ``kind`` in ``dtype``; none for bool and complex."""
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        tiny = limits.smallest_normal
        return {
            "nan": (float("nan"),),
            "inf": (_INFINITY,),
            "-inf": (-_INFINITY,),
            "zeros": (0.0, -0.0),
            "largest": (limits.max,),
            "lowest": (limits.min,),
            "tiny": (tiny, -tiny, tiny * limits.eps, -tiny * limits.eps, tiny / 4),
            "ties": _TIES,
            "steep": _STEEP,
        }.get(kind, ())
    if dtype == torch.bool or dtype.is_complex:
        return ()
    bounds = torch.iinfo(dtype)
    numbers = {
        "zeros": (0,),
        "largest": (bounds.max,),
        "lowest": (bounds.min,),
        "tiny": (1, -1),
        "ties": (-1, 1, 2, -2, 0, 3),
        "wide": _WIDE,
    }.get(kind, ())
    return tuple(n for n in numbers if bounds.min <= n <= bounds.max)


def strewn(tensor: torch.Tensor, filling: Filling, position: int) -> torch.Tensor | None:
    """Return a copy of ``tensor`` with special values in random places and the same strides.

    Return None if the dtype has no such values, the tensor is empty, or a stride is 0.
    """
    numbers = [n for kind in filling.kinds for n in special_values(tensor.dtype, kind)]
    if not numbers or not tensor.numel() or 0 in tensor.stride():
        return None
    generator = torch.Generator().manual_seed(100 * filling.seed + position)
    count = max(1, round(filling.share * tensor.numel()))
    places = torch.randperm(tensor.numel(), generator=generator)[:count]
    order = torch.randperm(len(numbers), generator=generator)
    values = torch.tensor(numbers, dtype=tensor.dtype)[order[torch.arange(count) % len(numbers)]]
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    flat[places] = values
    filled = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return filled.copy_(flat.reshape(tensor.shape))


def fillable(case: Case, dtype: torch.dtype) -> list[int]:
    """Return the indices of the tensors of ``case`` that may take any values.

    Any value fits floating-point tensors and tensors of ``dtype`` other than bool. Integers of
    another dtype are indices, lengths and the like.
    """
    return [
        place
        for place, tensor in enumerate(case.tensors)
        if tensor.is_floating_point() or (tensor.dtype == dtype and dtype != torch.bool)
    ]


def filled(case: Case, filling: Filling, places: Collection[int]) -> Case | None:
    """Return ``case`` with ``filling`` in the tensors at ``places``; None if none changes."""
    leaves, position, changed = list(case.leaves), 0, False
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        after = strewn(leaf, filling, position) if position in places else None
        if after is not None:
            leaves[index], changed = after, True
        position += 1
    return replace(case, leaves=tuple(leaves)) if changed else None
