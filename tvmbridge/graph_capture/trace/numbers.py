"""Python scalars out of the range of a dtype, for which some ATen kernels raise.

``torch.add(x, y, alpha=1e40)`` raises for float32, where ``x * 1e40`` is an infinity. Fake kernels
do not check, so while a module is traced such a call is tried on zeros.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import disable_current_modes, pytree

_NUMBERS = frozenset((int, float))
_REFUSED = "without overflow"
# A try would draw.
_DRAWS = frozenset(
    {
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "normal",
        "normal_",
        "random_",
        "randint_like",
        "uniform_",
    }
)


def refuse_out_of_range(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call that eager PyTorch refuses for a number beyond the range of its dtype.

    Raises:
        UnsupportedOperatorError: it is such a call.
    """
    # Every function that forward calls comes here: a loop takes half of a generator's time.
    for value in (*args, *kwargs.values()):
        if type(value) in _NUMBERS and _is_large(value):
            if getattr(func, "__name__", "") not in _DRAWS:
                _try_on_zeros(func, args, kwargs)
            return


def _is_large(value: Any) -> bool:
    """Whether a number may be beyond the range of some dtype."""
    return type(value) in _NUMBERS and abs(value) > 127 and math.isfinite(value)


def _try_on_zeros(func: Any, args: Any, named: dict[str, Any]) -> None:
    leaves, structure = pytree.tree_flatten((args, named))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    numbers = [leaf for leaf in leaves if _is_large(leaf)]
    if not any(_exceeds(number, tensor.dtype) for number in numbers for tensor in tensors):
        return
    with disable_current_modes(), torch.no_grad():
        zeros = [
            torch.zeros(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        positional, by_name = pytree.tree_unflatten(zeros, structure)
        try:
            func(*positional, **by_name)
        except Exception as error:
            if _REFUSED in str(error):
                raise UnsupportedOperatorError(
                    f"forward calls {getattr(func, '__name__', func)} with {numbers[0]}, which "
                    f"eager PyTorch refuses: {error}"
                ) from error


def _exceeds(number: int | float, dtype: torch.dtype) -> bool:
    """Whether ``number`` is beyond the range of ``dtype``."""
    if dtype.is_complex or dtype is torch.bool:
        return False
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return not limits.min <= number <= limits.max
