"""Share the results of fake kernels between the traces of a module.

PyTorch keeps the shapes and strides of fake results in a cache of the process. Its keys differ
between a run that is traced and a run that is not, and between fake modes with different settings.
So each trace of a forward computes each result again, most of them through decompositions into a
dozen operators. The keys here have the operator and its operands alone::

    observed: addmm(b[16], x[4, 8], w[8, 16])    computed
    exported: addmm(b[16], x[4, 8], w[8, 16])    found
    replayed: addmm(b[16], x[4, 8], w[8, 16])    found

A call with a symbol, a sparse tensor, a constant, an object or no tensor among its arguments has
PyTorch's own key. PyTorch caches no result that depends on values, and no operator of another
library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tvmbridge.calls.patches import patched_here
from tvmbridge.core.torch_private import FakeTensor, FakeTensorMode

_PLAIN = frozenset(
    {
        bool,
        complex,
        float,
        int,
        str,
        type(None),
        torch.device,
        torch.dtype,
        torch.layout,
        torch.memory_format,
    }
)
_SEQUENCES = frozenset({list, tuple, torch.Size})


# The devices whose autocast may change the dtype in which a composite operator computes.
_AUTOCAST = ("cpu", "cuda")
# The method of a fake mode that returns the key of a call.
_KEY = "_cache_key"


class _SharedKey(tuple[Any, ...]):
    """A key without symbols, in PyTorch's cache of fake results."""

    __slots__ = ()

    def strip_shape_env(self) -> None:
        """Do nothing: the key has no symbols."""


@contextmanager
def results_shared() -> Iterator[None]:
    """Share fake results within the context, if PyTorch has a method for the keys."""
    if not hasattr(FakeTensorMode, _KEY):
        yield
        return
    with patched_here(FakeTensorMode, _KEY, _shared_key):
        yield


def _shared_key(genuine: Callable[..., Any], mode: FakeTensorMode, *call: Any) -> Any:
    """Return the key of a call in PyTorch's cache; the one of ``genuine`` if it has symbols."""
    if len(call) != 4:  # another release's: the state of the cache, operator, args, kwargs
        return genuine(mode, *call)
    _, func, args, kwargs = call
    found = [
        func,
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        *map(torch.is_autocast_enabled, _AUTOCAST),
        *map(torch.get_autocast_dtype, _AUTOCAST),
    ]
    tensors = _describe(mode, (args, [*kwargs.values()]), found)
    return _SharedKey((*found, *kwargs)) if tensors else genuine(mode, *call)


def _describe(mode: FakeTensorMode, values: Iterable[Any], found: list[Any]) -> int | None:
    """Add to ``found`` what a result depends on, and return the number of tensors.

    None if the result may depend on more.
    """
    tensors = 0
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            found += kind, value
        elif kind in _SEQUENCES:
            found += kind, len(value)
            further = _describe(mode, value, found)
            if further is None:
                return None
            tensors += further
        elif isinstance(value, FakeTensor):
            if value.fake_mode is not mode or value.constant is not None:
                return None
            if value.layout is not torch.strided:
                return None
            size = value.untyped_storage().nbytes()
            numbers = *value.shape, *value.stride(), value.storage_offset(), size
            if not all(type(n) is int for n in numbers):
                return None
            tensors += 1
            found += (
                numbers,
                value.dtype,
                value.fake_device,
                value.requires_grad,
                value.is_inference(),
                value.is_conj(),
                value.is_neg(),
                value.is_quantized,
            )
        else:
            return None
    return tensors
