"""Share the results of fake kernels between the traces of a module.

PyTorch keeps the shapes and strides of fake results in a cache of the process. Its keys differ
between a run that is traced and a run that is not, and between fake modes with different settings.
So each trace of a forward computes each result again, most of them through decompositions into a
dozen operators. The keys here have the operator and its operands alone::

    observed: addmm(b[16], x[4, 8], w[8, 16])    computed
    exported: addmm(b[16], x[4, 8], w[8, 16])    found
    replayed: addmm(b[16], x[4, 8], w[8, 16])    found

A call with a symbol, a sparse tensor, a constant or an object among its arguments has PyTorch's own
key. PyTorch caches no result that depends on values, and no operator of other libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tvmbridge.core.torch_private import FakeTensor, FakeTensorMode, default_device_of_calls

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


class _SharedKey(tuple[Any, ...]):
    """A key without symbols, in PyTorch's cache of fake results."""

    __slots__ = ()

    def strip_shape_env(self) -> None:
        """Do nothing: the key has no symbols."""


def shared_key(
    genuine: Callable[..., Any],
    mode: FakeTensorMode,
    state: Any,
    func: Any,
    args: Iterable[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Return the key of a call in PyTorch's cache; the one of ``genuine`` if it has symbols."""
    found = [
        func,
        torch.get_default_dtype(),
        default_device_of_calls(),
        torch.is_inference_mode_enabled(),
    ]
    if not (_describe(mode, args, found) and _describe(mode, kwargs.values(), found)):
        return genuine(mode, state, func, args, kwargs)
    return _SharedKey((*found, *kwargs))


def _describe(mode: FakeTensorMode, values: Iterable[Any], found: list[Any]) -> bool:
    """Add to ``found`` what a result depends on; return False if it may depend on more."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            found += kind, value
        elif kind in _SEQUENCES:
            found += kind, len(value)
            if not _describe(mode, value, found):
                return False
        elif isinstance(value, FakeTensor):
            if value.fake_mode is not mode or value.constant is not None:
                return False
            if value._has_symbolic_sizes_strides or value.layout is not torch.strided:
                return False
            found += (
                value.shape,
                value.stride(),
                value.dtype,
                value.fake_device,
                value.storage_offset(),
                value.untyped_storage().nbytes(),
                value.requires_grad,
                value.is_inference(),
                value.is_conj(),
                value.is_neg(),
                value.is_quantized,
            )
        else:
            return False
    return True
