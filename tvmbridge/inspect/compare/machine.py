"""The compiled code: what it computes, and which of its operators departs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import tvm
from tvm import relax

from tvmbridge.autograd import TrainingCall
from tvmbridge.build import build
from tvmbridge.compiled import build_lowered
from tvmbridge.inspect.compare.evaluate import Evaluation, operator_of
from tvmbridge.inspect.compare.route import Route
from tvmbridge.inspect.compare.trace import Step, Trace, TraceBuilder
from tvmbridge.options import CompileOptions
from tvmbridge.passes.base import flat_results
from tvmbridge.pipeline import observed_passes
from tvmbridge.runtime import LoadedModule
from tvmbridge.types import PassRecord


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
        self._departing: dict[str, Step | None] | None = None

    def _keep(self, record: PassRecord, before: tvm.IRModule, after: tvm.IRModule) -> None:
        if record.name == "FuseTIR":
            self._fused = after

    def trace(self) -> Trace:
        """Run it on the sample; the trace has the results alone."""
        route, compiled = self.route, self.compiled
        builder = TraceBuilder()
        primals = [p.clone() for p in route.primals()]
        if compiled.split is None:
            loaded = compiled.loaded
            outputs = loaded.call("forward", loaded.prepare("forward", primals))
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

    def departing(self, name: str, tolerance: float) -> tuple[Step | None, str]:
        """The operator whose compiled code departs, and the kernels that lead to result ``name``.

        The functions are compiled once more so that they return every value; the operands of
        backward are those of the interpreted program. None: it is right operator by operator, so
        the fault lies in how operators were fused or scheduled.
        """
        function, position = self._function_of(name)
        mod = self.route.lowered.mod
        steps = _in_order(_departing_steps(self.route, mod, function, tolerance))
        needed = _ancestors(mod[function], position)
        step = next((s for s in steps if s.name in needed), None)
        return step, ", ".join(self._kernels(function, position)) or "compiled code"

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
                if binding.var.name in needed and isinstance(binding.value, relax.Call):
                    found[_kernel_of(binding.value)] = None
        return list(found)


def _in_order(steps: Mapping[str, Step]) -> list[Step]:
    return list(steps.values())


def _kernel_of(call: relax.Call) -> str:
    if getattr(call.op, "name", "") == "relax.call_tir":
        return str(call.args[0].name_hint)
    return operator_of(call)


def _ancestors(function: relax.Function, position: int) -> set[str]:
    """Names of the variables that a result depends on."""
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
    return {v.name for v in found}


def _departing_steps(
    route: Route, mod: tvm.IRModule, name: str, tolerance: float
) -> dict[str, Step]:
    """Steps of ``name`` whose compiled value is not that of the interpretation, by variable."""
    functions = {g.name_hint: f for g, f in mod.functions_items()}
    arguments: dict[str, list[torch.Tensor]] = {}
    steps: dict[str, list[Step]] = {}

    def evaluate(function: relax.Function, values: list[torch.Tensor], **rest: Any) -> Evaluation:
        label = "backward" if "forward" in arguments else "forward"
        arguments[label] = values
        run = Evaluation(function, values, **rest)
        steps[label] = run.trace.steps
        return run

    route.run_split(functions, evaluate)
    spelled, variables = _spelled_out(functions[name])
    built = build(
        tvm.IRModule({"forward": spelled.with_attr("global_symbol", "forward")}),
        route.lowered.target,
        [],
    )
    loaded = LoadedModule(built.machine, built.unaligned)
    values = loaded.call("forward", loaded.prepare("forward", arguments[name]))
    by_name = {s.name: s for s in steps[name] if not s.is_input}
    departing = {}
    for variable, value in zip(variables, values, strict=True):
        step = by_name.get(variable)
        if step is not None and not _close(value, step.value, tolerance):
            departing[variable] = step
    return departing


def _close(value: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    if not expected.numel():
        return True
    bound = tolerance * float(expected.double().abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(
        value.double(), expected.double(), rtol=0.0, atol=bound, equal_nan=True
    )


def _spelled_out(function: relax.Function) -> tuple[relax.Function, list[str]]:
    """The same function with every tensor that it computes as a result, and their names."""
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
    return builder.get()["forward"], [v.name for v in computed]
