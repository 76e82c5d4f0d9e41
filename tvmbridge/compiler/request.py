"""The request that a compilation answers: a module, the arguments of one call, and the options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from tvmbridge.compiler.packing import ModulePacks
from tvmbridge.core.autocast import Autocast
from tvmbridge.core.options import CompileOptions


@dataclass(frozen=True, eq=False)
class CompileRequest:
    """A module, the arguments of one call of it, and how it is compiled for them.

    - ``module``: in train or eval mode, as it is compiled.
    - ``args``, ``kwargs``: the arguments of forward.
    - ``needs_grad``: whether forward and backward are compiled, or forward alone.
    - ``options``: the options of the compilation.
    - ``target``: the TVM target, its name or its JSON dict; None: the target of the device.
    - ``packing``: the packs of the module, which may move parameters; None: no parameter moves.
    - ``apart``: whether a copy is traced, so that other threads may run the module meanwhile.
    - ``autocast``: the state of autocast under which forward is called.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    needs_grad: bool
    options: CompileOptions
    target: Any = None
    packing: ModulePacks | None = None
    apart: bool = True
    autocast: Autocast = ()
