"""Hooks of submodules: forward hooks are traced like code of forward, other hooks are refused.

Compiled code does not call submodules, so it does not call their hooks either. The captured graph
has the computation of a traced hook, and a guard checks that the hook is still the same.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from tvmbridge.core.libraries import acts

_TRACED = ("_forward_hooks", "_forward_pre_hooks")
HOOKS = (*_TRACED, "_backward_hooks", "_backward_pre_hooks")
# Hooks of all modules in the process. A call of the dispatched module still runs them, but compiled
# code calls no submodules.
GLOBAL_HOOK_DICTS = tuple(f"_global{name}" for name in HOOKS)
GLOBAL_HOOKS = tuple(getattr(nn_module, name) for name in GLOBAL_HOOK_DICTS)
# trace/old_norms.py traces and guards these hooks.
_OLD_NORMS = (WeightNorm, SpectralNorm)
# A hook, and a text of its kind and of whether it gets keyword arguments.
TracedHook: TypeAlias = tuple[Callable[..., Any], str]


def hooked_submodule(module: nn.Module) -> str | None:
    """Return the name of the first submodule with an active hook that cannot be traced, or None."""
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
    """Return the forward hooks of a submodule that can be traced: plain functions, and pruning."""
    held: Mapping[str, Any] = module.__dict__
    always = held.get("_forward_hooks_always_called", ())
    return [
        (hook, f"{table} {key in held.get(table + '_with_kwargs', ())}")
        for table in _TRACED
        for key, hook in held.get(table, {}).items()
        if _is_plain(hook) and key not in always and acts([hook])
    ]


def _is_plain(hook: Any) -> bool:
    """Whether ``hook`` is a plain function, or a hook of PyTorch that multiplies by a mask."""
    if isinstance(hook, types.FunctionType):
        return True
    return isinstance(hook, BasePruningMethod) and all(
        getattr(type(hook), name) is getattr(BasePruningMethod, name)
        for name in ("__call__", "apply_mask")
    )
