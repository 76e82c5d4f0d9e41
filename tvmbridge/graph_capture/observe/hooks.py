"""Hooks of submodules: forward hooks are traced as code of forward, others are refused.

Compiled code does not call submodules. What a hook on a call computes is in the captured graph,
and the hook must be the same one at a call.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from tvmbridge.core.libraries import acts

_TRACED = ("_forward_hooks", "_forward_pre_hooks")
HOOKS = (*_TRACED, "_backward_hooks", "_backward_pre_hooks")
# Of every module in the process; the dispatched module's own call runs them, but its submodules
# are not called.
GLOBAL_HOOKS = tuple(getattr(nn_module, f"_global{name}") for name in HOOKS)
# They are traced, and guarded where they are known (trace/old_norms.py).
_OLD_NORMS = (WeightNorm, SpectralNorm)
# A function, and how it is called.
TracedHook: TypeAlias = tuple[types.FunctionType, str]


def hooked_submodule(module: nn.Module) -> str | None:
    """The name of a submodule with hooks that cannot be traced and act; None: none has such."""
    for name, child in module.named_modules():
        if child is module:
            continue
        tables = [*(child.__dict__.get(held, {}) for held in HOOKS), *GLOBAL_HOOKS]
        hooks = [h for table in tables for h in table.values() if not isinstance(h, _OLD_NORMS)]
        traced = {id(hook) for hook, _ in traced_hooks(child)}
        others = [h for h in hooks if id(h) not in traced]
        if others and acts(others):
            return name
    return None


def traced_hooks(module: nn.Module) -> list[TracedHook]:
    """The forward hooks of a submodule that are plain functions: as good as lines of forward."""
    held: Mapping[str, Any] = module.__dict__
    always = held.get("_forward_hooks_always_called", ())
    return [
        (hook, f"{table} {key in held.get(table + '_with_kwargs', ())}")
        for table in _TRACED
        for key, hook in held.get(table, {}).items()
        if isinstance(hook, types.FunctionType) and key not in always and acts([hook])
    ]
