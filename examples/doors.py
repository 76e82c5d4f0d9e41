"""The two entry points to compiled code, for scripts that can use either.

A *door* is ``"dispatch"`` (add_tvm_dispatch), ``"compile"`` or ``"compile in place"``
(torch.compile).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn

from tvmbridge import (
    CompileReport,
    DispatchReport,
    add_tvm_dispatch,
    compile_report,
    dispatch_report,
)

Report: TypeAlias = DispatchReport | CompileReport


def opened(model: nn.Module, door: str = "dispatch") -> Any:
    """Make ``model`` run compiled code, and return it.

    ``"compile"`` returns a wrapper of the model; ``"compile in place"`` and ``"dispatch"`` keep
    its class and signature.
    """
    if door == "compile":
        torch.compiler.reset()
        return torch.compile(model, backend="tvmbridge")
    if door == "compile in place":
        torch.compiler.reset()
        model.compile(backend="tvmbridge")
        return model
    return add_tvm_dispatch(model)


def served(model: nn.Module, door: str = "dispatch") -> Report:
    """Return the report of the calls so far."""
    return dispatch_report(model) if door == "dispatch" else compile_report()
