"""Trace a module into the program that the fx passes rewrite, in ATen operators.

The program is the one that torch.export returns, with symbols for sizes. It is neither decomposed
nor functionalized, so autograd records it, and it computes and draws random numbers in the module's
own order.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from tvmbridge.calls.standins import attributes_put_back, without_hooks, without_repetitions
from tvmbridge.calls.surroundings import refused_now
from tvmbridge.core.autocast import autocast_now, without_autocast
from tvmbridge.core.captured_graph import Assumptions, CallingConvention, CapturedGraph
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.number_places import label_of
from tvmbridge.core.torch_private import pytree
from tvmbridge.core.turns import compiling
from tvmbridge.fx.combined import FeaturePositions, combined_in, of_size, replaced
from tvmbridge.graph_capture.observe.descriptors import describe_inputs, find_aliases
from tvmbridge.graph_capture.observe.observation import Observation
from tvmbridge.graph_capture.observe.refusal import (
    first_paragraph,
    raise_if_forward_refuses,
    user_line,
)
from tvmbridge.graph_capture.observe.staging import StagedModule, staged
from tvmbridge.graph_capture.observe.undo import current_undo
from tvmbridge.graph_capture.relations import Relations, relations_in
from tvmbridge.graph_capture.surroundings import tracing_here
from tvmbridge.graph_capture.symbols import dynamic_shapes, size_marks_put_away, spelled_out
from tvmbridge.graph_capture.trace.answers import small_buffers
from tvmbridge.graph_capture.trace.backends import only_switched_off
from tvmbridge.graph_capture.trace.linear_export import export_in_linear_time
from tvmbridge.graph_capture.traced_forward import TracedForward


@dataclass(frozen=True)
class Traced:
    """A traced forward: its graph and the captured program that the graph was taken from.

    - ``graph_module``: the graph. It takes the tensors and constants of ``captured.program``'s
      inputs in their order, and returns the leaves of the results.
    - ``captured``: the program, the sources of its inputs, and the assumptions of the trace.
    - ``relations``: relations between symbolic sizes; None if no argument is a tensor.
    - ``degenerate``: positions of the argument leaves whose sizes may also be 0 or 1, which symbols
      exclude.
    """

    graph_module: fx.GraphModule
    captured: CapturedGraph
    relations: Relations | None
    degenerate: tuple[int, ...] = ()

    @property
    def program(self) -> ExportedProgram:
        """Return the program of torch.export."""
        return self.captured.program


def trace(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needs_grad: bool,
    any_size: bool = True,
) -> Traced:
    """Trace ``module`` in the mode that it is in, train or eval.

    Args:
        any_size: whether symbols replace the sizes of the sample.

    Raises:
        CaptureError: the module cannot be traced, or each call has an effect that a graph would not
            repeat. The message names the cause.
    """
    reason = refused_now()
    if reason is not None or autocast_now():
        why = reason or "autocast is on"
        raise CaptureError(f"{type(module).__name__} cannot be traced here: {why}")
    with compiling(), tracing_here(), without_autocast():
        stage = staged(module, args, kwargs, needs_grad)
        seen = _seen(stage)
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        program = _export(stage, args, kwargs, needs_grad, any_size)
        tensors = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
        relations = relations_in(program) if tensors else None
        captured = _described(stage, program, seen, leaves, needs_grad)
    graph_module = program.graph_module
    graph_module.meta["needs_grad"] = needs_grad
    return Traced(graph_module, captured, relations)


def trace_sample(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], needs_grad: bool
) -> Traced:
    """Trace a sample whose arguments may include combined features.

    Combined features are traced as separate tensors. In later calls a feature may have 0 or 1
    indices, sizes that symbols exclude. Two more traces, with 0 and with 1 indices, find out
    whether forward runs the same operators for them. Both traces use the sizes of the sample as
    constants, because tracing with symbols would take most of the time.
    """
    features = combined_in(args, kwargs)
    if features is None:
        return trace(module, args, kwargs, needs_grad)
    traced = trace(module, *replaced(args, kwargs, lambda f: of_size(f, None)), needs_grad)
    usual = _operators(traced.graph_module)
    for size in (0, 1):
        few = replaced(args, kwargs, partial(of_size, size=size))
        try:
            other = trace(module, *few, needs_grad, any_size=False)
        except CaptureError:
            return traced
        if _operators(other.graph_module) != usual:
            return traced
    return replace(traced, degenerate=FeaturePositions.of(args, kwargs, features).indices)


def _operators(graph_module: fx.GraphModule) -> list[str]:
    """Return the names of the operators that compute tensors in a graph."""
    called = (n for n in graph_module.graph.nodes if n.op == "call_function")
    values = ((n, n.meta.get("val")) for n in called)
    return [str(n.target) for n, v in values if not isinstance(v, int | float | torch.SymInt)]


def _seen(stage: StagedModule) -> Observation:
    """Return the observation of forward.

    Raises:
        CaptureError: forward cannot be observed, or has an effect that a graph in eager PyTorch
            would not repeat.
    """
    name, seen = type(stage.module).__name__, stage.observation
    if seen is None:
        raise CaptureError(
            f"forward of {name} cannot be watched: {first_paragraph(stage.failure)}"
        ) from stage.failure
    if not stage.is_compiling:
        raise CaptureError(f"forward of {name} computes something else where it is traced")
    found = [f"gives {'.'.join(filter(None, key))} a value" for key in seen.assigned]
    found += [f"leaves a value in {label_of(key)}" for key in seen.left]
    found += [f"exchanges the buffer {key}" for key in seen.rebound]
    found += [f"has the weight {key} made by a hook" for key in seen.normed]
    found += [f"asks {question.value}" for question in seen.asks]
    if seen.foreign or seen.foreign_modules:
        found.append("reads tensors that are not the module's")
    if found:
        raise CaptureError(f"forward of {name} {', '.join(found)} at each call")
    return seen


def _export(
    stage: StagedModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needs_grad: bool,
    any_size: bool,
) -> ExportedProgram:
    module = stage.module
    with (
        attributes_put_back(module),
        torch.set_grad_enabled(needs_grad),
        without_hooks(module),
        export_in_linear_time(),
        only_switched_off(),
        size_marks_put_away((args, kwargs)),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec", FutureWarning)
        forward = TracedForward(
            module=module,
            is_compiling=True,
            differentiated=needs_grad,
            values=small_buffers(module),
            exported=True,
        )
        given, named = without_repetitions((args, dict(kwargs)))
        try:
            with forward.in_place(), current_undo().run():
                sizes = _any_size(module, given, named) if any_size else None
                program = torch.export.export(
                    module, given, named, dynamic_shapes=sizes, strict=False
                )
        except CaptureError:
            raise
        except Exception as error:
            raise_if_forward_refuses(module, args, kwargs, ())
            line = user_line(error) or "an unknown line"
            raise CaptureError(
                f"torch.export cannot trace {type(module).__name__}; it stopped at {line}: "
                f"{first_paragraph(error)}"
            ) from error
    odd = {
        "changes a container that it is given": forward.changed_arguments,
        "decides by the values of buffers": [a for a in forward.answers if a.names],
        "checks values": forward.checks,
        "computes results whose sizes depend on data": forward.epilogue,
    }
    for what, found in odd.items():
        if found:
            raise CaptureError(f"forward of {type(module).__name__} {what}")
    return program


def _any_size(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a spec of dynamic shapes with a symbol for every size that is greater than 1.

    ``torch.export`` turns a symbol into a number if forward requires that number.
    """
    module.forward.__dict__["__signature__"] = spelled_out(args, kwargs)
    symbolic = {
        number: {i: torch.export.Dim.AUTO for i, size in enumerate(leaf.shape) if size > 1}
        for number, leaf in enumerate(pytree.tree_leaves((args, kwargs)))
        if isinstance(leaf, torch.Tensor)
    }
    return dynamic_shapes(module, args, kwargs, symbolic) if symbolic else None


def _described(
    stage: StagedModule,
    program: ExportedProgram,
    seen: Observation,
    leaves: list[Any],
    needs_grad: bool,
) -> CapturedGraph:
    inputs, constants = describe_inputs(stage.module, program, leaves, needs_grad)
    spec = program.call_spec
    assumptions = Assumptions(
        training=stage.module.training,
        constants={i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)},
        aliases=find_aliases(stage.module),
        values=seen.values,
        outside=seen.outside,
        foreign=seen.foreign,
        asks=seen.asks,
    )
    return CapturedGraph(
        program=program,
        inputs=inputs,
        outputs=(),
        noise=(),
        constant_tensors=constants,
        convention=CallingConvention(in_spec=spec.in_spec, out_spec=spec.out_spec),
        assumptions=assumptions,
        outside=stage.outside,
    )
