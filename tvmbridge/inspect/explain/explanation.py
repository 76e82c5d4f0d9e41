"""Explain how a module would be compiled: run the graph stages without the build."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from tvmbridge.calls.standins import anything_requires_grad
from tvmbridge.coloring import policy_for
from tvmbridge.compiler.lowering import LoweredModule, lower_module
from tvmbridge.compiler.packing import ModulePacks
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.compiler.step_memory import step_memory
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.contents import MISSING
from tvmbridge.core.errors import BridgeError, UnsupportedOperatorError
from tvmbridge.core.number_places import label_of
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.torch_private import OpOverload
from tvmbridge.core.turns import compiling
from tvmbridge.core.types import InputKind, NoiseDescriptor, OutputKind, PassRecord
from tvmbridge.frontend.limits import refuse_what_cannot_run
from tvmbridge.frontend.origins import user_source
from tvmbridge.graph_capture.capture import capture, normalize_sample
from tvmbridge.graph_capture.noise import find_noise
from tvmbridge.graph_capture.observe.refusal import first_paragraph, user_line
from tvmbridge.graph_capture.surroundings import tracing_here, undisturbed
from tvmbridge.graph_capture.trace.composites import composites_prepared_for
from tvmbridge.inspect.compare.sample import Sample
from tvmbridge.inspect.explain.report import Draw, ExplainReport, Mutation, OperatorUse
from tvmbridge.pipeline import fx_passes_of


def explain(
    module: nn.Module,
    sample_input: Any,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    options: CompileOptions | dict[str, Any] | None = None,
    memory: bool = False,
) -> ExplainReport:
    """Report how :func:`tvmbridge.add_tvm_dispatch` would compile ``module``, without compiling it.

    A copy of the module goes through the graph stages: capture, import, differentiation, passes.
    The module, its tensors and the random generators are not changed. The module may be dispatched
    already.

    Args:
        module: any module, in train or eval mode as it would be compiled.
        sample_input: a tensor, or a tuple of positional arguments (nested structures allowed).
        sample_kwargs: keyword arguments of forward.
        options: the options of the compilation. With ``fx_passes`` the report says for each fx
            pass what it would do and what it declined. ``tvmbridge.fx_passes()`` returns the
            passes of ``optimize_fx``.
        memory: whether to count the memory that a step needs. For this the graphs are fused, which
            takes seconds for a large module.

    Returns:
        The report. If the module would keep its own forward, ``ok`` is False and ``reason`` says
        why.

    Raises:
        TypeError: ``module`` is not a module, ``sample_kwargs`` is not a dict, or ``options`` has
            an unknown field.
        ValueError: an option has a value that is not among its choices.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    chosen = CompileOptions.of(options)
    args, kwargs = normalize_sample(sample_input, sample_kwargs)
    with compiling(), tracing_here(), torch.random.fork_rng(), undisturbed():
        return _Explanation(type(module).__name__, chosen, memory).of(module, args, kwargs)


@dataclass
class _Explanation:
    """An explanation in progress.

    - ``name``: the class of the module.
    - ``memory``: whether the memory of a step is counted.
    - ``stage``: the graph stage that runs now, or that failed.
    - ``known``: the fields of the report that are known so far.
    - ``records``: a record of each pass that has run.
    """

    name: str
    options: CompileOptions
    memory: bool = False
    stage: str = "capture"
    known: dict[str, Any] = field(default_factory=dict)
    records: list[PassRecord] = field(default_factory=list)

    def of(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ExplainReport:
        needs_grad = module.training and anything_requires_grad(module, (args, dict(kwargs)))
        self.known["mode"] = ("train" if module.training else "eval") + (
            " with gradients" * needs_grad
        )
        try:
            sample = Sample.of(module, args, kwargs)
        except Exception as error:
            return self._refused(f"the module cannot be copied: {first_paragraph(error)}", error)
        try:
            lowered = self._lower(sample, needs_grad)
        except BridgeError as error:
            self._look_at_graph(sample, needs_grad)
            return self._refused(str(error), error)
        except Exception as error:
            reason = f"{type(error).__name__}: {first_paragraph(error)}"
            return self._refused(reason, error)
        return ExplainReport(module=self.name, ok=True, **self.known, **self._of_lowered(lowered))

    def _lower(self, sample: Sample, needs_grad: bool) -> LoweredModule:
        args, kwargs, _ = sample.arguments()
        return lower_module(
            CompileRequest(
                sample.module,
                args,
                kwargs,
                needs_grad=needs_grad,
                options=self.options,
                packing=ModulePacks(sample.module),
            ),
            records=self.records,
            measure=self._measure,
        )

    @contextmanager
    def _measure(self, stage: str) -> Iterator[None]:
        self.stage = stage
        yield

    def _refused(self, reason: str, error: BaseException) -> ExplainReport:
        source = user_line(error.__cause__ or error) or ""
        return ExplainReport(
            module=self.name, ok=False, stage=self.stage, reason=reason, source=source, **self.known
        )

    def _look_at_graph(self, sample: Sample, needs_grad: bool) -> None:
        """Capture a refused module again, and record which operators of its graph are refused."""
        args, kwargs, _ = sample.arguments()
        try:
            if self.stage != "capture":
                captured = capture(sample.module, args, sample_kwargs=kwargs, needs_grad=needs_grad)
                self.known |= _of_captured(captured)
                graph = captured.program.graph
            else:
                # torch.export alone may succeed, and then the graph has the refused operators.
                with warnings.catch_warnings():
                    # torch.export copies its own tree specs in a way that torch deprecates.
                    warnings.filterwarnings("ignore", "`isinstance.treespec", FutureWarning)
                    program = torch.export.export(sample.module, args, kwargs, strict=False)
                    with composites_prepared_for(program):
                        graph = program.run_decompositions().graph
        except Exception:
            return  # the report has the reason of the refusal already
        self.known["refused"] = tuple(_refused_operators(graph))

    def _of_lowered(self, lowered: LoweredModule) -> dict[str, Any]:
        derivation, imported, parts = lowered.derivation, lowered.imported, lowered.split
        graph = lowered.captured.program.graph
        found = _of_captured(lowered.captured)
        found["native"] = _uses(imported.native_calls, graph)
        found["aten_calls"] = _uses(imported.aten_calls, graph)
        found["packs"] = lowered.packs
        names = {type(pass_).__name__ for pass_ in fx_passes_of(self.options)}
        asked = self.options.fx_passes is not None
        found["fx_passes"] = tuple(
            r for r in self.records if r.name in names and (asked or r.rewrites)
        )
        if derivation is not None and parts is not None:
            values = (*parts.residuals, *parts.drawn)
            found["joint"], found["joint_reason"] = derivation.source, derivation.reason
            found["residual_policy"] = policy_for(
                self.options.residual_policy, lowered.captured.device
            )
            found["recomputation"] = parts.recomputation
            found["residuals"] = tuple(sorted(values, key=lambda v: -v.spec.nbytes))
        if self.memory:
            found["memory"] = step_memory(lowered)
        return found


def _of_captured(captured: CapturedGraph) -> dict[str, Any]:
    frozen = {f"argument {i}": _shown(value) for i, value in captured.assumptions.constants.items()}
    for (path, name), value in sorted(
        captured.assumptions.values.items(), key=lambda item: item[0]
    ):
        if value is not MISSING and not callable(value):
            frozen[f"{path}.{name}".lstrip(".")] = _shown(value)
    for value in captured.assumptions.outside:
        if not value.itself:
            frozen[value.label] = _shown(value.expected)
    return {
        "noise": tuple(_draws(captured)),
        "mutations": tuple(_mutations(captured)),
        "eager_functions": () if captured.epilogue is None else tuple(captured.epilogue.functions),
        "frozen": frozen,
    }


def _draws(captured: CapturedGraph) -> Iterator[Draw]:
    """Yield the random draws with their source lines.

    With PyTorch's own derivatives the draws have other names than in the captured graph. If the
    shapes agree in order, the draws are matched by position.
    """
    graph = captured.program.graph
    nodes = {n.name: n for n in graph.nodes}
    original = find_noise(graph)
    alike = [n.spec.shape for n in original] == [n.spec.shape for n in captured.noise]
    for i, descriptor in enumerate(captured.noise):
        yield _draw(descriptor, nodes.get((original[i] if alike else descriptor).name))


def _draw(descriptor: NoiseDescriptor, node: fx.Node | None) -> Draw:
    purpose = "random numbers"
    if descriptor.drop_probability is not None:
        purpose = f"a mask of dropout, p={descriptor.drop_probability:g}"
    elif descriptor.spec.dtype is torch.bool:
        purpose = "a mask"
    # For one of several results of an operator the node is a getitem, which names no operator.
    whole = node is not None and descriptor.result is None
    operator = str(node.target if node is not None and whole else descriptor.op)
    source = "" if node is None else user_source(node.meta.get("stack_trace"))
    return Draw(operator, purpose, descriptor.spec, source)


def _mutations(captured: CapturedGraph) -> Iterator[Mutation]:
    positions = {d.name: d.position for d in captured.inputs if d.kind is InputKind.USER}
    for output in captured.outputs:
        if output.kind is OutputKind.BUFFER_MUTATION:
            yield Mutation("buffer", output.target or "")
        elif output.kind is OutputKind.INPUT_MUTATION:
            yield Mutation("input", str(positions.get(output.target or "", output.target)))
    for place in captured.convention.changed_arguments:
        yield Mutation("argument", str(place))
    for name in sorted(map(label_of, (*captured.convention.assigned, *captured.convention.left))):
        yield Mutation("attribute", name)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _uses(counts: Mapping[str, int], captured: fx.Graph) -> tuple[OperatorUse, ...]:
    """Return the operators, the most used first, with the source lines that they come from.

    A backward operator without lines of its own gets the lines of its forward operator.
    """
    lines: dict[str, dict[str, None]] = {}
    for node in captured.nodes:
        source = user_source(node.meta.get("stack_trace"))
        if source:
            lines.setdefault(str(node.target), {})[source] = None
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(
        OperatorUse(name, count, tuple(lines.get(name) or lines.get(_forward_of(name)) or ()))
        for name, count in ordered
    )


def _forward_of(name: str) -> str:
    return name.replace("_backward.", ".")


def _refused_operators(graph: fx.Graph) -> Iterator[OperatorUse]:
    found: dict[str, tuple[list[str], str]] = {}
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, OpOverload) or _tells_sizes(target):
            continue
        try:
            refuse_what_cannot_run(node)
        except UnsupportedOperatorError as error:
            sources, _ = found.setdefault(str(node.target), ([], str(error)))
            sources.append(user_source(node.meta.get("stack_trace")))
    for name, (sources, reason) in found.items():
        lines = tuple(dict.fromkeys(s for s in sources if s))
        yield OperatorUse(name, len(sources), lines, reason)


def _tells_sizes(target: OpOverload) -> bool:
    """Whether the operator computes sizes or checks an assertion, and returns no tensor."""
    return target._schema.name.startswith(("aten::_assert", "aten::sym_"))
