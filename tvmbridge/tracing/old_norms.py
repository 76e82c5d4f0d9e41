"""``torch.nn.utils.weight_norm`` and ``spectral_norm``: hooks that make a weight at each call.

The weight is a plain attribute, which the hook of a submodule exchanges before its forward. In a
trace it is a value like others. Compiled code does not return it: after a call the attribute is
made once more of what it is made of, by the hook's own function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

OldNorm = WeightNorm | SpectralNorm
OLD_NORMS = (WeightNorm, SpectralNorm)


def normed_weights(module: nn.Module) -> dict[str, tuple[nn.Module, OldNorm]]:
    """The weights that hooks of submodules make, by dotted name, with owner and hook."""
    found: dict[str, tuple[nn.Module, OldNorm]] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for hook in owner._forward_pre_hooks.values() if path else ():
            if type(hook) in OLD_NORMS:
                found[f"{path}.{hook.name}"] = owner, hook
    return found


def renew(owner: nn.Module, hook: OldNorm) -> None:
    """Make the weight again, as the last call of ``hook`` has made it."""
    if isinstance(hook, SpectralNorm):
        weight = hook.compute_weight(owner, do_power_iteration=False)
    else:
        weight = hook.compute_weight(owner)
    setattr(owner, hook.name, weight)


def shared_with(names: Collection[str], module: nn.Module, outputs: Collection[Any]) -> str | None:
    """The name of a weight of ``names`` that one of ``outputs`` shares memory with."""
    made = {name: getattr(*_place(module, name)) for name in names}
    storages = {
        t.untyped_storage()._cdata: name for name, t in made.items() if isinstance(t, torch.Tensor)
    }
    for output in outputs:
        if isinstance(output, torch.Tensor) and output.layout is torch.strided:
            name = storages.get(output.untyped_storage()._cdata)
            if name is not None:
                return name
    return None


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


class NormsPutBack:
    """A forward after which ``module`` holds the weights that it held before.

    torch.export refuses attributes that are exchanged.
    """

    def __init__(self, module: nn.Module) -> None:
        self._forward: Callable[..., Any] = module.forward
        self._places = [(owner, h.name) for owner, h in normed_weights(module).values()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = [owner.__dict__.get(name) for owner, name in self._places]
        results = self._forward(*args, **kwargs)
        for (owner, name), weight in zip(self._places, before, strict=True):
            owner.__dict__[name] = weight
        return results
