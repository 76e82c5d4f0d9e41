"""Modules and tensors that are split over ranks.

``fully_shard`` gives a module a generated class and replaces its parameters with DTensors. A hook
gathers the parameters before forward, so forward sees plain parameters of full size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# The class of the older wrapper; its own name is compared, since importing it takes a second.
_FLATTENING = "FullyShardedDataParallel"


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to ``module`` itself."""
    # No module can be sharded unless this is imported. Importing it takes a second.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def class_before(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module`` without ``fully_shard``."""
    kind = type(module)
    if not is_sharded(module):
        return kind
    # The generated class inherits from FSDPModule, then from the class that was given.
    mro = kind.__mro__
    return mro[mro.index(sys.modules["torch.distributed.fsdp"].FSDPModule) + 1]


def sharded_within(module: nn.Module) -> str | None:
    """Return the name of a submodule that ``fully_shard`` was applied to; None if there is none."""
    return next((n for n, m in module.named_modules() if n and is_sharded(m)), None)


def is_flattened(module: nn.Module) -> bool:
    """Whether ``FullyShardedDataParallel`` wraps a part of ``module``, or the module itself.

    Around the module, it replaces parameters by attributes that are views of one flat parameter.
    """
    return any(
        any(c.__name__ == _FLATTENING for c in type(m).__mro__)
        or any(_is_of_flat(v) for v in vars(m).values())
        for m in module.modules()
    )


def is_distributed(value: object) -> bool:
    """Whether ``value`` is a DTensor, a tensor of which each rank has a part."""
    # Importing the class takes a second.
    return type(value).__name__ == "DTensor" and isinstance(value, torch.Tensor)


def _is_of_flat(held: object) -> bool:
    return isinstance(held, torch.Tensor) and hasattr(held._base, "_is_flat_param")


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Gather the parameters of a sharded module within this context; all ranks enter it together.

    A module that is not sharded is left unchanged.
    """
    if not is_sharded(module):
        yield
        return
    module.unshard()  # type: ignore[operator]
    try:
        yield
    finally:
        module.reshard()  # type: ignore[operator]
