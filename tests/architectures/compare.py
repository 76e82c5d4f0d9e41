"""Compare results leaf by leaf, without the pytree functions that tvmbridge itself uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The largest error allowed, as the sum of three terms.

    - ``relative``: a factor of the largest absolute value of the tensor.
    - ``common``: a factor of the largest absolute value of all compared tensors, for gradients
      that are zero by cancellation and have rounding errors only.
    - ``absolute``: added as it is.
    """

    relative: float
    common: float
    absolute: float = 0.0

    def of(self, reference: torch.Tensor, largest: float) -> float:
        """Return the largest error allowed in ``reference``; ``largest`` is over all tensors."""
        return self.relative * magnitude(reference) + self.common * largest + self.absolute


# Tolerances by dtype; float64 shows mistakes that float32's rounding could hide.
TOLERANCES = {
    torch.float32: Tolerance(relative=2e-4, common=2e-5),
    torch.float64: Tolerance(relative=1e-9, common=1e-10),
}


def magnitude(tensor: torch.Tensor) -> float:
    """Return the largest finite absolute value; 0 for an empty tensor."""
    finite = tensor.detach()[tensor.detach().isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(path, leaf)`` for all leaves of containers, and of objects by their attributes.

    The type of each container or object is a leaf of its own.
    """
    if value is None or isinstance(value, torch.Tensor | bool | int | float | str | type):
        yield path, value
        return
    if isinstance(value, torch.dtype | torch.device | torch.Size):
        yield path, str(value)
        return
    yield f"{path}:type", type(value)
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, Sequence):
        items = enumerate(value)
    else:
        items = vars(value).items()
    for key, item in items:
        yield from leaves(item, f"{path}.{key}")


def difference(ours: Any, theirs: Any, tolerance: Tolerance) -> str | None:
    """Describe how ``ours`` differs in structure, types or values; None if it agrees."""
    left, right = list(leaves(ours)), list(leaves(theirs))
    for (path, a), (other, b) in zip(left, right, strict=False):
        if path != other:
            return f"{path} instead of {other}"
        if type(a) is not type(b):
            return f"{path} is a {type(a).__name__} instead of a {type(b).__name__}"
    if len(left) != len(right):
        return f"{len(left)} leaves instead of {len(right)}"
    tensors = [b for _, b in right if isinstance(b, torch.Tensor) and b.is_floating_point()]
    largest = max((magnitude(t) for t in tensors), default=0.0)
    for (path, a), (_, b) in zip(left, right, strict=True):
        found = _of_leaf(a, b, tolerance, largest)
        if found:
            return f"{path}: {found}"
    return None


def _of_leaf(a: Any, b: Any, tolerance: Tolerance, largest: float) -> str | None:
    if not isinstance(b, torch.Tensor):
        return None if a == b or a != a else f"{a!r} instead of {b!r}"
    if (a.shape, a.dtype, a.requires_grad) != (b.shape, b.dtype, b.requires_grad):
        return (
            f"{tuple(a.shape)} {a.dtype} requires_grad={a.requires_grad} instead of "
            f"{tuple(b.shape)} {b.dtype} requires_grad={b.requires_grad}"
        )
    if not b.is_floating_point():
        return None if torch.equal(a, b) else f"{int((a != b).sum())} of {a.numel()} differ"
    for test in (torch.isnan, torch.isposinf, torch.isneginf):
        if not torch.equal(test(a), test(b)):
            return "NaN or infinity in other places"
    finite = b.isfinite()
    if not bool(finite.any()):
        return None
    error = float((a[finite].detach().double() - b[finite].detach().double()).abs().max())
    bound = tolerance.of(b, largest)
    return None if error <= bound else f"error {error:.2e} above {bound:.2e}"
