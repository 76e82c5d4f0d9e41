"""Measure each operator of a graph alone, in PyTorch's kernel if there is one, otherwise TVM's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import tvm
from tvm import relax

from tvmbridge.core.errors import BridgeError
from tvmbridge.inspect.compare.interpreter import RelaxRun, calls_of
from tvmbridge.kernels.dtypes import from_relax_dtype
from tvmbridge.passes.base import dtype_of, shape_of

_ROUNDS = 3


def seconds_alone(graph: tvm.IRModule | relax.Function) -> dict[relax.Var, float]:
    """Return, for each call, the shortest time of a few runs on invented inputs, in seconds.

    In compiled code operators are fused, so that the sum of these times exceeds a call's time.

    Raises:
        BridgeError: a function cannot be evaluated.
    """
    functions = [graph] if isinstance(graph, relax.Function) else graph.functions.values()
    found: dict[relax.Var, float] = {}
    for function in functions:
        if not isinstance(function, relax.Function):
            continue
        arguments = [_made_up(p) for p in function.params]
        try:
            found |= _TimedRun(function, arguments, _masks(function)).seconds
        except Exception as error:
            raise BridgeError(f"the graph cannot be measured: {error}") from error
    return found


class _TimedRun(RelaxRun):
    """A run of a Relax function that records the time of each call."""

    def __init__(
        self,
        function: relax.Function,
        arguments: Sequence[torch.Tensor],
        masks: Sequence[torch.Tensor],
    ) -> None:
        self.seconds: dict[relax.Var, float] = {}
        super().__init__(function, arguments, masks)

    def _call(self, var: relax.Var, call: relax.Call, operands: list[Any]) -> Any:
        rounds = 1 if _is_dropout(call) else _ROUNDS  # each run of a dropout consumes a mask
        taken = []
        for _ in range(rounds):
            start = time.perf_counter()
            value = super()._call(var, call, operands)
            taken.append(time.perf_counter() - start)
        self.seconds[var] = min(taken)
        return value


def _is_dropout(call: relax.Call) -> bool:
    return getattr(call.op, "name", "") == "relax.nn.dropout"


def _masks(function: relax.Function) -> list[torch.Tensor]:
    calls = [call for _, call in calls_of(function) if _is_dropout(call)]
    return [torch.ones(shape_of(call.args[0]) or (), dtype=torch.bool) for call in calls]


def _made_up(param: relax.Var) -> torch.Tensor:
    """Return invented values for a parameter: random floats, but zeros for possible indices."""
    shape, dtype = shape_of(param) or (), from_relax_dtype(dtype_of(param))
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    return torch.rand(shape, dtype=torch.float32).to(dtype)
