"""A module and a call of it, for which code is looked for instead of a capture."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tvmbridge.backends import is_on_host, resolve_target
from tvmbridge.cache import CacheKey
from tvmbridge.compiler.cached_build import CachedBuild
from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.compiler.packing import ModulePacks
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.torch_private import dispatch_mode_count, function_mode_count, pytree
from tvmbridge.recall.describe import Describer
from tvmbridge.recall.facts import Facts
from tvmbridge.recall.key import call_entry, functions_entry, module_entry, settings_entry

SWITCH = "TVMBRIDGE_RECALL"
_FORMAT = "2"


@dataclass(frozen=True, eq=False)
class Caller:
    """A module and a call of it, for which code is looked for or kept.

    - ``mode``: the mode of the call, and ``requires_grad`` of each tensor.
    - ``refusal``: why plans are not used for this module; None if they are.
    - ``target``, ``options``, ``packing``: as in :class:`CompileRequest`.
    - ``offer``: called with code from disk, its facts and :func:`structures_of`; or None.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mode: tuple[Any, ...]
    options: CompileOptions
    target: Any
    packing: ModulePacks
    refusal: str | None = None
    offer: Callable[[CompiledModule, Facts, str], None] | None = None

    @functools.cached_property
    def device(self) -> torch.device:
        """The device of the first tensor that is not in the host's memory; else the CPU."""
        tensors = itertools.chain(
            self.module.parameters(),
            self.module.buffers(),
            pytree.tree_leaves((self.args, dict(self.kwargs))),
        )
        devices = (t.device for t in tensors if isinstance(t, torch.Tensor))
        return next((each for each in devices if not is_on_host(each)), torch.device("cpu"))

    def build(self) -> CachedBuild:
        """Return what loads the code."""
        return CachedBuild(resolve_target(self.target, self.device), self.options, self.device)

    def unused(self) -> str | None:
        """Return why no plan is used; None if one may be, and "" if the option is off."""
        if not is_on(self.options):
            return ""
        if self.build().unused() is not None:
            return ""  # The report says why the cache is off.
        if self.refusal is not None:
            return self.refusal
        if self.options.extra_passes or self.options.fx_passes is not None:
            return "passes of the user"
        return self.refused()

    def refused(self) -> str | None:
        """Return why neither a plan nor code of an equal module is used; None if one may be."""
        if self.refusal is not None:
            return self.refusal
        if self.options.freeze:
            return "frozen weights"
        if dispatch_mode_count():
            return "a dispatch mode is active"
        return "a function mode is active" if function_mode_count() else None

    def key(self, describer: Describer) -> CacheKey:
        """Return the key of the plan.

        Raises:
            UndescribableError: something about the module or the call is no data.
        """
        entries = {**self.entries(describer, self.device), **functions_entry(describer)}
        return CacheKey({**entries, **self.build().key({}).entries})

    def entries(self, describer: Describer, device: torch.device | None) -> dict[str, str]:
        """Return the entries of the key that describe the module, the call and PyTorch's settings.

        Args:
            device: where tensors may be, beside the host's memory; None: anywhere.

        Raises:
            UndescribableError: something about the module or the call is no data, or a tensor is
                elsewhere.
        """
        leaves, structure = pytree.tree_flatten((self.args, dict(self.kwargs)))
        module, mode = self.module, self.mode
        return {
            "plan": _FORMAT,
            "module": module_entry(module, describer, device),
            "call": call_entry(module, leaves, structure, mode, describer, device),
            "all options": repr(self.options),
            **settings_entry(),
        }


def is_on(options: CompileOptions) -> bool:
    """Whether plans are kept and used, by the environment or else by the option ``recall``."""
    named = os.environ.get(SWITCH, "")
    return named not in ("0", "off", "false", "no") if named else options.recall
