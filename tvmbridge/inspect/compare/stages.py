"""Run the stages of compilation in one precision on a sample."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import tvm
from tvm import relax

from tvmbridge.calls.views import laid_out
from tvmbridge.compiler.lowering import LoweredModule, lower_module
from tvmbridge.compiler.packing import ModulePacks
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.turns import compiling
from tvmbridge.core.types import (
    InputDescriptor,
    InputKind,
    OutputAlias,
    OutputDescriptor,
    OutputKind,
    PassRecord,
)
from tvmbridge.graph_capture.aliasing import made_again
from tvmbridge.graph_capture.surroundings import tracing_here
from tvmbridge.inspect.compare.interpreter import RelaxRun, calls_of
from tvmbridge.inspect.compare.program import ProgramRun
from tvmbridge.inspect.compare.sample import Sample, state_name
from tvmbridge.inspect.compare.trace import Trace
from tvmbridge.passes.relax.lift_packed_weights import LiftPackedWeights
from tvmbridge.pipeline import AnyPass, observed_passes


@dataclass(frozen=True)
class Stage:
    """One stage of compilation.

    - ``name``: the name in the report; for a pass, the pass's name.
    - ``group``: ``"captured"``, ``"imported"`` or ``"passes"``.
    - ``mod``: the Relax module after the stage; None for the captured program.
    - ``changed``: whether the module differs from the stage before, so that it must run.
    """

    name: str
    group: str
    mod: tvm.IRModule | None
    changed: bool = True


class Lowering:
    """The stages of a sample's module, from capture to the functions that are built.

    - ``stages``: the stages in order.
    - ``records``: a record of each pass.
    - ``lowered``: the result of lowering; ``captured`` is its captured graph.

    Args:
        passes: additional passes, run after the pipeline's.

    Raises:
        BridgeError: the module cannot be captured or lowered.
    """

    def __init__(
        self, sample: Sample, needs_grad: bool, options: CompileOptions, passes: Sequence[AnyPass]
    ) -> None:
        self.sample = sample
        self.records: list[PassRecord] = []
        seen: list[tuple[PassRecord, tvm.IRModule, tvm.IRModule]] = []
        module = copy.deepcopy(sample.module)
        args, kwargs, _ = sample.arguments()
        with compiling(), tracing_here(), observed_passes(lambda *step: seen.append(step)):
            self.lowered = lower_module(
                CompileRequest(
                    module,
                    args,
                    kwargs,
                    needs_grad=needs_grad,
                    options=options,
                    packing=ModulePacks(module),
                ),
                records=self.records,
                passes=passes,
            )
        self.captured = self.lowered.captured
        if self.captured.epilogue is not None:
            raise UnsupportedOperatorError(
                "forward has an eager epilogue (results that depend on the values of tensors: "
                f"{', '.join(self.captured.epilogue.functions)}), which is not compared"
            )
        # Steps of a source of the joint function that was tried and given up have no record.
        kept = [step for step in seen if any(step[0] is record for record in self.records)]
        self.stages = list(_stages(self.lowered, kept))
        noise, draws = self.captured.noise, sample.draws or []
        if [n.spec.shape for n in noise] != [tuple(d.shape) for d in draws]:
            raise UnsupportedOperatorError(
                "the captured graph draws other random numbers than the module"
            )
        pairs = zip(noise, draws, strict=True)
        self._draws = {n.name: d.to(n.spec.dtype).contiguous() for n, d in pairs}

    # Arguments of the functions ------------------------------------------------------------------

    def _value(self, descriptor: InputDescriptor) -> torch.Tensor:
        return self.sample.tensor(title(descriptor)).detach().contiguous()

    def _noise(self, *, masks: bool) -> list[torch.Tensor]:
        """Return the masks of dropout, or all other random draws, in program order."""
        noise = self.captured.noise
        return [self._draws[n.name] for n in noise if (n.drop_probability is not None) is masks]

    def primals(self, *, masks: bool = True, packed: bool = True) -> list[torch.Tensor]:
        """Return inputs, state, random draws, masks and packed weights in calling order."""
        values = [*map(self._value, self.captured.primals), *self._noise(masks=False)]
        if masks:
            values += self._noise(masks=True)
        if packed:  # concatenated here, so that the module's own weights stay separate
            parts = [[self.sample.tensor(n).detach() for n in p] for p in self.lowered.packs]
            values += map(torch.cat, parts)
        return values

    def cotangents(self) -> list[torch.Tensor]:
        """Return the cotangents in the order of the joint function."""
        if self.lowered.derivation is None:
            return []
        numbers = self.lowered.derivation.joint.cotangent_of
        return [self.sample.cotangents[self.output_names[i]] for i in numbers]

    # Results of the functions --------------------------------------------------------------------

    @cached_property
    def _outputs(self) -> list[tuple[str, OutputDescriptor]]:
        """The outputs of the captured graph, each with its name in the report."""
        users = iter(self.sample.output_names)
        titles = {d.name: title(d) for d in self.captured.inputs}
        return [
            (next(users), output)
            if output.kind is OutputKind.USER
            else (state_name(titles.get(output.target or "", output.target or "")), output)
            for output in self.captured.outputs
        ]

    @property
    def output_names(self) -> list[str]:
        """The names of the computed outputs, in order."""
        return [name for name, output in self._outputs if output.is_computed]

    @property
    def gradient_names(self) -> list[str]:
        """The names of the gradients, in the order of the joint function."""
        derivation = self.lowered.derivation
        titles = {d.name: title(d) for d in self.captured.primals}
        wanted = () if derivation is None else derivation.joint.wanted
        return [f"gradient of {titles[name]}" for name in wanted]

    def with_results(self, trace: Trace, values: Sequence[torch.Tensor | None]) -> Trace:
        """Record in ``trace`` the results of a run by their names, and return it.

        ``values`` are the computed outputs, then the gradients if there are any. Outputs that are
        not computed are recorded too: inputs and state that forward returns, and views of them or
        of other outputs. Values that the call has written show in all of them.
        """
        names = [*self.output_names, *self.gradient_names]
        for name, value in zip(names[: len(values)], values, strict=True):
            if value is not None:
                trace.note_result(name, value)
        users = [name for name, output in self._outputs if output.kind is OutputKind.USER]
        outputs = sorted(self._outputs, key=lambda pair: pair[1].kind is not OutputKind.USER)
        aliased = [(n, o.alias) for n, o in outputs if o.alias is not None]
        # Each base must be recorded before its views: aliases of inputs and state come first.
        for name, alias in sorted(aliased, key=lambda pair: pair[1].kind is None):
            base = users[int(alias.key)] if alias.kind is None else state_name(_base_name(alias))
            number = trace.results.get(base)
            if number is None:
                number = trace.add(self.sample.tensor(_base_name(alias)))
            value = trace.steps[number].value
            if alias.shape is not None:
                value, whole = made_again(alias, laid_out(value, alias.base_stride)), value
                trace.add(value, "view", (whole,))
            trace.note_result(name, value)
        return trace

    # The stages -----------------------------------------------------------------------------------

    def run(self, stage: Stage) -> Trace:
        """Run a stage on the sample, and return its trace."""
        if stage.mod is None:
            return self.program
        functions = {g.name_hint: f for g, f in stage.mod.functions_items()}
        if "forward" in functions:
            runs = self.run_split(stage.mod)
            results = runs["forward"].results[: len(self.output_names)]
            gradients = runs["backward"].results if "backward" in runs else []
            return self.with_results(runs["forward"].trace, [*results, *gradients])
        name = next(n for n in ("main_adjoint", "joint", "main") if n in functions)
        function = functions[name]
        lifted = any(p.name.startswith(LiftPackedWeights.prefix) for p in function.params)
        # Dropout operators that are still in the function take their masks in program order.
        arguments = self.primals(masks=not _has_dropout(function), packed=lifted)
        differentiated = len(function.params) > len(arguments)
        if differentiated:
            arguments += self.cotangents()
        run = RelaxRun(function, arguments, self._noise(masks=True))
        # The function of TVM's Gradient returns the scalar that it differentiates first.
        first = int(differentiated and name != "joint")
        count = len(self.output_names) if name == "main" else None
        return self.with_results(run.trace, run.results[first:][:count])

    def run_split(self, mod: tvm.IRModule) -> dict[str, RelaxRun]:
        """Run forward, then backward on the values that forward keeps."""
        primals = self.primals()
        forward = RelaxRun(mod["forward"], primals)
        parts = self.lowered.split
        if parts is None:
            return {"forward": forward}
        position = {name: i for i, name in enumerate(parts.primals)}
        reads = [primals[position[name]] for name in parts.reads]
        kept = [forward.results[n].reshape(shape) for n, shape in parts.kept_outputs]
        residuals = forward.results[parts.num_outputs :]
        arguments = [*reads, *kept, *residuals, *self.cotangents()]
        return {
            "forward": forward,
            "backward": RelaxRun(mod["backward"], arguments, trace=forward.trace),
        }

    @cached_property
    def program(self) -> Trace:
        """The trace of the captured program, or of the joint graph recorded from autograd."""
        derivation = self.lowered.derivation
        values = [self._value(d) for d in self.captured.primals]
        if derivation is not None and derivation.traced is not None:
            run = ProgramRun(derivation.traced, {})
            with torch.no_grad():
                results = run.run(*values, *self.cotangents(), *self._draws.values())
            return self.with_results(run.trace, results)
        run = ProgramRun(self.captured.program.graph_module, self._draws)
        leaves = {d.name: v for d, v in zip(self.captured.primals, values, strict=True)}
        with torch.set_grad_enabled(derivation is not None):
            for descriptor in self.captured.primals:
                leaves[descriptor.name].requires_grad_(descriptor.requires_grad)
            found = run.run_on({**leaves, **self.captured.constant_tensors})
        outputs = {name: found[o.name] for name, o in self._outputs if o.is_computed}
        self.with_results(run.trace, list(outputs.values()))
        if derivation is not None:
            cotangents = self.sample.cotangents
            flowing = {n: v for n, v in outputs.items() if n in cotangents and v.requires_grad}
            wanted = {title(d): leaves[d.name] for d in self.captured.primals if d.requires_grad}
            run.recorder.gradients(flowing, wanted, cotangents)
        return run.trace


def title(descriptor: InputDescriptor) -> str:
    """Return the name of an input as users know it: ``input 0``, or a parameter's dotted name."""
    if descriptor.kind is InputKind.USER:
        return f"input {descriptor.position}"
    return descriptor.target or descriptor.name


def _base_name(alias: OutputAlias) -> str:
    return f"input {alias.key}" if alias.kind is InputKind.USER else str(alias.key)


def _has_dropout(function: relax.Function) -> bool:
    calls = (call for _, call in calls_of(function))
    return any(getattr(call.op, "name", "") == "relax.nn.dropout" for call in calls)


def _stages(
    lowered: LoweredModule, seen: Sequence[tuple[PassRecord, tvm.IRModule, tvm.IRModule]]
) -> Iterator[Stage]:
    """Yield the captured program, the imported module, the module after each pass, the split."""
    yield Stage("captured", "captured", None)
    last = seen[0][1] if seen else lowered.mod
    yield Stage("imported", "imported", last)
    counts: dict[str, int] = {}
    for record, before, after in seen:
        if not before.same_as(last):
            yield Stage("joint function", "passes", before)
        counts[record.name] = counts.get(record.name, 0) + 1
        name = record.name if counts[record.name] == 1 else f"{record.name} {counts[record.name]}"
        yield Stage(name, "passes", after, record.changed)
        last = after
    if lowered.split is not None:
        yield Stage("split", "passes", lowered.mod)
