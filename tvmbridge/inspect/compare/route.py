"""A module's way from capture to the last graph in one precision: each stage as a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import tvm
from tvm import relax

from tvmbridge.compiler.lowering import lower_module
from tvmbridge.compiler.packing import Packing
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.types import PassRecord
from tvmbridge.graph_capture.surroundings import tracing_here
from tvmbridge.inspect.compare.convention import CallingConvention, draws_of
from tvmbridge.inspect.compare.eager import Reference
from tvmbridge.inspect.compare.evaluate import Evaluation, tensors_numbered
from tvmbridge.inspect.compare.inputs import title
from tvmbridge.inspect.compare.program import ProgramRun
from tvmbridge.inspect.compare.sample import Sample
from tvmbridge.inspect.compare.stages import Stage, stages_of
from tvmbridge.inspect.compare.trace import Trace, tensors_in
from tvmbridge.passes.relax.lift_packed_weights import LiftPackedWeights
from tvmbridge.pipeline import AnyPass, observed_passes


@dataclass
class Route(CallingConvention):
    """One precision of a comparison.

    Args:
        reference: what eager PyTorch makes of the sample.
        stages: the stages up to the functions that are built.
        records: what each pass did.
    """

    reference: Reference
    stages: list[Stage]
    records: list[PassRecord]

    @classmethod
    def of(
        cls,
        sample: Sample,
        reference: Reference,
        *,
        needs_grad: bool,
        options: CompileOptions,
        passes: Sequence[AnyPass],
    ) -> Route:
        """Lower the sample's module and keep the module after each pass.

        Raises:
            BridgeError: the module cannot be captured or lowered.
        """
        records: list[PassRecord] = []
        seen: list[tuple[PassRecord, tvm.IRModule, tvm.IRModule]] = []
        args, kwargs, _ = sample.arguments()
        observed = observed_passes(lambda *step: seen.append(step))
        with sample.unchanged_state(), tracing_here(), observed:
            lowered = lower_module(
                sample.module,
                args,
                kwargs,
                needs_grad=needs_grad,
                options=options,
                records=records,
                measure=lambda _: nullcontext(),
                passes=passes,
                packing=Packing(sample.module),
            )
        if lowered.captured.epilogue is not None:
            raise UnsupportedOperatorError(
                "forward has an eager epilogue (results that depend on the values of tensors: "
                f"{', '.join(lowered.captured.epilogue.functions)}), which is not compared"
            )
        kept = [step for step in seen if any(step[0] is record for record in records)]
        stages = [Stage("captured", "captured", None), *stages_of(lowered, kept)]
        return cls(sample, lowered, draws_of(sample, lowered), reference, stages, records)

    def trace(self, stage: Stage) -> Trace:
        """Evaluate a stage."""
        if stage.mod is None:
            return self._captured()
        functions = {g.name_hint: f for g, f in stage.mod.functions_items()}
        if "forward" in functions:
            return self._split(functions)
        name = next(n for n in ("main_adjoint", "joint", "main") if n in functions)
        return self._whole(name, functions[name])

    def _captured(self) -> Trace:
        derivation = self.lowered.derivation
        if derivation is not None and derivation.traced is not None:
            return self._traced_joint(derivation.traced)
        captured = self.lowered.captured
        leaves = {d.name: self.tensor(d).requires_grad_(d.requires_grad) for d in self.inputs}
        run = ProgramRun(
            captured.program.graph,
            {**leaves, **captured.constant_tensors},
            self.draws,
            differentiated=derivation is not None,
        )
        run.run()
        computed = {name: o.name for name, o in self.outputs() if o.is_computed}
        for name, node in computed.items():
            run.trace.results[name] = run.number(node)
        self.add_returned_inputs(run.trace)
        if derivation is not None:
            wanted = {title(d): leaves[d.name] for d in self.inputs if d.requires_grad}
            run.differentiate(computed, self.sample.cotangents, wanted)
        return run.build()

    def _traced_joint(self, traced: torch.fx.GraphModule) -> Trace:
        derivation = self.lowered.derivation
        assert derivation is not None
        values = [self.tensor(d) for d in self.inputs] + self.cotangents()
        values += [self.draws[n.name] for n in self.lowered.captured.noise]
        placeholders = traced.graph.find_nodes(op="placeholder")
        inputs = {n.name: v for n, v in zip(placeholders, values, strict=True)}
        for node in traced.graph.find_nodes(op="get_attr"):
            inputs[node.name] = getattr(traced, str(node.target))
        run = ProgramRun(traced.graph, inputs, {})
        run.run()
        (results,) = traced.graph.output_node().args
        names = [*self.result_names(), *self.gradient_names()]
        for name, node in zip(names, results, strict=True):  # type: ignore[arg-type]
            run.trace.results[name] = run.number(node.name)
        self.add_returned_inputs(run.trace)
        return run.build()

    def _whole(self, name: str, function: relax.Function) -> Trace:
        """A forward function, or a joint one in any of its forms."""
        plain = [*(self.tensor(d) for d in self.inputs), *self.noise(False)]
        masks = self.noise(True)
        arguments = plain if _has_dropout(function) else [*plain, *masks]
        if any(p.name.startswith(LiftPackedWeights.prefix) for p in function.params):
            arguments = [*arguments, *self.packed()]
        appended = len(function.params) > len(arguments)
        if appended:
            arguments = [*arguments, *self.cotangents()]
        run = Evaluation(function, arguments, masks)
        numbers = tensors_numbered(run.result_numbers)
        if appended and name != "joint":
            # The scalar that is differentiated stands first.
            numbers = numbers[1:]
        names = self.result_names()
        if name != "main":
            names = [*names, *self.gradient_names()]
        run.trace.results.update(zip(names, numbers, strict=True))
        self.add_returned_inputs(run.trace)
        return run.trace.build()

    def _split(self, functions: Mapping[str, relax.Function]) -> Trace:
        forward, backward = self.run_split(functions)
        builder = forward.trace
        numbers = tensors_numbered(forward.result_numbers)
        for name, number in zip(self.result_names(), numbers, strict=False):
            builder.results[name] = number
        if backward is not None:
            numbers = tensors_numbered(backward.result_numbers)
            builder.results.update(zip(self.gradient_names(), numbers, strict=True))
        self.add_returned_inputs(builder)
        return builder.build()

    def run_split(
        self, functions: Mapping[str, relax.Function]
    ) -> tuple[Evaluation, Evaluation | None]:
        """Evaluate forward, then backward on what forward keeps."""
        primals = self.primals()
        forward = Evaluation(functions["forward"], primals)
        parts = self.lowered.split
        if parts is None:
            return forward, None
        values = tensors_in(forward.results)
        numbers = tensors_numbered(forward.result_numbers)
        position = {name: i for i, name in enumerate(parts.primals)}
        reads = [position[name] for name in parts.reads]
        kept = [n for n, _ in parts.kept_outputs]
        shaped = [values[n].reshape(shape) for n, shape in parts.kept_outputs]
        count = parts.num_outputs
        arguments = [*(primals[i] for i in reads), *shaped, *values[count:], *self.cotangents()]
        sources = [*reads, *(numbers[n] for n in kept), *numbers[count:]]
        backward = Evaluation(
            functions["backward"],
            arguments,
            trace=forward.trace,
            numbers=dict(enumerate(sources)),
        )
        return forward, backward


def _has_dropout(function: relax.Function) -> bool:
    return any(
        isinstance(b.value, relax.Call) and getattr(b.value.op, "name", "") == "relax.nn.dropout"
        for block in function.body.blocks
        for b in block.bindings
    )
