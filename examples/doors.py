"""The two doors to compiled code, for scripts that may take either."""

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
    """``model``, which runs on compiled code: dispatched, or by torch.compile.

    ``"compile"`` wraps the model, ``"compile in place"`` keeps its class and signature.
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
    """What was served of the calls so far."""
    return dispatch_report(model) if door == "dispatch" else compile_report()
