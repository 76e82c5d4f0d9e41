"""Hooks of submodules, which compiled code would not run, since it does not call submodules."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from tvmbridge.core.libraries import acts

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
# Of every module in the process; the dispatched module's own call runs them, but its submodules
# are not called.
GLOBAL_HOOKS = tuple(getattr(nn_module, f"_global{name}") for name in HOOKS)
# They are traced, and guarded where they are known (trace/old_norms.py).
_OLD_NORMS = (WeightNorm, SpectralNorm)


def hooked_submodule(module: nn.Module) -> str | None:
    """The name of a submodule whose hooks act when it is called; None: none has such."""
    children = [(name, child) for name, child in module.named_modules() if child is not module]
    for name, child in children:
        tables = (*(child.__dict__.get(held, {}) for held in HOOKS), *GLOBAL_HOOKS)
        hooks = [h for table in tables for h in table.values() if not isinstance(h, _OLD_NORMS)]
        if hooks and acts(hooks):
            return name
    return None
