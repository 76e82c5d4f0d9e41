"""Run compiled code, and find the operator whose compiled code departs."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import tvm
from tvm import relax

from tvmbridge.compiler.compiled import build_lowered
from tvmbridge.compiler.executable import LoadedModule
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.types import PassRecord
from tvmbridge.inspect.compare.interpreter import calls_of, operator_of, run_alone
from tvmbridge.inspect.compare.stages import Lowering
from tvmbridge.inspect.compare.trace import Trace, TraceStep, tensors_in
from tvmbridge.inspect.compare.verdict import Measure
from tvmbridge.passes.base import flat_results
from tvmbridge.pipeline import observed_passes
from tvmbridge.runtime.autograd import TrainingCall


class CompiledCode:
    """The compiled code of one precision.

    Args:
        lowering: the lowered module, which the constructor builds.

    Raises:
        BuildError: TVM cannot compile it.
    """

    def __init__(self, lowering: Lowering, options: CompileOptions) -> None:
        self._lowering = lowering
        self._fused: tvm.IRModule | None = None
        with observed_passes(self._keep):
            self._compiled = build_lowered(lowering.lowered, options, lowering.records)

    def _keep(self, record: PassRecord, before: tvm.IRModule, after: tvm.IRModule) -> None:
        if record.name == "FuseTIR":
            self._fused = after

    def run(self) -> Trace:
        """Run the code on the sample; the trace has only the results."""
        primals = [p.clone() for p in self._lowering.primals()]
        if self._compiled.split is None:
            found: list[Any] = self._compiled.forward(primals)
        else:
            found = self._train(TrainingCall(self._compiled), primals)
        trace = Trace()
        for value in found:
            if value is not None:
                trace.add(value, "compiled code")
        return self._lowering.with_results(trace, found)

    def _train(self, call: TrainingCall, primals: list[torch.Tensor]) -> list[Any]:
        for position in call.gradient_of:
            primals[position].requires_grad_()
        with torch.enable_grad():
            outputs = call(primals)
            flowing = [outputs[i] for i in call.parts.cotangent_of]
            wanted = [primals[i] for i in call.gradient_of]
            gradients = torch.autograd.grad(
                flowing, wanted, self._lowering.cotangents(), allow_unused=True
            )
        return [*outputs, *gradients]

    def departing(self, name: str, tolerance: float) -> TraceStep | None:
        """Return the first operator behind the result ``name`` whose compiled code departs.

        Each operator is compiled alone, and runs on the operands of the interpreted program. None:
        all operators alone are right, so that the fault is in fusion or in a schedule.
        """
        function, position = self._function_of(name)
        needed = _ancestors(self._lowering.lowered.mod[function], position)
        for var, step, departure in self._each_alone[function]:
            if var in needed and departure > tolerance:
                return step
        return None

    @cached_property
    def _each_alone(self) -> dict[str, list[tuple[relax.Var, TraceStep, float]]]:
        """For each function, the departure of each of its operators when it is compiled alone."""
        mod, loaded = self._lowering.lowered.mod, dict[int, LoadedModule]()
        found: dict[str, list[tuple[relax.Var, TraceStep, float]]] = {}
        for name, run in self._lowering.run_split(mod).items():
            for var, call in calls_of(mod[name]):
                values = tensors_in(run_alone(var, call, run.values, loaded))
                for expected, value in zip(tensors_in(run.values[var]), values, strict=True):
                    departure = Measure.of(expected, 0.0, 0.0).departure(value)
                    step = run.trace.steps[run.trace.number(expected) or 0]
                    found.setdefault(name, []).append((var, step, departure))
        return found

    def kernels(self, name: str) -> str:
        """Return the names of the kernels that the result ``name`` depends on, in order."""
        if self._fused is None:
            return ""
        function, position = self._function_of(name)
        needed = _ancestors(self._fused[function], position)
        calls = calls_of(self._fused[function])
        return ", ".join(dict.fromkeys(_kernel_of(call) for var, call in calls if var in needed))

    def _function_of(self, name: str) -> tuple[str, int]:
        outputs = self._lowering.output_names
        if name in outputs:
            return "forward", outputs.index(name)
        return "backward", self._lowering.gradient_names.index(name)


def _kernel_of(call: relax.Call) -> str:
    if getattr(call.op, "name", "") == "relax.call_tir":
        return str(call.args[0].name_hint)
    return operator_of(call)


def _ancestors(function: relax.Function, position: int) -> set[relax.Var]:
    """Return the variables that the result at ``position`` depends on."""
    bindings = [b for block in function.body.blocks for b in block.bindings]
    found = set(relax.analysis.free_vars(flat_results(function)[position]))
    for binding in reversed(bindings):
        if binding.var in found:
            found.update(relax.analysis.free_vars(binding.value))
    return found
