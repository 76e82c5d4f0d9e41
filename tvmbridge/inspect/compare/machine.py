"""The compiled code: what it computes, and which of its operators departs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import tvm
from tvm import relax

from tvmbridge.compiler.build import build
from tvmbridge.compiler.compiled import build_lowered
from tvmbridge.compiler.executable import LoadedModule
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.types import PassRecord
from tvmbridge.inspect.compare.evaluate import operator_of
from tvmbridge.inspect.compare.route import Route
from tvmbridge.inspect.compare.trace import Step, Trace, TraceBuilder
from tvmbridge.passes.base import flat_results
from tvmbridge.pipeline import observed_passes
from tvmbridge.runtime.autograd import TrainingCall


class CompiledCode:
    """The compiled code of one precision.

    Args:
        route: what is to be built; it is built now.

    Raises:
        BuildError: TVM cannot compile it.
    """

    def __init__(self, route: Route, options: CompileOptions) -> None:
        self.route = route
        self._fused: tvm.IRModule | None = None
        with observed_passes(self._keep):
            self.compiled = build_lowered(route.lowered, options, route.records)
        # For each function the steps of the interpretation and what compiled code makes there.
        self._values: dict[str, list[tuple[relax.Var, Step, torch.Tensor]]] = {}

    def _keep(self, record: PassRecord, before: tvm.IRModule, after: tvm.IRModule) -> None:
        if record.name == "FuseTIR":
            self._fused = after

    def trace(self) -> Trace:
        """Run it on the sample; the trace has the results alone."""
        route, compiled = self.route, self.compiled
        builder = TraceBuilder()
        primals = [p.clone() for p in route.primals()]
        if compiled.split is None:
            outputs = compiled.forward(primals)
            gradients: Sequence[Any] = ()
        else:
            outputs, gradients = self._train(TrainingCall(compiled), primals)
        names = [*route.result_names(), *route.gradient_names()]
        for name, value in zip(names, [*outputs, *gradients], strict=True):
            if value is not None:
                number = builder.computed(name, "compiled code", "", (), value.detach().clone())
                builder.results[name] = number
        route.add_returned_inputs(builder)
        return builder.build()

    def _train(self, call: TrainingCall, primals: list[torch.Tensor]) -> tuple[Any, Any]:
        for position in call.gradient_of:
            primals[position].requires_grad_()
        with torch.enable_grad():
            outputs = call(primals)
            flowing = [outputs[i] for i in call.parts.cotangent_of]
            wanted = [primals[i] for i in call.gradient_of]
            gradients = torch.autograd.grad(
                flowing, wanted, self.route.cotangents(), allow_unused=True
            )
        return outputs, gradients

    def departing(self, name: str, tolerance: float) -> Step | None:
        """The operator whose compiled code departs for result ``name``.

        The functions are compiled once more so that they return every value; the operands of
        backward are those of the interpreted program. None: it is right operator by operator, so
        the fault lies in how operators were fused or scheduled.
        """
        function, position = self._function_of(name)
        mod = self.route.lowered.mod
        if function not in self._values:
            self._values[function] = _compiled_values(self.route, mod, function)
        needed = _ancestors(mod[function], position)
        for var, step, value in self._values[function]:
            if var in needed and not _close(value, step.value, tolerance):
                return step
        return None

    def kernels(self, name: str) -> str:
        """The kernels that lead to result ``name``, in order."""
        return ", ".join(self._kernels(*self._function_of(name)))

    def _function_of(self, name: str) -> tuple[str, int]:
        outputs = self.route.result_names()
        if name in outputs:
            return "forward", outputs.index(name)
        return "backward", self.route.gradient_names().index(name)

    def _kernels(self, function: str, position: int) -> list[str]:
        """The kernels that lead to a result, in order."""
        if self._fused is None:
            return []
        mod = self._fused
        needed = _ancestors(mod[function], position)
        found: dict[str, None] = {}
        for block in mod[function].body.blocks:
            for binding in block.bindings:
                if binding.var in needed and isinstance(binding.value, relax.Call):
                    found[_kernel_of(binding.value)] = None
        return list(found)


def _kernel_of(call: relax.Call) -> str:
    if getattr(call.op, "name", "") == "relax.call_tir":
        return str(call.args[0].name_hint)
    return operator_of(call)


def _ancestors(function: relax.Function, position: int) -> set[relax.Var]:
    """The variables that a result depends on."""
    bound = {b.var: b.value for block in function.body.blocks for b in block.bindings}
    pending = [v for v in [flat_results(function)[position]] if isinstance(v, relax.Var)]
    found = set(pending)
    while pending:
        value = bound.get(pending.pop())
        if value is None:
            continue
        for var in relax.analysis.free_vars(value):
            if var not in found:
                found.add(var)
                pending.append(var)
    return found


def _compiled_values(
    route: Route, mod: tvm.IRModule, name: str
) -> list[tuple[relax.Var, Step, torch.Tensor]]:
    """Each value of function ``name`` as interpreted, and as code that returns them all has it."""
    functions = {g.name_hint: f for g, f in mod.functions_items()}
    forward, backward = route.run_split(functions)
    run = forward if name == "forward" or backward is None else backward
    spelled, variables = _spelled_out(functions[name])
    built = build(
        tvm.IRModule({"forward": spelled.with_attr("global_symbol", "forward")}),
        route.lowered.target,
        [],
    )
    loaded = LoadedModule(built.machine, built.unaligned)
    values = loaded.run("forward", run.arguments)
    return [
        (var, run.step(var), value.clone()) for var, value in zip(variables, values, strict=True)
    ]


def _close(value: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    if not expected.numel():
        return True
    bound = tolerance * float(expected.double().abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(value.double(), expected.double(), rtol=0.0, atol=bound, equal_nan=True)


def _spelled_out(function: relax.Function) -> tuple[relax.Function, list[relax.Var]]:
    """The same function with every tensor that it computes as a result, and their variables."""
    bindings = [b for block in function.body.blocks for b in block.bindings]
    computed = [
        b.var
        for b in bindings
        if isinstance(b.value, relax.Call) and isinstance(b.var.ty, relax.TensorType)
    ]
    builder = relax.BlockBuilder()
    with builder.function("forward", list(function.params)):
        with builder.dataflow():
            for binding in bindings:
                builder.emit_normalized(binding)
            output = builder.emit_output(relax.Tuple(computed))
        builder.emit_func_output(output)
    return builder.get()["forward"], computed
