"""A module's way from capture to the last graph in one precision: each stage as a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import tvm
from tvm import relax

from tvmbridge.aliasing import made_again
from tvmbridge.compiled import LoweredModule, lower_module
from tvmbridge.errors import UnsupportedOperatorError
from tvmbridge.inspect.compare.eager import Reference, state_name
from tvmbridge.inspect.compare.evaluate import Evaluation, tensors_numbered
from tvmbridge.inspect.compare.inputs import base_name, title, with_strides
from tvmbridge.inspect.compare.program import ProgramRun
from tvmbridge.inspect.compare.sample import Sample
from tvmbridge.inspect.compare.stages import Stage, stages_of
from tvmbridge.inspect.compare.trace import Trace, TraceBuilder, tensors_in
from tvmbridge.options import CompileOptions
from tvmbridge.packing import Packing
from tvmbridge.passes.relax.lift_packed_weights import LiftPackedWeights
from tvmbridge.pipeline import AnyPass, observed_passes
from tvmbridge.types import InputDescriptor, InputKind, OutputAlias, OutputKind, PassRecord


@dataclass
class Route:
    """One precision of a comparison.

    Args:
        sample: the module and its arguments.
        reference: what eager PyTorch makes of them.
        lowered: the graphs.
        stages: the stages up to the functions that are built.
        records: what each pass did.
    """

    sample: Sample
    reference: Reference
    lowered: LoweredModule
    stages: list[Stage]
    records: list[PassRecord]
    draws: dict[str, torch.Tensor] = field(default_factory=dict)

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
        with sample.unchanged_state(), observed_passes(lambda *step: seen.append(step)):
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
        if lowered.captured.tail is not None:
            raise UnsupportedOperatorError(
                "forward has an eager tail (results that depend on the values of tensors: "
                f"{', '.join(lowered.captured.tail.functions)}), which is not compared"
            )
        kept = [step for step in seen if any(step[0] is record for record in records)]
        stages = [Stage("captured", "captured", None), *stages_of(lowered, kept)]
        route = cls(sample, reference, lowered, stages, records)
        route.draws = route._draws()
        return route

    def _draws(self) -> dict[str, torch.Tensor]:
        """The values of the draws by name; masks in the dtype that the graph takes."""
        noise, draws = self.lowered.captured.noise, self.sample.draws or []
        if [n.spec.shape for n in noise] != [tuple(d.shape) for d in draws]:
            raise UnsupportedOperatorError(
                "the captured graph draws other random numbers than the module"
            )
        return {n.name: d.to(n.spec.dtype).contiguous() for n, d in zip(noise, draws, strict=True)}

    # What the functions get ------------------------------------------------------------------

    @property
    def inputs(self) -> list[InputDescriptor]:
        """The user inputs, parameters and buffers, in calling order."""
        return [d for d in self.lowered.captured.inputs if d.kind is not InputKind.CONSTANT]

    def tensor(self, descriptor: InputDescriptor) -> torch.Tensor:
        """The value of an input."""
        if descriptor.kind is InputKind.USER:
            value: torch.Tensor = self.sample.leaves[descriptor.position or 0]
            return value.detach().contiguous()
        path, _, name = (descriptor.target or "").rpartition(".")
        return getattr(self.sample.module.get_submodule(path), name).detach().contiguous()

    def primals(self) -> list[torch.Tensor]:
        """Inputs, state, draws and packed weights, in calling order."""
        plain = [*(self.tensor(d) for d in self.inputs), *self._noise(False)]
        return [*plain, *self._noise(True), *self._packs()]

    def _packs(self) -> list[torch.Tensor]:
        """The packed weights, concatenated here: the module's own stay where they are."""
        module = self.sample.module
        return [
            torch.cat([module.get_parameter(name).detach() for name in names])
            for names in self.lowered.packs
        ]

    def _noise(self, masks: bool) -> list[torch.Tensor]:
        return [
            self.draws[n.name]
            for n in self.lowered.captured.noise
            if (n.drop_probability is not None) is masks
        ]

    def cotangents(self) -> list[torch.Tensor]:
        """The gradients that arrive, in the order of the joint function."""
        derivation = self.lowered.derivation
        if derivation is None:
            return []
        names = self.result_names()
        return [self.sample.cotangents[names[i]] for i in derivation.joint.cotangent_of]

    # What they return -------------------------------------------------------------------------

    def result_names(self) -> list[str]:
        """The names of the computed outputs, in order."""
        return [name for name, output in self._outputs() if output.is_computed]

    def gradient_names(self) -> list[str]:
        """The names of the gradients, in the order of the joint function."""
        derivation = self.lowered.derivation
        by_name = {d.name: d for d in self.inputs}
        wanted = () if derivation is None else derivation.joint.wanted
        return [f"gradient of {title(by_name[name])}" for name in wanted]

    def _outputs(self) -> Iterator[tuple[str, Any]]:
        users = iter(self.sample.output_names)
        by_name = {d.name: d for d in self.lowered.captured.inputs}
        for output in self.lowered.captured.outputs:
            if output.kind is OutputKind.USER:
                yield next(users), output
            elif output.kind is OutputKind.INPUT_MUTATION:
                yield state_name(title(by_name[output.target or ""])), output
            else:
                yield state_name(output.target or ""), output

    def add_returned_inputs(self, builder: TraceBuilder) -> None:
        """Outputs that are not computed: inputs and state given back, views of them or of others.

        What is written during the call is seen in them.
        """
        users = [name for name, output in self._outputs() if output.kind is OutputKind.USER]
        aliased = [(n, o.alias) for n, o in self._outputs() if o.alias is not None]
        # Views of outputs come after what they are views of.
        for name, alias in sorted(aliased, key=lambda pair: pair[1].kind is None):
            base = users[int(alias.key)] if alias.kind is None else state_name(base_name(alias))
            number = builder.results.get(base)
            if number is None:
                number = builder.given(base, self._base(alias))
            if alias.shape is not None:
                whole = with_strides(builder.steps[number].value, alias.base_stride)
                number = builder.computed(name, "view", "", (number,), made_again(alias, whole))
            builder.results[name] = number

    def _base(self, alias: OutputAlias) -> torch.Tensor:
        if alias.kind is InputKind.USER:
            value: torch.Tensor = self.sample.leaves[int(alias.key)]
            return value.detach()
        path, _, name = str(alias.key).rpartition(".")
        held: torch.Tensor = getattr(self.sample.module.get_submodule(path), name)
        return held.detach()

    # The stages --------------------------------------------------------------------------------

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
        computed = {name: o.name for name, o in self._outputs() if o.is_computed}
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
        plain = [*(self.tensor(d) for d in self.inputs), *self._noise(False)]
        masks = self._noise(True)
        arguments = plain if _has_dropout(function) else [*plain, *masks]
        if any(p.name.startswith(LiftPackedWeights.prefix) for p in function.params):
            arguments = [*arguments, *self._packs()]
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
