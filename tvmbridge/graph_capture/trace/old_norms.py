"""``torch.nn.utils.weight_norm`` and ``spectral_norm``, whose hooks compute a weight at each call.

The weight is a plain attribute of a submodule, and the submodule's pre-forward hook assigns it. The
trace contains the computation of the weight. Compiled code does not return the weight: after a
call, the hook's own function computes the attribute again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.torch_private import storage_key

OldNorm = WeightNorm | SpectralNorm


def normed_weights(module: nn.Module) -> dict[str, tuple[nn.Module, OldNorm]]:
    """Return the weights that hooks of submodules compute: dotted name to (submodule, hook)."""
    found: dict[str, tuple[nn.Module, OldNorm]] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for hook in owner._forward_pre_hooks.values() if path else ():
            if type(hook) in (WeightNorm, SpectralNorm):
                found[f"{path}.{hook.name}"] = owner, hook
    return found


@dataclass(frozen=True)
class _Norm:
    """A weight or spectral norm at the time of the capture.

    - ``owner``: the submodule with the weight
    - ``hook``: the pre-forward hook
    - ``settings``: the attributes of the hook
    - ``renewed``: whether forward runs the hook, so that each call must compute the weight again
    """

    owner: nn.Module
    hook: OldNorm
    settings: Mapping[str, Any]
    renewed: bool


class OldNorms:
    """The weight and spectral norms in a dispatched module, which the captured graph contains."""

    def __init__(self, norms: Iterable[_Norm]) -> None:
        self._norms = tuple(norms)

    @classmethod
    def of(cls, module: nn.Module, renewed: Collection[str]) -> OldNorms:
        """Return the norms in ``module``; ``renewed`` names the weights that forward computes."""
        weights = normed_weights(module)
        made = {id(weights[name][1]) for name in renewed}
        found = {id(hook): (owner, hook) for owner, hook in weights.values()}
        return cls(
            _Norm(owner, hook, dict(vars(hook)), key in made)
            for key, (owner, hook) in found.items()
        )

    def __bool__(self) -> bool:
        return bool(self._norms)

    def rebound(self, memo: Mapping[int, Any]) -> OldNorms:
        """Return the norms of a deep copy of the module, found through the copy's ``memo``."""
        return OldNorms(
            _Norm(memo[id(n.owner)], memo[id(n.hook)], n.settings, n.renewed) for n in self._norms
        )

    def others(self, hooks: Iterable[Any]) -> list[Any]:
        """Return the ``hooks`` that are no hooks of these norms."""
        return [hook for hook in hooks if not any(hook is n.hook for n in self._norms)]

    def changed(self) -> Reason | None:
        """Return why the captured graph does not fit the current norms; None if it does."""
        for norm in self._norms:
            if not any(norm.hook is hook for hook in norm.owner._forward_pre_hooks.values()):
                return Reason(Kind.NORM_REMOVED)
            if vars(norm.hook) != norm.settings:
                return Reason(Kind.CHANGED, "a setting of a norm of weights")
        return None

    def renew(self) -> None:
        """Compute the weights again, as each hook does, but without another power iteration."""
        for norm in self._norms:
            if not norm.renewed:
                continue
            if isinstance(norm.hook, SpectralNorm):
                weight = norm.hook.compute_weight(norm.owner, do_power_iteration=False)
            else:
                weight = norm.hook.compute_weight(norm.owner)
            setattr(norm.owner, norm.hook.name, weight)


def shared_with(names: Collection[str], module: nn.Module, outputs: Collection[Any]) -> str | None:
    """Return the first weight of ``names`` that shares memory with an output, or None."""
    made = {name: getattr(*_place(module, name)) for name in names}
    storages = {storage_key(t): name for name, t in made.items() if isinstance(t, torch.Tensor)}
    for output in outputs:
        if isinstance(output, torch.Tensor) and output.layout is torch.strided:
            name = storages.get(storage_key(output))
            if name is not None:
                return name
    return None


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


@contextmanager
def norms_put_back(module: nn.Module) -> Iterator[None]:
    """On exit, restore the weights in ``module``: torch.export refuses reassigned attributes."""
    places = [(owner.__dict__, hook.name) for owner, hook in normed_weights(module).values()]
    before = [held.get(name) for held, name in places]
    yield
    for (held, name), weight in zip(places, before, strict=True):
        held[name] = weight
