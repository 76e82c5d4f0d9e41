"""Modules that ``torch.distributed.fsdp.fully_shard`` has divided over ranks.

``fully_shard`` gives a module a class of its own, replaces its parameters by DTensors, and gathers
them by a hook before forward: within forward they are plain parameters of full size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to ``module`` itself."""
    # Nothing can be sharded before this is imported, which takes a second.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def class_before(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module`` without ``fully_shard``."""
    kind = type(module)
    if not is_sharded(module):
        return kind
    # As FSDPModule itself finds it: the generated class, FSDPModule, the class that was given.
    return kind.__mro__[getattr(kind, "_orig_cls_mro_index", 2)]


def sharded_within(module: nn.Module) -> str | None:
    """Return the name of a submodule that ``fully_shard`` was applied to; None if there is none."""
    return next((n for n, m in module.named_modules() if n and is_sharded(m)), None)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Gather the parameters of a sharded module within this context; all ranks enter it together.

    Other modules are left as they are.
    """
    if not is_sharded(module):
        yield
        return
    module.unshard()  # type: ignore[operator]
    try:
        yield
    finally:
        module.reshard()  # type: ignore[operator]
