"""The Relax functions of a module after all graph passes, as text."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from tvm import relax

from tvmbridge.compiler.lowering import lower_module
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.core.options import CompileOptions


def lowered_text(
    module: nn.Module, args: tuple[Any, ...], options: CompileOptions
) -> dict[str, str]:
    """Return the text of each Relax function, by name."""
    needs_grad = torch.is_grad_enabled()
    request = CompileRequest(module, args, {}, needs_grad=needs_grad, options=options)
    mod = lower_module(request, records=[], measure=lambda _: nullcontext()).mod
    functions = mod.functions_items()
    return {v.name_hint: f.script() for v, f in functions if isinstance(f, relax.Function)}
